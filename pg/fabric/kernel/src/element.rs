//! Element types as the reduce loops see them, and the operations on their accumulators.

use super::narrow;

/// How an element type is read, combined, divided and written. Everything is inlined into vectorised loops.
pub(super) trait Element {
    /// What lies in memory.
    type Stored: Copy;
    /// What is computed with, and what partial results are made of.
    type Acc: Copy;
    /// A factor in the accumulator's precision.
    type Factor: Copy;
    /// `Acc` is another type than `Stored`.
    const WIDENS: bool = false;
    /// This is float16, for which there are conversion instructions.
    const IS_F16: bool = false;
    /// Two neighbours can be read and written as one word, which spares the shuffles of widening and narrowing.
    const PAIRS: bool = false;

    /// Reads an element.
    fn load(stored: Self::Stored) -> Self::Acc;
    /// The final element: rounded, NaN canonical.
    fn store(acc: Self::Acc) -> Self::Stored;
    /// Two elements, in order, from the word they make up. For [`Element::PAIRS`] only.
    #[inline(always)]
    fn load_pair(_: u32) -> [Self::Acc; 2] {
        unreachable!()
    }
    /// The word of two final elements. For [`Element::PAIRS`] only.
    #[inline(always)]
    fn store_pair(_: [Self::Acc; 2]) -> u32 {
        unreachable!()
    }
    /// The partial result that travels: NaN canonical.
    fn settle(acc: Self::Acc) -> Self::Acc;
    /// Multiplies by PREMUL_SUM's factor.
    fn scale(acc: Self::Acc, factor: Self::Factor) -> Self::Acc;
    /// The factor, rounded to the precision that is computed in.
    fn factor(factor: f64) -> Self::Factor;
    /// Applies AVG's division to all of `block`.
    fn divide(block: &mut [Self::Acc], ranks: u32);
}

/// Combines two accumulators. Every implementation is commutative to the bit, up to which NaN a NaN is.
pub(super) trait Op<A> {
    /// The combination.
    fn apply(a: A, b: A) -> A;
}

/// Sum; integers wrap.
pub(super) struct Sum;
/// Product; integers wrap.
pub(super) struct Product;
/// Minimum; NaN wins, then -0.0 is less than +0.0.
pub(super) struct Min;
/// Maximum; NaN wins, then +0.0 is more than -0.0.
pub(super) struct Max;
/// Bitwise and.
pub(super) struct And;
/// Bitwise or.
pub(super) struct Or;
/// Bitwise exclusive or.
pub(super) struct Xor;

macro_rules! integers {
    ($($int:ty: $divide:ident;)*) => {$(
        impl Element for $int {
            type Stored = $int;
            type Acc = $int;
            type Factor = ();

            #[inline(always)]
            fn load(stored: $int) -> $int { stored }
            #[inline(always)]
            fn store(acc: $int) -> $int { acc }
            #[inline(always)]
            fn settle(acc: $int) -> $int { acc }
            #[inline(always)]
            fn scale(acc: $int, (): ()) -> $int { acc }
            #[inline(always)]
            fn factor(_: f64) {}
            #[inline(always)]
            fn divide(block: &mut [$int], ranks: u32) { $divide!($int, block, ranks) }
        }

        impl Op<$int> for Sum {
            #[inline(always)]
            fn apply(a: $int, b: $int) -> $int { a.wrapping_add(b) }
        }
        impl Op<$int> for Product {
            #[inline(always)]
            fn apply(a: $int, b: $int) -> $int { a.wrapping_mul(b) }
        }
        impl Op<$int> for Min {
            #[inline(always)]
            fn apply(a: $int, b: $int) -> $int { a.min(b) }
        }
        impl Op<$int> for Max {
            #[inline(always)]
            fn apply(a: $int, b: $int) -> $int { a.max(b) }
        }
        impl Op<$int> for And {
            #[inline(always)]
            fn apply(a: $int, b: $int) -> $int { a & b }
        }
        impl Op<$int> for Or {
            #[inline(always)]
            fn apply(a: $int, b: $int) -> $int { a | b }
        }
        impl Op<$int> for Xor {
            #[inline(always)]
            fn apply(a: $int, b: $int) -> $int { a ^ b }
        }
    )*};
}

/// Integers of up to 32 bits divide as float64, which vectorises. Truncating the rounded quotient is exact: one below
/// an integer k is k - 1/ranks or less, while k's neighbours in float64 are at most k * 2^-53 away, and k * ranks stays
/// below 2^33.
macro_rules! divide_as_f64 {
    ($int:ty, $block:expr, $ranks:expr) => {{
        let ranks = f64::from($ranks);
        for acc in $block {
            // SAFETY: the quotient is finite (ranks > 0), and no larger in magnitude than `acc`.
            *acc = unsafe { (f64::from(*acc) / ranks).to_int_unchecked() };
        }
    }};
}

macro_rules! divide_exactly {
    ($int:ty, $block:expr, $ranks:expr) => {{
        let ranks = <$int>::from($ranks);
        for acc in $block {
            *acc /= ranks;
        }
    }};
}

integers! {
    u8: divide_as_f64;
    i8: divide_as_f64;
    u16: divide_as_f64;
    i16: divide_as_f64;
    u32: divide_as_f64;
    i32: divide_as_f64;
    u64: divide_exactly;
    i64: divide_exactly;
}

/// A bool: any byte but 0 is true when read; 0 or 1 is written.
pub(super) struct Bool;

impl Element for Bool {
    type Stored = u8;
    type Acc = u8;
    type Factor = ();

