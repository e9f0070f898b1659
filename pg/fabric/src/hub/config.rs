//! What may be set from outside. Read from the environment once, when the hub starts.

use std::ops::RangeInclusive;
use std::time::Duration;

use podring_setting::{BadSetting, Variables};

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

impl Config {
    /// Settings from variables, as `lookup` gives them.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, BadSetting> {
        let (mut config, variables) = (Config::default(), Variables(lookup));
        config.cma = variables.flag("PODRING_CMA")?.unwrap_or(config.cma);
        config.deterministic = variables.flag("PODRING_DETERMINISTIC")?.unwrap_or(config.deterministic);
        config.silence = variables.silence()?.unwrap_or(config.silence);
        let ring = variables.read("PODRING_RING_BYTES", "a power of two from 65536 to 4194304", |text| {
            text.parse::<usize>().ok().filter(|value| value.is_power_of_two() && (65536..=4_194_304).contains(value))
        })?;
        if let Some(value) = ring {
            config.ring = value;
            config.eager_shm = config.eager_shm.min(config.ring / 4);
        }
        config.ports = variables.ports("PODRING_PORT")?.unwrap_or(config.ports);
        let interfaces =
            "names of interfaces or what they begin with, comma between; ^ before the first to use all others";
        let interfaces = variables.read("PODRING_INTERFACES", interfaces, Selection::parse)?;
        config.interfaces = interfaces.unwrap_or(config.interfaces);
        config.host = variables.text("PODRING_HOST_ID");
        Ok(config)
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
        assert_eq!(from(&[]).unwrap().ports, 0..=0);
        assert_eq!(from(&[("PODRING_PORT", "29600-29607")]).unwrap().ports, 29600..=29607);
    }

    #[test]
    fn names_the_variable_that_is_wrong() {
        assert_eq!(from(&[("PODRING_CMA", "maybe")]).unwrap_err().variable, "PODRING_CMA");
        assert_eq!(from(&[("PODRING_RING_BYTES", "1000")]).unwrap_err().variable, "PODRING_RING_BYTES");
        assert_eq!(from(&[("PODRING_PORT", "70000")]).unwrap_err().variable, "PODRING_PORT");
        assert_eq!(from(&[("PODRING_INTERFACES", "a,^b")]).unwrap_err().variable, "PODRING_INTERFACES");
    }
}
