//! The part of XLA's HLO that collectives are described in; field numbers are those of `hlo.proto` and
//! `xla_data.proto`, unknown fields are skipped.

use podring_collective::DType;

/// `xla.HloModuleProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Module {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, repeated, tag = "3")]
    pub computations: Vec<Computation>,
    #[prost(int64, tag = "6")]
    pub entry_computation_id: i64,
}

/// `xla.HloComputationProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Computation {
    #[prost(message, repeated, tag = "2")]
    pub instructions: Vec<Instruction>,
    #[prost(int64, tag = "5")]
    pub id: i64,
    #[prost(int64, tag = "6")]
    pub root_id: i64,
}

/// `xla.HloInstructionProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Instruction {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub opcode: String,
    #[prost(message, optional, tag = "3")]
    pub shape: Option<Shape>,
    #[prost(message, optional, tag = "8")]
    pub literal: Option<Literal>,
    #[prost(int64, tag = "9")]
    pub parameter_number: i64,
    #[prost(int64, tag = "13")]
    pub tuple_index: i64,
    #[prost(int64, repeated, tag = "14")]
    pub dimensions: Vec<i64>,
    #[prost(message, repeated, tag = "17")]
    pub slices: Vec<SliceDimension>,
    #[prost(int64, tag = "26")]
    pub channel_id: i64,
    #[prost(int64, tag = "35")]
    pub id: i64,
    #[prost(int64, repeated, tag = "36")]
    pub operand_ids: Vec<i64>,
    #[prost(int64, repeated, tag = "38")]
    pub called_computation_ids: Vec<i64>,
    #[prost(message, repeated, tag = "49")]
    pub replica_groups: Vec<ReplicaGroup>,
    #[prost(message, repeated, tag = "52")]
    pub source_target_pairs: Vec<SourceTarget>,
    #[prost(bool, tag = "71")]
    pub use_global_device_ids: bool,
    #[prost(message, optional, tag = "87")]
    pub devices: Option<DeviceList>,
}

/// `xla.HloInstructionProto.SliceDimensions`.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct SliceDimension {
    #[prost(int64, tag = "1")]
    pub start: i64,
    #[prost(int64, tag = "2")]
    pub limit: i64,
    #[prost(int64, tag = "3")]
    pub stride: i64,
}

/// `xla.LiteralProto`, of numbers.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Literal {
    #[prost(int32, repeated, tag = "4")]
    pub s32: Vec<i32>,
    #[prost(int64, repeated, tag = "5")]
    pub s64: Vec<i64>,
    #[prost(float, repeated, tag = "8")]
    pub f32: Vec<f32>,
    #[prost(double, repeated, tag = "9")]
    pub f64: Vec<f64>,
    #[prost(bytes = "vec", tag = "11")]
    pub f16: Vec<u8>,
    #[prost(bytes = "vec", tag = "13")]
    pub bf16: Vec<u8>,
}

/// `xla.ShapeProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Shape {
    #[prost(int32, tag = "2")]
    pub element_type: i32,
    #[prost(int64, repeated, tag = "3")]
    pub dimensions: Vec<i64>,
    #[prost(message, repeated, tag = "4")]
    pub tuple: Vec<Shape>,
    #[prost(bool, repeated, tag = "6")]
    pub is_dynamic: Vec<bool>,
}

/// `xla.ReplicaGroup`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ReplicaGroup {
    #[prost(int64, repeated, tag = "1")]
    pub ids: Vec<i64>,
}

/// `xla.SourceTarget`.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct SourceTarget {
    #[prost(int64, tag = "1")]
    pub source: i64,
    #[prost(int64, tag = "2")]
    pub target: i64,
}

/// `xla.CollectiveDeviceListProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeviceList {
    #[prost(message, repeated, tag = "1")]
    pub groups: Vec<ReplicaGroup>,
    #[prost(message, optional, tag = "2")]
    pub iota: Option<Iota>,
}

/// `xla.IotaReplicaGroupListProto`: the numbers 0, 1, 2, … laid out in a box, its axes exchanged, then cut into groups.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Iota {
    #[prost(int64, repeated, tag = "1")]
    pub reshape: Vec<i64>,
    #[prost(int32, repeated, tag = "2")]
    pub transpose: Vec<i32>,
    #[prost(int64, tag = "3")]
    pub groups: i64,
    #[prost(int64, tag = "4")]
    pub each: i64,
}

/// `xla.PrimitiveType` of the element types that collectives know.
const ELEMENTS: &[(DType, i32)] = &[
    (DType::Bool, 1),
    (DType::I8, 2),
    (DType::I16, 3),
    (DType::I32, 4),
    (DType::I64, 5),
    (DType::U8, 6),
    (DType::U16, 7),
    (DType::U32, 8),
    (DType::U64, 9),
    (DType::F16, 10),
    (DType::F32, 11),
    (DType::F64, 12),
    (DType::C64, 15),
    (DType::BF16, 16),
    (DType::C128, 18),
    (DType::F8E5M2, 19),
    (DType::F8E4M3FN, 20),
];

