//! How each element type gets through XLA: as it is, by another way, or not at all.

use podring_collective::{DType, Reduction};

use crate::pjrt::Element;

/// Which compiler a program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backend {
    /// XLA's CPU plugin.
    Cpu,
    /// libtpu.
    Tpu,
}

/// How a reduction is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum How {
    /// XLA's own all-reduce or reduce-scatter.
    Native,
    /// An all-to-all, a local reduction, and (for an all-reduce) an all-gather: as many bytes as [`How::Native`], any
    /// arithmetic, and one rounding.
    Exchange,
}

/// A reduction's way through XLA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// How.
    pub how: How,
    /// The type that crosses the wire: the type of the program's arguments and results.
    pub wire: Element,
    /// The type that is computed in.
    pub compute: Element,
    /// StableHLO's name of the operation.
    pub combine: &'static str,
    /// Whether the sum is divided by the number of ranks.
    pub divide: bool,
    /// Whether elements are multiplied by a factor (an operand of the program) first.
    pub factor: bool,
}

/// A type or reduction that has no way through XLA.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reduction} of {dtype} has no program: {reason}")]
pub struct Unsupported {
    /// The element type.
    pub dtype: DType,
    /// The reduction.
    pub reduction: String,
    /// Why.
    pub reason: &'static str,
}

/// The element type of a dtype that XLA computes with; booleans are bytes of 0 and 1.
pub fn element(dtype: DType) -> Option<Element> {
    Some(match dtype {
        DType::U8 | DType::Bool => Element::U8,
        DType::I8 => Element::S8,
        DType::I16 => Element::S16,
        DType::I32 => Element::S32,
        DType::I64 => Element::S64,
        DType::U16 => Element::U16,
        DType::U32 => Element::U32,
        DType::U64 => Element::U64,
        DType::F16 => Element::F16,
        DType::BF16 => Element::Bf16,
        DType::F32 => Element::F32,
        DType::F64 => Element::F64,
        DType::C64 => Element::C64,
        DType::C128 => Element::C128,
        DType::F8E4M3FN => Element::F8E4M3FN,
        DType::F8E5M2 => Element::F8E5M2,
        DType::F8E4M3FNUZ | DType::F8E5M2FNUZ | DType::F8E8M0FNU | DType::C32 => return None,
    })
}

/// Finds a reduction's way. With `exact`, 16-bit floats are summed in f32 and rounded once, as the CPU fabric does it,
/// rather than in whatever XLA's own all-reduce uses.
pub fn reduce(dtype: DType, reduction: Reduction, backend: Backend, exact: bool) -> Result<Route, Unsupported> {
    let refuse = |reason| Err(Unsupported { dtype, reduction: reduction.name().to_owned(), reason });
    if !reduction.supports(dtype) {
        return refuse("the type has no such reduction");
    }
    let Some(wire) = element(dtype) else { return refuse("the type is moved, not reduced") };
    let boolean = dtype == DType::Bool;
    let combine = match reduction {
        // On bytes of 0 and 1, or is the maximum and and the minimum.
        Reduction::Sum if boolean => "maximum",
        Reduction::Product | Reduction::BitAnd if boolean => "minimum",
        Reduction::BitOr if boolean => "maximum",
        Reduction::Sum | Reduction::Avg | Reduction::PreMulSum(_) => "add",
        Reduction::Product => "multiply",
        Reduction::Min => "minimum",
        Reduction::Max => "maximum",
        Reduction::BitAnd => "and",
        Reduction::BitOr => "or",
        Reduction::BitXor => "xor",
    };
    let (divide, factor) = (reduction == Reduction::Avg, matches!(reduction, Reduction::PreMulSum(_)));
    let narrow = dtype.accumulator() != dtype;
    let compute = if narrow { Element::F32 } else { wire };
    let eight_bit_float = matches!(wire, Element::F8E4M3FN | Element::F8E5M2);
    let sixty_four = matches!(wire, Element::S64 | Element::U64 | Element::F64 | Element::C64 | Element::C128);
    let arithmetic = matches!(combine, "add" | "multiply");
    let exchange =
        // Neither compiler has a bitwise all-reduce for every integer type.
        matches!(combine, "and" | "or" | "xor")
        // No compiler sums 8-bit floats in more than 8 bits.
        || eight_bit_float
        // XLA's CPU all-reduce and reduce lose a NaN (seen with both CPU plugins), and libtpu's can't be tried: the
        // local reduction looks for NaN by itself.
        || (matches!(combine, "minimum" | "maximum") && dtype.is_floating())
        // A minimum or maximum needs no more bits; a factor or a quotient does.
        || (narrow && arithmetic && (exact || divide || factor))
        // libtpu: "Supported lowering only of Sum all reduce".
        || (backend == Backend::Tpu && sixty_four && combine != "add");
    Ok(if exchange {
        Route { how: How::Exchange, wire, compute, combine, divide, factor }
    } else {
        Route { how: How::Native, wire, compute: wire, combine, divide, factor }
    })
}

