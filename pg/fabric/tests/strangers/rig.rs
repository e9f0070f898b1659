//! A hub under attack, real peers that come to it, and the wire as an attacker holds it.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use podring_collective::{Blocks, Collective, DType, Kind, Layout, Part, Reduction, Tensor};
use podring_fabric::handshake::{Job, Opening, REPLY, Reply, Secret, nonce};
use podring_fabric::hub::{Call, ChannelSpec, Config, Hub, State, Waited};
use podring_fabric::link::interfaces::Selection;
use podring_fabric::wire::HubId;

/// How long a connection may take to prove itself, here.
pub const HANDSHAKE: Duration = Duration::from_millis(800);
/// For what happens at once, on a machine that has other things to do.
pub const SOON: Duration = Duration::from_secs(5);

static PANICS: AtomicUsize = AtomicUsize::new(0);
static WATCH: Once = Once::new();

/// Counts panics from now on, on whatever thread. Those of the test's own end it anyway.
pub fn watch_panics() {
    WATCH.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Ordering::SeqCst);
            usual(info);
        }));
    });
}

pub fn panics() -> usize {
    PANICS.load(Ordering::SeqCst)
}

/// A hub that is found on loopback only, on a host of its own.
pub fn hub() -> Hub {
    hub_with(HANDSHAKE)
}

/// The same, with so long for a connection to prove itself.
pub fn hub_with(handshake: Duration) -> Hub {
    watch_panics();
    let host = format!("{:032x}", u128::from_le_bytes(nonce().unwrap()[..16].try_into().unwrap()));
    let interfaces = Selection::parse("lo").unwrap();
    Hub::start(Config { host: Some(host), interfaces, handshake, ..Config::default() }).unwrap()
}

pub fn port(hub: &Hub) -> SocketAddr {
    *hub.address().tcp.iter().find(|address| address.is_ipv4()).unwrap()
}

pub fn random_id() -> u128 {
    u128::from_le_bytes(nonce().unwrap()[..16].try_into().unwrap())
}

/// A job of this hub and a process that exists only on the wire.
pub fn job_with(hub: &Hub, other: HubId) -> Job {
    let job = Job { id: random_id(), secret: Secret::fresh().unwrap(), members: vec![hub.address().hub, other] };
    hub.trust(job.clone());
    job
}

/// Has a new peer join the hub and add numbers up with it, in time.
pub fn peer_gets_through(hub: &Hub) {
    let peer = self::hub();
    let job =
        Job { id: random_id(), secret: Secret::fresh().unwrap(), members: vec![hub.address().hub, peer.address().hub] };
    let members = vec![hub.address().clone(), peer.address().clone()];
    let id = job.id as u64;
    std::thread::scope(|scope| {
        for (me, hub) in [hub, &peer].into_iter().enumerate() {
            let (job, members) = (job.clone(), members.clone());
            scope.spawn(move || {
                hub.trust(job);
                hub.open(ChannelSpec { id, name: "real".into(), me: me as u32, members }).unwrap();
                let mut data = vec![1.0f32; 50_000];
                let tensor = || Tensor { data: data.as_ptr().cast_mut().cast(), layout: Layout::flat(data.len()) };
                let part = Part {
                    dtype: DType::F32,
                    reduction: Some(Reduction::Sum),
                    inputs: Blocks::whole(tensor()),
                    outputs: Blocks::whole(tensor()),
                };
                let collective = Collective { kind: Kind::AllReduce, parts: [part].into_iter().collect() };
                let call = Call { channel: id, seq: 0, collective, keep: None, timeout: 2 * SOON, sync: true, mark: 0 };
                let ticket = hub.post(call).unwrap();
                assert_eq!(hub.wait(&ticket, Some(2 * SOON), || false), Waited::Ended);
                assert_eq!(ticket.state(), State::Done, "{:?}", ticket.failure());
                data.iter_mut().for_each(|value| assert_eq!(std::mem::take(value), 2.0));
            });
        }
    });
    hub.close(id);
    peer.close(id);
    peer.shut();
}

pub fn connect(hub: &Hub) -> TcpStream {
    let stream = TcpStream::connect(port(hub)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.set_write_timeout(Some(SOON)).unwrap();
    stream
}

/// Connects and proves itself as `from`, a member of the job.
pub fn enter(hub: &Hub, job: &Job, from: HubId) -> TcpStream {
    let mut stream = connect(hub);
    let (opening, reply) = ask(&mut stream, hub, job, from);
    stream.write_all(&opening.proof(&job.secret, &reply.nonce)).unwrap();
    stream
}

/// Sends an opening and takes the hub's answer to it.
pub fn ask(stream: &mut TcpStream, hub: &Hub, job: &Job, from: HubId) -> (Opening, Reply) {
    let opening = job.opening(from, hub.address().hub, nonce().unwrap()).unwrap();
    stream.write_all(&opening.encode()).unwrap();
    let mut reply = [0; REPLY];
    stream.read_exact(&mut reply).unwrap();
    let reply = Reply::decode(&reply).unwrap();
    assert!(opening.accepts(&job.secret, &reply));
    (opening, reply)
}

/// How long until the other side hangs up.
pub fn hangs_up(stream: &mut TcpStream, limit: Duration) -> Duration {
    let start = Instant::now();
    stream.set_read_timeout(Some(limit)).unwrap();
    let mut bytes = [0; 256];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return start.elapsed(),
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return start.elapsed(),
            Err(error) => panic!("still connected after {:?}: {error}", start.elapsed()),
        }
    }
}

/// Waits for something.
pub fn until(limit: Duration, what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
