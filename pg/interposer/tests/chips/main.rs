//! The engine of one process per device: each rank a process with one virtual chip, programs launched one by one and
//! played on the fabric. What it gives is held against the same collective on the fabric alone.

#![allow(clippy::unwrap_used, reason = "tests")]

mod job;

use std::time::{Duration, Instant};

use job::{Rank, run};
use podring_collective::{Blocks, Collective, DType, Kind, Layout, Part, Reduction, Tensor};
use podring_group::engine::DeviceCall;
use podring_group::{ProcessGroup, Work};
use podring_ici::pjrt::{CompileOptions, Element};

/// The same on every rank.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % below.max(1)
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.roll(all.len())]
    }
}

/// 0, 1 or 2 (0.5 in a type that has no zero).
fn element(dtype: DType, number: usize) -> Vec<u8> {
    let half = |codes: [u16; 3]| codes[number].to_le_bytes().to_vec();
    let single = [0f32, 1.0, 2.0][number];
    let double = f64::from(single);
    match dtype {
        DType::F16 => half([0, 0x3c00, 0x4000]),
        DType::BF16 => half([0, 0x3f80, 0x4000]),
        DType::F32 => single.to_le_bytes().to_vec(),
        DType::F64 => double.to_le_bytes().to_vec(),
        DType::C32 => [half([0, 0x3c00, 0x4000]), vec![0; 2]].concat(),
        DType::C64 => [single.to_le_bytes(), [0; 4]].concat(),
        DType::C128 => [double.to_le_bytes(), [0; 8]].concat(),
        DType::F8E4M3FN => vec![[0, 0x38, 0x40][number]],
        DType::F8E5M2 => vec![[0, 0x3c, 0x40][number]],
        DType::F8E4M3FNUZ => vec![[0, 0x40, 0x48][number]],
        DType::F8E5M2FNUZ => vec![[0, 0x40, 0x44][number]],
        DType::F8E8M0FNU => vec![[0x7e, 0x7f, 0x80][number]],
        DType::Bool => vec![u8::from(number == 1)],
        integer => {
            let mut bytes = vec![0; integer.size()];
            bytes[0] = number as u8;
            bytes
        }
    }
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u8; 64]);

/// Bytes aligned as a framework's are: what lies as a program wants it is then neither copied in nor out.
#[derive(Clone)]
struct Bytes(Vec<Line>, usize);

impl Bytes {
    fn of(bytes: &[u8]) -> Bytes {
        let line = |part: &[u8]| {
            let mut line = Line([0; 64]);
            line.0[..part.len()].copy_from_slice(part);
            line
        };
        Bytes(bytes.chunks(64).map(line).collect(), bytes.len())
    }

    fn get(&self) -> &[u8] {
        // SAFETY: lines lie one after another, and there are enough of them.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.1) }
    }
}

/// Memory of one rank for one collective.
#[derive(Clone)]
struct Memory {
    dtype: DType,
    reduction: Option<Reduction>,
    input: Bytes,
    output: Bytes,
    /// Elements of each block.
    ins: Vec<usize>,
    outs: Vec<usize>,
    in_place: bool,
}

impl Memory {
    fn part(&mut self) -> Part {
        let tensor = |data: &mut Bytes, counts: &[usize], dtype: DType| {
            assert_eq!(data.1, counts.iter().sum::<usize>() * dtype.size());
            Tensor { data: data.0.as_mut_ptr().cast(), layout: Layout::flat(counts.iter().sum()) }
        };
        let side = |data: &mut Bytes, counts: &[usize], dtype| match counts {
            [] => Blocks::none(),
            counts => Blocks::cut(tensor(data, counts, dtype), counts),
        };
        let inputs = side(&mut self.input, &self.ins, self.dtype);
        let outputs = if self.in_place { inputs.clone() } else { side(&mut self.output, &self.outs, self.dtype) };
        Part { dtype: self.dtype, reduction: self.reduction, inputs, outputs }
    }
}

const SIZES: &[usize] = &[0, 1, 7, 128, 1000, 1024, 1025, 5000];

