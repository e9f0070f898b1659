//! Sets that go by the ring of the coordinator's own host, beside callers who come over the network: one order for all.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use pb::store_call::Call;
use pb::store_reply::Reply;
use podring_proto as pb;
use podring_rendezvous::coordinator::{Config, Coordinator};
use podring_rendezvous::decide::keyvalue;
use podring_rendezvous::refusal::Refusal;
use podring_rendezvous::session::{Access, Error, Store};
use prost::Message as _;

const SILENCE: Duration = Duration::from_secs(1);
const SOON: Duration = Duration::from_secs(10);

fn start(config: Config) -> Coordinator {
    Coordinator::start(Config { silence: SILENCE, ..config }).unwrap()
}

fn client(coordinator: &Coordinator) -> Store {
    Store::connect(&Access { timeout: SOON, ..Access::new(coordinator.addresses()[0].to_string()) }).unwrap()
}

/// One of another host: it never comes through the Unix socket, so it has no board.
struct Far(TcpStream);

impl Far {
    fn new(coordinator: &Coordinator) -> Far {
        let stream = TcpStream::connect(coordinator.addresses()[0]).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut far = Far(stream);
        far.0.write_all(b"podring-store/1\n").unwrap();
        far.send(&pb::StoreHello { version: "1.1".into(), token: String::new(), client: 0, sent: 0 });
        assert!(matches!(far.reply(), Reply::Hello(_)));
        far
    }

    fn send(&mut self, message: &impl prost::Message) {
        let bytes = message.encode_to_vec();
        self.0.write_all(&[&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat()).unwrap();
    }

    fn reply(&mut self) -> Reply {
        let mut head = [0; 4];
        self.0.read_exact(&mut head).unwrap();
        let mut bytes = vec![0; u32::from_le_bytes(head) as usize];
        self.0.read_exact(&mut bytes).unwrap();
        pb::StoreReply::decode(&bytes[..]).unwrap().reply.unwrap()
    }

    fn call(&mut self, call: Call) -> Reply {
        self.send(&pb::StoreCall { number: 1, quiet: false, after: 0, call: Some(call) });
        self.reply()
    }

    fn get(&mut self, key: &str, timeout: Duration) -> Option<Vec<u8>> {
        let timeout_ms = timeout.as_millis() as u32;
        match self.call(Call::Get(pb::GetRequest { instance: 0, key: key.into(), timeout_ms })) {
            Reply::Bytes(pb::Value { value }) => Some(value),
            _ => None,
        }
    }

    fn set(&mut self, key: &str, value: &[u8]) {
        let set = pb::SetRequest { instance: 0, key: key.into(), value: value.into() };
        assert!(matches!(self.call(Call::Set(set)), Reply::Done(_)));
    }
}

/// What has been set, and what a wait has seen, everybody finds from then on, wherever he is and whatever he does to it.
#[test]
fn what_is_done_is_done_for_everybody() {
    let coordinator = start(Config::default());
    let (sets, waits, mut far) = (client(&coordinator), client(&coordinator), Far::new(&coordinator));
    thread::scope(|scope| {
        for round in 0..300 {
            let key = format!("k{round}");
            let wait = scope.spawn({
                let (waits, key) = (&waits, key.clone());
                move || waits.wait(&[key], SOON)
            });
            sets.set(&key, b"1").unwrap();
            match round % 4 {
                0 => assert_eq!(far.get(&key, Duration::ZERO).unwrap(), b"1"),
                1 => {
                    wait.join().unwrap().unwrap();
                    let (expected, desired) = (b"1".to_vec(), b"2".to_vec());
                    let set =
                        pb::CompareSetRequest { instance: 0, key: key.clone(), expected, desired: desired.clone() };
                    assert_eq!(far.call(Call::CompareSet(set)), Reply::Bytes(pb::Value { value: desired }));
                    assert_eq!(waits.get(&key, Duration::ZERO).unwrap(), b"2");
                }
                2 => {
                    wait.join().unwrap().unwrap();
                    let add = pb::AddRequest { instance: 0, key: key.clone(), amount: 4 };
                    assert_eq!(far.call(Call::Add(add)), Reply::Value(pb::Number { value: 5 }));
                    sets.set(&key, b"7").unwrap();
                    assert_eq!(waits.add(&key, 1).unwrap(), 8);
                    waits.append(&key, b"x").unwrap();
                    assert_eq!(far.get(&key, Duration::ZERO).unwrap(), b"8x");
                }
                _ => {
                    wait.join().unwrap().unwrap();
                    let delete = pb::DeleteRequest { instance: 0, key: key.clone() };
                    assert_eq!(far.call(Call::Delete(delete)), Reply::Flag(pb::Flag { value: true }));
                    // Gone for all, the board included.
                    assert!(waits.wait(&[&key], Duration::from_millis(1)).is_err());
                    assert!(!sets.check(std::slice::from_ref(&key)).unwrap());
                }
            }
        }
    });
}

/// One who waits at the coordinator is woken at once by a set that may have gone by the ring, however the two meet.
#[test]
fn sets_wake_those_of_other_hosts() {
    let coordinator = start(Config::default());
    let (near, mut far) = (client(&coordinator), Far::new(&coordinator));
    thread::scope(|scope| {
        scope.spawn(move || {
            for round in 0..500 {
                assert_eq!(far.get(&format!("near{round}"), SOON).unwrap(), b"n");
                far.set(&format!("far{round}"), b"f");
            }
        });
        for round in 0..500 {
            let began = Instant::now();
            near.set(&format!("near{round}"), b"n").unwrap();
            near.wait(&[format!("far{round}")], SOON).unwrap();
            assert!(began.elapsed() < SILENCE, "{round}: {:?}", began.elapsed());
        }
    });
}

/// Sets that nobody asks for reach the store soon all the same, and more than the ring holds are no trouble.
#[test]
fn any_number_of_sets() {
    const SETS: usize = 60_000;
    let coordinator = start(Config::default());
    let (store, other) = (client(&coordinator), client(&coordinator));
    for number in 0..SETS {
        store.set(&format!("k{number}"), b"a value of some length").unwrap();
        store.set("last", number.to_string().as_bytes()).unwrap();
        // Longer than what goes by the ring, in between.
        if number % 1000 == 0 {
            store.set("last", &[7; 10_000]).unwrap();
            store.multi_set(&["many", "last"], &["1", "2"]).unwrap();
            store.set("last", number.to_string().as_bytes()).unwrap();
        }
    }
    assert_eq!(other.get("last", Duration::ZERO).unwrap(), (SETS - 1).to_string().into_bytes());
    assert_eq!(other.num_keys().unwrap(), SETS as i64 + 2);
    store.set("one more", b"").unwrap();
    drop(store);
    let keys = || other.status().unwrap().keys;
    assert_eq!(keys(), SETS as u64 + 3);
}

/// Waits for several keys, some of which others delete and set again: a wait ends when all are there.
#[test]
fn waits_for_several_keys() {
    let coordinator = start(Config::default());
    let (store, other) = (client(&coordinator), client(&coordinator));
    thread::scope(|scope| {
        for round in 0..100 {
            let keys: Vec<String> = (0..20).map(|key| format!("{round}/{key}")).collect();
            let wait = scope.spawn({
                let (store, keys) = (&store, keys.clone());
                move || store.wait(&keys, SOON)
            });
            for key in keys.iter().skip(round % 3) {
                other.set(key, b"").unwrap();
            }
            if round % 3 > 0 {
                assert!(other.delete(&keys[10]).unwrap());
                keys.iter().take(round % 3).for_each(|key| other.set(key, b"").unwrap());
                thread::sleep(Duration::from_millis(1));
                assert!(!wait.is_finished(), "{round}: it lacks a key");
                other.set(&keys[10], b"").unwrap();
            }
            wait.join().unwrap().unwrap();
        }
    });
    // More than are looked for on the board.
    let many: Vec<String> = (0..1000).map(|key| format!("many/{key}")).collect();
    thread::scope(|scope| {
        let wait = scope.spawn(|| store.wait(&many, SOON));
        many.iter().for_each(|key| other.set(key, b"").unwrap());
        wait.join().unwrap().unwrap();
    });
    let error = store.wait(&["many/1", "never", "many/2"], Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error.refusal(), Some(Refusal::KeysMissing { keys, .. }) if keys[..] == ["never"]), "{error}");
}

