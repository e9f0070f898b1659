//! Coordinator and sessions over loopback, in one process.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use podring_rendezvous::coordinator::{Config, Coordinator};
use podring_rendezvous::decide::keyvalue;
use podring_rendezvous::decide::roster::{self, Failure, Mismatch};
use podring_rendezvous::refusal::{RankAt, Refusal};
use podring_rendezvous::secret::{Tls, Token};
use podring_rendezvous::session::{Access, Error, Ranks, Session, Store};

const SILENCE: Duration = Duration::from_secs(1);
const SOON: Duration = Duration::from_secs(10);
/// A limit that passes: those that do come have it to come in.
const LATE: Duration = Duration::from_secs(2);

fn config() -> Config {
    Config { silence: SILENCE, ..Config::default() }
}

fn access(coordinator: &Coordinator) -> Access {
    to(coordinator.addresses()[0])
}

fn to(address: SocketAddr) -> Access {
    Access { timeout: SOON, ..Access::new(address.to_string()) }
}

fn ranks(host: &str, world_size: u32, ranks: &[u32]) -> Ranks {
    Ranks {
        host: host.into(),
        world_size,
        ranks: ranks.to_vec(),
        details: ranks.iter().map(|rank| format!("detail {rank}").into_bytes()).collect(),
        hosts: Vec::new(),
    }
}

/// Several joins at a time, each on a thread; results in the order of the arguments.
fn join_all(access: &Access, all: Vec<Ranks>, timeout: Duration) -> Vec<Result<Session, Error>> {
    together(all.into_iter().map(|one| {
        let access = access.clone();
        move || Session::join(&access, one, timeout)
    }))
}

/// Runs each on a thread, for at most 30 s.
fn together<T: Send + 'static, F: FnOnce() -> T + Send + 'static>(acts: impl IntoIterator<Item = F>) -> Vec<T> {
    let receivers: Vec<_> = acts
        .into_iter()
        .map(|act| {
            let (tx, rx) = mpsc::channel();
            thread::spawn(move || tx.send(act()));
            rx
        })
        .collect();
    receivers.into_iter().map(|rx| rx.recv_timeout(Duration::from_secs(30)).expect("hung")).collect()
}

fn failed<T>(result: Result<T, Error>) -> Error {
    match result {
        Ok(_) => panic!("succeeded"),
        Err(error) => error,
    }
}

fn refused<T>(result: Result<T, Error>) -> Refusal {
    let error = failed(result);
    error.refusal().unwrap_or_else(|| panic!("{error}")).clone()
}

#[test]
fn worlds_form_over_ipv4_ipv6_and_dual_stack() {
    for bind in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
        let coordinator = Coordinator::start(Config { bind: vec![bind.parse().unwrap()], ..config() }).unwrap();
        let port = coordinator.addresses()[0].port();
        let hosts: &[&str] = match bind {
            "127.0.0.1:0" => &["127.0.0.1"],
            "[::1]:0" => &["[::1]"],
            _ => &["127.0.0.1", "[::1]"],
        };
        for host in hosts {
            let access = Access { timeout: SOON, ..Access::new(format!("{host}:{port}")) };
            let all = vec![ranks("a", 4, &[0, 1]), ranks("b", 4, &[2, 3])];
            let sessions: Vec<Session> = join_all(&access, all, SOON).into_iter().map(|s| s.unwrap()).collect();
            let world = sessions[0].world().unwrap();
            assert_eq!(sessions[1].world().unwrap(), world);
            assert_eq!(world.hosts[1].details[1], b"detail 3");
            assert_eq!(world.host_of(2), Some("b"));
            sessions.into_iter().for_each(Session::leave);
        }
    }
}

#[test]
fn the_first_address_that_answers_is_used() {
    let coordinator = Coordinator::start(config()).unwrap();
    let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut access = access(&coordinator);
    access.endpoints.insert(0, dead.to_string());
    access.endpoints.insert(0, "no.such.host.invalid:1".into());
    Store::connect(&access).unwrap().set("k", b"v").unwrap();
}

