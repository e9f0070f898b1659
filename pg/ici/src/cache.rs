//! Compiled programs, kept: in memory, and in files that outlive the process.
//!
//! A program is known by its text, its devices, and the plugin that compiled it. Files are written beside their place
//! and renamed, so that a reader sees a whole file or none; each carries a checksum of its contents. A damaged file is
//! compiled again, with a warning. The checksum guards against accidents, not against people: plugins run what a file
//! says, so that a directory which others may write to is not used.
//!
//! With a [`Share`], one machine of a job compiles a program and the others get it, if it comes in time. It is the share's
//! to make sure that what it gives is of this job.

use std::{
    collections::HashMap,
    env, fs, io,
    io::{Read as _, Seek as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};

use crate::{
    pjrt::{Client, CompileOptions, Loaded, PjrtError, Value},
    program::Program,
    progress::{self, Subject},
};

const MAGIC: &[u8; 16] = b"podring program1";
const SUFFIX: &str = "pjrt";

/// A directory of compiled programs.
#[derive(Clone, Debug)]
pub struct Disk {
    directory: PathBuf,
    most: u64,
}

/// Why a directory is not used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// It can't be made or read.
    #[error("cache directory {}: {error}", directory.display())]
    Io {
        /// The directory.
        directory: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// Someone else could put programs into it.
    #[error("cache directory {} belongs to user {owner} with mode {mode:o}; it must be yours and writable by you alone", directory.display())]
    Shared {
        /// The directory.
        directory: PathBuf,
        /// Its owner.
        owner: u32,
        /// Its permissions.
        mode: u32,
    },
}

impl Disk {
    /// Opens or makes a directory that may hold `most` bytes, of which the ones that were used longest ago go first.
    pub fn open(directory: &Path, most: u64) -> Result<Disk, DiskError> {
        let io = |error| DiskError::Io { directory: directory.to_owned(), error };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(io)?;
        let metadata = fs::metadata(directory).map_err(io)?;
        let mode = metadata.permissions().mode() & 0o777;
        // The owner of a file just made is this process's user.
        let probe = tempfile::NamedTempFile::new_in(directory).map_err(io)?;
        let me = probe.as_file().metadata().map_err(io)?.uid();
        if metadata.uid() != me || mode & 0o022 != 0 {
            return Err(DiskError::Shared { directory: directory.to_owned(), owner: metadata.uid(), mode });
        }
        Ok(Disk { directory: directory.to_owned(), most })
    }

    fn file(&self, key: &Key) -> PathBuf {
        self.directory.join(key.to_string()).with_extension(SUFFIX)
    }

    /// A file's contents; none if there is no such file, an error that says what is wrong if it is damaged.
    fn read(&self, key: &Key) -> Result<Option<Vec<u8>>, String> {
        let file = self.file(key);
        let bytes = match fs::read(&file) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let program = unwrap(&bytes)?.to_vec();
        // Used just now: the oldest is what goes first.
        if let Ok(opened) = fs::File::open(&file) {
            let _ = opened.set_modified(SystemTime::now());
        }
        Ok(Some(program))
    }

    fn write(&self, key: &Key, program: &[u8]) -> io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(&self.directory)?;
        file.write_all(&wrap(program))?;
        file.persist(self.file(key)).map_err(|error| error.error)?;
        self.shrink()
    }

    /// Removes the files that were used longest ago until the rest fits.
    fn shrink(&self) -> io::Result<()> {
        let mut files: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == SUFFIX)
                && let Ok(metadata) = fs::metadata(&path)
            {
                files.push((metadata.modified()?, metadata.len(), path));
            }
        }
        files.sort();
        let mut total: u64 = files.iter().map(|(_, size, _)| size).sum();
        for (_, size, path) in files {
            if total <= self.most {
                break;
            }
            // Another process may have been faster.
            let _ = fs::remove_file(path);
            total -= size;
        }
        Ok(())
    }
}

/// A program with what tells that it is whole.
fn wrap(program: &[u8]) -> Vec<u8> {
    [&MAGIC[..], &Sha256::digest(program), program].concat()
}

/// The inverse of [`wrap`], or what is wrong.
fn unwrap(bytes: &[u8]) -> Result<&[u8], String> {
    let head = MAGIC.len() + 32;
    if bytes.len() < head || &bytes[..MAGIC.len()] != MAGIC {
        return Err("not a program of this cache".to_owned());
    }
    if Sha256::digest(&bytes[head..])[..] != bytes[MAGIC.len()..head] {
        return Err("its checksum is wrong".to_owned());
    }
    Ok(&bytes[head..])
}

