//! `podring compile --plan train.toml`: every program that a mesh and a model will need. The format is in docs/ici.md.

use std::{collections::HashSet, fs, path::Path};

use podring_collective::{DType, Reduction};
use podring_ici::slice::{self, Callers, How};
use podring_topology::{
    Slice, SliceOptions,
    mesh::{Axis, MeshRequest, assign},
    parse_with,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Args, CompileError, child,
    job::{self, Job},
};
use crate::{
    bench::op::{Op, parse_dtype},
    terminal,
};

/// The file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Plan {
    slice: String,
    /// Outermost first.
    axis: Vec<PlannedAxis>,
    model: Model,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlannedAxis {
    name: String,
    /// −1: what the others leave.
    size: i64,
    #[serde(rename = "use")]
    role: Role,
}

/// What the ranks along an axis share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Role {
    /// Whole replicas: gradients are summed (DDP, the outer axis of HSDP).
    Replicate,
    /// Parameters are sharded (FSDP).
    Shard,
    /// Layers are cut, activations are summed (tensor parallel).
    Tensor,
    /// The same with activations sharded between layers (sequence parallel).
    Sequence,
    /// Tokens go to experts and back.
    Expert,
    /// Stages hand activations on.
    Pipeline,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Model {
    /// Of the whole model.
    parameters: u64,
    layers: u64,
    hidden: u64,
    /// Tokens of a rank's micro-batch, before sequence parallelism divides them.
    tokens: u64,
    #[serde(default = "bfloat16")]
    dtype: String,
    /// Type in which gradients are summed.
    gradients: Option<String>,
    /// Bytes of DDP's buckets.
    #[serde(default = "ddp_bucket")]
    bucket: u64,
}

fn bfloat16() -> String {
    "bfloat16".to_owned()
}

/// PyTorch's default, `bucket_cap_mb=25`.
fn ddp_bucket() -> u64 {
    25 << 20
}

/// One collective of the training step. Bytes are the whole buffer of a rank.
#[derive(Clone, Debug, PartialEq)]
struct Wanted {
    op: Op,
    dtype: DType,
    bytes: u64,
    /// None for all ranks.
    axis: Option<usize>,
    why: String,
}

impl Plan {
    fn read(text: &str) -> Result<Plan, String> {
        let plan: Plan = toml::from_str(text).map_err(|error| {
            let hint = if text.lines().any(|line| line.trim() == "[axis]") {
                "each axis is a table of its own: [[axis]], with name, size and use"
            } else {
                ""
            };
            format!("{error}{hint}")
        })?;
        let Model { parameters, layers, hidden, tokens, bucket, .. } = plan.model;
        for (name, value) in
            [("parameters", parameters), ("layers", layers), ("hidden", hidden), ("tokens", tokens), ("bucket", bucket)]
        {
            if value == 0 || value > 1 << 50 {
                return Err(format!("model.{name} is {value}; expected 1 to 2^50"));
            }
        }
        Ok(plan)
    }

    /// Gives an axis of size −1 what the others leave.
    fn fill(&mut self, devices: u32) -> Result<(), String> {
        let open: Vec<usize> = (0..self.axis.len()).filter(|&index| self.axis[index].size == -1).collect();
        let &[index] = &open[..] else {
            let names: Vec<&str> = open.iter().map(|&index| self.axis[index].name.as_str()).collect();
            return match names.len() {
                0 => Ok(()),
                _ => Err(format!("axes {} are all of size -1; one may be", names.join(", "))),
            };
        };
        let others = self.axis.iter().filter(|axis| axis.size != -1);
        let product = others.fold(1i64, |product, axis| product.saturating_mul(axis.size));
        let devices = i64::from(devices);
        if product < 1 || devices % product != 0 {
            let name = &self.axis[index].name;
            return Err(format!(
                "axis {name} is of size -1, but the others' {product} ranks do not divide the slice's {devices} devices"
            ));
        }
        self.axis[index].size = devices / product;
        Ok(())
    }

    /// Ranks along all axes of these roles.
    fn ranks(&self, roles: &[Role]) -> u64 {
        let size = |axis: &PlannedAxis| u64::try_from(axis.size).unwrap_or(1).max(1);
        self.axis.iter().filter(|axis| roles.contains(&axis.role)).map(size).product()
    }

