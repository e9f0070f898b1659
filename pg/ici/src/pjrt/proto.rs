//! The few protobuf messages that cross the interface; field numbers are XLA's
//! (`compile_options.proto`, `xla_data.proto`, `hlo.proto`), unknown fields are skipped.

use std::collections::HashMap;

/// `xla.CompileOptionsProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct CompileOptions {
    #[prost(message, optional, tag = "3")]
    pub build: Option<BuildOptions>,
    #[prost(map = "string, message", tag = "7")]
    pub overrides: HashMap<String, OptionOverride>,
}

/// `xla.ExecutableBuildOptionsProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct BuildOptions {
    #[prost(int64, tag = "1")]
    pub device_ordinal: i64,
    #[prost(int64, tag = "4")]
    pub num_replicas: i64,
    #[prost(int64, tag = "5")]
    pub num_partitions: i64,
    #[prost(message, optional, tag = "9")]
    pub device_assignment: Option<DeviceAssignment>,
}

/// `xla.OptionOverrideProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct OptionOverride {
    #[prost(oneof = "Override", tags = "1, 2, 3, 4")]
    pub value: Option<Override>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum Override {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(bool, tag = "2")]
    Bool(bool),
    #[prost(int64, tag = "3")]
    Int(i64),
    #[prost(double, tag = "4")]
    Float(f64),
}

/// `xla.DeviceAssignmentProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct DeviceAssignment {
    #[prost(int32, tag = "1")]
    pub replica_count: i32,
    #[prost(int32, tag = "2")]
    pub computation_count: i32,
    #[prost(message, repeated, tag = "3")]
    pub computation_devices: Vec<ComputationDevice>,
}

/// `xla.DeviceAssignmentProto.ComputationDevice`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ComputationDevice {
    #[prost(int64, repeated, tag = "1")]
    pub replica_device_ids: Vec<i64>,
}

/// `xla.HloModuleProtoWithConfig`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HloModuleWithConfig {
    #[prost(message, optional, tag = "1")]
    pub module: Option<HloModule>,
}

/// `xla.HloModuleProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HloModule {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, repeated, tag = "3")]
    pub computations: Vec<HloComputation>,
    #[prost(int64, tag = "6")]
    pub entry_computation_id: i64,
}

/// `xla.HloComputationProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HloComputation {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, repeated, tag = "2")]
    pub instructions: Vec<HloInstruction>,
    #[prost(int64, tag = "5")]
    pub id: i64,
}

/// `xla.HloInstructionProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HloInstruction {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub opcode: String,
    #[prost(int64, repeated, tag = "38")]
    pub called_computation_ids: Vec<i64>,
    #[prost(bytes = "vec", tag = "43")]
    pub backend_config: Vec<u8>,
}
