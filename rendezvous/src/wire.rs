//! Between the protocol's messages and what the decisions speak of.

use std::sync::Arc;
use std::time::Duration;

use podring_proto as pb;
use prost::Message as _;
use prost::bytes::Bytes;
use tonic::{Code, Status};

use crate::decide::invalid;
use crate::decide::keyvalue::Change;
use crate::decide::roster::{About, AgentId, Announcement, Event, Failure, Host, Mismatch, World};
use crate::refusal::{Late, Lost, RankAt, Refusal};

/// The protocol's version. See podring.proto.
pub(crate) const VERSION: &str = "1.2";
/// The metadata entry that carries it.
pub(crate) const VERSION_KEY: &str = "podring-version";
/// Refusals travel in a header, whose size is bounded: so many missing ranks at most.
const MISSING: usize = 4096;

pub(crate) fn milliseconds(duration: Duration) -> u32 {
    // Rounded up: a wait of less than a millisecond is still a wait.
    u32::try_from(duration.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
}

pub(crate) fn duration(milliseconds: u32) -> Duration {
    Duration::from_millis(milliseconds.into())
}

pub(crate) fn agent_id(bytes: &[u8]) -> Result<AgentId, Refusal> {
    let bytes = <[u8; 16]>::try_from(bytes);
    bytes.map(AgentId::from_le_bytes).map_err(|_| invalid("session", "expected 16 bytes"))
}

pub(crate) fn announcement(announce: pb::Announce) -> Result<Announcement, Refusal> {
    let pb::Announce {
        session,
        host,
        world_size,
        ranks,
        details,
        last_epoch,
        timeout_ms,
        hosts,
        speaker,
        expected,
        refused,
    } = announce;
    let (agent, timeout) = (agent_id(&session)?, duration(timeout_ms));
    let about = About { speaker, expected, refused };
    Ok(Announcement { agent, host, world_size, ranks, details, last_epoch, timeout, hosts, about })
}

pub(crate) fn announce(announcement: &Announcement) -> pb::Announce {
    let Announcement { agent, host, world_size, ranks, details, last_epoch, timeout, hosts, about } =
        announcement.clone();
    let (session, timeout_ms) = (agent.to_le_bytes().to_vec(), milliseconds(timeout));
    let About { speaker, expected, refused } = about;
    pb::Announce {
        session,
        host,
        world_size,
        ranks,
        details,
        last_epoch,
        timeout_ms,
        hosts,
        speaker,
        expected,
        refused,
    }
}

pub(crate) fn ranks_at(missing: &[RankAt]) -> Vec<pb::RankAt> {
    let one = |at: &RankAt| pb::RankAt { rank: at.rank, host: at.host.clone().unwrap_or_default() };
    missing.iter().map(one).collect()
}

fn from_ranks_at(missing: Vec<pb::RankAt>) -> Vec<RankAt> {
    let one = |at: pb::RankAt| RankAt { rank: at.rank, host: Some(at.host).filter(|host| !host.is_empty()) };
    missing.into_iter().map(one).collect()
}

pub(crate) fn lost(lost: &Lost) -> pb::Lost {
    let Lost { epoch, host, ranks, how, speaker } = lost.clone();
    pb::Lost { epoch, host, ranks, how, speaker }
}

pub(crate) fn from_lost(lost: pb::Lost) -> Lost {
    let pb::Lost { epoch, host, ranks, how, speaker } = lost;
    Lost { epoch, host, ranks, how, speaker }
}

pub(crate) fn world(world: &World) -> pb::World {
    let World { epoch, world_size, hosts } = world.clone();
    let host = |Host { name, ranks, details }| pb::Host { name, ranks, details };
    pb::World { epoch, world_size, hosts: hosts.into_iter().map(host).collect() }
}

pub(crate) fn from_world(world: pb::World) -> World {
    let pb::World { epoch, world_size, hosts } = world;
    let host = |pb::Host { name, ranks, details }| Host { name, ranks, details };
    World { epoch, world_size, hosts: hosts.into_iter().map(host).collect() }
}

pub(crate) fn late(late: &Late) -> pb::Late {
    let Late { missing, waited, world_size, refused } = late;
    pb::Late {
        missing: ranks_at(missing),
        waited_ms: milliseconds(*waited),
        world_size: *world_size,
        refused: refused.clone(),
    }
}

pub(crate) fn from_late(late: pb::Late) -> Late {
    let pb::Late { missing, waited_ms, world_size, refused } = late;
    Late { missing: from_ranks_at(missing), waited: duration(waited_ms), world_size, refused }
}

pub(crate) fn failure(failure: &Failure) -> pb::Failure {
    let Failure { epoch, group, by, detail, mismatch } = failure.clone();
    let mismatch = mismatch.map(|mismatch| {
        let Mismatch { sequence, field, held, blamed } = mismatch;
        let held = held.into_iter().map(|(rank, value)| pb::Held { rank, value }).collect();
        pb::Mismatch { sequence, field, held, blamed }
    });
    pb::Failure { epoch, group, by, detail, mismatch }
}

pub(crate) fn from_failure(failure: pb::Failure) -> Failure {
    let pb::Failure { epoch, group, by, detail, mismatch } = failure;
    let mismatch = mismatch.map(|mismatch| {
        let pb::Mismatch { sequence, field, held, blamed } = mismatch;
        let held = held.into_iter().map(|held| (held.rank, held.value)).collect();
        Mismatch { sequence, field, held, blamed }
    });
    Failure { epoch, group, by, detail, mismatch }
}

/// An event as a message; `formed` gives the world's.
pub(crate) fn event(event: &Event, formed: impl FnOnce(&World) -> Bytes) -> pb::JoinEvent {
    use pb::join_event::What;
    let what = match event {
        Event::Formed(world) => What::Formed(formed(world)),
        Event::Late(event) => What::Late(late(event)),
        Event::Lost(event) => What::Lost(lost(event)),
        Event::Failed(event) => What::Failed(failure(event)),
        Event::Closing => What::Closing(pb::Closing {}),
    };
    pb::JoinEvent { what: Some(what) }
}

/// `None` for an event of a newer peer's that this side doesn't know.
pub(crate) fn from_event(event: pb::JoinEvent) -> Option<Event> {
    use pb::join_event::What;
    Some(match event.what? {
        // A world that can't be read is an event that isn't known: the wait for it ends with its own error.
        What::Formed(world) => Event::Formed(Arc::new(from_world(pb::World::decode(world).ok()?))),
        What::Late(late) => Event::Late(Arc::new(from_late(late))),
        What::Lost(event) => Event::Lost(Arc::new(from_lost(event))),
        What::Failed(event) => Event::Failed(Arc::new(from_failure(event))),
        What::Closing(pb::Closing {}) => Event::Closing,
    })
}

/// Whether a peer that speaks `yours` is understood.
pub(crate) fn compatible(yours: &str) -> Result<(), Refusal> {
    let major = |version: &str| version.split('.').next().and_then(|major| major.parse::<u32>().ok());
    if major(yours).is_none() || major(yours) != major(VERSION) {
        return Err(Refusal::Version { yours: yours.to_owned(), ours: VERSION.to_owned() });
    }
    Ok(())
}

fn cut(text: &str) -> String {
    text.chars().take(256).collect()
}

/// The refusal as a message, with the code that stands for it in gRPC.
pub(crate) fn refused(refusal: &Refusal) -> (Code, pb::Refusal) {
    use pb::refusal::Why;
    let (code, why) = match refusal.clone() {
        Refusal::Token { given } => (Code::Unauthenticated, Why::Token(pb::BadToken { given })),
        Refusal::Version { yours, ours } => {
            (Code::FailedPrecondition, Why::Version(pb::BadVersion { yours: cut(&yours), ours }))
        }
        Refusal::Twin { rank, holder, second } => (Code::AlreadyExists, Why::Twin(pb::Twin { rank, holder, second })),
        Refusal::SizesDiffer { yours, theirs, host } => {
            (Code::InvalidArgument, Why::Sizes(pb::SizesDiffer { yours, theirs, host }))
        }
        Refusal::Stale { yours, current } => (Code::FailedPrecondition, Why::Stale(pb::StaleEpoch { yours, current })),
        Refusal::StoreLost { yours, current } => (Code::DataLoss, Why::StoreLost(pb::StoreLost { yours, current })),
        Refusal::KeysMissing { keys, waited } => {
            let keys = keys.iter().map(|key| cut(key)).collect();
            (Code::DeadlineExceeded, Why::KeysMissing(pb::KeysMissing { keys, waited_ms: milliseconds(waited) }))
        }
        Refusal::TooMuch { what, limit, got } => {
            (Code::ResourceExhausted, Why::TooMuch(pb::TooMuch { what, limit, got }))
        }
        Refusal::Invalid { what, got } => (Code::InvalidArgument, Why::Invalid(pb::Invalid { what, got: cut(&got) })),
        Refusal::Lost(event) => (Code::Aborted, Why::Lost(lost(&event))),
        Refusal::BarrierLate { name, missing, waited } => {
            let (name, missing) = (cut(&name), ranks_at(&missing[..missing.len().min(MISSING)]));
            (
                Code::DeadlineExceeded,
                Why::BarrierLate(pb::BarrierLate { name, missing, waited_ms: milliseconds(waited) }),
            )
        }
        Refusal::NotANumber { key, got } => {
            (Code::InvalidArgument, Why::NotANumber(pb::NotANumber { key: cut(&key), got }))
        }
        Refusal::UnknownSession => (Code::NotFound, Why::UnknownSession(pb::UnknownSession {})),
    };
    (code, pb::Refusal { why: Some(why) })
}

pub(crate) fn status(refusal: &Refusal) -> Status {
    let (code, details) = refused(refusal);
    Status::with_details(code, cut(&refusal.to_string()), details.encode_to_vec().into())
}

/// The refusal in a status, if there is one that this side knows.
pub(crate) fn refusal(status: &Status) -> Option<Refusal> {
    if status.details().is_empty() {
        return None;
    }
    from_refused(pb::Refusal::decode(status.details()).ok()?)
}

/// `None` for a refusal of a newer peer's.
pub(crate) fn from_refused(refused: pb::Refusal) -> Option<Refusal> {
    use pb::refusal::Why;
    Some(match refused.why? {
        Why::Token(pb::BadToken { given }) => Refusal::Token { given },
        Why::Version(pb::BadVersion { yours, ours }) => Refusal::Version { yours, ours },
        Why::Twin(pb::Twin { rank, holder, second }) => Refusal::Twin { rank, holder, second },
        Why::Sizes(pb::SizesDiffer { yours, theirs, host }) => Refusal::SizesDiffer { yours, theirs, host },
        Why::Stale(pb::StaleEpoch { yours, current }) => Refusal::Stale { yours, current },
        Why::StoreLost(pb::StoreLost { yours, current }) => Refusal::StoreLost { yours, current },
        Why::KeysMissing(pb::KeysMissing { keys, waited_ms }) => {
            Refusal::KeysMissing { keys, waited: duration(waited_ms) }
        }
        Why::TooMuch(pb::TooMuch { what, limit, got }) => Refusal::TooMuch { what, limit, got },
        Why::Invalid(pb::Invalid { what, got }) => Refusal::Invalid { what, got },
        Why::Lost(event) => Refusal::Lost(from_lost(event)),
        Why::BarrierLate(pb::BarrierLate { name, missing, waited_ms }) => {
            Refusal::BarrierLate { name, missing: from_ranks_at(missing), waited: duration(waited_ms) }
        }
        Why::NotANumber(pb::NotANumber { key, got }) => Refusal::NotANumber { key, got },
        Why::UnknownSession(pb::UnknownSession {}) => Refusal::UnknownSession,
    })
}

pub(crate) fn record(change: Change) -> pb::JournalRecord {
    use pb::journal_record::What;
    let keyed = |key, value| pb::KeyedValue { key, value };
    let what = match change {
        Change::Put(key, value) => What::Put(keyed(key, value)),
        Change::Delete(key) => What::Delete(key),
        Change::Push(key, value) => What::Push(keyed(key, value)),
        Change::Unpop(key, value) => What::Unpop(keyed(key, value)),
        Change::Pop(key) => What::Pop(key),
    };
    pb::JournalRecord { what: Some(what) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_survive_the_wire() {
        let at = vec![RankAt { rank: 1, host: Some("h".into()) }, RankAt { rank: 2, host: None }];
        let text = || "x".to_owned();
        let second = Duration::from_secs(1);
        for sent in [
            Refusal::Token { given: true },
            Refusal::Version { yours: text(), ours: VERSION.into() },
            Refusal::Twin { rank: 3, holder: text(), second: "y".into() },
            Refusal::SizesDiffer { yours: 1, theirs: 2, host: text() },
            Refusal::Stale { yours: 1, current: 2 },
            Refusal::StoreLost { yours: 1, current: 2 },
            Refusal::KeysMissing { keys: vec![text()], waited: second },
            Refusal::TooMuch { what: text(), limit: 1, got: 2 },
            Refusal::Invalid { what: text(), got: text() },
            Refusal::Lost(Lost { epoch: 1, host: text(), ranks: vec![4, 5], how: text(), speaker: Some(4) }),
            Refusal::BarrierLate { name: text(), missing: at, waited: second },
            Refusal::NotANumber { key: text(), got: text() },
            Refusal::UnknownSession,
        ] {
            assert_eq!(refusal(&status(&sent)), Some(sent));
        }
        assert_eq!(refusal(&Status::internal("no details")), None);
        let newer = Status::with_details(Code::Internal, "", vec![0xfa, 0x07, 0x00].into());
        assert_eq!(refusal(&newer), None);
    }

    #[test]
    fn what_a_newer_peer_adds_is_ignored() {
        // Field 99, length-delimited, that this side doesn't know.
        let mut bytes = pb::HelloReply { instance: 5, epoch: 2, ..Default::default() }.encode_to_vec();
        bytes.extend([0x9a, 0x06, 0x01, b'x']);
        assert_eq!(pb::HelloReply::decode(&bytes[..]).unwrap().instance, 5);
        let event = pb::JoinEvent::decode(&[0x9a, 0x06, 0x01, b'x'][..]).unwrap();
        assert_eq!(from_event(event), None);
    }
}
