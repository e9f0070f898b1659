//! `podring coordinator`: the rendezvous of a job, as a process of its own. See docs/rendezvous.md.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use podring_rendezvous::coordinator::{Config, Coordinator, StartError};
use podring_rendezvous::secret::{BadCredential, Tls, Token};

use crate::terminal;

const EXAMPLES: &str = "\
Examples:
  podring coordinator --token-file token
  podring coordinator --bind '[::]:29400' --token-file token --tls-cert c.pem --tls-key k.pem --tls-ca ca.pem

Prints a line \"listening on ADDRESS\" for each address, then serves until SIGINT or SIGTERM.";

/// Serve the rendezvous of a job: membership, key-value store, barriers
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Where to listen, once or more; port 0 takes a free one, [::] takes IPv4 too
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0")]
    bind: Vec<SocketAddr>,
    /// File with the job's token, which every call must then carry
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// This side's certificate chain (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
    tls_cert: Option<PathBuf>,
    /// Its private key (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_ca"])]
    tls_key: Option<PathBuf>,
    /// Who must have signed the other side's certificate (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_key"])]
    tls_ca: Option<PathBuf>,
    /// Keep the key-value store here, so that it survives a restart
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Seconds without a sign of life after which a host is lost
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "10")]
    silence: Duration,
    /// Serve beyond this host with neither token nor certificates
    #[arg(long)]
    insecure: bool,
}

/// Why there is no coordinator.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{address} can be reached from other hosts: give --token-file or --tls-*, or --insecure")]
    Open { address: SocketAddr },
    #[error(transparent)]
    Token(#[from] BadCredential),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("signals: {0}")]
    Signals(std::io::Error),
}

/// Serves until a signal ends it.
pub(crate) fn run(args: Args) -> Result<i32, Error> {
    let Args { bind, token_file, tls_cert, tls_key, tls_ca, state_dir, silence, insecure } = args;
    let token = token_file.map(|path| Token::from_file(&path)).transpose()?;
    let tls = match (tls_cert, tls_key, tls_ca) {
        (Some(cert), Some(key), Some(ca)) => Some(Tls { ca, cert, key }),
        _ => None,
    };
    if !insecure
        && token.is_none()
        && tls.is_none()
        && let Some(address) = bind.iter().find(|address| !address.ip().is_loopback())
    {
        return Err(Error::Open { address: *address });
    }
    // Before the coordinator's threads begin, which inherit this: the signals wait for this thread.
    let signals = Signals::block().map_err(Error::Signals)?;
    raise_descriptors();
    let coordinator =
        Coordinator::start(Config { bind, token, tls, silence, state_dir, aloud: true, ..Config::default() })?;
    for address in coordinator.addresses() {
        terminal::out(&format!("listening on {address}"));
    }
    let signal = signals.wait().map_err(Error::Signals)?;
    coordinator.stop();
    terminal::err(&format!("podring: signal {signal}, stopped"));
    Ok(0)
}

/// As many descriptors as this process may have: a connection is one, and the usual limit is 1024.
pub(crate) fn raise_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number"))?;
    if !(0.1..=86_400.0).contains(&seconds) {
        return Err(format!("{text} is not between 0.1 and 86400"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// SIGINT and SIGTERM, blocked so that they can be waited for.
struct Signals(libc::sigset_t);

impl Signals {
    fn block() -> std::io::Result<Signals> {
        // SAFETY: sigemptyset initialises the set before it is read; the others only read or change a valid set.
        let (set, code) = unsafe {
            let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
            libc::sigemptyset(set.as_mut_ptr());
            let mut set = set.assume_init();
            libc::sigaddset(&mut set, libc::SIGINT);
            libc::sigaddset(&mut set, libc::SIGTERM);
            let code = libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            (set, code)
        };
        if code != 0 { Err(std::io::Error::from_raw_os_error(code)) } else { Ok(Signals(set)) }
    }

    fn wait(&self) -> std::io::Result<i32> {
        let mut signal = 0;
        // SAFETY: both point to valid values that outlive the call.
        match unsafe { libc::sigwait(&self.0, &mut signal) } {
            0 => Ok(signal),
            code => Err(std::io::Error::from_raw_os_error(code)),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parse(args: &[&str]) -> Result<Args, clap::Error> {
        Cli::try_parse_from(std::iter::once(&"podring").chain(args)).map(|cli| cli.args)
    }

    #[test]
    fn certificates_come_as_three() {
        for args in [&["--tls-cert", "c"][..], &["--tls-key", "k", "--tls-ca", "ca"], &["--tls-ca", "ca"]] {
            assert!(parse(args).is_err(), "{args:?}");
        }
        assert!(parse(&["--tls-cert", "c", "--tls-key", "k", "--tls-ca", "ca"]).is_ok());
        assert!(parse(&["--bind", "localhost:1"]).is_err());
        assert!(parse(&["--silence", "0"]).is_err());
    }

    #[test]
    fn what_other_hosts_reach_wants_a_secret() {
        let error = run(parse(&["--bind", "[::]:0"]).unwrap()).unwrap_err();
        assert!(matches!(error, Error::Open { .. }), "{error}");
        let error = run(parse(&["--token-file", "/nonexistent"]).unwrap()).unwrap_err();
        assert!(error.to_string().contains("/nonexistent"), "{error}");
    }
}
