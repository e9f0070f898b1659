//! Which engine a process is asked to have.

use podring_setting::{BadSetting, Variables};

/// What runs collectives of tensors on devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The fabric, through the host's memory.
    Fabric,
    /// Programs on the devices.
    Ici,
}

impl Wanted {
    /// `PODRING_ENGINE`; without it programs on a TPU, and else the fabric, which plays a virtual slice's programs too.
    pub fn read(variables: &Variables<impl Fn(&str) -> Option<String>>, on_tpu: bool) -> Result<Wanted, BadSetting> {
        let expected = "fabric or ici (not set: ici on a TPU, otherwise fabric)";
        let wanted = variables.read("PODRING_ENGINE", expected, |text| match text {
            "fabric" => Some(Wanted::Fabric),
            "ici" => Some(Wanted::Ici),
            _ => None,
        })?;
        Ok(wanted.unwrap_or(if on_tpu { Wanted::Ici } else { Wanted::Fabric }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(setting: &str, on_tpu: bool) -> Result<Wanted, BadSetting> {
        Wanted::read(&Variables(|name: &str| (name == "PODRING_ENGINE").then(|| setting.to_owned())), on_tpu)
    }

    #[test]
    fn on_a_tpu_programs_run_collectives_unless_the_fabric_is_asked_for() {
        for (setting, on_tpu, expected) in [
            ("", true, Wanted::Ici),
            ("", false, Wanted::Fabric),
            (" ", true, Wanted::Ici),
            ("fabric", true, Wanted::Fabric),
            ("fabric", false, Wanted::Fabric),
            ("ici", false, Wanted::Ici),
            (" ici ", true, Wanted::Ici),
        ] {
            assert_eq!(wanted(setting, on_tpu).unwrap(), expected, "{setting:?} {on_tpu}");
        }
        let error = wanted("tpu", true).unwrap_err().to_string();
        assert!(error.starts_with("PODRING_ENGINE=\"tpu\": expected fabric or ici"), "{error}");
    }
}
