//! A connection to the coordinator.

use std::error::Error as StdError;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use podring_proto as pb;
use podring_proto::rendezvous_client::RendezvousClient;
use rustix::net::sockopt::set_socket_linger;
use rustix::net::{getpeername, getsockname};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Uri};
use tonic::{Request, Status};

use super::error::Error;
use super::sockets::Sockets;
use crate::chain;
use crate::refusal::Refusal;
use crate::secret::{Tls, Token};
use crate::wire;

/// How to reach the coordinator.
#[derive(Clone, Debug)]
pub struct Access {
    /// `host:port`, IPv6 literals in brackets. Several name the same coordinator; the first that answers is used.
    pub endpoints: Vec<String>,
    /// The job's token, if it has one.
    pub token: Option<Token>,
    /// Certificates, if the coordinator uses TLS.
    pub tls: Option<Tls>,
    /// The name in the coordinator's certificate, if it isn't the endpoint's host.
    pub server_name: Option<String>,
    /// How long to try.
    pub timeout: Duration,
    /// How long a session tries to reach a coordinator that it has lost. `None`: for the coordinator's silence.
    pub patience: Option<Duration>,
    /// Bytes of a message.
    pub message_bytes: usize,
}

impl Access {
    /// Without token and TLS; 60 s to connect.
    pub fn new(endpoint: impl Into<String>) -> Self {
        Access {
            endpoints: vec![endpoint.into()],
            token: None,
            tls: None,
            server_name: None,
            timeout: Duration::from_secs(60),
            patience: None,
            message_bytes: 64 << 20,
        }
    }

    pub(super) fn name(&self) -> String {
        self.endpoints.join(", ")
    }
}

/// Adds what every call must carry.
#[derive(Clone, Default)]
pub(super) struct Credentials(Option<Token>);

impl Interceptor for Credentials {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let metadata = request.metadata_mut();
        metadata.insert(wire::VERSION_KEY, tonic::metadata::MetadataValue::from_static(wire::VERSION));
        if let Some(token) = &self.0 {
            metadata.insert("authorization", token.header());
        }
        Ok(request)
    }
}

pub(super) type Client = RendezvousClient<InterceptedService<Channel, Credentials>>;

/// A coordinator that takes our token and version.
#[derive(Clone)]
pub(crate) struct Connection {
    pub(super) client: Client,
    pub(super) sockets: Sockets,
    pub(super) endpoint: Arc<str>,
    pub(super) instance: u64,
    pub(super) silence: Duration,
}

/// Host and port of `host:port`; brackets around an IPv6 literal are taken off.
pub(crate) fn split(endpoint: &str) -> Option<(&str, u16)> {
    split_any(endpoint).filter(|(_, port)| *port != 0)
}

/// The same, where port 0 stands for a free one.
pub(crate) fn split_any(endpoint: &str) -> Option<(&str, u16)> {
    let (host, port) = endpoint.rsplit_once(':')?;
    let port = port.parse().ok()?;
    let host = match host.strip_prefix('[') {
        Some(host) => host.strip_suffix(']')?,
        None if host.contains(':') => return None,
        None => host,
    };
    (!host.is_empty()).then_some((host, port))
}

/// Connects to the first address that answers, all of them at once: a dead one must not hold up the others.
async fn dial(endpoints: &[String]) -> io::Result<TcpStream> {
    let mut why = Vec::new();
    let mut addresses: Vec<SocketAddr> = Vec::new();
    for endpoint in endpoints {
        let Some((host, port)) = split(endpoint) else {
            why.push(format!("{endpoint:?} is not host:port"));
            continue;
        };
        match tokio::net::lookup_host((host, port)).await {
            Ok(found) => addresses.extend(found),
            Err(error) => why.push(format!("{host}: {error}")),
        }
    }
    addresses.dedup();
    let mut dials = JoinSet::new();
    for address in addresses {
        dials.spawn(async move {
            let stream = TcpStream::connect(address).await;
            (address, stream.and_then(|stream| to_another(&stream).map(|()| stream)))
        });
    }
    while let Some(dialed) = dials.join_next().await {
        match dialed {
            Ok((_, Ok(stream))) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Ok((address, Err(error))) => why.push(format!("{address}: {error}")),
            Err(error) => why.push(error.to_string()),
        }
    }
    Err(io::Error::new(io::ErrorKind::NotConnected, why.join("; ")))
}

/// Refuses a connection to itself. Who calls a port of its own host that nobody listens on yet may be given that very
/// port to call from, and then has called itself (RFC 9293, 3.5, simultaneous open); and nobody could listen there.
pub(super) fn to_another(stream: impl AsFd) -> io::Result<()> {
    if getpeername(&stream)? != Some(getsockname(&stream)?) {
        return Ok(());
    }
    // Closed in order, the port would still not be free for a minute.
    set_socket_linger(&stream, Some(Duration::ZERO))?;
    Err(io::Error::new(io::ErrorKind::ConnectionRefused, "nobody listens there"))
}

