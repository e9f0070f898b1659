//! Plugins that are old, strange or dangerous.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use podring_ici::{
    pjrt::{Client, CompileOptions, PjrtError, Plugin, Topology, Value},
    program::{Backend, Groups, Op, PartSpec, Spec, build},
    slice::{How, from_devices, plan_alone},
};
use podring_topology::Slice;

/// A plugin in C whose table has `slots` entries and speaks version `major`.`minor`. It refuses structs that are smaller
/// than it knows, as plugins do, and knows no more of any function than version 0.81's beginning.
fn fake(folder: &Path, major: i32, minor: i32, slots: usize) -> PathBuf {
    let source = folder.join("fake.c");
    let library = folder.join(format!("fake-{major}-{minor}-{slots}.so"));
    let text = r#"
#include <stddef.h>
#include <string.h>
typedef struct { size_t size; void *extension; } Args;
typedef struct { const char *message; int code; } Error;
typedef struct { size_t size; void *extension; Error *error; const char *message; size_t message_size; } Message;
typedef struct { size_t size; void *extension; Error *error; int code; } Code;
static Error small = {"struct_size too small", 3}, none = {"this plugin does nothing", 12};
static void *fails(void *args) { return ((Args *)args)->size < sizeof(Args) ? &small : &none; }
static void *works(void *args) { return ((Args *)args)->size < sizeof(Args) ? &small : NULL; }
static void *destroy(void *args) { (void)args; return NULL; }
static void *message(void *args) {
  Message *m = args;
  if (m->size < sizeof(Message)) return NULL;
  m->message = m->error->message;
  m->message_size = strlen(m->message);
  return NULL;
}
static void *code(void *args) {
  Code *c = args;
  if (c->size >= offsetof(Code, code) + sizeof(int)) c->code = c->error->code;
  return NULL;
}
static struct {
  size_t size; void *extension; size_t version_size; void *version_extension; int major, minor;
  void *(*slots[SLOTS])(void *);
} table = {sizeof(table), NULL, 24, NULL, MAJOR, MINOR, {destroy, message, code, works}};
const void *GetPjrtApi(void) {
  for (int i = 4; i < SLOTS; i++) table.slots[i] = fails;
  return &table;
}
"#;
    std::fs::write(&source, text).unwrap();
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .args([format!("-DSLOTS={slots}"), format!("-DMAJOR={major}"), format!("-DMINOR={minor}")])
        .arg(&source)
        .status()
        .unwrap();
    assert!(status.success());
    library
}

#[test]
fn unknown_versions_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    for (major, minor) in [(1, 0), (0, 80)] {
        let file = fake(folder.path(), major, minor, 10);
        // SAFETY: made just now.
        let error = unsafe { Plugin::load(&file) }.unwrap_err();
        assert!(matches!(error, PjrtError::Version { major: a, minor: b, .. } if (a, b) == (major, minor)), "{error}");
        assert!(error.to_string().contains(&format!("speaks version {major}.{minor}")), "{error}");
    }
}

#[test]
fn functions_beyond_an_old_plugins_table_are_missing_and_its_words_come_through() {
    let folder = tempfile::tempdir().unwrap();
    // SAFETY: made just now.
    let plugin = unsafe { Plugin::load(&fake(folder.path(), 0, 81, 20)) }.unwrap();
    assert_eq!(plugin.version(), (0, 81));
    // Slot 10 is in the table, slot 82 isn't.
    let Err(PjrtError::Call { function, message, .. }) = Client::create(&plugin, &[]) else { panic!() };
    assert_eq!((function, message.as_str()), ("PJRT_Client_Create", "this plugin does nothing"));
    let Err(error) = Topology::create(&plugin, "v5e:4x4", &[]) else { panic!() };
    assert!(
        matches!(error, PjrtError::Missing { minor: 81, function: "PJRT_TopologyDescription_Create", .. }),
        "{error}"
    );
    // A library that is none.
    let source = folder.path().join("empty.c");
    let library = folder.path().join("empty.so");
    std::fs::write(&source, "int nothing;").unwrap();
    assert!(Command::new("cc").args(["-shared", "-o"]).arg(&library).arg(&source).status().unwrap().success());
    // SAFETY: made just now.
    let error = unsafe { Plugin::load(&library) }.unwrap_err();
    assert!(error.to_string().contains("it exports no GetPjrtApi"), "{error}");
}

