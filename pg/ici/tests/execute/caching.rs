//! The cache over a real client.

use std::fs;

use podring_collective::{DType, Reduction};
use podring_ici::{
    cache::{Cache, Counts, Disk},
    pjrt::{Buffer, Loaded},
    program::{Groups, Op, PartSpec, Program},
};

use crate::machine::{DEVICES, Machine, machine, program, single};

fn sum(elements: usize) -> Program {
    let part = PartSpec { dtype: DType::I32, reduction: Some(Reduction::Sum), elements };
    program(&single(Op::AllReduce, part, &Groups::all(DEVICES as u32)))
}

/// Runs the sum of the devices' numbers.
fn run(machine: &Machine, loaded: &Loaded, program: &Program) {
    let port = &program.inputs[0];
    let dims: Vec<i64> = port.dims.iter().map(|&dim| dim as i64).collect();
    let buffers: Vec<Buffer> = (0..DEVICES)
        .map(|device| {
            let bytes = (device as i32).to_le_bytes().repeat(port.bytes() / 4);
            machine.client.buffer(&bytes, port.element, &dims, &machine.client.devices()[device]).unwrap()
        })
        .collect();
    let arguments: Vec<Vec<&Buffer>> = buffers.iter().map(|buffer| vec![buffer]).collect();
    for out in loaded.launch(&arguments, false).unwrap().wait().unwrap() {
        let mut bytes = vec![0; port.bytes()];
        out[0].read(&mut bytes).unwrap();
        assert_eq!(bytes, 28i32.to_le_bytes().repeat(port.bytes() / 4));
    }
}

#[test]
fn a_program_is_compiled_once_in_a_process_and_once_for_all_processes() {
    let Some(machine) = machine() else { return };
    let devices: Vec<i64> = machine.client.devices().iter().map(|device| i64::from(device.id)).collect();
    let directory = tempfile::tempdir().unwrap();
    let disk = || Some(Disk::open(directory.path(), 1 << 30).unwrap());
    let (small, large) = (sum(1), sum(5000));
    let first = Cache::new(machine.client.clone(), disk()).unwrap();
    let mut seen = Vec::new();
    let programs = [(&small, &devices[..]), (&large, &devices[..])];
    first.warm(programs.into_iter(), |done, total| seen.push((done, total))).unwrap();
    assert_eq!(seen, [(0, 2), (1, 2), (2, 2)]);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| first.get(&sum(1), &devices).unwrap());
        }
    });
    assert_eq!(first.counts(), Counts { compiled: 2, loaded: 0, received: 0, hits: 8, damaged: 0 });
    // Elements of one size class are one program.
    first.get(&sum(4999), &devices).unwrap();
    assert_eq!(first.counts().compiled, 2);
    // As another process would: a new cache over the same directory.
    let second = Cache::new(machine.client.clone(), disk()).unwrap();
    run(machine, &second.get(&small, &devices).unwrap(), &small);
    run(machine, &second.get(&large, &devices).unwrap(), &large);
    assert_eq!(second.counts(), Counts { compiled: 0, loaded: 2, received: 0, hits: 0, damaged: 0 });
    // Damaged files are compiled again and replaced.
    for entry in fs::read_dir(directory.path()).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x40;
        fs::write(path, bytes).unwrap();
    }
    let third = Cache::new(machine.client.clone(), disk()).unwrap();
    run(machine, &third.get(&small, &devices).unwrap(), &small);
    assert_eq!(third.counts(), Counts { compiled: 1, loaded: 0, received: 0, hits: 0, damaged: 1 });
    let fourth = Cache::new(machine.client.clone(), disk()).unwrap();
    run(machine, &fourth.get(&small, &devices).unwrap(), &small);
    assert_eq!(fourth.counts(), Counts { compiled: 0, loaded: 1, received: 0, hits: 0, damaged: 0 });
}
