//! Every reduction of every type, over counts, sources, kinds of source, alignments and aliasing.

use podring_collective::{DType, Reduction};
use podring_kernel::{Source, Target, reduce};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::{Random, naive};

/// One call, as drawn.
#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    count: usize,
    ranks: u32,
    factor: f64,
    /// For each source: whether it is partial, and its misalignment.
    sources: Vec<(bool, usize)>,
    to_partial: bool,
    misaligned: usize,
    /// Which source's memory the target is to be, if their types agree.
    alias: Option<prop::sample::Index>,
}

fn cases() -> impl Strategy<Value = Case> {
    let count = prop_oneof![3 => 0usize..70, 2 => 0usize..5000, 1 => 2040usize..2060];
    let ranks = prop_oneof![1u32..10, prop::sample::select(vec![64u32, 200, 65_537, 1 << 24])];
    let factor = prop::sample::select(vec![1.0, 0.5, -3.0, 1.0 / 3.0, 2f64.powi(-130), 1e30]);
    // Aligned or not by whole elements, and by odd bytes.
    let at = || prop_oneof![Just(0usize), 0usize..16];
    let sources = prop::collection::vec((any::<bool>(), at()), 1..=9);
    let alias = prop::option::of(any::<prop::sample::Index>());
    (any::<u64>(), count, ranks, factor, sources, any::<bool>(), at(), alias).prop_map(
        |(seed, count, ranks, factor, sources, to_partial, misaligned, alias)| Case {
            seed,
            count,
            ranks,
            factor,
            sources,
            to_partial,
            misaligned,
            alias,
        },
    )
}

/// Elements of `dtype`: any bits, ordinary numbers, and for floats the special ones.
fn fill(random: &mut Random, dtype: DType, count: usize) -> Vec<u8> {
    let style = random.below(3);
    let mut bytes = Vec::with_capacity(count * dtype.size());
    while bytes.len() < count * dtype.size() {
        let any = random.next();
        let ordinary = (any % 2001) as f64 / 8.0 - 100.0;
        let special = [0.0, -0.0, f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1.0, 3e-39];
        let special = special[(any >> 32) as usize % 8];
        let value = match style {
            0 => None,
            1 => Some(ordinary),
            _ => Some(if any.is_multiple_of(4) { special } else { ordinary }),
        };
        match (dtype, value) {
            (DType::Bool, _) => bytes.push(if any.is_multiple_of(2) { 0 } else { (any >> 8) as u8 }),
            (_, None) => bytes.extend_from_slice(&any.to_ne_bytes()[..dtype.size().min(8)]),
            (DType::F64 | DType::C128, Some(value)) => bytes.extend_from_slice(&value.to_ne_bytes()),
            (DType::F32 | DType::C64, Some(value)) => bytes.extend_from_slice(&(value as f32).to_ne_bytes()),
            (DType::F16 | DType::BF16, Some(value)) => {
                bytes.extend_from_slice(&naive::narrow(dtype, value as f32).to_ne_bytes());
            }
            (DType::F8E4M3FN | DType::F8E5M2, Some(value)) => bytes.push(naive::narrow(dtype, value as f32) as u8),
            (_, Some(value)) => bytes.extend_from_slice(&(value as i64).to_le_bytes()[..dtype.size()]),
        }
    }
    bytes.truncate(count * dtype.size());
    bytes
}

const GUARD: u8 = 0xa5;

