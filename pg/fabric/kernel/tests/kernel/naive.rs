//! What one element's reduction is, said as plainly as possible.

use std::sync::LazyLock;

use half::{bf16, f16};
use podring_collective::{DType, Reduction};

/// The values of the 256 bit patterns of float8_e4m3fn and float8_e5m2, as torch has them.
static E4M3FN: LazyLock<Vec<f32>> = LazyLock::new(|| values(include_str!("../data/from_float8_e4m3fn.txt")));
static E5M2: LazyLock<Vec<f32>> = LazyLock::new(|| values(include_str!("../data/from_float8_e5m2.txt")));

fn values(text: &str) -> Vec<f32> {
    rows(text).into_iter().map(|(_, value)| f32::from_bits(value)).collect()
}

/// The rows of one of the data files.
pub fn rows(text: &str) -> Vec<(u32, u32)> {
    let number = |word: &str| u32::from_str_radix(word, 16).unwrap();
    text.lines().map(|line| line.split_once(' ').map(|(a, b)| (number(a), number(b))).unwrap()).collect()
}

/// The float32 of an element of a narrow float type.
pub fn widen(dtype: DType, bits: u16) -> f32 {
    match dtype {
        DType::F16 => f16::from_bits(bits).to_f32(),
        DType::BF16 => bf16::from_bits(bits).to_f32(),
        DType::F8E4M3FN => E4M3FN[usize::from(bits)],
        DType::F8E5M2 => E5M2[usize::from(bits)],
        _ => unreachable!(),
    }
}

/// The nearest element of a narrow float type.
pub fn narrow(dtype: DType, value: f32) -> u16 {
    if value.is_nan() {
        return match dtype {
            DType::F16 => 0x7e00,
            DType::BF16 => 0x7fc0,
            _ => 0x7f,
        };
    }
    match dtype {
        DType::F16 => f16::from_f32(value).to_bits(),
        DType::BF16 => bf16::from_f32(value).to_bits(),
        // Infinity stands where the next number, 65536, would be.
        DType::F8E5M2 => nearest(value, |code| if code == 0x7c { 65536.0 } else { f64::from(E5M2[code]) }, 0x7c),
        DType::F8E4M3FN => nearest(value, |code| f64::from(E4M3FN[code]), 0x7e),
        _ => unreachable!(),
    }
}

/// The code in `0..=last` whose value is nearest, an even one in case of a tie, with the sign in bit 7.
fn nearest(value: f32, of: impl Fn(usize) -> f64, last: usize) -> u16 {
    let magnitude = f64::from(value.abs()).min(of(last));
    let distance = |code: usize| (of(code) - magnitude).abs();
    let better = |a: usize, b: usize| distance(b) < distance(a) || (distance(b) == distance(a) && b.is_multiple_of(2));
    let code = (0..=last).reduce(|a, b| if better(a, b) { b } else { a }).unwrap();
    code as u16 | if value.is_sign_negative() { 0x80 } else { 0 }
}