#[test]
fn the_store_over_the_wire() {
    let coordinator = Coordinator::start(config()).unwrap();
    let store = Store::connect(&access(&coordinator)).unwrap();
    let zero = Duration::ZERO;
    let keys = |keys: &[&str]| keys.iter().map(|key| (*key).to_owned()).collect::<Vec<_>>();
    store.set("a", &[0, 255, 10]).unwrap();
    assert_eq!(store.get("a", zero).unwrap(), [0, 255, 10]);
    assert_eq!(store.add("n", 41).unwrap() + store.add("n", 1).unwrap(), 83);
    assert_eq!(store.compare_set("c", b"", b"one").unwrap(), b"one");
    assert_eq!(store.compare_set("c", b"zero", b"two").unwrap(), b"one");
    store.append("a", b"x").unwrap();
    store.multi_set(&keys(&["m1", "m2"]), &[b"1".to_vec(), vec![]]).unwrap();
    assert_eq!(
        store.multi_get(&keys(&["m2", "m1", "a"]), zero).unwrap(),
        [vec![], b"1".to_vec(), vec![0, 255, 10, b'x']]
    );
    assert!(store.check(&keys(&["a", "n"])).unwrap() && !store.check(&keys(&["a", "no"])).unwrap());
    store.queue_push("q", b"1").unwrap();
    store.queue_push("q", b"2").unwrap();
    assert_eq!(store.queue_len("q").unwrap(), 2);
    assert_eq!(store.queue_pop("q", zero).unwrap(), b"1");
    assert_eq!(store.num_keys().unwrap(), 6);
    assert_eq!(store.list_keys("m").unwrap(), ["m1", "m2"]);
    assert!(store.delete("q").unwrap() && !store.delete("q").unwrap());
    let missing = refused(store.get("never", Duration::from_millis(50)));
    assert!(matches!(&missing, Refusal::KeysMissing { keys, waited } if keys == &["never"] && !waited.is_zero()));
    assert!(matches!(refused(store.queue_pop("q", zero)), Refusal::KeysMissing { .. }));

    let (waiter, popper) = (store.clone(), store.clone());
    let (tx, rx) = mpsc::channel();
    let waiting = thread::spawn(move || {
        tx.send(()).unwrap();
        let popped = thread::spawn(move || popper.queue_pop("later", SOON));
        waiter.wait(&keys(&["w1", "w2"]), SOON).unwrap();
        popped.join().unwrap().unwrap()
    });
    rx.recv_timeout(SOON).unwrap();
    store.set("w1", b"").unwrap();
    store.queue_push("later", b"value").unwrap();
    store.set("w2", b"").unwrap();
    assert_eq!(waiting.join().unwrap(), b"value");
    let status = store.status().unwrap();
    assert_eq!((status.instance, status.waiting), (store.instance(), 0));
}

#[test]
fn limits_are_named_refusals() {
    let limits = keyvalue::Limits { value_bytes: 1000, waiting: 1, ..keyvalue::Limits::default() };
    let config = Config { store: limits, message_bytes: 4096, ..config() };
    let coordinator = Coordinator::start(config).unwrap();
    let store = Store::connect(&access(&coordinator)).unwrap();
    let refusal = refused(store.set("k", &[0; 1001]));
    assert_eq!(refusal, Refusal::TooMuch { what: "bytes of a value".into(), limit: 1000, got: 1001 });
    let refusal = refused(store.set("k", &[0; 5000]));
    let Refusal::TooMuch { what, limit: 4096, got: 5000..5100 } = &refusal else { panic!("{refusal}") };
    assert_eq!(what, "bytes of a message");
    assert_eq!(store.num_keys().unwrap(), 0);
}