    #[inline(always)]
    fn load(stored: u8) -> u8 {
        u8::from(stored != 0)
    }
    #[inline(always)]
    fn store(acc: u8) -> u8 {
        acc
    }
    #[inline(always)]
    fn settle(acc: u8) -> u8 {
        acc
    }
    #[inline(always)]
    fn scale(acc: u8, (): ()) -> u8 {
        acc
    }
    #[inline(always)]
    fn factor(_: f64) {}
    #[inline(always)]
    fn divide(_: &mut [u8], _: u32) {}
}

macro_rules! floats {
    ($($float:ident, $nan:expr;)*) => {$(
        impl Element for $float {
            type Stored = $float;
            type Acc = $float;
            type Factor = $float;

            #[inline(always)]
            fn load(stored: $float) -> $float { stored }
            #[inline(always)]
            fn store(acc: $float) -> $float { Self::settle(acc) }
            #[inline(always)]
            fn settle(acc: $float) -> $float { if acc.is_nan() { $float::from_bits($nan) } else { acc } }
            #[inline(always)]
            fn scale(acc: $float, factor: $float) -> $float { acc * factor }
            #[inline(always)]
            fn factor(factor: f64) -> $float { factor as $float }
            #[inline(always)]
            fn divide(block: &mut [$float], ranks: u32) {
                let divisor = ranks as $float;
                if ranks.is_power_of_two() {
                    // The reciprocal is exact, so that the product is the same bits as the quotient.
                    let reciprocal = 1.0 / divisor;
                    for acc in block {
                        *acc *= reciprocal;
                    }
                } else {
                    for acc in block {
                        *acc /= divisor;
                    }
                }
            }
        }

        impl Op<$float> for Sum {
            #[inline(always)]
            fn apply(a: $float, b: $float) -> $float { a + b }
        }
        impl Op<$float> for Product {
            #[inline(always)]
            fn apply(a: $float, b: $float) -> $float { a * b }
        }
        impl Op<$float> for Min {
            #[inline(always)]
            fn apply(a: $float, b: $float) -> $float {
                if a < b {
                    a
                } else if b < a {
                    b
                } else {
                    // Equal (the same bits, or zeros: negative if one is) or unordered (bits set in a NaN keep it one).
                    $float::from_bits(a.to_bits() | b.to_bits())
                }
            }
        }
        impl Op<$float> for Max {
            #[inline(always)]
            fn apply(a: $float, b: $float) -> $float {
                if a > b {
                    a
                } else if b > a {
                    b
                } else if a == b {
                    $float::from_bits(a.to_bits() & b.to_bits())
                } else {
                    $float::from_bits($nan)
                }
            }
        }
    )*};
}

floats! {
    f32, narrow::NAN;
    f64, 0x7ff8_0000_0000_0000;
}

macro_rules! narrow_floats {
    ($($(#[$doc:meta])* $name:ident: $stored:ty, $from:path, $to:path, {$($more:tt)*};)*) => {$(
        $(#[$doc])*
        pub(super) struct $name;

        impl Element for $name {
            type Stored = $stored;
            type Acc = f32;
            type Factor = f32;
            const WIDENS: bool = true;
            $($more)*

            #[inline(always)]
            fn load(stored: $stored) -> f32 { $from(stored) }
            #[inline(always)]
            fn store(acc: f32) -> $stored { $to(acc) }
            #[inline(always)]
            fn settle(acc: f32) -> f32 { f32::settle(acc) }
            #[inline(always)]
            fn scale(acc: f32, factor: f32) -> f32 { acc * factor }
            #[inline(always)]
            fn factor(factor: f64) -> f32 { factor as f32 }
            #[inline(always)]
            fn divide(block: &mut [f32], ranks: u32) { f32::divide(block, ranks) }
        }
    )*};
}

narrow_floats! {
    /// IEEE half precision.
    F16: u16, narrow::from_f16, narrow::to_f16, {
        const IS_F16: bool = true;
    };
    /// bfloat16.
    BF16: u16, narrow::from_bf16, narrow::to_bf16, {
        const PAIRS: bool = true;

        #[inline(always)]
        fn load_pair(word: u32) -> [f32; 2] {
            narrow::from_bf16_pair(word)
        }
        #[inline(always)]
        fn store_pair(pair: [f32; 2]) -> u32 {
            narrow::to_bf16_pair(pair)
        }
    };
    /// 8-bit float, finite plus NaN.
    E4M3FN: u8, narrow::from_e4m3fn, narrow::to_e4m3fn, {};
    /// 8-bit float, IEEE-like.
    E5M2: u8, narrow::from_e5m2, narrow::to_e5m2, {};
}

/// A complex number, for the product only: sums are those of twice as many reals.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Complex<T> {
    re: T,
    im: T,
}

macro_rules! complex {
    ($($float:ident)*) => {$(
        impl Element for Complex<$float> {
            type Stored = Self;
            type Acc = Self;
            type Factor = ();

            #[inline(always)]
            fn load(stored: Self) -> Self { stored }
            #[inline(always)]
            fn store(acc: Self) -> Self { Self::settle(acc) }
            #[inline(always)]
            fn settle(acc: Self) -> Self { Complex { re: $float::settle(acc.re), im: $float::settle(acc.im) } }
            #[inline(always)]
            fn scale(acc: Self, (): ()) -> Self { acc }
            #[inline(always)]
            fn factor(_: f64) {}
            #[inline(always)]
            fn divide(_: &mut [Self], _: u32) {}
        }

        impl Op<Complex<$float>> for Product {
            #[inline(always)]
            fn apply(a: Complex<$float>, b: Complex<$float>) -> Complex<$float> {
                Complex { re: a.re * b.re - a.im * b.im, im: a.re * b.im + a.im * b.re }
            }
        }
    )*};
}

complex! { f32 f64 }