/// What became of a program that another machine was to compile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fetched {
    /// It is here.
    Program(Vec<u8>),
    /// That machine could not compile or save it.
    Failed,
    /// What was there is not by a machine of this job, or not as that wrote it.
    Forged,
    /// It has not come in time.
    Late,
}

/// The place where the machines of a job hand each other compiled programs.
pub trait Share: Send + Sync {
    /// Whether this machine is to compile the program: the first that asks is.
    fn claim(&self, key: &str) -> Result<bool, String>;
    /// Hands a program to the others; none if there is none to hand.
    fn publish(&self, key: &str, program: Option<&[u8]>) -> Result<(), String>;
    /// Waits for what another machine publishes: for a bounded time, and as long as `go_on` says so.
    fn fetch(&self, key: &str, go_on: &dyn Fn() -> bool) -> Result<Fetched, String>;
}

/// A place to share at, and whether to wait for others there any longer.
#[derive(Clone, Copy)]
pub struct Shared<'a> {
    /// The place.
    pub share: &'a dyn Share,
    /// Asked now and then.
    pub go_on: &'a dyn Fn() -> bool,
}

/// What a compiled program is known by.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key([u8; 32]);

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// How programs were come by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Compiled.
    pub compiled: u64,
    /// Loaded from a file.
    pub loaded: u64,
    /// Compiled by another machine of the job.
    pub received: u64,
    /// In memory already.
    pub hits: u64,
    /// Files, or programs of others, that were damaged, forged or couldn't be loaded.
    pub damaged: u64,
}

type Slot = Arc<Mutex<Option<Arc<Loaded>>>>;

/// Compiled programs of one client.
pub struct Cache {
    client: Client,
    /// What a key holds beside the program: the plugin's identity.
    plugin: Vec<u8>,
    /// The same without what differs between hosts.
    anywhere: Vec<u8>,
    overrides: Vec<(String, Value)>,
    share: Option<Arc<dyn Share>>,
    memory: Mutex<HashMap<Key, Slot>>,
    disk: Option<Disk>,
    compiled: AtomicU64,
    loaded: AtomicU64,
    received: AtomicU64,
    hits: AtomicU64,
    damaged: AtomicU64,
}

impl Cache {
    /// An empty cache over a client, with or without files.
    pub fn new(client: Client, disk: Option<Disk>) -> Result<Cache, PjrtError> {
        let (plugin, anywhere) = identity(&client)?;
        let count = || AtomicU64::new(0);
        Ok(Cache {
            client,
            plugin,
            anywhere,
            overrides: Vec::new(),
            share: None,
            memory: Mutex::default(),
            disk,
            compiled: count(),
            loaded: count(),
            received: count(),
            hits: count(),
            damaged: count(),
        })
    }

    /// With XLA's options for every compile, and with the job's other machines.
    pub fn with(mut self, overrides: Vec<(String, Value)>, share: Option<Arc<dyn Share>>) -> Cache {
        let options = format!("{overrides:?}");
        if !overrides.is_empty() {
            self.plugin.extend_from_slice(options.as_bytes());
            self.anywhere.extend_from_slice(options.as_bytes());
        }
        (self.overrides, self.share) = (overrides, share);
        self
    }

    /// For devices that are no others than those of this name: what is compiled for one slice is of no use on another.
    pub fn within(mut self, devices: &str) -> Cache {
        for identity in [&mut self.plugin, &mut self.anywhere] {
            identity.extend_from_slice(b"\0on\0");
            identity.extend_from_slice(devices.as_bytes());
        }
        self
    }

    /// How programs were come by so far.
    pub fn counts(&self) -> Counts {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counts {
            compiled: read(&self.compiled),
            loaded: read(&self.loaded),
            received: read(&self.received),
            hits: read(&self.hits),
            damaged: read(&self.damaged),
        }
    }

    /// The program on these devices. Compiled once however many threads ask: the others wait for the first.
    pub fn get(&self, program: &Program, devices: &[i64]) -> Result<Arc<Loaded>, PjrtError> {
        self.get_for("", program, devices)
    }

    /// The same for a group, named to people if it takes long.
    pub fn get_for(&self, group: &str, program: &Program, devices: &[i64]) -> Result<Arc<Loaded>, PjrtError> {
        let shared = self.share.as_deref().map(|share| Shared { share, go_on: &|| true });
        self.get_with(group, program, devices, shared)
    }

