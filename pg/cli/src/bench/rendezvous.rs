//! `podring bench rendezvous`: many host agents join one coordinator and pass a barrier; the store's rates.
//!
//! The coordinator is a process of its own. All agents live in this process, each with its own connection.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use podring_rendezvous::secret::{BadCredential, Tls, Token};
use podring_rendezvous::session::{Access, Error as SessionError, Ranks, Session, Store};
use serde::Serialize;

use super::init::{self, ByRanks};
use super::versus::{self, Ratios, Side};
use crate::python::Interpreter;
use crate::{coordinator, terminal};

/// What a test network of many agents on one machine may take.
const LIMIT: Duration = Duration::from_secs(120);

/// The same for all rounds of init_process_group.
const INIT_LIMIT: Duration = Duration::from_secs(300);

/// Time the joining of many hosts, a barrier, and the key-value store
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Host agents, each with a connection of its own
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=4096))]
    hosts: u32,
    /// Ranks that each speaks for
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks_per_host: u32,
    /// Seconds for each of the store's measurements
    #[arg(long, default_value_t = 1.0, value_parser = super::positive)]
    seconds: f64,
    /// Measure the store beside this one too, with the same loops in Python
    #[arg(long, value_enum)]
    vs: Option<versus::Peer>,
    /// How often each rate of --vs is measured; medians count
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    turns: u32,
    /// Leave out the run with certificates
    #[arg(long)]
    no_mtls: bool,
    /// Numbers of ranks for which init_process_group and new_group are timed beside gloo's
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(2..=64), default_value = "2,4,8")]
    init_ranks: Vec<u32>,
    /// Times each of them is started anew, each backend
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    init_rounds: u32,
    /// Leave out init_process_group and new_group, which need a Python with torch
    #[arg(long)]
    no_init: bool,
    /// The Python that has torch and podring; else PODRING_PYTHON, this command's own, VIRTUAL_ENV's, python3
    #[arg(long, value_name = "EXE")]
    python: Option<PathBuf>,
    /// Write the numbers as JSON (- for stdout)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot start the coordinator: {0}")]
    Start(std::io::Error),
    #[error("the coordinator said {0:?} instead of where it listens")]
    NoAddress(String),
    #[error("cannot make certificates: {0}")]
    Certificates(rcgen::Error),
    #[error("cannot make temporary files: {0}")]
    Temporary(std::io::Error),
    #[error(transparent)]
    Token(#[from] BadCredential),
    #[error("{failed} of {hosts} hosts failed, first: {first}")]
    Join { failed: usize, hosts: u32, first: SessionError },
    #[error(transparent)]
    Init(#[from] init::Error),
    #[error(transparent)]
    Store(#[from] SessionError),
    #[error(transparent)]
    Versus(#[from] versus::Unmeasured),
    #[error("cannot write {path}: {source}")]
    Write { path: String, source: std::io::Error },
}

/// One forming of the world, seen from outside.
#[derive(Debug, Serialize)]
struct Joined {
    /// From the first connection to the last host's return from the barrier.
    seconds: f64,
    /// The part of it that the barrier took.
    barrier_s: f64,
    /// User and system time of the coordinator meanwhile.
    coordinator_cpu_s: f64,
    /// The same of this process, which plays all hosts.
    hosts_cpu_s: f64,
}

/// Calls per second, summed over the clients.
#[derive(Debug, Serialize)]
struct Rates {
    clients: u32,
    set: f64,
    get: f64,
    add: f64,
    /// Keys per second, 64 to a call.
    multi_set_keys: f64,
    multi_get_keys: f64,
    /// From a set to the return of a wait for it in another thread, and back.
    wait_round_trips: f64,
}

#[derive(Debug, Serialize)]
struct Numbers {
    hosts: u32,
    ranks: u32,
    join_s: f64,
    join_mtls_s: Option<f64>,
    join: Joined,
    join_mtls: Option<Joined>,
    store: Vec<Rates>,
    /// Podring's rates by TCPStore's: the worst of the numbers of clients.
    store_single_ratio: Option<f64>,
    store_multi_ratio: Option<f64>,
    store_wait_ratio: Option<f64>,
    store_vs_tcpstore: Option<Vec<Side>>,
    #[serde(flatten)]
    init: Option<Init>,
}

/// Milliseconds, podring's and gloo's, by number of ranks.
#[derive(Debug, Serialize)]
struct Init {
    init_ms: ByRanks,
    /// torch's search for the backend's name, in the times above.
    discovery_ms: ByRanks,
    new_group_ms: ByRanks,
    /// torch's own, not in the times above.
    store_barrier_ms: ByRanks,
}

/// A coordinator in a process of its own, killed when dropped.
struct Process {
    child: Child,
    address: String,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn start(token: &Path, tls: Option<&Tls>) -> Result<Process, Error> {
        let itself = std::env::current_exe().map_err(Error::Start)?;
        // The console script runs in Python: the same command line is started through that.
        let mut command = if itself.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python")) {
            let mut command = Command::new(Interpreter::find(None).program);
            command.args(["-c", "import sys; from podring._cli import main; sys.exit(main())"]);
            command
        } else {
            Command::new(itself)
        };
        command.args(["coordinator", "--silence", "60", "--token-file"]).arg(token).stdout(Stdio::piped());
        if let Some(Tls { ca, cert, key }) = tls {
            command.arg("--tls-ca").arg(ca).arg("--tls-cert").arg(cert).arg("--tls-key").arg(key);
        }
        let mut child = command.spawn().map_err(Error::Start)?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line).map_err(Error::Start)?;
        }
        let address = line.trim().strip_prefix("listening on ").map(str::to_owned);
        let process = Process { child, address: address.unwrap_or_default() };
        if process.address.is_empty() { Err(Error::NoAddress(line)) } else { Ok(process) }
    }

    /// User and system time so far.
    fn cpu(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        // After the name in parentheses: state is field 3, utime 14, stime 15.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks = |index: usize| fields.get(index).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
        (ticks(11) + ticks(12)) / rustix::param::clock_ticks_per_second() as f64
    }
}