    fn wanted(&self) -> Result<Vec<Wanted>, String> {
        let dtype = parse_dtype(&self.model.dtype)?;
        let gradients = self.model.gradients.as_deref().map_or(Ok(dtype), parse_dtype)?;
        let Model { parameters, layers, hidden, tokens, bucket, .. } = self.model;
        let cut = self.ranks(&[Role::Tensor, Role::Sequence, Role::Expert]);
        let layer = parameters.div_ceil(layers).div_ceil(cut);
        let stage = parameters.div_ceil(cut).div_ceil(self.ranks(&[Role::Pipeline]));
        let shards = self.ranks(&[Role::Shard]);
        let activations = tokens.saturating_mul(hidden).saturating_mul(dtype.size() as u64);
        let mut wanted = Vec::new();
        for (index, axis) in self.axis.iter().enumerate().filter(|(_, axis)| axis.size > 1) {
            let mut want = |op, dtype: DType, bytes: u64, why: &str| {
                wanted.push(Wanted { op, dtype, bytes, axis: Some(index), why: why.to_owned() });
            };
            let (wide, sum) = (dtype.size() as u64, gradients.size() as u64);
            match axis.role {
                Role::Shard => {
                    want(Op::AllGather, dtype, layer * wide, "a layer's parameters");
                    want(Op::ReduceScatter, gradients, layer * sum, "a layer's gradients");
                }
                Role::Replicate if shards > 1 => {
                    want(Op::AllReduce, gradients, layer.div_ceil(shards) * sum, "a shard of a layer's gradients");
                }
                Role::Replicate => {
                    let total = stage.saturating_mul(sum);
                    want(Op::AllReduce, gradients, bucket.min(total), "a bucket of gradients");
                    if total > bucket && !total.is_multiple_of(bucket) {
                        want(Op::AllReduce, gradients, total % bucket, "the last bucket of gradients");
                    }
                }
                Role::Tensor => want(Op::AllReduce, dtype, activations, "activations after a cut layer"),
                Role::Sequence => {
                    want(Op::AllGather, dtype, activations, "activations before a cut layer");
                    want(Op::ReduceScatter, dtype, activations, "activations after a cut layer");
                }
                Role::Expert => want(Op::AllToAll, dtype, activations, "tokens to their experts"),
                Role::Pipeline => want(Op::SendRecv, dtype, activations, "activations to the next stage"),
            }
        }
        let everywhere =
            |op, bytes, why: &str| Wanted { op, dtype: DType::F32, bytes, axis: None, why: why.to_owned() };
        wanted.push(everywhere(Op::AllReduce, 4, "the loss, the gradients' norm"));
        wanted.push(everywhere(Op::Barrier, 0, "barriers"));
        Ok(wanted)
    }
}

/// What an operation compiles: itself; or its parts inside the slices that its groups touch, as docs/ici.md says under
/// "Across slices"; or nothing, where the hosts' network carries it.
fn compiled(slice: &Slice, op: Op, groups: Vec<Vec<u32>>) -> Result<(Vec<Op>, Vec<Vec<u32>>), CompileError> {
    let ops = match slice::plan(slice, &groups, Callers::Everybody)?.how {
        How::AcrossSlices { inside: Some(_), .. } => match op {
            Op::AllReduce => vec![Op::ReduceScatter, Op::AllGather],
            Op::AllGather | Op::ReduceScatter | Op::Barrier => vec![op],
            _ => vec![],
        },
        How::AcrossSlices { inside: None, .. } | How::Host => vec![],
        _ => return Ok((vec![op], groups)),
    };
    let mut inside: Vec<Vec<u32>> = Vec::new();
    for group in groups {
        let mut parts = vec![Vec::new(); slice.slices() as usize];
        for rank in group {
            parts[slice.device(rank).map_or(0, |device| device.slice) as usize].push(rank);
        }
        inside.extend(parts.into_iter().filter(|part| !part.is_empty()));
    }
    Ok((ops, inside))
}

