//! Element types.

use std::fmt;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $name:literal, $size:literal;)*) => {
        /// An element type. The discriminants are part of the C ABI and of every wire fingerprint: never renumber.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum DType { $($(#[$doc])* $variant = $code,)* }

        impl DType {
            /// Every element type, in code order.
            pub const ALL: &'static [DType] = &[$(DType::$variant,)*];

            /// The type with this ABI code, if there is one.
            pub const fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(DType::$variant),)* _ => None }
            }

            /// Torch's name without the `torch.` prefix, e.g. `float32`.
            pub const fn name(self) -> &'static str {
                match self { $(DType::$variant => $name,)* }
            }

            /// Bytes per element.
            pub const fn size(self) -> usize {
                match self { $(DType::$variant => $size,)* }
            }
        }
    };
}

dtypes! {
    /// Unsigned 8-bit integer.
    U8 = 0, "uint8", 1;
    /// Signed 8-bit integer.
    I8 = 1, "int8", 1;
    /// Signed 16-bit integer.
    I16 = 2, "int16", 2;
    /// Signed 32-bit integer.
    I32 = 3, "int32", 4;
    /// Signed 64-bit integer.
    I64 = 4, "int64", 8;
    /// Unsigned 16-bit integer.
    U16 = 5, "uint16", 2;
    /// Unsigned 32-bit integer.
    U32 = 6, "uint32", 4;
    /// Unsigned 64-bit integer.
    U64 = 7, "uint64", 8;
    /// Boolean, one byte, 0 or 1.
    Bool = 8, "bool", 1;
    /// IEEE half precision.
    F16 = 9, "float16", 2;
    /// bfloat16.
    BF16 = 10, "bfloat16", 2;
    /// IEEE single precision.
    F32 = 11, "float32", 4;
    /// IEEE double precision.
    F64 = 12, "float64", 8;
    /// Two float32: real, imaginary.
    C64 = 13, "complex64", 8;
    /// Two float64: real, imaginary.
    C128 = 14, "complex128", 16;
    /// 8-bit float, 4 exponent bits, finite plus NaN.
    F8E4M3FN = 15, "float8_e4m3fn", 1;
    /// 8-bit float, 5 exponent bits, IEEE-like.
    F8E5M2 = 16, "float8_e5m2", 1;
    /// 8-bit float, 4 exponent bits, no negative zero. Moved, not reduced.
    F8E4M3FNUZ = 17, "float8_e4m3fnuz", 1;
    /// 8-bit float, 5 exponent bits, no negative zero. Moved, not reduced.
    F8E5M2FNUZ = 18, "float8_e5m2fnuz", 1;
    /// 8-bit power-of-two scale. Moved, not reduced.
    F8E8M0FNU = 19, "float8_e8m0fnu", 1;
    /// Two float16: real, imaginary. Moved, not reduced.
    C32 = 20, "complex32", 4;
}

impl DType {
    /// The type partial sums travel in: float32 for 16- and 8-bit floats, else the type itself.
    pub const fn accumulator(self) -> DType {
        match self {
            DType::F16 | DType::BF16 | DType::F8E4M3FN | DType::F8E5M2 => DType::F32,
            other => other,
        }
    }

    /// Real or complex floating point.
    pub const fn is_floating(self) -> bool {
        self.is_complex()
            || matches!(
                self,
                DType::F16
                    | DType::BF16
                    | DType::F32
                    | DType::F64
                    | DType::F8E4M3FN
                    | DType::F8E5M2
                    | DType::F8E4M3FNUZ
                    | DType::F8E5M2FNUZ
                    | DType::F8E8M0FNU
            )
    }

    /// Complex.
    pub const fn is_complex(self) -> bool {
        matches!(self, DType::C32 | DType::C64 | DType::C128)
    }

    /// Types that are carried but have no arithmetic.
    pub const fn is_moved_only(self) -> bool {
        matches!(self, DType::F8E4M3FNUZ | DType::F8E5M2FNUZ | DType::F8E8M0FNU | DType::C32)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip_and_are_dense() {
        for (index, dtype) in DType::ALL.iter().enumerate() {
            assert_eq!(*dtype as usize, index);
            assert_eq!(DType::from_code(index as u8), Some(*dtype));
        }
        assert_eq!(DType::from_code(DType::ALL.len() as u8), None);
    }

    #[test]
    fn only_narrow_floats_accumulate_elsewhere() {
        for &dtype in DType::ALL {
            let narrow = matches!(dtype, DType::F16 | DType::BF16 | DType::F8E4M3FN | DType::F8E5M2);
            assert_eq!(dtype.accumulator() != dtype, narrow, "{dtype}");
        }
    }
}
