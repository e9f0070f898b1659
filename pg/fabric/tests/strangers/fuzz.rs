//! Bytes of all kinds at a live hub: no panic, no hang, no allocation beyond a bound, and peers still get through.
//!
//! Runs for PODRING_FUZZ_SECONDS, default 20. By hand, for longer:
//! `PODRING_FUZZ_SECONDS=600 cargo test -p podring-fabric --test strangers fuzz`.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use podring_collective::{Blocks, Collective, DType, Kind, Layout, Part, Tensor};
use podring_fabric::handshake::{Job, MAC, OPENING, REPLY, Reply, nonce};
use podring_fabric::hub::{Address, Call, ChannelSpec, Hub, Keep};
use podring_fabric::wire::{Frame, HEADER, Header, HubId, VERSION};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::rig::{SOON, connect, enter, hub, job_with, panics, peer_gets_through, random_id, until};
use super::{allocation, rig};

/// Connections of one case, at most.
const CONNECTIONS: usize = 3;
/// Bytes that one case may make the process hold: what a member may send unasked, read buffers, and the test's own.
const BOUND: usize = CONNECTIONS * ((4 << 20) + (1 << 20)) + (2 << 20);
/// The largest piece: a read buffer is 256 KiB, the case's own bytes are less.
const LARGEST: usize = 1 << 20;
/// Cases that one hub sees.
const LIFE: u32 = 200;

fn budget() -> Duration {
    let seconds = std::env::var("PODRING_FUZZ_SECONDS").ok().map(|text| text.parse().expect("PODRING_FUZZ_SECONDS"));
    Duration::from_secs(seconds.unwrap_or(20))
}

/// How far somebody behaves before it stops to.
#[derive(Clone, Debug)]
enum Start {
    /// Anything at all.
    Noise,
    /// An opening of somebody who knows the job's id, but not its secret; then anything.
    Opening,
    /// A member that has the hub's reply; then anything instead of its proof.
    Asked,
    /// A member that has proved itself; then frames.
    Member,
}

/// What is done to bytes before they are sent.
#[derive(Clone, Debug)]
struct Damage {
    /// Replaced: where, by what.
    flips: Vec<(u16, u8)>,
    /// Only so many are sent, if at all fewer.
    cut: Option<u16>,
    /// Sent in pieces of these sizes, again and again.
    pieces: Vec<u16>,
}

#[derive(Clone, Debug)]
struct Script {
    start: Start,
    damage: Damage,
    frames: Vec<(Vec<u8>, Vec<u8>)>,
    noise: Vec<u8>,
    /// Half-closed, reset, or left open until the case ends.
    end: u8,
}

fn damage() -> impl Strategy<Value = Damage> {
    let flips = prop::collection::vec((any::<u16>(), any::<u8>()), 0..4);
    (flips, prop::option::weighted(0.3, any::<u16>()), prop::collection::vec(1u16..400, 0..6))
        .prop_map(|(flips, cut, pieces)| Damage { flips, cut, pieces })
}

/// A frame, as its header and payload: nonsense, or right but for a few fields.
fn frame() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let payload = prop_oneof![3 => prop::collection::vec(any::<u8>(), 0..200), 1 => prop::collection::vec(any::<u8>(), 0..70_000)];
    let word = prop_oneof![any::<u64>(), 0u64..4, Just(u64::MAX), Just(1 << 33)];
    let kind = prop_oneof![9 => 1u8..=12, 1 => any::<u8>()];
    let length = prop_oneof![6 => Just(None), 1 => any::<u32>().prop_map(Some), 1 => (0u32..1 << 19).prop_map(Some)];
    (kind, prop::array::uniform7(word), any::<u8>(), length, payload, prop::bool::weighted(0.05)).prop_map(
        |(kind, words, flags, length, payload, nonsense)| {
            let mut head = [0u8; HEADER];
            head[0] = kind;
            head[1] = if flags < 128 { flags & 1 } else { flags };
            head[2] = if nonsense { flags } else { VERSION };
            head[4..8].copy_from_slice(&length.unwrap_or(payload.len() as u32).to_le_bytes());
            for (chunk, word) in head[8..].chunks_exact_mut(8).zip(words) {
                chunk.copy_from_slice(&word.to_le_bytes());
            }
            (head.to_vec(), payload)
        },
    )
}