fn environment() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../.venv")
}

/// A file of the Python environment, or none where it isn't and needn't be.
fn package(file: &str) -> Option<PathBuf> {
    let mut prefixes = vec![environment()];
    prefixes.extend(std::env::var_os("VIRTUAL_ENV").map(PathBuf::from));
    let packages = |prefix: PathBuf| {
        let entries = prefix.join("lib").read_dir().into_iter().flatten().flatten();
        entries.map(|entry| entry.path().join("site-packages").join(file)).collect::<Vec<_>>()
    };
    let found = prefixes.into_iter().flat_map(packages).find(|path| path.is_file());
    if found.is_none() {
        assert!(
            std::env::var("PODRING_REQUIRE_PJRT").as_deref() != Ok("1"),
            "{file} is not in {}",
            environment().display()
        );
        eprintln!("NOT RUN: no {file}");
    }
    found
}

/// The oldest interface that is known: its table ends before today's, its structs are shorter.
#[test]
fn version_0_81_runs_collectives() {
    let Some(file) = package("xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so") else { return };
    // SAFETY: XLA's CPU plugin, pinned in requirements/ici.txt.
    let plugin = unsafe { Plugin::load(&file) }.unwrap();
    assert_eq!(plugin.version(), (0, 81));
    let client = Client::create(&plugin, &[("cpu_device_count", Value::Int(4))]).unwrap();
    let devices: Vec<i64> = client.devices().iter().map(|device| i64::from(device.id)).collect();
    let part = PartSpec {
        dtype: podring_collective::DType::F32,
        reduction: Some(podring_collective::Reduction::Sum),
        elements: 1024,
    };
    for (op, rows) in [(Op::AllReduce, 1), (Op::ReduceScatter, 4), (Op::AllGather, 1), (Op::AllToAll, 4)] {
        let scattered = op == Op::ReduceScatter;
        let spec =
            Spec { op, parts: vec![part], groups: Groups::all(4), backend: Backend::Cpu, exact: false, donate: false };
        let program = build(&spec).unwrap();
        let loaded = client.compile(&program.text, &CompileOptions::on(devices.iter().copied())).unwrap();
        let port = &program.inputs[0];
        assert_eq!(port.dims[0], rows);
        let dims: Vec<i64> = port.dims.iter().map(|&dim| dim as i64).collect();
        let buffers: Vec<_> = client
            .devices()
            .iter()
            .map(|device| {
                let data = 3.0f32.to_le_bytes().repeat(port.bytes() / 4);
                client.buffer(&data, port.element, &dims, device).unwrap()
            })
            .collect();
        let arguments: Vec<Vec<_>> = buffers.iter().map(|buffer| vec![buffer]).collect();
        let outputs = loaded.launch(&arguments, false).unwrap().wait().unwrap();
        let mut out = vec![0u8; program.outputs[0].bytes()];
        outputs[3][0].read(&mut out).unwrap();
        let expected = if scattered || spec.op == Op::AllReduce { 12.0f32 } else { 3.0 };
        assert_eq!(out[..4], expected.to_le_bytes(), "{:?}", spec.op);
    }
}

/// A permute with a channel handle was seen to end the process of XLA's CPU plugin: no program has one.
#[test]
fn what_may_end_the_process_is_never_emitted() {
    for (op, parts) in
        [(Op::Permute { pairs: vec![(0, 1)] }, true), (Op::Gather { root: 1 }, true), (Op::Barrier, false)]
    {
        let part = PartSpec { dtype: podring_collective::DType::U8, reduction: None, elements: 5 };
        let parts = if parts { vec![part] } else { vec![] };
        let groups = Groups::all(4);
        let spec = Spec { op, parts, groups, backend: Backend::Cpu, exact: false, donate: false };
        assert!(!build(&spec).unwrap().text.contains("channel_handle"));
    }
}

