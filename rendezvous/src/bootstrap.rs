//! How a rank of a job finds its coordinator: one that a setting names, or one that rank 0 starts and publishes where
//! the launcher lets all ranks look.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::coordinator::{Config, Coordinator, StartError};
use crate::host::{Joining, Role, Seat, SeatError, Wait};
use crate::secret::{BadCredential, Token};
use crate::session::Access;
pub use crate::settings::Settings;
pub use podring_setting::BadSetting;

/// Version of the published record.
const VERSION: u32 = 1;
/// Where it is published. Rank 0 writes it anew each time.
const KEY: &str = "podring/coordinator";
/// Pauses between two looks for the record: the shortest, and the longest of the first half second and of later.
const PAUSES: [Duration; 3] = [Duration::from_micros(100), Duration::from_millis(1), Duration::from_millis(20)];
/// How long a record that was there before this rank came may be an earlier life's: errors with it aren't final.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often a rank that waits looks whether rank 0 has published another coordinator.
const LOOK: Duration = Duration::from_millis(500);
/// How long a session tries to reach a coordinator inside rank 0 that it has lost: such a one isn't restarted.
const INSIDE: Duration = Duration::from_secs(1);

/// Where the launcher lets all ranks read and write, such as c10d's store.
pub trait Board {
    /// Writes a key.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), BoardError>;
    /// Reads a key, if it exists. Doesn't wait.
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BoardError>;
}

/// What the launcher's store said instead of answering.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} of key {key:?}: {why}")]
pub struct BoardError {
    /// The call.
    pub call: &'static str,
    /// Its key.
    pub key: String,
    /// The store's words.
    pub why: String,
}

/// A rank that joins.
pub struct Newcomer<'a> {
    /// Where the launcher lets ranks look.
    pub board: &'a dyn Board,
    /// How the coordinator is reached and trusted.
    pub settings: &'a Settings,
    /// Its number.
    pub rank: u32,
    /// Ranks in the world.
    pub world_size: u32,
    /// How long it waits.
    pub timeout: Duration,
    /// Its host's name, for people.
    pub host: String,
    /// Tells hosts apart: ranks with the same share an agent.
    pub host_id: String,
    /// This machine and network namespace: where loopback means the same.
    pub machine: String,
    /// Where this process may be reached.
    pub addresses: Vec<IpAddr>,
    /// What the others need to know of this rank; opaque here.
    pub detail: Vec<u8>,
    /// The hosts of all ranks in order, where known.
    pub hosts: Vec<String>,
    /// Ranks that the launcher started on this host.
    pub expected: Vec<u32>,
    /// Rank 0's host, where the launcher says so.
    pub first_host: Option<String>,
}

/// A rank that has joined.
pub struct Joined {
    /// Its place.
    pub seat: Seat,
    /// The job's secret, derived from its token by the label [`SECRET`]; `None` if it has none (certificates alone).
    pub secret: Option<[u8; 32]>,
    /// The coordinator lives in rank 0's process: its loss is rank 0's.
    pub inside_rank_0: bool,
}

/// What the job's processes prove themselves to each other with: HMAC-SHA256 of this under the token. It tells nothing of
/// the token.
pub const SECRET: &str = "podring fabric";

/// Why a rank hasn't joined.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// No seat, and why.
    #[error(transparent)]
    Seat(#[from] SeatError),
    /// The launcher's store failed.
    #[error("store: {0}")]
    Board(#[from] BoardError),
    /// Rank 0 published nothing.
    #[error(
        "no sign of rank 0{}, which brings the coordinator, within {} ms; if it runs, it may itself be waiting in the \
         launcher's store for ranks that haven't come there",
        on(host),
        waited.as_millis()
    )]
    NoRankZero {
        /// Where it should be, if the launcher says so.
        host: Option<String>,
        /// For how long it was awaited.
        waited: Duration,
    },
    /// Somebody else is rank 0 too.
    #[error("rank 0 announced twice: here, and then by {other}")]
    TwoRankZeros {
        /// The other's host.
        other: String,
    },
    /// What was published can't be read.
    #[error("rank 0's record of the coordinator can't be read: {why}")]
    BadRecord {
        /// Why.
        why: String,
    },
    /// The coordinator can't start.
    #[error("rank 0 can't start the coordinator: {0}")]
    Start(#[from] StartError),
    /// None of the ports that it may have is free.
    #[error(
        "PODRING_COORDINATOR_PORT={}: rank 0 can't start the coordinator on {}: {source}", shown(ports),
        if ports.start() == ports.end() { "it" } else { "any of them; the last" }
    )]
    Ports {
        /// The setting.
        ports: RangeInclusive<u16>,
        /// The last port's failure.
        source: StartError,
    },
    /// A token can't be used.
    #[error(transparent)]
    Credential(#[from] BadCredential),
}

