//! Every launcher variable that podring reads: who sets it, and what it says.

use std::fmt::Write as _;

/// What a variable tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fact {
    /// This process among all of the job's.
    Rank,
    /// How many processes the job has.
    WorldSize,
    /// This process among those of its host.
    LocalRank,
    /// How many processes this host has.
    LocalWorldSize,
    /// This host among all of the job's.
    HostIndex,
    /// How many hosts the job has.
    HostCount,
    /// The hosts of the job, in Slurm's short form.
    HostList,
    /// Which of the job's steps this process is in.
    Step,
    /// This host, or TPU process, among those of its slice.
    Worker,
    /// The slice's hosts, in the order of their workers.
    WorkerHosts,
    /// The slice's TPU processes as host:port, in the order of their workers.
    ProcessAddresses,
    /// This TPU process's own port.
    ProcessPort,
    /// This slice among all of the job's.
    Slice,
    /// How many slices the job has.
    SliceCount,
    /// Where the multi-slice coordinator is.
    SliceCoordinator,
    /// TPU processes of the slice in x, y and z.
    ProcessBounds,
    /// Chips of one TPU process in x, y and z.
    ChipBounds,
    /// Which of the host's chips this process uses.
    VisibleChips,
    /// The accelerator's type, e.g. `v5p-16`.
    AcceleratorType,
    /// The slice's chips in each dimension, e.g. `2x2x2`.
    Topology,
    /// Where rank 0 listens.
    MasterAddress,
    /// On which port.
    MasterPort,
}

/// Who numbers processes. In the order of precedence: the innermost launcher first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Launcher {
    /// torchrun, torch's env:// convention, Ray Train, and everything else that follows it.
    Torch,
    /// Open MPI's mpirun.
    OpenMpi,
    /// MPICH, Hydra, PMI.
    Pmi,
    /// PMIx: PRRTE, Slurm's pmix plugin.
    Pmix,
    /// Slurm's srun.
    Slurm,
    /// An Indexed Job of Kubernetes, alone or in a JobSet.
    Kubernetes,
    /// Cloud TPU: the VM's agent, GKE's admission webhook.
    Tpu,
    /// Multi-slice Cloud TPU.
    Megascale,
    /// The GCE metadata server: no variables but instance attributes, with less weight than any variable.
    Metadata,
}

/// A variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// Who sets it.
    pub launcher: Launcher,
    /// What it tells.
    pub fact: Fact,
    /// Its form and what is particular about it.
    pub form: &'static str,
}

const fn v(name: &'static str, launcher: Launcher, fact: Fact, form: &'static str) -> Variable {
    Variable { name, launcher, fact, form }
}