    /// The same, shared with others than those that this cache was made with.
    pub fn get_with(
        &self,
        group: &str,
        program: &Program,
        devices: &[i64],
        shared: Option<Shared>,
    ) -> Result<Arc<Loaded>, PjrtError> {
        let key = key(&self.plugin, program, devices);
        let slot = self.memory.lock().entry(key).or_default().clone();
        let mut slot = slot.lock();
        if let Some(loaded) = &*slot {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(loaded.clone());
        }
        let loaded = match self.on_disk(&key) {
            Some(loaded) => loaded,
            None => match self.turn(program, devices, shared) {
                Turn::Received(loaded, bytes) => {
                    self.keep(&key, &bytes);
                    *loaded
                }
                Turn::Mine(claimed) => {
                    let compiled = self.compile(group, program, devices);
                    let bytes = compiled.as_ref().ok().and_then(|loaded| self.save(&key, loaded, claimed.is_some()));
                    if let (Some(Shared { share, .. }), Some(name)) = (shared, &claimed)
                        && let Err(error) = share.publish(name, bytes.as_deref().map(wrap).as_deref())
                    {
                        tracing::warn!(error, "a compiled program was not shared");
                    }
                    compiled?
                }
            },
        };
        let loaded = Arc::new(loaded);
        *slot = Some(loaded.clone());
        Ok(loaded)
    }

    /// Gets programs ahead of time; `progress` is told how many are ready, before the first and after each.
    pub fn warm<'a>(
        &self,
        programs: impl ExactSizeIterator<Item = (&'a Program, &'a [i64])>,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<(), PjrtError> {
        let total = programs.len();
        progress(0, total);
        for (index, (program, devices)) in programs.enumerate() {
            self.get(program, devices)?;
            progress(index + 1, total);
        }
        Ok(())
    }

    fn on_disk(&self, key: &Key) -> Option<Loaded> {
        let disk = self.disk.as_ref()?;
        let damaged = |what: &str| {
            self.damaged.fetch_add(1, Ordering::Relaxed);
            let file = disk.file(key);
            tracing::warn!(file = %file.display(), "a compiled program could not be used and is compiled again: {what}");
            let _ = fs::remove_file(file);
        };
        let bytes = match disk.read(key) {
            Ok(bytes) => bytes?,
            Err(what) => {
                damaged(&what);
                return None;
            }
        };
        // SAFETY: the file is in a directory that only this user writes, its checksum is right, and its name is of
        // this very plugin, program and machine.
        match unsafe { self.client.deserialize(&bytes, None) } {
            Ok(loaded) => {
                self.loaded.fetch_add(1, Ordering::Relaxed);
                Some(loaded)
            }
            Err(error) => {
                damaged(&error.to_string());
                None
            }
        }
    }

    /// Another machine's program, or this one's turn to compile it (with the name to publish it under, if any).
    fn turn(&self, program: &Program, devices: &[i64], shared: Option<Shared>) -> Turn {
        let Some(Shared { share, go_on }) = shared else { return Turn::Mine(None) };
        let name = key(&self.anywhere, program, devices).to_string();
        let alone = |what: &str| {
            tracing::warn!(program = name, "a program is compiled here, though another machine was to do it: {what}");
            Turn::Mine(None)
        };
        match share.claim(&name) {
            Ok(true) => return Turn::Mine(Some(name)),
            Ok(false) => {}
            Err(error) => return alone(&error),
        }
        let damaged = |what: &str| {
            self.damaged.fetch_add(1, Ordering::Relaxed);
            alone(what)
        };
        let bytes = match share.fetch(&name, go_on) {
            Ok(Fetched::Program(bytes)) => bytes,
            Ok(Fetched::Failed) => return alone("it could not"),
            Ok(Fetched::Forged) => {
                return damaged("what came is not by a member of this job, or was altered, and is refused");
            }
            Ok(Fetched::Late) => return alone("it has not in time"),
            Err(error) => return alone(&error),
        };
        let program = match unwrap(&bytes) {
            Ok(program) => program,
            Err(what) => return damaged(&what),
        };
        // SAFETY: from a member of this job, as the share has made sure; of this very plugin, program and machine by its
        // name, and whole.
        match unsafe { self.client.deserialize(program, None) } {
            Ok(loaded) => {
                self.received.fetch_add(1, Ordering::Relaxed);
                Turn::Received(Box::new(loaded), program.to_vec())
            }
            Err(error) => damaged(&error.to_string()),
        }
    }

    fn compile(&self, group: &str, program: &Program, devices: &[i64]) -> Result<Loaded, PjrtError> {
        let mut options = CompileOptions::on(devices.iter().copied());
        options.overrides.clone_from(&self.overrides);
        let subject = Subject { program, group, devices: devices.len() };
        let loaded = progress::watched(&subject, || self.client.compile(&program.text, &options))?;
        self.compiled.fetch_add(1, Ordering::Relaxed);
        Ok(loaded)
    }