pub(super) fn well_formed(access: &Access) -> Result<(), Error> {
    match access.endpoints.iter().find(|endpoint| split(endpoint).is_none()) {
        None => Ok(()),
        Some(endpoint) => {
            let why = format!("{endpoint:?} is not host:port with a port from 1 to 65535");
            Err(Error::Absent { endpoint: access.name(), waited: Duration::ZERO, why })
        }
    }
}

/// Connects and says hello. A coordinator that isn't there yet is tried again until the time is up; one that is there
/// and says no isn't.
pub(crate) async fn connect(access: &Access) -> Result<Connection, Error> {
    let (began, name) = (Instant::now(), access.name());
    well_formed(access)?;
    let endpoint = endpoint(access)?;
    let mut pause = Duration::from_millis(10);
    let mut before: Option<Attempt> = None;
    loop {
        let (start, left) = (began.elapsed(), access.timeout.saturating_sub(began.elapsed()));
        let mut failed = match attempt(access, &endpoint, &name, left.max(Duration::from_millis(1))).await {
            Ok(connection) => return Ok(connection),
            Err(Attempt::Final(error)) => return Err(error),
            Err(failed) => failed,
        };
        let waited = began.elapsed();
        // A last attempt that had next to no time tells less than the one before it.
        if matches!(failed, Attempt::Cut(_)) && waited - start < access.timeout / 2 {
            failed = before.take().unwrap_or(failed);
        }
        let left = access.timeout.saturating_sub(waited);
        if left.is_zero() {
            return Err(match failed {
                Attempt::Absent(why) => Error::Absent { endpoint: name, waited, why },
                Attempt::Closed(error) | Attempt::Final(error) => error,
                Attempt::Cut(Seen::Open) => Error::Silent { endpoint: name, waited: waited - start },
                Attempt::Cut(Seen::Closed) => {
                    let why = "it closed the connection".to_owned();
                    Error::NotPodring { endpoint: name, why, closed: true }
                }
                Attempt::Cut(Seen::Nothing) => {
                    Error::Absent { endpoint: name, waited, why: "no address answered".to_owned() }
                }
            });
        }
        before = Some(failed);
        sleep(pause.min(left)).await;
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

fn endpoint(access: &Access) -> Result<Endpoint, Error> {
    let (scheme, host) = match (&access.tls, access.endpoints.first().and_then(|first| split(first))) {
        (Some(_), Some((host, port))) => ("https", format!("{}:{port}", bracketed(host))),
        (None, Some((host, port))) => ("http", format!("{}:{port}", bracketed(host))),
        (_, None) => {
            let (endpoint, why) = (access.name(), "no endpoint given".to_owned());
            return Err(Error::Absent { endpoint, waited: Duration::ZERO, why });
        }
    };
    let bad =
        |error: &dyn StdError| Error::Absent { endpoint: access.name(), waited: Duration::ZERO, why: chain(error) };
    let mut endpoint = Endpoint::from_shared(format!("{scheme}://{host}"))
        .map_err(|error| bad(&error))?
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(10))
        .keep_alive_while_idle(true)
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(4 << 20)
        // A refusal with a long list of ranks travels in a header.
        .http2_max_header_list_size(1 << 20);
    if let Some(tls) = &access.tls {
        let pem = tls.read()?;
        let host = access.endpoints.first().and_then(|first| split(first)).map_or("", |(host, _)| host);
        let config = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(pem.ca))
            .identity(Identity::from_pem(pem.cert, pem.key))
            .domain_name(access.server_name.as_deref().unwrap_or(host));
        endpoint = endpoint
            .tls_config(config)
            .map_err(|error| Error::Certificate { endpoint: access.name(), why: chain(&error) })?;
    }
    Ok(endpoint)
}

