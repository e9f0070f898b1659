//! Forming: every rank publishes where it is to be found and learns the same of the others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use podring_fabric::handshake::{Job, MAC, Secret};
use podring_fabric::hub::Address;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use podring_fabric::error::HubError;

use crate::error::{Error, Place};
use crate::rendezvous::Seat;
use crate::store::{Store, StoreError};

/// Version of the published record.
const VERSION: u32 = 2;

/// The members of a job, as they found each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// Tells this world from every other.
    pub id: u128,
    /// What its processes prove themselves to each other with.
    pub secret: Secret,
    /// Where each rank is to be found.
    pub members: Vec<Address>,
}

/// What a rank publishes.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    version: u32,
    rank: u32,
    size: u32,
    address: Address,
    /// Rank 0's alone: the world's id, and its secret unless there is one from outside.
    world: Option<(u128, Option<[u8; MAC]>)>,
}

/// What forming needs to know.
pub struct Forming<'a> {
    /// The group's name.
    pub name: &'a str,
    /// Which forming of that name this is in this process.
    pub epoch: u64,
    /// This rank.
    pub rank: u32,
    /// How many come.
    pub size: u32,
    /// Their ranks in the default group, where those aren't the group's own numbers.
    pub members: Option<&'a Arc<[u32]>>,
    /// How long to wait for them.
    pub timeout: Duration,
    /// This process.
    pub address: &'a Address,
    /// The job's secret, from outside.
    pub secret: Option<&'a Secret>,
}

impl Forming<'_> {
    /// How errors name the group and this rank.
    pub fn place(&self) -> Box<Place> {
        Box::new(Place { group: self.name.to_owned(), rank: self.rank, members: self.members.cloned() })
    }
}

/// The secret of one world: made of the one from outside, or else the one that rank 0 published, which is then as private
/// as the store it travels in. `None` if this rank has one from outside and rank 0 has none, or the other way round.
fn secret(outside: Option<&Secret>, published: Option<[u8; MAC]>, world: u128) -> Option<Secret> {
    match (outside, published) {
        (Some(outside), None) => Some(outside.for_job(world)),
        (None, Some(published)) => Some(Secret::new(published)),
        _ => None,
    }
}

fn random() -> [u8; 16] {
    let mut bytes = [0u8; 16];
    if getrandom::fill(&mut bytes).is_err() {
        // No randomness: the clock and the address of a local tell worlds apart, though not against an adversary.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        bytes = (now.as_nanos() ^ (std::ptr::from_ref(&now) as u128) << 64).to_le_bytes();
    }
    bytes
}

/// How long ranks may differ on what they were started with. What a rank of an earlier life of the job left in the store
/// looks like that until its successor comes.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pauses between two readings of everybody's record, while not all agree.
const READING: std::ops::Range<Duration> = Duration::from_millis(50)..Duration::from_secs(1);

/// Publishes this rank and waits for the others.
///
/// A restarted job may find its predecessor's records in the store. So each rank also says which members it has found,
/// and a world stands when all of them have said the same: a dead process says nothing of living ones.
pub fn form(store: &dyn Store, forming: &Forming, interrupted: impl FnMut() -> bool) -> Result<World, Error> {
    let Forming { epoch, rank, size, address, secret, .. } = *forming;
    let key = |rank: u32| format!("podring/{epoch}/{rank}");
    let world = match (rank, secret) {
        (0, None) => Some((u128::from_le_bytes(random()), Some(Secret::fresh().map_err(HubError::from)?.reveal()))),
        (0, Some(_)) => Some((u128::from_le_bytes(random()), None)),
        _ => None,
    };
    let record = Record { version: VERSION, rank, size, address: address.clone(), world };
    let mut visit = Visit { store, forming, start: Instant::now(), asked: Instant::now(), interrupted };
    let text = serde_json::to_vec(&record)
        .map_err(|error| visit.failed(StoreError { call: "set", key: key(rank), why: error.to_string() }))?;
    store.set(&key(rank), &text).map_err(|source| visit.failed(source))?;
    let keys: Vec<String> = (0..size).map(key).collect();
    visit.all(&keys, None)?;
    let mut reading = READING.start;
    loop {
        let world = match visit.read(&keys) {
            Err(Error::Disagree { .. }) if visit.start.elapsed() < PATIENCE.min(forming.timeout) => {
                std::thread::sleep(READING.start.min(forming.timeout / 4));
                continue;
            }
            found => found?,
        };
        let agreed = |rank: u32| format!("podring/{epoch}/agreed/{}/{rank}", world.digest());
        store.set(&agreed(rank), b"1").map_err(|source| visit.failed(source))?;
        let agreed: Vec<String> = (0..size).map(agreed).collect();
        if visit.all(&agreed, Some(reading))? {
            return Ok(world);
        }
        reading = (2 * reading).min(READING.end);
    }
}

