//! Forms default worlds through the job's coordinator: what the group asks for, in terms of rendezvous/, and back.

use std::sync::Arc;

use podring_group::{
    Address, Error, Failure, Forming, Kind, Membership, News, Rendezvous, Seat, Secret, Store, StoreError, World,
};
use podring_rendezvous::bootstrap::{Board, BoardError, JoinError, Joined, Newcomer, Settings};
use podring_rendezvous::decide::roster;
use podring_rendezvous::environment::Launch;
use podring_rendezvous::host::{self, Notice, SeatError};
use podring_rendezvous::refusal::{Lost, RankAt, Refusal};
use serde::{Deserialize, Serialize};

/// Version of a rank's detail.
const VERSION: u32 = 1;

/// How default worlds form, as PODRING_RENDEZVOUS says: `coordinator` (the default), or `store`: over the launcher's
/// store alone (`None`).
pub fn road() -> Result<Option<Arc<dyn Rendezvous>>, Error> {
    let variables = crate::settings::variables();
    let over_store = variables.read("PODRING_RENDEZVOUS", "coordinator or store", |text| match text {
        "coordinator" => Some(false),
        "store" => Some(true),
        _ => None,
    })?;
    if over_store == Some(true) {
        return Ok(None);
    }
    let settings = Settings::from_lookup(variables.0)?;
    Ok(Some(Arc::new(Coordinated(settings))))
}

/// What a rank tells the others of itself.
#[derive(Debug, Serialize, Deserialize)]
struct Detail {
    version: u32,
    address: Address,
    /// Rank 0's alone: names the world.
    world: Option<u128>,
    /// Rank 0's alone, and only in a job without a token: what would be derived from one.
    secret: Option<[u8; 32]>,
    /// Where the launcher put it.
    slice: Option<u32>,
    worker: Option<u32>,
    local_rank: Option<u32>,
    visible_chips: Option<Vec<u32>>,
}

struct Coordinated(Settings);

struct LauncherBoard<'a>(&'a dyn Store);

fn board_error(error: StoreError) -> BoardError {
    let StoreError { call, key, why } = error;
    BoardError { call, key, why }
}

impl Board for LauncherBoard<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), BoardError> {
        self.0.set(key, value).map_err(board_error)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BoardError> {
        if !self.0.check(&[key.to_owned()]).map_err(board_error)? {
            return Ok(None);
        }
        self.0.get(key).map(Some).map_err(board_error)
    }
}

fn random<const N: usize>() -> Result<[u8; N], String> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| format!("no randomness: {error}"))?;
    Ok(bytes)
}

fn value<T: Clone>(given: &Option<podring_rendezvous::environment::Given<T>>) -> Option<T> {
    given.as_ref().map(|given| given.value.clone())
}