#[test]
fn barriers_and_who_is_missing_at_them() {
    let coordinator = Coordinator::start(config()).unwrap();
    let all = vec![ranks("a", 3, &[0]), ranks("b", 3, &[1]), ranks("c", 3, &[2])];
    let sessions: Vec<Session> = join_all(&access(&coordinator), all, SOON).into_iter().map(|s| s.unwrap()).collect();
    thread::scope(|scope| {
        for session in &sessions {
            scope.spawn(|| (0..5).for_each(|_| session.barrier("all", &[], &[], SOON).unwrap()));
        }
    });
    thread::scope(|scope| {
        for session in &sessions[..2] {
            scope.spawn(|| {
                let refusal = refused(session.barrier("some", &[], &[], LATE));
                let missing = vec![RankAt { rank: 2, host: Some("c".into()) }];
                assert!(matches!(&refusal, Refusal::BarrierLate { missing: m, .. } if *m == missing), "{refusal}");
            });
        }
    });
    sessions[0].barrier("mine", &[], &[0], SOON).unwrap();
    assert!(matches!(refused(sessions[0].barrier("x", &[1], &[], SOON)), Refusal::Invalid { .. }));
}

#[test]
fn a_rank_that_never_comes_is_named_on_every_rank() {
    let coordinator = Coordinator::start(config()).unwrap();
    let mut first = ranks("a", 3, &[0]);
    first.hosts = ["a", "b", "c"].map(String::from).to_vec();
    let errors = join_all(&access(&coordinator), vec![first, ranks("b", 3, &[1])], LATE);
    for error in errors.into_iter().map(failed) {
        let Error::Late(late) = &error else { panic!("{error}") };
        assert_eq!(late.missing, [RankAt { rank: 2, host: Some("c".into()) }]);
        assert!(error.to_string().contains("1 of 3 ranks missing"), "{error}");
    }
}

#[test]
fn twins_and_differing_sizes_are_refused() {
    let coordinator = Coordinator::start(config()).unwrap();
    let access = access(&coordinator);
    let first = {
        let access = access.clone();
        thread::spawn(move || Session::join(&access, ranks("a", 2, &[0]), SOON))
    };
    let store = Store::connect(&access).unwrap();
    let began = Instant::now();
    while store.status().unwrap().agents.is_empty() {
        assert!(began.elapsed() < SOON);
        thread::sleep(Duration::from_millis(5));
    }
    let twin = refused(Session::join(&access, ranks("b", 2, &[0]), SOON));
    assert_eq!(twin, Refusal::Twin { rank: 0, holder: "a".into(), second: "b".into() });
    let size = refused(Session::join(&access, ranks("b", 3, &[1]), SOON));
    assert_eq!(size, Refusal::SizesDiffer { yours: 3, theirs: 2, host: "a".into() });
    let second = Session::join(&access, ranks("b", 2, &[1]), SOON).unwrap();
    let first = first.join().unwrap().unwrap();
    assert_eq!(first.world(), second.world());
}

#[test]
fn a_lost_host_is_broadcast_and_the_next_epoch_forms_without_it() {
    let coordinator = Coordinator::start(config()).unwrap();
    let access = access(&coordinator);
    let all = vec![ranks("a", 3, &[0]), ranks("b", 3, &[1]), ranks("c", 3, &[2])];
    let mut sessions: Vec<Session> = join_all(&access, all, SOON).into_iter().map(|s| s.unwrap()).collect();
    let report = Failure {
        epoch: 1,
        group: "g".into(),
        by: 1,
        detail: b"text".to_vec(),
        mismatch: Some(Mismatch {
            sequence: 7,
            field: "dtype".into(),
            held: vec![(0, "f32".into()), (1, "f32".into()), (2, "f16".into())],
            blamed: vec![],
        }),
    };
    let mut seen = 0;
    sessions[0].changed(&mut seen, Duration::ZERO).unwrap();
    let first = sessions[1].report(report.clone()).unwrap();
    assert_eq!(first.mismatch.as_ref().unwrap().blamed, [2]);
    assert_eq!(sessions[2].report(Failure { by: 2, ..report }).unwrap(), first);
    assert!(sessions[0].changed(&mut seen, SOON).unwrap());
    assert_eq!(*sessions[0].failure("g").unwrap(), first);
    assert!(sessions[0].failure("").is_none() && sessions[0].losses().is_empty());

    // Leaves: who waits for it is told, nobody else.
    let leaves = sessions.pop().unwrap();
    thread::scope(|scope| {
        let barrier = scope.spawn(|| refused(sessions[0].barrier("b", &[], &[0, 2], SOON)));
        let began = Instant::now();
        let store = sessions[1].store();
        while store.status().unwrap().waiting == 0 {
            assert!(began.elapsed() < SOON);
            thread::sleep(Duration::from_millis(5));
        }
        leaves.leave();
        let refusal = barrier.join().unwrap();
        assert!(matches!(&refusal, Refusal::Lost(lost) if lost.ranks == [2] && lost.host == "c"), "{refusal}");
    });
}