fn own_cpu() -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel fills a valid rusage; all zeros is one too, should the call fail.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<i32, Error> {
    coordinator::raise_descriptors();
    let dir = tempfile::tempdir().map_err(Error::Temporary)?;
    let token = Token::fresh()?;
    let token_path = dir.path().join("token");
    std::fs::write(&token_path, token.reveal()).map_err(Error::Temporary)?;
    let ranks = args.hosts * args.ranks_per_host;
    terminal::err(&format!("# {} hosts, {ranks} ranks", args.hosts));

    let process = Process::start(&token_path, None)?;
    let access = Access { token: Some(token.clone()), timeout: LIMIT, ..Access::new(&process.address) };
    let join = args.join(&process, &access)?;
    terminal::err(&format!("# join + barrier: {}", join.line()));
    let mut store = Vec::new();
    for clients in [1, 8] {
        let rates = args.rates(&access, clients)?;
        terminal::err(&format!("# store, {}", rates.line()));
        store.push(rates);
    }
    drop(process);
    let join_mtls = if args.no_mtls {
        None
    } else {
        let tls = certificates(dir.path())?;
        let process = Process::start(&token_path, Some(&tls))?;
        let access = Access { tls: Some(tls), endpoints: vec![process.address.clone()], ..access };
        let join = args.join(&process, &access)?;
        terminal::err(&format!("# join + barrier with mTLS: {}", join.line()));
        Some(join)
    };
    let versus = match args.vs {
        Some(versus::Peer::Tcpstore) => Some(versus::measure(args.seconds, args.turns)?),
        None => None,
    };
    for side in versus.iter().flatten() {
        terminal::err(&format!("# store, {}", side.line()));
    }
    let ratios = versus.as_deref().map(Ratios::of);
    let init = if args.no_init {
        None
    } else {
        let interpreter = Interpreter::find(args.python.as_deref());
        let times = init::measure(&interpreter, &args.init_ranks, args.init_rounds, INIT_LIMIT)?;
        times.lines().iter().for_each(|line| terminal::err(&format!("# {line}")));
        Some(Init {
            init_ms: times.init().clone(),
            discovery_ms: times.discovery().clone(),
            new_group_ms: times.new_group(),
            store_barrier_ms: times.barrier().clone(),
        })
    };
    let join_mtls_s = join_mtls.as_ref().map(|join| join.seconds);
    let numbers = Numbers {
        hosts: args.hosts,
        ranks,
        join_s: join.seconds,
        join_mtls_s,
        join,
        join_mtls,
        store,
        store_single_ratio: ratios.map(|ratios| ratios.single),
        store_multi_ratio: ratios.map(|ratios| ratios.multi),
        store_wait_ratio: ratios.map(|ratios| ratios.wait),
        store_vs_tcpstore: versus,
        init,
    };
    if let Some(path) = &args.json {
        let failed = |source: std::io::Error| Error::Write { path: path.display().to_string(), source };
        let text = serde_json::to_string_pretty(&numbers).map_err(|error| failed(error.into()))?;
        if path == Path::new("-") {
            terminal::out(&text);
        } else {
            std::fs::write(path, text + "\n").map_err(failed)?;
        }
    }
    Ok(0)
}

