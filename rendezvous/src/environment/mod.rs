//! What the launchers' variables say of this process. Pure: variables come from a lookup function.
//!
//! For each fact the first variable of [`table::VARIABLES`] that is set decides. Variables that can't both be right are
//! an error that names both. Two launchers may count different things (srun starts one torchrun a host): then the inner
//! one decides and a note says so; but two that count the same number of processes must number them the same.

mod given;
pub mod metadata;
mod place;
pub mod table;

use std::fmt;

use crate::session::split_endpoint;
pub use given::Numbered;
use table::{Fact, Launcher, VARIABLES, Variable};

/// A value, and the variable that gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given<T> {
    /// The value.
    pub value: T,
    /// The variable's name; for a value computed from others, their names.
    pub by: String,
}

/// Something the job should be told: variables disagree, and one decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The variable that decides.
    pub decides: String,
    /// The one that says something else.
    pub other: String,
    /// What they say, and why that is no error.
    pub text: String,
    /// Nothing is amiss: one launcher started another.
    pub usual: bool,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} decides, not {}: {}", self.decides, self.other, self.text)
    }
}

/// Variables that can't be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvironmentError {
    /// Not of the form it should have.
    #[error("{name}={value:?}: expected {expected}")]
    Malformed {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
        /// The form.
        expected: &'static str,
    },
    /// Two that can't both be right.
    #[error("{first}={first_value:?} and {second}={second_value:?} contradict each other: {why}")]
    Contradiction {
        /// One variable.
        first: String,
        /// Its value.
        first_value: String,
        /// The other.
        second: String,
        /// Its value.
        second_value: String,
        /// Why.
        why: String,
    },
    /// One that says nothing without another.
    #[error("{name}={value:?} is set, but {missing} isn't")]
    Incomplete {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
        /// What it needs.
        missing: &'static str,
    },
    /// The metadata server was to be asked, and can't be.
    #[error("{0}; it was asked because of PODRING_METADATA")]
    Metadata(#[from] metadata::MetadataError),
}

/// Extents in x, y, z, and after them the devices of a chip where each is a process.
pub type Bounds = Vec<u32>;

/// What the variables say. `None` is what no variable tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launch {
    /// This process among all.
    pub rank: Option<Given<u32>>,
    /// All processes.
    pub world_size: Option<Given<u32>>,
    /// This process among its host's.
    pub local_rank: Option<Given<u32>>,
    /// Its host's processes.
    pub local_world_size: Option<Given<u32>>,
    /// This host among all.
    pub host_index: Option<Given<u32>>,
    /// All hosts.
    pub host_count: Option<Given<u32>>,
    /// The first of all hosts, by Slurm.
    pub first_node: Option<Given<String>>,
    /// This worker within the slice.
    pub worker: Option<Given<u32>>,
    /// The slice's hosts, by worker.
    pub worker_hosts: Option<Given<Vec<String>>>,
    /// The slice's TPU processes, host:port.
    pub process_addresses: Option<Given<Vec<String>>>,
    /// This TPU process's port.
    pub process_port: Option<Given<u16>>,
    /// This slice.
    pub slice: Option<Given<u32>>,
    /// All slices.
    pub slice_count: Option<Given<u32>>,
    /// The multi-slice coordinator.
    pub slice_coordinator: Option<Given<String>>,
    /// TPU processes in x, y, z and within a chip.
    pub process_bounds: Option<Given<Bounds>>,
    /// Chips per TPU process in x, y, z.
    pub chip_bounds: Option<Given<Bounds>>,
    /// The chips this process uses.
    pub visible_chips: Option<Given<Vec<u32>>>,
    /// The accelerator's type.
    pub accelerator_type: Option<Given<String>>,
    /// The slice's chips by dimension.
    pub topology: Option<Given<Vec<u32>>>,
    /// Rank 0's host.
    pub master_address: Option<Given<String>>,
    /// Rank 0's port.
    pub master_port: Option<Given<u16>>,
    /// What the job should be told.
    pub notes: Vec<Note>,
}

impl Launch {
    /// Reads the process's environment, and asks the metadata server if that is wanted.
    pub fn from_env() -> Result<Launch, EnvironmentError> {
        Launch::read(metadata::beside(|name| std::env::var(name).ok())?)
    }

    /// Reads variables through `lookup`. A variable that is set and empty counts as not set.
    pub fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Launch, EnvironmentError> {
        let reader = Reader(&|name| lookup(name).filter(|value| !value.trim().is_empty()));
        let mut launch = Launch::default();
        reader.processes(&mut launch)?;
        reader.slice(&mut launch)?;
        reader.bounds(&mut launch)?;
        launch.complete()?;
        Ok(launch)
    }
}

