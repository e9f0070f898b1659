//! How a group runs on a slice.
//!
//! libtpu 0.0.52 compiles a collective for replica groups of equal size that hold every device of the program once;
//! unequal sizes, padding with −1 and partial covers are refused. A program runs only when every device in its device
//! assignment launches it. Both together leave few ways; [`plan`] chooses one, and says why.

mod alone;
mod scatter;
mod seen;

use podring_topology::{
    Slice, TopologyError,
    cover::{Filling, cover},
    group::classify,
};

use crate::program::{Groups, ProgramError};
pub use scatter::reduce_scatter_us;
pub use seen::{UnseenError, from_devices, from_names};

/// Who calls the collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Callers {
    /// Every device of the slice at once, each in its own group, as a mesh axis does it.
    Everybody,
    /// Only the members of the groups given: nobody else can be asked to launch anything.
    Members,
}

/// A program's devices and groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Ranks of the slice whose devices run the program; the n-th is replica n.
    pub ranks: Vec<u32>,
    /// Replica groups, by replica numbers. Groups asked for come first, in their order.
    pub groups: Groups,
}

impl Launch {
    /// libtpu's id of each replica's device.
    pub fn device_ids(&self, slice: &Slice) -> Vec<i64> {
        self.ranks.iter().filter_map(|&rank| slice.device(rank)).map(|device| i64::from(device.id)).collect()
    }
}

/// The ways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum How {
    /// One group of every device.
    Whole(Launch),
    /// Groups of equal size over every device, some of which nobody asked for.
    Cover {
        /// The program.
        launch: Launch,
        /// Where the groups nobody asked for come from.
        filling: Filling,
    },
    /// The members' devices alone are the program's devices.
    Members {
        /// The program.
        launch: Launch,
        /// libtpu takes some boxes for sub-slices and then refuses them, or ends its process. What is sure was never
        /// seen refused; what isn't is not to be tried where a process counts.
        sure: bool,
    },
    /// One after another: the groups are of several sizes.
    Steps(Vec<How>),
    /// Inside each slice by a program, across slices by the data-centre network: a reduce-scatter inside, the exchange
    /// of equal shards across, an all-gather inside.
    AcrossSlices {
        /// The program inside the slices that the group touches; none if it has one device in each.
        inside: Option<Box<How>>,
        /// Slices that the group touches.
        slices: u32,
    },
    /// No program: the hosts' network carries it all.
    Host,
}

/// A way and its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The way.
    pub how: How,
    /// Why this one.
    pub why: &'static str,
}

/// A question that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SliceError {
    /// Ranks that don't exist, appear twice, or empty groups.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The groups found are no partition (a fault of this crate's).
    #[error(transparent)]
    Groups(#[from] ProgramError),
}

/// Chooses how disjoint groups of ranks run. `groups` are the groups that call; with [`Callers::Everybody`] the rest of
/// the slice calls as well, in groups of its own.
pub fn plan(slice: &Slice, groups: &[Vec<u32>], callers: Callers) -> Result<Plan, SliceError> {
    let Some(first) = groups.first() else { return Err(TopologyError::EmptyGroup.into()) };
    for group in groups {
        classify(slice, group)?;
    }
    let mut members = groups.concat();
    classify(slice, &members)?;
    if slice.slices() > 1 && groups.iter().any(|group| spans(slice, group)) {
        return across(slice, groups, callers);
    }
    if groups.iter().any(|group| group.len() != first.len()) {
        return steps(slice, groups, callers);
    }
    let devices = slice.devices() as usize;
    if first.len() == devices {
        let groups = scatter::in_steps(slice, Groups::new(groups.to_vec())?)?;
        let launch = Launch { ranks: (0..slice.devices()).collect(), groups };
        return Ok(Plan { how: How::Whole(launch), why: "the group is every device" });
    }
    let everybody = callers == Callers::Everybody || members.len() == devices;
    if everybody && let Some(covered) = covered(slice, groups)? {
        return Ok(covered);
    }
    let why = if everybody {
        "the rest of the slice can't be cut into groups of this size"
    } else {
        "only the members call: nobody else would launch a program for the whole slice"
    };
    // A sub-slice is recognised by its set of devices, whatever their order and the groups inside it.
    let sure = alone::taken(slice, &members)?;
    members.sort_unstable();
    let replica = |rank: &u32| members.binary_search(rank).unwrap_or_default() as u32;
    let local: Vec<Vec<u32>> = groups.iter().map(|group| group.iter().map(replica).collect()).collect();
    let launch = Launch { groups: Groups::new(local)?, ranks: members };
    Ok(Plan { how: How::Members { launch, sure }, why })
}

