//! What the environment says of a job's coordinator.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use crate::secret::Tls;

/// The variable that says on which ports rank 0's coordinator may listen.
const PORT: &str = "PODRING_COORDINATOR_PORT";

/// A setting that can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}={got:?}: expected {expected}")]
pub struct BadSetting {
    /// The variable.
    pub variable: &'static str,
    /// What it should be.
    pub expected: &'static str,
    /// What it is.
    pub got: String,
}

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
        let text = |name: &str| lookup(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let path = |name: &str| text(name).map(PathBuf::from);
        let coordinator = text("PODRING_COORDINATOR");
        if let Some(got) = coordinator.as_ref().filter(|got| crate::session::split_endpoint(got).is_none()) {
            let expected = "host:port, an IPv6 literal in brackets";
            return Err(BadSetting { variable: "PODRING_COORDINATOR", expected, got: got.clone() });
        }
        let ports = match text(PORT) {
            None => None,
            Some(got) => {
                let expected = "a port, 0 to 65535, or a range of ports such as 29500-29507";
                let bad = || BadSetting { variable: PORT, expected, got: got.clone() };
                Some(ports(&got).ok_or_else(bad)?).filter(|ports| *ports.start() > 0)
            }
        };
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
        let silence = match text("PODRING_SILENCE_MS") {
            None => None,
            Some(got) => match got.parse::<u64>() {
                Ok(ms) if ms >= 100 => Some(Duration::from_millis(ms)),
                _ => {
                    let expected = "milliseconds, 100 or more";
                    return Err(BadSetting { variable: "PODRING_SILENCE_MS", expected, got });
                }
            },
        };
        let (token_file, tls_name) = (path("PODRING_TOKEN_FILE"), text("PODRING_TLS_NAME"));
        Ok(Settings { coordinator, ports, token_file, tls, tls_name, silence })
    }

    /// Whether the job has a token, from which its secret is derived: given, or made by rank 0.
    pub fn has_token(&self) -> bool {
        self.token_file.is_some() || self.coordinator.is_none() && self.tls.is_none()
    }
}

/// A port, or a range of them in which 0, which means any, has no place.
fn ports(text: &str) -> Option<RangeInclusive<u16>> {
    let number = |text: &str| text.trim().parse::<u16>().ok();
    match text.split_once('-') {
        None => number(text).map(|port| port..=port),
        Some((first, last)) => {
            let (first, last) = (number(first)?, number(last)?);
            (0 < first && first <= last).then_some(first..=last)
        }
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