    /// Writes a program to its file, if there are files; returns its bytes if they are wanted or there are.
    fn save(&self, key: &Key, loaded: &Loaded, wanted: bool) -> Option<Vec<u8>> {
        if !wanted && self.disk.is_none() {
            return None;
        }
        // A program that can't be kept is no reason not to run it.
        match loaded.executable().serialize() {
            Ok(bytes) => {
                self.keep(key, &bytes);
                Some(bytes)
            }
            Err(error) => {
                tracing::warn!(%error, "a program can't be kept");
                None
            }
        }
    }

    fn keep(&self, key: &Key, bytes: &[u8]) {
        if let Some(disk) = &self.disk
            && let Err(error) = disk.write(key, bytes)
        {
            tracing::warn!(%error, directory = %disk.directory.display(), "a program was not kept");
        }
    }
}

/// Who compiles.
enum Turn {
    Received(Box<Loaded>, Vec<u8>),
    Mine(Option<String>),
}

fn key(plugin: &[u8], program: &Program, devices: &[i64]) -> Key {
    let mut hash = Sha256::new();
    hash.update(plugin);
    for device in devices {
        hash.update(device.to_le_bytes());
    }
    hash.update(b"\0text\0");
    hash.update(program.text.as_bytes());
    Key(hash.finalize().into())
}

/// What must be the same for a compiled program to be of use: the plugin's build, its interface, the platform, and for
/// machine code the processor. First for this host's files, then for any host: the time of the plugin's file is when it
/// was installed.
fn identity(client: &Client) -> Result<(Vec<u8>, Vec<u8>), PjrtError> {
    let plugin = client.plugin();
    let mut text = format!("{:?} {} {}", plugin.version(), client.platform()?, client.platform_version()?);
    text += &format!(" {} {}", env::consts::ARCH, client.devices().len());
    let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    text.extend(processor.lines().find(|line| line.starts_with("flags") || line.starts_with("Features")));
    // A CPU plugin's version says nothing of its build; its file does.
    text += &ends(plugin.file());
    let mut here = text.clone();
    if let Ok(metadata) = fs::metadata(plugin.file()) {
        here += &format!(" {}.{}", metadata.mtime(), metadata.mtime_nsec());
    }
    Ok((here.into_bytes(), text.into_bytes()))
}

/// A file's length, and a digest of its beginning (which has a build's id) and its end.
fn ends(file: &Path) -> String {
    const PIECE: u64 = 64 << 10;
    let read = || -> io::Result<String> {
        let mut file = fs::File::open(file)?;
        let length = file.metadata()?.len();
        let mut hash = Sha256::new();
        for start in [0, length.saturating_sub(PIECE)] {
            let mut piece = Vec::new();
            file.seek(io::SeekFrom::Start(start))?;
            (&file).take(PIECE).read_to_end(&mut piece)?;
            hash.update(&piece);
        }
        Ok(format!(" {length} {}", Key(hash.finalize().into())))
    };
    read().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> Key {
        Key([byte; 32])
    }

    #[test]
    fn files_come_back_and_damage_is_seen() {
        let directory = tempfile::tempdir().unwrap();
        let disk = Disk::open(&directory.path().join("new"), 1 << 20).unwrap();
        assert_eq!(disk.read(&key(1)), Ok(None));
        disk.write(&key(1), b"program").unwrap();
        assert_eq!(disk.read(&key(1)), Ok(Some(b"program".to_vec())));
        let file = disk.file(&key(1));
        let whole = fs::read(&file).unwrap();
        for cut in 0..whole.len() {
            fs::write(&file, &whole[..cut]).unwrap();
            assert!(disk.read(&key(1)).is_err(), "cut at {cut}");
            let mut flipped = whole.clone();
            flipped[cut] ^= 1;
            fs::write(&file, &flipped).unwrap();
            assert!(disk.read(&key(1)).is_err(), "flipped at {cut}");
        }
    }

    #[test]
    fn the_oldest_go_first() {
        let directory = tempfile::tempdir().unwrap();
        let one = 16 + 32 + 100;
        let disk = Disk::open(directory.path(), 3 * one).unwrap();
        for byte in 0..3 {
            disk.write(&key(byte), &[byte; 100]).unwrap();
            let then = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(u64::from(byte) + 1);
            fs::File::open(disk.file(&key(byte))).unwrap().set_modified(then).unwrap();
        }
        // Reading makes the first the newest.
        assert!(disk.read(&key(0)).unwrap().is_some());
        disk.write(&key(3), &[3; 100]).unwrap();
        let there: Vec<bool> = (0..4).map(|byte| disk.file(&key(byte)).exists()).collect();
        assert_eq!(there, [true, false, true, true]);
    }

    #[test]
    fn directories_that_others_write_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(Disk::open(directory.path(), 1), Err(DiskError::Shared { mode: 0o777, .. })));
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(matches!(Disk::open(&file, 1), Err(DiskError::Io { .. })));
    }
}