/// How one group runs as the engine has it: its members launch a program, or the hosts' network carries it all. A group
/// of one slice, or the part of a group that is inside of one.
pub fn plan_alone(slice: &Slice, group: &[u32]) -> Result<Plan, SliceError> {
    let plan = plan(slice, &[group.to_vec()], Callers::Members)?;
    if matches!(plan.how, How::Members { sure: false, .. }) {
        let why =
            "libtpu would take the members' devices for a sub-slice and refuse them: the hosts' network carries it";
        return Ok(Plan { how: How::Host, why });
    }
    Ok(plan)
}

fn covered(slice: &Slice, groups: &[Vec<u32>]) -> Result<Option<Plan>, SliceError> {
    match cover(slice, groups) {
        Ok(cover) => {
            let launch = Launch { ranks: (0..slice.devices()).collect(), groups: Groups::new(cover.groups)? };
            let why = match cover.filling {
                Filling::Complete => "the groups are the whole slice",
                Filling::Translated => "the group's shape tiles the slice: every other group is a copy of it",
                Filling::ListOrder => "the rest of the slice is cut into groups of this size in list order",
            };
            Ok(Some(Plan { how: How::Cover { launch, filling: cover.filling }, why }))
        }
        Err(TopologyError::NoCover { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Groups of several sizes: libtpu refuses them in one program ("AllReduce does not support subgroups of different
/// sizes"). The largest come first.
fn steps(slice: &Slice, groups: &[Vec<u32>], callers: Callers) -> Result<Plan, SliceError> {
    let mut sizes: Vec<usize> = groups.iter().map(Vec::len).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    sizes.dedup();
    let mut steps = Vec::with_capacity(sizes.len());
    for size in sizes {
        let same: Vec<Vec<u32>> = groups.iter().filter(|group| group.len() == size).cloned().collect();
        steps.push(plan(slice, &same, callers)?.how);
    }
    Ok(Plan { how: How::Steps(steps), why: "groups of several sizes can't be one program" })
}

fn slice_of(slice: &Slice, rank: u32) -> u32 {
    slice.device(rank).map_or(0, |device| device.slice)
}

fn spans(slice: &Slice, group: &[u32]) -> bool {
    group.iter().any(|&rank| slice_of(slice, rank) != slice_of(slice, group[0]))
}

fn across(slice: &Slice, groups: &[Vec<u32>], callers: Callers) -> Result<Plan, SliceError> {
    let mut inside: Vec<Vec<u32>> = Vec::new();
    let mut touched = 0;
    for group in groups {
        let mut parts: Vec<Vec<u32>> = vec![Vec::new(); slice.slices() as usize];
        for &rank in group {
            parts[slice_of(slice, rank) as usize].push(rank);
        }
        parts.retain(|part| !part.is_empty());
        if parts.iter().any(|part| part.len() != parts[0].len()) {
            return Ok(Plan {
                how: How::Host,
                why: "the group has different numbers of devices in its slices: shards would not match",
            });
        }
        touched = touched.max(parts.len() as u32);
        inside.extend(parts);
    }
    let why = "the group is in several slices: shards of equal size meet across the data-centre network";
    if inside.iter().all(|part| part.len() == 1) {
        return Ok(Plan { how: How::AcrossSlices { inside: None, slices: touched }, why });
    }
    let inside = plan(slice, &inside, callers)?.how;
    Ok(Plan { how: How::AcrossSlices { inside: Some(Box::new(inside)), slices: touched }, why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use podring_topology::parse;
    use proptest::prelude::*;

    fn way(slice: &str, groups: &[&[u32]], callers: Callers) -> String {
        let groups: Vec<Vec<u32>> = groups.iter().map(|group| group.to_vec()).collect();
        name(&plan(&parse(slice).unwrap(), &groups, callers).unwrap().how)
    }

    fn name(how: &How) -> String {
        match how {
            How::Whole(_) => "whole".to_owned(),
            How::Cover { filling, launch } => {
                format!("cover {filling:?} {}x{}", launch.groups.groups.len(), launch.groups.size())
            }
            How::Members { launch, sure } => format!("members {} sure={sure}", launch.ranks.len()),
            How::Steps(steps) => format!("steps[{}]", steps.iter().map(name).collect::<Vec<_>>().join(", ")),
            How::AcrossSlices { inside, slices } => {
                format!("across {slices} ({})", inside.as_ref().map_or("one each".to_owned(), |inside| name(inside)))
            }
            How::Host => "host".to_owned(),
        }
    }

    #[test]
    fn the_table() {
        use Callers::{Everybody, Members};
        let all: Vec<u32> = (0..16).collect();
        assert_eq!(way("v5e:4x4", &[&all], Members), "whole");
        // Rank order is libtpu's list order: ranks 0..4 of v5e:4x4 are one host's square.
        assert_eq!(way("v5e:4x4", &[&[0, 1, 2, 3]], Everybody), "cover Translated 4x4");
        assert_eq!(way("v5e:4x4", &[&[0, 1, 2, 3]], Members), "members 4 sure=false");
        assert_eq!(way("v5e:4x4", &[&[0, 3, 5]], Everybody), "members 3 sure=true");
        assert_eq!(way("v5e:4x4", &[&[0, 7, 9, 14]], Everybody), "cover ListOrder 4x4");
        assert_eq!(way("v5e:4x4", &[&[0, 7, 9, 14]], Members), "members 4 sure=true");
        assert_eq!(way("v5e:4x4", &[&all[..8], &all[8..]], Members), "cover Complete 2x8");
        assert_eq!(
            way("v5e:4x4", &[&all[..12], &all[12..]], Members),
            "steps[members 12 sure=true, members 4 sure=true]"
        );
        assert_eq!(
            way("v5e:4x4", &[&all[..8], &[8, 9], &[10, 11]], Everybody),
            "steps[cover Translated 2x8, cover Translated 8x2]"
        );
        assert_eq!(way("v5e:4x4", &[&[5]], Members), "members 1 sure=true");
        let two: Vec<u32> = (0..32).collect();
        assert_eq!(way("v5e:4x4*2", &[&two], Members), "across 2 (cover Complete 2x16)");
        assert_eq!(way("v5e:4x4*2", &[&[0, 16]], Members), "across 2 (one each)");
        assert_eq!(way("v5e:4x4*2", &[&[0, 1, 16]], Members), "host");
        assert_eq!(way("v5e:4x4*2", &[&all], Everybody), "cover Translated 2x16");
    }

    #[test]
    fn bad_groups_are_named() {
        let slice = parse("v5e:2x2").unwrap();
        let error = |groups: &[Vec<u32>]| plan(&slice, groups, Callers::Members).unwrap_err();
        assert_eq!(error(&[]), TopologyError::EmptyGroup.into());
        assert_eq!(error(&[vec![]]), TopologyError::EmptyGroup.into());
        assert_eq!(error(&[vec![0, 4]]), TopologyError::RankOutOfRange { rank: 4, devices: 4 }.into());
        assert_eq!(error(&[vec![0, 1], vec![1, 2]]), TopologyError::DuplicateRank { rank: 1 }.into());
    }

    #[test]
    fn what_libtpu_would_refuse_goes_over_the_hosts_network() {
        let way = |slice: &str, group: &[u32]| name(&plan_alone(&parse(slice).unwrap(), group).unwrap().how);
        // A host's square: the one at the corner, and another.
        assert_eq!(way("v5e:4x4", &[0, 1, 2, 3]), "host");
        assert_eq!(way("v5e:4x4", &[4, 5, 6, 7]), "members 4 sure=true");
        // The first line along x, and the second.
        assert_eq!(way("v5e:4x4", &[0, 1, 4, 5]), "host");
        assert_eq!(way("v5e:4x4", &[2, 3, 6, 7]), "members 4 sure=true");
        assert_eq!(way("v5e:4x4", &[0, 3, 5]), "members 3 sure=true");
        assert_eq!(way("v5e:4x4", &(0..16).collect::<Vec<_>>()), "whole");
        assert_eq!(way("v5e:4x4*2", &[16, 17, 18, 19]), "host");
        assert_eq!(way("v5e:2x2*2", &[4, 5, 6, 7]), "members 4 sure=true");
        assert_eq!(way("v5p:2x2x2", &[0, 1]), "members 2 sure=true");
    }

    proptest! {
        /// Whatever is asked, a launch's groups are a partition, and the groups asked for are among them in order.
        #[test]
        fn launches_hold_what_was_asked(
            name in prop::sample::select(vec!["v5e:4x4", "v5p:2x2x2", "v5e:2x2*2", "tpu7x:2x2x1"]),
            seed in prop::collection::vec(0u32..1000, 1..9),
            everybody: bool,
        ) {
            let slice = parse(name).unwrap();
            let mut ranks: Vec<u32> = seed.iter().map(|rank| rank % slice.devices()).collect();
            ranks.sort_unstable();
            ranks.dedup();
            let callers = if everybody { Callers::Everybody } else { Callers::Members };
            let how = plan(&slice, &[ranks.clone()], callers).unwrap().how;
            if let How::Whole(launch) | How::Cover { launch, .. } | How::Members { launch, .. } = how {
                let mut replicas = launch.groups.groups.concat();
                replicas.sort_unstable();
                prop_assert_eq!(replicas, (0..launch.ranks.len() as u32).collect::<Vec<_>>());
                let first: Vec<u32> =
                    launch.groups.groups[0].iter().map(|&replica| launch.ranks[replica as usize]).collect();
                prop_assert_eq!(first, ranks);
                prop_assert_eq!(launch.device_ids(&slice).len(), launch.ranks.len());
            }
        }
    }
}