/// A quiet NaN as a StableHLO literal.
pub(super) fn nan(element: Element) -> &'static str {
    match element {
        Element::F64 => "0x7FF8000000000000",
        Element::F32 => "0x7FC00000",
        Element::Bf16 => "0x7FC0",
        _ => "0x7E00",
    }
}

/// The neutral element of an operation as a StableHLO literal.
pub(super) fn neutral(combine: &str, element: Element) -> String {
    let complex = matches!(element, Element::C64 | Element::C128);
    let float = complex || matches!(element, Element::F16 | Element::Bf16 | Element::F32 | Element::F64);
    let bits = element.size() * 8;
    let signed = matches!(element, Element::S8 | Element::S16 | Element::S32 | Element::S64);
    let (low, high) = if signed {
        (format!("-{}", 1u128 << (bits - 1)), ((1u128 << (bits - 1)) - 1).to_string())
    } else {
        ("0".to_owned(), ((1u128 << bits.min(64)) - 1).to_string())
    };
    let (positive, negative) = match element {
        Element::F64 => ("0x7FF0000000000000", "0xFFF0000000000000"),
        Element::F32 => ("0x7F800000", "0xFF800000"),
        Element::Bf16 => ("0x7F80", "0xFF80"),
        _ => ("0x7C00", "0xFC00"),
    };
    match combine {
        "add" if complex => "(-0.0, -0.0)".to_owned(),
        "multiply" if complex => "(1.0, 0.0)".to_owned(),
        // Minus zero: plus zero would turn a sum of minus zeros into plus zero.
        "add" if float => "-0.0".to_owned(),
        "multiply" if float => "1.0".to_owned(),
        "minimum" if float => positive.to_owned(),
        "maximum" if float => negative.to_owned(),
        "multiply" => "1".to_owned(),
        "minimum" => high,
        "maximum" => low,
        "and" if signed => "-1".to_owned(),
        "and" => high,
        "or" if element == Element::Pred => "false".to_owned(),
        _ => "0".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn how(dtype: DType, reduction: Reduction, backend: Backend) -> How {
        reduce(dtype, reduction, backend, false).unwrap().how
    }

    #[test]
    fn what_libtpu_refuses_is_exchanged() {
        assert_eq!(how(DType::I64, Reduction::Sum, Backend::Tpu), How::Native);
        assert_eq!(how(DType::I64, Reduction::Max, Backend::Tpu), How::Exchange);
        assert_eq!(how(DType::F64, Reduction::Product, Backend::Tpu), How::Exchange);
        assert_eq!(how(DType::C64, Reduction::Product, Backend::Tpu), How::Exchange);
        assert_eq!(how(DType::I64, Reduction::Max, Backend::Cpu), How::Native);
        assert_eq!(how(DType::I32, Reduction::BitXor, Backend::Cpu), How::Exchange);
    }

    #[test]
    fn narrow_floats_are_summed_in_f32_where_it_matters() {
        assert_eq!(how(DType::F8E5M2, Reduction::Sum, Backend::Tpu), How::Exchange);
        assert_eq!(how(DType::BF16, Reduction::Sum, Backend::Tpu), How::Native);
        let exact = reduce(DType::BF16, Reduction::Sum, Backend::Tpu, true).unwrap();
        assert_eq!((exact.how, exact.wire, exact.compute), (How::Exchange, Element::Bf16, Element::F32));
        assert_eq!(reduce(DType::BF16, Reduction::Max, Backend::Tpu, false).unwrap().how, How::Exchange);
    }

    #[test]
    fn refusals_name_the_type() {
        let refused = reduce(DType::C32, Reduction::Sum, Backend::Cpu, false).unwrap_err();
        assert_eq!(refused.to_string(), "SUM of complex32 has no program: the type has no such reduction");
        assert!(reduce(DType::C64, Reduction::Max, Backend::Cpu, false).is_err());
        for &dtype in DType::ALL {
            let reduced = reduce(dtype, Reduction::Sum, Backend::Tpu, false);
            assert_eq!(reduced.is_err(), dtype.is_moved_only(), "{dtype}");
        }
    }
}
