//! What the environment says of this process's hub, and of what runs collectives of tensors on devices.

use std::path::Path;

use podring_group::engine::{DeviceError, Hardware};
use podring_group::{BadSetting, Error, HubConfig, Secret};
use podring_ici::engine::{Chip, ChipOptions};
use podring_ici::pjrt::{Client, PjrtError, Plugin};
use podring_rendezvous::bootstrap::SECRET;
use podring_rendezvous::secret::Token;

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

/// This process's chip: the one device of the client that torch_tpu has through podring's PJRT plugin.
fn chip() -> Result<std::sync::Arc<Chip>, Error> {
    let Some(shared) = podring_interposer::shared() else {
        let expected = "a chip that torch_tpu holds through podring's PJRT plugin, and this process has none: start with \
                        `podring run --slice NAME` (or set PODRING_SLICE, or run on a TPU), with torch_tpu installed";
        return Err(BadSetting { variable: "PODRING_ENGINE", expected, got: "ici".to_owned() }.into());
    };
    let start = || -> Result<_, PjrtError> {
        // SAFETY: the interposer's table lives for ever.
        let plugin = unsafe { Plugin::over(shared.table, &shared.plugin) }?;
        // SAFETY: torch_tpu's client, which it keeps until the process ends.
        let client = unsafe { Client::shared(&plugin, shared.client) }?;
        // On a virtual slice the interposer plays programs, in this process's memory.
        let here = shared.slice.is_some();
        Chip::start(client, ChipOptions { slice: shared.slice, on_host: here, played: here, ..Default::default() })
    };
    start().map_err(|error| DeviceError::Client(error).into())
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