/// Compiles what the file asks for; prints a line for each program as soon as it is there.
pub(super) fn run(args: &Args, file: &Path) -> Result<i32, CompileError> {
    let wrong = |reason: String| CompileError::PlanFile { file: file.display().to_string(), reason };
    let read = fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    let mut plan = Plan::read(&read).map_err(wrong)?;
    let slice = parse_with(&plan.slice, &SliceOptions::default())?;
    plan.fill(slice.devices()).map_err(wrong)?;
    let one_slice = slice.to_string().split('*').next().unwrap_or_default().to_owned();
    let wanted = plan.wanted().map_err(wrong)?;
    let axes = plan.axis.iter().map(|axis| Axis::new(&axis.name, axis.size)).collect();
    let mesh = assign(&slice, &MeshRequest::new(axes))?;
    // Calls of one size class share a program.
    let (mut seen, mut programs, mut uncompiled) = (HashSet::new(), Vec::new(), Vec::new());
    for want in wanted {
        let groups = match want.axis {
            Some(axis) => mesh.groups(axis).iter().map(<[u32]>::to_vec).collect(),
            None => vec![(0..slice.devices()).collect()],
        };
        let (ops, mut groups) = compiled(&slice, want.op, groups)?;
        if ops.is_empty() {
            uncompiled.push(want);
            continue;
        }
        // Each slice runs programs of its own, all alike: the first slice's ranks come first.
        let of_one_slice = slice.devices() / slice.slices();
        groups.retain(|group| group.iter().all(|&rank| rank < of_one_slice));
        let group = if want.axis.is_none() && groups.len() == 1 { "all".to_owned() } else { job::text(&groups) };
        for op in ops {
            let why = if op == want.op { want.why.clone() } else { format!("{}: {}", want.op.name(), want.why) };
            let one = Args {
                slice: Some(one_slice.clone()),
                op: Some(op),
                bytes: want.bytes,
                dtype: want.dtype,
                redop: Reduction::Sum,
                group: group.clone(),
                mlir: None,
                plan: None,
                table: false,
                ..*args
            };
            let job = Job::of(&one)?;
            let wanted = Wanted { op, why, ..want.clone() };
            match &job.work {
                None => uncompiled.push(wanted),
                Some(work) if seen.insert((work.program.text.clone(), work.launch.ranks.clone())) => {
                    programs.push((wanted, one, job));
                }
                Some(_) => {}
            }
        }
    }
    if !args.json {
        terminal::out(&format!(
            "{:14} {:10} {:10} {:>12} {:>9} {:>8} {:>12}  collectives, strategy, what for",
            "operation", "axis", "dtype", "bytes", "compile,s", "RSS,MiB", "predicted,µs"
        ));
    }
    let (mut progress, mut reports, mut failed) = (terminal::Progress::new(), Vec::new(), 0);
    for (index, (want, one, job)) in programs.iter().enumerate() {
        let axis = want.axis.map_or("all", |axis| &plan.axis[axis].name);
        progress.show(&format!("{}/{} {} along {axis}: {}", index + 1, programs.len(), want.op.name(), want.why));
        let outcome = child::compile(one, job);
        progress.clear();
        match outcome {
            Ok(mut report) => {
                if args.json {
                    report["group"] = json!(axis);
                    report["for"] = json!(want.why);
                    reports.push(report);
                } else {
                    terminal::out(&line(axis, &want.why, &report));
                }
            }
            Err(error @ (CompileError::Plugin(_) | CompileError::Io { .. })) => return Err(error),
            Err(error) => {
                failed += 1;
                terminal::err(&format!("podring: {error}"));
            }
        }
    }
    for want in &uncompiled {
        let axis = want.axis.map_or("all", |axis| &plan.axis[axis].name);
        if args.json {
            let (op, dtype, bytes) = (want.op.name(), want.dtype.name(), want.bytes);
            reports.push(
                json!({"op": op, "dtype": dtype, "bytes": bytes, "group": axis, "plan": "host", "for": want.why}),
            );
        } else {
            terminal::out(&format!(
                "{:14} {axis:10} {:10} {:>12} {:>9} {:>8} {:>12}  no program: the hosts' network carries it, {}",
                want.op.name(),
                want.dtype.name(),
                want.bytes,
                "-",
                "-",
                "-",
                want.why
            ));
        }
    }
    if args.json {
        terminal::out(&Value::Array(reports).to_string());
    }
    if failed > 0 { Err(CompileError::Some { failed, programs: programs.len() }) } else { Ok(0) }
}