#[test]
fn rejoining_makes_the_next_epoch_and_the_old_one_is_stale() {
    let coordinator = Coordinator::start(config()).unwrap();
    let access = access(&coordinator);
    let all = vec![ranks("a", 3, &[0]), ranks("b", 3, &[1]), ranks("c", 3, &[2])];
    let mut sessions: Vec<Session> = join_all(&access, all, SOON).into_iter().map(|s| s.unwrap()).collect();
    let stale = sessions.pop().unwrap();
    thread::scope(|scope| {
        for (rank, session) in sessions.iter().enumerate() {
            scope.spawn(move || {
                let world = session.rejoin_as(ranks("again", 2, &[rank as u32]), SOON).unwrap();
                assert_eq!((world.epoch, world.world_size), (2, 2));
            });
        }
    });
    assert_eq!(refused(stale.barrier("b", &[], &[], SOON)), Refusal::Stale { yours: 1, current: 2 });
    assert!(matches!(&stale.losses()[0].ranks[..], [0] | [1]));
}

/// Speaks just enough of the protocol to join, then never again.
#[test]
fn silence_is_a_loss() {
    use podring_proto as pb;
    use podring_proto::rendezvous_client::RendezvousClient;
    let coordinator = Coordinator::start(config()).unwrap();
    let address = coordinator.addresses()[0];
    let mute = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
            let version = |mut request: tonic::Request<()>| {
                request.metadata_mut().insert("podring-version", "1.7".parse().unwrap());
                Ok(request)
            };
            let mut client = RendezvousClient::with_interceptor(channel.connect().await.unwrap(), version);
            let announce = pb::Announce {
                session: vec![9; 16],
                host: "mute".into(),
                world_size: 2,
                ranks: vec![1],
                details: vec![vec![]],
                timeout_ms: 10_000,
                ..Default::default()
            };
            let (tx, rx) = tokio::sync::mpsc::channel(4);
            let what = Some(pb::join_request::What::Announce(announce));
            tx.send(pb::JoinRequest { what }).await.unwrap();
            let stream = tokio_stream::wrappers::ReceiverStream::new(rx);
            let mut events = client.join(stream).await.unwrap().into_inner();
            let mut seen = 0;
            while let Ok(Ok(Some(_))) = tokio::time::timeout(SOON, events.message()).await {
                seen += 1;
            }
            seen
        })
    });
    let session = Session::join(&access(&coordinator), ranks("a", 2, &[0]), SOON).unwrap();
    let (began, mut seen) = (Instant::now(), 0);
    session.changed(&mut seen, Duration::ZERO).unwrap();
    while session.losses().is_empty() {
        assert!(began.elapsed() < SOON);
        session.changed(&mut seen, SOON).unwrap();
    }
    let lost = &session.losses()[0];
    assert_eq!((lost.host.as_str(), &lost.ranks[..], lost.how.as_str()), ("mute", &[1][..], "silent for 1s"));
    assert!(began.elapsed() >= SILENCE / 2);
    // Its stream was ended, after one event: the forming.
    assert_eq!(mute.join().unwrap(), 1);
}