/// libtpu, which neither asks the cloud about this machine nor takes its TPUs.
fn libtpu() -> Option<std::sync::Arc<Plugin>> {
    let file = package("libtpu/libtpu.so")?;
    // SAFETY: before the test's first other thread.
    unsafe {
        std::env::set_var("TPU_SKIP_MDS_QUERY", "1");
        std::env::set_var("ALLOW_MULTIPLE_LIBTPU_LOAD", "1");
    }
    // SAFETY: libtpu, pinned in requirements/ici.txt.
    Some(unsafe { Plugin::load(&file) }.unwrap())
}

fn topology(plugin: &std::sync::Arc<Plugin>, slice: &Slice, hosts: Option<[i64; 3]>) -> Topology {
    let mut options = vec![("wrap", Value::Ints(slice.wrap().map(i64::from).to_vec()))];
    options.extend(hosts.map(|bounds| ("chips_per_host_bounds", Value::Ints(bounds.to_vec()))));
    if slice.slices() > 1 {
        options.push(("num_slices", Value::Int(slice.slices().into())));
    }
    let name = slice.to_string();
    Topology::create(plugin, name.split('*').next().unwrap(), &options).unwrap()
}

/// What libtpu's devices say of themselves is the slice that they are.
#[test]
fn libtpus_devices_give_their_slice() {
    let Some(plugin) = libtpu() else { return };
    let names = ["v4:2x2x4", "v5e:4x4", "v5e:2x2*2", "v5e:16x16", "v5p:4x4x4", "v6e:2x4", "tpu7x:2x2x2"];
    for name in names {
        let slice = podring_topology::parse(name).unwrap();
        assert_eq!(from_devices(&topology(&plugin, &slice, None).devices().unwrap()), Ok(slice), "{name}");
        let hosts = podring_topology::SliceOptions { chips_per_host_bounds: Some([1, 1, 1]), ..Default::default() };
        let slice = podring_topology::parse_with(name, &hosts).unwrap();
        assert_eq!(from_devices(&topology(&plugin, &slice, Some([1, 1, 1])).devices().unwrap()), Ok(slice), "{name}");
    }
}

/// libtpu ends its process on some parts of a slice: what is called sure it takes.
#[test]
fn parts_of_a_slice_that_are_called_sure_are_taken() {
    let Some(plugin) = libtpu() else { return };
    for (name, expected) in [("v5e:4x4", 82), ("v5p:2x2x2", 26)] {
        let slice = podring_topology::parse(name).unwrap();
        let topology = topology(&plugin, &slice, Some([1, 1, 1]));
        let [x, y, z] = slice.dims();
        let ends = |length: u32| (0..length).flat_map(move |start| (start + 1..=length).map(move |end| start..end));
        let mut taken = 0;
        for (xs, ys, zs) in ends(x).flat_map(|xs| {
            ends(y).flat_map(move |ys| {
                let xs = xs.clone();
                ends(z).map(move |zs| (xs.clone(), ys.clone(), zs))
            })
        }) {
            let all = zs.flat_map(|z| ys.clone().flat_map(move |y| (0..4).map(move |x| [x, y, z])));
            let ranks: Vec<u32> =
                all.filter(|[x, ..]| xs.contains(x)).map(|place| slice.rank_at(0, place, 0).unwrap()).collect();
            let How::Members { launch, .. } = plan_alone(&slice, &ranks).unwrap().how else { continue };
            let (groups, backend) = (launch.groups.clone(), Backend::Tpu);
            let spec = Spec { op: Op::Barrier, parts: vec![], groups, backend, exact: false, donate: false };
            let options = CompileOptions::on(launch.device_ids(&slice));
            let compiled = topology.compile(&build(&spec).unwrap().text, &options);
            assert!(compiled.is_ok(), "{name} {ranks:?}: {}", compiled.err().unwrap());
            taken += 1;
        }
        assert_eq!(taken, expected, "{name}");
    }
}
