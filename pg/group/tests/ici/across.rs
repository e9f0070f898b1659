//! Two slices of four devices, each on a machine and a host of its own, with the fabric between them.

use std::time::{Duration, Instant};

use podring_collective::{Blocks, DType, Kind, Reduction};
use podring_group::{Kind as ErrorKind, ProcessGroup, engine::DeviceCall};

use crate::job::{LONG, all_reduce, barrier, finish, machine, one, over, post, run_over, tensor};

const REDUCTIONS: [Reduction; 6] =
    [Reduction::Sum, Reduction::Avg, Reduction::Product, Reduction::Max, Reduction::BitXor, Reduction::PreMulSum(0.5)];

/// Small whole numbers, so that every order of additions is exact.
fn values(rank: usize, count: usize) -> Vec<f64> {
    (0..count).map(|i| ((i * 7 + rank * 3) % 5) as f64 - 2.0).collect()
}

fn expected(reduction: Reduction, inputs: &[f64], integers: bool) -> f64 {
    match reduction {
        Reduction::Sum => inputs.iter().sum(),
        Reduction::Avg if integers => (inputs.iter().sum::<f64>() / inputs.len() as f64).trunc(),
        Reduction::Avg => inputs.iter().sum::<f64>() / inputs.len() as f64,
        Reduction::Product => inputs.iter().product(),
        Reduction::Max => inputs.iter().copied().fold(f64::MIN, f64::max),
        Reduction::PreMulSum(factor) => inputs.iter().map(|value| value * factor).sum(),
        Reduction::BitXor => inputs.iter().fold(0i64, |xor, value| xor ^ *value as i64) as f64,
        other => panic!("{other}"),
    }
}

fn bytes(dtype: DType, values: &[f64]) -> Vec<u8> {
    match dtype {
        DType::F64 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| (*value as i64).to_le_bytes()).collect(),
    }
}

