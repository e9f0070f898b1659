//! The coordinator: one per job, inside rank 0 or on its own (`podring coordinator`).

mod guard;
mod journal;
mod resident;
mod service;
mod state;
pub(crate) mod stream;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use podring_fork::Marked;
use podring_proto::rendezvous_server::RendezvousServer;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

use crate::decide::keyvalue::{self, KeyValue};
use crate::decide::roster::{self, AgentId, Roster};
use crate::runtime;
use crate::secret::{BadCredential, Tls, Token};
use guard::{Doors, Stop};
pub use journal::BadState;
use journal::Journal;
pub(crate) use resident::Resident;
use service::Service;
use state::Shared;
use stream::Calls;

/// Connections that wait to be accepted. The usual queue, of 128, overflows when all hosts of a large job come at once;
/// each that it drops tries again a second later, then two, then four. The system's own limit holds too.
const BACKLOG: i32 = 4096;

/// How a coordinator is to be.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to listen; port 0 takes a free one. `[::]` takes IPv4 too.
    pub bind: Vec<SocketAddr>,
    /// What every call must carry, if anything.
    pub token: Option<Token>,
    /// Certificates, if connections are to be encrypted and both sides to show one.
    pub tls: Option<Tls>,
    /// A host that isn't heard for so long is lost.
    pub silence: Duration,
    /// Where the store is kept, so that it survives the coordinator.
    pub state_dir: Option<PathBuf>,
    /// Connections at a time; one more is closed.
    pub connections: usize,
    /// Calls at a time of one connection; one more waits.
    pub calls: u32,
    /// Bytes of a message; the call of a longer one fails.
    pub message_bytes: usize,
    /// Of the store.
    pub store: keyvalue::Limits,
    /// Of the membership.
    pub roster: roster::Limits,
    /// Losses are warnings: whoever reads this process's messages learns of them by no exception.
    pub aloud: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            bind: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
            token: None,
            tls: None,
            silence: Duration::from_secs(10),
            state_dir: None,
            connections: 8192,
            calls: 4096,
            message_bytes: 64 << 20,
            store: keyvalue::Limits::default(),
            roster: roster::Limits::default(),
            aloud: false,
        }
    }
}