#[test]
fn absent_wrong_port_wrong_program_and_half_open() {
    let quick = |address: SocketAddr| Access { timeout: Duration::from_millis(600), ..to(address) };
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = failed(Store::connect(&quick(free)));
    assert!(matches!(&error, Error::Absent { why, .. } if why.contains("refused")), "{error}");
    let unresolvable = Access { timeout: Duration::from_millis(300), ..Access::new("no.such.host.invalid:5") };
    let error = failed(Store::connect(&unresolvable));
    assert!(matches!(&error, Error::Absent { why, .. } if why.contains("no.such.host.invalid")), "{error}");
    let error = failed(Store::connect(&Access::new("nonsense")));
    assert!(matches!(&error, Error::Absent { why, .. } if why.contains("host:port")), "{error}");

    // Programs of other kinds: one that speaks HTTP/1, one that speaks garbage, one that hangs up, one that is silent.
    for reply in [&b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"[..], &[0xde; 4096], b""] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let _ = stream.read(&mut [0; 64]);
                let _ = stream.write_all(reply);
            }
        });
        let error = failed(Store::connect(&quick(address)));
        assert!(matches!(error, Error::NotPodring { .. }), "{error}");
    }
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = failed(Store::connect(&quick(mute.local_addr().unwrap())));
    assert!(matches!(error, Error::Silent { .. }), "{error}");
}

#[test]
fn garbage_and_half_open_connections_harm_nobody_and_are_closed() {
    let coordinator = Coordinator::start(Config { connections: 16, ..config() }).unwrap();
    let address = coordinator.addresses()[0];
    let mut open: Vec<TcpStream> = (0..12).map(|_| TcpStream::connect(address).unwrap()).collect();
    let mut seed = 7u32;
    for (index, stream) in open.iter_mut().enumerate() {
        let mut bytes: Vec<u8> = Vec::new();
        match index % 4 {
            0 => {}
            1 => bytes.extend_from_slice(&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..index]),
            2 => bytes.extend_from_slice(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
            _ => {}
        }
        if index % 4 >= 2 {
            bytes.extend((0..512).map(|_| {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (seed >> 24) as u8
            }));
        }
        let _ = stream.write_all(&bytes);
    }
    let store = Store::connect(&access(&coordinator)).unwrap();
    store.set("k", b"v").unwrap();
    // All of them are closed within a few silences, and the seats are free again.
    for mut stream in open {
        stream.set_read_timeout(Some(SOON)).unwrap();
        let mut sink = [0; 4096];
        loop {
            match stream.read(&mut sink) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) => {
                    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
                    break;
                }
            }
        }
    }
    // An idle client of ours lives through it: it answers pings.
    assert_eq!(store.get("k", Duration::ZERO).unwrap(), b"v");
    let more: Vec<Store> = (0..10).map(|_| Store::connect(&access(&coordinator)).unwrap()).collect();
    more.iter().for_each(|store| store.set("k", b"w").unwrap());
}