/// One element of each source, in order, and whether it is a partial result.
pub type Parts<'a> = &'a [(&'a [u8], bool)];

/// The element that `parts` reduce to.
pub fn reduce(reduction: Reduction, dtype: DType, ranks: u32, parts: Parts<'_>, to_partial: bool) -> Vec<u8> {
    let adjusts = match reduction {
        Reduction::PreMulSum(_) => parts.iter().any(|part| !part.1),
        Reduction::Avg => !to_partial && ranks > 1,
        _ => dtype == DType::Bool,
    };
    if let [(only, partial)] = parts
        && !adjusts
        && !to_partial
        && (!partial || dtype.accumulator() == dtype)
    {
        return only.to_vec();
    }
    let divide = reduction == Reduction::Avg && !to_partial;
    match dtype {
        DType::Bool => vec![boolean(reduction, parts)],
        DType::U8 | DType::U16 | DType::U32 | DType::U64 => integer(reduction, false, divide.then_some(ranks), parts),
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => integer(reduction, true, divide.then_some(ranks), parts),
        DType::F32 | DType::C64 => reals::<f32>(reduction, dtype.is_complex(), divide.then_some(ranks), parts),
        DType::F64 | DType::C128 => reals::<f64>(reduction, dtype.is_complex(), divide.then_some(ranks), parts),
        _ => {
            let wide: Vec<[u8; 4]> = parts
                .iter()
                .map(|&(bytes, partial)| match (partial, bytes) {
                    (true, _) => bytes.try_into().unwrap(),
                    (false, &[a]) => widen(dtype, a.into()).to_ne_bytes(),
                    (false, _) => widen(dtype, u16::from_ne_bytes(bytes.try_into().unwrap())).to_ne_bytes(),
                })
                .collect();
            let parts: Vec<_> = wide.iter().zip(parts).map(|(bytes, part)| (&bytes[..], part.1)).collect();
            let result = reals::<f32>(reduction, false, divide.then_some(ranks), &parts);
            if to_partial {
                return result;
            }
            let bits = narrow(dtype, f32::from_ne_bytes(result.try_into().unwrap()));
            if dtype.size() == 1 { vec![bits as u8] } else { bits.to_ne_bytes().to_vec() }
        }
    }
}

fn boolean(reduction: Reduction, parts: Parts<'_>) -> u8 {
    let trues = parts.iter().filter(|part| part.0[0] != 0).count();
    u8::from(match reduction {
        Reduction::Sum | Reduction::Max | Reduction::BitOr => trues > 0,
        Reduction::Product | Reduction::Min | Reduction::BitAnd => trues == parts.len(),
        Reduction::BitXor => trues % 2 == 1,
        _ => unreachable!(),
    })
}

fn integer(reduction: Reduction, signed: bool, ranks: Option<u32>, parts: Parts<'_>) -> Vec<u8> {
    let size = parts[0].0.len();
    let unused = 128 - 8 * size as u32;
    // The value that the low bytes of a number have in the type.
    let wrap =
        |value: i128| if signed { value << unused >> unused } else { ((value as u128) << unused >> unused) as i128 };
    let read = |bytes: &[u8]| {
        let mut wide = [0; 16];
        wide[..size].copy_from_slice(bytes);
        wrap(i128::from_le_bytes(wide))
    };
    let numbers = parts.iter().map(|part| read(part.0));
    let result = match reduction {
        Reduction::Sum => numbers.sum(),
        Reduction::Avg => wrap(numbers.sum()) / i128::from(ranks.unwrap_or(1)),
        Reduction::Product => numbers.reduce(|a, b| wrap(a.wrapping_mul(b))).unwrap(),
        Reduction::Min => numbers.min().unwrap(),
        Reduction::Max => numbers.max().unwrap(),
        Reduction::BitAnd => numbers.reduce(|a, b| a & b).unwrap(),
        Reduction::BitOr => numbers.reduce(|a, b| a | b).unwrap(),
        Reduction::BitXor => numbers.reduce(|a, b| a ^ b).unwrap(),
        Reduction::PreMulSum(_) => unreachable!(),
    };
    result.to_le_bytes()[..size].to_vec()
}

trait Real: Copy + std::ops::Mul<Output = Self> + std::ops::Add<Output = Self> + std::ops::Sub<Output = Self> {
    fn read(bytes: &[u8]) -> Self;
    fn write(self) -> Vec<u8>;
    fn factor(factor: f64) -> Self;
    fn over(self, ranks: u32) -> Self;
    fn is_nan(self) -> bool;
    fn below(self, other: Self) -> bool;
}

macro_rules! real {
    ($($float:ident, $nan:literal;)*) => {$(
        impl Real for $float {
            fn read(bytes: &[u8]) -> Self { $float::from_ne_bytes(bytes.try_into().unwrap()) }
            fn write(self) -> Vec<u8> {
                (if self.is_nan() { $float::from_bits($nan) } else { self }).to_ne_bytes().to_vec()
            }
            fn factor(factor: f64) -> Self { factor as $float }
            fn over(self, ranks: u32) -> Self { self / ranks as $float }
            fn is_nan(self) -> bool { self != self }
            fn below(self, other: Self) -> bool { self.total_cmp(&other).is_lt() }
        }
    )*};
}

real! {
    f32, 0x7fc0_0000;
    f64, 0x7ff8_0000_0000_0000;
}

fn reals<T: Real>(reduction: Reduction, complex: bool, ranks: Option<u32>, parts: Parts<'_>) -> Vec<u8> {
    let size = size_of::<T>();
    let lanes = if complex { 2 } else { 1 };
    let numbers = parts.iter().map(|&(bytes, partial)| {
        let mut number: Vec<T> = bytes.chunks(size).map(T::read).collect();
        if let (Reduction::PreMulSum(factor), false) = (reduction, partial) {
            number.iter_mut().for_each(|lane| *lane = *lane * T::factor(factor));
        }
        number
    });
    let prefer = |a: T, b: T, b_wins: bool| if a.is_nan() || (!b.is_nan() && !b_wins) { a } else { b };
    let result = numbers.reduce(|a, b| match reduction {
        Reduction::Product if complex => vec![a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]],
        _ => (0..lanes)
            .map(|lane| (a[lane], b[lane]))
            .map(|(a, b)| match reduction {
                Reduction::Sum | Reduction::Avg | Reduction::PreMulSum(_) => a + b,
                Reduction::Product => a * b,
                Reduction::Min => prefer(a, b, b.below(a)),
                Reduction::Max => prefer(a, b, a.below(b)),
                _ => unreachable!(),
            })
            .collect(),
    });
    result.unwrap().into_iter().flat_map(|lane| ranks.map_or(lane, |ranks| lane.over(ranks)).write()).collect()
}
