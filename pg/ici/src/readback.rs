//! What XLA made of a program, read from the optimized module that it gives back.

use prost::Message as _;

use crate::pjrt::proto::{HloInstruction, HloModule, HloModuleWithConfig};

/// A collective of an optimized program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collective {
    /// HLO's name of it, such as `all-reduce` or `all-gather-start`.
    pub opcode: String,
    /// libtpu's emitter; none where the plugin doesn't say.
    pub emitter: Option<String>,
    /// libtpu's strategy, such as `UniDirectionNDRing`.
    pub strategy: Option<String>,
    /// Rings (or trees) that run side by side.
    pub colors: Option<u32>,
    /// Steps of an N-dimensional strategy.
    pub phases: Option<u32>,
    /// Extents of the dimensions it runs over.
    pub dim_sizes: Option<String>,
    /// Whether it starts and ends apart, so that computation can go on meanwhile.
    pub asynchronous: bool,
}

/// An optimized program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Optimized {
    /// Its collectives, in the module's order.
    pub collectives: Vec<Collective>,
    /// Every instruction's opcode but parameters, constants and tuples.
    pub opcodes: Vec<String>,
}

/// The module could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Not a format that this crate reads.
    #[error("the optimized program is in format {format:?}; expected hlo or hlo_with_config")]
    Format {
        /// The plugin's name of it.
        format: String,
    },
    /// No such protobuf.
    #[error("the optimized program is no HLO module: {reason}")]
    Damaged {
        /// The decoder's words.
        reason: String,
    },
}

const COLLECTIVES: &[&str] =
    &["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all"];

