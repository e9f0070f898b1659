//! What the environment says of this process's hub, and of what runs collectives of tensors on devices.

use std::path::Path;

use podring_group::engine::{DeviceError, Hardware, Wanted};
use podring_group::{Error, HubConfig, Secret};
use podring_ici::cache::Disk;
use podring_ici::engine::{Chip, ChipOptions};
use podring_ici::pjrt::{Client, DeviceDescription, PjrtError, Plugin};
use podring_ici::slice::{from_devices, from_names};
use podring_rendezvous::bootstrap::SECRET;
use podring_rendezvous::environment::{Given, Launch};
use podring_rendezvous::secret::Token;
use podring_setting::{BadSetting, Variables};
use podring_topology::Slice;

/// The hub's settings.
pub fn hub() -> Result<HubConfig, Error> {
    let mut config = HubConfig::from_lookup(variables().0)?;
    if let Some(path) = variables().text("PODRING_TOKEN_FILE") {
        let token = Token::from_file(Path::new(&path)).map_err(|bad| BadSetting {
            variable: "PODRING_TOKEN_FILE",
            expected: "a file with the job's token, 16 to 4096 visible ASCII characters",
            got: format!("{path}: {}", bad.why),
        })?;
        config.secret = Some(Secret::new(token.derive(SECRET)));
    }
    Ok(config)
}

/// This process's variables.
pub fn variables() -> Variables<impl Fn(&str) -> Option<String>> {
    Variables(|name: &str| std::env::var(name).ok())
}

/// What runs collectives of tensors on devices, in this process.
pub fn engine() -> Result<Wanted, BadSetting> {
    Wanted::read(&variables(), podring_interposer::over_libtpu())
}

/// The hub's settings, and the chip if collectives run on it.
pub fn process() -> Result<(HubConfig, Option<Hardware>), Error> {
    let devices = match engine()? {
        Wanted::Fabric => None,
        Wanted::Ici => Some(Hardware::Chip(chip()?)),
    };
    Ok((hub()?, devices))
}

/// Where compiled programs are kept, if `PODRING_CACHE_DIR` says so.
fn disk() -> Result<Option<Disk>, BadSetting> {
    let expected = "MiB that compiled programs may take, a whole number of 1 or more";
    let mebibytes =
        variables().read("PODRING_CACHE_MIB", expected, |text| text.parse::<u64>().ok().filter(|&n| n > 0))?;
    let directory = std::env::var_os("PODRING_CACHE_DIR").filter(|directory| !directory.is_empty());
    let Some(directory) = directory else { return Ok(None) };
    let opened = Disk::open(Path::new(&directory), mebibytes.unwrap_or(1024).saturating_mul(1 << 20));
    let bad = |error| BadSetting {
        variable: "PODRING_CACHE_DIR",
        expected: "a directory that is yours and writable by you alone, or a place for a new one",
        got: format!("{}: {error}", directory.display()),
    };
    opened.map(Some).map_err(bad)
}

/// This process's chip: the one device of the client that torch_tpu has through podring's PJRT plugin.
fn chip() -> Result<std::sync::Arc<Chip>, Error> {
    let Some(shared) = podring_interposer::shared() else {
        let expected = "a chip that torch_tpu holds through podring's PJRT plugin, and this process has none: start with \
                        `podring run --slice NAME` (or set PODRING_SLICE, or run on a TPU), with torch_tpu installed";
        return Err(BadSetting { variable: "PODRING_ENGINE", expected, got: "ici".to_owned() }.into());
    };
    // Whether programs sum 16-bit floats in 32-bit ones.
    let (disk, exact) = (disk()?, variables().flag("PODRING_EXACT")?.unwrap_or(false));
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

/// The slice of a TPU's devices: as they describe themselves, else as the launcher's variables say. Without one only groups
/// of all devices, and of one, have programs.
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
