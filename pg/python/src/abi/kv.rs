//! The C functions over the coordinator's key-value store: the `kv_*` part of `pg/torch/podring.h`.

use std::ffi::{c_char, c_void};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use podring_rendezvous::coordinator::{Config, Coordinator, StartError};
use podring_rendezvous::refusal::Refusal;
use podring_rendezvous::secret::{BadCredential, Tls, Token};
use podring_rendezvous::serve::{self, ServeError};
use podring_rendezvous::session::{Access, Asks, Error, Store};

use super::{Interrupted, RawError, optional_text, shielded, text, write_error};

// PodringStatus.
const INVALID: i32 = 1;
const STORE: i32 = 7;
const NETWORK: i32 = 8;
const INTERRUPTED: i32 = 10;
const QUEUE_EMPTY: i32 = 11;

/// PODRING_KV_INSECURE.
const INSECURE: u32 = 1;
/// What a call may take beyond the time it waits by intention: the store's own timeout, within these.
const ANSWER: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// As long as it takes: the protocol has no more.
const EVER: Duration = Duration::from_millis(u32::MAX as u64);
/// How long rank 0 tries to reach somebody else's coordinator at its own address before it looks whether the port is free.
const TURN: Duration = Duration::from_secs(1);

#[repr(C)]
pub(crate) struct RawConfig {
    endpoint: *const c_char,
    serve: u32,
    flags: u32,
    token: *const c_char,
    token_file: *const c_char,
    tls_ca: *const c_char,
    tls_cert: *const c_char,
    tls_key: *const c_char,
    server_name: *const c_char,
    state_dir: *const c_char,
    timeout_ms: i64,
    interrupted: Interrupted,
    interrupted_ctx: *mut c_void,
}

#[repr(C)]
pub(crate) struct RawBytes {
    data: *const u8,
    len: usize,
}

#[repr(C)]
pub(crate) struct RawCall {
    op: u32,
    n_keys: u32,
    n_values: u32,
    keys: *const RawBytes,
    values: *const RawBytes,
    number: i64,
    timeout_ms: i64,
    patience_ms: i64,
    interrupted: Interrupted,
    interrupted_ctx: *mut c_void,
    sink: unsafe extern "C" fn(*mut c_void, *const u8, usize),
    sink_ctx: *mut c_void,
}

#[repr(C)]
pub(crate) struct RawInfo {
    instance: u64,
    port: u32,
    serves: u32,
}

/// A client of a store, and the coordinator if it is this process's.
#[derive(Clone)]
pub(crate) struct Kv {
    store: Store,
    port: u16,
    serves: Option<Arc<Own>>,
}

/// Ends with the last client of this process.
struct Own(Option<Coordinator>, u32);

