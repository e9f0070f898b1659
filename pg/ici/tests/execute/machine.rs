//! Eight devices, and programs run on them with plain vectors.

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use podring_ici::{
    cache::{Cache, Disk},
    pjrt::{Buffer, Client, Loaded, PjrtError, Plugin, Value, Want, find},
    program::{Groups, Op, PartSpec, Program, Role, Spec, build},
};

pub const DEVICES: usize = 8;

pub struct Machine {
    pub client: Client,
    programs: Cache,
}

/// XLA's CPU plugin, or none where there is none and none is required.
pub fn plugin() -> Option<Arc<Plugin>> {
    let environment = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../.venv");
    let file = match find(Want::Cpu, &[environment]) {
        Ok(file) => file,
        Err(error @ PjrtError::NoPlugin { .. }) => {
            let required = std::env::var("PODRING_REQUIRE_PJRT").is_ok_and(|value| value == "1");
            assert!(!required, "{error}");
            eprintln!("NOT RUN: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    // SAFETY: XLA's CPU plugin, pinned in requirements/ici.txt.
    Some(unsafe { Plugin::load(&file) }.unwrap())
}

/// The machine, or none where there is no plugin and none is required.
pub fn machine() -> Option<&'static Machine> {
    static MACHINE: OnceLock<Option<Machine>> = OnceLock::new();
    MACHINE
        .get_or_init(|| {
            let plugin = plugin()?;
            let client = Client::create(&plugin, &[("cpu_device_count", Value::Int(DEVICES as i64))]).unwrap();
            assert_eq!(client.devices().len(), DEVICES);
            // The same place and options as in pg/group's tests: each test may be a process of its own, and many programs
            // are the same. They are small: most of the time would go to optimizing them.
            let disk = Disk::open(&PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("programs"), 1 << 30).unwrap();
            let overrides = vec![
                ("xla_backend_optimization_level".to_owned(), Value::Int(0)),
                ("xla_llvm_disable_expensive_passes".to_owned(), Value::Bool(true)),
            ];
            let programs = Cache::new(client.clone(), Some(disk)).unwrap().with(overrides, None);
            Some(Machine { client, programs })
        })
        .as_ref()
}

impl Machine {
    pub fn compile(&self, program: &Program) -> Arc<Loaded> {
        let devices: Vec<i64> = self.client.devices().iter().map(|device| i64::from(device.id)).collect();
        self.programs.get(program, &devices).unwrap_or_else(|error| panic!("{error}\n{}", program.text))
    }

    /// Runs a program; `feed(device, role)` gives each argument's bytes. Returns results by device.
    pub fn run(&self, program: &Program, feed: impl Fn(usize, Role) -> Vec<u8>) -> Vec<Vec<Vec<u8>>> {
        let loaded = self.compile(program);
        let arguments: Vec<Vec<Buffer>> = (0..DEVICES)
            .map(|device| {
                program
                    .inputs
                    .iter()
                    .map(|port| {
                        let mut bytes = feed(device, port.role);
                        // Padding is garbage on purpose.
                        bytes.resize(port.bytes(), 0xa5);
                        let dims: Vec<i64> = port.dims.iter().map(|&dim| dim as i64).collect();
                        self.client.buffer(&bytes, port.element, &dims, &self.client.devices()[device]).unwrap()
                    })
                    .collect()
            })
            .collect();
        let borrowed: Vec<Vec<&Buffer>> = arguments.iter().map(|list| list.iter().collect()).collect();
        let outputs = loaded.launch(&borrowed, false).unwrap().wait().unwrap();
        outputs
            .iter()
            .map(|list| {
                list.iter()
                    .zip(&program.outputs)
                    .map(|(buffer, port)| {
                        let mut bytes = vec![0; port.bytes()];
                        buffer.read(&mut bytes).unwrap();
                        bytes
                    })
                    .collect()
            })
            .collect()
    }
}

/// A program for one part.
pub fn single(op: Op, part: PartSpec, groups: &Groups) -> Spec {
    Spec {
        op,
        parts: vec![part],
        groups: groups.clone(),
        backend: podring_ici::program::Backend::Cpu,
        exact: false,
        donate: false,
    }
}

pub fn program(spec: &Spec) -> Program {
    build(spec).unwrap()
}

/// Ways to divide 8 devices: one group, halves, strided fours, out-of-order pairs, and singles.
pub fn group_kinds() -> Vec<Groups> {
    [
        vec![vec![0, 1, 2, 3, 4, 5, 6, 7]],
        vec![vec![5, 2, 7, 0, 1, 6, 3, 4]],
        vec![vec![0, 2, 4, 6], vec![1, 3, 5, 7]],
        vec![vec![3, 0], vec![1, 6], vec![7, 4], vec![2, 5]],
        (0..8).map(|device| vec![device]).collect(),
    ]
    .into_iter()
    .map(|groups| Groups::new(groups).unwrap())
    .collect()
}

/// The group and position of a device.
pub fn place(groups: &Groups, device: usize) -> (&[u32], usize) {
    let group = groups.groups.iter().find(|group| group.contains(&(device as u32))).unwrap();
    (group, group.iter().position(|&member| member as usize == device).unwrap())
}

/// A small generator (splitmix64), so that data is the same on every run.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}