/// Reads what [`crate::pjrt::Executable::optimized`] gave.
pub fn read(bytes: &[u8], format: &str) -> Result<Optimized, ReadError> {
    let damaged = |reason: String| ReadError::Damaged { reason };
    let module = match format {
        "hlo_with_config" => HloModuleWithConfig::decode(bytes).map(|with| with.module),
        "hlo" => HloModule::decode(bytes).map(Some),
        other => return Err(ReadError::Format { format: other.to_owned() }),
    }
    .map_err(|error| damaged(error.to_string()))?
    .ok_or_else(|| damaged("it is empty".to_owned()))?;
    let mut optimized = Optimized::default();
    // A computation that an async-start calls holds the collective; the start itself only wraps it.
    let wrapped: Vec<i64> = module
        .computations
        .iter()
        .flat_map(|computation| &computation.instructions)
        .filter(|instruction| instruction.opcode == "async-start")
        .flat_map(|instruction| instruction.called_computation_ids.iter().copied())
        .collect();
    for computation in &module.computations {
        for instruction in &computation.instructions {
            let base = instruction.opcode.trim_end_matches("-start").trim_end_matches("-done");
            if !matches!(base, "parameter" | "constant" | "tuple" | "get-tuple-element") {
                optimized.opcodes.push(instruction.opcode.clone());
            }
            if COLLECTIVES.contains(&base) && !instruction.opcode.ends_with("-done") {
                let asynchronous = instruction.opcode.ends_with("-start")
                    || wrapped.contains(&computation.id)
                    // Called by the start through a custom call, which names no computation.
                    || (!wrapped.is_empty() && contains(&instruction.backend_config, b"DEVICE_TYPE_SPARSECORE"));
                optimized.collectives.push(collective(instruction, asynchronous));
            }
        }
    }
    Ok(optimized)
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

fn collective(instruction: &HloInstruction, asynchronous: bool) -> Collective {
    let config: serde_json::Value = serde_json::from_slice(&instruction.backend_config).unwrap_or_default();
    let algorithm = &config["collective_algorithm_config"];
    let text = |key: &str| algorithm[key].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let debug = text("debug").unwrap_or_default();
    if config["device_type"] == "DEVICE_TYPE_SPARSECORE" {
        return on_sparse_core(instruction, &config, asynchronous);
    }
    Collective {
        opcode: instruction.opcode.clone(),
        emitter: text("emitter"),
        strategy: text("strategy"),
        colors: field(&debug, "colors").and_then(|value| value.parse().ok()),
        phases: field(&debug, "phases").and_then(|value| value.parse().ok()),
        dim_sizes: field(&debug, "dim_sizes").map(str::to_owned),
        asynchronous,
    }
}

/// tpu7x hands collectives to its SparseCores, and says of each color (rings side by side) which ring each phase takes.
fn on_sparse_core(instruction: &HloInstruction, config: &serde_json::Value, asynchronous: bool) -> Collective {
    let offload = config["collective_offload_config"].as_object();
    let colors = offload
        .and_then(|offload| offload.values().find_map(|one| one["ici_strategy_config"]["color_strategies"].as_array()));
    let phases = colors.and_then(|colors| colors.first()).and_then(|color| color["phase_rings"].as_array());
    let ring = phases.and_then(|phases| phases.first()).and_then(|ring| ring["ring_type"].as_str());
    Collective {
        opcode: instruction.opcode.clone(),
        emitter: Some("SparseCore".to_owned()),
        strategy: ring.map(str::to_owned),
        colors: colors.map(|colors| colors.len() as u32),
        phases: phases.map(|phases| phases.len() as u32),
        dim_sizes: None,
        asynchronous,
    }
}

/// The value after `name:` in libtpu's description of a strategy.
fn field<'a>(debug: &'a str, name: &str) -> Option<&'a str> {
    let start = debug.find(&format!("{name}:"))? + name.len() + 1;
    let rest = &debug[start..];
    Some(&rest[..rest.find([' ', '}', '\n']).unwrap_or(rest.len())])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pjrt::proto::HloComputation;

    fn instruction(opcode: &str, config: &str, calls: &[i64]) -> HloInstruction {
        HloInstruction {
            name: "x".into(),
            opcode: opcode.into(),
            called_computation_ids: calls.to_vec(),
            backend_config: config.into(),
        }
    }

    #[test]
    fn strategies_are_read_back() {
        let config = r#"{"collective_algorithm_config":{"emitter":"RotatedPincerEmitter","strategy":"StrategyND",
            "debug":"\nStrategyND{colors:4 phases:2 cores:{4 4},{4 4} num_dims:2 dim_sizes:4,4,1 dim_used:{0 1}}"}}"#;
        let module = HloModuleWithConfig {
            module: Some(HloModule {
                name: "m".into(),
                computations: vec![
                    HloComputation {
                        name: "inner".into(),
                        instructions: vec![instruction("all-gather", "", &[])],
                        id: 7,
                    },
                    HloComputation {
                        name: "main".into(),
                        instructions: vec![
                            instruction("parameter", "", &[]),
                            instruction("all-reduce", config, &[]),
                            instruction("async-start", "", &[7]),
                            instruction("async-done", "", &[]),
                            instruction("collective-permute-start", "not json", &[]),
                            instruction("collective-permute-done", "", &[]),
                        ],
                        id: 1,
                    },
                ],
                entry_computation_id: 1,
            }),
        };
        let read = read(&module.encode_to_vec(), "hlo_with_config").unwrap();
        assert_eq!(read.opcodes.len(), 6);
        let [gather, reduce, permute] = &read.collectives[..] else { panic!("{:?}", read.collectives) };
        assert!(gather.asynchronous && permute.asynchronous && !reduce.asynchronous);
        assert_eq!(reduce.strategy.as_deref(), Some("StrategyND"));
        assert_eq!((reduce.colors, reduce.phases, reduce.dim_sizes.as_deref()), (Some(4), Some(2), Some("4,4,1")));
        assert_eq!(permute.emitter, None);
    }

    #[test]
    fn sparse_core_rings_are_read_back() {
        let config = r#"{"device_type":"DEVICE_TYPE_SPARSECORE","collective_offload_config":
            {"all_reduce_offload_config":{"ici_strategy_config":{"color_strategies":[
            {"phase_rings":[{"ring_type":"UNIDIR"},{"ring_type":"X"}]},{"phase_rings":[]}]}}}}"#;
        let start = instruction("async-start", "", &[9]);
        let module = HloModule {
            name: "m".into(),
            computations: vec![HloComputation {
                name: "main".into(),
                instructions: vec![start, instruction("all-reduce", config, &[])],
                id: 1,
            }],
            entry_computation_id: 1,
        };
        let read = read(&module.encode_to_vec(), "hlo").unwrap();
        let [reduce] = &read.collectives[..] else { panic!("{:?}", read.collectives) };
        assert_eq!((reduce.colors, reduce.phases, reduce.strategy.as_deref()), (Some(2), Some(2), Some("UNIDIR")));
        assert!(reduce.asynchronous);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        assert!(matches!(read(&[], "text"), Err(ReadError::Format { .. })));
        assert!(matches!(read(&[], "hlo_with_config"), Err(ReadError::Damaged { .. })));
        assert!(matches!(read(&[0xff; 9], "hlo"), Err(ReadError::Damaged { .. })));
    }
}