#[test]
fn the_token_is_wanted_on_every_call() {
    let token = Token::fresh().unwrap();
    let coordinator = Coordinator::start(Config { token: Some(token.clone()), ..config() }).unwrap();
    let access = access(&coordinator);
    let with = |token: Option<Token>| Access { token, ..access.clone() };
    assert_eq!(refused(Store::connect(&with(None))), Refusal::Token { given: false });
    let wrong = Token::new(&"0".repeat(64)).unwrap();
    assert_eq!(refused(Store::connect(&with(Some(wrong.clone())))), Refusal::Token { given: true });
    assert_eq!(refused(Session::join(&with(Some(wrong)), ranks("a", 1, &[0]), SOON)), Refusal::Token { given: true });
    let session = Session::join(&with(Some(token)), ranks("a", 1, &[0]), SOON).unwrap();
    session.store().set("k", b"v").unwrap();

    use podring_proto as pb;
    use podring_proto::rendezvous_client::RendezvousClient;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", access.endpoints[0])).unwrap();
        let mut client = RendezvousClient::new(endpoint.connect().await.unwrap());
        // Every call of the service, with nothing in it and no token.
        let codes = [
            client.hello(pb::HelloRequest {}).await.err(),
            client.join(tokio_stream::empty()).await.err(),
            client.heartbeat(tokio_stream::empty()).await.err(),
            client.barrier(pb::BarrierRequest::default()).await.err(),
            client.report(pb::ReportRequest::default()).await.err(),
            client.status(pb::StatusRequest {}).await.err(),
            client.set(pb::SetRequest::default()).await.err(),
            client.get(pb::GetRequest::default()).await.err(),
            client.wait(pb::WaitRequest::default()).await.err(),
            client.check(pb::CheckRequest::default()).await.err(),
            client.add(pb::AddRequest::default()).await.err(),
            client.compare_set(pb::CompareSetRequest::default()).await.err(),
            client.append(pb::AppendRequest::default()).await.err(),
            client.delete(pb::DeleteRequest::default()).await.err(),
            client.multi_get(pb::MultiGetRequest::default()).await.err(),
            client.multi_set(pb::MultiSetRequest::default()).await.err(),
            client.queue_push(pb::QueuePushRequest::default()).await.err(),
            client.queue_pop(pb::QueuePopRequest::default()).await.err(),
            client.queue_length(pb::QueueLengthRequest::default()).await.err(),
            client.num_keys(pb::NumKeysRequest::default()).await.err(),
            client.list_keys(pb::ListKeysRequest::default()).await.err(),
        ];
        for (index, status) in codes.into_iter().enumerate() {
            let status = status.unwrap_or_else(|| panic!("call {index} was answered"));
            assert_eq!(status.code(), tonic::Code::Unauthenticated, "call {index}: {status}");
        }
    });
}

#[test]
fn an_incompatible_major_is_a_named_refusal() {
    use podring_proto::rendezvous_client::RendezvousClient;
    use podring_proto::{HelloRequest, Refusal, refusal::Why};
    use prost::Message as _;
    let coordinator = Coordinator::start(config()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let address = format!("http://{}", coordinator.addresses()[0]);
        let channel = tonic::transport::Endpoint::from_shared(address).unwrap().connect().await.unwrap();
        for (version, fine) in [("1.0", true), ("1.99", true), ("2.0", false), ("", false), ("x", false)] {
            let add = move |mut request: tonic::Request<()>| {
                request.metadata_mut().insert("podring-version", version.parse().unwrap());
                Ok(request)
            };
            let answer = RendezvousClient::with_interceptor(channel.clone(), add).hello(HelloRequest {}).await;
            assert_eq!(answer.is_ok(), fine, "{version}");
            if let Err(status) = answer {
                let why = Refusal::decode(status.details()).unwrap().why;
                assert!(matches!(why, Some(Why::Version(bad)) if bad.yours == version && bad.ours == "1.2"));
            }
        }
    });
}

struct Authority {
    cert: rcgen::Certificate,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
}

impl Authority {
    fn new() -> Authority {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let cert = params.self_signed(&key).unwrap();
        Authority { cert, issuer: rcgen::Issuer::new(params, key) }
    }

    /// Files of a peer that this authority signs for and that trusts `trusts`.
    fn files(&self, dir: &std::path::Path, name: &str, trusts: &Authority) -> Tls {
        let key = rcgen::KeyPair::generate().unwrap();
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
        let cert = rcgen::CertificateParams::new(names).unwrap().signed_by(&key, &self.issuer).unwrap();
        let write = |kind: &str, pem: String| {
            let path = dir.join(format!("{name}.{kind}.pem"));
            std::fs::write(&path, pem).unwrap();
            path
        };
        Tls {
            ca: write("ca", trusts.cert.pem()),
            cert: write("cert", cert.pem()),
            key: write("key", key.serialize_pem()),
        }
    }
}

