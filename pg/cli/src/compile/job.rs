//! What is to be compiled: from arguments to a program and its devices.

use podring_ici::{
    program::{self, Backend, PartSpec, Program, Spec, layout::TILE},
    slice::{Callers, How, Launch, Plan, plan, plan_alone, reduce_scatter_us},
};
use podring_topology::{Slice, SliceOptions, cost, parse_with};

use super::{Args, CompileError};
use crate::bench::op::Op;

/// A program for a slice.
pub(super) struct Job {
    pub slice: Slice,
    pub op: Op,
    /// The group in question: the first of those that have a program.
    pub ranks: Vec<u32>,
    pub how: &'static str,
    pub why: &'static str,
    /// How the groups run if every chip of the slice calls at once.
    pub everybody: (&'static str, &'static str),
    /// How that group runs if its members alone call, as the engine has it.
    pub members: (&'static str, &'static str),
    /// Groups asked for, and those of them that the hosts' network carries in the engine.
    pub groups: (usize, usize),
    /// None where the hosts' network carries it.
    pub work: Option<Work>,
    /// Bytes of the whole buffer of a rank, rounded up to whole elements on every rank.
    pub bytes: u64,
}

/// What is compiled.
pub(super) struct Work {
    pub launch: Launch,
    pub program: Program,
    /// The members' devices alone, of which each process holds one.
    pub alone: bool,
    pub predicted_us: f64,
}

impl Job {
    pub fn of(args: &Args) -> Result<Job, CompileError> {
        let slice = parse_with(args.slice.as_deref().unwrap_or_default(), &SliceOptions::default())?;
        let op = args.op.unwrap_or(Op::AllReduce);
        let groups = groups(&slice, &args.group)?;
        let together = plan(&slice, &groups, Callers::Everybody)?;
        let everybody = (name(&together.how), together.why);
        let mut alone = groups.iter().map(|group| plan_alone(&slice, group)).collect::<Result<Vec<Plan>, _>>()?;
        let by_host = alone.iter().filter(|plan| launch(&plan.how).is_none()).count();
        let shown = alone.iter().position(|plan| launch(&plan.how).is_some()).unwrap_or(0);
        let (ranks, own) = (groups[shown].clone(), alone.swap_remove(shown));
        let members = (name(&own.how), own.why);
        let chosen = if args.everybody { together } else { own };
        let launch = launch(&chosen.how);
        if launch.is_none() && (args.everybody || slice.slices() > 1 && spans(&slice, &ranks)) {
            // Of those with a part inside each slice, that part is a job.
            return Err(CompileError::NoProgram { why: chosen.why });
        }
        let size = ranks.len() as u32;
        let count = op.count(args.bytes, args.dtype, size);
        let bytes = count * args.dtype.size() as u64;
        let (how, why) = (name(&chosen.how), chosen.why);
        let work = match launch {
            Some(launch) => Some(Work::of(args, &slice, op, &ranks, launch, how == "members")?),
            None => None,
        };
        Ok(Job { slice, op, ranks, how, why, everybody, members, groups: (groups.len(), by_host), work, bytes })
    }

    /// The StableHLO, if there is a program.
    pub fn text(&self) -> Option<&str> {
        Some(&self.work.as_ref()?.program.text)
    }

    /// libtpu's name of the slice, without the number of slices, which is an option of its own.
    pub fn topology(&self) -> String {
        self.slice.to_string().split('*').next().unwrap_or_default().to_owned()
    }
}

