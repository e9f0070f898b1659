//! Cores, memory and limits.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};
use serde_json::json;

use super::{Check, size};

const GROUP: &str = "Cores and memory";
/// What a process of 8 ranks on one host may hold in shared memory.
const SHARED: u64 = 64 << 20;

pub(super) fn checks() -> Vec<Check> {
    let groups = Cgroups::read();
    let mut checks = vec![cores(&groups)];
    checks.extend(memory(&groups));
    checks.extend(limits());
    checks
}

fn cores(groups: &Cgroups) -> Check {
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    let affinity = rustix::thread::sched_getaffinity(None).map(|set| set.count()).ok();
    let quota = groups.cpu_quota();
    let online = fs::read_to_string("/sys/devices/system/cpu/online").map(|text| text.trim().to_owned()).ok();
    let mut summary = format!("{usable} usable");
    if let Some(affinity) = affinity {
        summary.push_str(&format!("; affinity {affinity}"));
    }
    if let Some(online) = &online {
        summary.push_str(&format!("; online {online}"));
    }
    summary.push_str(&quota.map_or("; no cgroup quota".into(), |cores| format!("; cgroup quota {cores:.2} cores")));
    let data = json!({"usable": usable, "affinity": affinity, "cgroup_quota": quota, "online": online});
    let check = Check::ok(GROUP, "cores", summary, data);
    match quota {
        Some(cores) if cores < 1.0 => {
            check.warning("less than one core: a throttled rank stalls every collective it is in")
        }
        _ => check,
    }
}

fn memory(groups: &Cgroups) -> Vec<Check> {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let (total, available) = (meminfo(&info, "MemTotal"), meminfo(&info, "MemAvailable"));
    let limit = groups.memory_limit();
    let mut summary = match (total, available) {
        (Some(total), Some(available)) => format!("{} total, {} available", size(total), size(available)),
        _ => "/proc/meminfo cannot be read".to_owned(),
    };
    summary.push_str(&limit.map_or("; no cgroup limit".into(), |limit| format!("; cgroup limit {}", size(limit))));
    let data = json!({"total": total, "available": available, "cgroup_limit": limit});
    let check = Check::ok(GROUP, "memory", summary, data);
    let tight = available.into_iter().chain(limit).any(|bytes| bytes < 4 * SHARED);
    vec![if tight {
        check.warning("each rank may hold up to 64 MiB of shared memory beside its tensors")
    } else {
        check
    }]
}

fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

fn limits() -> Vec<Check> {
    let number = |value: Option<u64>| value.map_or("unlimited".to_owned(), |value| value.to_string());
    let bytes = |value: Option<u64>| value.map_or("unlimited".to_owned(), size);
    let show = |name: &str, what: &str, resource, show: &dyn Fn(Option<u64>) -> String| {
        let limit = getrlimit(resource);
        let data = json!({"soft": limit.current, "hard": limit.maximum});
        let summary = format!("{} (hard {}): {what}", show(limit.current), show(limit.maximum));
        (Check::ok(GROUP, name, summary, data), limit.current)
    };
    let (files, soft) = show("RLIMIT_NOFILE", "open files", Resource::Nofile, &number);
    let files = match soft {
        Some(soft) if soft < 1024 => files.warning("a large job opens one socket set per host: ulimit -n 65536"),
        _ => files,
    };
    let (space, soft) = show("RLIMIT_AS", "address space", Resource::As, &bytes);
    let space = match soft {
        Some(_) => space.warning("mapping peers' memory counts against it: ulimit -v unlimited"),
        None => space,
    };
    let (locked, _) = show("RLIMIT_MEMLOCK", "locked memory; podring locks none", Resource::Memlock, &bytes);
    let (processes, _) = show("RLIMIT_NPROC", "processes and threads of this user", Resource::Nproc, &number);
    vec![files, space, locked, processes]
}

/// This process's control groups: directories from its own up to the mount, per version.
#[derive(Debug, Default, PartialEq)]
struct Cgroups {
    unified: Vec<PathBuf>,
    cpu: Vec<PathBuf>,
    memory: Vec<PathBuf>,
}

impl Cgroups {
    fn read() -> Self {
        let text = |path| fs::read_to_string(path).unwrap_or_default();
        Self::parse(&text("/proc/self/cgroup"), &text("/proc/self/mountinfo"))
    }

