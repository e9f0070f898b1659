//! What the environment says of this process's hub.

use std::path::Path;

use podring_group::{BadSetting, Error, HubConfig, Secret};
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
