//! A coordinator of the caller's own, at the place that an endpoint names.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _, UdpSocket};

use crate::coordinator::{Config, Coordinator, StartError};
use crate::session;

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Not `host:port`, or a host with no address.
    #[error("{endpoint:?}: {why}")]
    Endpoint {
        /// What was given.
        endpoint: String,
        /// What is wrong with it.
        why: String,
    },
    /// Other hosts could reach it, and it would let anybody in.
    #[error(
        "{address} can be reached from other hosts: give a token (PODRING_TOKEN_FILE) or certificates (PODRING_TLS_*), \
         or say that it may be open to everybody (PODRING_INSECURE=1)"
    )]
    Open {
        /// Where it would have listened.
        address: SocketAddr,
    },
    /// It can't start.
    #[error(transparent)]
    Start(#[from] StartError),
}

/// Starts a coordinator at `endpoint` (`host:port`; port 0 takes a free one), on the addresses of that name which are
/// this host's, or on all if none is. `config.bind` is not looked at. `Ok(None)`: somebody listens there already.
pub fn serve(endpoint: &str, config: Config, insecure: bool) -> Result<Option<Coordinator>, ServeError> {
    let bad = |why: String| ServeError::Endpoint { endpoint: endpoint.to_owned(), why };
    let (host, port) = session::split_any(endpoint).ok_or_else(|| bad("expected host:port".to_owned()))?;
    let mut addresses: Vec<SocketAddr> =
        (host, port).to_socket_addrs().map_err(|error| bad(error.to_string()))?.filter(local).collect();
    addresses.sort_unstable();
    addresses.dedup();
    if addresses.is_empty() {
        let all = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
        addresses.push(if local(&all) { all } else { (Ipv4Addr::UNSPECIFIED, port).into() });
    }
    if port == 0 {
        // Each address would get a port of its own.
        addresses.truncate(1);
    }
    if !insecure
        && config.token.is_none()
        && config.tls.is_none()
        && let Some(address) = addresses.iter().find(|address| !address.ip().is_loopback())
    {
        return Err(ServeError::Open { address: *address });
    }
    match Coordinator::start(Config { bind: addresses, ..config }) {
        Ok(coordinator) => Ok(Some(coordinator)),
        Err(StartError::Bind { taken: true, .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// `host:port` with another port.
pub fn with_port(endpoint: &str, port: u16) -> String {
    let host = session::split_any(endpoint).map_or(endpoint, |(host, _)| host);
    format!("{}:{port}", session::bracketed(host))
}

/// Whether an address is this host's.
fn local(address: &SocketAddr) -> bool {
    UdpSocket::bind((address.ip(), 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn served_once_and_only_openly_if_told() {
        let first = serve("127.0.0.1:0", Config::default(), false).unwrap().unwrap();
        let port = first.addresses()[0].port();
        let again = with_port("127.0.0.1:0", port);
        assert!(serve(&again, Config::default(), false).unwrap().is_none());
        first.stop();
        assert!(serve(&again, Config::default(), false).unwrap().is_some());
        let open = serve("0.0.0.0:0", Config::default(), false).err().unwrap();
        assert!(matches!(open, ServeError::Open { .. }), "{open}");
        assert!(serve("0.0.0.0:0", Config::default(), true).unwrap().is_some());
        for bad in ["localhost", "no.such.host.invalid:1", ":1"] {
            let error = serve(bad, Config::default(), false).err().unwrap();
            assert!(matches!(error, ServeError::Endpoint { .. }), "{error}");
        }
        assert_eq!(with_port("[::1]:0", 5), "[::1]:5");
    }
}
