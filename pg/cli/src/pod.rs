//! A job on TPU hosts: what torch_tpu wants in the environment of each rank, and what one host starts.
//!
//! Everything here is what torch_tpu 0.2.0 does, by its text (`set_tpu_launch_env`, `tests/vchip` holds this to it). A
//! rank is a process with one device; before PJRT starts, torch_tpu wants an address for each rank of the slice, the same
//! list on all of them, and the slice's shape. It makes libtpu's own variables of the two.

use podring_rendezvous::environment::{EnvironmentError, Launch};
use podring_topology::{Generation, Slice, SliceOptions, TopologyError};

/// One address a rank, in the order of ranks.
pub const ADDRESSES: &str = "TORCH_TPU_SLICEBUILDER_ADDRESSES";
/// The slice's shape in chips, and the devices of a chip where it has several.
pub const TOPOLOGY: &str = "TORCH_TPU_TOPOLOGY";
/// The first rank's port on each host.
const BASE_PORT: (&str, u16) = ("TORCH_TPU_BASE_PORT", 8070);
/// Where the hosts meet, unless it is said.
const MEETING_PORT: u16 = 29400;

/// Why nothing can be started here.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PodError {
    /// The slice's name.
    #[error("{0}")]
    Slice(#[from] TopologyError),
    /// Variables that can't be right.
    #[error("{0}")]
    Variables(#[from] EnvironmentError),
    /// Nothing names the slice.
    #[error(
        "which slice are these chips of? Set PODRING_SLICE (v5e:4x4), or TPU_ACCELERATOR_TYPE and TPU_TOPOLOGY as Cloud \
         TPU does"
    )]
    NoSlice,
    /// A generation without torch_tpu.
    #[error("torch_tpu runs on v4, v5e, v5p, v6e and tpu7x, and {slice} is a {generation}")]
    Generation {
        /// The slice.
        slice: String,
        /// Its generation.
        generation: &'static str,
    },
    /// Several slices.
    #[error(
        "{slice} is {slices} slices: on TPUs one job runs on one slice here. On virtual chips several can be played \
         (PODRING_TPU_DEVICES=0)"
    )]
    Slices {
        /// As it was named.
        slice: String,
        /// How many.
        slices: u32,
    },
    /// Played hosts.
    #[error("--hosts plays hosts on a machine with no TPU; on TPU hosts give --nnodes {hosts} on each of them")]
    Played {
        /// How many.
        hosts: u32,
    },
    /// More ranks than this host has devices.
    #[error("{each} ranks on this host, which has {here} TPU devices, and each rank is one")]
    TooManyHere {
        /// Ranks on each host.
        each: u32,
        /// Devices here.
        here: u32,
    },
    /// Not every device is a rank.
    #[error(
        "{ranks} ranks ({each} on each host, hosts: {hosts}), and {slice} has {devices} devices, each of which must be a \
         rank. Give --nnodes and --nproc-per-node, or another --slice"
    )]
    Count {
        /// The slice.
        slice: String,
        /// Its devices, as torch_tpu counts them.
        devices: u32,
        /// Hosts.
        hosts: u32,
        /// Ranks on each.
        each: u32,
        /// Their product.
        ranks: u64,
    },
    /// The hosts' names aren't known, or aren't as many.
    #[error(
        "{hosts} hosts, and TPU_WORKER_HOSTNAMES names {named}: set it to the names of all of them, commas between, in \
         the order of --node-rank"
    )]
    Names {
        /// Hosts.
        hosts: u32,
        /// Names.
        named: usize,
    },
    /// Which host this is isn't known.
    #[error("which of the {hosts} hosts is this? Give --node-rank, or set TPU_WORKER_ID")]
    WhichHost {
        /// Hosts.
        hosts: u32,
    },
    /// There is no such host.
    #[error("{by} is {host}, and there are {hosts} hosts, counted from 0")]
    NoSuchHost {
        /// Who says it.
        by: String,
        /// The number.
        host: u32,
        /// Hosts.
        hosts: u32,
    },
    /// Two numbers for this host.
    #[error("--node-rank is {given} and {by} {worker}: TPU_WORKER_HOSTNAMES is in the order of the latter")]
    Disagree {
        /// The command's.
        given: u32,
        /// The variable.
        by: String,
        /// Its value.
        worker: u32,
    },
    /// A port.
    #[error("{name}={value:?}: expected a port, with one more for each further rank of a host")]
    Port {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
    },
}

