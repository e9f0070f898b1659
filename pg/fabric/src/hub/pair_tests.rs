//! Two hubs of one process: messages that lie in their sender's memory until they are wanted, when the sender gives them
//! up; and on whose thread what was kept is let go of.

use std::sync::mpsc::{Sender, channel};
use std::thread::ThreadId;

use podring_collective::{Blocks, DType, Kind, Layout, Part, Tensor};

use super::endpoint::Item;
use super::*;
use crate::error::Failure;
use crate::wire::{Frame, Header};

const CHANNEL: u64 = 5;
const LONG: Duration = Duration::from_secs(20);
const BYTES: usize = 1 << 20;

/// Hubs of two ranks that have links both ways.
fn pair(hosts: [&str; 2]) -> [Hub; 2] {
    let config = |host: &str| Config { ring: 1 << 16, host: Some(host.to_owned()), ..Config::default() };
    let hubs = hosts.map(|host| Hub::start(config(host)).unwrap());
    let members: Vec<Address> = hubs.iter().map(|hub| hub.address().clone()).collect();
    for (me, hub) in (0..).zip(&hubs) {
        let members = members.clone();
        hub.trust(Job { id: 1, secret: Secret::new([7; 32]), members: members.iter().map(|one| one.hub).collect() });
        hub.open(ChannelSpec { id: CHANNEL, name: "g".into(), me, members }).unwrap();
    }
    for (from, to) in [(0, 1), (1, 0)] {
        let (mut out, mut into) = ([1u8], [0u8]);
        let sent = post(&hubs[from], Kind::Send { to: to as u32, tag: 0 }, &mut out);
        let came = post(&hubs[to], Kind::Recv { from: Some(from as u32), tag: 0 }, &mut into);
        assert!(hubs[from].wait(&sent, Some(LONG), || false) == Waited::Ended && sent.state() == State::Done);
        assert!(hubs[to].wait(&came, Some(LONG), || false) == Waited::Ended && came.state() == State::Done);
        assert_eq!(into, out);
    }
    hubs
}

fn post(hub: &Hub, kind: Kind, data: &mut [u8]) -> Arc<Ticket> {
    let whole = Blocks::whole(Tensor { data: data.as_mut_ptr(), layout: Layout::flat(data.len()) });
    let (inputs, outputs) = match kind {
        Kind::Send { .. } => (whole, Blocks::default()),
        _ => (Blocks::default(), whole),
    };
    let part = Part { dtype: DType::U8, reduction: None, inputs, outputs };
    let collective = Collective { kind, parts: [part].into_iter().collect() };
    let call = Call { channel: CHANNEL, seq: 0, collective, keep: None, timeout: LONG, sync: false, mark: 0 };
    hub.post(call).unwrap()
}

fn cause() -> Failure {
    Failure::PeerLost { rank: 2, host: "c".into(), how: "its process ended".into(), op: None, seq: 0 }
}

/// While the receiver stands still, the sender is told of a failure by somebody who tells the receiver later.
#[test]
fn who_hears_of_a_failure_takes_back_what_it_offered() {
    taken_back(["a", "a"]);
    taken_back(["a", "b"]);
}

fn taken_back(hosts: [&str; 2]) {
    let [sender, receiver] = pair(hosts);
    let (mut out, mut into) = (vec![1u8; BYTES], vec![0u8; BYTES]);
    let came = post(&receiver, Kind::Recv { from: Some(0), tag: 1 }, &mut into);
    let still = receiver.0.engine.lock();
    let sent = post(&sender, Kind::Send { to: 1, tag: 1 }, &mut out);
    sender.with(|engine| engine.fail_channel(CHANNEL, cause(), false));
    assert_eq!(sent.state(), State::Failed);
    out.fill(2);
    drop(still);
    assert_eq!(receiver.wait(&came, Some(LONG), || false), Waited::Ended);
    assert_eq!(came.state(), State::Failed);
}

