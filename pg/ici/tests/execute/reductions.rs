//! Reductions of every type that has them.

use half::{bf16, f16};
use podring_collective::{DType, Reduction};
use podring_ici::program::{
    Groups, Op, PartSpec, Role,
    layout::{LANES, class_rows},
    route::{Backend, How, reduce as route},
};

use crate::{
    machine::{DEVICES, Random, group_kinds, machine, place, program, single},
    reference::{Number, close, read, reduce, smallest, unit},
};

const REDUCTIONS: [Reduction; 9] = [
    Reduction::Sum,
    Reduction::Avg,
    Reduction::Product,
    Reduction::Min,
    Reduction::Max,
    Reduction::BitAnd,
    Reduction::BitOr,
    Reduction::BitXor,
    Reduction::PreMulSum(0.75),
];

/// Values that stay finite through a product of 8.
fn values(dtype: DType, count: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count * dtype.size());
    let small = |random: &mut Random| (random.below(4001) as f64 - 2000.0) / 1000.0;
    for _ in 0..count {
        match dtype {
            DType::Bool => bytes.push((random.next() & 1) as u8),
            DType::F16 => bytes.extend(f16::from_f64(small(random)).to_le_bytes()),
            DType::BF16 => bytes.extend(bf16::from_f64(small(random)).to_le_bytes()),
            DType::F32 => bytes.extend((small(random) as f32).to_le_bytes()),
            DType::F64 => bytes.extend(small(random).to_le_bytes()),
            DType::C64 => {
                bytes.extend((small(random) as f32).to_le_bytes());
                bytes.extend((small(random) as f32).to_le_bytes());
            }
            DType::C128 => {
                bytes.extend(small(random).to_le_bytes());
                bytes.extend(small(random).to_le_bytes());
            }
            // Exponents around one.
            DType::F8E4M3FN => bytes.push((random.next() as u8 & 0x87) | ((6 + random.below(2) as u8) << 3)),
            DType::F8E5M2 => bytes.push((random.next() as u8 & 0x83) | ((14 + random.below(2) as u8) << 2)),
            _ => bytes.extend(random.bytes(dtype.size())),
        }
    }
    bytes
}

fn factor(dtype: DType, value: f64) -> Vec<u8> {
    match dtype {
        DType::F64 => value.to_le_bytes().to_vec(),
        DType::C128 => [value.to_le_bytes(), 0f64.to_le_bytes()].concat(),
        DType::C64 => [(value as f32).to_le_bytes(), 0f32.to_le_bytes()].concat(),
        _ => (value as f32).to_le_bytes().to_vec(),
    }
}

/// Checks one element: integers exactly, floats within `roundings` of the wire type (and the sum's f32 error).
fn check(dtype: DType, got: Number, expected: Number, magnitude: f64, roundings: f64, what: &str) {
    let relative = unit(dtype) * roundings + 2f64.powi(-20) * f64::from(u8::from(dtype.size() < 8));
    let slack = magnitude * relative + smallest(dtype) * roundings;
    match (got, expected) {
        (Number::Int(got), Number::Int(expected)) => assert_eq!(got, expected, "{what}"),
        (Number::Float(got), Number::Float(expected)) => {
            assert!(close(got, expected, slack), "{what}: {got} is not {expected} ± {slack}");
        }
        (Number::Complex(a, b), Number::Complex(c, d)) => {
            let slack = slack.max(magnitude * 2f64.powi(-18));
            let slack = if dtype == DType::C128 { magnitude * 2f64.powi(-48) } else { slack };
            assert!(close(a, c, slack) && close(b, d, slack), "{what}: {a}+{b}i is not {c}+{d}i");
        }
        (got, expected) => panic!("{what}: {got:?} is not {expected:?}"),
    }
}

/// A bound on everything that is added or multiplied on the way.
fn magnitude(reduction: Reduction, values: &[Number]) -> f64 {
    let sizes = values.iter().map(|value| match value {
        Number::Int(_) => 0.0,
        Number::Float(float) => float.abs(),
        Number::Complex(a, b) => a.hypot(*b),
    });
    match reduction {
        Reduction::Product => sizes.product::<f64>(),
        _ => sizes.sum::<f64>(),
    }
}