/// The devices of a chip, as torch_tpu counts them: both TensorCores of a v4 or v5p chip are one device.
fn devices_per_chip(slice: &Slice) -> Result<u32, PodError> {
    match slice.generation() {
        Generation::Tpu7x => Ok(2),
        Generation::V4 | Generation::V5e | Generation::V5p | Generation::V6e => Ok(1),
        generation => Err(PodError::Generation { slice: slice.to_string(), generation: generation.name() }),
    }
}

/// The slice's devices, as torch_tpu counts them.
pub fn devices(slice: &Slice) -> Result<u32, PodError> {
    Ok(slice.chips_per_slice() * devices_per_chip(slice)?)
}

/// What torch_tpu wants in the environment of every rank of a slice: `ports` are those of each host's ranks.
pub fn environment(slice: &Slice, hosts: &[String], ports: &[u16]) -> Result<[(&'static str, String); 2], PodError> {
    let (each, count) = (ports.len() as u32, hosts.len() as u32);
    all_ranks(slice, count, each)?;
    let [x, y, z] = slice.dims();
    let shape = match devices_per_chip(slice)? {
        1 => format!("{x},{y},{z}"),
        cores => format!("{x},{y},{z},{cores}"),
    };
    Ok([(ADDRESSES, addresses(hosts, ports)), (TOPOLOGY, shape)])
}

fn addresses(hosts: &[String], ports: &[u16]) -> String {
    let all = hosts.iter().flat_map(|host| ports.iter().map(move |port| format!("{host}:{port}")));
    all.collect::<Vec<_>>().join(",")
}

/// Every device is a rank.
fn all_ranks(slice: &Slice, hosts: u32, each: u32) -> Result<(), PodError> {
    if slice.slices() > 1 {
        return Err(PodError::Slices { slice: slice.to_string(), slices: slice.slices() });
    }
    let (devices, ranks) = (devices(slice)?, u64::from(hosts) * u64::from(each));
    if ranks == u64::from(devices) {
        return Ok(());
    }
    Err(PodError::Count { slice: slice.to_string(), devices, hosts, each, ranks })
}

/// The ports of a host's ranks, the same on every host.
fn fixed_ports(each: u32, variable: impl Fn(&str) -> Option<String>) -> Result<Vec<u16>, PodError> {
    let (name, otherwise) = BASE_PORT;
    let given = variable(name).filter(|value| !value.trim().is_empty());
    let value = given.unwrap_or_else(|| otherwise.to_string());
    let first = value.trim().parse::<u16>().ok().filter(|&port| port != 0);
    let last = first.and_then(|first| u16::try_from(u32::from(first) + each.max(1) - 1).ok());
    match (first, last) {
        (Some(first), Some(last)) => Ok((first..=last).collect()),
        _ => Err(PodError::Port { name, value }),
    }
}

/// The slice that Cloud TPU's own variables name.
pub fn named_slice(launch: &Launch) -> Result<Option<Slice>, PodError> {
    let accelerator = launch.accelerator_type.as_ref().map(|given| given.value.clone());
    let topology = launch.topology.as_ref().map(|given| {
        let extents: Vec<String> = given.value.iter().map(u32::to_string).collect();
        extents.join("x")
    });
    // A shape alone is of no generation.
    if accelerator.is_none() {
        return Ok(None);
    }
    let options = SliceOptions::default();
    Ok(Some(podring_topology::from_accelerator(accelerator.as_deref(), topology.as_deref(), &options)?))
}

/// What the command line says of the hosts.
#[derive(Debug, Clone, Default)]
pub struct Wish {
    /// Ranks on each host.
    pub each: Option<u32>,
    /// Hosts.
    pub hosts: Option<u32>,
    /// This one.
    pub host: Option<u32>,
    /// Where they meet.
    pub endpoint: Option<String>,
}

/// A job on TPU hosts, as one of them starts it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Ranks on each host.
    pub each: u32,
    /// The hosts' names, in order.
    pub hosts: Vec<String>,
    /// This one.
    pub host: u32,
    /// Where they meet; alone there is nobody to meet.
    pub endpoint: Option<String>,
    /// The ports of a host's ranks; alone any free ones will do, and this is empty.
    pub ports: Vec<u16>,
}