impl Rendezvous for Coordinated {
    fn join(
        &self,
        forming: &Forming<'_>,
        store: &Arc<dyn Store>,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<(World, Arc<dyn Seat>), Error> {
        let Forming { rank, size, timeout, address, .. } = *forming;
        let failed = |kind, why: String| Error::Rendezvous { kind, why, place: forming.place() };
        let launch = Launch::from_env().map_err(|error| failed(Kind::Invalid, error.to_string()))?;
        let note = launch.check(rank, size).map_err(|error| failed(Kind::Invalid, error.to_string()))?;
        // Variables are a host's: one of its ranks says it aloud.
        let aloud = launch.local_rank.as_ref().is_none_or(|local| local.value == 0);
        // The variables' other facts are of another job, if it counts other processes.
        let notes = note.as_ref().map_or(&launch.notes[..], std::slice::from_ref);
        for note in notes {
            if aloud && !note.usual {
                tracing::warn!(target: "podring::launcher", "{note}");
            } else {
                tracing::info!(target: "podring::launcher", "{note}");
            }
        }
        // Of another job, if it counts other processes.
        let launch = if note.is_some() { Launch::default() } else { launch };
        let internal = |why| failed(Kind::Internal, why);
        let detail = Detail {
            version: VERSION,
            address: address.clone(),
            world: if rank == 0 { Some(u128::from_le_bytes(random().map_err(internal)?)) } else { None },
            secret: match rank {
                0 if !self.0.has_token() => Some(random().map_err(internal)?),
                _ => None,
            },
            slice: value(&launch.slice),
            worker: value(&launch.worker),
            local_rank: value(&launch.local_rank),
            visible_chips: value(&launch.visible_chips),
        };
        let detail = serde_json::to_vec(&detail).map_err(|error| internal(error.to_string()))?;
        // Played hosts aren't the launcher's.
        let played = crate::settings::variables().text("PODRING_HOST_ID").is_some();
        let newcomer = Newcomer {
            board: &LauncherBoard(&**store),
            settings: &self.0,
            rank,
            world_size: size,
            timeout,
            host: address.name.clone(),
            host_id: address.host.clone(),
            machine: address.machine.clone(),
            addresses: address.tcp.iter().map(std::net::SocketAddr::ip).collect(),
            detail,
            hosts: if played { Vec::new() } else { launch.hosts(size) },
            expected: if played { Vec::new() } else { launch.local_ranks() },
            first_host: value(&launch.first_host()),
        };
        let joined = newcomer.join(interrupted).map_err(|error| told(error, forming))?;
        let world = world(&joined, size).map_err(|why| failed(Kind::Mismatch, why))?;
        let Joined { seat, inside_rank_0, .. } = joined;
        Ok((world, Arc::new(Place { seat: Arc::new(seat), inside_rank_0 })))
    }
}

/// The world that the ranks' details describe.
fn world(joined: &Joined, size: u32) -> Result<World, String> {
    let mut members: Vec<Option<Address>> = vec![None; size as usize];
    let mut first = None;
    for host in &joined.seat.world().hosts {
        for (&rank, detail) in host.ranks.iter().zip(&host.details) {
            let unreadable =
                |why: String| format!("what rank {rank} on {} tells of itself can't be read: {why}", host.name);
            let detail: Detail = serde_json::from_slice(detail).map_err(|error| unreadable(error.to_string()))?;
            if detail.version != VERSION {
                return Err(unreadable(format!("it has version {}, this podring {VERSION}", detail.version)));
            }
            if rank == 0 {
                first = detail.world.map(|world| (world, detail.secret));
            }
            if let Some(member) = members.get_mut(rank as usize) {
                *member = Some(detail.address);
            }
        }
    }
    let members: Option<Vec<Address>> = members.into_iter().collect();
    let (Some(members), Some((id, secret))) = (members, first) else {
        return Err("the coordinator formed a world without some of its ranks, or without its name".to_owned());
    };
    let Some(secret) = joined.secret.or(secret) else {
        return Err("rank 0 has a token, and this rank has none".to_owned());
    };
    Ok(World { id, secret: Secret::new(secret).for_job(id), members })
}

/// A rank's failure to join, as the group's error.
fn told(error: JoinError, forming: &Forming<'_>) -> Error {
    let Forming { size, timeout, .. } = *forming;
    let place = forming.place();
    let kind = match error {
        JoinError::Board(BoardError { call, key, why }) => {
            return Error::Store { place, source: StoreError { call, key, why } };
        }
        JoinError::Seat(SeatError::Interrupted) => return Error::Interrupted,
        JoinError::Seat(SeatError::Late(late)) => {
            let missing = late.missing.into_iter().map(|RankAt { rank, host }| (rank, host)).collect();
            let after_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
            return Error::Absent { missing, refused: late.refused, size, after_ms, place };
        }
        JoinError::NoRankZero { .. } => Kind::Timeout,
        JoinError::Seat(SeatError::Refused(Refusal::Token { .. })) => Kind::Network,
        JoinError::Seat(SeatError::Refused(_)) | JoinError::TwoRankZeros { .. } | JoinError::BadRecord { .. } => {
            Kind::Mismatch
        }
        JoinError::Seat(SeatError::Ended { why }) => {
            let why = format!("forming the group: lost rank 0, which had the coordinator: {why}");
            return Error::Rendezvous { kind: Kind::PeerLost, why, place };
        }
        JoinError::Credential(_) => Kind::Invalid,
        JoinError::Seat(_) | JoinError::Start(_) | JoinError::Ports { .. } => Kind::Network,
    };
    Error::Rendezvous { kind, why: format!("forming the group: {error}"), place }
}

struct Place {
    seat: Arc<host::Seat>,
    inside_rank_0: bool,
}

impl Seat for Place {
    fn membership(&self, channel: u64, _: u64) -> Box<dyn Membership> {
        Box::new(Coordinator { seat: self.seat.clone(), group: format!("{channel:016x}") })
    }

