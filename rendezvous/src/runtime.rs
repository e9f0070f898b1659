//! The process's one small tokio runtime: coordinator and sessions share it.

use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicPtr, Ordering};

use podring_fork as fork;
use tokio::runtime::{Builder, Handle, Runtime};

struct Made {
    generation: u32,
    runtime: Runtime,
}

/// The last one made. A forked child, whose copy has no threads, makes its own; its parent's is left alone.
static MADE: AtomicPtr<Made> = AtomicPtr::new(std::ptr::null_mut());

/// The runtime's handle.
pub(crate) fn handle() -> io::Result<Handle> {
    fork::install();
    let mut known = MADE.load(Ordering::Acquire);
    loop {
        // SAFETY: set to leaked boxes only, never freed.
        if let Some(made) = unsafe { known.as_ref() }.filter(|made| made.generation == fork::generation()) {
            return Ok(made.runtime.handle().clone());
        }
        let runtime = Builder::new_multi_thread().worker_threads(2).thread_name("podring-rdzv").enable_all().build()?;
        let made = Box::into_raw(Box::new(Made { generation: fork::generation(), runtime }));
        match MADE.compare_exchange(known, made, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => known = made,
            Err(other) => {
                // SAFETY: just made here, and nobody else has seen it.
                unsafe { Box::from_raw(made) }.runtime.shutdown_background();
                known = other;
            }
        }
    }
}

/// Waits for a future from a thread that isn't the runtime's.
pub(crate) fn block_on<F: Future>(future: F) -> io::Result<F::Output> {
    Ok(handle()?.block_on(future))
}