fn run(dtype: DType, reduction: Reduction, elements: usize, groups: &Groups, scatter: bool, exact: bool, seed: u64) {
    let Some(machine) = machine() else { return };
    let mut random = Random(seed);
    let members = groups.size();
    let op = if scatter { Op::ReduceScatter } else { Op::AllReduce };
    let mut spec = single(op, PartSpec { dtype, reduction: Some(reduction), elements }, groups);
    spec.exact = exact;
    // As the engine asks for it; here nothing is given away.
    spec.donate = !scatter;
    let program = program(&spec);
    let width = dtype.size();
    // A scatter's blocks lie in slots; an all-reduce's buffer is one.
    let slot = if scatter { class_rows(elements, width) * LANES } else { elements };
    let blocks = if scatter { members } else { 1 };
    let data: Vec<Vec<u8>> = (0..DEVICES).map(|_| values(dtype, slot * blocks, &mut random)).collect();
    let scale = if let Reduction::PreMulSum(scale) = reduction { scale } else { 1.0 };
    let out = machine.run(&program, |device, role| match role {
        Role::Factor(_) => factor(dtype, scale),
        _ => data[device].clone(),
    });
    let way = route(dtype, reduction, Backend::Cpu, exact).unwrap();
    // One rounding if computed wide; one a step if not, and integers none.
    let roundings = if way.how == How::Exchange { 1.01 } else { members as f64 + 1.0 };
    for (device, out) in out.iter().enumerate() {
        let (group, me) = place(groups, device);
        let start = if scatter { me * slot } else { 0 };
        for element in 0..elements {
            let at = (start + element) * width;
            let inputs: Vec<Number> =
                group.iter().map(|&member| read(dtype, &data[member as usize][at..at + width])).collect();
            let got = read(dtype, &out[0][element * width..][..width]);
            let what = format!("{reduction} of {dtype}, {members} ranks, element {element} of {elements}");
            let expected = reduce(dtype, reduction, &inputs);
            check(dtype, got, expected, magnitude(reduction, &inputs), roundings, &what);
        }
    }
    // The same bits on every rank.
    if !scatter {
        for group in &groups.groups {
            let bytes = elements * width;
            let first = &out[group[0] as usize][0][..bytes];
            assert!(group.iter().all(|&member| &out[member as usize][0][..bytes] == first), "bits differ");
        }
    }
}

fn every(scatter: bool) {
    for (index, groups) in group_kinds().iter().enumerate() {
        // Every type and reduction on one group; on others what XLA might do differently by group.
        for &dtype in DType::ALL {
            for reduction in REDUCTIONS {
                let kinds: &[Reduction] = match index {
                    0 => &REDUCTIONS,
                    2 => &[Reduction::Sum, Reduction::Max, Reduction::BitXor],
                    _ => &[Reduction::Sum],
                };
                if !reduction.supports(dtype) || !kinds.contains(&reduction) {
                    continue;
                }
                run(dtype, reduction, 131, groups, scatter, false, 1 + index as u64);
            }
        }
    }
}

#[test]
fn all_reduce_of_every_type() {
    every(false);
}

#[test]
fn reduce_scatter_of_every_type() {
    every(true);
}

/// 8 devices as 2 rows of 4, and as a cube: along one axis after the other, with members in any order.
#[test]
fn reduce_scatter_in_steps() {
    let lines = |apart: &[u32]| -> Vec<Vec<u32>> {
        let first = |&device: &u32| apart.iter().all(|bit| device & bit == 0);
        let line = |start: u32| {
            (0..1u32 << apart.len()).map(move |n| {
                start
                    + apart
                        .iter()
                        .enumerate()
                        .map(|(place, bit)| if n >> place & 1 == 1 { *bit } else { 0 })
                        .sum::<u32>()
            })
        };
        (0..8).filter(first).map(|start| line(start).collect()).collect()
    };
    let orders: [&[&[u32]]; 4] = [&[&[4], &[1, 2]], &[&[1, 2], &[4]], &[&[4], &[2], &[1]], &[&[1], &[4], &[2]]];
    for (index, order) in orders.iter().enumerate() {
        for members in [[0, 1, 2, 3, 4, 5, 6, 7], [5, 2, 7, 0, 1, 6, 3, 4]] {
            let steps: Vec<Vec<Vec<u32>>> = order.iter().map(|apart| lines(apart)).collect();
            let groups = Groups::new(vec![members.to_vec()]).unwrap().in_steps(steps, u64::MAX).unwrap();
            let part = PartSpec { dtype: DType::F32, reduction: Some(Reduction::Sum), elements: 131 };
            let text = program(&single(Op::ReduceScatter, part, &groups)).text;
            assert_eq!(text.matches("stablehlo.reduce_scatter").count(), order.len());
            let in_order = index % 2 == 0 && members[0] == 0;
            assert_eq!(text.contains("collective_permute"), !in_order);
            let seed = 7 + index as u64;
            for (dtype, reductions) in [
                (DType::F32, &[Reduction::Sum, Reduction::Product, Reduction::Avg][..]),
                (DType::I32, &[Reduction::Sum, Reduction::Max]),
                (DType::BF16, &[Reduction::Sum]),
                (DType::U8, &[Reduction::Sum]),
                (DType::I64, &[Reduction::Sum]),
            ] {
                for &reduction in reductions {
                    run(dtype, reduction, 131, &groups, true, false, seed);
                }
            }
            run(DType::F32, Reduction::Sum, 5000, &groups, true, false, seed);
        }
    }
}