fn script() -> impl Strategy<Value = Script> {
    let start = prop_oneof![
        1 => Just(Start::Noise),
        2 => Just(Start::Opening),
        2 => Just(Start::Asked),
        5 => Just(Start::Member),
    ];
    let frames = prop::collection::vec(frame(), 0..12);
    (start, damage(), frames, prop::collection::vec(any::<u8>(), 0..300), any::<u8>())
        .prop_map(|(start, damage, frames, noise, end)| Script { start, damage, frames, noise, end })
}

impl Damage {
    fn send(&self, stream: &mut TcpStream, mut bytes: Vec<u8>) -> std::io::Result<()> {
        for &(at, value) in &self.flips {
            if !bytes.is_empty() {
                let at = usize::from(at) % bytes.len();
                bytes[at] = value;
            }
        }
        if let Some(cut) = self.cut {
            bytes.truncate(usize::from(cut) % (bytes.len() + 1));
        }
        let mut rest = &bytes[..];
        // A few pieces, so that every boundary is met sooner or later; then the rest.
        for &piece in &self.pieces {
            let (now, later) = rest.split_at(usize::from(piece).min(rest.len()));
            stream.write_all(now)?;
            std::thread::yield_now();
            rest = later;
        }
        stream.write_all(rest)
    }
}

impl Script {
    /// Plays it; an error means that the hub hung up, as it may at any time.
    fn play<'a>(&self, hub: &'a Hub) -> std::io::Result<(TcpStream, Group<'a>)> {
        let mut stream = connect(hub);
        let member = HubId(random_id());
        let job: Job = job_with(hub, member);
        let me = hub.address().hub;
        let group = Group::open(hub, member);
        let opening = job.opening(member, me, nonce().unwrap()).unwrap();
        match self.start {
            Start::Noise => self.damage.send(&mut stream, self.noise.clone())?,
            Start::Opening => {
                let bytes = [&opening.encode()[..OPENING], &self.noise].concat();
                self.damage.send(&mut stream, bytes)?;
            }
            Start::Asked => {
                stream.write_all(&opening.encode())?;
                let mut reply = [0; REPLY];
                stream.read_exact(&mut reply)?;
                let reply = Reply::decode(&reply).unwrap();
                assert!(opening.accepts(&job.secret, &reply));
                let proof: [u8; MAC] = opening.proof(&job.secret, &reply.nonce);
                self.damage.send(&mut stream, [&proof[..], &self.noise].concat())?;
            }
            Start::Member => {
                drop(stream);
                stream = enter(hub, &job, member);
                let frames: Vec<u8> = self.frames.iter().flat_map(|(head, body)| group.address(head, body)).collect();
                self.damage.send(&mut stream, frames)?;
            }
        }
        match self.end % 4 {
            0 => stream.shutdown(Shutdown::Write)?,
            1 => rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?,
            _ => {}
        }
        Ok((stream, group))
    }
}

/// A group of the hub and the member, in which the hub waits for messages.
struct Group<'a> {
    hub: &'a Hub,
    id: u64,
}

/// Bytes that the hub waits for.
const LENGTH: usize = 64;

unsafe extern "C" fn free(data: *mut std::ffi::c_void) {
    // SAFETY: made by `Group::open`.
    drop(unsafe { Box::from_raw(data.cast::<[u8; LENGTH]>()) });
}

