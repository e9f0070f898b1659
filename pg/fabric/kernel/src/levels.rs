//! Every level of the instruction set gives the same bits.

use podring_collective::{DType, Reduction};

use super::element::{Element, Op};
use super::reduce::{Detected, Job, Level, Source, Target, combine, reduce_on};

/// The level that every CPU of the architecture has.
struct Base;

impl Level for Base {
    unsafe fn run<E: Element, O: Op<E::Acc>, const SCALED: bool>(job: &Job<'_>) {
        // SAFETY: passed on.
        unsafe { combine::<E, O, SCALED, false>(job) }
    }
}

/// The one in between, which [`Detected`] passes over on a CPU that has AVX-512.
#[cfg(target_arch = "x86_64")]
struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Level for Avx2 {
    unsafe fn run<E: Element, O: Op<E::Acc>, const SCALED: bool>(job: &Job<'_>) {
        #[multiversion::target("x86_64+avx2+bmi1+bmi2+f16c")]
        unsafe fn run<E: Element, O: Op<E::Acc>, const SCALED: bool>(job: &Job<'_>) {
            // SAFETY: passed on.
            unsafe { combine::<E, O, SCALED, true>(job) }
        }
        // SAFETY: the test asks the CPU before it uses this.
        unsafe { run::<E, O, SCALED>(job) }
    }
}

fn result<L: Level>(reduction: Reduction, dtype: DType, sources: &[Source], count: usize, to_partial: bool) -> Vec<u8> {
    let size = if to_partial { dtype.accumulator().size() } else { dtype.size() };
    let mut bytes = vec![0u8; count * size];
    let into = bytes.as_mut_ptr();
    let target = if to_partial { Target::Partial(into) } else { Target::Raw(into) };
    // SAFETY: the test's sources have `count` elements, as has the target.
    unsafe { reduce_on::<L>(reduction, dtype, 6, sources, target, count) };
    bytes
}

#[test]
fn agree_bit_for_bit() {
    let count = 40_003;
    // Bits of every kind: full-period mixing of a counter, so that NaNs, infinities and subnormals of all types occur.
    let noise = |seed: u64| -> Vec<u8> {
        let word = |at: u64| {
            (at ^ seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31).wrapping_mul(0xd6e8_feb8_6659_fd93)
        };
        (0..count as u64 * 2).flat_map(|at| word(at).to_ne_bytes()).collect()
    };
    let data: Vec<Vec<u8>> = (1..=4).map(noise).collect();
    for reduction in (0..=8).map(|code| Reduction::from_code(code, 0.7).unwrap()) {
        for &dtype in DType::ALL.iter().filter(|&&dtype| reduction.supports(dtype)) {
            for (n, with_partials, to_partial) in
                [(1, true, false), (2, false, false), (2, true, true), (2, true, false), (4, true, false)]
            {
                let sources: Vec<Source> = data[..n]
                    .iter()
                    .enumerate()
                    .map(|(at, data)| Source { data: data.as_ptr(), partial: with_partials && at % 2 == 0 })
                    .collect();
                let base = result::<Base>(reduction, dtype, &sources, count, to_partial);
                let best = result::<Detected>(reduction, dtype, &sources, count, to_partial);
                assert!(base == best, "{dtype} {reduction} of {n} differs");
                #[cfg(target_arch = "x86_64")]
                if is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("bmi2")
                {
                    let middle = result::<Avx2>(reduction, dtype, &sources, count, to_partial);
                    assert!(base == middle, "{dtype} {reduction} of {n} differs with AVX2");
                }
            }
        }
    }
}
