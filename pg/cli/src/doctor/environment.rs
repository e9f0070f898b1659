//! TPU devices, and the environment variables that podring, torch and TPU software read.

use serde_json::{Value, json};

use super::Check;

const PREFIXES: [&str; 8] =
    ["PODRING_", "TPU_", "MEGASCALE_", "MASTER_", "TORCHELASTIC_", "GLOO_", "TORCH_DISTRIBUTED_", "PJRT_"];
const NAMES: [&str; 12] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "OMP_NUM_THREADS",
    "CLOUD_TPU_TASK_ID",
    "JOB_COMPLETION_INDEX",
    "LIBTPU_INIT_ARGS",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "CUDA_VISIBLE_DEVICES",
];

pub(super) fn checks() -> Vec<Check> {
    let mut checks = vec![devices()];
    let mut variables: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())))
        .filter(|(name, _)| is_relevant(name))
        .map(|(name, value)| (shown(&name, &value), name))
        .map(|(value, name)| (name, value))
        .collect();
    variables.sort();
    if variables.is_empty() {
        checks.push(Check::ok("Environment", "variables", "none that podring reads are set", json!({})));
    }
    for (name, value) in variables {
        let data = json!({ "value": value });
        checks.push(Check::ok("Environment", name, if value.is_empty() { "(empty)".into() } else { value }, data));
    }
    checks
}

fn is_relevant(name: &str) -> bool {
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// The value, unless the name or the value says that it is a secret.
fn shown(name: &str, value: &str) -> String {
    const SECRET: [&str; 7] = ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "KEY", "CREDENTIAL", "AUTH"];
    let is_path = ["_FILE", "_PATH", "_DIR"].iter().any(|end| name.ends_with(end));
    if !is_path && SECRET.iter().any(|word| name.contains(word)) {
        return "(set, not shown)".to_owned();
    }
    // user:password@ in an address.
    match value.split_once("://") {
        Some((scheme, rest)) if rest.split('/').next().is_some_and(|authority| authority.contains('@')) => {
            let host = rest.split_once('@').map_or("", |(_, host)| host);
            format!("{scheme}://(not shown)@{host}")
        }
        _ => value.to_owned(),
    }
}

fn devices() -> Check {
    let list = |directory: &str, wanted: fn(&str) -> bool| -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(directory)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| wanted(name))
            .map(|name| format!("{directory}/{name}"))
            .collect();
        names.sort();
        names
    };
    let mut found = list("/dev", |name| name.strip_prefix("accel").is_some_and(|rest| !rest.is_empty()));
    found.extend(list("/dev/accel", |_| true));
    // Only the numbered groups are devices: /dev/vfio/vfio exists wherever the module is loaded.
    found.extend(list("/dev/vfio", |name| name.bytes().all(|byte| byte.is_ascii_digit())));
    found.dedup();
    if found.is_empty() {
        return Check::ok("Devices", "TPU", "no /dev/accel* or /dev/vfio/N: CPU tensors only", json!([]));
    }
    let summary = found.join(" ");
    Check::ok("Devices", "TPU", summary, Value::from(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_shown() {
        assert_eq!(shown("PODRING_TOKEN", "abc"), "(set, not shown)");
        assert_eq!(shown("TPU_API_KEY", "abc"), "(set, not shown)");
        assert_eq!(shown("PODRING_TOKEN_FILE", "/run/token"), "/run/token");
        assert_eq!(shown("PODRING_COORDINATOR", "http://me:pw@host:1/x"), "http://(not shown)@host:1/x");
        assert_eq!(shown("PODRING_COORDINATOR", "http://host:1/a@b"), "http://host:1/a@b");
        assert_eq!(shown("MASTER_ADDR", "10.0.0.1"), "10.0.0.1");
    }

    #[test]
    fn only_what_is_read_is_listed() {
        assert!(is_relevant("PODRING_CMA") && is_relevant("RANK") && is_relevant("TPU_WORKER_ID"));
        assert!(!is_relevant("HOME") && !is_relevant("AWS_SECRET_ACCESS_KEY"));
    }
}
