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

/// The hub's settings, and the chip if `PODRING_ENGINE` asks for it.
pub fn process() -> Result<(HubConfig, Option<Hardware>), Error> {
    let engine = std::env::var("PODRING_ENGINE").unwrap_or_default();
    let devices = match engine.trim() {
        "" | "fabric" => None,
        "ici" => Some(Hardware::Chip(chip()?)),
        other => {
            let expected = "fabric (what is taken if it is not set) or ici";
            return Err(BadSetting { variable: "PODRING_ENGINE", expected, got: other.to_owned() }.into());
        }
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