impl Work {
    fn of(
        args: &Args,
        slice: &Slice,
        op: Op,
        ranks: &[u32],
        launch: Launch,
        alone: bool,
    ) -> Result<Work, CompileError> {
        let members = ranks.len() as u32;
        let count = op.count(args.bytes, args.dtype, members);
        let whole = matches!(op, Op::AllReduce | Op::Broadcast | Op::Reduce | Op::SendRecv | Op::Barrier);
        let elements = if whole { count } else { count / u64::from(members) } as usize;
        let reduction = op.reduces().then_some(args.redop);
        let spec = Spec {
            op: if args.uneven && op == Op::AllToAll {
                // As many bytes as even blocks have, and a tile more for each block to start on one.
                let tiles = (count as usize * args.dtype.size()).div_ceil(TILE) + members as usize;
                program::Op::AllToAllUneven { tiles }
            } else {
                program_op(op, members)
            },
            parts: vec![PartSpec { dtype: args.dtype, reduction, elements }],
            groups: launch.groups.clone(),
            backend: Backend::Tpu,
            exact: args.exact,
            donate: false,
        };
        let program = program::build(&spec)?;
        let bytes = count * args.dtype.size() as u64;
        let stepwise = match op {
            Op::ReduceScatter => reduce_scatter_us(slice, &launch.groups, bytes)?,
            _ => None,
        };
        let predicted_us = match stepwise {
            Some(us) => us,
            None => cost::predict(slice, ranks, collective(op), bytes)?.total_us(),
        };
        Ok(Work { launch, program, alone, predicted_us })
    }
}

/// The one program of a way.
fn launch(how: &How) -> Option<Launch> {
    match how {
        How::Whole(launch) | How::Cover { launch, .. } | How::Members { launch, .. } => Some(launch.clone()),
        How::AcrossSlices { .. } | How::Steps(_) | How::Host => None,
    }
}

fn name(how: &How) -> &'static str {
    match how {
        How::Whole(_) => "whole",
        How::Cover { .. } => "cover",
        How::Members { .. } => "members",
        How::Steps(_) => "steps",
        How::AcrossSlices { .. } => "across slices",
        How::Host => "host",
    }
}

/// Whether the ranks are of several slices.
fn spans(slice: &Slice, ranks: &[u32]) -> bool {
    ranks.iter().any(|rank| rank / slice.devices_per_slice() != ranks[0] / slice.devices_per_slice())
}

pub(super) fn groups(slice: &Slice, text: &str) -> Result<Vec<Vec<u32>>, CompileError> {
    let wrong = || CompileError::Group { got: text.to_owned() };
    if text == "all" {
        return Ok(vec![(0..slice.devices()).collect()]);
    }
    if let Some(axis) = text.strip_prefix("axis:") {
        let index = ["x", "y", "z"].iter().position(|name| *name == axis).ok_or_else(wrong)?;
        return lines(slice, index);
    }
    let ranks = |group: &str| -> Result<Vec<u32>, CompileError> {
        group.split(',').map(|part| part.trim().parse().map_err(|_| wrong())).collect()
    };
    text.split('/').map(ranks).collect()
}

/// Every line along an axis, ordered by coordinate; the devices of a chip are in lines of their own.
fn lines(slice: &Slice, axis: usize) -> Result<Vec<Vec<u32>>, CompileError> {
    if slice.dims()[axis] < 2 {
        return Err(CompileError::Axis { slice: slice.to_string(), axis: ['x', 'y', 'z'][axis] });
    }
    let mut lines = std::collections::BTreeMap::<_, Vec<(u32, u32)>>::new();
    for rank in 0..slice.devices() {
        if let Some(device) = slice.device(rank) {
            let mut place = device.coords;
            place[axis] = 0;
            lines.entry((device.slice, place, device.core)).or_default().push((device.coords[axis], rank));
        }
    }
    Ok(lines
        .into_values()
        .map(|mut line| {
            line.sort_unstable();
            line.into_iter().map(|(_, rank)| rank).collect()
        })
        .collect())
}

/// Groups as `--group` reads them.
pub(super) fn text(groups: &[Vec<u32>]) -> String {
    let ranks = |group: &Vec<u32>| group.iter().map(u32::to_string).collect::<Vec<String>>().join(",");
    groups.iter().map(ranks).collect::<Vec<String>>().join("/")
}

