//! Processes that are ranks, each with its virtual chip, and nothing of Python: a test starts its own executable again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use podring_group::engine::Hardware;
use podring_group::{Config, HubConfig, ProcessGroup, Runtime, Store, StoreError};
use podring_ici::engine::{Chip, ChipOptions};
use podring_ici::pjrt::{Client, PjrtError, Plugin, Value, Want, find};
use podring_ici::slice::from_devices;
use podring_interposer::Settings;

/// Of a whole job.
const MOST: Duration = Duration::from_secs(100);
const FOLDER: &str = "PODRING_TEST_FOLDER";

/// A store in files: one name each.
struct Files(PathBuf);

impl Files {
    fn file(&self, key: &str) -> PathBuf {
        let name: String = key.bytes().map(|byte| format!("{byte:02x}")).collect();
        // Names of files may have 255 bytes.
        let mut path = self.0.clone();
        name.as_bytes().chunks(200).for_each(|part| path.push(format!("k{}", String::from_utf8_lossy(part))));
        path.with_extension("value")
    }
}

fn failed(call: &'static str, key: &str) -> impl FnOnce(std::io::Error) -> StoreError {
    let key = key.to_owned();
    move |error| StoreError { call, key, why: error.to_string() }
}

impl Store for Files {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        let file = self.file(key);
        let write = || {
            fs::create_dir_all(file.parent().unwrap_or(&self.0))?;
            let part = file.with_extension(format!("part{}", std::process::id()));
            fs::write(&part, value)?;
            fs::rename(part, &file)
        };
        write().map_err(failed("set", key))
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, StoreError> {
        fs::read(self.file(key)).map_err(failed("get", key))
    }

    fn check(&self, keys: &[String]) -> Result<bool, StoreError> {
        Ok(keys.iter().all(|key| self.file(key).exists()))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        let lock = fs::File::create(self.0.join("lock")).map_err(failed("add", key))?;
        lock.lock().map_err(failed("add", key))?;
        let before = self.get(key).ok().and_then(|value| String::from_utf8(value).ok()?.parse().ok()).unwrap_or(0i64);
        self.set(key, (before + amount).to_string().as_bytes())?;
        Ok(before + amount)
    }
}

/// XLA's CPU plugin, or none where there is none and none is required.
fn plugin() -> Option<PathBuf> {
    let environment = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../.venv");
    match find(Want::Cpu, &[environment]) {
        Ok(file) => Some(file),
        Err(error @ PjrtError::NoPlugin { .. }) => {
            assert!(std::env::var("PODRING_REQUIRE_PJRT").as_deref() != Ok("1"), "{error}");
            eprintln!("NOT RUN: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// What one rank has.
pub struct Rank {
    pub rank: u32,
    pub size: u32,
    pub world: ProcessGroup,
    pub chip: Arc<Chip>,
    /// The framework's client, which the chip shares.
    pub client: Client,
    runtime: Runtime,
    folder: PathBuf,
}

impl Rank {
    /// A group of some of the ranks, by their numbers; this one is among them.
    pub fn group(&self, name: &str, members: &[u32]) -> ProcessGroup {
        let config = Config {
            rank: members.iter().position(|&member| member == self.rank).unwrap() as u32,
            size: members.len() as u32,
            name: name.to_owned(),
            global_ranks: Some(members.to_vec()),
            timeout: Duration::from_secs(20),
            store: Arc::new(Files(self.folder.clone())),
            rendezvous: None,
        };
        ProcessGroup::form(&self.runtime, config, || false).unwrap()
    }
}

struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs `body` on every chip of a slice, each in a process; `test` is the calling test's name. Ranks in `dying` are
/// expected to end badly, all others well.
pub fn run(test: &str, slice: &str, dying: &[u32], body: impl Fn(&Rank)) {
    let Some(file) = plugin() else { return };
    if let Some(folder) = std::env::var_os(FOLDER) {
        return body(&start(slice, &file, Path::new(&folder)));
    }
    let size = podring_topology::parse(slice).unwrap().devices();
    let folder = tempfile::tempdir().unwrap();
    let spawn = |rank: u32| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string()).env(FOLDER, folder.path());
        let log = fs::File::create(folder.path().join(format!("log{rank}"))).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
    };
    let mut children = Children((0..size).map(spawn).collect());
    let end = Instant::now() + MOST;
    let said = |rank: usize| fs::read_to_string(folder.path().join(format!("log{rank}"))).unwrap_or_default();
    let mut over = vec![false; children.0.len()];
    while over.contains(&false) {
        for (rank, child) in children.0.iter_mut().enumerate().filter(|(rank, _)| !over[*rank]).collect::<Vec<_>>() {
            if let Some(status) = child.try_wait().unwrap() {
                assert!(status.success() != dying.contains(&(rank as u32)), "rank {rank}: {status}\n{}", said(rank));
                over[rank] = true;
            }
        }
        let all = || (0..size as usize).map(|rank| format!("rank {rank}:\n{}", said(rank))).collect::<String>();
        assert!(Instant::now() < end, "not over after {MOST:?}\n{}", all());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn start(slice: &str, file: &Path, folder: &Path) -> Rank {
    let number = |name: &str| std::env::var(name).unwrap().parse::<u32>().unwrap();
    let (rank, size) = (number("RANK"), number("WORLD_SIZE"));
    // SAFETY: XLA's CPU plugin, pinned in requirements/ici.txt. Loading it initializes it, as a framework would.
    unsafe { Plugin::load(file) }.unwrap();
    assert!(podring_interposer::configure(Settings::virtual_slice(slice, Some(file)).unwrap()));
    let table = podring_interposer::api();
    // SAFETY: the interposer's table lives for ever.
    let framework = unsafe { Plugin::over(table, file) }.unwrap();
    // The framework's client: it stays until the process ends.
    let owner = Client::create(&framework, &[]).unwrap();
    std::mem::forget(owner);
    let shared = podring_interposer::shared().unwrap();
    // SAFETY: as above.
    let client =
        unsafe { Client::shared(&Plugin::over(shared.table, &shared.plugin).unwrap(), shared.client) }.unwrap();
    // As a TPU's devices, these tell which slice they are.
    let seen = from_devices(&client.descriptions().unwrap()).unwrap();
    assert!(
        seen.to_string() == slice
            && seen.list().map(|one| one.coords).eq(shared.slice.unwrap().list().map(|one| one.coords))
    );
    // Many small programs: most of the time would go to optimizing them.
    let overrides = vec![
        ("xla_backend_optimization_level".to_owned(), Value::Int(0)),
        ("xla_llvm_disable_expensive_passes".to_owned(), Value::Bool(true)),
    ];
    let options = ChipOptions { slice: shared.slice, on_host: true, played: true, overrides, ..Default::default() };
    let chip = Chip::start(client.clone(), options).unwrap();
    assert_eq!((chip.rank(), chip.devices()), (rank, size));
    let runtime = Runtime::start_with(HubConfig::default(), Some(Hardware::Chip(chip.clone()))).unwrap();
    let config = Config {
        rank,
        size,
        name: "world".to_owned(),
        global_ranks: None,
        timeout: Duration::from_secs(20),
        store: Arc::new(Files(folder.to_owned())),
        rendezvous: None,
    };
    let world = ProcessGroup::form(&runtime, config, || false).unwrap();
    podring_interposer::set_world(Some(world.clone()));
    Rank { rank, size, world, chip, client, runtime, folder: folder.to_owned() }
}
