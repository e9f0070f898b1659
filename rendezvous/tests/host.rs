//! Ranks of played hosts, as threads of one process: how they find their coordinator, share an agent, and hear of each
//! other. What needs a process to die is in tests/rendezvous (Python).
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use podring_rendezvous::bootstrap::{Board, BoardError, JoinError, Joined, Newcomer, Settings};
use podring_rendezvous::coordinator::{Config, Coordinator};
use podring_rendezvous::decide::roster::{Failure, Mismatch};
use podring_rendezvous::host::{Notice, SeatError};
use podring_rendezvous::refusal::{RankAt, Refusal};
use podring_rendezvous::session::{Access, Store};

const SOON: Duration = Duration::from_secs(10);
const SILENCE: Duration = Duration::from_secs(1);

/// A launcher's store.
#[derive(Clone, Default)]
struct Memory(Arc<Mutex<HashMap<String, Vec<u8>>>>);

impl Board for Memory {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), BoardError> {
        self.0.lock().unwrap().insert(key.to_owned(), value.to_owned());
        Ok(())
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BoardError> {
        Ok(self.0.lock().unwrap().get(key).cloned())
    }
}

#[derive(Clone)]
struct Rank {
    board: Memory,
    settings: Settings,
    rank: u32,
    size: u32,
    /// Played hosts have the same machine, so loopback leads to it.
    host: &'static str,
    timeout: Duration,
}

impl Rank {
    fn join(&self) -> Result<Joined, JoinError> {
        let newcomer = Newcomer {
            board: &self.board,
            settings: &self.settings,
            rank: self.rank,
            world_size: self.size,
            timeout: self.timeout,
            host: self.host.to_owned(),
            // Tests run side by side in one network namespace.
            host_id: format!("{}-{:p}", self.host, Arc::as_ptr(&self.board.0)),
            machine: "machine".into(),
            addresses: vec![IpAddr::V4(Ipv4Addr::LOCALHOST)],
            detail: format!("detail {}", self.rank).into_bytes(),
            hosts: Vec::new(),
            expected: Vec::new(),
            first_host: Some("head".into()),
        };
        newcomer.join(&mut || false)
    }
}

fn quick() -> Settings {
    Settings { silence: Some(SILENCE), ..Settings::default() }
}

