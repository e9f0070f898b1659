//! A collective over several slices, as the engine runs it: programs inside each slice, the hosts' network between them
//! (docs/ici.md, "Across slices").

use podring_ici::slice::{Callers, How, plan, plan_alone};
use podring_topology::{Slice, SliceOptions, cost, parse_with};
use serde_json::{Value, json};

use super::{
    Args, CompileError, child,
    job::{self, Job},
};
use crate::{bench::op::Op, terminal};

/// One after another.
enum Part {
    /// A program of each slice, all alike.
    Inside(Box<Args>, Box<Job>),
    /// Among the members of the same place in every slice.
    Between { op: Op, bytes: u64, predicted_us: f64 },
}

/// A collective in parts.
pub(super) struct Across {
    slice: Slice,
    op: Op,
    bytes: u64,
    ranks: usize,
    why: &'static str,
    parts: Vec<Part>,
}

impl Across {
    /// The parts of what is asked; none if it stays inside slices, or the hosts' network carries it all.
    pub fn of(args: &Args) -> Result<Option<Across>, CompileError> {
        let slice = parse_with(args.slice.as_deref().unwrap_or_default(), &SliceOptions::default())?;
        let groups = job::groups(&slice, &args.group)?;
        let planned = plan(&slice, &groups, Callers::Everybody)?;
        let How::AcrossSlices { inside: Some(_), .. } = planned.how else { return Ok(None) };
        let op = args.op.unwrap_or(Op::AllReduce);
        let per_slice = slice.devices() / slice.slices();
        let here: Vec<Vec<u32>> = groups
            .iter()
            .map(|group| group.iter().copied().filter(|&rank| rank < per_slice).collect())
            .filter(|group: &Vec<u32>| !group.is_empty())
            .collect();
        // Groups that the first slice has no part in are alike there.
        let (Some(members), Some(first)) = (here.first(), groups.first()) else { return Ok(None) };
        let ranks = first.len();
        let whole = op.count(args.bytes, args.dtype, ranks as u32) * args.dtype.size() as u64;
        let share = whole.div_ceil(members.len() as u64);
        // The first member's counterparts in the other slices: the first of those that are there.
        let mut between: Vec<u32> = Vec::new();
        for rank in first {
            if between.iter().all(|other| other / per_slice != rank / per_slice) {
                between.push(*rank);
            }
        }
        for other in between.iter().filter(|_| !args.everybody) {
            let of_slice = |rank: &u32| rank / per_slice == other / per_slice;
            let part: Vec<u32> = first.iter().copied().filter(of_slice).collect();
            let alone = plan_alone(&slice, &part)?;
            if alone.how == How::Host {
                return Err(CompileError::NoProgram { why: alone.why });
            }
        }
        let steps: &[(bool, Op, u64)] = match op {
            Op::AllReduce => {
                &[(true, Op::ReduceScatter, whole), (false, Op::AllReduce, share), (true, Op::AllGather, whole)]
            }
            Op::Reduce => &[(true, Op::ReduceScatter, whole), (false, Op::Reduce, share), (true, Op::Gather, whole)],
            Op::Broadcast => &[(false, Op::Broadcast, whole), (true, Op::Broadcast, whole)],
            Op::AllGather => &[(false, Op::AllGather, share), (true, Op::AllGather, whole)],
            Op::ReduceScatter => &[(true, Op::ReduceScatter, whole), (false, Op::ReduceScatter, share)],
            Op::Barrier => &[(true, Op::Barrier, 0), (false, Op::Barrier, 0), (true, Op::Barrier, 0)],
            Op::AllToAll | Op::Gather | Op::Scatter | Op::SendRecv => {
                let why = "across slices the hosts' network carries all of it";
                return Err(CompileError::NoProgram { why });
            }
        };
        let one_slice = slice.to_string().split('*').next().unwrap_or_default().to_owned();
        let group = if members.len() == per_slice as usize { "all".to_owned() } else { job::text(&here) };
        let part = |&(inside, op, bytes): &(bool, Op, u64)| -> Result<Part, CompileError> {
            if !inside {
                let predicted = cost::predict(&slice, &between, job::collective(op), bytes.max(1))?;
                return Ok(Part::Between { op, bytes, predicted_us: predicted.total_us() });
            }
            let (slice, group) = (Some(one_slice.clone()), group.clone());
            let one = Args { slice, op: Some(op), bytes, group, mlir: None, plan: None, table: false, ..*args };
            let job = Job::of(&one)?;
            Ok(Part::Inside(Box::new(one), Box::new(job)))
        };
        let parts = steps.iter().map(part).collect::<Result<Vec<Part>, CompileError>>()?;
        Ok(Some(Across { slice, op, bytes: whole, ranks, why: planned.why, parts }))
    }

    /// The StableHLO of the programs, in order.
    pub fn text(&self) -> String {
        let text = |part: &Part| match part {
            Part::Inside(_, job) => job.text().map(str::to_owned),
            Part::Between { .. } => None,
        };
        self.parts.iter().filter_map(text).collect::<Vec<_>>().join("\n")
    }