/// A random collective of `n` ranks, for rank `me`; the dice are the same on all of them.
fn collective(dice: &mut Dice, kind: Kind, n: usize, me: usize) -> Vec<Memory> {
    let tensors = match kind {
        Kind::AllReduce | Kind::AllGather | Kind::ReduceScatter => 1 + dice.roll(6) / 4,
        Kind::Barrier => 0,
        _ => 1,
    };
    let reductions = [
        Reduction::Sum,
        Reduction::Avg,
        Reduction::Product,
        Reduction::Min,
        Reduction::Max,
        Reduction::BitAnd,
        Reduction::BitOr,
        Reduction::BitXor,
        Reduction::PreMulSum(0.5),
    ];
    let (dtype, reduction) = loop {
        let (dtype, reduction) = (dice.of(DType::ALL), dice.of(&reductions));
        // XLA divides complex numbers in another way, so that the last bit may differ.
        let inexact = reduction == Reduction::Avg && dtype.name().starts_with("complex") && !n.is_power_of_two();
        if !kind.reduces() || (reduction.supports(dtype) && !inexact) {
            break (dtype, kind.reduces().then_some(reduction));
        }
    };
    let root = kind.root().map(|root| root as usize);
    let one = |dice: &mut Dice| {
        let count = dice.of(SIZES);
        let even = dice.roll(2) == 0;
        // Who sends how much to whom, where that may differ.
        let table: Vec<Vec<usize>> =
            (0..n).map(|_| (0..n).map(|_| if even { count } else { dice.of(SIZES) }).collect()).collect();
        let row = table[0].clone();
        let (ins, outs) = match kind {
            Kind::AllReduce | Kind::Broadcast { .. } => (vec![count], vec![count]),
            Kind::Reduce { .. } => (vec![count], if root == Some(me) { vec![count] } else { vec![] }),
            Kind::AllGather => (vec![row[me]], row),
            Kind::ReduceScatter => (row.clone(), vec![row[me]]),
            Kind::AllToAll => (table[me].clone(), table.iter().map(|row| row[me]).collect()),
            Kind::Gather { .. } => (vec![row[me]], if root == Some(me) { row } else { vec![] }),
            Kind::Scatter { .. } => (if root == Some(me) { row.clone() } else { vec![] }, vec![row[me]]),
            _ => (vec![], vec![]),
        };
        let seed = dice.roll(1 << 30);
        let values = |counts: &[usize]| -> Vec<u8> {
            let mut own = Dice((seed * 64 + me) as u64 + 1);
            (0..counts.iter().sum()).flat_map(|_| element(dtype, own.roll(3))).collect()
        };
        let (input, output) =
            (Bytes::of(&values(&ins)), Bytes::of(&vec![0; outs.iter().sum::<usize>() * dtype.size()]));
        let in_place = matches!(kind, Kind::Broadcast { .. });
        Memory { dtype, reduction, input, output, ins, outs, in_place }
    };
    (0..tensors).map(|_| one(dice)).collect()
}

fn call(kind: Kind, memory: &mut [Memory]) -> Collective {
    Collective { kind, parts: memory.iter_mut().map(Memory::part).collect() }
}

fn on_chip(group: &ProcessGroup, kind: Kind, memory: &mut [Memory]) -> Work {
    group.post_device(DeviceCall::staged(call(kind, memory))).unwrap()
}

/// Sends or receives it over the fabric.
fn message(group: &ProcessGroup, kind: Kind, memory: &mut [Memory]) -> Work {
    let mut call = call(kind, memory);
    for part in &mut call.parts {
        let unused = if matches!(kind, Kind::Send { .. }) { &mut part.outputs } else { &mut part.inputs };
        *unused = Blocks::none();
        part.reduction = None;
    }
    group.post(call, None, None, true).unwrap()
}

fn wait(work: &Work) -> Result<(), String> {
    work.wait(None, || false).map_err(|error| error.to_string())
}

fn floats(values: &[f32]) -> Vec<Memory> {
    let input: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let counts = vec![values.len()];
    vec![Memory {
        dtype: DType::F32,
        reduction: Some(Reduction::Sum),
        input: Bytes::of(&input),
        output: Bytes::of(&vec![0; values.len() * 4]),
        ins: counts.clone(),
        outs: counts,
        in_place: false,
    }]
}