/// A rank of each of these hosts, in order.
fn ranks(settings: &Settings, hosts: &[&'static str]) -> Vec<Rank> {
    let board = Memory::default();
    let size = hosts.len() as u32;
    let one = |(rank, host): (usize, &&'static str)| Rank {
        board: board.clone(),
        settings: settings.clone(),
        rank: rank as u32,
        size,
        host,
        timeout: SOON,
    };
    hosts.iter().enumerate().map(one).collect()
}

/// Each on a thread, for at most 30 s.
fn together(ranks: Vec<Rank>) -> Vec<Result<Joined, JoinError>> {
    let receivers: Vec<_> = ranks
        .into_iter()
        .map(|rank| {
            let (tx, rx) = mpsc::channel();
            thread::spawn(move || tx.send(rank.join()));
            rx
        })
        .collect();
    receivers.into_iter().map(|rx| rx.recv_timeout(Duration::from_secs(30)).expect("hung")).collect()
}

fn all(ranks: Vec<Rank>) -> Vec<Joined> {
    together(ranks).into_iter().map(|joined| joined.unwrap_or_else(|error| panic!("{error}"))).collect()
}

/// What a seat hears.
fn notices(joined: &Joined) -> mpsc::Receiver<Notice> {
    let (tx, rx) = mpsc::channel();
    let tx = Mutex::new(tx);
    joined.seat.listen(Box::new(move |notice| drop(tx.lock().unwrap().send(notice.clone()))));
    rx
}

#[test]
fn a_world_forms_on_one_host_and_on_several() {
    for hosts in [&["a"; 2][..], &["a"; 8], &["a", "b"], &["a", "b", "a", "b", "c"]] {
        let joined = all(ranks(&quick(), hosts));
        let world = joined[0].seat.world().clone();
        assert_eq!((world.epoch, world.world_size as usize), (1, hosts.len()));
        for (rank, one) in joined.iter().enumerate() {
            assert_eq!(*one.seat.world(), world);
            assert_eq!(world.host_of(rank as u32), Some(hosts[rank]));
            assert!(one.secret.is_some() && one.secret == joined[0].secret && one.inside_rank_0);
        }
        // One agent for each host.
        let mut different = hosts.to_vec();
        different.sort_unstable();
        different.dedup();
        assert_eq!(world.hosts.len(), different.len());
        let details: Vec<_> = world.hosts.iter().flat_map(|host| host.ranks.iter().zip(&host.details)).collect();
        assert!(details.iter().all(|(rank, detail)| **detail == format!("detail {rank}").into_bytes()));
        // In the order in which they come, rank 0 first: those who are left are told of no loss.
        let rest: Vec<_> = joined[1..].iter().map(notices).collect();
        joined.iter().for_each(|one| one.seat.leave());
        thread::sleep(Duration::from_millis(50));
        for notices in rest {
            assert_eq!(notices.try_iter().collect::<Vec<_>>(), []);
        }
    }
}

#[test]
fn a_failure_reaches_every_rank_and_the_first_stands() {
    let joined = all(ranks(&quick(), &["a", "a", "b", "b"]));
    let heard: Vec<_> = joined.iter().map(notices).collect();
    let held = |rank: u32| (rank, if rank == 2 { "broadcast" } else { "all_reduce" }.to_owned());
    let mismatch = Mismatch { sequence: 3, field: "call".into(), held: (0..4).map(held).collect(), blamed: vec![] };
    let report = |detail: &[u8]| Failure {
        epoch: 0,
        group: "g".into(),
        by: 0,
        detail: detail.to_vec(),
        mismatch: Some(mismatch.clone()),
    };
    joined[1].seat.report(report(b"first")).unwrap();
    for (rank, heard) in heard.iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let Notice::Failed(failure) = heard.recv_timeout(SOON).unwrap() else { panic!("rank {rank}") };
        assert_eq!((failure.by, failure.detail.as_slice()), (1, &b"first"[..]), "rank {rank}");
        assert_eq!(failure.mismatch.as_ref().unwrap().blamed, [2], "rank {rank}");
        assert_eq!(joined[rank].seat.failure("g"), Some(failure));
    }
    joined[2].seat.report(report(b"second")).unwrap();
    thread::sleep(Duration::from_millis(50));
    assert_eq!(joined[0].seat.failure("g").unwrap().detail, b"first");
    assert!(joined[0].seat.failure("other").is_none());
}

