//! The process's one small tokio runtime: coordinator and sessions share it.

use std::future::Future;
use std::io;
use std::sync::OnceLock;

use tokio::runtime::{Builder, Handle, Runtime};

static RUNTIME: OnceLock<(u32, Runtime)> = OnceLock::new();

/// The runtime's handle. An error in a forked child, whose runtime has no threads.
pub(crate) fn handle() -> io::Result<Handle> {
    let me = std::process::id();
    if RUNTIME.get().is_none() {
        let runtime = Builder::new_multi_thread().worker_threads(2).thread_name("podring-rdzv").enable_all().build()?;
        let _ = RUNTIME.set((me, runtime));
    }
    match RUNTIME.get() {
        Some((owner, runtime)) if *owner == me => Ok(runtime.handle().clone()),
        Some((owner, _)) => Err(io::Error::other(format!("forked from process {owner}, which holds the sessions"))),
        None => Err(io::Error::other("no runtime")),
    }
}

/// Waits for a future from a thread that isn't the runtime's.
pub(crate) fn block_on<F: Future>(future: F) -> io::Result<F::Output> {
    Ok(handle()?.block_on(future))
}
