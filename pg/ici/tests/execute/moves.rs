//! Operations that only move data: every bit arrives, whatever it means.

use podring_collective::DType;
use podring_ici::{
    pjrt::Code,
    program::{
        Groups, Op, PartSpec, Role,
        layout::{TILE, class_rows, gather_up, lay_out},
    },
};

use crate::machine::{DEVICES, Machine, Random, group_kinds, machine, place, program, single};

/// Elements of a block: none, one, odd, a row, more than a class.
const SIZES: &[usize] = &[0, 1, 37, 128, 4099];
const DTYPES: &[DType] = &[DType::U8, DType::BF16, DType::F32, DType::C64, DType::C128, DType::F8E8M0FNU];

fn part(dtype: DType, elements: usize) -> PartSpec {
    PartSpec { dtype, reduction: None, elements }
}

/// Bytes of a slot of a moved block.
fn slot(bytes: usize) -> usize {
    class_rows(bytes.div_ceil(4), 4) * 512
}

fn each(mut check: impl FnMut(&Machine, &Groups, DType, usize, &mut Random)) {
    let Some(machine) = machine() else { return };
    let mut random = Random(7);
    for groups in group_kinds() {
        for &elements in SIZES {
            for &dtype in DTYPES {
                check(machine, &groups, dtype, elements, &mut random);
            }
        }
    }
}

#[test]
fn broadcast() {
    each(|machine, groups, dtype, elements, random| {
        let program = program(&single(Op::Broadcast, part(dtype, elements), groups));
        let root = random.below(groups.size());
        let data: Vec<Vec<u8>> = (0..DEVICES).map(|_| random.bytes(elements * dtype.size())).collect();
        let out = machine.run(&program, |device, role| match role {
            Role::Root => (root as u32).to_le_bytes().to_vec(),
            _ => data[device].clone(),
        });
        for (device, out) in out.iter().enumerate() {
            let (group, _) = place(groups, device);
            let expected = &data[group[root] as usize];
            assert_eq!(&out[0][..expected.len()], expected, "{dtype} {elements} device {device}");
        }
    });
}

#[test]
fn all_gather() {
    each(|machine, groups, dtype, elements, random| {
        let program = program(&single(Op::AllGather, part(dtype, elements), groups));
        // Shares differ; the largest is the program's.
        let bytes: Vec<usize> =
            (0..DEVICES).map(|device| if device == 0 { elements } else { random.below(elements + 1) }).collect();
        let data: Vec<Vec<u8>> = bytes.iter().map(|count| random.bytes(count * dtype.size())).collect();
        let out = machine.run(&program, |device, _| data[device].clone());
        let slot = slot(elements * dtype.size());
        for (device, out) in out.iter().enumerate() {
            for (position, &member) in place(groups, device).0.iter().enumerate() {
                let expected = &data[member as usize];
                assert_eq!(&out[0][position * slot..][..expected.len()], expected, "{dtype} {elements}");
            }
        }
    });
}

#[test]
fn all_to_all_in_slots() {
    each(|machine, groups, dtype, elements, random| {
        let program = program(&single(Op::AllToAll, part(dtype, elements), groups));
        let members = groups.size();
        let slot = slot(elements * dtype.size());
        // counts[i][j]: elements from position i to position j, the same in every group.
        let counts: Vec<Vec<usize>> =
            (0..members).map(|_| (0..members).map(|_| random.below(elements + 1)).collect()).collect();
        let flat: Vec<Vec<u8>> = (0..DEVICES)
            .map(|device| {
                let total: usize = counts[place(groups, device).1].iter().sum();
                random.bytes(total * dtype.size())
            })
            .collect();
        let out = machine.run(&program, |device, _| {
            let mut laid = vec![0x5a; members * slot];
            lay_out(&flat[device], &counts[place(groups, device).1], dtype.size(), slot / dtype.size(), &mut laid);
            laid
        });
        for (device, out) in out.iter().enumerate() {
            let (group, me) = place(groups, device);
            let received: Vec<usize> = (0..members).map(|from| counts[from][me]).collect();
            let mut got = vec![0; received.iter().sum::<usize>() * dtype.size()];
            gather_up(&out[0], &received, dtype.size(), slot / dtype.size(), &mut got);
            let mut expected = Vec::new();
            for (from, &member) in group.iter().enumerate() {
                let start = counts[from][..me].iter().sum::<usize>() * dtype.size();
                expected.extend_from_slice(&flat[member as usize][start..][..counts[from][me] * dtype.size()]);
            }
            assert_eq!(got, expected, "{dtype} {elements} device {device}");
        }
    });
}

