//! Which of a job's hosts and processes this one is, where only the slice's variables tell.

use super::table::{Launcher, VARIABLES};
use super::{EnvironmentError, Given, Launch, Note, Result};
use crate::session::split_any;

/// Where entry `index` of a slice's list of TPU processes stands in the grid of `bounds`: x counts fastest, then y, then
/// z, as libtpu counts them. `None` if it is outside.
fn position(index: u32, [x, y, z]: [u32; 3]) -> Option<[u32; 3]> {
    let inside = u64::from(index) < u64::from(x) * u64::from(y) * u64::from(z);
    inside.then(|| [index % x, index / x % y, (u64::from(index) / (u64::from(x) * u64::from(y))) as u32])
}

/// The first host of a list as Slurm writes it: `a[03-05,9],b` begins with `a03`.
pub(super) fn first_of_list(text: &str) -> Option<String> {
    let (mut name, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(['[', ',']) {
        name.push_str(&rest[..at]);
        if rest[at..].starts_with(',') {
            rest = "";
            break;
        }
        let (within, after) = rest[at + 1..].split_once(']')?;
        let first = within.split([',', '-']).next()?;
        if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        name.push_str(first);
        rest = after;
    }
    name.push_str(rest);
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
    (!name.is_empty() && name.bytes().all(valid)).then_some(name)
}

impl Launch {
    /// Rank 0's host: `MASTER_ADDR`, or the first one that the launcher names from whose variables the rank comes.
    pub fn first_host(&self) -> Option<Given<String>> {
        if self.master_address.is_some() {
            return self.master_address.clone();
        }
        let rank = self.rank.as_ref()?;
        match VARIABLES.iter().find(|variable| variable.name == rank.by).map(|variable| variable.launcher) {
            Some(Launcher::Slurm) => self.first_node.clone(),
            Some(_) => None,
            // Computed: slice 0's worker 0, which has the multi-slice coordinator too.
            None => {
                let several = self.slice_count.as_ref().is_some_and(|count| count.value > 1);
                let first = |list: &Option<Given<Vec<String>>>| {
                    let list = list.as_ref()?;
                    Some(Given { value: list.value.first()?.clone(), by: list.by.clone() })
                };
                let by_process = self.process_addresses.as_ref().is_some_and(|list| rank.by.ends_with(&list.by));
                let named = match (several, by_process) {
                    (true, _) => self.slice_coordinator.clone(),
                    (false, true) => first(&self.process_addresses),
                    (false, false) => first(&self.worker_hosts),
                }?;
                let host = split_any(&named.value).map_or(named.value.as_str(), |(host, _)| host).to_owned();
                Some(Given { value: host, by: named.by })
            }
        }
    }

    /// Rank and world size of a job that only the slice's variables describe, and what the others' disagreement means.
    pub(super) fn complete(&mut self) -> Result<()> {
        let Some(worker) = &self.worker else { return Ok(()) };
        // A task id beside a list of TPU processes counts those, each a rank of its own; otherwise workers are hosts.
        let by_process = self.process_addresses.as_ref().filter(|_| worker.by == "CLOUD_TPU_TASK_ID");
        let Some(places) = by_process.or(self.worker_hosts.as_ref()) else { return Ok(()) };
        let by_host = by_process.is_none();
        let (slice, slices) = match (&self.slice, &self.slice_count) {
            (Some(slice), Some(count)) => (slice.value, count.value),
            _ => (0, 1),
        };
        let by = match &self.slice {
            Some(slice) => format!("{}, {}, {}", slice.by, worker.by, places.by),
            None => format!("{}, {}", worker.by, places.by),
        };
        // In 64 bits, since variables may hold any number; what doesn't fit into 32 isn't told.
        let fits = |value: u64| Some(Given { value: u32::try_from(value).ok()?, by: by.clone() });
        let per_slice = places.value.len() as u64;
        let place = u64::from(slice) * per_slice + u64::from(worker.value);
        let all = u64::from(slices) * per_slice;
        let launched = self.host_index.clone().or_else(|| {
            let (rank, local) = (self.rank.as_ref()?, self.local_world_size.as_ref()?);
            Some(Given { value: rank.value / local.value.max(1), by: format!("{}, {}", rank.by, local.by) })
        });
        // A launcher that numbers the same processes as the slices do.
        let (launched, what) = match (by_host, &self.world_size) {
            (true, _) => (launched, "host"),
            (false, Some(size)) if u64::from(size.value) == all => (self.rank.clone(), "rank"),
            (false, _) => (None, "rank"),
        };
        if let Some(launched) = launched.filter(|launched| u64::from(launched.value) != place) {
            let cells = |bounds: &[u32]| bounds.iter().map(|extent| u64::from(*extent)).product::<u64>();
            let grid = self.process_bounds.as_ref().filter(|bounds| cells(&bounds.value) == per_slice);
            // Where each device of a chip is a process, the list's order isn't said to be x first.
            let at = grid.and_then(|bounds| {
                let extents = <[u32; 3]>::try_from(&bounds.value[..]).ok()?;
                Some((position(worker.value, extents)?, &bounds.by))
            });
            let at = at.map(|([x, y, z], by)| format!(" (at {x},{y},{z} by {by})")).unwrap_or_default();
            let text = format!(
                "{what} {} by the launcher is worker {}{at} of slice {slice}, {what} {place} of the slices; ranks stay \
                 the launcher's, so neighbouring ranks may be far apart on the torus",
                launched.value, worker.value
            );
            self.notes.push(Note { decides: launched.by, other: by.clone(), text, usual: false });
        }
        if self.rank.is_some() || self.world_size.is_some() {
            return Ok(());
        }
        let (local_rank, local_size) = match (&self.local_rank, &self.local_world_size) {
            _ if !by_host => (0, 1),
            (Some(rank), Some(size)) => (u64::from(rank.value), u64::from(size.value)),
            (None, None) => (0, 1),
            (Some(rank), None) => {
                let (name, value) = (rank.by.clone(), rank.value.to_string());
                return Err(EnvironmentError::Incomplete { name, value, missing: "LOCAL_WORLD_SIZE" });
            }
            (None, Some(size)) if size.value == 1 => (0, 1),
            (None, Some(size)) => {
                let (name, value) = (size.by.clone(), size.value.to_string());
                return Err(EnvironmentError::Incomplete { name, value, missing: "LOCAL_RANK" });
            }
        };
        let (rank, size) = (place.checked_mul(local_size), all.checked_mul(local_size));
        if let (Some(rank), Some(size)) = (rank.and_then(|rank| rank.checked_add(local_rank)), size)
            && let (Some(rank), Some(size)) = (fits(rank), fits(size))
        {
            if by_host && self.host_index.is_none() && self.host_count.is_none() {
                (self.host_index, self.host_count) = (fits(place), fits(all));
            }
            (self.rank, self.world_size) = (Some(rank), Some(size));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Launch, EnvironmentError> {
        Launch::read(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn positions_count_as_the_topology_does() {
        assert_eq!(position(0, [2, 2, 2]), Some([0, 0, 0]));
        assert_eq!(position(1, [2, 2, 2]), Some([1, 0, 0]));
        assert_eq!(position(6, [2, 2, 2]), Some([0, 1, 1]));
        assert_eq!(position(8, [2, 2, 2]), None);
        let all: Vec<[u32; 3]> = (0..12).filter_map(|index| position(index, [3, 2, 2])).collect();
        let mut sorted = all.clone();
        sorted.sort_by_key(|[x, y, z]| [*z, *y, *x]);
        sorted.dedup();
        assert_eq!((all.len(), &all), (12, &sorted));
        assert_eq!(position(u32::MAX - 1, [1, 1, u32::MAX]), Some([0, 0, u32::MAX - 1]));
    }

    #[test]
    fn tpu_processes_that_the_launcher_numbers_otherwise_are_noted_with_their_place() {
        let launch = read(&[
            ("RANK", "1"),
            ("WORLD_SIZE", "4"),
            ("CLOUD_TPU_TASK_ID", "2"),
            ("TPU_PROCESS_ADDRESSES", "h:1,h:2,h:3,h:4"),
            ("TPU_PROCESS_BOUNDS", "2,2,1"),
        ])
        .unwrap();
        let [note] = &launch.notes[..] else { panic!("{:?}", launch.notes) };
        assert_eq!((note.decides.as_str(), note.usual), ("RANK", false));
        assert!(
            note.to_string().contains("rank 1 by the launcher is worker 2 (at 0,1,0 by TPU_PROCESS_BOUNDS)"),
            "{note}"
        );
        assert_eq!(launch.rank.unwrap().value, 1);
    }

    #[test]
    fn hosts_and_tpu_processes_are_counted_apart() {
        let launch = read(&[
            ("TPU_WORKER_ID", "1"),
            ("TPU_WORKER_HOSTNAMES", "a,b"),
            ("CLOUD_TPU_TASK_ID", "3"),
            ("TPU_PROCESS_ADDRESSES", "a:1,a:2,b:1,b:2"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
        ])
        .unwrap();
        assert_eq!((launch.rank.unwrap().value, launch.world_size.unwrap().value), (3, 4));
        assert!(launch.notes.iter().all(|note| note.usual), "{:?}", launch.notes);
    }

    #[test]
    fn the_first_host_is_the_one_of_the_launcher_that_numbers() {
        let first = |pairs: &[(&str, &str)]| read(pairs).unwrap().first_host().map(|first| first.value);
        let slurm = [("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2")];
        let with = |more: &[(&'static str, &'static str)]| [&slurm[..], more].concat();
        let lists = [("SLURM_STEP_NODELIST", "n[03-05,9],z"), ("SLURM_JOB_NODELIST", "n[01-09]")];
        assert_eq!(first(&with(&lists)).as_deref(), Some("n03"));
        assert_eq!(first(&with(&lists[1..])).as_deref(), Some("n01"));
        assert_eq!(first(&slurm), None);
        assert_eq!(first(&with(&[("MASTER_ADDR", "m"), lists[0]])).as_deref(), Some("m"));
        // Another launcher's ranks may begin on another host.
        assert_eq!(first(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2"), lists[0]]), None);
        let slice = [("TPU_WORKER_ID", "1"), ("TPU_WORKER_HOSTNAMES", "a,b")];
        assert_eq!(first(&slice).as_deref(), Some("a"));
        let of_two = [("MEGASCALE_SLICE_ID", "1"), ("MEGASCALE_NUM_SLICES", "2")];
        let two = [&slice[..], &of_two].concat();
        assert_eq!(first(&two), None);
        let two = [&two[..], &[("MEGASCALE_COORDINATOR_ADDRESS", "job-0-0.job:8080")]].concat();
        assert_eq!(first(&two).as_deref(), Some("job-0-0.job"));
        let processes = [("CLOUD_TPU_TASK_ID", "1"), ("TPU_PROCESS_ADDRESSES", "[::1]:1,h:2")];
        assert_eq!(first(&processes).as_deref(), Some("::1"));
    }

    #[test]
    fn lists_of_slurm() {
        for (list, first) in [
            ("a", Some("a")),
            ("a,b", Some("a")),
            ("rack[2-3]n[07,9]-ib,c", Some("rack2n07-ib")),
            ("a[1-2", None),
            ("a[]", None),
            ("a[x]", None),
            (",a", None),
            ("a b", None),
        ] {
            assert_eq!(first_of_list(list).as_deref(), first, "{list}");
        }
    }
}