#[test]
fn mutual_tls() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = (Authority::new(), Authority::new());
    let server = ours.files(dir.path(), "server", &ours);
    let token = Token::fresh().unwrap();
    let with_tls = Config { tls: Some(server), token: Some(token.clone()), ..config() };
    let coordinator = Coordinator::start(with_tls).unwrap();
    let plain = Access { token: Some(token), ..access(&coordinator) };
    let with = |tls: Tls| Access { tls: Some(tls), ..plain.clone() };
    let good = with(ours.files(dir.path(), "good", &ours));
    let session = Session::join(&good, ranks("a", 1, &[0]), SOON).unwrap();
    session.store().set("k", b"v").unwrap();
    // Every kind of answer of the store's, which goes another way with TLS.
    let store = Store::connect(&good).unwrap();
    let keys = ["a".to_owned(), "b".to_owned()];
    store.multi_set(&keys, &[&b"1"[..], b""]).unwrap();
    assert_eq!(store.multi_get(&keys, SOON).unwrap(), [&b"1"[..], b""]);
    assert_eq!((store.get("k", SOON).unwrap(), store.add("n", 2).unwrap()), (b"v".to_vec(), 2));
    assert!(store.check(&keys).unwrap() && store.delete("a").unwrap() && !store.check(&keys).unwrap());
    store.queue_push("q", b"x").unwrap();
    assert_eq!((store.queue_len("q").unwrap(), store.queue_pop("q", SOON).unwrap()), (1, b"x".to_vec()));
    assert_eq!(store.list_keys("").unwrap(), ["b", "k", "n"]);
    let refusal = refused(store.wait(&keys, Duration::from_millis(50)));
    assert!(matches!(refusal, Refusal::KeysMissing { keys, .. } if keys == ["a"]));
    let asked = store.patient(SOON, Some(std::sync::Arc::new(|| true)));
    assert_eq!(asked.wait(&keys, SOON), Err(Error::Interrupted { call: "wait" }));

    // A client that another authority signed for; one that trusts another authority; another name; no TLS at all.
    let error = failed(Store::connect(&with(theirs.files(dir.path(), "signed", &ours))));
    assert!(matches!(error, Error::Certificate { .. }), "{error}");
    let error = failed(Store::connect(&with(ours.files(dir.path(), "trusts", &theirs))));
    assert!(matches!(error, Error::Certificate { .. }), "{error}");
    let named = Access { server_name: Some("other.example".into()), ..good.clone() };
    let error = failed(Store::connect(&named));
    assert!(matches!(error, Error::Certificate { .. }), "{error}");
    let error = failed(Store::connect(&Access { timeout: SILENCE, ..plain.clone() }));
    assert!(matches!(error, Error::NotPodring { .. }), "{error}");
    // TLS towards a coordinator without.
    let bare = Coordinator::start(config()).unwrap();
    let error = failed(Store::connect(&Access { endpoints: access(&bare).endpoints, ..good.clone() }));
    assert!(matches!(error, Error::NotPodring { .. }), "{error}");
    // Files that aren't what they should be.
    let mut broken = good.tls.clone().unwrap();
    std::mem::swap(&mut broken.cert, &mut broken.key);
    let error = failed(Store::connect(&with(broken)));
    assert!(matches!(error, Error::Credential(_)), "{error}");
    session.store().set("k", b"w").unwrap();
}

#[test]
fn a_restarted_coordinator_gets_its_members_back_in_a_higher_epoch_and_has_another_store() {
    let coordinator = Coordinator::start(config()).unwrap();
    let address = coordinator.addresses()[0];
    let all = vec![ranks("a", 2, &[0]), ranks("b", 2, &[1])];
    let sessions: Vec<Session> = join_all(&to(address), all, SOON).into_iter().map(|s| s.unwrap()).collect();
    let old = sessions[0].store();
    old.set("k", b"v").unwrap();
    coordinator.stop();
    let again = restart(Config { bind: vec![address], ..config() });
    for session in &sessions {
        let (began, mut seen) = (Instant::now(), 0);
        while session.world().unwrap().epoch < 2 {
            assert!(began.elapsed() < SOON, "{:?}", session.error());
            session.changed(&mut seen, SOON).unwrap();
        }
    }
    let current = again.instance();
    assert_eq!(refused(old.get("k", Duration::ZERO)), Refusal::StoreLost { yours: old.instance(), current });
    let new = sessions[0].store();
    assert!(matches!(refused(new.get("k", Duration::ZERO)), Refusal::KeysMissing { .. }));
    thread::scope(|scope| {
        for session in &sessions {
            scope.spawn(|| session.barrier("b", &[], &[], SOON).unwrap());
        }
    });
}