fn everything(group: &ProcessGroup) {
    let (me, size) = (group.rank() as usize, group.size() as usize);
    for dtype in [DType::F64, DType::I64] {
        for count in [0usize, 1, 3, 1000] {
            let all: Vec<Vec<f64>> = (0..size).map(|rank| values(rank, count * size)).collect();
            for reduction in REDUCTIONS.into_iter().filter(|reduction| reduction.supports(dtype)) {
                let reduced: Vec<f64> = (0..count * size)
                    .map(|i| {
                        let inputs: Vec<f64> = all.iter().map(|values| values[i]).collect();
                        expected(reduction, &inputs, dtype == DType::I64)
                    })
                    .collect();
                let mut data = bytes(dtype, &all[me][..count]);
                let both = Blocks::whole(over(&mut data, dtype));
                finish(group, one(Kind::AllReduce, dtype, Some(reduction), both.clone(), both)).unwrap();
                assert_eq!(data, bytes(dtype, &reduced[..count]), "{reduction} of {dtype} × {count}");

                let mut input = bytes(dtype, &all[me]);
                let mut output = vec![0u8; count * 8];
                let blocks = Blocks::cut(over(&mut input, dtype), &vec![count; size]);
                let scatter =
                    one(Kind::ReduceScatter, dtype, Some(reduction), blocks, Blocks::whole(over(&mut output, dtype)));
                finish(group, scatter).unwrap();
                assert_eq!(output, bytes(dtype, &reduced[me * count..][..count]), "{reduction} of {dtype} × {count}");

                let root = 1u32.min(size as u32 - 1);
                let mut input = bytes(dtype, &all[me][..count]);
                let mut output = vec![0u8; count * 8];
                let here = me as u32 == root;
                let outputs = if here { Blocks::whole(over(&mut output, dtype)) } else { Blocks::none() };
                let inputs = Blocks::whole(over(&mut input, dtype));
                finish(group, one(Kind::Reduce { root }, dtype, Some(reduction), inputs, outputs)).unwrap();
                let result = if here { bytes(dtype, &reduced[..count]) } else { vec![0u8; count * 8] };
                assert_eq!(output, result, "{reduction} of {dtype} × {count}");
            }
        }
    }
    for count in [1usize, 100] {
        // Shares that differ, one of them empty.
        let counts: Vec<usize> = (0..size).map(|rank| count * rank).collect();
        let mut mine = vec![me as u32; counts[me]];
        let mut all = vec![9u32; counts.iter().sum()];
        let outputs = Blocks::cut(tensor(&mut all), &counts);
        finish(group, one(Kind::AllGather, DType::U32, None, Blocks::whole(tensor(&mut mine)), outputs)).unwrap();
        let expected: Vec<u32> = (0..size).flat_map(|rank| vec![rank as u32; counts[rank]]).collect();
        assert_eq!(all, expected);
        for root in 0..size {
            let mut data = vec![me as u8; count];
            let both = Blocks::whole(tensor(&mut data));
            finish(group, one(Kind::Broadcast { root: root as u32 }, DType::U8, None, both.clone(), both)).unwrap();
            assert_eq!(data, vec![root as u8; count]);
        }
        // Over the hosts' network alone.
        let mut out: Vec<i32> = (0..size).flat_map(|to| vec![(me * 10 + to) as i32; count]).collect();
        let mut into = vec![0i32; count * size];
        let even = vec![count; size];
        let (inputs, outputs) = (Blocks::cut(tensor(&mut out), &even), Blocks::cut(tensor(&mut into), &even));
        finish(group, one(Kind::AllToAll, DType::I32, None, inputs, outputs)).unwrap();
        assert_eq!(into, (0..size).flat_map(|from| vec![(from * 10 + me) as i32; count]).collect::<Vec<i32>>());
        let (to, from) = ((me + 1) % size, (me + size - 1) % size);
        let (mut out, mut into) = (vec![me as i32; count], vec![-1i32; count]);
        let kind = Kind::Recv { from: Some(from as u32), tag: 4 };
        let receive = post(group, one(kind, DType::I32, None, Blocks::none(), Blocks::whole(tensor(&mut into))));
        let kind = Kind::Send { to: to as u32, tag: 4 };
        finish(group, one(kind, DType::I32, None, Blocks::whole(tensor(&mut out)), Blocks::none())).unwrap();
        receive.wait(Some(LONG), || false).unwrap();
        assert_eq!(into, vec![from as i32; count]);
    }
    finish(group, barrier()).unwrap();
}

#[test]
fn two_slices_equal_one_group() {
    let (Some(first), Some(second)) = (machine(4), machine(4)) else { return };
    run_over(&[first, second], LONG, |rank| {
        let world = rank.world().unwrap();
        everything(&world);
        // In another order than slices have; one device of each; inside one slice; unevenly spread.
        for (index, ranks) in [&[5u32, 0, 2, 7][..], &[3, 4], &[6, 5, 4, 7], &[0, 1, 4]].iter().enumerate() {
            if let Some(group) = rank.group(&format!("part {index}"), ranks) {
                everything(&group);
                group.shutdown();
            }
        }
        // Several under way at once.
        let mut data: Vec<Vec<f32>> = (0..20).map(|i| vec![i as f32; 50]).collect();
        let works: Vec<_> = data.iter_mut().map(|data| post(&world, all_reduce(data))).collect();
        for work in &works {
            work.wait(Some(LONG), || false).unwrap();
        }
        assert!(data.iter().enumerate().all(|(i, data)| data[49] == 8.0 * i as f32));
        finish(&world, barrier()).unwrap();
        world.shutdown();
    });
}