#[test]
fn all_to_all_with_starts_as_operands_compiles_once() {
    let Some(machine) = machine() else { return };
    let mut random = Random(11);
    for groups in group_kinds() {
        let members = groups.size();
        for dtype in [DType::U8, DType::F16, DType::F32, DType::C128] {
            // More than a tile of the widest type.
            let block = 300;
            let most = (block * dtype.size()).div_ceil(TILE);
            let program = program(&single(Op::AllToAllUneven { tiles: most * members }, part(dtype, block), &groups));
            let tiles = |count: &usize| (count * dtype.size()).div_ceil(TILE);
            // Blocks of these many elements, each from a tile's beginning.
            let lay = |bytes: &[u8], counts: &[usize]| {
                let (mut laid, mut at) = (Vec::new(), 0);
                for count in counts {
                    laid.extend_from_slice(&bytes[at..at + count * dtype.size()]);
                    laid.resize(laid.len().next_multiple_of(TILE), 0x5a);
                    at += count * dtype.size();
                }
                laid
            };
            for _ in 0..20 {
                let counts: Vec<Vec<usize>> =
                    (0..members).map(|_| (0..members).map(|_| random.below(block + 1)).collect()).collect();
                let starts = |list: Vec<usize>| -> Vec<u8> {
                    let mut at = 0i32;
                    list.iter()
                        .flat_map(|count| {
                            let here = at;
                            at += tiles(count) as i32;
                            here.to_le_bytes()
                        })
                        .collect()
                };
                let received = |me: usize| -> Vec<usize> { (0..members).map(|from| counts[from][me]).collect() };
                let flat: Vec<Vec<u8>> = (0..DEVICES)
                    .map(|device| random.bytes(counts[place(&groups, device).1].iter().sum::<usize>() * dtype.size()))
                    .collect();
                let out = machine.run(&program, |device, role| {
                    let me = place(&groups, device).1;
                    match role {
                        Role::InputStarts(_) => starts(counts[me].clone()),
                        Role::OutputStarts(_) => starts(received(me)),
                        _ => lay(&flat[device], &counts[me]),
                    }
                });
                for (device, out) in out.iter().enumerate() {
                    let (group, me) = place(&groups, device);
                    let (mut at, mut got, mut expected) = (0, Vec::new(), Vec::new());
                    for (from, &member) in group.iter().enumerate() {
                        let bytes = counts[from][me] * dtype.size();
                        let start = counts[from][..me].iter().sum::<usize>() * dtype.size();
                        expected.extend_from_slice(&flat[member as usize][start..][..bytes]);
                        got.extend_from_slice(&out[0][at..at + bytes]);
                        at += bytes.next_multiple_of(TILE);
                    }
                    assert_eq!(got, expected, "{dtype} device {device}");
                }
            }
        }
    }
}

#[test]
fn gather_and_scatter_from_every_root() {
    let Some(machine) = machine() else { return };
    let mut random = Random(13);
    for groups in group_kinds() {
        let members = groups.size();
        for root in 0..members {
            for bytes in [1usize, 600] {
                let slot = slot(bytes);
                let data: Vec<Vec<u8>> = (0..DEVICES).map(|_| random.bytes(bytes)).collect();
                let op = Op::Gather { root: root as u32 };
                let out = machine
                    .run(&program(&single(op, part(DType::U8, bytes), &groups)), |device, _| data[device].clone());
                for group in &groups.groups {
                    let at_root = &out[group[root] as usize][0];
                    for (position, &member) in group.iter().enumerate() {
                        assert_eq!(&at_root[position * slot..][..bytes], data[member as usize], "root {root}");
                    }
                }
                let blocks: Vec<Vec<u8>> = (0..DEVICES).map(|_| random.bytes(members * slot)).collect();
                let op = Op::Scatter { root: root as u32 };
                let out = machine
                    .run(&program(&single(op, part(DType::U8, bytes), &groups)), |device, _| blocks[device].clone());
                for (device, out) in out.iter().enumerate() {
                    let (group, me) = place(&groups, device);
                    let expected = &blocks[group[root] as usize][me * slot..][..bytes];
                    assert_eq!(&out[0][..bytes], expected, "root {root} device {device}");
                }
            }
        }
    }
}

