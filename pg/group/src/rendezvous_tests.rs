//! A rendezvous that the test plays.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use podring_collective::{Collective, Kind as Op};
use smallvec::SmallVec;

use super::*;
use crate::engine::{Broken, DeviceCall, Engine, Operation};
use crate::error::Kind;
use crate::group::{Config, ProcessGroup};
use crate::runtime::Runtime;
use crate::store::{MemoryStore, StoreError};
use crate::world::form;

type Tell = Box<dyn Fn(News) + Send + Sync>;

/// What is seen and said of one rank's place.
#[derive(Default)]
struct Played {
    tell: Mutex<Option<Tell>>,
    reported: Mutex<Vec<(u64, Failure)>>,
    left: AtomicU32,
}

struct Place(Arc<Played>);

struct Knowledge(Arc<Played>, u64);

impl Membership for Knowledge {
    fn report(&self, failure: &Failure) -> Result<(), StoreError> {
        self.0.reported.lock().push((self.1, failure.clone()));
        Ok(())
    }

    fn watch(&self) -> Result<Option<Failure>, StoreError> {
        Ok(None)
    }

    fn epoch(&self) -> u64 {
        7
    }
}

impl Seat for Place {
    fn membership(&self, channel: u64, _: u64) -> Box<dyn Membership> {
        Box::new(Knowledge(self.0.clone(), channel))
    }

    fn listen(&self, tell: Tell) {
        *self.0.tell.lock() = Some(tell);
    }

    fn leave(&self) {
        self.0.left.fetch_add(1, Ordering::SeqCst);
    }
}

struct Player(Arc<Played>);

impl Rendezvous for Player {
    fn join(
        &self,
        forming: &Forming<'_>,
        store: &Arc<dyn Store>,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<(World, Arc<dyn Seat>), Error> {
        Ok((form(&**store, forming, interrupted)?, Arc::new(Place(self.0.clone()))))
    }
}

/// Two ranks; rank 0 does `body` with its default group, a group within it, and its place. Rank 1 only waits.
fn play(body: impl Fn(&ProcessGroup, &ProcessGroup, &Played) + Sync) {
    let store = MemoryStore::default();
    let together = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (store, body, together) = (store.clone(), &body, &together);
            scope.spawn(move || {
                let played = Arc::new(Played::default());
                let config = |name: &str, global_ranks| Config {
                    rank,
                    size: 2,
                    name: name.into(),
                    global_ranks,
                    timeout: Duration::from_secs(30),
                    store: Arc::new(store.clone()),
                    rendezvous: Some(Arc::new(Player(played.clone()))),
                };
                let runtime = Runtime::start(podring_fabric::hub::Config::default()).unwrap();
                let world = ProcessGroup::form(&runtime, config("world", None), || false).unwrap();
                let within = ProcessGroup::form(&runtime, config("within", Some(vec![0, 1])), || false).unwrap();
                if rank == 0 {
                    body(&world, &within, &played);
                }
                together.wait();
                within.shutdown();
                assert_eq!(played.left.load(Ordering::SeqCst), 0);
                world.shutdown();
                assert_eq!(played.left.load(Ordering::SeqCst), 1);
                runtime.stop();
            });
        }
    });
}

fn barrier(group: &ProcessGroup) -> Error {
    let call = Collective { kind: Op::Barrier, parts: SmallVec::new() };
    group.post(call, None, None, true).unwrap().wait(None, || false).unwrap_err()
}

#[test]
fn a_loss_fails_what_needs_the_rank_and_is_reported_for_its_group() {
    play(|world, within, played| {
        let how = "told so by the test".to_owned();
        (played.tell.lock().as_ref().unwrap())(News::Lost { rank: 1, how });
        let start = Instant::now();
        for group in [world, within] {
            let error = barrier(group);
            assert_eq!(error.kind(), Kind::PeerLost, "{error}");
            assert!(error.to_string().contains("lost rank 1") && error.to_string().contains("told so"), "{error}");
        }
        assert!(start.elapsed() < Duration::from_secs(10));
        // The watchdog tells each group's members.
        while played.reported.lock().len() < 2 {
            assert!(start.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(10));
        }
        let mut channels: Vec<u64> = played.reported.lock().iter().map(|(channel, _)| *channel).collect();
        channels.sort_unstable();
        channels.dedup();
        assert_eq!(channels.len(), 2);
    });
}

