//! Naive arithmetic on bytes: one element type at a time, left to right, in the widest type.

use half::{bf16, f16};
use podring_collective::{DType, Reduction};

/// A number of any type.
#[derive(Clone, Copy, Debug)]
pub enum Number {
    Int(i128),
    Float(f64),
    Complex(f64, f64),
}

fn eight_bits(byte: u8, exponent_bits: u32, finite: bool) -> f64 {
    let mantissa_bits = 7 - exponent_bits;
    let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(byte >> mantissa_bits) & ((1 << exponent_bits) - 1);
    let mantissa = i32::from(byte) & ((1 << mantissa_bits) - 1);
    let bias = (1 << (exponent_bits - 1)) - 1;
    let top = (1 << exponent_bits) - 1;
    let full = (1 << mantissa_bits) - 1;
    if finite && exponent == top && mantissa == full {
        return f64::NAN;
    }
    if !finite && exponent == top {
        return if mantissa == 0 { sign * f64::INFINITY } else { f64::NAN };
    }
    let scale = f64::from(1 << mantissa_bits);
    let value = if exponent == 0 {
        f64::from(mantissa) / scale * 2f64.powi(1 - bias)
    } else {
        (1.0 + f64::from(mantissa) / scale) * 2f64.powi(exponent - bias)
    };
    sign * value
}

pub fn read(dtype: DType, bytes: &[u8]) -> Number {
    macro_rules! le {
        ($ty:ty, $at:expr) => {
            <$ty>::from_le_bytes(bytes[$at..$at + size_of::<$ty>()].try_into().unwrap())
        };
    }
    match dtype {
        DType::U8 | DType::Bool => Number::Int(bytes[0].into()),
        DType::I8 => Number::Int((bytes[0] as i8).into()),
        DType::I16 => Number::Int(le!(i16, 0).into()),
        DType::U16 => Number::Int(le!(u16, 0).into()),
        DType::I32 => Number::Int(le!(i32, 0).into()),
        DType::U32 => Number::Int(le!(u32, 0).into()),
        DType::I64 => Number::Int(le!(i64, 0).into()),
        DType::U64 => Number::Int(le!(u64, 0).into()),
        DType::F16 => Number::Float(f16::from_bits(le!(u16, 0)).into()),
        DType::BF16 => Number::Float(bf16::from_bits(le!(u16, 0)).into()),
        DType::F32 => Number::Float(le!(f32, 0).into()),
        DType::F64 => Number::Float(le!(f64, 0)),
        DType::C64 => Number::Complex(le!(f32, 0).into(), le!(f32, 4).into()),
        DType::C128 => Number::Complex(le!(f64, 0), le!(f64, 8)),
        DType::F8E4M3FN => Number::Float(eight_bits(bytes[0], 4, true)),
        DType::F8E5M2 => Number::Float(eight_bits(bytes[0], 5, false)),
        other => panic!("{other} is not reduced"),
    }
}

/// An integer in the range of its type, as the type wraps.
pub fn wrap(dtype: DType, value: i128) -> i128 {
    match dtype {
        DType::I8 => (value as i8).into(),
        DType::I16 => (value as i16).into(),
        DType::I32 => (value as i32).into(),
        DType::I64 => (value as i64).into(),
        DType::U8 => (value as u8).into(),
        DType::U16 => (value as u16).into(),
        DType::U32 => (value as u32).into(),
        DType::U64 => (value as u64).into(),
        _ => value,
    }
}

pub fn reduce(dtype: DType, reduction: Reduction, values: &[Number]) -> Number {
    let count = values.len() as i128;
    match values[0] {
        Number::Int(_) => {
            let ints: Vec<i128> = values
                .iter()
                .map(|value| match value {
                    Number::Int(int) => *int,
                    other => panic!("{other:?}"),
                })
                .collect();
            let fold = |start: i128, step: fn(i128, i128) -> i128| {
                ints.iter().fold(start, |so_far, &int| wrap(dtype, step(so_far, int)))
            };
            Number::Int(match (reduction, dtype) {
                (Reduction::Sum | Reduction::BitOr, DType::Bool) => i128::from(ints.contains(&1)),
                (Reduction::Product | Reduction::BitAnd, DType::Bool) => i128::from(!ints.contains(&0)),
                (Reduction::Sum, _) => fold(0, |a, b| a + b),
                (Reduction::Avg, _) => wrap(dtype, ints.iter().fold(0, |a, b| wrap(dtype, a + b)) / count),
                (Reduction::Product, _) => fold(1, i128::wrapping_mul),
                (Reduction::Min, _) => *ints.iter().min().unwrap(),
                (Reduction::Max, _) => *ints.iter().max().unwrap(),
                (Reduction::BitAnd, _) => ints.iter().fold(-1, |a, b| a & b),
                (Reduction::BitOr, _) => ints.iter().fold(0, |a, b| a | b),
                (Reduction::BitXor, _) => ints.iter().fold(0, |a, b| a ^ b),
                (other, _) => panic!("{other}"),
            })
        }
        Number::Float(_) => {
            let floats: Vec<f64> = values
                .iter()
                .map(|value| match value {
                    Number::Float(float) => *float,
                    other => panic!("{other:?}"),
                })
                .collect();
            let any_nan = floats.iter().any(|float| float.is_nan());
            Number::Float(match reduction {
                Reduction::Sum => floats.iter().sum(),
                Reduction::Avg => floats.iter().sum::<f64>() / count as f64,
                Reduction::PreMulSum(factor) => floats.iter().map(|float| float * factor).sum(),
                Reduction::Product => floats.iter().product(),
                Reduction::Min | Reduction::Max if any_nan => f64::NAN,
                Reduction::Min => floats.iter().copied().fold(f64::INFINITY, f64::min),
                Reduction::Max => floats.iter().copied().fold(f64::NEG_INFINITY, f64::max),
                other => panic!("{other}"),
            })
        }
        Number::Complex(..) => {
            let start = if reduction == Reduction::Product { (1.0, 0.0) } else { (0.0, 0.0) };
            let (real, imaginary) = values.iter().fold(start, |(a, b), value| match (reduction, value) {
                (Reduction::Product, Number::Complex(c, d)) => (a * c - b * d, a * d + b * c),
                (Reduction::PreMulSum(factor), Number::Complex(c, d)) => (a + factor * c, b + factor * d),
                (_, Number::Complex(c, d)) => (a + c, b + d),
                (_, other) => panic!("{other:?}"),
            });
            let scale = if reduction == Reduction::Avg { 1.0 / count as f64 } else { 1.0 };
            Number::Complex(real * scale, imaginary * scale)
        }
    }
}

/// Half the distance between neighbours relative to the value: 2^-(mantissa bits + 1).
pub fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F8E5M2 => 2f64.powi(-3),
        DType::F8E4M3FN => 2f64.powi(-4),
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        DType::F32 | DType::C64 => 2f64.powi(-24),
        _ => 2f64.powi(-53),
    }
}

/// Whether `got` is `expected` up to `slack`; infinities and NaN must be themselves.
pub fn close(got: f64, expected: f64, slack: f64) -> bool {
    if expected.is_nan() || got.is_nan() {
        return expected.is_nan() && got.is_nan();
    }
    got == expected || (got - expected).abs() <= slack
}

/// The smallest positive number: a product may fall among those.
pub fn smallest(dtype: DType) -> f64 {
    match dtype {
        DType::F8E5M2 => 2f64.powi(-16),
        DType::F8E4M3FN => 2f64.powi(-9),
        DType::F16 => 2f64.powi(-24),
        _ => 0.0,
    }
}
