//! Reductions and which element types have them.

use std::fmt;

use crate::DType;

/// How elements of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reduction {
    /// Sum; on bool, logical or.
    Sum,
    /// Sum divided by the number of ranks; integers truncate toward zero.
    Avg,
    /// Product; on bool, logical and.
    Product,
    /// Minimum; a NaN anywhere gives NaN.
    Min,
    /// Maximum; a NaN anywhere gives NaN.
    Max,
    /// Bitwise and.
    BitAnd,
    /// Bitwise or.
    BitOr,
    /// Bitwise exclusive or.
    BitXor,
    /// Each rank's elements times this factor, then summed. Floating types only.
    PreMulSum(f64),
}

impl Reduction {
    /// The ABI code: SUM 0, AVG 1, PRODUCT 2, MIN 3, MAX 4, BAND 5, BOR 6, BXOR 7, PREMUL_SUM 8 (c10d's order).
    pub const fn code(self) -> u8 {
        match self {
            Reduction::Sum => 0,
            Reduction::Avg => 1,
            Reduction::Product => 2,
            Reduction::Min => 3,
            Reduction::Max => 4,
            Reduction::BitAnd => 5,
            Reduction::BitOr => 6,
            Reduction::BitXor => 7,
            Reduction::PreMulSum(_) => 8,
        }
    }

    /// The reduction with this ABI code; `factor` is read for PREMUL_SUM only.
    pub const fn from_code(code: u8, factor: f64) -> Option<Self> {
        Some(match code {
            0 => Reduction::Sum,
            1 => Reduction::Avg,
            2 => Reduction::Product,
            3 => Reduction::Min,
            4 => Reduction::Max,
            5 => Reduction::BitAnd,
            6 => Reduction::BitOr,
            7 => Reduction::BitXor,
            8 => Reduction::PreMulSum(factor),
            _ => return None,
        })
    }

    /// c10d's name, e.g. `SUM`.
    pub const fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "SUM",
            Reduction::Avg => "AVG",
            Reduction::Product => "PRODUCT",
            Reduction::Min => "MIN",
            Reduction::Max => "MAX",
            Reduction::BitAnd => "BAND",
            Reduction::BitOr => "BOR",
            Reduction::BitXor => "BXOR",
            Reduction::PreMulSum(_) => "PREMUL_SUM",
        }
    }

    /// Whether `dtype` has this reduction.
    pub const fn supports(self, dtype: DType) -> bool {
        if dtype.is_moved_only() {
            return false;
        }
        match self {
            Reduction::Sum | Reduction::Product => true,
            Reduction::Avg => !matches!(dtype, DType::Bool),
            Reduction::Min | Reduction::Max => !dtype.is_complex(),
            Reduction::BitAnd | Reduction::BitOr | Reduction::BitXor => !dtype.is_floating(),
            Reduction::PreMulSum(_) => dtype.is_floating(),
        }
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reduction::PreMulSum(factor) => write!(f, "PREMUL_SUM({factor})"),
            other => f.write_str(other.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for code in 0..=8 {
            let reduction = Reduction::from_code(code, 0.5).unwrap();
            assert_eq!(reduction.code(), code);
        }
        assert_eq!(Reduction::from_code(9, 1.0), None);
    }

    #[test]
    fn support_follows_the_type() {
        assert!(!Reduction::Avg.supports(DType::Bool));
        assert!(!Reduction::Max.supports(DType::C64));
        assert!(!Reduction::BitOr.supports(DType::F32));
        assert!(Reduction::BitOr.supports(DType::Bool));
        assert!(!Reduction::PreMulSum(2.0).supports(DType::I32));
        assert!(!Reduction::Sum.supports(DType::F8E8M0FNU));
        assert!(Reduction::Sum.supports(DType::F8E5M2));
    }
}