impl<'a> Group<'a> {
    fn open(hub: &'a Hub, member: HubId) -> Self {
        let id = random_id() as u64;
        // Where the hub will look for the member in vain: what it sends is not the fuzzer's matter.
        let nowhere =
            Address { hub: member, host: "fuzz".into(), machine: "fuzz".into(), name: "fuzz".into(), tcp: vec![] };
        let members = vec![hub.address().clone(), nowhere];
        hub.open(ChannelSpec { id, name: "fuzzed".into(), me: 0, members }).unwrap();
        for (seq, from) in [(0, Some(1)), (1, None)] {
            let data = Box::into_raw(Box::new([0u8; LENGTH]));
            let tensor = Tensor { data: data.cast(), layout: Layout::flat(LENGTH) };
            let (inputs, outputs) = (Blocks::none(), Blocks::whole(tensor));
            let part = Part { dtype: DType::U8, reduction: None, inputs, outputs };
            let collective =
                Collective { kind: Kind::Recv { from, tag: seq as u32 }, parts: [part].into_iter().collect() };
            // SAFETY: the box is freed once, there, by the allocator that made it.
            let keep = Some(unsafe { Keep::new(data.cast(), free) });
            hub.post(Call { channel: id, seq, collective, keep, timeout: SOON, sync: false, mark: 0 }).unwrap();
        }
        Group { hub, id }
    }

    /// Half of the frames are made out to this group.
    fn address(&self, head: &[u8], body: &[u8]) -> Vec<u8> {
        let mut frame = [head, body].concat();
        if head[8].is_multiple_of(2) {
            frame[8..16].copy_from_slice(&self.id.to_le_bytes());
        }
        frame
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        self.hub.close(self.id);
    }
}

#[test]
fn fuzz() {
    let until = Instant::now() + budget();
    let strategy = prop::collection::vec(script(), 1..=CONNECTIONS);
    let (mut cases, mut lives) = (0u32, 0u32);
    while Instant::now() < until {
        let hub = hub();
        peer_gets_through(&hub);
        let count = std::cell::Cell::new(0u32);
        // A new one: it counts what it has run.
        TestRunner::new(Config { cases: LIFE, failure_persistence: None, ..Config::default() })
            .run(&strategy, |scripts| {
                if Instant::now() >= until {
                    return Ok(());
                }
                count.set(count.get() + 1);
                let before = allocation::begin();
                let streams: Vec<_> = scripts.iter().filter_map(|script| script.play(&hub).ok()).collect();
                drop(streams);
                if count.get().is_multiple_of(32) {
                    peer_gets_through(&hub);
                }
                let (most, largest) = allocation::most();
                prop_assert_eq!(panics(), 0);
                prop_assert!(most < before + BOUND, "{} bytes held", most - before);
                prop_assert!(largest < LARGEST, "{} bytes at once", largest);
                Ok(())
            })
            .unwrap();
        peer_gets_through(&hub);
        hub.shut();
        cases += count.get();
        lives += 1;
    }
    println!("{cases} cases at {lives} hubs");
    assert!(cases > 100 || budget() < Duration::from_secs(5), "{cases} cases only");
}

/// However the bytes of good frames are cut, all arrive, once.
#[test]
fn frames_arrive_however_they_are_cut() {
    let mut runner = TestRunner::new(Config { cases: 40, failure_persistence: None, ..Config::default() });
    let frames = prop::collection::vec(0usize..3000, 1..20);
    let pieces = prop::collection::vec(1u16..200, 0..60);
    runner
        .run(&(frames, pieces), |(lengths, pieces)| {
            let hub = hub();
            let member = HubId(random_id());
            let job = job_with(&hub, member);
            let mut stream = enter(&hub, &job, member);
            let mut bytes = Vec::new();
            let mut expected = 0;
            for (seq, &len) in lengths.iter().enumerate() {
                let mut header = Header::new(Frame::Eager, 3);
                (header.seq, header.len, header.total) = (seq as u64, len as u32, len as u64);
                bytes.extend_from_slice(&header.encode());
                bytes.resize(bytes.len() + len, 7);
                expected += len.max(192) + HEADER;
            }
            Damage { flips: Vec::new(), cut: None, pieces }.send(&mut stream, bytes).unwrap();
            until(SOON, "all frames are there", || hub.early() == expected);
            hub.shut();
            prop_assert_eq!(rig::panics(), 0);
            Ok(())
        })
        .unwrap();
}