    fn listen(&self, tell: Box<dyn Fn(News) + Send + Sync>) {
        let inside_rank_0 = self.inside_rank_0;
        self.seat.listen(Box::new(move |notice| match notice {
            Notice::Lost(lost) => lost_ranks(lost).into_iter().for_each(|(rank, how)| tell(News::Lost { rank, how })),
            Notice::Failed(failed) => {
                if let (Ok(channel), Some(failure)) = (u64::from_str_radix(&failed.group, 16), failure(failed)) {
                    tell(News::Failed { channel, failure });
                }
            }
            Notice::CoordinatorLost { how } if inside_rank_0 => {
                tell(News::Lost { rank: 0, how: format!("the coordinator in its process is gone: {how}") });
            }
            Notice::CoordinatorLost { how } => tracing::warn!(
                target: "podring::rendezvous",
                how,
                "the coordinator is gone: losses are noticed by links only from now on"
            ),
        }));
    }

    fn leave(&self) {
        self.seat.leave();
    }
}

/// The ranks that a loss is certain of. Of an agent's other ranks only their links know.
fn lost_ranks(lost: &Lost) -> Vec<(u32, String)> {
    match lost.speaker {
        Some(speaker) if lost.ranks.contains(&speaker) => {
            let others: Vec<String> = lost.ranks.iter().filter(|rank| **rank != speaker).map(u32::to_string).collect();
            let how = match others.as_slice() {
                [] => lost.how.clone(),
                others => format!("{}; its process spoke for rank {} too", lost.how, others.join(", ")),
            };
            vec![(speaker, how)]
        }
        _ => lost.ranks.iter().map(|rank| (*rank, lost.how.clone())).collect(),
    }
}

/// A group's common knowledge, kept by the coordinator.
struct Coordinator {
    seat: Arc<host::Seat>,
    group: String,
}

impl Membership for Coordinator {
    fn report(&self, failure: &Failure) -> Result<(), StoreError> {
        let failed = |why: String| StoreError { call: "report", key: self.group.clone(), why };
        let mismatch = match failure {
            Failure::Mismatch { seq, ledger, .. } => Some(roster::Mismatch {
                sequence: *seq,
                field: "call".to_owned(),
                held: ledger.iter().map(|row| (row.rank, row.called.clone())).collect(),
                blamed: Vec::new(),
            }),
            _ => None,
        };
        let detail = serde_json::to_vec(failure).map_err(|error| failed(error.to_string()))?;
        // The seat knows epoch and rank.
        let report = roster::Failure { epoch: 0, group: self.group.clone(), by: 0, detail, mismatch };
        self.seat.report(report).map_err(|error| failed(error.to_string()))
    }

    fn watch(&self) -> Result<Option<Failure>, StoreError> {
        Ok(self.seat.failure(&self.group).and_then(|failed| failure(&failed)))
    }

    fn epoch(&self) -> u64 {
        self.seat.epoch()
    }
}

/// What was reported. Where most ranks agree, the others are named.
fn failure(failed: &roster::Failure) -> Option<Failure> {
    let mut failure = serde_json::from_slice(&failed.detail).ok()?;
    if let (Failure::Mismatch { what, .. }, Some(mismatch)) = (&mut failure, &failed.mismatch)
        && !mismatch.blamed.is_empty()
    {
        let ranks: Vec<String> = mismatch.blamed.iter().map(u32::to_string).collect();
        what.push_str(&format!("; most ranks agree, rank {} not", ranks.join(", ")));
    }
    Some(failure)
}