fn check(dtype: DType, reduction: Reduction, case: &Case) -> Result<(), TestCaseError> {
    let reduction = if let Reduction::PreMulSum(_) = reduction { Reduction::PreMulSum(case.factor) } else { reduction };
    let of = |partial: bool| if partial { dtype.accumulator() } else { dtype };
    let mut random = Random(case.seed);
    // Each source in its own memory, at its misalignment, with a guard behind it.
    let data: Vec<Vec<u8>> =
        case.sources.iter().map(|&(partial, _)| fill(&mut random, of(partial), case.count)).collect();
    let mut memory: Vec<Vec<u8>> = data
        .iter()
        .zip(&case.sources)
        .map(|(data, &(_, at))| [&vec![GUARD; at][..], data, &[GUARD; 64]].concat())
        .collect();
    let target_size = of(case.to_partial).size();
    let target_bytes = case.count * target_size;
    let mut target_memory = vec![GUARD; case.misaligned + target_bytes + 64];

    let alias = case.alias.map(|alias| alias.index(data.len())).filter(|&alias| {
        let (partial, _) = case.sources[alias];
        of(partial) == of(case.to_partial)
    });
    let pointers: Vec<*mut u8> =
        memory.iter_mut().zip(&case.sources).map(|(memory, &(_, at))| memory[at..].as_mut_ptr()).collect();
    let sources: Vec<Source> = pointers
        .iter()
        .zip(&case.sources)
        .map(|(&data, &(partial, _))| Source { data: data.cast_const(), partial })
        .collect();
    let into = alias.map_or(target_memory[case.misaligned..].as_mut_ptr(), |alias| pointers[alias]);
    let target = if case.to_partial { Target::Partial(into) } else { Target::Raw(into) };
    // SAFETY: sources and target have `count` elements of their types; the target is its own memory or a source's.
    unsafe { reduce(reduction, dtype, case.ranks, &sources, target, case.count) };

    let (at, after) = match alias {
        Some(alias) => (case.sources[alias].1, &memory[alias]),
        None => (case.misaligned, &target_memory),
    };
    prop_assert!(after[..at].iter().chain(&after[at + target_bytes..]).all(|&byte| byte == GUARD));
    for (index, (memory, data)) in memory.iter().zip(&data).enumerate() {
        let at = case.sources[index].1;
        prop_assert!(alias == Some(index) || memory[at..at + data.len()] == data[..], "source {index} changed");
    }
    for element in 0..case.count {
        let parts: Vec<(&[u8], bool)> = data
            .iter()
            .zip(&case.sources)
            .map(|(data, &(partial, _))| {
                let size = of(partial).size();
                (&data[element * size..][..size], partial)
            })
            .collect();
        let want = naive::reduce(reduction, dtype, case.ranks, &parts, case.to_partial);
        let got = &after[at + element * target_size..][..target_size];
        prop_assert_eq!(got, &want[..], "{} {} element {} of {:02x?}", dtype, reduction, element, parts);
    }
    Ok(())
}

#[test]
fn every_reduction_of_every_type_is_the_naive_one() {
    let reductions = (0..=8).map(|code| Reduction::from_code(code, 1.0).unwrap());
    for reduction in reductions {
        for &dtype in DType::ALL.iter().filter(|&&dtype| reduction.supports(dtype)) {
            let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::with_cases(40) });
            if let Err(error) = runner.run(&cases(), |case| check(dtype, reduction, &case)) {
                panic!("{dtype} {reduction}: {error}");
            }
        }
    }
}

/// Both sources and the target may be one memory.
#[test]
fn sources_may_be_the_target_twice() {
    let mut data: Vec<f32> = (0..3000).map(|at| at as f32).collect();
    let into = data.as_mut_ptr().cast::<u8>();
    let source = Source { data: into.cast_const(), partial: false };
    // SAFETY: the one memory has 3000 elements.
    unsafe { reduce(Reduction::Sum, DType::F32, 2, &[source, source], Target::Raw(into), 3000) };
    assert!(data.iter().enumerate().all(|(at, &value)| value == 2.0 * at as f32));
}

/// What a ring sends on as partial sums ends as the same bits as one reduction of all: rounding happens once.
#[test]
fn partial_sums_lose_nothing() {
    for dtype in [DType::F16, DType::BF16, DType::F8E4M3FN, DType::F8E5M2] {
        for reduction in [Reduction::Sum, Reduction::Avg, Reduction::PreMulSum(0.3)] {
            let mut random = Random(7);
            let count = 3000;
            let data: Vec<Vec<u8>> = (0..4).map(|_| fill(&mut random, dtype, count)).collect();
            let raw = |data: &Vec<u8>| Source { data: data.as_ptr(), partial: false };
            let (mut whole, mut ring) = (vec![0u8; count * dtype.size()], vec![0u8; count * dtype.size()]);
            let mut sum = vec![0f32; count];
            let memory = sum.as_mut_ptr().cast::<u8>();
            let partial = Source { data: memory.cast_const(), partial: true };
            let call = |sources: &[Source], target| {
                // SAFETY: every memory has `count` elements of its type.
                unsafe { reduce(reduction, dtype, 4, sources, target, count) }
            };
            call(&data.iter().map(raw).collect::<Vec<_>>(), Target::Raw(whole.as_mut_ptr()));
            call(&[raw(&data[0])], Target::Partial(memory));
            call(&[partial, raw(&data[1])], Target::Partial(memory));
            call(&[partial, raw(&data[2])], Target::Partial(memory));
            call(&[partial, raw(&data[3])], Target::Raw(ring.as_mut_ptr()));
            assert_eq!(ring, whole, "{dtype} {reduction}");
        }
    }
}
