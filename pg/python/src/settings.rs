//! What the environment says of this process's hub, and of what runs collectives of tensors on devices.

use std::ffi::OsString;
use std::path::Path;

use podring_group::engine::{DeviceError, Hardware};
use podring_group::{BadSetting, Error, HubConfig, Secret};
use podring_ici::cache::Disk;
use podring_ici::engine::{Chip, ChipOptions};
use podring_ici::pjrt::{Client, DeviceDescription, PjrtError, Plugin};
use podring_ici::slice::{from_devices, from_names};
use podring_rendezvous::bootstrap::SECRET;
use podring_rendezvous::environment::{Given, Launch};
use podring_rendezvous::secret::Token;
use podring_topology::Slice;

/// The hub's settings.
pub fn hub() -> Result<HubConfig, Error> {
    let variable = |name: &str| std::env::var(name).ok();
    let mut config = HubConfig::from_lookup(variable)?;
    if let Some(path) = variable("PODRING_TOKEN_FILE").filter(|path| !path.is_empty()) {
        let token = Token::from_file(Path::new(&path)).map_err(|bad| BadSetting {
            variable: "PODRING_TOKEN_FILE",
            expected: "a file with the job's token, 16 to 4096 visible ASCII characters",
            got: format!("{path}: {}", bad.why),
        })?;
        config.secret = Some(Secret::new(token.derive(SECRET)));
    }
    Ok(config)
}

/// What runs collectives of tensors on devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// The fabric, through the host's memory.
    Fabric,
    /// Programs on the devices.
    Ici,
}

/// `PODRING_ENGINE`; without it programs on a TPU, and else the fabric, which plays a virtual slice's programs too.
pub fn engine() -> Result<Engine, BadSetting> {
    chosen(&std::env::var("PODRING_ENGINE").unwrap_or_default(), podring_interposer::over_libtpu())
}

fn chosen(setting: &str, on_tpu: bool) -> Result<Engine, BadSetting> {
    match setting.trim() {
        "" if on_tpu => Ok(Engine::Ici),
        "" | "fabric" => Ok(Engine::Fabric),
        "ici" => Ok(Engine::Ici),
        other => {
            let expected = "fabric or ici (not set: ici on a TPU, otherwise fabric)";
            Err(BadSetting { variable: "PODRING_ENGINE", expected, got: other.to_owned() })
        }
    }
}

/// The hub's settings, and the chip if collectives run on it.
pub fn process() -> Result<(HubConfig, Option<Hardware>), Error> {
    let devices = match engine()? {
        Engine::Fabric => None,
        Engine::Ici => Some(Hardware::Chip(chip()?)),
    };
    Ok((hub()?, devices))
}

/// Where compiled programs are kept, if `PODRING_CACHE_DIR` says so.
fn disk(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Option<Disk>, BadSetting> {
    const MEBIBYTES: &str = "PODRING_CACHE_MIB";
    let set = |name: &str| lookup(name).filter(|value| !value.is_empty());
    let mebibytes = set(MEBIBYTES).map_or(Ok(1024), |value| {
        let value = value.to_string_lossy();
        let expected = "MiB that compiled programs may take, a whole number of 1 or more";
        let number = value.trim().parse::<u64>().ok().filter(|&number| number > 0);
        number.ok_or_else(|| BadSetting { variable: MEBIBYTES, expected, got: value.clone().into_owned() })
    })?;
    let Some(directory) = set("PODRING_CACHE_DIR") else { return Ok(None) };
    let opened = Disk::open(Path::new(&directory), mebibytes.saturating_mul(1 << 20));
    let bad = |error| BadSetting {
        variable: "PODRING_CACHE_DIR",
        expected: "a directory that is yours and writable by you alone, or a place for a new one",
        got: format!("{}: {error}", directory.display()),
    };
    opened.map(Some).map_err(bad)
}

/// Whether programs sum 16-bit floats in 32-bit ones.
fn exact(lookup: impl Fn(&str) -> Option<OsString>) -> Result<bool, BadSetting> {
    let value = lookup("PODRING_EXACT").unwrap_or_default();
    match value.to_string_lossy().trim() {
        "" | "0" | "false" | "no" | "off" => Ok(false),
        "1" | "true" | "yes" | "on" => Ok(true),
        other => Err(BadSetting { variable: "PODRING_EXACT", expected: "0 or 1", got: other.to_owned() }),
    }
}

/// This process's chip: the one device of the client that torch_tpu has through podring's PJRT plugin.
fn chip() -> Result<std::sync::Arc<Chip>, Error> {
    let Some(shared) = podring_interposer::shared() else {
        let expected = "a chip that torch_tpu holds through podring's PJRT plugin, and this process has none: start with \
                        `podring run --slice NAME` (or set PODRING_SLICE, or run on a TPU), with torch_tpu installed";
        return Err(BadSetting { variable: "PODRING_ENGINE", expected, got: "ici".to_owned() }.into());
    };
    let (disk, exact) = (disk(|name| std::env::var_os(name))?, exact(|name| std::env::var_os(name))?);
    let start = || -> Result<_, PjrtError> {
        // SAFETY: the interposer's table lives for ever.
        let plugin = unsafe { Plugin::over(shared.table, &shared.plugin) }?;
        // SAFETY: torch_tpu's client, which it keeps until the process ends.
        let client = unsafe { Client::shared(&plugin, shared.client) }?;
        // On a virtual slice the interposer plays programs, in this process's memory.
        let here = shared.slice.is_some();
        let slice = match shared.slice {
            Some(slice) => Some(slice),
            None => real_slice(&client.descriptions()?),
        };
        Chip::start(client, ChipOptions { slice, exact, on_host: here, played: here, disk, ..Default::default() })
    };
    start().map_err(|error| DeviceError::Client(error).into())
}

/// The slice of a TPU's devices: as they describe themselves, else as the launcher's variables say. Without one groups
/// run on their members' devices, and reduce-scatters as the compiler likes.
fn real_slice(devices: &[DeviceDescription]) -> Option<Slice> {
    let unseen = match from_devices(devices) {
        Ok(slice) => return Some(slice),
        Err(error) => error,
    };
    let named = Launch::from_env().map_err(|error| error.to_string()).and_then(|launch| {
        let text = |given: &Option<Given<String>>| given.as_ref().map(|given| given.value.clone());
        let (accelerator, dims) = (text(&launch.accelerator_type), launch.topology.map(|dims| dims.value));
        let slices = launch.slice_count.map(|count| count.value);
        from_names(accelerator.as_deref(), dims.as_deref(), slices, devices).map_err(|error| error.to_string())
    });
    match named {
        Ok(slice) => Some(slice),
        Err(unnamed) => {
            tracing::warn!(%unseen, unnamed, "the TPUs' slice isn't known: its shape is not made use of");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_a_tpu_programs_run_collectives_unless_the_fabric_is_asked_for() {
        for (setting, on_tpu, expected) in [
            ("", true, Engine::Ici),
            ("", false, Engine::Fabric),
            (" ", true, Engine::Ici),
            ("fabric", true, Engine::Fabric),
            ("fabric", false, Engine::Fabric),
            ("ici", false, Engine::Ici),
            (" ici ", true, Engine::Ici),
        ] {
            assert_eq!(chosen(setting, on_tpu).unwrap(), expected, "{setting:?} {on_tpu}");
        }
        let error = chosen("tpu", true).unwrap_err().to_string();
        assert!(error.starts_with("PODRING_ENGINE=\"tpu\": expected fabric or ici"), "{error}");
    }
}