pub(crate) fn bracketed(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

enum Attempt {
    /// No address took the connection.
    Absent(String),
    /// One took it and closed it: another program, or a coordinator about to end. Time will tell.
    Closed(Error),
    /// The time was up.
    Cut(Seen),
    Final(Error),
}

/// What had become of an attempt's connection.
enum Seen {
    /// No address had taken it.
    Nothing,
    Open,
    Closed,
}

async fn attempt(access: &Access, endpoint: &Endpoint, name: &str, left: Duration) -> Result<Connection, Attempt> {
    // Whether an address took the connection, and what the last one that didn't said.
    let dials: Arc<Mutex<(bool, String)>> = Arc::default();
    let sockets = Sockets::default();
    let (endpoints, note, counted) = (access.endpoints.clone(), Arc::clone(&dials), sockets.clone());
    let connector = tower::service_fn(move |_: Uri| {
        let (endpoints, note, begun) = (endpoints.clone(), Arc::clone(&note), counted.begin());
        async move {
            let dialed = dial(&endpoints).await;
            match &dialed {
                Ok(_) => note.lock().0 = true,
                Err(error) => note.lock().1 = error.to_string(),
            }
            dialed.map(|stream| TokioIo::new(begun.carry(stream)))
        }
    });
    let hello = async {
        let channel = endpoint.connect_with_connector(connector).await.map_err(|error| meaning(name, &error))?;
        let mut client = RendezvousClient::with_interceptor(channel, Credentials(access.token.clone()))
            .max_decoding_message_size(access.message_bytes)
            .max_encoding_message_size(access.message_bytes);
        match sockets.answer(client.hello(pb::HelloRequest {})).await {
            Ok(reply) => Ok((client, reply.into_inner())),
            Err(status) => Err(match wire::refusal(&status) {
                Some(refusal) => Attempt::Final(Error::Refused { call: "hello", refusal }),
                None => meaning(name, &status),
            }),
        }
    };
    let answer = timeout(left, hello).await;
    let (taken, why) = dials.lock().clone();
    match answer {
        Ok(Ok((client, pb::HelloReply { instance, silence_ms, .. }))) => {
            let silence = wire::duration(silence_ms.max(1));
            Ok(Connection { client, sockets, endpoint: name.into(), instance, silence })
        }
        Ok(Err(failed)) if taken => Err(failed),
        Err(_) if taken => Err(Attempt::Cut(if sockets.none() { Seen::Closed } else { Seen::Open })),
        Err(_) if why.is_empty() => Err(Attempt::Cut(Seen::Nothing)),
        Ok(Err(_)) | Err(_) => Err(Attempt::Absent(why)),
    }
}

/// What a failure after the connection was taken means. Libraries below pass some causes on as text only.
fn meaning(endpoint: &str, error: &(dyn StdError + 'static)) -> Attempt {
    const CLOSED: [&str; 6] =
        ["connection closed", "channel closed", "canceled", "broken pipe", "reset", "end of file"];
    let (endpoint, why) = (endpoint.to_owned(), chain(error));
    let text = why.to_lowercase();
    match tls_error(error) {
        // The other side doesn't speak TLS.
        Some(rustls::Error::InvalidMessage(_)) => Attempt::Final(Error::NotPodring { endpoint, why, closed: false }),
        Some(_) => Attempt::Final(Error::Certificate { endpoint, why }),
        // It does, and doesn't take our certificate.
        None if text.contains("received fatal alert") => Attempt::Final(Error::Certificate { endpoint, why }),
        None if CLOSED.iter().any(|words| text.contains(words)) => {
            Attempt::Closed(Error::NotPodring { endpoint, why, closed: true })
        }
        None => Attempt::Final(Error::NotPodring { endpoint, why, closed: false }),
    }
}

fn tls_error<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a rustls::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<rustls::Error>() {
            return Some(found);
        }
        // An io::Error gives the source of what it wraps, never that itself.
        if let Some(inner) = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref)
            && let Some(found) = tls_error(inner)
        {
            return Some(found);
        }
        next = error.source();
    }
    None
}

/// What a failed call means, on a connection that had worked.
pub(super) fn call_error(call: &'static str, endpoint: &str, status: &Status) -> Error {
    match wire::refusal(status) {
        Some(refusal) => Error::Refused { call, refusal },
        // Over the message limit: found out by the library on either side.
        None if matches!(status.code(), tonic::Code::OutOfRange | tonic::Code::ResourceExhausted) => Error::Refused {
            call,
            refusal: Refusal::Invalid { what: "message".to_owned(), got: status.message().to_owned() },
        },
        None => Error::CoordinatorLost { endpoint: endpoint.to_owned(), how: chain(status) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

    #[test]
    fn a_connection_to_itself_is_refused_and_frees_the_port() {
        let own = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&own, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let address = SocketAddr::try_from(getsockname(&own).unwrap()).unwrap();
        connect(&own, &address).unwrap();
        assert_eq!(to_another(&own).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        drop(own);
        let (_listener, there) = podring_listen::listener(address, 1).unwrap();
        to_another(std::net::TcpStream::connect(there).unwrap()).unwrap();
    }

    #[test]
    fn endpoints() {
        for (text, expected) in [
            ("host:1", Some(("host", 1))),
            ("[::1]:29500", Some(("::1", 29500))),
            ("[fe80::1%eth0]:5", Some(("fe80::1%eth0", 5))),
            ("10.0.0.1:65535", Some(("10.0.0.1", 65535))),
            ("::1:29500", None),
            ("host", None),
            ("host:0", None),
            ("host:65536", None),
            (":1", None),
            ("[::1:1", None),
        ] {
            assert_eq!(split(text), expected, "{text}");
        }
    }
}