/// What one has seen is in the journal.
#[test]
fn with_a_state_directory_a_key_that_was_seen_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let coordinator = start(Config { state_dir: Some(dir.path().to_owned()), ..Config::default() });
    let (sets, waits) = (client(&coordinator), client(&coordinator));
    for round in 0..20 {
        let key = format!("a key of round {round}");
        sets.set(&key, b"v").unwrap();
        waits.wait(&[&key], SOON).unwrap();
        let log = std::fs::read(dir.path().join("store.log")).unwrap();
        assert!(log.windows(key.len()).any(|part| part == key.as_bytes()), "{round}");
    }
}

/// The limits hold, and what a wait has seen is never refused afterwards.
#[test]
fn a_store_that_fills_up() {
    let (keys, _) = (100_000, ());
    let limits = keyvalue::Limits { keys, ..keyvalue::Limits::default() };
    let coordinator = start(Config { store: limits, ..Config::default() });
    let (sets, waits) = (client(&coordinator), client(&coordinator));
    let mut refused = None;
    for number in 0..keys + 100 {
        let key = format!("k{number}");
        sets.set(&key, b"").unwrap();
        if number % 1000 == 0 || number >= keys {
            // Told to the one who set it, at his next answered call.
            if let Err(error) = sets.check(std::slice::from_ref(&key)) {
                refused.get_or_insert((number, error));
            } else {
                waits.wait(&[&key], Duration::from_millis(1)).unwrap();
                assert_eq!(waits.get(&key, Duration::ZERO).unwrap(), b"");
            }
        }
    }
    let (number, error) = refused.unwrap();
    assert!(number >= keys, "{number}");
    assert!(matches!(error.refusal(), Some(Refusal::TooMuch { limit: 100_000, .. })), "{error}");
    assert_eq!(waits.num_keys().unwrap(), keys as i64);
}

/// The board of the coordinator's next life shows nothing of the last one's store.
#[test]
fn a_lost_store_is_lost_for_waits_too() {
    let first = start(Config::default());
    let (address, store) = (first.addresses()[0], client(&first));
    store.set("k", b"v").unwrap();
    store.wait(&["k"], SOON).unwrap();
    first.stop();
    let second = start(Config { bind: vec![address], ..Config::default() });
    client(&second).set("k", b"another").unwrap();
    let ended = [store.wait(&["k"], SOON), store.wait(&["k"], SOON), store.add("k", 1).map(drop)];
    let lost = |end: &Result<(), Error>| matches!(end, Err(error) if matches!(error.refusal(), Some(Refusal::StoreLost { .. })));
    assert!(ended.iter().skip(1).all(lost) && ended[0].is_err(), "{ended:?}");
    store.set("k", b"v").unwrap();
    assert!(store.check(&["k".to_owned()]).is_err());
    assert_eq!(client(&second).get("k", SOON).unwrap(), b"another");
}