/// What a rank says last may lie unread while its agent finds that it can tell it nothing more.
#[test]
fn a_rank_that_leaves_while_its_agent_tells_something_is_no_loss() {
    for _ in 0..100 {
        let joined = all(ranks(&quick(), &["a", "a", "a", "a"]));
        let heard = [notices(&joined[1]), notices(&joined[2])];
        let report = Failure { epoch: 0, group: "g".into(), by: 0, detail: Vec::new(), mismatch: None };
        thread::scope(|scope| {
            let seat = |rank: usize| &joined[rank].seat;
            scope.spawn(move || seat(3).leave());
            // Refused if the coordinator, rank 0's, has ended by then.
            scope.spawn(move || drop(seat(1).report(report)));
            scope.spawn(move || seat(0).leave());
        });
        thread::sleep(Duration::from_millis(10));
        for notice in heard.iter().flat_map(mpsc::Receiver::try_iter) {
            assert!(!matches!(notice, Notice::Lost(_)), "{notice:?}");
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named_on_every_rank() {
    let mut three = ranks(&quick(), &["a", "a", "b", "c"]);
    three.truncate(3);
    // The three must all have come by then.
    three.iter_mut().for_each(|rank| rank.timeout = Duration::from_secs(2));
    let began = Instant::now();
    for failed in together(three) {
        let Err(JoinError::Seat(SeatError::Late(late))) = failed else { panic!("{:?}", failed.err()) };
        assert_eq!((late.missing, late.world_size), (vec![RankAt { rank: 3, host: None }], 4));
    }
    assert!(began.elapsed() < SOON);
}

#[test]
fn rank_0_that_never_comes_is_named() {
    let mut one = ranks(&quick(), &["a", "a"]).remove(1);
    one.timeout = Duration::from_millis(200);
    let error = one.join().err().unwrap();
    assert!(matches!(error, JoinError::NoRankZero { .. }) && error.to_string().contains("rank 0 on head"), "{error}");
}

#[test]
fn twins_and_differing_sizes_are_named() {
    // On one host the agent finds out, between hosts the coordinator.
    for host in ["a", "b"] {
        let mut three = ranks(&quick(), &["a", "a", host]);
        three.iter_mut().for_each(|rank| rank.timeout = Duration::from_secs(1));
        three[2].rank = 1;
        let ends = together(three);
        let twins = ends.iter().filter(|end| {
            let refused = matches!(end, Err(JoinError::Seat(SeatError::Refused(Refusal::Twin { rank: 1, .. }))));
            let late = matches!(end, Err(JoinError::Seat(SeatError::Late(late))) if late.to_string().contains("rank 1 announced twice"));
            refused || late
        });
        assert_eq!(twins.count(), 3, "{:?}", ends.iter().map(|end| end.as_ref().err()).collect::<Vec<_>>());

        let mut two = ranks(&quick(), &["a", host]);
        two.iter_mut().for_each(|rank| rank.timeout = Duration::from_secs(1));
        two[1].size = 3;
        for end in together(two) {
            let text = end.err().unwrap().to_string();
            assert!(text.contains('3') && text.contains("2"), "{text}");
        }
    }
}

#[test]
fn two_rank_zeros_are_named() {
    let mut two = ranks(&quick(), &["a", "b"]);
    two[1].rank = 0;
    two.iter_mut().for_each(|rank| rank.timeout = Duration::from_secs(2));
    let texts: Vec<String> = together(two).into_iter().map(|end| end.err().unwrap().to_string()).collect();
    assert!(texts.iter().any(|text| text.contains("rank 0 announced twice")), "{texts:?}");
    assert!(texts.iter().all(|text| text.contains("rank")), "{texts:?}");
}

#[test]
fn what_an_earlier_life_published_leads_nowhere() {
    let first = ranks(&quick(), &["a", "a", "b"]);
    drop(all(first.clone()));
    // The others come first, and find the dead one's record.
    let late: Vec<_> = first[1..].iter().cloned().map(|rank| thread::spawn(move || rank.join())).collect();
    thread::sleep(Duration::from_millis(200));
    let zero = first[0].join().unwrap();
    for joined in late {
        assert_eq!(joined.join().unwrap().unwrap().seat.world(), zero.seat.world());
    }
}

#[test]
fn strong_jobs_publish_no_secret() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    std::fs::write(&path, "0123456789abcdef").unwrap();
    let two = ranks(&Settings { token_file: Some(path.clone()), ..quick() }, &["a", "b"]);
    let board = two[0].board.clone();
    let joined = all(two.clone());
    let record = String::from_utf8(board.get("podring/coordinator").unwrap().unwrap()).unwrap();
    assert!(record.contains("\"token\":null") && !record.contains("0123456789abcdef"), "{record}");
    drop(joined);
    // Another token on the other host.
    let other = dir.path().join("other");
    std::fs::write(&other, "fedcba9876543210").unwrap();
    let mut two = ranks(&Settings { token_file: Some(path), ..quick() }, &["a", "b"]);
    two[1].settings.token_file = Some(other);
    two.iter_mut().for_each(|rank| rank.timeout = Duration::from_secs(1));
    let ends = together(two);
    let refused = SeatError::Refused(Refusal::Token { given: true });
    assert!(matches!(&ends[1], Err(JoinError::Seat(error)) if *error == refused), "{:?}", ends[1].as_ref().err());
    assert!(matches!(&ends[0], Err(JoinError::Seat(SeatError::Late(late))) if late.missing[0].rank == 1));
}

fn standing(coordinator: &Coordinator) -> Settings {
    Settings { coordinator: Some(coordinator.addresses()[0].to_string()), ..quick() }
}

fn start() -> Coordinator {
    Coordinator::start(Config { silence: SILENCE, ..Config::default() }).unwrap()
}

#[test]
fn a_standing_coordinator_serves_world_after_world() {
    let coordinator = start();
    let four = ranks(&standing(&coordinator), &["a", "a", "b", "b"]);
    for turn in 1..=3 {
        let joined = all(four.clone());
        assert_eq!(joined[0].seat.world().epoch, turn);
        assert!(!joined[0].inside_rank_0 && joined[0].secret.is_none());
        let access = Access { timeout: SOON, ..Access::new(coordinator.addresses()[0].to_string()) };
        let store = Store::connect(&access).unwrap();
        let began = Instant::now();
        // Those of the world before may be leaving still.
        while store.status().unwrap().agents.len() != 2 {
            assert!(began.elapsed() < SOON, "{:?}", store.status().unwrap().agents);
            thread::sleep(Duration::from_millis(5));
        }
        // Whoever leaves first comes back first, to an agent that may have others still.
        let back: Vec<_> = joined
            .into_iter()
            .zip(four.clone())
            .map(|(joined, _)| {
                thread::sleep(Duration::from_millis(10));
                thread::spawn(move || joined.seat.leave())
            })
            .collect();
        back.into_iter().for_each(|one| one.join().unwrap());
    }
}

#[test]
fn absent_coordinator_is_named_on_every_rank() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let mut two = ranks(&Settings { coordinator: Some(address.clone()), ..quick() }, &["a", "a", "b"]);
    two.iter_mut().for_each(|rank| rank.timeout = Duration::from_millis(500));
    for end in together(two) {
        let error = end.err().unwrap();
        assert!(matches!(error, JoinError::Seat(SeatError::NoCoordinator { .. })), "{error}");
        assert!(error.to_string().contains(&address) && error.to_string().contains("refused"), "{error}");
    }
}

#[test]
fn a_restarted_coordinator_gets_its_members_back() {
    let coordinator = start();
    let address = coordinator.addresses()[0];
    let joined = all(ranks(&standing(&coordinator), &["a", "a", "b"]));
    let heard: Vec<_> = joined.iter().map(notices).collect();
    coordinator.stop();
    let again = || Coordinator::start(Config { bind: vec![address], silence: SILENCE, ..Config::default() });
    let end = Instant::now() + SOON;
    let again = loop {
        match again() {
            Ok(coordinator) => break coordinator,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        thread::sleep(Duration::from_millis(20));
    };
    while joined.iter().any(|one| one.seat.epoch() != 2) {
        assert!(Instant::now() < end, "{:?}", joined.iter().map(|one| one.seat.epoch()).collect::<Vec<_>>());
        thread::sleep(Duration::from_millis(10));
    }
    // What is reported now reaches everybody in the new epoch.
    let detail = b"after".to_vec();
    joined[0].seat.report(Failure { epoch: 0, group: "g".into(), by: 0, detail, mismatch: None }).unwrap();
    for heard in &heard[1..] {
        let notice = heard.recv_timeout(SOON).unwrap();
        assert!(matches!(&notice, Notice::Failed(failure) if failure.detail == b"after"), "{notice:?}");
    }
    drop(again);
}

/// The coordinator's own process dies: here its connections are closed, as the system does for a dead process.
#[test]
fn a_coordinator_that_stays_away_is_told_to_nobody_who_can_do_without() {
    let coordinator = start();
    let joined = all(ranks(&standing(&coordinator), &["a", "b"]));
    let heard: Vec<_> = joined.iter().map(notices).collect();
    drop(coordinator);
    thread::sleep(Duration::from_millis(300));
    // A local rank's leaving goes on working, bounded.
    let began = Instant::now();
    joined.iter().for_each(|one| one.seat.leave());
    assert!(began.elapsed() < SOON);
    for heard in heard {
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), []);
    }
}
