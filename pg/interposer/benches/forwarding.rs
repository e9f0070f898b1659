//! What podring's table adds to a call on a virtual slice: the plugin's own functions beside those of the table over
//! them, by turns.
//!
//!     PODRING_PJRT_PLUGIN=…/pjrt_c_api_cpu_plugin.so cargo bench -p podring-interposer
//!
//! Prints nanoseconds per call, medians; ends with exit code 1 if the table adds more than 100 ns to one.
#![allow(missing_docs, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

use std::ffi::c_void;
use std::path::PathBuf;
use std::time::Instant;

use podring_ici::pjrt::{Want, find};
use podring_interposer::{Settings, api, configure};

type Entry = unsafe extern "C" fn(*mut usize) -> *mut usize;
/// Words of the table's head.
const HEAD: usize = 5;
const PLUGIN_INITIALIZE: usize = 3;
const EVENT_DESTROY: usize = 5;
const EVENT_AWAIT: usize = 8;
const CLIENT_CREATE: usize = 10;
const PLATFORM_NAME: usize = 12;
const PROCESS_INDEX: usize = 13;
const ADDRESSABLE_DEVICES: usize = 16;
const COMPILE: usize = 20;
const EXECUTE: usize = 55;
const BUFFER_DESTROY: usize = 58;
const CREATE_VIEW: usize = 93;
const BATCHES: usize = 400;
const CALLS: usize = 200;
const BOUND: f64 = 100.0;

/// A function of a table, called with a struct of words: its size, no extension, then `fields`. The struct, back.
unsafe fn call(table: *const c_void, slot: usize, fields: &[usize]) -> Vec<usize> {
    let mut words = vec![(fields.len() + 2) * size_of::<usize>(), 0];
    words.extend_from_slice(fields);
    let error = unsafe { entry(table, slot)(words.as_mut_ptr()) };
    assert!(error.is_null(), "the function in slot {slot} refuses");
    words
}

unsafe fn entry(table: *const c_void, slot: usize) -> Entry {
    unsafe { table.cast::<Entry>().add(HEAD + slot).read() }
}

/// Nanoseconds per call: medians over batches, the two by turns.
fn beside(mut theirs: impl FnMut(), mut ours: impl FnMut()) -> (f64, f64) {
    let mut times = [Vec::new(), Vec::new()];
    let mut time = |which: usize, act: &mut dyn FnMut()| {
        let begin = Instant::now();
        (0..CALLS).for_each(|_| act());
        times[which].push(begin.elapsed().as_secs_f64() * 1e9 / CALLS as f64);
    };
    for _ in 0..BATCHES {
        time(0, &mut theirs);
        time(1, &mut ours);
    }
    let median = |list: &mut Vec<f64>| {
        list.sort_by(f64::total_cmp);
        list[list.len() / 2]
    };
    let [mut one, mut other] = times;
    (median(&mut one), median(&mut other))
}

const ADD: &str = "module @add { func.func public @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.add %x, %x : tensor<8xf32> return %0 : tensor<8xf32> } }";

#[repr(align(64))]
struct Numbers([f32; 8]);

unsafe extern "C" fn kept(_: *mut c_void, _: *mut c_void) {}

fn main() {
    let environment = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../.venv");
    let file = find(Want::Cpu, &[environment]).unwrap();
    let library = unsafe { libloading::Library::new(&file) }.unwrap();
    let get: libloading::Symbol<unsafe extern "C" fn() -> *const c_void> =
        unsafe { library.get(b"GetPjrtApi") }.unwrap();
    let theirs = unsafe { get() };
    assert!(configure(Settings::virtual_slice("v5e:1x1", Some(&file)).unwrap()));
    let ours = api();
    assert!(!ours.is_null());
    let mut too_much = false;
    let mut show = |what: &str, (one, other): (f64, f64)| {
        println!("{what:34} plugin {one:9.1} ns  through podring {other:9.1} ns  more {:7.1} ns", other - one);
        too_much |= other - one > BOUND;
    };
    unsafe {
        call(theirs, PLUGIN_INITIALIZE, &[]);
        let client = call(ours, CLIENT_CREATE, &[0; 9])[8];
        let plain = |table: *const c_void, slot: usize| {
            let function = entry(table, slot);
            move || {
                let mut words = [40usize, 0, client, 0, 0];
                assert!(function(words.as_mut_ptr()).is_null());
            }
        };
        show("Client_PlatformName (forwarded)", beside(plain(theirs, PLATFORM_NAME), plain(ours, PLATFORM_NAME)));
        show("Client_ProcessIndex (answered)", beside(plain(theirs, PROCESS_INDEX), plain(ours, PROCESS_INDEX)));

        let devices = call(ours, ADDRESSABLE_DEVICES, &[client, 0, 0]);
        let device = (devices[3] as *const usize).read();
        let format = "mlir";
        let program = [48, 0, ADD.as_ptr() as usize, ADD.len(), format.as_ptr() as usize, format.len()];
        // xla.CompileOptionsProto{executable_build_options{num_replicas 1, num_partitions 1}}
        let options = [0x1au8, 4, 0x20, 1, 0x28, 1];
        let compile = [client, program.as_ptr() as usize, options.as_ptr() as usize, options.len(), 0];
        let executable = call(ours, COMPILE, &compile)[6];
        let mut numbers = Numbers([1.0; 8]);
        let dims = [8i64];
        const F32: usize = 11;
        let view = [
            client,
            numbers.0.as_mut_ptr() as usize,
            dims.as_ptr() as usize,
            1,
            F32,
            0,
            device,
            kept as *const () as usize,
            0,
            0,
            0,
            0,
        ];
        let buffer = call(ours, CREATE_VIEW, &view)[12];
        let run = |table: *const c_void| {
            let function = entry(table, EXECUTE);
            let (wait, destroy, end) =
                (entry(theirs, EVENT_AWAIT), entry(theirs, BUFFER_DESTROY), entry(theirs, EVENT_DESTROY));
            move || {
                let (arguments, mut results, mut event) = ([buffer], [0usize], 0usize);
                let (lists, outputs) = ([arguments.as_ptr() as usize], [results.as_mut_ptr() as usize]);
                let mut options = [0usize; 16];
                options[0] = size_of_val(&options);
                let mut words = [
                    80,
                    0,
                    executable,
                    options.as_mut_ptr() as usize,
                    lists.as_ptr() as usize,
                    1,
                    1,
                    outputs.as_ptr() as usize,
                    (&raw mut event) as usize,
                    0,
                ];
                assert!(function(words.as_mut_ptr()).is_null());
                assert!(wait([24, 0, event].as_mut_ptr()).is_null());
                assert!(end([24, 0, event].as_mut_ptr()).is_null());
                assert!(destroy([24, 0, results[0]].as_mut_ptr()).is_null());
            }
        };
        show("Execute, an addition of 8 numbers", beside(run(theirs), run(ours)));
    }
    std::process::exit(i32::from(too_much));
}