fn shown(ports: &RangeInclusive<u16>) -> String {
    match (ports.start(), ports.end()) {
        (first, last) if first == last => first.to_string(),
        (first, last) => format!("{first}-{last}"),
    }
}

fn on(host: &Option<String>) -> String {
    host.as_ref().map(|host| format!(" on {host}")).unwrap_or_default()
}

/// What rank 0 publishes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    version: u32,
    /// Names this life of the job; part of the agents' names.
    job: String,
    host: String,
    host_id: String,
    machine: String,
    /// Where the coordinator listens, `host:port`.
    endpoints: Vec<String>,
    /// Only where the job has no token of its own: as private as the store.
    token: Option<String>,
}

impl Newcomer<'_> {
    /// Finds the coordinator, or starts it, and joins. `interrupted` is asked now and then.
    pub fn join(&self, interrupted: &mut dyn FnMut() -> bool) -> Result<Joined, JoinError> {
        let token = self.settings.token_file.as_deref().map(Token::from_file).transpose()?;
        match (&self.settings.coordinator, self.rank) {
            (Some(endpoint), _) => self.join_standing(endpoint, token, interrupted),
            (None, 0) => self.join_as_first(token, interrupted),
            (None, _) => self.join_first(token, interrupted),
        }
    }

    fn joining(&self, agent: String, timeout: Duration) -> Joining {
        Joining {
            agent,
            rank: self.rank,
            world_size: self.world_size,
            host: self.host.clone(),
            detail: self.detail.clone(),
            timeout,
            hosts: self.hosts.clone(),
            expected: self.expected.clone(),
        }
    }

    fn access(&self, endpoints: Vec<String>, token: Option<Token>, patience: Duration) -> Access {
        Access {
            endpoints,
            token,
            tls: self.settings.tls.clone(),
            server_name: self.settings.tls_name.clone(),
            timeout: self.timeout,
            patience: Some(patience),
            ..Access::new("")
        }
    }

    /// The coordinator that PODRING_COORDINATOR names. A restarted one gets its members back.
    fn join_standing(
        &self,
        endpoint: &str,
        token: Option<Token>,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Joined, JoinError> {
        let secret = token.as_ref().map(|token| token.derive(SECRET));
        // The name tells nobody the secret: a digest of a digest.
        let known = secret.map(|secret| hex(Sha256::digest(secret)));
        let job = format!("{endpoint} {known:?} {:?}", self.settings.tls.as_ref().map(|tls| &tls.cert));
        let agent = agent_name(&hex(Sha256::digest(job)), &self.host_id);
        let access = self.access(vec![endpoint.to_owned()], token, Duration::MAX);
        let ask = || if interrupted() { Wait::Interrupted } else { Wait::On };
        let seat = Seat::take(Role::First(access), &self.joining(agent, self.timeout), || Ok(()), ask)?;
        Ok(Joined { seat, secret, inside_rank_0: false })
    }

    /// Rank 0: starts the coordinator in this process, and publishes it.
    fn join_as_first(&self, token: Option<Token>, interrupted: &mut dyn FnMut() -> bool) -> Result<Joined, JoinError> {
        let strong = token.is_some() || self.settings.tls.is_some();
        let token = if strong { token } else { Some(Token::fresh()?) };
        let mut config = Config { token: token.clone(), tls: self.settings.tls.clone(), ..Config::default() };
        config.silence = self.settings.silence.unwrap_or(config.silence);
        let coordinator = match &self.settings.ports {
            Some(ports) => start_on(config, ports)?,
            None => start(config, 0)?,
        };
        let port = coordinator.addresses().first().map_or(0, SocketAddr::port);
        let mut job = [0; 16];
        getrandom::fill(&mut job).map_err(|error| StartError::System { what: "randomness", why: error.to_string() })?;
        let record = Record {
            version: VERSION,
            job: hex(job),
            host: self.host.clone(),
            host_id: self.host_id.clone(),
            machine: self.machine.clone(),
            endpoints: self.addresses.iter().map(|ip| SocketAddr::new(*ip, port).to_string()).collect(),
            token: token.as_ref().filter(|_| !strong).map(Token::reveal),
        };
        tracing::info!("the coordinator listens on {}", record.endpoints.join(", "));
        let text = serde_json::to_vec(&record).map_err(|error| JoinError::BadRecord { why: error.to_string() })?;
        let joining = self.joining(agent_name(&record.job, &self.host_id), self.timeout);
        let mut failed = None;
        let mut looked = Instant::now();
        let mut other = None;
        let publish = || {
            self.board.set(KEY, &text).map_err(|error| {
                failed = Some(error);
                SeatError::Stale
            })
        };
        let ask = || {
            if interrupted() {
                return Wait::Interrupted;
            }
            if looked.elapsed() < LOOK {
                return Wait::On;
            }
            looked = Instant::now();
            match self.board.get(KEY) {
                Ok(Some(now)) if now != text => {
                    other = serde_json::from_slice::<Record>(&now).ok().map(|record| record.host);
                    Wait::Stale
                }
                // A store that fails now and then is no reason to stop; the deadline is.
                _ => Wait::On,
            }
        };
        let taken = Seat::take(Role::Coordinator(Box::new(coordinator)), &joining, publish, ask);
        match (taken, failed) {
            (Ok(seat), _) => {
                Ok(Joined { seat, secret: token.as_ref().map(|token| token.derive(SECRET)), inside_rank_0: true })
            }
            (Err(SeatError::Stale), Some(failed)) => Err(failed.into()),
            (Err(SeatError::Stale), None) => {
                Err(JoinError::TwoRankZeros { other: other.unwrap_or_else(|| "another process".to_owned()) })
            }
            (Err(error), _) => Err(error.into()),
        }
    }

    /// Any other rank: finds what rank 0 published. A record that an earlier life of the job left leads nowhere, until
    /// its successor's takes its place.
    fn join_first(&self, token: Option<Token>, interrupted: &mut dyn FnMut() -> bool) -> Result<Joined, JoinError> {
        let began = Instant::now();
        let fresh = self.board.get(KEY)?.is_none();
        let mut last: Option<(Vec<u8>, JoinError)> = None;
        loop {
            let text = match self.record(began, last.as_ref(), fresh, interrupted)? {
                Some(text) => text,
                None => {
                    let (host, waited) = (self.first_host.clone(), began.elapsed());
                    return Err(last.map_or(JoinError::NoRankZero { host, waited }, |(_, error)| error));
                }
            };
            match self.join_published(&text, &token, began, interrupted) {
                Ok(joined) => return Ok(joined),
                Err(JoinError::Seat(SeatError::Stale)) => last = None,
                Err(error @ JoinError::Seat(SeatError::Late(_) | SeatError::Interrupted)) => return Err(error),
                Err(error) => last = Some((text, error)),
            }
        }
    }

    /// Waits for a record other than the one that led to an error; `None` if there is none in time.
    fn record(
        &self,
        began: Instant,
        last: Option<&(Vec<u8>, JoinError)>,
        fresh: bool,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Vec<u8>>, JoinError> {
        let since = Instant::now();
        let mut asked = since;
        loop {
            if let Some(text) = self.board.get(KEY)?.filter(|text| last.is_none_or(|(known, _)| known != text)) {
                return Ok(Some(text));
            }
            let patience = match last {
                // It appeared while this rank watched, so it is no earlier life's.
                Some(_) if fresh => Duration::ZERO,
                Some(_) => PATIENCE,
                None => Duration::MAX,
            };
            if began.elapsed() >= self.timeout || since.elapsed() >= patience {
                return Ok(None);
            }
            if asked.elapsed() > LOOK / 10 {
                asked = Instant::now();
                if interrupted() {
                    return Err(SeatError::Interrupted.into());
                }
            }
            // Found late by an eighth of the wait, at most.
            let longest = if since.elapsed() < LOOK { PAUSES[1] } else { PAUSES[2] };
            std::thread::sleep((since.elapsed() / 8).clamp(PAUSES[0], longest));
        }
    }

    fn join_published(
        &self,
        text: &[u8],
        token: &Option<Token>,
        began: Instant,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Joined, JoinError> {
        let bad = |why: String| JoinError::BadRecord { why };
        let record: Record = serde_json::from_slice(text).map_err(|error| bad(error.to_string()))?;
        if record.version != VERSION {
            return Err(bad(format!("it has version {}, this podring {VERSION}", record.version)));
        }
        let token = match (token, &record.token) {
            (Some(token), _) => Some(token.clone()),
            (None, Some(text)) => Some(Token::new(text)?),
            (None, None) => None,
        };
        let secret = token.as_ref().map(|token| token.derive(SECRET));
        // Loopback means the same only on the same machine; there it is the surest.
        let here = record.machine == self.machine;
        let loopback = |endpoint: &String| endpoint.parse::<SocketAddr>().is_ok_and(|at| at.ip().is_loopback());
        let (near, far): (Vec<String>, Vec<String>) = record.endpoints.iter().cloned().partition(loopback);
        let endpoints = if here && !near.is_empty() { near } else { far };
        let role = if here && record.host_id == self.host_id {
            Role::Guest
        } else {
            Role::First(self.access(endpoints, token, INSIDE))
        };
        let left = self.timeout.saturating_sub(began.elapsed());
        let joining = self.joining(agent_name(&record.job, &self.host_id), left);
        let mut looked = Instant::now();
        let ask = || {
            if interrupted() {
                return Wait::Interrupted;
            }
            if looked.elapsed() < LOOK {
                return Wait::On;
            }
            looked = Instant::now();
            match self.board.get(KEY) {
                Ok(Some(now)) if now != text => Wait::Stale,
                _ => Wait::On,
            }
        };
        let seat = Seat::take(role, &joining, || Ok(()), ask)?;
        Ok(Joined { seat, secret, inside_rank_0: true })
    }
}

/// On every address of this host, IPv4 and IPv6, where there is IPv6.
fn start(config: Config, port: u16) -> Result<Coordinator, StartError> {
    let any = |ip: IpAddr| Config { bind: vec![SocketAddr::new(ip, port)], ..config.clone() };
    Coordinator::start(any(Ipv6Addr::UNSPECIFIED.into())).or_else(|error| match error {
        // A port that somebody has for IPv6 alone isn't ours for IPv4 alone.
        StartError::Bind { taken: false, .. } => Coordinator::start(any(Ipv4Addr::UNSPECIFIED.into())),
        error => Err(error),
    })
}

/// On the first port that is free.
fn start_on(config: Config, ports: &RangeInclusive<u16>) -> Result<Coordinator, JoinError> {
    let mut port = *ports.start();
    loop {
        match start(config.clone(), port) {
            Err(StartError::Bind { taken: true, .. }) if port < *ports.end() => port += 1,
            Err(source @ StartError::Bind { .. }) => return Err(JoinError::Ports { ports: ports.clone(), source }),
            started => return Ok(started?),
        }
    }
}

fn agent_name(job: &str, host_id: &str) -> String {
    let digest = hex(Sha256::digest(format!("{job} {host_id}")));
    format!("podring-agent-{}", &digest[..32])
}

fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_free_port_is_taken() {
        // Two neighbours that are free just now.
        let (first, taken) = loop {
            let one = std::net::TcpListener::bind("[::]:0").unwrap();
            let port = one.local_addr().unwrap().port();
            if port < u16::MAX && std::net::TcpListener::bind(("::", port + 1)).is_ok() {
                break (port, one);
            }
        };
        let range = first..=first + 1;
        let coordinator = start_on(Config::default(), &range).unwrap();
        assert_eq!(coordinator.addresses()[0].port(), first + 1);
        let error = start_on(Config::default(), &range).err().unwrap().to_string();
        let (all, last) =
            (format!("PODRING_COORDINATOR_PORT={first}-{}: rank 0", first + 1), format!("[::]:{}", first + 1));
        assert!(error.starts_with(&all) && error.contains(&last) && error.contains("in use"), "{error}");
        let error = start_on(Config::default(), &(first..=first)).err().unwrap().to_string();
        assert!(error.contains(&format!("PODRING_COORDINATOR_PORT={first}: ")), "{error}");
        drop(taken);
    }
}