/// Until the port is free again.
fn restart(config: Config) -> Coordinator {
    let began = Instant::now();
    loop {
        match Coordinator::start(config.clone()) {
            Ok(coordinator) => return coordinator,
            Err(error) => assert!(began.elapsed() < SOON, "{error}"),
        }
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn with_a_state_directory_the_store_survives() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { state_dir: Some(dir.path().to_owned()), ..config() };
    let coordinator = Coordinator::start(config.clone()).unwrap();
    let address = coordinator.addresses()[0];
    let session = Session::join(&to(address), ranks("a", 1, &[0]), SOON).unwrap();
    let store = session.store();
    store.set("k", b"v").unwrap();
    store.queue_push("q", b"1").unwrap();
    assert!(Coordinator::start(config.clone()).is_err(), "two on one state directory");
    coordinator.stop();
    let _again = restart(Config { bind: vec![address], ..config });
    let began = Instant::now();
    // The old store goes on: the same life.
    let value = loop {
        match store.get("k", Duration::ZERO) {
            Ok(value) => break value,
            Err(error) => assert!(matches!(error, Error::CoordinatorLost { .. }) && began.elapsed() < SOON, "{error}"),
        }
        thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(value, b"v");
    assert_eq!(store.queue_pop("q", Duration::ZERO).unwrap(), b"1");
}

#[test]
fn a_coordinator_that_stays_away_is_a_named_loss() {
    let coordinator = Coordinator::start(config()).unwrap();
    let session = Session::join(&access(&coordinator), ranks("a", 1, &[0]), SOON).unwrap();
    let store = session.store();
    drop(coordinator);
    let (began, mut seen) = (Instant::now(), 0);
    while session.error().is_none() {
        assert!(began.elapsed() < SOON);
        session.changed(&mut seen, SOON).unwrap();
    }
    let error = session.error().unwrap();
    assert!(matches!(error, Error::CoordinatorLost { .. }), "{error}");
    assert_eq!(failed(session.barrier("b", &[], &[], SOON)), error);
    let error = failed(store.set("k", b"v"));
    assert!(matches!(error, Error::CoordinatorLost { .. }), "{error}");
}

#[test]
fn a_port_that_is_taken_is_a_named_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let bind = vec![listener.local_addr().unwrap()];
    let error = Coordinator::start(Config { bind, ..config() }).err().unwrap();
    assert!(error.to_string().contains("can't listen on 127.0.0.1"), "{error}");
}

#[test]
fn sixteen_agents_of_four_ranks() {
    let coordinator = Coordinator::start(Config { roster: roster::Limits::default(), ..config() }).unwrap();
    let all =
        (0..16).map(|host| ranks(&format!("host{host}"), 64, &[4 * host, 4 * host + 1, 4 * host + 2, 4 * host + 3]));
    let sessions: Vec<Session> =
        join_all(&access(&coordinator), all.collect(), SOON).into_iter().map(|s| s.unwrap()).collect();
    let world = sessions[0].world().unwrap();
    assert!(sessions.iter().all(|session| session.world().unwrap() == world));
    let names: Vec<&str> = world.hosts.iter().map(|host| host.name.as_str()).collect();
    assert_eq!(names[15], "host15");
    thread::scope(|scope| {
        for session in &sessions {
            scope.spawn(|| session.barrier("b", &[], &[], SOON).unwrap());
        }
    });
}
