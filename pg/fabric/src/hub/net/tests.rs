use super::super::endpoint::Item;
use super::super::engine::{Receiving, Stage};
use super::*;
use crate::handshake::Secret;
use crate::memory::SharedPool;

const LONG: Duration = Duration::from_secs(10);

/// An engine whose only address is loopback's.
fn engine(host: &str) -> Engine {
    let me = HubId(u128::from_le_bytes(crate::handshake::nonce().unwrap()[..16].try_into().unwrap()));
    let config = Config { interfaces: interfaces::Selection::parse("lo").unwrap(), ..Config::default() };
    let net = Net::new(me, &config, host.into(), "machine".into(), host.into()).unwrap();
    Engine::new(config, net, SharedPool::default())
}

/// Two engines of one job that know each other, and each one's endpoint of the other.
fn pair(hosts: [&str; 2]) -> ([Engine; 2], [u32; 2]) {
    let mut engines = hosts.map(engine);
    let members = engines.iter().map(|engine| engine.net.me).collect();
    let job = Job { id: 1, secret: Secret::new([7; 32]), members };
    let addresses = [0, 1].map(|one: usize| engines[one].net.address.clone());
    let ends = [0, 1].map(|one: usize| {
        engines[one].trust(job.clone());
        let end = engines[one].endpoint(addresses[1 - one].hub);
        engines[one].endpoints[end as usize].address = Some(addresses[1 - one].clone());
        end
    });
    (engines, ends)
}

fn turn(engine: &mut Engine) {
    engine.drive();
    engine.poll_sockets();
    engine.keep_alive(Instant::now());
}

fn until(end: Instant, what: &str, mut done: impl FnMut() -> bool) {
    while !done() {
        assert!(Instant::now() < end, "{what}");
    }
}

/// A process sends, and ends before its peer has looked at the link. Over TCP the two must have made sure of each other;
/// within a host the peer need not even have accepted the connection.
fn message_outlives_its_sender(hosts: [&str; 2]) {
    const CHANNEL: u64 = 5;
    let ([mut sender, mut receiver], [to, from]) = pair(hosts);
    let mut header = Header::new(Frame::Eager, CHANNEL);
    header.len = 4;
    sender.push_item(to, Item::Owned { header, bytes: (*b"last").into() });
    until(Instant::now() + LONG, "sent", || {
        turn(&mut sender);
        let peer = &sender.endpoints[to as usize];
        if matches!(peer.out, Out::Dialing(_)) {
            receiver.poll_sockets();
        }
        !peer.has_output()
    });
    assert!(matches!(receiver.endpoints[from as usize].inbound, In::None));
    drop(sender);
    receiver.lose(from, "its process ended".into());
    assert!(receiver.endpoints[from as usize].dead.is_some());
    assert_eq!(receiver.orphans.get(&CHANNEL).map(Vec::len), Some(1));
}

#[test]
fn message_outlives_its_sender_in_shared_memory() {
    message_outlives_its_sender(["a", "a"]);
}

#[test]
fn message_outlives_its_sender_over_tcp() {
    message_outlives_its_sender(["a", "b"]);
}

/// Has the first call the second at these addresses first; returns how long that took, or why it failed.
fn call(first: Vec<SocketAddr>, only: bool) -> Result<Duration, String> {
    let ([mut caller, mut called], [to, _]) = pair(["a", "b"]);
    let Some(address) = &mut caller.endpoints[to as usize].address else { unreachable!("just set") };
    let own = if only { Vec::new() } else { std::mem::take(&mut address.tcp) };
    address.tcp = [first, own].concat();
    caller.push_item(to, Item::Bare(Header::new(Frame::Ping, 0)));
    let start = Instant::now();
    until(start + LONG, "called", || {
        turn(&mut caller);
        turn(&mut called);
        called.net.tcp_links > 0 || caller.endpoints[to as usize].dead.is_some()
    });
    match caller.endpoints[to as usize].dead.clone() {
        Some(why) => Err(why),
        None => Ok(start.elapsed()),
    }
}

fn nobody() -> SocketAddr {
    ([127, 0, 0, 2], tcp::listener(&(0..=0)).unwrap().1).into()
}

#[test]
fn addresses_that_nobody_answers_at_are_passed_over() {
    assert!(call(vec![nobody()], false).unwrap() < Duration::from_millis(500));
}

#[test]
fn a_host_with_the_same_address_is_passed_over() {
    let mut other = engine("c");
    let reached = other.net.address.tcp[0];
    let answering = std::thread::spawn(move || {
        let end = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end {
            turn(&mut other);
            std::thread::sleep(Duration::from_millis(1));
        }
        other.net.guests.count()
    });
    assert!(call(vec![reached], false).unwrap() < Duration::from_secs(1));
    assert_eq!(answering.join().unwrap(), 0);
}

