//! n sources into one target.

use std::mem::MaybeUninit;

use multiversion::multiversion;
use multiversion::target::target_cfg_f;
use podring_collective::{DType, Reduction};

use super::copy;
use super::element::{And, BF16, Bool, Complex, E4M3FN, E5M2, Element, F16, Max, Min, Op, Or, Product, Sum, Xor};
use super::narrow;

/// Elements to combine.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// The first element, at any alignment.
    pub data: *const u8,
    /// The elements are of `dtype.accumulator()`, and PREMUL_SUM's factor is in them already; else they are raw
    /// elements of the dtype.
    pub partial: bool,
}

/// Where the result goes, at any alignment.
#[derive(Clone, Copy, Debug)]
pub enum Target {
    /// Elements of the dtype, final: AVG divides by the number of ranks, narrow floats are rounded once.
    Raw(*mut u8),
    /// Elements of `dtype.accumulator()`, undivided.
    Partial(*mut u8),
}

/// Combines `sources`, first to last, into `target`: `count` elements each.
///
/// - Integers wrap; AVG divides the wrapped sum, toward zero. A bool is true if its byte isn't 0, and written as 0 or 1;
///   SUM and MAX are or, PRODUCT and MIN are and.
/// - 16- and 8-bit floats are combined in float32 and rounded once, to nearest even (float8_e4m3fn saturates, as torch's
///   conversion does). Other floats are combined in their own precision. PREMUL_SUM multiplies every raw source by the
///   factor rounded to that precision; AVG divides the sum.
/// - MIN and MAX give NaN if any source is NaN, and take -0.0 for less than +0.0.
/// - A NaN is written as the positive quiet NaN without payload, so that results don't depend on the CPU. The one
///   exception: a single source of the target's type with nothing to multiply or divide is copied as it is.
///
/// A pair of dtype and reduction for which [`Reduction::supports`] is false does nothing.
///
/// # Safety
/// Every source must be readable and the target writable for `count` elements of the type it is said to have. The target
/// must be disjoint from each source, or start where it starts and have the same element type. `ranks` isn't 0.
pub unsafe fn reduce(reduction: Reduction, dtype: DType, ranks: u32, sources: &[Source], target: Target, count: usize) {
    // SAFETY: passed on.
    unsafe { reduce_on::<Detected>(reduction, dtype, ranks, sources, target, count) }
}

/// What the loops need to know.
pub(super) struct Job<'a> {
    sources: &'a [Source],
    target: Target,
    count: usize,
    /// AVG's divisor, when this job divides.
    divide: Option<u32>,
    /// PREMUL_SUM's factor; 1 for other reductions.
    factor: f64,
}