fn program_op(op: Op, members: u32) -> program::Op {
    match op {
        Op::AllReduce | Op::Reduce => program::Op::AllReduce,
        Op::AllGather => program::Op::AllGather,
        Op::ReduceScatter => program::Op::ReduceScatter,
        Op::AllToAll => program::Op::AllToAll,
        Op::Broadcast => program::Op::Broadcast,
        Op::Gather => program::Op::Gather { root: 0 },
        Op::Scatter => program::Op::Scatter { root: 0 },
        Op::SendRecv => {
            program::Op::Permute { pairs: (0..members).map(|member| (member, (member + 1) % members)).collect() }
        }
        Op::Barrier => program::Op::Barrier,
    }
}

pub(super) fn collective(op: Op) -> cost::Collective {
    match op {
        Op::AllReduce | Op::Barrier => cost::Collective::AllReduce,
        Op::AllGather => cost::Collective::AllGather,
        Op::ReduceScatter => cost::Collective::ReduceScatter,
        Op::AllToAll => cost::Collective::AllToAll,
        Op::Broadcast => cost::Collective::Broadcast,
        Op::Reduce => cost::Collective::Reduce,
        Op::Gather => cost::Collective::Gather,
        Op::Scatter => cost::Collective::Scatter,
        Op::SendRecv => cost::Collective::Permute,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use podring_topology::parse;

    #[test]
    fn groups_are_read() {
        let slice = parse("v5e:4x4").unwrap();
        assert_eq!(groups(&slice, "all").unwrap()[0].len(), 16);
        assert_eq!(groups(&slice, "0, 3,5").unwrap(), [[0, 3, 5]]);
        assert_eq!(groups(&slice, "0,1/3,2").unwrap(), [[0, 1], [3, 2]]);
        let lines = groups(&slice, "axis:y").unwrap();
        assert_eq!(lines.len(), 4);
        for line in &lines {
            let coords: Vec<[u32; 3]> = line.iter().map(|&rank| slice.device(rank).unwrap().coords).collect();
            assert!(coords.windows(2).all(|pair| pair[0][0] == pair[1][0] && pair[0][1] + 1 == pair[1][1]));
        }
        assert!(matches!(groups(&slice, "axis:w"), Err(CompileError::Group { .. })));
        assert!(matches!(groups(&slice, "1,x"), Err(CompileError::Group { .. })));
        assert!(matches!(groups(&slice, "axis:z"), Err(CompileError::Axis { axis: 'z', .. })));
        // Two devices per chip: each in its own line.
        assert_eq!(groups(&parse("tpu7x:2x2x1").unwrap(), "axis:x").unwrap().len(), 4);
    }

    /// What a group is shown to run as is what the engine launches, and the other way beside it.
    #[test]
    fn both_ways_are_told_and_the_engines_is_compiled() {
        use clap::Parser as _;

        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: Args,
        }
        let job =
            |words: &[&str]| Job::of(&Line::parse_from(["compile", "v5e:4x4", "all_reduce"].iter().chain(words)).args);
        // The line at the corner is refused, the next has a program of its own.
        let axis = job(&["--group", "axis:x"]).unwrap();
        assert_eq!((axis.how, axis.everybody.0, axis.members.0, axis.groups), ("members", "cover", "members", (4, 1)));
        assert_eq!(axis.ranks, [2, 3, 6, 7]);
        assert_eq!(axis.work.unwrap().launch.ranks, [2, 3, 6, 7]);
        let covered = job(&["--group", "axis:x", "--everybody"]).unwrap();
        assert_eq!((covered.how, covered.members.0), ("cover", "members"));
        assert_eq!(covered.work.unwrap().launch.ranks.len(), 16);
        let square = job(&["--group", "0,1,2,3"]).unwrap();
        assert_eq!((square.how, square.everybody.0, square.groups), ("host", "cover", (1, 1)));
        assert!(square.work.is_none() && square.why.contains("sub-slice"));
        let all = job(&[]).unwrap();
        assert_eq!((all.how, all.everybody.0, all.members.0, all.groups), ("whole", "whole", "whole", (1, 0)));
        assert!(matches!(job(&["--group", "0,1,2/3,4", "--everybody"]), Err(CompileError::NoProgram { .. })));
    }
}
