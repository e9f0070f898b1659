//! The store stream, by hand and through the client.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use podring_proto as pb;
use podring_rendezvous::coordinator::{Config, Coordinator};
use podring_rendezvous::decide::keyvalue;
use podring_rendezvous::refusal::Refusal;
use podring_rendezvous::secret::Token;
use podring_rendezvous::session::{Access, Error, Store};
use prost::Message as _;

const SILENCE: Duration = Duration::from_secs(1);
const SOON: Duration = Duration::from_secs(10);
const MAGIC: &[u8] = b"podring-store/1\n";
const TOKEN: &str = "0123456789abcdef";

fn coordinator(token: bool) -> Coordinator {
    let token = token.then(|| Token::new(TOKEN).unwrap());
    Coordinator::start(Config { silence: SILENCE, token, ..Config::default() }).unwrap()
}

fn access(coordinator: &Coordinator) -> Access {
    Access { timeout: SOON, ..Access::new(coordinator.addresses()[0].to_string()) }
}

fn raw(coordinator: &Coordinator) -> TcpStream {
    let stream = TcpStream::connect(coordinator.addresses()[0]).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream
}

fn frame(message: &impl prost::Message) -> Vec<u8> {
    let bytes = message.encode_to_vec();
    [&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat()
}

fn hello(token: &str) -> Vec<u8> {
    [MAGIC, &frame(&pb::StoreHello { version: "1.1".into(), token: token.into(), client: 0, sent: 0 })].concat()
}

fn reply(stream: &mut TcpStream) -> pb::StoreReply {
    let mut head = [0; 4];
    stream.read_exact(&mut head).unwrap();
    let mut bytes = vec![0; u32::from_le_bytes(head) as usize];
    stream.read_exact(&mut bytes).unwrap();
    pb::StoreReply::decode(&bytes[..]).unwrap()
}

/// All that comes until the other side closes.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

#[test]
fn without_the_token_nothing_is_answered() {
    let coordinator = coordinator(true);
    let store = Store::connect(&Access { token: Some(Token::new(TOKEN).unwrap()), ..access(&coordinator) }).unwrap();
    store.set("k", b"v").unwrap();
    let get = pb::GetRequest { instance: 0, key: "k".into(), timeout_ms: 0 };
    let get = frame(&pb::StoreCall { number: 1, quiet: false, after: 0, call: Some(pb::store_call::Call::Get(get)) });
    for token in ["", "0123456789abcdeX", "0123456789abcde", "Bearer 0123456789abcdef"] {
        let mut stream = raw(&coordinator);
        stream.write_all(&[hello(token), get.clone()].concat()).unwrap();
        let pb::store_reply::Reply::Refused(refused) = reply(&mut stream).reply.unwrap() else { panic!("{token}") };
        let given = !token.is_empty();
        assert_eq!(refused.why, Some(pb::refusal::Why::Token(pb::BadToken { given })));
        assert!(rest(&mut stream).is_empty());
    }
    // A call in the place of the hello, a hello that is too long or no message.
    let long = [MAGIC, &[0, 0, 1, 0][..], &[7; 3000]].concat();
    let nonsense = [MAGIC, &[3, 0, 0, 0, 0xff, 0xff, 0xff][..]].concat();
    for bytes in [[MAGIC, &get].concat(), long, nonsense, b"podring-store/2\n".to_vec(), b"p".repeat(100)] {
        let mut stream = raw(&coordinator);
        stream.write_all(&bytes).unwrap();
        let answer = rest(&mut stream);
        assert!(answer.len() < 64 && !answer.ends_with(b"v"), "{answer:?}");
    }
    assert_eq!(store.get("k", SOON).unwrap(), b"v");
}

#[test]
fn a_stream_that_says_nothing_is_closed() {
    let coordinator = coordinator(false);
    for begun in [&b""[..], b"p", &MAGIC[..9], MAGIC] {
        let mut stream = raw(&coordinator);
        stream.write_all(begun).unwrap();
        let began = Instant::now();
        assert!(rest(&mut stream).is_empty());
        assert!(began.elapsed() < 4 * SILENCE, "{begun:?}");
    }
}

#[test]
fn a_newer_call_is_refused_and_a_frame_too_long_closes() {
    let coordinator = coordinator(false);
    let mut stream = raw(&coordinator);
    stream.write_all(&hello("")).unwrap();
    assert!(matches!(reply(&mut stream).reply, Some(pb::store_reply::Reply::Hello(_))));
    // Field 99: a call that this coordinator doesn't know.
    stream.write_all(&[&[6, 0, 0, 0][..], &[8, 1, 0x9a, 0x06, 0x01, b'x']].concat()).unwrap();
    let answer = reply(&mut stream);
    assert!(answer.number == 1 && matches!(answer.reply, Some(pb::store_reply::Reply::Refused(_))));
    stream.write_all(&[0xff, 0xff, 0xff, 0x7f]).unwrap();
    assert!(matches!(reply(&mut stream).reply, Some(pb::store_reply::Reply::Refused(_))));
    assert!(rest(&mut stream).is_empty());
}

#[test]
fn a_caller_who_goes_takes_its_call_with_it() {
    let coordinator = coordinator(false);
    let store = Store::connect(&access(&coordinator)).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let asks = {
        let stop = Arc::clone(&stop);
        store.patient(SOON, Some(Arc::new(move || stop.load(Ordering::Relaxed))))
    };
    let popping = thread::spawn(move || asks.queue_pop("q", SOON));
    while store.status().unwrap().waiting == 0 {
        thread::yield_now();
    }
    stop.store(true, Ordering::Relaxed);
    assert_eq!(popping.join().unwrap(), Err(Error::Interrupted { call: "queue_pop" }));
    while store.status().unwrap().waiting != 0 {
        thread::yield_now();
    }
    store.queue_push("q", b"v").unwrap();
    assert_eq!(store.queue_pop("q", SOON).unwrap(), b"v");
}

#[test]
fn many_threads_share_a_client_that_waits() {
    let coordinator = coordinator(false);
    let store = Store::connect(&access(&coordinator)).unwrap();
    thread::scope(|scope| {
        let waiting: Vec<_> = (0..8).map(|_| scope.spawn(|| store.get("late", SOON))).collect();
        while store.status().unwrap().waiting < 8 {
            thread::yield_now();
        }
        store.set("late", b"v").unwrap();
        for one in waiting {
            assert_eq!(one.join().unwrap().unwrap(), b"v");
        }
    });
}

#[test]
fn stopping_ends_waits_and_frees_the_port() {
    let first = coordinator(false);
    let (address, store) = (first.addresses()[0], Store::connect(&access(&first)).unwrap());
    let waiting = {
        let store = store.clone();
        thread::spawn(move || store.get("never", SOON))
    };
    while store.status().unwrap().waiting == 0 {
        thread::yield_now();
    }
    let began = Instant::now();
    first.stop();
    assert!(matches!(waiting.join().unwrap(), Err(Error::CoordinatorLost { .. })));
    // The same port, and the Unix socket beside it.
    let second = Coordinator::start(Config { bind: vec![address], ..Config::default() }).unwrap();
    assert!(store.get("k", Duration::ZERO).unwrap_err().to_string().contains("is lost"));
    assert!(began.elapsed() < SOON);
    second.stop();
    let lost = store.patient(Duration::from_millis(300), None).add("k", 1).unwrap_err();
    assert!(matches!(&lost, Error::CoordinatorLost { endpoint, .. } if *endpoint == address.to_string()), "{lost}");
}

/// A set that isn't waited for comes before everything the client does afterwards, whichever thread and connection that
/// takes.
#[test]
fn sets_come_before_what_follows_them() {
    let coordinator = coordinator(false);
    let store = Store::connect(&access(&coordinator)).unwrap();
    thread::scope(|scope| {
        let (say, said) = mpsc::channel::<u32>();
        let waits: Vec<_> = (0..3).map(|_| scope.spawn(|| store.get("end", SOON))).collect();
        let looks = scope.spawn(|| {
            for number in said {
                assert!(store.check(&[format!("k{number}")]).unwrap(), "{number}");
                assert_eq!(store.get("last", Duration::ZERO).unwrap(), number.to_string().into_bytes());
                store.set("seen", number.to_string().as_bytes()).unwrap();
            }
        });
        for number in 0..500 {
            store.set(&format!("k{number}"), b"").unwrap();
            store.set("last", number.to_string().as_bytes()).unwrap();
            say.send(number).unwrap();
            while store.get("seen", SOON).unwrap() != number.to_string().into_bytes() {
                thread::yield_now();
            }
        }
        drop(say);
        looks.join().unwrap();
        store.set("end", b"").unwrap();
        waits.into_iter().for_each(|wait| assert!(wait.join().unwrap().is_ok()));
    });
}

#[test]
fn a_refused_set_is_told_with_the_next_answer() {
    let limits = keyvalue::Limits { keys: 1, ..keyvalue::Limits::default() };
    let config = Config { silence: SILENCE, store: limits, ..Config::default() };
    let coordinator = Coordinator::start(config).unwrap();
    let store = Store::connect(&access(&coordinator)).unwrap();
    store.set("a", b"").unwrap();
    store.set("b", b"").unwrap();
    let error = store.multi_get(&["a".to_owned()], SOON).unwrap_err();
    assert!(matches!(error.refusal(), Some(Refusal::TooMuch { limit: 1, .. })), "{error}");
    assert_eq!(store.get("a", SOON).unwrap(), b"");
    assert!(!store.check(&["b".to_owned()]).unwrap());
    // And of a multi_set, of which nothing is done then.
    store.multi_set(&["a", "b"], &[b"1", b"2"]).unwrap();
    let error = store.get("a", SOON).unwrap_err();
    assert!(matches!(error.refusal(), Some(Refusal::TooMuch { limit: 1, .. })), "{error}");
    assert_eq!(store.get("a", SOON).unwrap(), b"");
    // One that can't be in order is told at once.
    assert!(store.multi_set(&["a", "b"], &[b"1"]).unwrap_err().refusal().is_some());
    let long = "k".repeat(5000);
    assert!(matches!(store.multi_set(&[long], &[b"1"]).unwrap_err().refusal(), Some(Refusal::TooMuch { .. })));
}

#[test]
fn many_keys_are_there_before_what_follows_them() {
    let coordinator = coordinator(false);
    let store = Store::connect(&access(&coordinator)).unwrap();
    let keys: Vec<String> = (0..64).map(|key| format!("k{key}")).collect();
    thread::scope(|scope| {
        // Another connection, with calls of every kind.
        let (say, said) = mpsc::channel::<u32>();
        let looks = scope.spawn(|| {
            for number in said {
                let expected = vec![number.to_string().into_bytes(); 64];
                assert_eq!(store.multi_get(&keys, SOON).unwrap(), expected);
                assert_eq!(store.get("k63", SOON).unwrap(), expected[0]);
                store.set("seen", &expected[0]).unwrap();
            }
        });
        for number in 0..200 {
            store.multi_set(&keys, &vec![number.to_string(); 64]).unwrap();
            say.send(number).unwrap();
            while store.get("seen", SOON).unwrap() != number.to_string().into_bytes() {
                thread::yield_now();
            }
        }
        drop(say);
        looks.join().unwrap();
    });
}

/// On the coordinator's own host a wait is no call: nobody waits at the coordinator.
#[test]
fn a_wait_on_this_host_is_no_call() {
    let coordinator = coordinator(true);
    let access = Access { token: Some(Token::new(TOKEN).unwrap()), ..access(&coordinator) };
    let (store, other) = (Store::connect(&access).unwrap(), Store::connect(&access).unwrap());
    other.set("before", b"").unwrap();
    other.get("before", SOON).unwrap();
    store.wait(&["before"], SOON).unwrap();
    thread::scope(|scope| {
        let waits: Vec<_> = (0..4).map(|_| scope.spawn(|| store.wait(&["late"], SOON))).collect();
        let pushed = scope.spawn(|| store.wait(&["queue"], SOON));
        let several = scope.spawn(|| store.wait(&["late", "before", "later"], SOON));
        thread::sleep(Duration::from_millis(50));
        assert_eq!(other.status().unwrap().waiting, 0);
        other.set("late", b"v").unwrap();
        other.queue_push("queue", b"v").unwrap();
        other.set("later", b"v").unwrap();
        waits.into_iter().for_each(|wait| wait.join().unwrap().unwrap());
        pushed.join().unwrap().unwrap();
        several.join().unwrap().unwrap();
    });
    // What is gone is waited for, and named after the time.
    assert!(other.delete("late").unwrap() && other.queue_pop("queue", SOON).is_ok());
    for key in ["late", "queue", "never"] {
        let (began, limit) = (Instant::now(), Duration::from_millis(150));
        let error = store.wait(&[key], limit).unwrap_err();
        assert!((limit..SOON).contains(&began.elapsed()), "{:?}", began.elapsed());
        let Some(Refusal::KeysMissing { keys, waited }) = error.refusal() else { panic!("{error}") };
        assert!(keys[..] == [key] && *waited >= limit, "{error}");
    }
}

/// Every set wakes whoever waits for it, and whoever has seen a key finds it.
#[test]
fn waits_on_this_host_play_ping_pong() {
    let coordinator = coordinator(false);
    let access = access(&coordinator);
    thread::scope(|scope| {
        for side in 0..4 {
            let store = Store::connect(&access).unwrap();
            scope.spawn(move || {
                for round in 0..500 {
                    let key = |side: i32| format!("{round}/{}", side % 4);
                    if side == 0 {
                        store.set(&key(0), b"v").unwrap();
                    }
                    store.wait(&[key(side + 3)], SOON).unwrap();
                    assert_eq!(store.get(&key(side + 3), Duration::ZERO).unwrap(), b"v");
                    if side != 0 {
                        store.set(&key(side), b"v").unwrap();
                    }
                }
            });
        }
    });
}

#[test]
fn a_wait_on_this_host_ends_with_the_coordinator_and_when_asked_to() {
    let first = coordinator(false);
    let store = Store::connect(&access(&first)).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let asked = {
        let stop = Arc::clone(&stop);
        store.patient(SOON, Some(Arc::new(move || stop.load(Ordering::Relaxed))))
    };
    thread::scope(|scope| {
        let (waits, asked) =
            (scope.spawn(|| store.wait(&["never"], SOON)), scope.spawn(|| asked.wait(&["never"], SOON)));
        thread::sleep(Duration::from_millis(50));
        stop.store(true, Ordering::Relaxed);
        assert_eq!(asked.join().unwrap(), Err(Error::Interrupted { call: "wait" }));
        let began = Instant::now();
        first.stop();
        assert!(matches!(waits.join().unwrap(), Err(Error::CoordinatorLost { .. })));
        assert!(began.elapsed() < SOON / 2);
    });
    // Not even for a key that the board still shows.
    let lost = store.patient(Duration::from_millis(300), None).wait(&["never"], Duration::from_millis(300));
    assert!(matches!(lost, Err(Error::CoordinatorLost { .. })), "{lost:?}");
}

/// The next life of a coordinator with a state directory shows what the last one had.
#[test]
fn the_next_life_has_a_board_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { silence: SILENCE, state_dir: Some(dir.path().to_owned()), ..Config::default() };
    let first = Coordinator::start(config.clone()).unwrap();
    let store = Store::connect(&access(&first)).unwrap();
    let address = first.addresses()[0];
    store.set("kept", b"v").unwrap();
    store.wait(&["kept"], SOON).unwrap();
    // Answered, so that it is known to be done.
    assert_eq!(store.get("kept", SOON).unwrap(), b"v");
    first.stop();
    let second = Coordinator::start(Config { bind: vec![address], ..config }).unwrap();
    let other = Store::connect(&access(&second)).unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| {
            store.wait(&["kept"], SOON)?;
            store.wait(&["new"], SOON)
        });
        thread::sleep(Duration::from_millis(50));
        other.set("new", b"v").unwrap();
        waits.join().unwrap().unwrap();
    });
}