#[test]
fn an_address_that_takes_connections_and_says_nothing_costs_a_second() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let took = call(vec![silent.local_addr().unwrap()], false).unwrap();
    assert!((Duration::from_millis(900)..Duration::from_secs(4)).contains(&took), "{took:?}");
}

#[test]
fn every_address_is_named_with_its_own_error() {
    let rude = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = rude.local_addr().unwrap();
    let talking = std::thread::spawn(move || {
        use std::io::Write as _;
        let (mut socket, _) = rude.accept().unwrap();
        let _ = socket.write_all(&[b'x'; crate::handshake::REPLY]);
        std::thread::sleep(Duration::from_secs(1));
    });
    let absent = nobody();
    let why = call(vec![absent, at], true).unwrap_err();
    assert!(why.contains(&format!("{absent}: Connection refused")), "{why}");
    assert!(why.contains(&format!("{at}: not podring's opening")), "{why}");
    talking.join().unwrap();
    let began = Instant::now();
    let why = call(Vec::new(), true).unwrap_err();
    // What others have to tell of it comes first.
    assert!(began.elapsed() >= dial::HEARSAY);
    assert!(why.contains("it has no address"), "{why}");
}

#[test]
fn another_secret_is_named_on_both_sides() {
    for hosts in [["a", "b"], ["a", "a"]] {
        another_secret(hosts);
    }
}

fn another_secret(hosts: [&str; 2]) {
    let ([mut caller, mut called], [to, from]) = pair(hosts);
    let members = vec![caller.net.me, called.net.me];
    caller.trust(Job { id: 1, secret: Secret::new([8; 32]), members });
    // One address: with a second to try it would live long enough to answer a call.
    let known = caller.endpoints[to as usize].address.as_mut();
    known.unwrap().tcp.truncate(1);
    caller.push_item(to, Item::Bare(Header::new(Frame::Ping, 0)));
    until(Instant::now() + LONG, "refused", || {
        turn(&mut caller);
        let refused = caller.endpoints[to as usize].dead.is_some();
        if !refused {
            turn(&mut called);
        }
        refused
    });
    let why = caller.endpoints[to as usize].dead.clone().unwrap();
    assert!(why.contains("PODRING_TOKEN_FILE"), "{why}");
    // Over TCP the other finds nobody any more of whom it could ask for a proof; within a host it has asked already.
    drop(caller);
    until(Instant::now() + LONG, "lost", || {
        turn(&mut called);
        called.endpoints[from as usize].dead.is_some()
    });
    let why = called.endpoints[from as usize].dead.clone().unwrap();
    assert!(why.contains("PODRING_TOKEN_FILE"), "{why}");
    assert_eq!(why.ends_with(DOUBTED), hosts == ["a", "b"], "{why}");
    assert_eq!(called.net.guests.count(), 0);
    assert!(called.endpoints.iter().all(|peer| matches!(peer.inbound, In::None)));
}

/// Who leaves a group over a failure that it was told of says so to those who weren't: its leaving is not the cause.
#[test]
fn who_leaves_a_failed_group_says_why() {
    use super::super::channel::Channel;
    use crate::error::Failure;
    const CHANNEL: u64 = 5;
    for hosts in [["a", "a"], ["a", "b"]] {
        let ([mut one, mut other], ends) = pair(hosts);
        for (me, (engine, end)) in [&mut one, &mut other].into_iter().zip(ends).enumerate() {
            let mut channel = Channel::new("g".into(), me as u32, 2);
            channel.members = if me == 0 { vec![u32::MAX, end] } else { vec![end, u32::MAX] };
            channel.rank_of.insert(end, 1 - me as u32);
            engine.open(CHANNEL, channel);
            engine.push_item(end, Item::Bare(Header::new(Frame::Ping, 0)));
        }
        // Who has never said anything to the other is not waited for by it.
        until(Instant::now() + LONG, "linked", || {
            turn(&mut one);
            turn(&mut other);
            !matches!(other.endpoints[ends[1] as usize].out, Out::Idle)
        });
        let (host, how) = ("c".to_owned(), "its process ended".to_owned());
        let cause = Failure::PeerLost { rank: 2, host, how, op: None, seq: 0 };
        other.fail_channel(CHANNEL, cause.clone(), false);
        other.close(CHANNEL);
        until(Instant::now() + LONG, "told", || {
            turn(&mut one);
            turn(&mut other);
            one.channels[&CHANNEL].failed.is_some()
        });
        assert_eq!(one.channels[&CHANNEL].failed.as_deref(), Some(&cause));
    }
}

