//! The launcher's variables beside what init_process_group was given.

use super::table::{Fact, Launcher, VARIABLES};
use super::{EnvironmentError, Given, Launch, Note, contradiction, metadata};

/// Rank and world size of a process that was given one of them, or neither, otherwise than by variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbered {
    /// Its rank, if anything tells.
    pub rank: Option<u32>,
    /// The world's size, if anything tells.
    pub world_size: Option<u32>,
    /// What the variables say.
    pub launch: Launch,
}

impl Numbered {
    /// Reads the process's environment, and asks the metadata server if that is wanted.
    pub fn from_env(rank: Option<u32>, world_size: Option<u32>) -> Result<Numbered, EnvironmentError> {
        Numbered::read(metadata::beside(|name| std::env::var(name).ok())?, rank, world_size)
    }

    /// Reads variables through `lookup`. What was given (by arguments or a URL) goes before any variable, and must agree
    /// with the launcher that gives the other half. A pod's completion index is its rank if the world size is known and
    /// nothing else tells.
    pub fn read(
        lookup: impl Fn(&str) -> Option<String>,
        rank: Option<u32>,
        world_size: Option<u32>,
    ) -> Result<Numbered, EnvironmentError> {
        let set = |name: &str| lookup(name).filter(|value| !value.trim().is_empty());
        // The half of the pair that the environment lacks.
        let other = |given: Option<u32>, half: &str| set(half).and(given).map(|value| value.to_string());
        let launch = Launch::read(|name| match name {
            "RANK" => set(name).or_else(|| other(rank, "WORLD_SIZE")),
            "WORLD_SIZE" => set(name).or_else(|| other(world_size, "RANK")),
            _ => set(name),
        })?;
        let agree = |mine: &Option<Given<u32>>, given: Option<u32>, what| match (mine, given) {
            (Some(mine), Some(given)) if mine.value != given => {
                let why = "the other of rank and world size is this launcher's";
                Err(contradiction((&mine.by, mine.value), (what, given), why))
            }
            _ => Ok(()),
        };
        if rank.is_none() || world_size.is_none() {
            agree(&launch.rank, rank, GIVEN)?;
            agree(&launch.world_size, world_size, GIVEN_SIZE)?;
        }
        let mut numbered = Numbered {
            rank: rank.or(launch.rank.as_ref().map(|rank| rank.value)),
            world_size: world_size.or(launch.world_size.as_ref().map(|size| size.value)),
            launch,
        };
        if numbered.launch.rank.is_none() && numbered.rank.is_none() {
            let alone = set("WORLD_SIZE").and_then(|text| text.trim().parse().ok());
            numbered.rank_of_pod(world_size.or(alone))?;
        }
        Ok(numbered)
    }

    /// One rank a pod, in a Job that is the whole world.
    fn rank_of_pod(&mut self, world_size: Option<u32>) -> Result<(), EnvironmentError> {
        let Launch { worker, slice_count, local_world_size, .. } = &self.launch;
        let one = |count: &Option<Given<u32>>| count.as_ref().is_none_or(|count| count.value == 1);
        let (Some(index), Some(size)) = (worker, world_size) else { return Ok(()) };
        if index.by != INDEX || !one(slice_count) || !one(local_world_size) {
            return Ok(());
        }
        if index.value >= size {
            let why = "ranks are 0 to world size - 1";
            return Err(contradiction((&index.by, index.value), ("world size", size), why));
        }
        (self.rank, self.world_size) = (Some(index.value), Some(size));
        Ok(())
    }

    /// Where rank and world size were looked for, for who has them not.
    pub fn sought(&self) -> String {
        let names = |facts: &[Fact]| {
            let all = VARIABLES.iter().filter(|variable| facts.contains(&variable.fact));
            let all = all.filter(|variable| !matches!(variable.launcher, Launcher::Torch | Launcher::Metadata));
            all.map(|variable| variable.name).collect::<Vec<_>>().join(", ")
        };
        let mut text = format!(
            "no launcher tells: looked for {} with a world size from the same launcher, and for {} with {}",
            names(&[Fact::Rank]),
            names(&[Fact::Worker]),
            names(&[Fact::WorkerHosts, Fact::ProcessAddresses]),
        );
        if let Some(worker) = &self.launch.worker {
            text.push_str(&format!(" ({}={} is set, but nothing says how many there are)", worker.by, worker.value));
        }
        text.push_str("; PODRING_METADATA=1 asks the GCE metadata server");
        text
    }
}

impl Launch {
    /// Holds the launcher's rank and world size against those that init_process_group got. Equal world sizes number the
    /// same processes, so their ranks must be equal; with different ones the job was started inside another (a spawn
    /// within torchrun), what init_process_group got decides, and a note says so.
    pub fn check(&self, rank: u32, world_size: u32) -> Result<Option<Note>, EnvironmentError> {
        let (Some(mine), Some(size)) = (&self.rank, &self.world_size) else { return Ok(None) };
        if size.value != world_size {
            let text = format!("{} counts {} processes, this group {world_size}", size.by, size.value);
            return Ok(Some(Note { decides: GIVEN.to_owned(), other: mine.by.clone(), text, usual: true }));
        }
        if mine.value != rank {
            let why = format!("both number the same {world_size} processes");
            return Err(contradiction((&mine.by, mine.value), (GIVEN, rank), why));
        }
        Ok(None)
    }