struct Reader<'a>(&'a dyn Fn(&str) -> Option<String>);

type Result<T, E = EnvironmentError> = std::result::Result<T, E>;

fn contradiction<A: fmt::Display, B: fmt::Display>(
    (first, first_value): (&str, A),
    (second, second_value): (&str, B),
    why: impl Into<String>,
) -> EnvironmentError {
    EnvironmentError::Contradiction {
        first: first.to_owned(),
        first_value: first_value.to_string(),
        second: second.to_owned(),
        second_value: second_value.to_string(),
        why: why.into(),
    }
}

impl Reader<'_> {
    fn raw(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_owned())
    }

    /// The variables of a fact that are set, in the order of precedence.
    fn set(&self, fact: Fact) -> impl Iterator<Item = (&'static Variable, String)> + '_ {
        let all = VARIABLES.iter().filter(move |variable| variable.fact == fact);
        all.filter_map(|variable| Some((variable, self.raw(variable.name)?)))
    }

    fn parsed<T>(
        &self,
        fact: Fact,
        expected: &'static str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<Given<T>>> {
        let one = |(variable, value): (&Variable, String)| match parse(&value) {
            Some(value) => Ok(Given { value, by: variable.name.to_owned() }),
            None => Err(EnvironmentError::Malformed { name: variable.name.to_owned(), value, expected }),
        };
        self.set(fact).map(one).collect()
    }

    /// The value of a fact all of whose variables must agree: they are names of the same thing.
    fn same<T: PartialEq>(
        &self,
        fact: Fact,
        expected: &'static str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<Given<T>>> {
        let mut given = self.parsed(fact, expected, parse)?;
        if let Some(other) = given.iter().skip(1).find(|other| other.value != given[0].value) {
            let show = |given: &Given<T>| (given.by.clone(), self.raw(&given.by).unwrap_or_default());
            let ((first, first_value), (second, second_value)) = (show(&given[0]), show(other));
            let why = format!("both tell the {}", fact.text());
            return Err(contradiction((&first, first_value), (&second, second_value), why));
        }
        Ok(if given.is_empty() { None } else { Some(given.swap_remove(0)) })
    }

    fn number(&self, fact: Fact, launcher: Launcher) -> Result<Option<Given<u32>>> {
        let given = self.parsed(fact, "a number from 0 to 4294967295", number)?;
        let of = |name: &str| VARIABLES.iter().find(|v| v.name == name).is_some_and(|v| v.launcher == launcher);
        Ok(given.into_iter().find(|given| of(&given.by)))
    }

    /// Rank and size of all launchers that number processes; the innermost decides.
    fn processes(&self, launch: &mut Launch) -> Result<()> {
        use Launcher::{OpenMpi, Pmi, Pmix, Slurm, Torch};
        for launcher in [Torch, OpenMpi, Pmi, Pmix, Slurm] {
            // A batch script has rank 0 of all the tasks that srun would start.
            if launcher == Slurm && self.set(Fact::Step).next().is_none() {
                continue;
            }
            let rank = self.number(Fact::Rank, launcher)?;
            let size = self.number(Fact::WorldSize, launcher)?;
            let (rank, size) = match (rank, size) {
                (Some(rank), Some(size)) => (rank, size),
                (None, None) => continue,
                // PMIx gives no size, so its rank tells nothing alone.
                (Some(_), None) if launcher == Pmix => continue,
                (Some(rank), None) => {
                    let missing = if launcher == Torch { "WORLD_SIZE" } else { "the world size" };
                    return Err(EnvironmentError::Incomplete { name: rank.by, value: rank.value.to_string(), missing });
                }
                // A size alone is what a batch script has, or a process that spawns the ranks.
                (None, Some(_)) => continue,
            };
            if rank.value >= size.value {
                let why = "ranks are 0 to world size - 1";
                return Err(contradiction((&rank.by, rank.value), (&size.by, size.value), why));
            }
            match (&launch.rank, &launch.world_size) {
                (Some(inner), Some(inner_size)) if inner_size.value == size.value => {
                    if inner.value != rank.value {
                        let why = format!("both number the same {} processes", size.value);
                        return Err(contradiction((&inner.by, inner.value), (&rank.by, rank.value), why));
                    }
                }
                (Some(inner), Some(inner_size)) => launch.notes.push(Note {
                    decides: inner.by.clone(),
                    other: rank.by.clone(),
                    text: format!(
                        "{} counts {} processes, {} counts {}",
                        inner_size.by, inner_size.value, size.by, size.value
                    ),
                    usual: true,
                }),
                _ => {
                    launch.local_rank = self.number(Fact::LocalRank, launcher)?;
                    launch.local_world_size = self.number(Fact::LocalWorldSize, launcher)?;
                    (launch.rank, launch.world_size) = (Some(rank), Some(size));
                }
            }
        }
        if launch.rank.is_none() {
            launch.local_rank = self.number(Fact::LocalRank, Torch)?;
            launch.local_world_size = self.number(Fact::LocalWorldSize, Torch)?;
        }
        if let (Some(local), Some(count)) = (&launch.local_rank, &launch.local_world_size)
            && local.value >= count.value
        {
            let why = "local ranks are 0 to local world size - 1";
            return Err(contradiction((&local.by, local.value), (&count.by, count.value), why));
        }
        for (small, large) in [(&launch.local_world_size, &launch.world_size), (&launch.local_rank, &launch.rank)] {
            if let (Some(small), Some(large)) = (small, large)
                && small.value > large.value
            {
                let why = "a host's part is larger than the whole";
                return Err(contradiction((&small.by, small.value), (&large.by, large.value), why));
            }
        }
        launch.host_index = self.same(Fact::HostIndex, "a number", number)?;
        launch.host_count = self.same(Fact::HostCount, "a number", number)?;
        launch.first_node =
            self.parsed(Fact::HostList, "hosts as Slurm lists them", place::first_of_list)?.into_iter().next();
        launch.master_address = self.same(Fact::MasterAddress, "a name or address", |text| Some(text.to_owned()))?;
        launch.master_port = self.same(Fact::MasterPort, "a port from 0 to 65535", |text| text.parse().ok())?;
        if let (Some(index), Some(count)) = (&launch.host_index, &launch.host_count)
            && index.value >= count.value
        {
            let why = "hosts are 0 to their number - 1";
            return Err(contradiction((&index.by, index.value), (&count.by, count.value), why));
        }
        Ok(())
    }

    /// Where in which slice this process is.
    fn slice(&self, launch: &mut Launch) -> Result<()> {
        launch.slice = self.same(Fact::Slice, "a number", number)?;
        launch.slice_count = self.same(Fact::SliceCount, "a number from 1", |text| number(text).filter(|n| *n > 0))?;
        launch.slice_coordinator = self.same(Fact::SliceCoordinator, "an address", |text| Some(text.to_owned()))?;
        match (&launch.slice, &launch.slice_count) {
            (Some(slice), Some(count)) if slice.value >= count.value => {
                let why = "slices are 0 to their number - 1";
                return Err(contradiction((&slice.by, slice.value), (&count.by, count.value), why));
            }
            (Some(slice), None) => {
                let (name, value) = (slice.by.clone(), slice.value.to_string());
                return Err(EnvironmentError::Incomplete { name, value, missing: "MEGASCALE_NUM_SLICES" });
            }
            (None, Some(count)) if count.value > 1 => {
                let (name, value) = (count.by.clone(), count.value.to_string());
                return Err(EnvironmentError::Incomplete { name, value, missing: "MEGASCALE_SLICE_ID" });
            }
            _ => {}
        }
        launch.worker_hosts = self.same(Fact::WorkerHosts, "names, comma between", list)?;
        launch.process_addresses = self.same(Fact::ProcessAddresses, "host:port, comma between", |text| {
            list(text).filter(|all| all.iter().all(|one| split_endpoint(one).is_some()))
        })?;
        launch.process_port =
            self.same(Fact::ProcessPort, "a port from 1 to 65535", |text| text.parse().ok().filter(|port| *port != 0))?;
        // The variables mean different things where a host has several TPU processes, and a completion index may
        // follow another order: the first decides, and the job is told.
        let mut workers = self.parsed(Fact::Worker, "a number", number)?.into_iter();
        launch.worker = workers.next();
        let Some(worker) = launch.worker.clone() else { return Ok(()) };
        // Beside a list of TPU processes the task counts those, as torch_tpu sets it; the worker is a host.
        let (hosts, processes) = (&launch.worker_hosts, &launch.process_addresses);
        let counts = |all: &Given<Vec<String>>| hosts.as_ref().is_none_or(|hosts| hosts.value.len() != all.value.len());
        let apart = processes.as_ref().is_some_and(counts);
        let counts_processes = |other: &Given<u32>| apart && other.by == "CLOUD_TPU_TASK_ID";
        for other in workers.filter(|other| other.value != worker.value && !counts_processes(other)) {
            let text = format!("worker {} and {}", worker.value, other.value);
            launch.notes.push(Note { decides: worker.by.clone(), other: other.by, text, usual: false });
        }
        let bound = |list: &Option<Given<Vec<String>>>, index: &Given<u32>| match list {
            Some(list) if index.value as usize >= list.value.len() => {
                let why = format!("there are {} of them", list.value.len());
                Err(contradiction((&index.by, index.value), (&list.by, list.value.join(",")), why))
            }
            _ => Ok(()),
        };
        if worker.by != "CLOUD_TPU_TASK_ID" || launch.process_addresses.is_none() {
            bound(&launch.worker_hosts, &worker)?;
        }
        let task = self.raw("CLOUD_TPU_TASK_ID").and_then(|text| number(&text));
        let task = task.map(|value| Given { value, by: "CLOUD_TPU_TASK_ID".to_owned() });
        let process = task.unwrap_or(worker);
        bound(&launch.process_addresses, &process)?;
        if let (Some(port), Some(addresses)) = (&launch.process_port, &launch.process_addresses)
            && let Some((_, listed)) = addresses.value.get(process.value as usize).and_then(|one| split_endpoint(one))
            && listed != port.value
        {
            let why = format!("entry {} has port {listed}", process.value);
            return Err(contradiction((&port.by, port.value), (&addresses.by, addresses.value.join(",")), why));
        }
        Ok(())
    }

    /// The chips.
    fn bounds(&self, launch: &mut Launch) -> Result<()> {
        const FORM: &str = "three or four numbers from 1, comma between";
        launch.process_bounds = self.same(Fact::ProcessBounds, FORM, bounds)?;
        launch.chip_bounds = self.same(Fact::ChipBounds, FORM, bounds)?;
        let chips = |text: &str| {
            let chips = text.split(',').map(|one| number(one.trim())).collect::<Option<Vec<u32>>>()?;
            let distinct = (1..chips.len()).all(|index| !chips[..index].contains(&chips[index]));
            distinct.then_some(chips)
        };
        launch.visible_chips = self.same(Fact::VisibleChips, "distinct numbers, comma between", chips)?;
        launch.accelerator_type = self.same(Fact::AcceleratorType, "text", |text| Some(text.to_owned()))?;
        let topology = |text: &str| {
            let extents = text.split('x').map(number).collect::<Option<Vec<u32>>>()?;
            (matches!(extents.len(), 2 | 3) && extents.iter().all(|extent| *extent > 0)).then_some(extents)
        };
        launch.topology = self.same(Fact::Topology, "AxB or AxBxC", topology)?;
        let show = |bounds: &Bounds| bounds.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let product = |bounds: &[u32]| bounds.iter().map(|extent| u64::from(*extent)).product::<u64>();
        if let (Some(bounds), Some(chips)) = (&launch.chip_bounds, &launch.visible_chips)
            && product(&bounds.value) != chips.value.len() as u64
        {
            let why = format!("{} chips and {}", product(&bounds.value), chips.value.len());
            let raw = self.raw(&chips.by).unwrap_or_default();
            return Err(contradiction((&bounds.by, show(&bounds.value)), (&chips.by, raw), why));
        }
        if let (Some(bounds), Some(addresses)) = (&launch.process_bounds, &launch.process_addresses)
            && product(&bounds.value) != addresses.value.len() as u64
        {
            let why = format!("{} processes and {}", product(&bounds.value), addresses.value.len());
            return Err(contradiction(
                (&bounds.by, show(&bounds.value)),
                (&addresses.by, addresses.value.join(",")),
                why,
            ));
        }
        if let (Some(processes), Some(chips), Some(topology)) =
            (&launch.process_bounds, &launch.chip_bounds, &launch.topology)
        {
            // In x, y and z: a chip's devices are not in the topology.
            let total = product(&processes.value[..3]) * product(&chips.value[..3]);
            if total != product(&topology.value) {
                let raw = self.raw(&topology.by).unwrap_or_default();
                let why = format!("with {}={} that makes {total} chips", chips.by, show(&chips.value));
                return Err(contradiction((&processes.by, show(&processes.value)), (&topology.by, raw), why));
            }
        }
        Ok(())
    }
}

fn number(text: &str) -> Option<u32> {
    // "+1" is a number for Rust, but not for a launcher.
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

fn list(text: &str) -> Option<Vec<String>> {
    let all: Vec<String> = text.split(',').map(|one| one.trim().to_owned()).collect();
    all.iter().all(|one| !one.is_empty()).then_some(all)
}

fn bounds(text: &str) -> Option<Bounds> {
    let extents = text.split(',').map(|one| number(one.trim()).filter(|n| *n > 0)).collect::<Option<Vec<u32>>>()?;
    matches!(extents.len(), 3 | 4).then_some(extents)
}

#[cfg(test)]
mod tests;