/// A coordinator that can't start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address can't be listened on.
    #[error("can't listen on {address}: {why}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// Whether somebody else listens there.
        taken: bool,
        /// The system's words.
        why: String,
    },
    /// A certificate or token can't be used.
    #[error(transparent)]
    Credential(#[from] BadCredential),
    /// Certificates don't make a TLS configuration.
    #[error("certificates refused: {why}")]
    Tls {
        /// The library's words.
        why: String,
    },
    /// The journal can't be used.
    #[error(transparent)]
    State(#[from] BadState),
    /// Threads, randomness.
    #[error("{what}: {why}")]
    System {
        /// What was wanted.
        what: &'static str,
        /// The system's words.
        why: String,
    },
}

/// A running coordinator. Stops when dropped: connections are closed at once, as if the process had died.
pub struct Coordinator {
    addresses: Vec<SocketAddr>,
    instance: u64,
    shared: Arc<Shared>,
    stop: Stop,
    tasks: Vec<JoinHandle<()>>,
    streams: Option<thread::JoinHandle<()>>,
}

impl Coordinator {
    /// Listens and serves from now on, on the process's runtime.
    pub fn start(config: Config) -> Result<Coordinator, StartError> {
        let system = |what| move |error: std::io::Error| StartError::System { what, why: error.to_string() };
        let handle = runtime::handle().map_err(system("runtime"))?;
        let _entered = handle.enter();
        let instance = journal::fresh_instance().map_err(system("randomness"))?;
        let mut store = KeyValue::new(config.store);
        let (journal, instance, epoch) = match &config.state_dir {
            Some(dir) => {
                let (journal, restored) = Journal::open(dir, instance, &mut store)?;
                (Some(journal), restored.instance, restored.epoch)
            }
            None => (None, instance, 0),
        };
        let roster = Roster::new(config.roster, config.silence, epoch);
        let shared = Shared::new(instance, config.silence, config.message_bytes, roster, store, journal, config.aloud);

        // Healthy peers answer a ping every half silence; twice the silence with none is a dead connection, or one
        // that never spoke our protocol.
        let mut server = Server::builder()
            .http2_keepalive_interval(Some(config.silence / 2))
            .http2_keepalive_timeout(Some(config.silence))
            .max_concurrent_streams(config.calls)
            .initial_stream_window_size(1 << 20)
            .initial_connection_window_size(4 << 20)
            .http2_max_header_list_size(64 << 10);
        if let Some(tls) = &config.tls {
            let pem = tls.read()?;
            let tls = ServerTlsConfig::new()
                .identity(Identity::from_pem(pem.cert, pem.key))
                .client_ca_root(Certificate::from_pem(pem.ca))
                .timeout(config.silence);
            server = server.tls_config(tls).map_err(|error| StartError::Tls { why: crate::chain(&error) })?;
        }
        let (stop, seats) = (Stop::default(), Arc::new(Semaphore::new(config.connections)));
        let (tx, rx) = mpsc::channel(64);
        let (mut addresses, mut tasks) = (Vec::new(), Vec::new());
        let mut listeners = Vec::new();
        for address in &config.bind {
            let bind = |error: std::io::Error| {
                let taken = error.kind() == std::io::ErrorKind::AddrInUse;
                StartError::Bind { address: *address, taken, why: error.to_string() }
            };
            let (listener, bound) = podring_listen::listener(*address, BACKLOG).map_err(|errno| bind(errno.into()))?;
            addresses.push(bound);
            listeners.push(tokio::net::TcpListener::from_std(listener.into()).map_err(bind)?);
        }
        // What a TLS library would have to be asked for first goes the long way.
        let streams = if config.tls.is_none() {
            let calls = Calls::new(Arc::clone(&shared), config.token.clone());
            Some(calls.start(&addresses, Arc::clone(&seats), stop.clone()).map_err(system("store thread"))?)
        } else {
            None
        };
        let (callers, streams) = streams.map(|streams| (streams.callers, streams.thread)).unzip();
        let doors = Doors { stop: stop.clone(), idle: 2 * config.silence, calls: tx, streams: callers };
        for listener in listeners {
            let listener = (Marked::new(&listener), listener);
            tasks.push(handle.spawn(guard::accept(listener, Arc::clone(&seats), doors.clone())));
        }
        drop(doors);
        let service = RendezvousServer::new(Service(Arc::clone(&shared)))
            .max_decoding_message_size(config.message_bytes)
            .max_encoding_message_size(config.message_bytes);
        let token = config.token;
        let service = InterceptedService::new(service, move |request| service::admit(request, token.as_ref()));
        let serve = server.add_service(service).serve_with_incoming(ReceiverStream::new(rx));
        tasks.push(handle.spawn(async move {
            if let Err(error) = serve.await {
                tracing::error!(error = crate::chain(&error), "the coordinator ended");
            }
        }));
        tasks.push(handle.spawn(Arc::clone(&shared).tick()));
        Ok(Coordinator { addresses, instance, shared, stop, tasks, streams })
    }

    /// Where it listens, in the order of [`Config::bind`].
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Names the life of its store.
    pub fn instance(&self) -> u64 {
        self.instance
    }

    /// A place for the agent of this very process, with no connection between.
    pub(crate) fn resident(&self, agent: AgentId) -> Resident {
        Resident { shared: Arc::clone(&self.shared), agent }
    }

    /// Tells every agent that the coordinator ends in order, and waits until they have left, for at most `limit`.
    pub(crate) fn close(self, limit: Duration) {
        let end = std::time::Instant::now() + limit;
        let left = |state: &mut state::State, _| state.lines.is_empty();
        self.shared.with(|state, _| state.close());
        while !self.shared.with(left) && std::time::Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.stop();
    }

    /// Closes all connections and the port.
    pub fn stop(mut self) {
        self.end();
        if let Ok(handle) = runtime::handle() {
            // The journal's lock and the port are free when this returns; bounded, should a task be stuck.
            for task in self.tasks.drain(..) {
                let _ = handle.block_on(async { tokio::time::timeout(Duration::from_secs(1), task).await });
            }
        }
        if let Some(streams) = self.streams.take() {
            let _ = streams.join();
        }
    }

    fn end(&self) {
        self.stop.set();
        self.tasks.iter().for_each(JoinHandle::abort);
        self.shared.close();
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.end();
    }
}
