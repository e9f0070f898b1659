//! What the environment says of a job's coordinator.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use podring_setting::{BadSetting, Variables};

use crate::secret::Tls;

/// The variable that says on which ports rank 0's coordinator may listen.
const PORT: &str = "PODRING_COORDINATOR_PORT";

/// How this job's coordinator is reached and trusted.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// PODRING_COORDINATOR: host:port of a coordinator of its own; without it rank 0 starts one.
    pub coordinator: Option<String>,
    /// PODRING_COORDINATOR_PORT: where rank 0's coordinator may listen, the first port that is free; any by default.
    pub ports: Option<RangeInclusive<u16>>,
    /// PODRING_TOKEN_FILE: holds the job's token, on every host.
    pub token_file: Option<PathBuf>,
    /// PODRING_TLS_CERT, PODRING_TLS_KEY, PODRING_TLS_CA.
    pub tls: Option<Tls>,
    /// PODRING_TLS_NAME: the name in the coordinator's certificate, if it isn't the host of its address.
    pub tls_name: Option<String>,
    /// PODRING_SILENCE_MS; 10 s by default.
    pub silence: Option<Duration>,
}

impl Settings {
    /// Reads variables through `lookup`; one that is empty counts as not set.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Settings, BadSetting> {
        let variables = Variables(lookup);
        let text = |name: &str| variables.text(name);
        let path = |name: &str| text(name).map(PathBuf::from);
        let endpoint = |text: &str| crate::session::split_endpoint(text).map(|_| text.to_owned());
        let coordinator = variables.read("PODRING_COORDINATOR", "host:port, an IPv6 literal in brackets", endpoint)?;
        let ports = variables.ports(PORT)?.filter(|ports| *ports.start() > 0);
        let three = [("PODRING_TLS_CERT", "cert"), ("PODRING_TLS_KEY", "key"), ("PODRING_TLS_CA", "ca")];
        let tls = match three.map(|(name, _)| path(name)) {
            [Some(cert), Some(key), Some(ca)] => Some(Tls { ca, cert, key }),
            [None, None, None] => None,
            given => {
                let missing = three.iter().zip(&given).find(|(_, given)| given.is_none());
                let variable = missing.map_or("PODRING_TLS_CERT", |((name, _), _)| *name);
                let expected = "PODRING_TLS_CERT, PODRING_TLS_KEY and PODRING_TLS_CA together";
                return Err(BadSetting { variable, expected, got: String::new() });
            }
        };
        let silence = variables.silence()?;
        let (token_file, tls_name) = (path("PODRING_TOKEN_FILE"), text("PODRING_TLS_NAME"));
        Ok(Settings { coordinator, ports, token_file, tls, tls_name, silence })
    }

    /// Whether the job has a token, from which its secret is derived: given, or made by rank 0.
    pub fn has_token(&self) -> bool {
        self.token_file.is_some() || self.coordinator.is_none() && self.tls.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> Result<Settings, BadSetting> {
        Settings::from_lookup(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn settings_are_read_and_named_when_wrong() {
        let none = settings(&[("PODRING_COORDINATOR", " ")]).unwrap();
        assert!(none.coordinator.is_none() && none.tls.is_none() && none.has_token());
        let all = settings(&[
            ("PODRING_COORDINATOR", "[::1]:5"),
            ("PODRING_TLS_CERT", "c"),
            ("PODRING_TLS_KEY", "k"),
            ("PODRING_TLS_CA", "a"),
            ("PODRING_SILENCE_MS", "1000"),
            ("PODRING_COORDINATOR_PORT", " 29500-29507 "),
        ])
        .unwrap();
        assert_eq!(all.ports, Some(29500..=29507));
        assert_eq!(settings(&[("PODRING_COORDINATOR_PORT", "0")]).unwrap().ports, None);
        assert_eq!(all.tls.as_ref().unwrap().key, PathBuf::from("k"));
        assert!(all.silence == Some(Duration::from_secs(1)) && !all.has_token());
        for (pairs, variable) in [
            (&[("PODRING_COORDINATOR", "host")][..], "PODRING_COORDINATOR"),
            (&[("PODRING_COORDINATOR", "::1:5")], "PODRING_COORDINATOR"),
            (&[("PODRING_SILENCE_MS", "0")], "PODRING_SILENCE_MS"),
            (&[("PODRING_COORDINATOR_PORT", "70000")], "PODRING_COORDINATOR_PORT"),
            (&[("PODRING_COORDINATOR_PORT", "0-5")], "PODRING_COORDINATOR_PORT"),
            (&[("PODRING_COORDINATOR_PORT", "5-4")], "PODRING_COORDINATOR_PORT"),
            (&[("PODRING_TLS_CERT", "c"), ("PODRING_TLS_CA", "a")], "PODRING_TLS_KEY"),
        ] {
            assert_eq!(settings(pairs).unwrap_err().variable, variable);
        }
    }
}