#[test]
fn exact_sums_round_once() {
    for groups in [&group_kinds()[0], &group_kinds()[2]] {
        for dtype in [DType::F16, DType::BF16, DType::F8E4M3FN, DType::F8E5M2] {
            for scatter in [false, true] {
                run(dtype, Reduction::Sum, 200, groups, scatter, true, 5);
                run(dtype, Reduction::Avg, 200, groups, scatter, true, 6);
            }
        }
    }
}

#[test]
fn sizes_and_random_data() {
    let groups = group_kinds();
    let mut seed = 100;
    for elements in [0, 1, 127, 128, 1024, 1025, 9001] {
        for dtype in [DType::F32, DType::I64, DType::U8] {
            for groups in &groups[..3] {
                // The programs are compiled by the first; the others only run.
                for _ in 0..8 {
                    seed += 1;
                    run(dtype, Reduction::Sum, elements, groups, false, false, seed);
                    if dtype == DType::U8 {
                        run(dtype, Reduction::BitXor, elements, groups, false, false, seed);
                    }
                }
            }
        }
    }
}

#[test]
fn nan_anywhere_gives_nan() {
    let Some(machine) = machine() else { return };
    for (dtype, nan) in [
        (DType::F32, f32::NAN.to_le_bytes().to_vec()),
        (DType::F64, f64::NAN.to_le_bytes().to_vec()),
        (DType::BF16, bf16::NAN.to_le_bytes().to_vec()),
        (DType::F16, f16::NAN.to_le_bytes().to_vec()),
        (DType::F8E4M3FN, vec![0x7f]),
        (DType::F8E5M2, vec![0x7e]),
    ] {
        for reduction in [Reduction::Min, Reduction::Max, Reduction::Sum] {
            for at in 0..DEVICES {
                let groups = Groups::all(DEVICES as u32);
                let part = PartSpec { dtype, reduction: Some(reduction), elements: 1 };
                let program = program(&single(Op::AllReduce, part, &groups));
                let out = machine.run(&program, |device, _| {
                    if device == at { nan.clone() } else { values(dtype, 1, &mut Random(device as u64)) }
                });
                for out in &out {
                    let Number::Float(got) = read(dtype, &out[0]) else { panic!() };
                    assert!(got.is_nan(), "{reduction} of {dtype} with NaN at {at} gave {got}");
                }
            }
        }
    }
}

#[test]
fn coalesced_parts_are_one_program() {
    let Some(machine) = machine() else { return };
    let groups = &group_kinds()[2];
    let mut spec =
        single(Op::AllReduce, PartSpec { dtype: DType::I32, reduction: Some(Reduction::Sum), elements: 5 }, groups);
    spec.parts.push(PartSpec { dtype: DType::I64, reduction: Some(Reduction::Max), elements: 3 });
    spec.parts.push(PartSpec { dtype: DType::U8, reduction: Some(Reduction::BitOr), elements: 2 });
    let out = machine.run(&program(&spec), |device, role| match role {
        Role::Data(0) => (device as i32).to_le_bytes().repeat(5),
        Role::Data(1) => (device as i64 - 4).to_le_bytes().repeat(3),
        _ => vec![1 << device; 2],
    });
    for (device, out) in out.iter().enumerate() {
        let group = place(groups, device).0;
        assert_eq!(out[0][..20], group.iter().sum::<u32>().to_le_bytes().repeat(5));
        assert_eq!(out[1][..24], (i64::from(*group.iter().max().unwrap()) - 4).to_le_bytes().repeat(3));
        assert_eq!(out[2][..2], [group.iter().map(|member| 1u8 << member).sum::<u8>(); 2]);
    }
}

#[test]
fn donated_inputs_are_given_away_and_others_kept() {
    let Some(machine) = machine() else { return };
    let groups = Groups::all(DEVICES as u32);
    let part = PartSpec { dtype: DType::F32, reduction: Some(Reduction::Sum), elements: 2048 };
    let mut spec = single(Op::AllReduce, part, &groups);
    spec.donate = true;
    let program = program(&spec);
    let loaded = machine.compile(&program);
    for donate in [true, false] {
        let port = &program.inputs[0];
        let dims: Vec<i64> = port.dims.iter().map(|&dim| dim as i64).collect();
        let buffers: Vec<_> = machine
            .client
            .devices()
            .iter()
            .map(|device| machine.client.buffer(&vec![0; port.bytes()], port.element, &dims, device).unwrap())
            .collect();
        let arguments: Vec<Vec<_>> = buffers.iter().map(|buffer| vec![buffer]).collect();
        loaded.launch(&arguments, donate).unwrap().wait().unwrap();
        assert!(buffers.iter().all(|buffer| buffer.is_deleted().unwrap() == donate), "donate {donate}");
    }
}