struct Visit<'a, I> {
    store: &'a dyn Store,
    forming: &'a Forming<'a>,
    start: Instant,
    asked: Instant,
    interrupted: I,
}

impl<I: FnMut() -> bool> Visit<'_, I> {
    fn failed(&self, source: StoreError) -> Error {
        Error::Store { place: self.forming.place(), source }
    }

    fn check(&self, keys: &[String]) -> Result<bool, Error> {
        self.store.check(keys).map_err(|source| self.failed(source))
    }

    /// Waits for each rank's key; `false` if not all are there after `patience`.
    fn all(&mut self, keys: &[String], patience: Option<Duration>) -> Result<bool, Error> {
        let Forming { size, timeout, .. } = *self.forming;
        let since = Instant::now();
        let mut pause = Duration::from_micros(200);
        while !self.check(keys)? {
            if self.start.elapsed() >= timeout {
                let mut missing = Vec::new();
                for other in 0..size {
                    if !self.check(&keys[other as usize..=other as usize])? {
                        missing.push(other);
                    }
                }
                if missing.is_empty() {
                    break;
                }
                return Err(Error::Missing {
                    what: "forming the group",
                    present: size as usize - missing.len(),
                    missing,
                    size,
                    after_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
                    place: self.forming.place(),
                });
            }
            if patience.is_some_and(|patience| since.elapsed() >= patience) {
                return Ok(false);
            }
            if self.asked.elapsed() > Duration::from_millis(50) {
                self.asked = Instant::now();
                if (self.interrupted)() {
                    return Err(Error::Interrupted);
                }
            }
            std::thread::sleep(pause.min(timeout.saturating_sub(self.start.elapsed())).max(Duration::from_micros(50)));
            pause = (pause * 3 / 2).min(Duration::from_millis(20));
        }
        Ok(true)
    }

    /// The world that the records describe.
    fn read(&self, keys: &[String]) -> Result<World, Error> {
        let Forming { rank, size, address, .. } = *self.forming;
        let mut members = Vec::with_capacity(size as usize);
        let mut found = None;
        for (other, key) in keys.iter().enumerate() {
            let text = self.store.get(key).map_err(|source| self.failed(source))?;
            let unreadable = |why: String| self.failed(StoreError { call: "get", key: key.clone(), why });
            let record: Record = serde_json::from_slice(&text).map_err(|error| unreadable(error.to_string()))?;
            let other = other as u32;
            let disagree = |what, mine: String, theirs: String| {
                Err(Error::Disagree { what, mine, theirs, other, place: self.forming.place() })
            };
            if record.version != VERSION {
                return disagree("record version", VERSION.to_string(), record.version.to_string());
            }
            if record.size != size {
                return disagree("world size", size.to_string(), record.size.to_string());
            }
            if other == rank && record.address != *address {
                // Somebody else published under this number.
                return disagree("rank number", format!("{rank} here"), format!("{rank} on {}", record.address.name));
            }
            found = found.or(record.world);
            members.push(record.address);
        }
        let Some((id, published)) = found else {
            let why = "rank 0 named no world".to_owned();
            return Err(self.failed(StoreError { call: "get", key: keys[0].clone(), why }));
        };
        let Some(secret) = secret(self.forming.secret, published, id) else {
            let (set, unset) = ("set".to_owned(), "not set".to_owned());
            let (mine, theirs) = if published.is_some() { (set, unset) } else { (unset, set) };
            let what = "PODRING_TOKEN_FILE";
            return Err(Error::Disagree { what, mine, theirs, other: 0, place: self.forming.place() });
        };
        Ok(World { id, secret, members })
    }
}