#[test]
fn a_failure_in_one_slice_reaches_the_other() {
    let (Some(first), Some(second)) = (machine(2), machine(2)) else { return };
    // A failure also ends what another slice hasn't finished, though it was called before.
    let formed = std::sync::Barrier::new(4);
    let kinds = run_over(&[first, second], LONG, |rank| {
        let world = rank.world().unwrap();
        finish(&world, barrier()).unwrap();
        formed.wait();
        // A different count on one rank of one slice.
        let mut data = vec![0.0f32; if rank.rank == 1 { 5 } else { 4 }];
        let error = finish(&world, all_reduce(&mut data)).unwrap_err();
        (error.kind(), error.to_string())
    });
    assert_eq!(kinds[0].0, ErrorKind::Mismatch, "{}", kinds[0].1);
    assert_eq!(kinds[1].0, ErrorKind::Mismatch, "{}", kinds[1].1);
    for (_, text) in &kinds {
        assert!(text.contains("count=5") || text.contains("counts=[3, 2]") || text.contains("different"), "{text}");
    }
}

#[test]
fn what_waits_in_line_fails_at_its_own_deadline() {
    let (Some(first), Some(second)) = (machine(1), machine(1)) else { return };
    let heard = std::sync::Barrier::new(2);
    run_over(&[first, second], LONG, |rank| {
        let world = rank.world().unwrap();
        finish(&world, barrier()).unwrap();
        if rank.rank == 1 {
            // It comes too late. Its part of the first call may have all that it needs by then; the second never does. (A call
            // of anything else could be told of that instead: it may begin before the other's failure has been read.)
            heard.wait();
            let _ = finish(&world, all_reduce(&mut [1.0f32; 4]));
            let error = finish(&world, all_reduce(&mut [1.0f32; 5])).unwrap_err().to_string();
            assert!(error.contains("the timeout of 200 ms passed while it waited"), "{error}");
            return;
        }
        let (mut one, mut other) = ([1.0f32; 4], [1.0f32; 5]);
        let ahead = post(&world, all_reduce(&mut one));
        let start = Instant::now();
        let timeout = Some(Duration::from_millis(200));
        let call = DeviceCall { timeout, ..DeviceCall::staged(all_reduce(&mut other)) };
        let late = world.post_device(call).unwrap();
        let error = late.wait(Some(LONG), || false).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let text = error.to_string();
        assert!(text.contains("all_reduce(SUM, float32, count=5), seq 2: the timeout of 200 ms passed"), "{text}");
        assert!(text.contains("while it waited behind all_reduce, seq 1, of group world"), "{text}");
        // They are of one group.
        ahead.wait(Some(LONG), || false).unwrap_err();
        heard.wait();
    });
}

/// As many of them end one after another, on one thread, which has no more stack for that than for one.
#[test]
fn thousands_of_operations_that_end_at_once() {
    const MANY: usize = 4000;
    let (Some(first), Some(second)) = (machine(1), machine(1)) else { return };
    let posted = std::sync::Barrier::new(2);
    run_over(&[first, second], LONG, |rank| {
        let world = rank.world().unwrap();
        let gather = |mine: &mut [u32], all: &mut [u32]| {
            let outputs = if rank.rank == 0 { Blocks::cut(tensor(all), &[1, 1]) } else { Blocks::none() };
            one(Kind::Gather { root: 0 }, DType::U32, None, Blocks::whole(tensor(mine)), outputs)
        };
        let mut mine: Vec<u32> = (0..MANY as u32).map(|index| 2 * index + rank.rank).collect();
        let mut all = vec![0u32; 2 * MANY];
        if rank.rank == 0 {
            posted.wait();
        }
        // Of rank 1's, all wait behind this one, and then for nobody.
        let first = post(&world, barrier());
        let calls = mine.chunks_mut(1).zip(all.chunks_mut(2)).map(|(mine, all)| post(&world, gather(mine, all)));
        let works: Vec<_> = calls.collect();
        if rank.rank == 1 {
            posted.wait();
        }
        first.wait(Some(LONG), || false).unwrap();
        works.iter().for_each(|work| work.wait(Some(LONG), || false).unwrap());
        let expected = if rank.rank == 0 { (0..2 * MANY as u32).collect() } else { vec![0; 2 * MANY] };
        assert_eq!(all, expected);
        finish(&world, barrier()).unwrap();
        world.shutdown();
    });
}