    /// From the text of /proc/self/cgroup (cgroups(7)) and /proc/self/mountinfo (proc_pid_mountinfo(5)).
    fn parse(cgroup: &str, mountinfo: &str) -> Self {
        let mut groups = Cgroups::default();
        for line in cgroup.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
                continue;
            };
            let has = |name: &str| controllers.split(',').any(|controller| controller == name);
            if controllers.is_empty() {
                groups.unified = chain(mountinfo, "cgroup2", None, path);
            }
            if has("cpu") {
                groups.cpu = chain(mountinfo, "cgroup", Some("cpu"), path);
            }
            if has("memory") {
                groups.memory = chain(mountinfo, "cgroup", Some("memory"), path);
            }
        }
        groups
    }

    /// The tightest CPU quota in cores, if there is one.
    fn cpu_quota(&self) -> Option<f64> {
        let v2 = self.unified.iter().filter_map(|directory| quota_v2(&read(directory, "cpu.max")?));
        let v1 = self.cpu.iter().filter_map(|directory| {
            quota_v2(&format!("{} {}", read(directory, "cpu.cfs_quota_us")?, read(directory, "cpu.cfs_period_us")?))
        });
        v2.chain(v1).min_by(f64::total_cmp)
    }

    /// The tightest memory limit in bytes, if there is one.
    fn memory_limit(&self) -> Option<u64> {
        let v2 = self.unified.iter().filter_map(|directory| read(directory, "memory.max")?.parse().ok());
        let v1 = self.memory.iter().filter_map(|directory| read(directory, "memory.limit_in_bytes")?.parse().ok());
        // v1 writes "no limit" as the largest page-aligned i64.
        v2.chain(v1).filter(|&limit: &u64| limit < 1 << 62).min()
    }
}

fn read(directory: &Path, file: &str) -> Option<String> {
    Some(fs::read_to_string(directory.join(file)).ok()?.trim().to_owned())
}

/// `QUOTA PERIOD` in µs; a quota of `max` or -1 is none.
fn quota_v2(text: &str) -> Option<f64> {
    let (quota, period) = text.split_once(' ')?;
    let (quota, period) = (quota.parse::<f64>().ok()?, period.trim().parse::<f64>().ok()?);
    (quota > 0.0 && period > 0.0).then_some(quota / period)
}

/// The directories of group `path` and its parents, under the mount of that kind (and v1 controller).
fn chain(mountinfo: &str, kind: &str, controller: Option<&str>, path: &str) -> Vec<PathBuf> {
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let (left, right): (Vec<&str>, Vec<&str>) = (left.split(' ').collect(), right.split(' ').collect());
        let (Some(root), Some(point)) = (left.get(3), left.get(4)) else { continue };
        let named = |name: &str| right.get(2).is_some_and(|options| options.split(',').any(|option| option == name));
        if right.first() != Some(&kind) || controller.is_some_and(|controller| !named(controller)) {
            continue;
        }
        // In a container the mount may show a subtree: the group's path is seen from the host's root.
        let below = path.strip_prefix(*root).unwrap_or(path).trim_start_matches('/');
        let point = Path::new(point);
        let own = point.join(below);
        return own.ancestors().take_while(|directory| directory.starts_with(point)).map(Path::to_owned).collect();
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_2_groups_reach_up_to_the_mount() {
        let mounts = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw";
        let groups = Cgroups::parse("0::/user.slice/job", mounts);
        let paths = ["/sys/fs/cgroup/user.slice/job", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup"];
        assert_eq!(groups.unified, paths.map(PathBuf::from));
        assert!(groups.cpu.is_empty());
    }

    #[test]
    fn version_1_controllers_have_mounts_of_their_own() {
        let mounts = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
                      35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory";
        let groups = Cgroups::parse("4:memory:/docker/abc\n3:cpuacct,cpu:/\n9:name=systemd:/\nnonsense", mounts);
        assert_eq!(groups.memory, [PathBuf::from("/sys/fs/cgroup/memory")]);
        assert_eq!(groups.cpu, [PathBuf::from("/sys/fs/cgroup/cpu,cpuacct")]);
    }

    #[test]
    fn limits_are_the_tightest_on_the_way_up() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("inner");
        fs::create_dir(&inner).unwrap();
        fs::write(inner.join("cpu.max"), "max 100000\n").unwrap();
        fs::write(root.path().join("cpu.max"), "150000 100000\n").unwrap();
        fs::write(inner.join("memory.max"), "max\n").unwrap();
        fs::write(root.path().join("memory.max"), "1073741824\n").unwrap();
        let groups = Cgroups { unified: vec![inner, root.path().to_owned()], ..Cgroups::default() };
        assert_eq!(groups.cpu_quota(), Some(1.5));
        assert_eq!(groups.memory_limit(), Some(1 << 30));
        fs::write(root.path().join("memory.limit_in_bytes"), "9223372036854771712\n").unwrap();
        fs::write(root.path().join("cpu.cfs_quota_us"), "-1").unwrap();
        fs::write(root.path().join("cpu.cfs_period_us"), "100000").unwrap();
        let v1 = [root.path().to_owned()];
        let groups = Cgroups { cpu: v1.to_vec(), memory: v1.to_vec(), ..Cgroups::default() };
        assert_eq!((groups.cpu_quota(), groups.memory_limit()), (None, None));
    }

    #[test]
    fn meminfo_is_in_kib() {
        let text = "MemTotal:       24680 kB\nMemAvailable:   100 kB\n";
        assert_eq!(meminfo(text, "MemTotal"), Some(24680 * 1024));
        assert_eq!(meminfo(text, "MemFree"), None);
    }
}