/// All of them. For each fact the first that is set decides.
pub const VARIABLES: &[Variable] = {
    use Fact::*;
    use Launcher::*;
    &[
        v("RANK", Torch, Rank, "number"),
        v("WORLD_SIZE", Torch, WorldSize, "number"),
        v("LOCAL_RANK", Torch, LocalRank, "number"),
        v("LOCAL_WORLD_SIZE", Torch, LocalWorldSize, "number"),
        v("GROUP_RANK", Torch, HostIndex, "number; torchrun's agent"),
        v("NODE_RANK", Torch, HostIndex, "number; Ray Train, Lightning"),
        v("GROUP_WORLD_SIZE", Torch, HostCount, "number; torchrun's agents"),
        v("MASTER_ADDR", Torch, MasterAddress, "name or address"),
        v("MASTER_PORT", Torch, MasterPort, "port"),
        v("OMPI_COMM_WORLD_RANK", OpenMpi, Rank, "number"),
        v("OMPI_COMM_WORLD_SIZE", OpenMpi, WorldSize, "number"),
        v("OMPI_COMM_WORLD_LOCAL_RANK", OpenMpi, LocalRank, "number"),
        v("OMPI_COMM_WORLD_LOCAL_SIZE", OpenMpi, LocalWorldSize, "number"),
        v("PMI_RANK", Pmi, Rank, "number"),
        v("PMI_SIZE", Pmi, WorldSize, "number"),
        v("MPI_LOCALRANKID", Pmi, LocalRank, "number; Hydra"),
        v("MPI_LOCALNRANKS", Pmi, LocalWorldSize, "number; Hydra"),
        v("PMIX_RANK", Pmix, Rank, "number; has no size of its own"),
        v(
            "SLURM_STEP_ID",
            Slurm,
            Step,
            "set by srun; without it the process is a batch script's, and the rank counts nothing",
        ),
        v("SLURM_PROCID", Slurm, Rank, "number"),
        v("SLURM_NTASKS", Slurm, WorldSize, "number"),
        v("SLURM_LOCALID", Slurm, LocalRank, "number"),
        v("SLURM_NODEID", Slurm, HostIndex, "number"),
        v("SLURM_NNODES", Slurm, HostCount, "number"),
        v("SLURM_STEP_NODELIST", Slurm, HostList, "Slurm's list, such as a[01-04,7],b"),
        v("SLURM_JOB_NODELIST", Slurm, HostList, "the same"),
        v(
            "TPU_WORKER_ID",
            Tpu,
            Worker,
            "number; starts again at 0 in every slice; follows pod creation, not the torus",
        ),
        v("CLOUD_TPU_TASK_ID", Tpu, Worker, "number; the older name, and the TPU process where a host has several"),
        v("JOB_COMPLETION_INDEX", Kubernetes, Worker, "number; in a JobSet it starts again at 0 in every slice"),
        v("TPU_WORKER_HOSTNAMES", Tpu, WorkerHosts, "names, comma between"),
        v("TPU_PROCESS_ADDRESSES", Tpu, ProcessAddresses, "host:port, comma between; IPv6 literals in brackets"),
        v("TPU_PROCESS_PORT", Tpu, ProcessPort, "port"),
        v("TPU_PROCESS_BOUNDS", Tpu, ProcessBounds, "x,y,z, or x,y,z,devices of a chip"),
        v("TPU_HOST_BOUNDS", Tpu, ProcessBounds, "x,y,z; the older name"),
        v("TPU_CHIPS_PER_PROCESS_BOUNDS", Tpu, ChipBounds, "x,y,z, or x,y,z,devices of a chip"),
        v("TPU_CHIPS_PER_HOST_BOUNDS", Tpu, ChipBounds, "x,y,z; the older name"),
        v("TPU_VISIBLE_CHIPS", Tpu, VisibleChips, "numbers, comma between"),
        v("TPU_VISIBLE_DEVICES", Tpu, VisibleChips, "numbers, comma between; the older name"),
        v("TPU_ACCELERATOR_TYPE", Tpu, AcceleratorType, "text"),
        v("TPU_TOPOLOGY", Tpu, Topology, "AxB or AxBxC, chips"),
        v("MEGASCALE_SLICE_ID", Megascale, Slice, "number"),
        v("MEGASCALE_NUM_SLICES", Megascale, SliceCount, "number"),
        v("MEGASCALE_COORDINATOR_ADDRESS", Megascale, SliceCoordinator, "host or host:port"),
        v("agent-worker-number", Metadata, Worker, "number"),
        v("worker-network-endpoints", Metadata, WorkerHosts, "uid:port:address, comma between"),
        v("accelerator-type", Metadata, AcceleratorType, "text"),
    ]
};

impl Fact {
    /// In words.
    pub fn text(self) -> &'static str {
        match self {
            Fact::Rank => "rank",
            Fact::WorldSize => "world size",
            Fact::LocalRank => "local rank",
            Fact::LocalWorldSize => "local world size",
            Fact::HostIndex => "host index",
            Fact::HostCount => "number of hosts",
            Fact::HostList => "hosts, rank 0's first",
            Fact::Step => "step",
            Fact::Worker => "worker within the slice",
            Fact::WorkerHosts => "hosts of the slice",
            Fact::ProcessAddresses => "TPU processes' addresses",
            Fact::ProcessPort => "TPU process's port",
            Fact::Slice => "slice",
            Fact::SliceCount => "number of slices",
            Fact::SliceCoordinator => "multi-slice coordinator",
            Fact::ProcessBounds => "TPU processes in x, y, z",
            Fact::ChipBounds => "chips per TPU process in x, y, z",
            Fact::VisibleChips => "chips this process uses",
            Fact::AcceleratorType => "accelerator type",
            Fact::Topology => "slice topology",
            Fact::MasterAddress => "rank 0's address",
            Fact::MasterPort => "rank 0's port",
        }
    }
}

impl Launcher {
    /// Its name.
    pub fn text(self) -> &'static str {
        match self {
            Launcher::Torch => "torchrun, env://, Ray Train",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Pmi => "PMI, MPICH",
            Launcher::Pmix => "PMIx",
            Launcher::Slurm => "Slurm",
            Launcher::Kubernetes => "Kubernetes Indexed Job, JobSet",
            Launcher::Tpu => "Cloud TPU, GKE",
            Launcher::Megascale => "multi-slice Cloud TPU",
            Launcher::Metadata => "the GCE metadata server, if asked",
        }
    }
}

/// The table as docs/environment.md has it.
pub fn markdown() -> String {
    let mut out = String::from("| variable | set by | tells | form | before it |\n|---|---|---|---|---|\n");
    for (index, variable) in VARIABLES.iter().enumerate() {
        let before = VARIABLES[..index].iter().filter(|other| other.fact == variable.fact);
        let before: Vec<String> = before.map(|other| format!("`{}`", other.name)).collect();
        let before = if before.is_empty() { "—".to_owned() } else { before.join(", ") };
        let Variable { name, launcher, fact, form } = variable;
        let _ = writeln!(out, "| `{name}` | {} | {} | {form} | {before} |", launcher.text(), fact.text());
    }
    out
}