/// Blocks of as many bytes go one by one, in a loop.
#[test]
fn large_blocks_are_gathered_and_scattered_from_every_root() {
    let Some(machine) = machine() else { return };
    let mut random = Random(17);
    for groups in group_kinds() {
        let members = groups.size();
        let bytes = 300_000;
        let slot = slot(bytes);
        // The middle of a block may be anything: its ends tell blocks apart.
        let mut block = |bytes: usize| {
            let mut block = vec![random.next() as u8; bytes];
            block[..8].copy_from_slice(&random.next().to_le_bytes());
            block[bytes - 8..].copy_from_slice(&random.next().to_le_bytes());
            block
        };
        for root in if members == 8 { vec![0, 3] } else { (0..members).collect() } {
            let data: Vec<Vec<u8>> = (0..DEVICES).map(|_| block(bytes)).collect();
            let op = Op::Gather { root: root as u32 };
            let text = program(&single(op, part(DType::U8, bytes), &groups));
            assert_eq!(text.text.contains("stablehlo.while"), members > 2, "{}", text.text);
            let out = machine.run(&text, |device, _| data[device].clone());
            for group in &groups.groups {
                let at_root = &out[group[root] as usize][0];
                for (position, &member) in group.iter().enumerate() {
                    assert!(at_root[position * slot..][..bytes] == data[member as usize], "root {root}");
                }
            }
            let blocks: Vec<Vec<Vec<u8>>> = (0..DEVICES).map(|_| (0..members).map(|_| block(slot)).collect()).collect();
            let op = Op::Scatter { root: root as u32 };
            let out = machine
                .run(&program(&single(op, part(DType::U8, bytes), &groups)), |device, _| blocks[device].concat());
            for (device, out) in out.iter().enumerate() {
                let (group, me) = place(&groups, device);
                let expected = &blocks[group[root] as usize][me][..bytes];
                assert!(&out[0][..bytes] == expected, "root {root} device {device}");
            }
        }
    }
}

#[test]
fn permutes_and_barriers() {
    let Some(machine) = machine() else { return };
    for groups in group_kinds() {
        let members = groups.size() as u32;
        let barrier = program(&single(Op::Barrier, part(DType::U8, 0), &groups));
        let out = machine.run(&barrier, |_, _| 1u32.to_le_bytes().to_vec());
        assert!(out.iter().all(|out| out[0] == members.to_le_bytes()));
        // A shift that leaves the last receiver of a pair list out: position 0 sends to 1, 2 to 3, and so on.
        let pairs: Vec<(u32, u32)> = (0..members / 2).map(|pair| (2 * pair, 2 * pair + 1)).collect();
        if pairs.is_empty() {
            continue;
        }
        let permute = program(&single(Op::Permute { pairs }, part(DType::I64, 9), &groups));
        let out = machine.run(&permute, |device, _| vec![device as u8 + 1; 72]);
        for (device, out) in out.iter().enumerate() {
            let (group, me) = place(&groups, device);
            let expected = if me % 2 == 1 { group[me - 1] as u8 + 1 } else { 0 };
            assert_eq!(&out[0][..72], &[expected; 72], "device {device}");
        }
    }
}

#[test]
fn a_refused_program_is_an_error_in_the_plugins_words_and_the_client_lives() {
    let Some(machine) = machine() else { return };
    let options = podring_ici::pjrt::CompileOptions::on(0..DEVICES as i64);
    for text in ["", "module {", "module { func.func public @main(%a: tensor<3xf32>) -> tensor<4xf32> { return %a } }"]
    {
        let Err(error) = machine.client.compile(text, &options) else { panic!("{text:?} compiled") };
        let podring_ici::pjrt::PjrtError::Call { code, message, file, .. } = error else { panic!("{error}") };
        assert_ne!(code, Code::Internal, "{message}");
        assert!(!message.is_empty() && file.is_absolute());
    }
    // More replicas than devices.
    let groups = Groups::all(16);
    let big = program(&single(Op::Barrier, part(DType::U8, 0), &groups));
    let Err(error) = machine.client.compile(&big.text, &podring_ici::pjrt::CompileOptions::on(0..16)) else {
        panic!("16 replicas on 8 devices")
    };
    eprintln!("{error}");
    permutes_and_barriers();
}
