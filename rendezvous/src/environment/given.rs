//! The launcher's variables beside what init_process_group was given.

use super::{EnvironmentError, Launch, Note, contradiction};

impl Launch {
    /// Holds the launcher's rank and world size against those that init_process_group got. Equal world sizes number the
    /// same processes, so their ranks must be equal; with different ones the job was started inside another (a spawn
    /// within torchrun), what init_process_group got decides, and a note says so.
    pub fn check(&self, rank: u32, world_size: u32) -> Result<Option<Note>, EnvironmentError> {
        let (Some(mine), Some(size)) = (&self.rank, &self.world_size) else { return Ok(None) };
        if size.value != world_size {
            let text = format!("{} counts {} processes, this group {world_size}", size.by, size.value);
            return Ok(Some(Note { decides: GIVEN.to_owned(), other: mine.by.clone(), text }));
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

    #[test]
    fn hosts_of_the_only_slice() {
        let slice = [("TPU_WORKER_HOSTNAMES", "a,b"), ("TPU_WORKER_ID", "0")];
        assert_eq!(launch(&slice).hosts(8), ["a", "b"]);
        assert_eq!(launch(&slice).hosts(3), [""; 0]);
        let two = [&slice[..], &[("MEGASCALE_SLICE_ID", "0"), ("MEGASCALE_NUM_SLICES", "2")]].concat();
        assert_eq!(launch(&two).hosts(8), [""; 0]);
    }
}