    /// The ranks that the launcher started on this host, if its variables tell: consecutive ones.
    pub fn local_ranks(&self) -> Vec<u32> {
        match (&self.rank, &self.world_size, &self.local_rank, &self.local_world_size) {
            (Some(rank), Some(size), Some(local), Some(count)) => {
                let first = rank.value - local.value.min(rank.value);
                (first..first.saturating_add(count.value).min(size.value)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The hosts of all ranks in order, an equal number each, if the variables tell: those of the only slice.
    pub fn hosts(&self, world_size: u32) -> Vec<String> {
        let alone = self.slice_count.as_ref().is_none_or(|count| count.value == 1);
        match &self.worker_hosts {
            Some(hosts) if alone && (world_size as usize).is_multiple_of(hosts.value.len().max(1)) => {
                hosts.value.clone()
            }
            _ => Vec::new(),
        }
    }
}

/// What the rank is called that didn't come from a variable.
const GIVEN: &str = "rank of init_process_group";
/// The same of the world size.
const GIVEN_SIZE: &str = "world_size of init_process_group";
/// A pod's number in its Job.
const INDEX: &str = "JOB_COMPLETION_INDEX";

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(pairs: &[(&str, &str)]) -> Launch {
        let lookup = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Launch::read(lookup).unwrap()
    }

    #[test]
    fn the_same_count_must_have_the_same_ranks() {
        let torchrun = launch(&[("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")]);
        assert_eq!(torchrun.check(1, 4), Ok(None));
        let error = torchrun.check(2, 4).unwrap_err().to_string();
        assert!(error.contains("RANK=\"1\"") && error.contains("rank of init_process_group=\"2\""), "{error}");
        // A spawn inside of it.
        let note = torchrun.check(0, 2).unwrap().unwrap();
        assert!(note.to_string().contains("WORLD_SIZE counts 4 processes, this group 2"), "{note}");
        assert_eq!(launch(&[]).check(0, 2), Ok(None));
        assert_eq!(torchrun.local_ranks(), [0, 1]);
        assert_eq!(launch(&[("RANK", "3"), ("WORLD_SIZE", "4")]).local_ranks(), [0; 0]);
    }

    fn numbered(
        pairs: &[(&str, &str)],
        rank: Option<u32>,
        size: Option<u32>,
    ) -> Result<(Option<u32>, Option<u32>), EnvironmentError> {
        let lookup = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Numbered::read(lookup, rank, size).map(|numbered| (numbered.rank, numbered.world_size))
    }

    #[test]
    fn what_was_given_is_completed_from_the_launcher() {
        let slurm = [("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2")];
        let mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")];
        for launcher in [&slurm[..], &mpi[..], &[("RANK", "1"), ("WORLD_SIZE", "2")]] {
            for (rank, size) in [(None, None), (Some(1), None), (None, Some(2))] {
                assert_eq!(numbered(launcher, rank, size), Ok((Some(1), Some(2))), "{launcher:?}");
            }
            let error = numbered(launcher, Some(0), None).unwrap_err().to_string();
            assert!(error.contains("=\"1\" and rank of init_process_group=\"0\" contradict"), "{error}");
            let error = numbered(launcher, None, Some(4)).unwrap_err().to_string();
            assert!(error.contains("=\"2\" and world_size of init_process_group=\"4\" contradict"), "{error}");
            // A job within the launcher's.
            assert_eq!(numbered(launcher, Some(0), Some(4)), Ok((Some(0), Some(4))));
        }
        assert_eq!(numbered(&[("RANK", "1")], None, Some(2)), Ok((Some(1), Some(2))));
        assert_eq!(numbered(&[("WORLD_SIZE", "2")], Some(1), None), Ok((Some(1), Some(2))));
        assert_eq!(numbered(&[], None, Some(2)), Ok((None, Some(2))));
        // srun is what numbers, not the batch script.
        assert_eq!(numbered(&slurm[1..], None, None), Ok((None, None)));
    }

    #[test]
    fn a_pod_is_a_rank_if_the_size_is_known() {
        let pod = [("JOB_COMPLETION_INDEX", "1")];
        assert_eq!(numbered(&pod, None, Some(2)), Ok((Some(1), Some(2))));
        assert_eq!(numbered(&[pod[0], ("WORLD_SIZE", "2")], None, None), Ok((Some(1), Some(2))));
        assert_eq!(numbered(&pod, Some(0), Some(2)), Ok((Some(0), Some(2))));
        assert!(matches!(numbered(&pod, None, Some(1)), Err(EnvironmentError::Contradiction { .. })));
        for more in [("LOCAL_WORLD_SIZE", "2"), ("TPU_WORKER_ID", "1")] {
            assert_eq!(numbered(&[pod[0], more], None, Some(4)), Ok((None, Some(4))), "{more:?}");
        }
        let lookup = |name: &str| (name == "JOB_COMPLETION_INDEX").then(|| "1".to_owned());
        let sought = Numbered::read(lookup, None, None).unwrap().sought();
        for expected in ["SLURM_PROCID", "TPU_WORKER_HOSTNAMES", "JOB_COMPLETION_INDEX=1 is set, but nothing says"] {
            assert!(sought.contains(expected), "{sought}");
        }
    }

    #[test]
    fn hosts_of_the_only_slice() {
        let slice = [("TPU_WORKER_HOSTNAMES", "a,b"), ("TPU_WORKER_ID", "0")];
        assert_eq!(launch(&slice).hosts(8), ["a", "b"]);
        assert_eq!(launch(&slice).hosts(3), [""; 0]);
        let two = [&slice[..], &[("MEGASCALE_SLICE_ID", "0"), ("MEGASCALE_NUM_SLICES", "2")]].concat();
        assert_eq!(launch(&two).hosts(8), [""; 0]);
    }
}