/// The same, and the ring has no room for a word of it.
#[test]
fn what_is_taken_back_unheard_is_not_used() {
    let [sender, receiver] = pair(["a", "a"]);
    let (mut out, mut into) = (vec![1u8; BYTES], vec![0u8; BYTES]);
    let came = post(&receiver, Kind::Recv { from: Some(0), tag: 1 }, &mut into);
    let still = receiver.0.engine.lock();
    let sent = post(&sender, Kind::Send { to: 1, tag: 1 }, &mut out);
    sender.with(|engine| {
        let to = engine.channels[&CHANNEL].members[1];
        while !engine.endpoints[to as usize].has_output() {
            engine.push_item(to, Item::Bare(Header::new(Frame::Ping, 0)));
            engine.flush_dirty();
        }
        engine.fail_channel(CHANNEL, cause(), true);
    });
    assert_eq!(sent.state(), State::Failed);
    let silent = sender.0.engine.lock();
    out.fill(2);
    drop(still);
    // Time to read all there is.
    assert_eq!(receiver.wait(&came, Some(Duration::from_millis(300)), || false), Waited::TimedOut);
    assert!(into.contains(&2), "the test tests nothing: the message wasn't read");
    drop(silent);
    assert_eq!(receiver.wait(&came, Some(LONG), || false), Waited::Ended);
    assert_eq!(came.state(), State::Failed);
}

/// What failures leave behind is no doubt for later: a second group over the same links works.
#[test]
fn a_failed_group_does_not_hold_up_another() {
    const OTHER: u64 = CHANNEL + 1;
    let hubs = pair(["a", "a"]);
    let members: Vec<Address> = hubs.iter().map(|hub| hub.address().clone()).collect();
    for (me, hub) in (0..).zip(&hubs) {
        hub.open(ChannelSpec { id: OTHER, name: "h".into(), me, members: members.clone() }).unwrap();
        hub.fail(OTHER, cause());
        hub.close(OTHER);
    }
    let (mut out, mut into) = (vec![1u8; BYTES], vec![0u8; BYTES]);
    let came = post(&hubs[1], Kind::Recv { from: Some(0), tag: 1 }, &mut into);
    let sent = post(&hubs[0], Kind::Send { to: 1, tag: 1 }, &mut out);
    for (hub, ticket) in hubs.iter().zip([&sent, &came]) {
        assert_eq!(hub.wait(ticket, Some(LONG), || false), Waited::Ended);
        assert_eq!(ticket.state(), State::Done);
    }
    assert_eq!(into, out);
}

/// Says which thread let go of it.
unsafe extern "C" fn say_where(context: *mut std::ffi::c_void) {
    // SAFETY: made by `kept`, and called once.
    let told = unsafe { Box::from_raw(context.cast::<Sender<ThreadId>>()) };
    told.send(std::thread::current().id()).unwrap();
}

fn kept(told: &Sender<ThreadId>) -> Keep {
    // SAFETY: a sender may be used, and dropped, on any thread.
    unsafe { Keep::new(Box::into_raw(Box::new(told.clone())).cast(), say_where) }
}

/// A framework's worker that waits inside of a program may not run what its callers left, and would if it were the one
/// who finds their operations ended.
#[test]
fn a_guest_lets_go_of_nothing_on_its_thread() {
    let [hub, _peer] = pair(["a", "a"]);
    let mut into = [0u8];
    let never = post(&hub, Kind::Recv { from: Some(1), tag: 1 }, &mut into);
    let (told, heard) = channel();
    for _ in 0..50 {
        hub.0.garbage.lock().push(kept(&told));
        let waited = hub.wait_as_guest(&never, Some(Duration::from_millis(1)), || false);
        assert_eq!(waited, Waited::TimedOut);
        assert_ne!(heard.recv_timeout(LONG).unwrap(), std::thread::current().id());
    }
    hub.fail(CHANNEL, cause());
    assert_eq!(hub.wait(&never, Some(LONG), || false), Waited::Ended);
}