impl Drop for Own {
    fn drop(&mut self) {
        // A forked child has a copy of it and none of its threads: not the child's to end.
        if self.1 != std::process::id() {
            std::mem::forget(self.0.take());
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Session(#[from] Error),
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error(transparent)]
    Credential(#[from] BadCredential),
    #[error("{0} is in use, and nobody was to be there")]
    Taken(String),
    #[error("{what}: {got}")]
    Invalid { what: &'static str, got: String },
    #[error("{call}: queue {key:?} is empty")]
    Empty { call: &'static str, key: String },
}

impl Failed {
    fn status(&self) -> i32 {
        match self {
            Failed::Session(error) => match error {
                Error::Refused { refusal: Refusal::Invalid { .. }, .. } | Error::Credential(_) => INVALID,
                Error::Interrupted { .. } => INTERRUPTED,
                Error::Refused { .. } | Error::Timeout { .. } | Error::Late(_) => STORE,
                Error::Absent { .. }
                | Error::NotPodring { .. }
                | Error::Silent { .. }
                | Error::Certificate { .. }
                | Error::Closed { .. }
                | Error::CoordinatorLost { .. }
                | Error::System { .. } => NETWORK,
            },
            Failed::Serve(ServeError::Start(StartError::Bind { .. } | StartError::System { .. })) => NETWORK,
            Failed::Taken(_) => NETWORK,
            Failed::Serve(_) | Failed::Credential(_) | Failed::Invalid { .. } => INVALID,
            Failed::Empty { .. } => QUEUE_EMPTY,
        }
    }
}

fn guarded(error: *mut RawError, act: impl FnOnce() -> Result<(), Failed>) -> i32 {
    shielded(error, || match act() {
        Ok(()) => 0,
        Err(failed) => write_error(error, failed.status(), &failed.to_string()),
    })
}

/// The caller's question as the core asks it.
struct Question(unsafe extern "C" fn(*mut c_void) -> i32, *mut c_void);

// SAFETY: asked on the calling thread only, while the call lasts: no store keeps it longer.
unsafe impl Send for Question {}
// SAFETY: as above.
unsafe impl Sync for Question {}

fn asks(interrupted: Interrupted, ctx: *mut c_void) -> Option<Asks> {
    let question = Question(interrupted?, ctx);
    Some(Arc::new(move || {
        let Question(ask, ctx) = &question;
        // SAFETY: the header lets the core call it while it waits.
        unsafe { ask(*ctx) != 0 }
    }))
}

/// Not positive: for ever.
fn wait(ms: i64) -> Duration {
    u64::try_from(ms).ok().filter(|ms| *ms > 0).map_or(EVER, |ms| Duration::from_millis(ms).min(EVER))
}

pub(crate) unsafe extern "C" fn open(raw: *const RawConfig, out: *mut *mut Kv, error: *mut RawError) -> i32 {
    guarded(error, || {
        crate::log::begin();
        // SAFETY: a valid config by the header.
        let raw = unsafe { &*raw };
        let kv = open_config(raw)?;
        // SAFETY: the caller's place for the handle.
        unsafe { out.write(Box::into_raw(Box::new(kv))) };
        Ok(())
    })
}

fn open_config(raw: &RawConfig) -> Result<Kv, Failed> {
    let mut endpoint = text(raw.endpoint);
    let path = |pointer| optional_text(pointer).map(PathBuf::from);
    let token = match (optional_text(raw.token), path(raw.token_file)) {
        (Some(token), _) => Some(Token::new(&token)?),
        (None, Some(path)) => Some(Token::from_file(&path)?),
        (None, None) => None,
    };
    let tls = match (path(raw.tls_ca), path(raw.tls_cert), path(raw.tls_key)) {
        (Some(ca), Some(cert), Some(key)) => Some(Tls { ca, cert, key }),
        (None, None, None) => None,
        (ca, cert, key) => {
            let got = [("CA", ca), ("certificate", cert), ("key", key)];
            let got: Vec<&str> = got.iter().filter(|(_, path)| path.is_some()).map(|(name, _)| *name).collect();
            let got = format!("expected CA, certificate and key, got {}", got.join(" and "));
            return Err(Failed::Invalid { what: "certificates", got });
        }
    };
    let server_name = optional_text(raw.server_name);
    let (limit, since) = (wait(raw.timeout_ms), Instant::now());
    let mut serves = None;
    let (store, endpoint) = loop {
        if raw.serve != 0 {
            let (token, tls, state_dir) = (token.clone(), tls.clone(), path(raw.state_dir));
            let config = Config { token, tls, state_dir, ..Config::default() };
            match serve::serve(&endpoint, config, raw.flags & INSECURE != 0)? {
                Some(coordinator) => {
                    let port = coordinator.addresses().first().map_or(0, std::net::SocketAddr::port);
                    endpoint = serve::with_port(&endpoint, port);
                    serves = Some(Arc::new(Own(Some(coordinator), std::process::id())));
                }
                None if raw.serve == 1 => return Err(Failed::Taken(endpoint)),
                None => {}
            }
        }
        let left = limit.saturating_sub(since.elapsed());
        // Whoever has the port may be on its way out, such as the coordinator of the job before: then it is this
        // process's turn after all, and everybody else waits for it.
        let shared = raw.serve > 1 && serves.is_none() && left > TURN;
        let (token, tls, server_name) = (token.clone(), tls.clone(), server_name.clone());
        let timeout = if shared { TURN } else { left };
        let access = Access { token, tls, server_name, timeout, ..Access::new(endpoint.clone()) };
        match Store::connect_asking(&access, asks(raw.interrupted, raw.interrupted_ctx)) {
            Ok(store) => break (store, endpoint),
            Err(
                Error::Absent { .. }
                | Error::Silent { .. }
                | Error::CoordinatorLost { .. }
                | Error::NotPodring { closed: true, .. },
            ) if shared => {}
            Err(error) => return Err(error.into()),
        }
    };
    let port = endpoint.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(0);
    // The question is the call's; the store outlives it.
    Ok(Kv { store: store.patient(ANSWER.1, None), port, serves })
}

/// The client behind a handle.
///
/// # Safety
/// A handle from `kv_open` or `kv_clone` that wasn't freed.
unsafe fn kv<'a>(handle: *const Kv) -> &'a Kv {
    // SAFETY: promised by the caller.
    unsafe { &*handle }
}

pub(crate) unsafe extern "C" fn clone(handle: *const Kv) -> *mut Kv {
    // SAFETY: a live handle by the header.
    Box::into_raw(Box::new(unsafe { kv(handle) }.clone()))
}

pub(crate) unsafe extern "C" fn free(handle: *mut Kv) {
    if !handle.is_null() {
        shielded(std::ptr::null_mut(), || {
            // SAFETY: made by `kv_open` or `kv_clone`, freed once.
            drop(unsafe { Box::from_raw(handle) });
            0
        });
    }
}

pub(crate) unsafe extern "C" fn info(handle: *const Kv, out: *mut RawInfo) {
    // SAFETY: a live handle, and a place for the answer, by the header.
    unsafe {
        let Kv { store, port, serves } = kv(handle);
        out.write(RawInfo { instance: store.instance(), port: (*port).into(), serves: serves.is_some().into() });
    }
}

/// # Safety
/// `count` valid entries.
unsafe fn bytes<'a>(from: *const RawBytes, count: u32) -> Vec<&'a [u8]> {
    let one = |index: usize| {
        // SAFETY: promised by the caller.
        let raw = unsafe { &*from.add(index) };
        // SAFETY: as above; an empty one may have no address.
        if raw.len == 0 { &[][..] } else { unsafe { std::slice::from_raw_parts(raw.data, raw.len) } }
    };
    (0..count as usize).map(one).collect()
}

pub(crate) unsafe extern "C" fn call(
    handle: *const Kv,
    raw: *const RawCall,
    number: *mut i64,
    error: *mut RawError,
) -> i32 {
    guarded(error, || {
        // SAFETY: a live handle, a valid call and a place for the number, by the header.
        let (kv, raw, number) = unsafe { (kv(handle), &*raw, &mut *number) };
        // SAFETY: `n_keys` keys and `n_values` values by the header.
        let (keys, values) = unsafe { (bytes(raw.keys, raw.n_keys), bytes(raw.values, raw.n_values)) };
        let patience = wait(raw.patience_ms).clamp(ANSWER.0, ANSWER.1);
        let store = kv.store.patient(patience, asks(raw.interrupted, raw.interrupted_ctx));
        let sink = |value: &[u8]| {
            // SAFETY: the caller's, for the duration of this call.
            unsafe { (raw.sink)(raw.sink_ctx, value.as_ptr(), value.len()) }
        };
        perform(&store, raw, &keys, &values, number, sink)
    })
}

fn perform(
    store: &Store,
    raw: &RawCall,
    keys: &[&[u8]],
    values: &[&[u8]],
    number: &mut i64,
    sink: impl Fn(&[u8]),
) -> Result<(), Failed> {
    let key = |index: usize| -> Result<&str, Failed> {
        let bytes = keys.get(index).copied().ok_or(Failed::Invalid { what: "keys", got: "none".to_owned() })?;
        std::str::from_utf8(bytes).map_err(|_| {
            let got = format!("{:?} is not UTF-8", String::from_utf8_lossy(bytes));
            Failed::Invalid { what: "key", got }
        })
    };
    let all = || (0..keys.len()).map(|index| key(index).map(str::to_owned)).collect::<Result<Vec<_>, _>>();
    let borrowed = || (0..keys.len()).map(key).collect::<Result<Vec<&str>, _>>();
    let value = |index: usize| -> Result<&[u8], Failed> {
        values.get(index).copied().ok_or(Failed::Invalid { what: "values", got: "too few".to_owned() })
    };
    let timeout = wait(raw.timeout_ms);
    match raw.op {
        0 => store.set(key(0)?, value(0)?)?,
        1 => sink(&store.get(key(0)?, timeout)?),
        2 => store.wait(&borrowed()?, timeout)?,
        3 => *number = store.check(&all()?)?.into(),
        4 => *number = store.add(key(0)?, raw.number)?,
        5 => sink(&store.compare_set(key(0)?, value(0)?, value(1)?)?),
        6 => store.append(key(0)?, value(0)?)?,
        7 => *number = store.delete(key(0)?)?.into(),
        8 => store.multi_get_each(&borrowed()?, timeout, |value| sink(value))?,
        9 => store.multi_set(&borrowed()?, values)?,
        10 => store.queue_push(key(0)?, value(0)?)?,
        11 => {
            let block = raw.number != 0;
            let popped = store.queue_pop(key(0)?, if block { timeout } else { Duration::ZERO });
            match popped {
                Err(Error::Refused { call, refusal: Refusal::KeysMissing { .. } }) if !block => {
                    return Err(Failed::Empty { call, key: key(0)?.to_owned() });
                }
                popped => sink(&popped?),
            }
        }
        12 => *number = store.queue_len(key(0)?)?,
        13 => *number = store.num_keys()?,
        14 => store.list_keys("")?.iter().for_each(|key| sink(key.as_bytes())),
        other => return Err(Failed::Invalid { what: "operation", got: format!("expected 0 to 14, got {other}") }),
    }
    Ok(())
}
