//! What can be measured: operations, element types, reductions, and nccl-tests' bandwidth conventions.

use clap::ValueEnum;
use podring_collective::{DType, Reduction};

/// An operation, by the name it has in `torch.distributed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Op {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    #[value(name = "sendrecv")]
    SendRecv,
    Barrier,
}

impl Op {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Op::AllReduce => "all_reduce",
            Op::AllGather => "all_gather",
            Op::ReduceScatter => "reduce_scatter",
            Op::AllToAll => "all_to_all",
            Op::Broadcast => "broadcast",
            Op::Reduce => "reduce",
            Op::Gather => "gather",
            Op::Scatter => "scatter",
            Op::SendRecv => "sendrecv",
            Op::Barrier => "barrier",
        }
    }

    pub(crate) fn reduces(self) -> bool {
        matches!(self, Op::AllReduce | Op::Reduce | Op::ReduceScatter)
    }

    /// One side of the operation is a block per rank, so that its total must divide by the ranks.
    fn has_blocks(self) -> bool {
        matches!(self, Op::AllGather | Op::ReduceScatter | Op::AllToAll | Op::Gather | Op::Scatter)
    }

    /// Elements of the whole buffer (nccl-tests' `size`, over the element's) for `bytes` asked: rounded up to whole
    /// elements, and to as many on every rank where there is a block per rank.
    pub(crate) fn count(self, bytes: u64, dtype: DType, ranks: u32) -> u64 {
        let unit = if self.has_blocks() { u64::from(ranks) } else { 1 };
        match self {
            Op::Barrier => 0,
            _ => bytes.div_ceil(dtype.size() as u64 * unit).max(1) * unit,
        }
    }

    /// Bus bandwidth over algorithm bandwidth, for `ranks` ≥ 1.
    ///
    /// nccl-tests' doc/PERFORMANCE.md, and `*GetBw` in its src/ for gather, scatter and sendrecv, which the page does
    /// not list: all_reduce 2(n-1)/n; all_gather, reduce_scatter, all_to_all, gather, scatter (n-1)/n; others 1.
    pub(crate) fn bus_factor(self, ranks: u32) -> f64 {
        let n = f64::from(ranks);
        match self {
            Op::AllReduce => 2.0 * (n - 1.0) / n,
            Op::AllGather | Op::ReduceScatter | Op::AllToAll | Op::Gather | Op::Scatter => (n - 1.0) / n,
            Op::Broadcast | Op::Reduce | Op::SendRecv | Op::Barrier => 1.0,
        }
    }
}

/// Element types that can be checked: complex ones and those that are only carried are left out.
pub(crate) fn dtypes() -> impl Iterator<Item = DType> {
    let narrow = |dtype: &DType| matches!(dtype, DType::U16 | DType::U32 | DType::U64);
    DType::ALL.iter().copied().filter(move |dtype| !dtype.is_complex() && !dtype.is_moved_only() && !narrow(dtype))
}

/// An element type by torch's name or nccl-tests'.
pub(crate) fn parse_dtype(text: &str) -> Result<DType, String> {
    let name = match text.to_ascii_lowercase().as_str() {
        "float" | "f32" | "fp32" => "float32".to_owned(),
        "double" | "f64" | "fp64" => "float64".to_owned(),
        "half" | "f16" | "fp16" => "float16".to_owned(),
        "bf16" => "bfloat16".to_owned(),
        "f8e4m3" => "float8_e4m3fn".to_owned(),
        "f8e5m2" => "float8_e5m2".to_owned(),
        other => other.to_owned(),
    };
    dtypes().find(|dtype| dtype.name() == name).ok_or_else(|| {
        let names: Vec<&str> = dtypes().map(DType::name).collect();
        format!("valid types: {}", names.join(", "))
    })
}

/// A reduction by c10d's name, any case. PREMUL_SUM multiplies by one half.
pub(crate) fn parse_redop(text: &str) -> Result<Reduction, String> {
    let wanted = text.to_ascii_uppercase();
    let wanted = if wanted == "PROD" { "PRODUCT" } else { &wanted };
    let all = || (0..=8).filter_map(|code| Reduction::from_code(code, 0.5));
    all().find(|redop| redop.name() == wanted).ok_or_else(|| {
        let names: Vec<String> = all().map(|redop| redop.name().to_ascii_lowercase()).collect();
        format!("valid reductions: {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_the_command_lines() {
        for &op in Op::value_variants() {
            assert_eq!(op.to_possible_value().unwrap().get_name(), op.name());
        }
    }

    #[test]
    fn bus_factors_are_nccl_tests() {
        for (op, two, four) in [
            (Op::AllReduce, 1.0, 1.5),
            (Op::AllGather, 0.5, 0.75),
            (Op::ReduceScatter, 0.5, 0.75),
            (Op::AllToAll, 0.5, 0.75),
            (Op::Gather, 0.5, 0.75),
            (Op::Scatter, 0.5, 0.75),
            (Op::Broadcast, 1.0, 1.0),
            (Op::Reduce, 1.0, 1.0),
            (Op::SendRecv, 1.0, 1.0),
        ] {
            assert_eq!((op.bus_factor(2), op.bus_factor(4)), (two, four), "{}", op.name());
        }
        assert_eq!(Op::AllReduce.bus_factor(1), 0.0);
    }

    #[test]
    fn totals_are_rounded_up_to_whole_blocks() {
        assert_eq!(Op::AllReduce.count(8, DType::F32, 4), 2);
        assert_eq!(Op::AllGather.count(8, DType::F32, 2), 2);
        assert_eq!(Op::AllGather.count(8, DType::F32, 4), 4);
        assert_eq!(Op::ReduceScatter.count(64 << 20, DType::BF16, 3), 33_554_433);
        assert_eq!(Op::Broadcast.count(0, DType::F64, 4), 1);
        assert_eq!(Op::Barrier.count(1024, DType::F32, 4), 0);
    }

    proptest! {
        #[test]
        fn counts_hold_what_was_asked(bytes in 0u64..1 << 36, ranks in 1u32..=64, index in 0usize..9) {
            let op = Op::value_variants()[index];
            for dtype in dtypes() {
                let count = op.count(bytes, dtype, ranks);
                prop_assert!(count * dtype.size() as u64 >= bytes);
                prop_assert!(!op.has_blocks() || count % u64::from(ranks) == 0);
                prop_assert!(count * (dtype.size() as u64) < bytes.max(1) + dtype.size() as u64 * u64::from(ranks));
            }
        }
    }

    #[test]
    fn types_and_reductions_by_either_name() {
        assert_eq!(parse_dtype("half"), Ok(DType::F16));
        assert_eq!(parse_dtype("bfloat16"), Ok(DType::BF16));
        assert!(parse_dtype("float31").unwrap_err().contains("float32, float64"));
        assert!(parse_dtype("complex64").is_err());
        assert_eq!(parse_redop("prod"), Ok(Reduction::Product));
        assert_eq!(parse_redop("premul_sum"), Ok(Reduction::PreMulSum(0.5)));
        assert!(parse_redop("mean").unwrap_err().contains("sum, avg"));
    }
}