fn line(axis: &str, why: &str, report: &Value) -> String {
    let text = |name: &str| report[name].as_str().unwrap_or("-").to_owned();
    let mut collectives: Vec<&str> =
        report["collectives"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    collectives.dedup();
    format!(
        "{:14} {axis:10} {:10} {:>12} {:>9.2} {:>8} {:>12.1}  {}, {}, {why}",
        text("op"),
        text("dtype"),
        report["bytes"].as_u64().unwrap_or(0),
        report["compile_s"].as_f64().unwrap_or(f64::NAN),
        report["peak_rss_mib"].as_u64().unwrap_or(0),
        report["predicted_us"].as_f64().unwrap_or(f64::NAN),
        collectives.join(" "),
        text("strategy"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "slice = \"v5e:4x4\"\n[model]\nparameters = 1_000_000\nlayers = 10\nhidden = 64\ntokens = 100\n";

    fn wanted(axes: &[(&str, i64, &str)], more: &str) -> Vec<(Op, &'static str, u64, Option<usize>)> {
        let mut text = format!("{HEAD}{more}\n");
        for (name, size, role) in axes {
            text += &format!("[[axis]]\nname = \"{name}\"\nsize = {size}\nuse = \"{role}\"\n");
        }
        let wanted = Plan::read(&text).unwrap().wanted().unwrap();
        wanted.into_iter().map(|one| (one.op, one.dtype.name(), one.bytes, one.axis)).collect()
    }

    #[test]
    fn roles_say_what_is_needed() {
        let end = [(Op::AllReduce, "float32", 4, None), (Op::Barrier, "float32", 0, None)];
        let fsdp = wanted(&[("dp", 4, "shard"), ("tp", 4, "sequence")], "gradients = \"float32\"");
        assert_eq!(
            fsdp[..4],
            [
                (Op::AllGather, "bfloat16", 50_000, Some(0)),
                (Op::ReduceScatter, "float32", 100_000, Some(0)),
                (Op::AllGather, "bfloat16", 12_800, Some(1)),
                (Op::ReduceScatter, "bfloat16", 12_800, Some(1)),
            ]
        );
        assert_eq!(fsdp[4..], end);
        let ddp = wanted(&[("dp", 16, "replicate")], "bucket = 1_500_000");
        assert_eq!(
            ddp[..2],
            [(Op::AllReduce, "bfloat16", 1_500_000, Some(0)), (Op::AllReduce, "bfloat16", 500_000, Some(0))]
        );
        let hsdp = wanted(&[("r", 2, "replicate"), ("s", 2, "shard"), ("p", 2, "pipeline"), ("e", 2, "expert")], "");
        assert_eq!(hsdp[0], (Op::AllReduce, "bfloat16", 50_000, Some(0)));
        assert_eq!(hsdp[3], (Op::SendRecv, "bfloat16", 12_800, Some(2)));
        assert_eq!(hsdp[4], (Op::AllToAll, "bfloat16", 12_800, Some(3)));
        assert_eq!(wanted(&[("dp", 1, "shard")], ""), end);
    }

    #[test]
    fn mistakes_are_named() {
        let error = |text: &str| Plan::read(text).and_then(|plan| plan.wanted()).unwrap_err();
        assert!(error("slice = 3").contains("invalid type"));
        assert!(error(&format!("{HEAD}axes = 3")).contains("unknown field `axes`"));
        let axis = "[[axis]]\nname = \"a\"\nsize = 16\nuse = ";
        assert!(error(&format!("{HEAD}{axis}\"shrad\"")).contains("shrad"));
        assert!(error(&format!("{HEAD}dtype = \"float31\"\n{axis}\"shard\"")).contains("float32"));
        assert!(error(&HEAD.replace("layers = 10", "layers = 0").add(axis, "\"shard\"")).contains("model.layers is 0"));
    }

    #[test]
    fn one_axis_may_take_what_is_left() {
        let sizes = |axes: &[(&str, i64)], devices| {
            let mut text = HEAD.to_owned();
            for (name, size) in axes {
                text += &format!("[[axis]]\nname = \"{name}\"\nsize = {size}\nuse = \"shard\"\n");
            }
            let mut plan = Plan::read(&text).unwrap();
            plan.fill(devices).map(|()| plan.axis.iter().map(|axis| axis.size).collect::<Vec<_>>())
        };
        assert_eq!(sizes(&[("a", 4), ("b", -1)], 64), Ok(vec![4, 16]));
        assert_eq!(sizes(&[("a", 4), ("b", 2)], 64), Ok(vec![4, 2]));
        assert!(sizes(&[("a", -1), ("b", -1)], 64).unwrap_err().contains("axes a, b"));
        assert!(sizes(&[("a", 3), ("b", -1)], 64).unwrap_err().contains("3 ranks do not divide the slice's 64"));
        assert!(sizes(&[("a", 0), ("b", -1)], 64).unwrap_err().contains("0 ranks"));
    }

    #[test]
    fn across_slices_only_the_parts_inside_are_compiled() {
        let slice = parse_with("v5e:2x2*2", &SliceOptions::default()).unwrap();
        let all = vec![(0..8).collect::<Vec<u32>>()];
        let of = |op, groups: &[Vec<u32>]| compiled(&slice, op, groups.to_vec()).unwrap();
        let (ops, inside) = of(Op::AllReduce, &all);
        assert_eq!((ops, inside), (vec![Op::ReduceScatter, Op::AllGather], vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7]]));
        assert_eq!(of(Op::AllGather, &all).0, [Op::AllGather]);
        assert!(of(Op::AllToAll, &all).0.is_empty());
        let pairs: Vec<Vec<u32>> = (0..4).map(|rank| vec![rank, rank + 4]).collect();
        assert!(of(Op::AllReduce, &pairs).0.is_empty());
        let slices = [vec![0, 1, 2, 3], vec![4, 5, 6, 7]];
        assert_eq!(of(Op::AllReduce, &slices), (vec![Op::AllReduce], slices.to_vec()));
    }

    trait Add {
        fn add(&self, more: &str, most: &str) -> String;
    }

    impl Add for String {
        fn add(&self, more: &str, most: &str) -> String {
            format!("{self}{more}{most}")
        }
    }
}