/// An engine that notes how it was failed.
#[derive(Default)]
struct Noted(Mutex<Vec<(Option<u32>, String)>>);

impl Engine for Noted {
    fn post(&self, _: u64, _: DeviceCall, _: Duration) -> Arc<dyn Operation> {
        unreachable!("nothing is posted")
    }

    fn warm(&self, _: &[Collective], _: &mut dyn FnMut(usize, usize)) -> Result<(), Broken> {
        Ok(())
    }

    fn fail(&self, by: Option<u32>, why: &str) {
        self.0.lock().push((by, why.to_owned()));
    }

    fn broken(&self) -> Option<Broken> {
        None
    }

    fn pending(&self) -> usize {
        0
    }

    fn close(&self) {}
}

#[test]
fn a_failure_that_a_member_reported_fails_the_group() {
    play(|world, within, played| {
        let engines = [Arc::new(Noted::default()), Arc::new(Noted::default())];
        let shared = engines.clone().map(|engine| engine as Arc<dyn Engine>);
        for (engine, group) in shared.iter().zip([within, world]) {
            within.0.process.engines.lock().push((group.0.channel, Arc::downgrade(engine)));
        }
        let failure = Failure::Aborted { by: Some(1), why: "enough".into() };
        let news = News::Failed { channel: within.0.channel, failure };
        (played.tell.lock().as_ref().unwrap())(news);
        let error = barrier(within);
        assert!(error.kind() == Kind::Aborted && error.to_string().contains("enough"), "{error}");
        assert!(world.error().is_none());
        // The group's programs as well.
        let noted = engines.map(|engine| engine.0.lock().clone());
        assert_eq!(noted[0].len(), 1);
        assert!(noted[0][0].1.contains("enough") && noted[1].is_empty(), "{noted:?}");
    });
}

/// Groups of fresh names leave nothing behind once their world has ended; within it a name keeps its count, so that a
/// group of it made again is another one.
#[test]
fn names_are_forgotten_with_their_world() {
    let runtime = Runtime::start(podring_fabric::hub::Config::default()).unwrap();
    let store = MemoryStore::default();
    let form = |name: &str, global_ranks| {
        let (timeout, store) = (Duration::from_secs(10), Arc::new(store.clone()));
        let config = Config { rank: 0, size: 1, name: name.into(), global_ranks, timeout, store, rendezvous: None };
        ProcessGroup::form(&runtime, config, || false).unwrap()
    };
    let process = &runtime.0;
    for life in 0..3 {
        let world = form("world", None);
        let epochs = Arc::downgrade(&process.current.lock().get().unwrap().epochs);
        let mut channels: Vec<u64> = Vec::new();
        for number in 0..100 {
            let group = form(&format!("{}", number % 50), Some(vec![0]));
            channels.push(group.0.channel);
            group.shutdown();
        }
        channels.sort_unstable();
        channels.dedup();
        assert_eq!((channels.len(), epochs.upgrade().unwrap().names()), (100, 50));
        world.shutdown();
        drop(world);
        assert!(epochs.upgrade().is_none(), "life {life}");
        assert_eq!(process.epochs.names(), 1);
    }
    runtime.stop();
}

/// A subgroup without a default group that podring formed: its members meet in the store, and one doesn't come.
#[test]
fn an_error_of_forming_says_whose_numbers_it_has() {
    let forming = |members: &[u32], rank| {
        let runtime = Runtime::start(podring_fabric::hub::Config::default()).unwrap();
        let config = Config {
            rank,
            size: 2,
            name: "part".into(),
            global_ranks: Some(members.to_vec()),
            timeout: Duration::from_millis(100),
            store: Arc::new(MemoryStore::default()),
            rendezvous: None,
        };
        let error = ProcessGroup::form(&runtime, config, || false).err().unwrap();
        runtime.stop();
        error.to_string()
    };
    let error = forming(&[1, 2], 0);
    assert!(error.contains("no sign of rank 1 within 100 ms"), "{error}");
    assert!(error.ends_with("[group part of ranks 1, 2 (its rank 0)]"), "{error}");
    let error = forming(&[0, 1], 1);
    assert!(error.ends_with("[group part, rank 1]"), "{error}");
}
