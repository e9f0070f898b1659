//! What may be set from outside. Read from the environment once, when the hub starts.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::handshake::Secret;
use crate::link::interfaces::Selection;
use crate::schedule::Tuning;

/// Settings of a hub.
#[derive(Clone, Debug)]
pub struct Config {
    /// Read peers' memory directly where the system lets us. PODRING_CMA=0 stages through rings instead.
    pub cma: bool,
    /// A TCP peer that says nothing for this long is lost. PODRING_SILENCE_MS, default 10,000.
    pub silence: Duration,
    /// Data bytes of a shared-memory ring; one per local peer and direction. PODRING_RING_BYTES, a power of two.
    pub ring: usize,
    /// Messages up to this many bytes go through the ring at once.
    pub eager_shm: usize,
    /// Messages up to this many bytes go through a socket at once.
    pub eager_tcp: usize,
    /// The same bits whatever the schedule. PODRING_DETERMINISTIC=1.
    pub deterministic: bool,
    /// What the planner goes by.
    pub tuning: Tuning,
    /// Where the TCP listener may be: the first port that is free; 0 for any. PODRING_PORT, a port or `first-last`.
    pub ports: RangeInclusive<u16>,
    /// Whose addresses are published. PODRING_INTERFACES, default all.
    pub interfaces: Selection,
    /// What all processes of the job hold, from outside. Without, each job's secret is the one that its rank 0 made.
    pub secret: Option<Secret>,
    /// How long a connection may take to prove itself.
    pub handshake: Duration,
    /// This host's identity; ranks with the same share memory. PODRING_HOST_ID.
    pub host: Option<String>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            cma: true,
            silence: Duration::from_secs(10),
            ring: 512 << 10,
            eager_shm: 16 << 10,
            eager_tcp: 64 << 10,
            deterministic: false,
            tuning: Tuning::default(),
            ports: 0..=0,
            interfaces: Selection::default(),
            secret: None,
            handshake: Duration::from_secs(10),
            host: None,
        }
    }
}

/// An environment variable that says what can't be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}={got:?}: expected {expected}")]
pub struct BadSetting {
    /// Its name.
    pub variable: &'static str,
    /// What it should be.
    pub expected: &'static str,
    /// What it is.
    pub got: String,
}

impl Config {
    /// Settings from variables, as `lookup` gives them.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, BadSetting> {
        let mut config = Config::default();
        let flag = |variable: &'static str, default: bool| match lookup(variable).as_deref().map(str::trim) {
            None | Some("") => Ok(default),
            Some("0" | "false" | "no" | "off") => Ok(false),
            Some("1" | "true" | "yes" | "on") => Ok(true),
            Some(other) => Err(BadSetting { variable, expected: "0 or 1", got: other.into() }),
        };
        let number =
            |variable: &'static str, expected: &'static str, valid: &dyn Fn(u64) -> bool| match lookup(variable)
                .as_deref()
                .map(str::trim)
            {
                None | Some("") => Ok(None),
                Some(text) => match text.parse::<u64>() {
                    Ok(value) if valid(value) => Ok(Some(value)),
                    _ => Err(BadSetting { variable, expected, got: text.into() }),
                },
            };
        config.cma = flag("PODRING_CMA", config.cma)?;
        config.deterministic = flag("PODRING_DETERMINISTIC", config.deterministic)?;
        let silence = number("PODRING_SILENCE_MS", "milliseconds, 100 or more", &|value| value >= 100)?;
        if let Some(value) = silence {
            config.silence = Duration::from_millis(value);
        }
        let ring = number("PODRING_RING_BYTES", "a power of two from 65536 to 4194304", &|value| {
            value.is_power_of_two() && (65536..=4_194_304).contains(&value)
        })?;
        if let Some(value) = ring {
            config.ring = value as usize;
            config.eager_shm = config.eager_shm.min(config.ring / 4);
        }
        if let Some(text) = lookup("PODRING_PORT").filter(|text| !text.trim().is_empty()) {
            let bad = || BadSetting {
                variable: "PODRING_PORT",
                expected: "a port, 0 to 65535, or a range of ports such as 29600-29631",
                got: text.clone(),
            };
            config.ports = ports(&text).ok_or_else(bad)?;
        }
        if let Some(text) = lookup("PODRING_INTERFACES").filter(|text| !text.trim().is_empty()) {
            let bad = || BadSetting {
                variable: "PODRING_INTERFACES",
                expected: "names of interfaces or what they begin with, comma between; ^ before the first to use all others",
                got: text.clone(),
            };
            config.interfaces = Selection::parse(&text).ok_or_else(bad)?;
        }
        config.host = lookup("PODRING_HOST_ID").filter(|host| !host.is_empty());
        Ok(config)
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

    fn from(pairs: &[(&str, &str)]) -> Result<Config, BadSetting> {
        Config::from_lookup(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn reads_what_is_set() {
        let config = from(&[("PODRING_CMA", "0"), ("PODRING_SILENCE_MS", "1000"), ("PODRING_HOST_ID", "a")]).unwrap();
        assert!(!config.cma);
        assert_eq!((config.silence, config.host.as_deref()), (Duration::from_secs(1), Some("a")));
        assert!(from(&[]).unwrap().cma);
    }

    #[test]
    fn names_the_variable_that_is_wrong() {
        assert_eq!(from(&[("PODRING_CMA", "maybe")]).unwrap_err().variable, "PODRING_CMA");
        assert_eq!(from(&[("PODRING_RING_BYTES", "1000")]).unwrap_err().variable, "PODRING_RING_BYTES");
        for wrong in ["70000", "-1", "5-3", "0-3", "1-", "a"] {
            assert_eq!(from(&[("PODRING_PORT", wrong)]).unwrap_err().variable, "PODRING_PORT", "{wrong}");
        }
        assert_eq!(from(&[("PODRING_INTERFACES", "a,^b")]).unwrap_err().variable, "PODRING_INTERFACES");
    }

    #[test]
    fn ports_and_ranges() {
        assert_eq!(from(&[]).unwrap().ports, 0..=0);
        assert_eq!(from(&[("PODRING_PORT", " 29600 ")]).unwrap().ports, 29600..=29600);
        assert_eq!(from(&[("PODRING_PORT", "29600-29607")]).unwrap().ports, 29600..=29607);
    }
}