impl Joined {
    fn line(&self) -> String {
        let Joined { seconds, barrier_s, coordinator_cpu_s, hosts_cpu_s } = self;
        format!(
            "{seconds:.2} s (barrier {barrier_s:.2} s), CPU {coordinator_cpu_s:.2} s coordinator, {hosts_cpu_s:.2} s hosts"
        )
    }
}

impl Rates {
    fn line(&self) -> String {
        let Rates { clients, set, get, add, multi_set_keys, multi_get_keys, wait_round_trips } = self;
        format!(
            "{clients} client{}: set {set:.0}/s, get {get:.0}/s, add {add:.0}/s, multi_set {multi_set_keys:.0} keys/s, \
             multi_get {multi_get_keys:.0} keys/s, wait {wait_round_trips:.0} round trips/s",
            super::plural(*clients)
        )
    }
}

/// A call by client, store and the client's keys.
type Call<'a> = dyn Fn(usize, &Store, &[String]) -> Result<(), SessionError> + Sync + 'a;

impl Args {
    fn join(&self, process: &Process, access: &Access) -> Result<Joined, Error> {
        let (hosts, per_host) = (self.hosts, self.ranks_per_host);
        let began = Instant::now();
        let (theirs, ours) = (process.cpu(), own_cpu());
        let all_joined = Barrier::new(hosts as usize);
        let agent = &|host: u32| {
            let ranks: Vec<u32> = (host * per_host..(host + 1) * per_host).collect();
            let details = ranks.iter().map(|rank| format!("10.0.0.1:{rank}").into_bytes()).collect();
            let host = format!("host-{host}");
            let ranks = Ranks { host, world_size: hosts * per_host, ranks, details, hosts: Vec::new() };
            let session = Session::join(access, ranks, LIMIT);
            all_joined.wait();
            let joined = Instant::now();
            let session = session?;
            session.barrier("bench", &[], &[], LIMIT)?;
            Ok((session, joined, Instant::now()))
        };
        type Ended = Result<(Session, Instant, Instant), SessionError>;
        let ended: Vec<Ended> = thread::scope(|scope| {
            let spawn = |host| thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, move || agent(host));
            let agents: Vec<_> = (0..hosts).map(spawn).collect();
            let lost = || SessionError::System { what: "thread", why: "ended early".to_owned() };
            let wait = |agent: std::io::Result<thread::ScopedJoinHandle<'_, _>>| match agent {
                Ok(agent) => agent.join().unwrap_or_else(|_| Err(lost())),
                Err(error) => Err(SessionError::System { what: "thread", why: error.to_string() }),
            };
            agents.into_iter().map(wait).collect()
        });
        let (cpu, own) = (process.cpu() - theirs, own_cpu() - ours);
        let mut failed = Vec::new();
        let mut sessions = Vec::new();
        for end in ended {
            match end {
                Ok(session) => sessions.push(session),
                Err(error) => failed.push(error),
            }
        }
        if !failed.is_empty() {
            return Err(Error::Join { failed: failed.len(), hosts, first: failed.swap_remove(0) });
        }
        let last = |ends: &dyn Fn(&(Session, Instant, Instant)) -> Instant| sessions.iter().map(ends).max();
        let (joined, passed) = (last(&|one| one.1).unwrap_or(began), last(&|one| one.2).unwrap_or(began));
        Ok(Joined {
            seconds: (passed - began).as_secs_f64(),
            barrier_s: (passed - joined).as_secs_f64(),
            coordinator_cpu_s: cpu,
            hosts_cpu_s: own,
        })
    }

    fn rates(&self, access: &Access, clients: u32) -> Result<Rates, Error> {
        let stores: Vec<Store> = (0..clients).map(|_| Store::connect(access)).collect::<Result<_, _>>()?;
        let keys = |client: usize| (0..64).map(|key| format!("bench/{client}/{key}")).collect::<Vec<String>>();
        let values = vec![vec![7u8; 32]; 64];
        let measure = |act: &Call<'_>| {
            let end = Duration::from_secs_f64(self.seconds);
            let counts: Result<Vec<f64>, SessionError> = thread::scope(|scope| {
                let one = |(client, store): (usize, &'_ Store)| {
                    let (keys, store) = (keys(client), store.clone());
                    scope.spawn(move || {
                        let (began, mut count) = (Instant::now(), 0u32);
                        while began.elapsed() < end {
                            act(client, &store, &keys)?;
                            count += 1;
                        }
                        Ok(f64::from(count) / began.elapsed().as_secs_f64())
                    })
                };
                let running: Vec<_> = stores.iter().enumerate().map(one).collect();
                let lost = || SessionError::System { what: "thread", why: "ended early".to_owned() };
                running.into_iter().map(|client| client.join().unwrap_or_else(|_| Err(lost()))).collect()
            });
            counts.map(|counts| counts.into_iter().sum::<f64>())
        };
        let now = Duration::ZERO;
        Ok(Rates {
            clients,
            set: measure(&|_, store, keys| store.set(&keys[0], &[7; 32]))?,
            get: measure(&|_, store, keys| store.get(&keys[0], now).map(drop))?,
            add: measure(&|client, store, _| store.add(&format!("bench/count/{client}"), 1).map(drop))?,
            multi_set_keys: 64.0 * measure(&|_, store, keys| store.multi_set(keys, &values))?,
            multi_get_keys: 64.0 * measure(&|_, store, keys| store.multi_get(keys, now).map(drop))?,
            wait_round_trips: self.wait_round_trips(&stores)?,
        })
    }

    /// Pairs of threads play ping-pong: each waits for the key that the other sets.
    fn wait_round_trips(&self, stores: &[Store]) -> Result<f64, SessionError> {
        const ROUNDS: usize = 200;
        let began = Instant::now();
        let played: Result<Vec<()>, SessionError> = thread::scope(|scope| {
            let mut running = Vec::new();
            for (pair, store) in stores.iter().enumerate() {
                for side in 0..2 {
                    let store = store.clone();
                    running.push(scope.spawn(move || {
                        let key = |round: usize, side: usize| format!("bench/wait/{pair}/{round}/{side}");
                        for round in 0..ROUNDS {
                            if side == 0 {
                                store.set(&key(round, 0), b"")?;
                            }
                            store.wait(&[key(round, 1 - side)], LIMIT)?;
                            if side == 1 {
                                store.set(&key(round, 1), b"")?;
                            }
                        }
                        Ok(())
                    }));
                }
            }
            let lost = || SessionError::System { what: "thread", why: "ended early".to_owned() };
            running.into_iter().map(|side| side.join().unwrap_or_else(|_| Err(lost()))).collect()
        });
        played?;
        let elapsed = began.elapsed().as_secs_f64();
        for store in stores {
            for key in store.list_keys("bench/wait/")? {
                store.delete(&key)?;
            }
        }
        Ok((ROUNDS * stores.len()) as f64 / elapsed)
    }
}

/// A CA of the bench's own, and one certificate that both sides use.
fn certificates(dir: &Path) -> Result<Tls, Error> {
    let make = || -> Result<[String; 3], rcgen::Error> {
        let key = rcgen::KeyPair::generate()?;
        let mut params = rcgen::CertificateParams::new(Vec::new())?;
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let ca = params.self_signed(&key)?;
        let issuer = rcgen::Issuer::new(params, key);
        let key = rcgen::KeyPair::generate()?;
        let cert = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()])?.signed_by(&key, &issuer)?;
        Ok([ca.pem(), cert.pem(), key.serialize_pem()])
    };
    let [ca, cert, key] = make().map_err(Error::Certificates)?;
    let write = |name: &str, pem: String| {
        let path = dir.join(name);
        std::fs::write(&path, pem).map(|()| path).map_err(Error::Temporary)
    };
    Ok(Tls { ca: write("ca.pem", ca)?, cert: write("cert.pem", cert)?, key: write("key.pem", key)? })
}