impl World {
    /// The same, as the hub wants it.
    pub fn job(&self) -> Job {
        let members = self.members.iter().map(|member| member.hub).collect();
        Job { id: self.id, secret: self.secret.clone(), members }
    }

    /// Tells apart worlds of the same rank 0 with other members: its id, and FNV-1a over the members' hubs.
    fn digest(&self) -> String {
        let hash = fnv(self.members.iter().flat_map(|member| member.hub.0.to_le_bytes()));
        format!("{:032x}-{hash:016x}", self.id)
    }
}

fn fnv(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// The channel of a group within a world: FNV-1a over the world, the name and the epoch.
pub fn channel(world: u128, name: &str, epoch: u64) -> u64 {
    fnv(world.to_le_bytes().into_iter().chain(epoch.to_le_bytes()).chain(name.bytes()))
}

/// A default world, and this rank's place in it, if a [`crate::Rendezvous`] formed it.
#[derive(Clone)]
pub(crate) struct Standing {
    pub world: Arc<World>,
    pub seat: Option<Arc<dyn Seat>>,
    /// Of the groups made within it; ends with it, since their channels are the world's too.
    pub epochs: Arc<Epochs>,
}

/// How often a group of each name was made.
///
/// A name is never forgotten while others may remember it: a group of that name made again would have another channel
/// here than there, and members have different histories, so there is no moment at which all of them could forget. It
/// costs 16 bytes and the map's slack: names are known by the same hash that channels are made of.
#[derive(Default)]
pub(crate) struct Epochs(Mutex<FxHashMap<u64, u64>>);

impl Epochs {
    /// The epoch of one more group of that name.
    pub fn next(&self, name: &str) -> u64 {
        let mut made = self.0.lock();
        let count = made.entry(fnv(name.bytes())).or_insert(0);
        *count += 1;
        *count - 1
    }

    #[cfg(test)]
    pub fn names(&self) -> usize {
        self.0.lock().len()
    }
}

/// The current default world of the process, for groups made within it.
#[derive(Default)]
pub(crate) struct Current(Option<Standing>);

impl Current {
    pub fn set(&mut self, standing: Standing) {
        self.0 = Some(standing);
    }

    pub fn get(&self) -> Option<Standing> {
        self.0.clone()
    }

    /// Forgets a world that is being destroyed.
    pub fn clear(&mut self, id: u128) {
        if self.0.as_ref().is_some_and(|standing| standing.world.id == id) {
            self.0 = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;
    use podring_fabric::wire::HubId;

    fn address(number: u32) -> Address {
        let host = format!("host{number}");
        Address { hub: HubId(number.into()), host: host.clone(), machine: "m".into(), name: host, tcp: vec![] }
    }

    fn join(store: &MemoryStore, rank: u32, size: u32, timeout_ms: u64) -> Result<World, Error> {
        let (address, timeout) = (address(rank), Duration::from_millis(timeout_ms));
        let forming =
            Forming { name: "g", epoch: 0, rank, size, members: None, timeout, address: &address, secret: None };
        form(store, &forming, || false)
    }

    #[test]
    fn a_secret_from_outside_stays_out_of_the_store() {
        let (outside, other) = (Secret::new([1; MAC]), Secret::new([2; MAC]));
        let form = |store: &MemoryStore, secret: Option<&Secret>, rank, size| {
            let (address, timeout) = (address(rank), Duration::from_millis(100));
            form(
                store,
                &Forming { name: "g", epoch: 0, rank, size, members: None, timeout, address: &address, secret },
                || false,
            )
        };
        let store = MemoryStore::default();
        let mine = form(&store, Some(&outside), 0, 1).unwrap();
        assert_eq!(mine.secret, outside.for_job(mine.id));
        assert_ne!(mine.secret, other.for_job(mine.id));
        let record: Record = serde_json::from_slice(&store.get("podring/0/0").unwrap()).unwrap();
        assert_eq!(record.world, Some((mine.id, None)));
        // Without one, rank 0 makes one, and another for each world.
        let (first, second) = (MemoryStore::default(), MemoryStore::default());
        let secrets = [&first, &second].map(|store| form(store, None, 0, 1).unwrap().secret);
        assert_ne!(secrets[0], secrets[1]);
        // Ranks that differ in whether they have one are told.
        for (zero, one, text) in [
            (Some(&outside), None, "rank 1 has PODRING_TOKEN_FILE not set, but rank 0 has set"),
            (None, Some(&outside), "rank 1 has PODRING_TOKEN_FILE set, but rank 0 has not set"),
        ] {
            let store = MemoryStore::default();
            let _ = form(&store, zero, 0, 2).unwrap_err();
            let error = form(&store, one, 1, 2).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn all_learn_the_same() {
        let store = MemoryStore::default();
        let worlds: Vec<World> = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..4)
                .map(|rank| {
                    scope.spawn({
                        let store = &store;
                        move || join(store, rank, 4, 10_000).unwrap()
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(worlds.windows(2).all(|pair| pair[0] == pair[1]));
        assert_eq!(worlds[0].members.len(), 4);
    }

    /// The store holds what the first life of the job left there; the second life's ranks come one after another.
    #[test]
    fn restarted_job_takes_no_dead_member() {
        let store = MemoryStore::default();
        let life = |first: u32| -> Vec<World> {
            std::thread::scope(|scope| {
                let ranks: Vec<_> = (0..3)
                    .map(|rank| {
                        let store = &store;
                        scope.spawn(move || {
                            std::thread::sleep(Duration::from_millis(120 * u64::from(rank)));
                            let address = address(first + rank);
                            let timeout = Duration::from_secs(10);
                            let forming = Forming {
                                name: "g",
                                epoch: 0,
                                rank,
                                size: 3,
                                members: None,
                                timeout,
                                address: &address,
                                secret: None,
                            };
                            form(store, &forming, || false).unwrap()
                        })
                    })
                    .collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            })
        };
        let (first, second) = (life(0), life(10));
        assert!(second.windows(2).all(|pair| pair[0] == pair[1]));
        assert_ne!(first[0].id, second[0].id);
        assert_eq!(second[0].members, (10..13).map(address).collect::<Vec<_>>());
    }

    #[test]
    fn successor_of_which_only_the_record_is_left_is_missing() {
        let store = MemoryStore::default();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| join(&store, 0, 2, 10_000).unwrap());
            join(&store, 1, 2, 10_000).unwrap();
            first.join().unwrap();
        });
        let address = address(10);
        let timeout = Duration::from_millis(50);
        let forming =
            Forming { name: "g", epoch: 0, rank: 0, size: 2, members: None, timeout, address: &address, secret: None };
        let error = form(&store, &forming, || false).unwrap_err();
        assert!(matches!(&error, Error::Missing { missing, .. } if missing == &[1]), "{error}");
    }

    #[test]
    fn names_who_is_missing() {
        let store = MemoryStore::default();
        let error = join(&store, 1, 3, 20).unwrap_err();
        assert!(matches!(&error, Error::Missing { missing, present: 1, .. } if missing == &[0, 2]), "{error}");
        assert!(error.to_string().contains("ranks 0, 2"), "{error}");
    }

    #[test]
    fn differing_sizes_and_twins_are_named() {
        let store = MemoryStore::default();
        let _ = join(&store, 0, 1, 20).unwrap();
        let error = join(&store, 1, 2, 20).unwrap_err();
        assert!(matches!(error, Error::Disagree { what: "world size", other: 0, .. }), "{error}");
    }

    #[test]
    fn channels_differ_by_world_name_and_epoch() {
        let base = channel(1, "a", 0);
        assert!(base != channel(2, "a", 0) && base != channel(1, "b", 0) && base != channel(1, "a", 1));
    }
}