    /// Compiles each program; the whole's report holds the parts'.
    pub fn compile(&self, args: &Args) -> Result<Value, CompileError> {
        let mut progress = terminal::Progress::new();
        let mut parts = Vec::new();
        for (index, part) in self.parts.iter().enumerate() {
            parts.push(match part {
                Part::Inside(args, job) => {
                    progress.show(&format!("{}/{} {} inside each slice", index + 1, self.parts.len(), job.op.name()));
                    let mut report = child::compile(args, job)?;
                    report["where"] = json!("inside each slice");
                    report
                }
                Part::Between { op, bytes, predicted_us } => json!({
                    "where": "between slices",
                    "op": op.name(),
                    "bytes": bytes,
                    "ranks": self.slice.slices(),
                    "predicted_us": (predicted_us * 10.0).round() / 10.0,
                }),
            });
        }
        progress.clear();
        Ok(self.whole(args, parts))
    }

    fn whole(&self, args: &Args, parts: Vec<Value>) -> Value {
        let programs = || parts.iter().filter(|part| part["compile_s"].is_number());
        let sum = |name: &str| parts.iter().filter_map(|part| part[name].as_f64()).sum::<f64>();
        let count = |name: &str| programs().filter_map(|part| part[name].as_u64()).sum::<u64>();
        let most = |name: &str| programs().filter_map(|part| part[name].as_u64()).max();
        let first = |name: &str| programs().map(|part| part[name].clone()).find(|value| !value.is_null());
        let collectives: Vec<Value> =
            programs().filter_map(|part| part["collectives"].as_array()).flatten().cloned().collect();
        json!({
            "slice": self.slice.to_string(),
            "op": self.op.name(),
            "bytes": self.bytes,
            "dtype": args.dtype.name(),
            "group": args.group,
            "ranks": self.ranks,
            "plan": "across slices",
            "why": self.why,
            "compile_s": (sum("compile_s") * 1000.0).round() / 1000.0,
            "peak_rss_mib": most("peak_rss_mib"),
            "code_bytes": count("code_bytes"),
            "peak_memory_bytes": most("peak_memory_bytes"),
            "hlo_ops": count("hlo_ops"),
            "collectives": collectives,
            "emitter": first("emitter"),
            "strategy": first("strategy"),
            "colors": first("colors"),
            "phases": first("phases"),
            "dim_sizes": first("dim_sizes"),
            "async": programs().any(|part| part["async"] == true),
            "predicted_us": (sum("predicted_us") * 10.0).round() / 10.0,
            "compiler": first("compiler"),
            "parts": parts,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    /// Inside a slice or not, what, of how many bytes.
    type Seen = Vec<(bool, Op, u64)>;

    fn parts(words: &[&str]) -> Result<Option<Seen>, CompileError> {
        let line = Line::parse_from(["compile"].iter().chain(words));
        let part = |part: &Part| match part {
            Part::Inside(args, job) => (true, job.op, args.bytes),
            Part::Between { op, bytes, predicted_us } => {
                assert!(*predicted_us > 0.0);
                (false, *op, *bytes)
            }
        };
        Ok(Across::of(&line.args)?.map(|across| across.parts.iter().map(part).collect()))
    }

    #[test]
    fn parts_are_those_of_the_table() {
        let of = |op: &str| parts(&["v5e:2x2*2", op, "--bytes", "64K"]).unwrap().unwrap();
        let (whole, share) = (64 << 10, 16 << 10);
        assert_eq!(
            of("all_reduce"),
            [(true, Op::ReduceScatter, whole), (false, Op::AllReduce, share), (true, Op::AllGather, whole)]
        );
        assert_eq!(
            of("reduce"),
            [(true, Op::ReduceScatter, whole), (false, Op::Reduce, share), (true, Op::Gather, whole)]
        );
        assert_eq!(of("broadcast"), [(false, Op::Broadcast, whole), (true, Op::Broadcast, whole)]);
        assert_eq!(of("all_gather"), [(false, Op::AllGather, share), (true, Op::AllGather, whole)]);
        assert_eq!(of("reduce_scatter"), [(true, Op::ReduceScatter, whole), (false, Op::ReduceScatter, share)]);
        assert_eq!(of("barrier").len(), 3);
        assert!(matches!(parts(&["v5e:2x2*2", "all_to_all"]), Err(CompileError::NoProgram { .. })));
        // What stays inside slices, or has one member in each, has no such parts.
        for (slice, group) in [("v5e:2x2", "all"), ("v5e:2x2*2", "axis:x"), ("v5e:2x2*2", "0,4")] {
            assert_eq!(parts(&[slice, "all_reduce", "--group", group]).unwrap(), None);
        }
        let half =
            parts(&["v5e:2x2*2", "all_reduce", "--group", "0,1,4,5/2,3,6,7", "--bytes", "64K"]).unwrap().unwrap();
        assert_eq!(half[1], (false, Op::AllReduce, 32 << 10));
    }
}