/// For an all-gather of the world's ranks.
fn gathered(rank: &Rank) -> Vec<Memory> {
    let size = rank.size as usize;
    let mut memory = floats(&[rank.rank as f32; 3000]);
    memory[0].reduction = None;
    memory[0].output = Bytes::of(&vec![0; size * 3000 * 4]);
    memory[0].outs = vec![3000; size];
    memory
}

fn read(memory: &[Memory]) -> Vec<f32> {
    memory[0].output.get().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn kinds(root: u32) -> [Kind; 9] {
    [
        Kind::AllReduce,
        Kind::Broadcast { root },
        Kind::Reduce { root },
        Kind::AllGather,
        Kind::ReduceScatter,
        Kind::AllToAll,
        Kind::Gather { root },
        Kind::Scatter { root },
        Kind::Barrier,
    ]
}

/// The first is the world; of the others, those that this rank is in.
fn groups(rank: &Rank, some: &[Vec<u32>]) -> Vec<Option<ProcessGroup>> {
    let open = |(index, members): (usize, &Vec<u32>)| match index {
        0 => Some(rank.world.clone()),
        _ => members.contains(&rank.rank).then(|| rank.group(&format!("some{index}"), members)),
    };
    some.iter().enumerate().map(open).collect()
}

/// Every kind of collective, as random ones of all types, sizes and reductions, on all ranks and on some.
#[test]
fn what_programs_give_is_what_the_fabric_gives() {
    run("what_programs_give_is_what_the_fabric_gives", "v5e:2x2", &[], |rank: &Rank| {
        let some = [vec![0, 1, 2, 3], vec![0, 2], vec![3, 1, 0]];
        let groups = groups(rank, &some);
        let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
        let mut programs = 0;
        for case in 0..72 {
            let which = dice.of(&[0, 0, 1, 2]);
            let n = some[which].len();
            let root = dice.roll(n) as u32;
            let kind = kinds(root)[case % 9];
            let me = some[which].iter().position(|&member| member == rank.rank);
            let memory = collective(&mut dice, kind, n, me.unwrap_or(0));
            let (Some(group), Some(_)) = (&groups[which], me) else { continue };
            let (mut fabric, mut chip) = (memory.clone(), memory);
            let before = rank.chip.launched();
            wait(&group.post(call(kind, &mut fabric), None, None, true).unwrap()).unwrap();
            wait(&on_chip(group, kind, &mut chip)).unwrap();
            programs += rank.chip.launched() - before;
            let what = call(kind, &mut chip).to_string();
            for (got, expected) in chip.iter().zip(&fabric) {
                let side = |memory: &Memory| if memory.in_place { memory.input.clone() } else { memory.output.clone() };
                let (got, expected) = (side(got), side(expected));
                let (got, expected) = (got.get(), expected.get());
                let differs = got.iter().zip(expected).position(|(got, expected)| got != expected);
                let near = |bytes: &[u8]| {
                    differs.map(|at| bytes[at / 16 * 16..].iter().take(16).copied().collect::<Vec<u8>>())
                };
                let places = (near(got), near(expected));
                assert_eq!(differs, None, "case {case}: {what} among {:?}: {places:?}", some[which]);
            }
        }
        // Types that no compiler reduces go over the fabric.
        assert!(programs >= 40, "{programs}");
        rank.world.shutdown();
    });
}

#[test]
fn calls_return_at_once_and_a_second_one_compiles_nothing() {
    run("calls_return_at_once_and_a_second_one_compiles_nothing", "v5e:2x1", &[], |rank: &Rank| {
        let n = rank.size as f32;
        let mut first = floats(&[rank.rank as f32; 100]);
        wait(&on_chip(&rank.world, Kind::AllReduce, &mut first)).unwrap();
        assert_eq!(read(&first), vec![n * (n - 1.0) / 2.0; 100]);
        let (compiled, launched) = (rank.chip.counts().compiled, rank.chip.launched());
        // Rank 1 comes when rank 0's calls have returned: they don't wait for it, their works do.
        let mut word = floats(&[0.0]);
        if rank.rank == 1 {
            wait(&message(&rank.world, Kind::Recv { from: Some(0), tag: 0 }, &mut word)).unwrap();
        }
        let mut memory: Vec<Vec<Memory>> = (0..8).map(|index| floats(&vec![index as f32; 90 + index])).collect();
        let works: Vec<Work> = memory.iter_mut().map(|memory| on_chip(&rank.world, Kind::AllReduce, memory)).collect();
        if rank.rank == 0 {
            assert_eq!(works[0].state(), podring_group::State::Pending);
            wait(&message(&rank.world, Kind::Send { to: 1, tag: 0 }, &mut word)).unwrap();
        }
        works.iter().for_each(|work| wait(work).unwrap());
        for (index, memory) in memory.iter().enumerate() {
            assert_eq!(read(memory), vec![index as f32 * n; 90 + index]);
        }
        assert_eq!((rank.chip.counts().compiled, rank.chip.launched()), (compiled, launched + 8));
        rank.world.shutdown();
    });
}

fn sum_over_the_fabric(rank: &Rank, numbers: &[u64]) -> Vec<u64> {
    let numbers: Vec<f32> = numbers.iter().map(|&number| number as f32).collect();
    let mut memory = floats(&numbers);
    wait(&rank.world.post(call(Kind::AllReduce, &mut memory), None, None, true).unwrap()).unwrap();
    read(&memory).into_iter().map(|number| number as u64).collect()
}

/// Programs that are one collective, and such as call some and ask for their place.
#[test]
fn a_job_compiles_each_program_once() {
    run("a_job_compiles_each_program_once", "v5e:2x2", &[], |rank: &Rank| {
        let mut dice = Dice(77);
        let kinds = [
            Kind::AllReduce,
            Kind::Broadcast { root: 1 },
            Kind::AllGather,
            Kind::ReduceScatter,
            Kind::AllToAll,
            Kind::Gather { root: 2 },
            Kind::Scatter { root: 0 },
        ];
        for kind in kinds {
            let memory = collective(&mut dice, kind, 4, rank.rank as usize);
            let (mut fabric, mut chip) = (memory.clone(), memory);
            wait(&rank.world.post(call(kind, &mut fabric), None, None, true).unwrap()).unwrap();
            wait(&on_chip(&rank.world, kind, &mut chip)).unwrap();
            let side = |memory: &Memory| if memory.in_place { memory.input.clone() } else { memory.output.clone() };
            for (got, expected) in chip.iter().zip(&fabric) {
                assert!(side(got).get() == side(expected).get(), "{}", call(kind, &mut chip.clone()));
            }
        }
        let (own, played) = (rank.chip.counts(), podring_interposer::counts());
        let all = sum_over_the_fabric(
            rank,
            &[own.compiled, own.received, own.damaged, played.whole + played.mixed, played.loaded, played.mixed],
        );
        let programs = own.compiled + own.received;
        assert!(programs >= 6, "{own:?}");
        assert_eq!(all[..3], [programs, 3 * programs, 0], "{own:?}");
        // The plugin underneath has compiled no more than that, and some of those ask for their place.
        assert_eq!(all[3..5], [programs, 3 * programs], "{played:?}");
        assert!(all[5] > 0, "{played:?}");
        rank.world.shutdown();
    });
}

/// Programs within slices, the fabric between them; also in groups of one slice, and such as are unevenly spread.
#[test]
fn groups_over_several_slices_give_what_the_fabric_gives() {
    run("groups_over_several_slices_give_what_the_fabric_gives", "v5e:1x2*2", &[], |rank: &Rank| {
        let some = [vec![0, 1, 2, 3], vec![3, 1], vec![0, 1], vec![2, 3], vec![3, 0, 1], vec![2, 0, 1, 3]];
        let groups = groups(rank, &some);
        let mut dice = Dice(0x5bd1_e995_1234_5678);
        let mut programs = [0; 6];
        for case in 0..36 {
            // Two of different groups under way at once: in one order on all ranks, whichever steps they are made of.
            let both: Vec<_> = [dice.of(&[0, 0, 5]), 1 + dice.roll(5)]
                .into_iter()
                .enumerate()
                .filter_map(|(second, which)| {
                    let n = some[which].len();
                    let kind = kinds(dice.roll(n) as u32)[(case + 4 * second) % 9];
                    let me = some[which].iter().position(|&member| member == rank.rank);
                    let memory = collective(&mut dice, kind, n, me.unwrap_or(0));
                    me.map(|_| (which, kind, memory))
                })
                .collect();
            let mut chips: Vec<Vec<Memory>> = both.iter().map(|(.., memory)| memory.clone()).collect();
            let before = rank.chip.launched();
            let works: Vec<Work> = both
                .iter()
                .zip(&mut chips)
                .map(|((which, kind, _), memory)| on_chip(groups[*which].as_ref().unwrap(), *kind, memory))
                .collect();
            let what = |index: usize| format!("case {case}: {} among {:?}", both[index].1.name(), some[both[index].0]);
            for (index, work) in works.iter().enumerate() {
                wait(work).unwrap_or_else(|error| panic!("{}: {error}", what(index)));
            }
            both.iter().for_each(|(which, ..)| programs[*which] += rank.chip.launched() - before);
            for (index, ((which, kind, memory), chip)) in both.iter().zip(&chips).enumerate() {
                let (group, mut fabric) = (groups[*which].as_ref().unwrap(), memory.clone());
                wait(&group.post(call(*kind, &mut fabric), None, None, true).unwrap()).unwrap();
                let side = |memory: &Memory| if memory.in_place { memory.input.clone() } else { memory.output.clone() };
                for (got, expected) in chip.iter().zip(&fabric) {
                    assert!(side(got).get() == side(expected).get(), "{}", what(index));
                }
            }
        }
        assert!(programs[0] > 20, "{programs:?}");
        // Four ranks of two slices: reduce-scatter and all-gather within a slice.
        let before = rank.chip.launched();
        let mut memory = floats(&[rank.rank as f32; 1000]);
        wait(&on_chip(&rank.world, Kind::AllReduce, &mut memory)).unwrap();
        assert_eq!(read(&memory), [6.0; 1000]);
        assert_eq!(rank.chip.launched(), before + 2);
        rank.world.shutdown();
    });
}

/// Two squares of one slice: the one at its corner libtpu might refuse, the other it takes.
#[test]
fn a_group_that_libtpu_might_refuse_goes_over_the_fabric() {
    run("a_group_that_libtpu_might_refuse_goes_over_the_fabric", "v5e:2x4", &[], |rank: &Rank| {
        let corner = rank.rank < 4;
        let first = if corner { 0 } else { 4 };
        let square = rank.group(&format!("square{first}"), &[first, first + 1, first + 2, first + 3]);
        assert_eq!(rank.chip.refused(), u64::from(corner));
        let mut memory = floats(&[rank.rank as f32; 100]);
        wait(&on_chip(&square, Kind::AllReduce, &mut memory)).unwrap();
        assert_eq!(read(&memory), [4.0 * first as f32 + 6.0; 100]);
        assert_eq!(rank.chip.launched(), u64::from(!corner));
        // The whole slice is no part of it.
        let mut memory = floats(&[rank.rank as f32; 100]);
        wait(&on_chip(&rank.world, Kind::AllReduce, &mut memory)).unwrap();
        assert_eq!(read(&memory), [28.0; 100]);
        assert_eq!(rank.chip.launched(), u64::from(!corner) + 1);
        square.shutdown();
        rank.world.shutdown();
    });
}

#[test]
fn a_rank_of_another_slice_that_dies_is_named() {
    run("a_rank_of_another_slice_that_dies_is_named", "v5e:1x2*2", &[3], |rank: &Rank| {
        let pair = [rank.rank / 2 * 2, rank.rank / 2 * 2 + 1];
        let inner = rank.group(&format!("pair{}", rank.rank / 2), &pair);
        wait(&on_chip(&rank.world, Kind::AllReduce, &mut floats(&[1.0; 3000]))).unwrap();
        if rank.rank == 3 {
            std::thread::sleep(Duration::from_millis(300));
            std::process::abort();
        }
        let start = Instant::now();
        let (mut memory, mut own) = (floats(&[1.0; 3000]), floats(&[1.0; 3000]));
        let work = on_chip(&rank.world, Kind::AllReduce, &mut memory);
        // Behind it in the line, and no business of that rank's in the other slice.
        let behind = on_chip(&inner, Kind::AllReduce, &mut own);
        let error = wait(&work).unwrap_err();
        // Rank 2 may hear of it in a program of its slice's, in which that rank is the second; rank 1 in the exchange with
        // its counterpart; or either hears it in the other's words.
        let within = ["lost rank 1", "group world/slice 1", "[2,3]"].iter().all(|word| error.contains(word));
        assert!(within || error.contains("lost rank 3"), "{error}");
        assert_eq!(wait(&behind).is_ok(), rank.rank < 2);
        assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    });
}

/// A rank waits in a program of its slice's for one whose counterpart, in the other slice, is gone.
#[test]
fn a_dead_counterpart_of_another_member_is_named() {
    run("a_dead_counterpart_of_another_member_is_named", "v5e:1x2*2", &[3], |rank: &Rank| {
        // Between the slices, then inside. No compile holds up what follows.
        wait(&on_chip(&rank.world, Kind::AllGather, &mut gathered(rank))).unwrap();
        if rank.rank == 3 {
            std::thread::sleep(Duration::from_millis(300));
            std::process::abort();
        }
        let start = Instant::now();
        let error = wait(&on_chip(&rank.world, Kind::AllGather, &mut gathered(rank))).unwrap_err();
        assert!(rank.rank == 2 || error.contains("lost rank 3"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        // So that nobody is named for having left: rank 0 has heard it from rank 1 while that one lived.
        std::thread::sleep(Duration::from_secs(2));
        assert!(rank.rank == 2 || rank.world.error().unwrap().to_string().contains("lost rank 3"));
    });
}

/// What fails on one rank where nobody meets it: the others are in the program by then.
#[test]
fn what_fails_before_a_launch_reaches_the_others() {
    run("what_fails_before_a_launch_reaches_the_others", "v5e:2x1", &[], |rank: &Rank| {
        let mut memory = floats(&[1.0; 100]);
        wait(&on_chip(&rank.world, Kind::AllReduce, &mut memory)).unwrap();
        let start = Instant::now();
        let timeout = (rank.rank == 1).then_some(Duration::ZERO);
        let call = DeviceCall { timeout, ..DeviceCall::staged(call(Kind::AllReduce, &mut memory)) };
        let error = wait(&rank.world.post_device(call).unwrap()).unwrap_err();
        assert!(error.contains("the timeout of 0 ms passed"), "{error}");
        assert!(rank.rank == 1 || error.contains("aborted by rank 1"), "{error}");
        if rank.rank == 1 {
            // Not by its end.
            std::thread::sleep(Duration::from_secs(2));
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    });
}

/// A program whose rows don't lie where they should on one rank: the others hear of it at once, and from whom.
#[test]
fn a_refusal_while_a_program_runs_reaches_the_others() {
    run("a_refusal_while_a_program_runs_reaches_the_others", "v5e:2x2", &[], |rank: &Rank| {
        let text = r#"
            module @ragged attributes {mhlo.num_replicas = 4 : i32} {
              func.func public @main(%a: tensor<8xf32>, %b: tensor<8xf32>, %c: tensor<4xi64>, %d: tensor<4xi64>,
                                     %e: tensor<4xi64>, %f: tensor<4xi64>) -> tensor<8xf32> {
                %0 = stablehlo.custom_call @ragged_all_to_all(%a, %b, %c, %d, %e, %f) {
                  api_version = 4 : i32,
                  backend_config = {channel_id = 0 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}
                } : (tensor<8xf32>, tensor<8xf32>, tensor<4xi64>, tensor<4xi64>, tensor<4xi64>, tensor<4xi64>)
                  -> tensor<8xf32>
                return %0 : tensor<8xf32>
              }
            }"#;
        let devices: Vec<i64> = rank.client.all_devices().unwrap().iter().map(|device| device.id.into()).collect();
        let program = rank.client.compile(text, &CompileOptions::on(devices)).unwrap();
        let device = rank.client.devices()[0];
        let float = |values: [f32; 8]| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            rank.client.buffer(&bytes, Element::F32, &[8], &device).unwrap()
        };
        let number = |values: [i64; 4]| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            rank.client.buffer(&bytes, Element::S64, &[4], &device).unwrap()
        };
        // Two rows to each rank, those of rank r behind 2r.
        let launch = |begin: i64| {
            let me = i64::from(rank.rank);
            let operands = [
                float(std::array::from_fn(|index| (10 * me + index as i64) as f32)),
                float([0.0; 8]),
                number([begin, 2, 4, 6]),
                number([2; 4]),
                number([2 * me; 4]),
                number([2; 4]),
            ];
            let mut launch = program.launch(&[operands.iter().collect()], false).map_err(|error| error.to_string())?;
            launch.done.remove(0).wait().map_err(|error| error.to_string())?;
            let mut out = vec![0; 32];
            launch.outputs.remove(0).remove(0).read(&mut out).map_err(|error| error.to_string())?;
            Ok::<_, String>(out)
        };
        let got = launch(0).unwrap();
        let expected: Vec<u8> = (0..4)
            .flat_map(|from| [0, 1].map(|row| (10 * from + 2 * rank.rank + row) as f32))
            .flat_map(f32::to_le_bytes)
            .collect();
        assert_eq!(got, expected);
        // Rank 2 would read in front of its operand.
        let start = Instant::now();
        let error = launch(if rank.rank == 2 { -1 } else { 0 }).unwrap_err();
        assert!(error.contains("2 rows from -1 on don't lie within [8]"), "{error}");
        assert!(rank.rank == 2 || error.contains("aborted by rank 2: rank 2 of the job"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        rank.world.shutdown();
    });
}

#[test]
fn a_thousand_groups_made_and_destroyed_leave_nothing() {
    run("a_thousand_groups_made_and_destroyed_leave_nothing", "v5e:2x1", &[], |rank: &Rank| {
        let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
        let round = |numbers: std::ops::Range<usize>| {
            for number in numbers {
                let group = rank.group(&format!("group{number}"), &[number as u32 % 2, 1 - number as u32 % 2]);
                if number % 50 == 0 {
                    wait(&on_chip(&group, Kind::AllReduce, &mut floats(&[1.0; 100]))).unwrap();
                }
                group.shutdown();
            }
        };
        round(0..100);
        let before = threads();
        round(100..1000);
        // One number stands for all of these members.
        assert_eq!(rank.chip.groups(), (1, 1));
        assert!(threads() <= before, "{before} threads, then {}", threads());
        // And what was posted in them still counts.
        wait(&on_chip(&rank.world, Kind::AllReduce, &mut floats(&[1.0; 100]))).unwrap();
        rank.world.shutdown();
        assert_eq!(rank.chip.groups(), (0, 0));
    });
}

/// Several groups of the same ranks, with operations of all under way at once.
#[test]
fn groups_of_the_same_members_keep_their_order() {
    run("groups_of_the_same_members_keep_their_order", "v5e:2x2", &[], |rank: &Rank| {
        let everybody: Vec<u32> = (0..rank.size).collect();
        let twin = rank.group("twin", &everybody);
        let backwards: Vec<u32> = everybody.iter().rev().copied().collect();
        let third = rank.group("backwards", &backwards);
        let groups = [&rank.world, &twin, &third];
        for round in 0..10 {
            let mut memory: Vec<Vec<Memory>> = (0..12).map(|index| floats(&vec![index as f32; 100])).collect();
            let calls = memory.iter_mut().enumerate();
            let works: Vec<Work> =
                calls.map(|(index, memory)| on_chip(groups[index % 3], Kind::AllReduce, memory)).collect();
            works.iter().for_each(|work| wait(work).unwrap_or_else(|error| panic!("round {round}: {error}")));
            for (index, memory) in memory.iter().enumerate() {
                assert_eq!(read(memory), vec![index as f32 * 4.0; 100], "round {round}");
            }
        }
        rank.world.shutdown();
    });
}

#[test]
fn a_rank_that_dies_in_a_program_is_named_on_the_others() {
    run("a_rank_that_dies_in_a_program_is_named_on_the_others", "v5e:2x2", &[2], |rank: &Rank| {
        let mut once = floats(&[1.0; 3000]);
        wait(&on_chip(&rank.world, Kind::AllReduce, &mut once)).unwrap();
        if rank.rank == 2 {
            // The others are in the program by then.
            std::thread::sleep(Duration::from_millis(300));
            std::process::abort();
        }
        let start = Instant::now();
        let mut memory = floats(&[1.0; 3000]);
        let work = on_chip(&rank.world, Kind::AllReduce, &mut memory);
        let error = wait(&work).unwrap_err();
        assert!(error.contains("lost rank 2") && error.contains("all_reduce"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        // It stays so.
        let again = wait(&on_chip(&rank.world, Kind::AllReduce, &mut memory)).unwrap_err();
        assert!(again.contains("lost rank 2"), "{again}");
    });
}

#[test]
fn what_ranks_call_differently_is_an_error_on_each() {
    run("what_ranks_call_differently_is_an_error_on_each", "v5e:2x2", &[], |rank: &Rank| {
        let pair = [rank.rank / 2 * 2, rank.rank / 2 * 2 + 1];
        let inner = rank.group(&format!("pair{}", rank.rank / 2), &pair);
        let mut memory = floats(&[1.0; 100]);
        if rank.rank >= 2 {
            // The same program for both sizes, so that nothing but the call tells them apart.
            let mut memory = floats(&vec![1.0; 100 + rank.rank as usize]);
            let error = wait(&on_chip(&inner, Kind::AllReduce, &mut memory)).unwrap_err();
            assert!(error.contains("ranks called different operations"), "{error}");
            return;
        }
        // Another order among groups of which one holds the other.
        let mut other = floats(&[1.0; 100]);
        let (within, around) = if rank.rank == 0 {
            let around = on_chip(&rank.world, Kind::AllReduce, &mut memory);
            (on_chip(&inner, Kind::AllReduce, &mut other), around)
        } else {
            let within = on_chip(&inner, Kind::AllReduce, &mut other);
            (within, on_chip(&rank.world, Kind::AllReduce, &mut memory))
        };
        let error = wait(&within).unwrap_err();
        assert!(error.contains("ranks called different operations"), "{error}");
        assert!(error.contains("order of calls among groups"), "{error}");
        // The other two never come to this one: they leave.
        wait(&around).unwrap_err();
    });
}

#[test]
fn a_deadline_names_who_has_not_come_and_an_abort_ends_a_launch() {
    run("a_deadline_names_who_has_not_come_and_an_abort_ends_a_launch", "v5e:2x2", &[], |rank: &Rank| {
        let pair = [rank.rank / 2 * 2, rank.rank / 2 * 2 + 1];
        let inner = rank.group(&format!("pair{}", rank.rank / 2), &pair);
        let mut memory = floats(&[1.0; 100]);
        // Compiled, so that what follows takes no longer than it says.
        wait(&on_chip(&inner, Kind::AllReduce, &mut memory)).unwrap();
        let start = Instant::now();
        match rank.rank {
            0 => {
                let timeout = Some(Duration::from_millis(700));
                let call = DeviceCall { timeout, ..DeviceCall::staged(call(Kind::AllReduce, &mut memory)) };
                let error = wait(&inner.post_device(call).unwrap()).unwrap_err();
                assert!(error.contains("the timeout of") && error.contains("waiting on rank 1"), "{error}");
            }
            2 => {
                let work = on_chip(&inner, Kind::AllReduce, &mut memory);
                std::thread::sleep(Duration::from_millis(300));
                inner.abort("enough of it");
                let error = wait(&work).unwrap_err();
                assert!(error.contains("enough of it"), "{error}");
            }
            3 => {
                std::thread::sleep(Duration::from_millis(1500));
                let error = wait(&on_chip(&inner, Kind::AllReduce, &mut memory)).unwrap_err();
                assert!(error.contains("enough of it"), "{error}");
            }
            _ => std::thread::sleep(Duration::from_millis(1500)),
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    });
}
