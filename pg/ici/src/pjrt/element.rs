//! Element types of buffers and programs.

macro_rules! elements {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $mlir:literal, $size:literal;)*) => {
        /// An element type of XLA's.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Element { $($(#[$doc])* $name,)* }

        impl Element {
            /// `PJRT_Buffer_Type`.
            pub(super) const fn code(self) -> i32 {
                match self { $(Element::$name => $code,)* }
            }

            pub(super) const fn from_code(code: i32) -> Option<Element> {
                match code { $($code => Some(Element::$name),)* _ => None }
            }

            /// Its name in StableHLO.
            pub const fn mlir(self) -> &'static str {
                match self { $(Element::$name => $mlir,)* }
            }

            /// Bytes of one.
            pub const fn size(self) -> usize {
                match self { $(Element::$name => $size,)* }
            }
        }
    };
}

elements! {
    /// Boolean.
    Pred = 1, "i1", 1;
    /// Signed, 8 bits.
    S8 = 2, "i8", 1;
    /// Signed, 16 bits.
    S16 = 3, "i16", 2;
    /// Signed, 32 bits.
    S32 = 4, "i32", 4;
    /// Signed, 64 bits.
    S64 = 5, "i64", 8;
    /// Unsigned, 8 bits.
    U8 = 6, "ui8", 1;
    /// Unsigned, 16 bits.
    U16 = 7, "ui16", 2;
    /// Unsigned, 32 bits.
    U32 = 8, "ui32", 4;
    /// Unsigned, 64 bits.
    U64 = 9, "ui64", 8;
    /// IEEE half.
    F16 = 10, "f16", 2;
    /// IEEE single.
    F32 = 11, "f32", 4;
    /// IEEE double.
    F64 = 12, "f64", 8;
    /// bfloat16.
    Bf16 = 13, "bf16", 2;
    /// Two f32.
    C64 = 14, "complex<f32>", 8;
    /// Two f64.
    C128 = 15, "complex<f64>", 16;
    /// 8-bit float, 5 exponent bits.
    F8E5M2 = 16, "f8E5M2", 1;
    /// 8-bit float, 4 exponent bits, finite.
    F8E4M3FN = 17, "f8E4M3FN", 1;
}

impl Element {
    /// Bytes of a dense array; none on overflow or a negative extent.
    pub(crate) fn bytes(self, dims: &[i64]) -> Option<usize> {
        dims.iter().try_fold(self.size(), |bytes, &dim| bytes.checked_mul(usize::try_from(dim).ok()?))
    }
}