impl Pod {
    /// What to start on a host with `here` devices: one rank for each, unless `wish` says fewer.
    pub fn plan(
        slice: &Slice,
        here: u32,
        wish: &Wish,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Pod, PodError> {
        let launch = Launch::read(&variable)?;
        let mut names = launch.worker_hosts.map(|given| given.value).unwrap_or_default();
        let hosts = wish.hosts.unwrap_or(names.len().max(1) as u32);
        let each = wish.each.unwrap_or(here);
        if each > here {
            return Err(PodError::TooManyHere { each, here });
        }
        all_ranks(slice, hosts, each)?;
        if hosts == 1 {
            let alone = vec!["localhost".to_owned()];
            return Ok(Pod { each, hosts: alone, host: 0, endpoint: None, ports: Vec::new() });
        }
        if names.len() != hosts as usize {
            return Err(PodError::Names { hosts, named: names.len() });
        }
        let (host, by) = match (wish.host, launch.worker) {
            (Some(given), Some(worker)) if worker.value != given => {
                return Err(PodError::Disagree { given, by: worker.by, worker: worker.value });
            }
            (Some(given), _) => (given, "--node-rank".to_owned()),
            (None, Some(worker)) => (worker.value, worker.by),
            (None, None) => return Err(PodError::WhichHost { hosts }),
        };
        if host >= hosts {
            return Err(PodError::NoSuchHost { by, host, hosts });
        }
        let endpoint = wish.endpoint.clone().unwrap_or_else(|| format!("{}:{MEETING_PORT}", names[0]));
        names.truncate(hosts as usize);
        Ok(Pod { each, hosts: names, host, endpoint: Some(endpoint), ports: fixed_ports(each, variable)? })
    }
}

/// For a rank that another launcher started on a TPU host: what torch_tpu wants and the environment lacks. Nothing
/// without a launcher (`WORLD_SIZE`), whom torch_tpu doesn't ask then.
pub fn of_rank(variable: impl Fn(&str) -> Option<String>) -> Result<Vec<(&'static str, String)>, PodError> {
    let set = |name: &str| variable(name).is_some();
    if !set("WORLD_SIZE") || (set(ADDRESSES) && set(TOPOLOGY)) {
        return Ok(Vec::new());
    }
    let launch = Launch::read(&variable)?;
    let world = launch.world_size.as_ref().map_or(1, |given| given.value);
    let each = launch.local_world_size.as_ref().map_or(world, |given| given.value).max(1);
    let names = launch.worker_hosts.as_ref().map(|given| given.value.clone()).unwrap_or_default();
    let hosts = match world.div_ceil(each) {
        1 => vec!["localhost".to_owned()],
        hosts if names.len() == hosts as usize => names,
        hosts => return Err(PodError::Names { hosts, named: names.len() }),
    };
    let ports = fixed_ports(each, &variable)?;
    if set(TOPOLOGY) {
        return Ok(vec![(ADDRESSES, addresses(&hosts, &ports))]);
    }
    let slice = match variable("PODRING_SLICE").filter(|name| !name.trim().is_empty()) {
        Some(name) => podring_topology::parse(&name)?,
        None => named_slice(&launch)?.ok_or(PodError::NoSlice)?,
    };
    let wanted = environment(&slice, &hosts, &ports)?;
    Ok(wanted.into_iter().filter(|(name, _)| !set(name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(name: &str) -> Slice {
        podring_topology::parse(name).unwrap()
    }

    fn variables<'a>(pairs: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    }

    const FOUR: [(&str, &str); 2] = [("TPU_WORKER_HOSTNAMES", "t0,t1,t2,t3"), ("TPU_WORKER_ID", "2")];

    #[test]
    fn each_rank_has_an_address_and_the_slice_its_shape() {
        // Slice, hosts, ranks on each, shape, the first and last address.
        let (one, two, four) = (["localhost"].as_slice(), ["t0", "t1"].as_slice(), ["t0", "t1", "t2", "t3"].as_slice());
        let rows = [
            ("v5e:2x2", one, 4, "2,2,1", "localhost:8070", "localhost:8073"),
            ("v5e:4x4", four, 4, "4,4,1", "t0:8070", "t3:8073"),
            ("v5e:2x4", one, 8, "2,4,1", "localhost:8070", "localhost:8077"),
            // A v4 chip's two cores are one device to torch_tpu; a tpu7x chip's are two.
            ("v4:2x2x2", two, 4, "2,2,2", "t0:8070", "t1:8073"),
            ("tpu7x:2x2x1", one, 8, "2,2,1,2", "localhost:8070", "localhost:8077"),
            ("tpu7x:2x2x2", two, 8, "2,2,2,2", "t0:8070", "t1:8077"),
        ];
        for (name, hosts, each, shape, first, last) in rows {
            let hosts: Vec<String> = hosts.iter().map(|&host| host.to_owned()).collect();
            let ports: Vec<u16> = (8070..8070 + each).collect();
            let [(addresses, list), (topology, got)] = environment(&slice(name), &hosts, &ports).unwrap();
            assert_eq!((addresses, topology, got.as_str()), (ADDRESSES, TOPOLOGY, shape), "{name}");
            let list: Vec<&str> = list.split(',').collect();
            assert_eq!((list[0], list[list.len() - 1]), (first, last), "{name}");
            // torch_tpu wants as many places as addresses, and no address twice.
            let places: usize = shape.split(',').map(|extent| extent.parse::<usize>().unwrap()).product();
            let mut once = list.clone();
            once.sort_unstable();
            once.dedup();
            assert_eq!((list.len(), once.len()), (places, places), "{name}");
        }
    }

    #[test]
    fn one_host_starts_a_rank_for_each_of_its_devices() {
        for (name, here) in [("v5e:2x2", 4), ("v5e:2x4", 8), ("v4:2x2x1", 4), ("tpu7x:2x2x1", 8)] {
            // A TPU VM of one host names itself.
            for names in [&[][..], &[("TPU_WORKER_HOSTNAMES", "t0"), ("TPU_WORKER_ID", "0")]] {
                let pod = Pod::plan(&slice(name), here, &Wish::default(), variables(names)).unwrap();
                assert_eq!((pod.each, pod.host, pod.endpoint), (here, 0, None), "{name}");
                assert_eq!((pod.hosts, pod.ports), (vec!["localhost".to_owned()], vec![]), "{name}");
            }
        }
        let part = Wish { each: Some(1), ..Wish::default() };
        assert_eq!(Pod::plan(&slice("v5e:1x1"), 8, &part, variables(&[])).unwrap().each, 1);
    }

    #[test]
    fn a_host_of_a_pod_knows_its_place() {
        let pod = Pod::plan(&slice("v5e:4x4"), 4, &Wish::default(), variables(&FOUR)).unwrap();
        let expected = Pod {
            each: 4,
            hosts: ["t0", "t1", "t2", "t3"].map(str::to_owned).into(),
            host: 2,
            endpoint: Some("t0:29400".to_owned()),
            ports: vec![8070, 8071, 8072, 8073],
        };
        assert_eq!(pod, expected);
        let wish = Wish { host: Some(3), hosts: Some(4), endpoint: Some("meet:1".to_owned()), ..Wish::default() };
        let named = [FOUR[0], ("TORCH_TPU_BASE_PORT", "9000")];
        let pod = Pod::plan(&slice("v4:2x2x4"), 4, &wish, variables(&named)).unwrap();
        assert_eq!((pod.host, pod.endpoint.as_deref(), pod.ports[3]), (3, Some("meet:1"), 9003));
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let wish = |hosts: Option<u32>, host: Option<u32>| Wish { hosts, host, ..Wish::default() };
        let none = &[][..];
        let rows = [
            ("v5e:4x4", wish(None, None), none, "4 ranks (4 on each host, hosts: 1), and v5e:4x4 has 16 devices"),
            ("v5e:4x4", wish(Some(4), Some(0)), none, "4 hosts, and TPU_WORKER_HOSTNAMES names 0"),
            ("v5e:4x4", wish(None, None), &FOUR[..1], "which of the 4 hosts is this? Give --node-rank"),
            ("v5e:4x4", wish(None, Some(4)), &FOUR[..1], "--node-rank is 4, and there are 4 hosts"),
            ("v5e:4x4", wish(None, Some(1)), &FOUR, "--node-rank is 1 and TPU_WORKER_ID 2"),
            ("v5e:2x2*2", wish(None, None), none, "v5e:2x2*2 is 2 slices"),
            ("v3:2x2", wish(None, None), none, "torch_tpu runs on v4, v5e, v5p, v6e and tpu7x, and v3:2x2 is a v3"),
        ];
        for (name, wish, names, expected) in rows {
            let error = Pod::plan(&slice(name), 4, &wish, variables(names)).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{name}: {error}");
        }
        let many = Wish { each: Some(8), ..Wish::default() };
        let error = Pod::plan(&slice("v5e:2x4"), 4, &many, variables(none)).unwrap_err();
        assert!(matches!(error, PodError::TooManyHere { each: 8, here: 4 }), "{error}");
        for port in ["0", "x", "65534"] {
            let odd = [FOUR[0], FOUR[1], ("TORCH_TPU_BASE_PORT", port)];
            let error = Pod::plan(&slice("v5e:4x4"), 4, &Wish::default(), variables(&odd)).unwrap_err();
            assert!(matches!(&error, PodError::Port { value, .. } if value == port), "{error}");
        }
    }

    #[test]
    fn a_rank_of_another_launcher_finds_what_is_missing() {
        let torchrun = [("RANK", "5"), ("WORLD_SIZE", "16"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")];
        let cloud = [("TPU_ACCELERATOR_TYPE", "v5litepod-16"), ("TPU_TOPOLOGY", "4x4"), FOUR[0]];
        let pairs = [&torchrun[..], &cloud[..]].concat();
        let found = of_rank(variables(&pairs)).unwrap();
        assert_eq!(found[1], (TOPOLOGY, "4,4,1".to_owned()));
        assert!(found[0].1.starts_with("t0:8070,t0:8071,") && found[0].1.ends_with(",t3:8073"), "{found:?}");
        // What is set stays.
        let pinned = [&pairs[..], &[(TOPOLOGY, "4,4,1")]].concat();
        assert_eq!(of_rank(variables(&pinned)).unwrap(), found[..1]);
        let both = [&pinned[..], &[(ADDRESSES, "a:1")]].concat();
        assert_eq!(of_rank(variables(&both)).unwrap(), []);
        // With the shape at hand, as torch_tpu finds that of a host, the slice needs no name.
        let shape = [&torchrun[..], &[FOUR[0], (TOPOLOGY, "4,4,1")]].concat();
        assert_eq!(of_rank(variables(&shape)).unwrap(), found[..1]);
        // No launcher, and nothing that names the slice.
        assert_eq!(of_rank(variables(&cloud)).unwrap(), []);
        let nameless = [&torchrun[..], &FOUR[..1]].concat();
        assert!(matches!(of_rank(variables(&nameless)), Err(PodError::NoSlice)));
        assert!(matches!(of_rank(variables(&torchrun)), Err(PodError::Names { hosts: 4, named: 0 })));
        let alone = [("RANK", "0"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "8")];
        let here = [&alone[..], &[("PODRING_SLICE", "tpu7x:2x2x1")]].concat();
        assert_eq!(of_rank(variables(&here)).unwrap()[1].1, "2,2,1,2");
    }
}