/// `xla.PrimitiveType`; 0, which is none, for an element type that XLA lacks.
pub fn element_type(dtype: DType) -> u64 {
    ELEMENTS.iter().find(|(known, _)| *known == dtype).map_or(0, |&(_, code)| code as u64)
}

impl Shape {
    /// Extents, if it is one dense array of an element type that collectives know.
    pub fn array(&self) -> Option<(DType, &[i64])> {
        let dtype = ELEMENTS.iter().find(|(_, code)| *code == self.element_type)?.0;
        let dense = self.tuple.is_empty() && !self.is_dynamic.contains(&true);
        dense.then_some((dtype, &self.dimensions))
    }
}

impl Literal {
    /// The number, if it is one.
    pub fn number(&self) -> Option<f64> {
        let half = |bytes: &[u8]| <[u8; 2]>::try_from(bytes).ok();
        match (&self.s32[..], &self.s64[..], &self.f32[..], &self.f64[..]) {
            ([one], [], [], []) => Some(f64::from(*one)),
            ([], [one], [], []) => Some(*one as f64),
            ([], [], [one], []) => Some(f64::from(*one)),
            ([], [], [], [one]) => Some(*one),
            ([], [], [], []) => match (half(&self.f16), half(&self.bf16)) {
                (Some(bytes), None) => Some(half::f16::from_le_bytes(bytes).to_f64()),
                (None, Some(bytes)) => Some(half::bf16::from_le_bytes(bytes).to_f64()),
                _ => None,
            },
            _ => None,
        }
    }
}

impl Iota {
    /// The groups written out; none if the numbers don't fit together.
    pub fn expand(&self) -> Option<Vec<Vec<i64>>> {
        let extent = |dim: i64| usize::try_from(dim).ok().filter(|&dim| dim > 0);
        let (groups, each) = (extent(self.groups)?, extent(self.each)?);
        let total = groups.checked_mul(each)?;
        let dims = self.reshape.iter().map(|&dim| extent(dim)).collect::<Option<Vec<_>>>()?;
        let order = self.transpose.iter().map(|&axis| usize::try_from(axis).ok()).collect::<Option<Vec<_>>>()?;
        let mut sorted = order.clone();
        sorted.sort_unstable();
        let fits = sorted.iter().copied().eq(0..dims.len())
            && dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim)) == Some(total);
        if !fits {
            return None;
        }
        let mut strides = vec![1usize; dims.len()];
        for axis in (1..dims.len()).rev() {
            strides[axis - 1] = strides[axis] * dims[axis];
        }
        let place = |mut index: usize| {
            // `index` counts the exchanged box; its last axis is the fastest.
            let mut number = 0;
            for &axis in order.iter().rev() {
                number += index % dims[axis] * strides[axis];
                index /= dims[axis];
            }
            number as i64
        };
        Some((0..groups).map(|group| (0..each).map(|index| place(group * each + index)).collect()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_are_one_number() {
        let number = |literal: Literal| literal.number();
        assert_eq!(number(Literal { f32: vec![2.0], ..Default::default() }), Some(2.0));
        assert_eq!(number(Literal { s64: vec![-3], ..Default::default() }), Some(-3.0));
        assert_eq!(number(Literal { bf16: vec![0x80, 0x40], ..Default::default() }), Some(4.0));
        assert_eq!(number(Literal { f16: vec![0x00, 0x40], ..Default::default() }), Some(2.0));
        assert_eq!(number(Literal { f32: vec![2.0, 2.0], ..Default::default() }), None);
        assert_eq!(number(Literal::default()), None);
    }

    #[test]
    fn iota_groups_are_written_out() {
        let iota = |reshape: &[i64], transpose: &[i32], groups, each| Iota {
            reshape: reshape.to_vec(),
            transpose: transpose.to_vec(),
            groups,
            each,
        };
        assert_eq!(iota(&[8], &[0], 2, 4).expand().unwrap(), [[0, 1, 2, 3], [4, 5, 6, 7]]);
        assert_eq!(iota(&[4, 2], &[1, 0], 2, 4).expand().unwrap(), [[0, 2, 4, 6], [1, 3, 5, 7]]);
        assert_eq!(iota(&[2, 2, 2], &[1, 0, 2], 4, 2).expand().unwrap(), [[0, 1], [4, 5], [2, 3], [6, 7]]);
        assert_eq!(iota(&[8], &[0], 3, 4).expand(), None);
        assert_eq!(iota(&[8], &[1], 2, 4).expand(), None);
        assert_eq!(iota(&[-8], &[0], 2, 4).expand(), None);
    }
}