/// A process that is given up learns why, whether or not it has heard from the other.
#[test]
fn who_is_given_up_is_told_why() {
    for both in [false, true] {
        let ([mut one, mut other], [to, back]) = pair(["a", "b"]);
        one.push_item(to, Item::Bare(Header::new(Frame::Ping, 0)));
        if both {
            other.push_item(back, Item::Bare(Header::new(Frame::Ping, 0)));
        }
        until(Instant::now() + LONG, "linked", || {
            turn(&mut one);
            turn(&mut other);
            let there = matches!(other.endpoints[back as usize].inbound, In::Tcp { .. });
            there && (!both || matches!(one.endpoints[to as usize].inbound, In::Tcp { .. }))
        });
        other.lose(back, "for no reason".into());
        until(Instant::now() + LONG, "told", || {
            turn(&mut one);
            one.endpoints[to as usize].dead.is_some()
        });
        assert_eq!(one.endpoints[to as usize].dead.as_deref(), Some("it gave this process up: for no reason"));
    }
}

/// Ranks hear of their job at different moments: a caller that is early waits.
#[test]
fn a_caller_that_is_early_waits() {
    let ([mut caller, mut called], [to, _]) = pair(["a", "b"]);
    let job = called.net.jobs.pop_back().unwrap();
    caller.push_item(to, Item::Bare(Header::new(Frame::Ping, 0)));
    let later = Instant::now() + Duration::from_millis(300);
    while Instant::now() < later {
        turn(&mut caller);
        turn(&mut called);
    }
    assert_eq!((called.net.guests.count(), called.net.tcp_links), (1, 0));
    called.trust(job);
    until(Instant::now() + LONG, "let in", || {
        turn(&mut caller);
        turn(&mut called);
        called.net.tcp_links == 1
    });
    assert_eq!(called.net.guests.count(), 0);
}

#[test]
fn taken_ports_are_named() {
    let (_taken, port) = tcp::listener(&(0..=0)).unwrap();
    let config = Config { ports: port..=port, ..Config::default() };
    let net = Net::new(HubId(1), &config, "a".into(), "machine".into(), "a".into());
    assert!(net.is_err_and(|error| error.to_string().contains(&format!("PODRING_PORT={port}: "))));
}

#[test]
fn an_unknown_interface_is_named() {
    let config = Config { interfaces: interfaces::Selection::parse("lo,nosuch0").unwrap(), ..Config::default() };
    let error = Net::new(HubId(1), &config, "a".into(), "machine".into(), "a".into()).err().unwrap().to_string();
    assert!(error.contains("nosuch0") && error.contains("this host has") && error.contains("lo"), "{error}");
}

/// A process that was given up may still listen.
#[test]
fn who_was_given_up_is_not_called_again() {
    let ([mut engine, _other], [to, _]) = pair(["a", "a"]);
    engine.mark_dirty(to);
    engine.lose(to, "silent".into());
    engine.mark_dirty(to);
    engine.flush_dirty();
    assert!(matches!(engine.endpoints[to as usize].out, Out::Idle));
    assert_eq!(engine.net.unwelcomed, 0);
    assert!(!engine.busy());
}

/// Permission to read a peer's memory goes while several messages wait to be read.
#[test]
fn all_that_can_no_longer_be_read_is_asked_for() {
    let ([mut engine, _other], [from, _]) = pair(["a", "a"]);
    let mut memory = [0u8; 8];
    for cookie in 0..2 {
        let (op, data) = (Default::default(), memory.as_mut_ptr());
        let stage = Stage::Pulling { addr: 0, cookie };
        let recv = engine.recvs.insert(Receiving { op, lane: 0, endpoint: from, data, len: 8, got: 0, stage });
        engine.pulls.push_back(recv);
    }
    while engine.pull() {}
    assert!(engine.recvs.values().all(|receiving| receiving.stage == Stage::Streaming));
    let cleared = |item: &&Item| matches!(item, Item::Bare(header) if header.frame == Frame::Clear);
    assert_eq!(engine.endpoints[from as usize].items.iter().filter(cleared).count(), 2);
}

/// A connection is accepted before its opening has come; then this process stands still for longer than one may take.
#[test]
fn who_has_spoken_meanwhile_is_heard_before_it_is_late() {
    let ([caller, mut called], [to, from]) = pair(["a", "a"]);
    let socket = shm::dial(caller.endpoints[to as usize].id).unwrap();
    called.welcome(true);
    assert_eq!(called.net.guests.count(), 1);
    let (ring, _mapping) = shm::create_ring(4096).unwrap();
    let (opening, job) = caller.net.opening(called.net.me).unwrap();
    let signed = crate::handshake::LocalOpening::new(&job.secret, opening, 4096, 0);
    shm::send_opening(&socket, &signed, &ring, &*caller.net.bell).unwrap();
    called.keep_alive(Instant::now() + 10 * called.config.handshake);
    assert!(matches!(called.endpoints[from as usize].inbound, In::Shm { .. }));
    assert_eq!(called.net.guests.count(), 0);
}