/// A level of the instruction set to run the loops on.
pub(super) trait Level {
    /// Runs a job.
    ///
    /// # Safety
    /// As for [`reduce`], and the CPU has the level.
    unsafe fn run<E: Element, O: Op<E::Acc>, const SCALED: bool>(job: &Job<'_>);
}

/// The best level that this CPU has.
pub(super) struct Detected;

impl Level for Detected {
    #[inline(always)]
    unsafe fn run<E: Element, O: Op<E::Acc>, const SCALED: bool>(job: &Job<'_>) {
        // aarch64 has NEON at its base level, which is the default version. Levels that have fused multiply-adds leave them
        // unused: the compiler contracts nothing on its own.
        #[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+f16c", "x86_64+avx2+bmi1+bmi2+f16c"))]
        unsafe fn run<E: Element, O: Op<E::Acc>, const SCALED: bool>(job: &Job<'_>) {
            // SAFETY: passed on.
            unsafe { combine::<E, O, SCALED, { target_cfg_f!(target_feature = "f16c") }>(job) }
        }
        // SAFETY: passed on.
        unsafe { run::<E, O, SCALED>(job) }
    }
}

#[inline]
pub(super) unsafe fn reduce_on<L: Level>(
    reduction: Reduction,
    dtype: DType,
    ranks: u32,
    sources: &[Source],
    target: Target,
    count: usize,
) {
    debug_assert!(reduction.supports(dtype), "{dtype} has no {reduction}");
    debug_assert!(!sources.is_empty() && ranks > 0);
    if sources.is_empty() || count == 0 {
        return;
    }
    let raw = matches!(target, Target::Raw(_));
    let divide = (reduction == Reduction::Avg && raw && ranks > 1).then_some(ranks);
    let factor = if let Reduction::PreMulSum(factor) = reduction { Some(factor) } else { None };
    if let ([only], Target::Raw(into)) = (sources, target)
        && (!only.partial || dtype.accumulator() == dtype)
        && divide.is_none()
        && (factor.is_none() || only.partial)
        && dtype != DType::Bool
        && reduction.supports(dtype)
    {
        // SAFETY: passed on.
        return unsafe { copy(into, only.data, count * dtype.size()) };
    }
    let job = Job { sources, target, count, divide, factor: factor.unwrap_or(1.0) };
    // Sums of complex numbers are sums of twice as many reals.
    let pairs = Job { count: count.wrapping_mul(2), ..job };

    macro_rules! run {
        ($element:ty, $op:ty) => {
            run!($element, $op, false, job)
        };
        ($element:ty, $op:ty, $scaled:literal, $job:expr) => {
            // SAFETY: passed on; the element type and its size are the dtype's.
            unsafe { L::run::<$element, $op, $scaled>(&$job) }
        };
    }
    macro_rules! integer {
        ($signed:ty, $unsigned:ty, $own:ty) => {
            match reduction {
                // The same bits for both signs: one loop serves them.
                Reduction::Sum => run!($unsigned, Sum),
                Reduction::Product => run!($unsigned, Product),
                Reduction::BitAnd => run!($unsigned, And),
                Reduction::BitOr => run!($unsigned, Or),
                Reduction::BitXor => run!($unsigned, Xor),
                Reduction::Avg => run!($own, Sum),
                Reduction::Min => run!($own, Min),
                Reduction::Max => run!($own, Max),
                Reduction::PreMulSum(_) => {}
            }
        };
    }
    macro_rules! float {
        ($element:ty) => {
            match reduction {
                Reduction::Sum | Reduction::Avg => run!($element, Sum),
                Reduction::PreMulSum(_) => run!($element, Sum, true, job),
                Reduction::Product => run!($element, Product),
                Reduction::Min => run!($element, Min),
                Reduction::Max => run!($element, Max),
                Reduction::BitAnd | Reduction::BitOr | Reduction::BitXor => {}
            }
        };
    }
    macro_rules! complex {
        ($float:ty) => {
            match reduction {
                Reduction::Sum | Reduction::Avg => run!($float, Sum, false, pairs),
                Reduction::PreMulSum(_) => run!($float, Sum, true, pairs),
                Reduction::Product => run!(Complex<$float>, Product),
                _ => {}
            }
        };
    }
    match dtype {
        DType::U8 => integer!(i8, u8, u8),
        DType::I8 => integer!(i8, u8, i8),
        DType::I16 => integer!(i16, u16, i16),
        DType::I32 => integer!(i32, u32, i32),
        DType::I64 => integer!(i64, u64, i64),
        DType::U16 => integer!(i16, u16, u16),
        DType::U32 => integer!(i32, u32, u32),
        DType::U64 => integer!(i64, u64, u64),
        DType::Bool => match reduction {
            Reduction::Sum | Reduction::Max | Reduction::BitOr => run!(Bool, Or),
            Reduction::Product | Reduction::Min | Reduction::BitAnd => run!(Bool, And),
            Reduction::BitXor => run!(Bool, Xor),
            Reduction::Avg | Reduction::PreMulSum(_) => {}
        },
        DType::F16 => float!(F16),
        DType::BF16 => float!(BF16),
        DType::F32 => float!(f32),
        DType::F64 => float!(f64),
        DType::C64 => complex!(f32),
        DType::C128 => complex!(f64),
        DType::F8E4M3FN => float!(E4M3FN),
        DType::F8E5M2 => float!(E5M2),
        DType::F8E4M3FNUZ | DType::F8E5M2FNUZ | DType::F8E8M0FNU | DType::C32 => {}
    }
}

/// Bytes of accumulators that are worked on at a time: small beside a first-level cache, large beside a loop's start-up.
const BLOCK: usize = 8192;

/// Accumulators on the stack.
#[repr(C, align(64))]
struct Block(MaybeUninit<[u8; BLOCK]>);

/// The body of every level. `F16C` says that the level has instructions to convert float16.
#[inline(always)]
pub(super) unsafe fn combine<E: Element, O: Op<E::Acc>, const SCALED: bool, const F16C: bool>(job: &Job<'_>) {
    let factor = E::factor(job.factor);
    let scale = |acc: E::Acc| if SCALED { E::scale(acc, factor) } else { acc };
    let load = |stored: E::Stored| scale(E::load(stored));
    // Where partial results have the raw elements' type they are read by the same loops, unless these multiply.
    let widened = |source: &Source| (E::WIDENS || SCALED) && source.partial;
    let by_instruction = const { E::IS_F16 && F16C };

    if let ([a, b], Target::Raw(into), None) = (job.sources, job.target, job.divide)
        && !by_instruction
        && !widened(a)
        && !widened(b)
    {
        let mut done = 0;
        if E::PAIRS {
            let pairs = job.count / 2;
            let (a, b, into) = (a.data.cast(), b.data.cast(), into.cast());
            // SAFETY: the caller's promise; two elements of `Stored` are one u32.
            unsafe {
                zip_in_place(into, a, b, pairs, |a: u32, b: u32| {
                    let ([a0, a1], [b0, b1]) = (E::load_pair(a), E::load_pair(b));
                    E::store_pair([O::apply(scale(a0), scale(b0)), O::apply(scale(a1), scale(b1))])
                });
            }
            done = 2 * pairs;
        }
        let (a, b) = (a.data.cast::<E::Stored>().wrapping_add(done), b.data.cast::<E::Stored>().wrapping_add(done));
        let into = into.cast::<E::Stored>().wrapping_add(done);
        let count = job.count - done;
        // SAFETY: the caller's promise about sources and target.
        return unsafe { zip_in_place(into, a, b, count, |a, b| E::store(O::apply(load(a), load(b)))) };
    }

    let (mut block, mut second) = (Block(MaybeUninit::uninit()), Block(MaybeUninit::uninit()));
    let acc = block.0.as_mut_ptr().cast::<E::Acc>();
    let wide = second.0.as_mut_ptr().cast::<E::Acc>();
    let step = const { BLOCK / size_of::<E::Acc>() };
    let mut done = 0;
    while done < job.count {
        let count = step.min(job.count - done);
        let raw = |source: &Source| source.data.cast::<E::Stored>().wrapping_add(done);
        let partial = |source: &Source| source.data.cast::<E::Acc>().wrapping_add(done);
        // SAFETY: `done + count` elements of each source and the target are the caller's to give, and the blocks hold
        // `count` accumulators each; these are written before they are read. Only float16 is converted by instruction.
        unsafe {
            let rest = match job.sources {
                [a, b, rest @ ..] if !by_instruction && !widened(a) && !widened(b) => {
                    zip(acc, raw(a), raw(b), count, |a, b| O::apply(load(a), load(b)));
                    rest
                }
                [a, rest @ ..] => {
                    if widened(a) {
                        map(acc, partial(a), count, |partial: E::Acc| partial);
                    } else if by_instruction {
                        narrow::widen_f16s(acc.cast(), raw(a).cast(), count);
                        if SCALED {
                            map(acc, acc, count, scale);
                        }
                    } else {
                        map(acc, raw(a), count, load);
                    }
                    rest
                }
                [] => return,
            };
            for source in rest {
                if widened(source) {
                    zip_in_place(acc, acc, partial(source), count, O::apply);
                } else if by_instruction {
                    narrow::widen_f16s(wide.cast(), raw(source).cast(), count);
                    zip_in_place(acc, acc, wide, count, |acc, wide| O::apply(acc, scale(wide)));
                } else {
                    zip_in_place(acc, acc, raw(source), count, |acc, stored| O::apply(acc, load(stored)));
                }
            }
            if let Some(ranks) = job.divide {
                E::divide(std::slice::from_raw_parts_mut(acc, count), ranks);
            }
            match job.target {
                Target::Raw(into) if by_instruction => {
                    narrow::narrow_f16s(into.cast::<u16>().wrapping_add(done), acc.cast(), count);
                }
                Target::Raw(into) => map(into.cast::<E::Stored>().wrapping_add(done), acc, count, E::store),
                Target::Partial(into) => map(into.cast::<E::Acc>().wrapping_add(done), acc, count, E::settle),
            }
        }
        done += count;
    }
}

/// `into[i] = f(a[i])`.
#[inline(always)]
unsafe fn map<A: Copy, D>(into: *mut D, a: *const A, count: usize, f: impl Fn(A) -> D) {
    for i in 0..count {
        // SAFETY: the caller gives `count` elements of each.
        unsafe { into.add(i).write_unaligned(f(a.add(i).read_unaligned())) };
    }
}

/// `into[i] = f(a[i], b[i])`, for memory that is expected to be disjoint. (The compiler makes a fast loop that it enters
/// after comparing addresses, and a slow one for memory that overlaps.)
#[inline(always)]
unsafe fn zip<A: Copy, B: Copy, D>(into: *mut D, a: *const A, b: *const B, count: usize, f: impl Fn(A, B) -> D) {
    for i in 0..count {
        // SAFETY: the caller gives `count` elements of each.
        unsafe { into.add(i).write_unaligned(f(a.add(i).read_unaligned(), b.add(i).read_unaligned())) };
    }
}

/// [`zip`], with a fast loop also for `into` being one of the sources: the compiler must see one pointer, not two.
#[inline(always)]
unsafe fn zip_in_place<A: Copy, B: Copy, D>(
    into: *mut D,
    a: *const A,
    b: *const B,
    count: usize,
    f: impl Fn(A, B) -> D,
) {
    // SAFETY: passed on; the pointers exchanged are equal.
    unsafe {
        if into.cast_const().cast() == a {
            zip(into, into.cast_const().cast(), b, count, f);
        } else if into.cast_const().cast() == b {
            zip(into, a, into.cast_const().cast(), count, f);
        } else {
            zip(into, a, b, count, f);
        }
    }
}
