//! What to wrap, and which virtual chip this process is.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use podring_ici::pjrt::{Want, find};
use podring_topology::Slice;

use crate::error::InterposeError;

/// What lies under the table.
#[derive(Clone, Debug, PartialEq)]
pub enum Wrapped {
    /// libtpu: forwarded untouched.
    Libtpu,
    /// A virtual slice on XLA's CPU plugin.
    Virtual(Slice),
}

/// How to make the table.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The plugin's file.
    pub plugin: PathBuf,
    /// What it is wrapped as.
    pub wrapped: Wrapped,
}

/// The launcher's word on who this process is; read when a client is created, since a program may set it itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub rank: u32,
    pub world: u32,
}

impl Settings {
    /// `PODRING_LIBTPU` names libtpu's file, on a TPU host. Otherwise `PODRING_SLICE` makes it virtual, on the plugin that
    /// `PODRING_PJRT_PLUGIN` names or XLA's CPU plugin in the Python environment; without a slice that plugin is
    /// forwarded.
    pub fn from_environment() -> Result<Settings, InterposeError> {
        Settings::read(|name| env::var_os(name))
    }

    fn read(variable: impl Fn(&str) -> Option<OsString>) -> Result<Settings, InterposeError> {
        let file = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(plugin) = file("PODRING_LIBTPU") {
            return Ok(Settings { plugin, wrapped: Wrapped::Libtpu });
        }
        let slice = variable("PODRING_SLICE").and_then(|name| name.into_string().ok());
        match slice.filter(|name| !name.trim().is_empty()) {
            Some(name) => Settings::virtual_slice(&name, file("PODRING_PJRT_PLUGIN").as_deref()),
            None => match file("PODRING_PJRT_PLUGIN") {
                Some(plugin) => Ok(Settings { plugin, wrapped: Wrapped::Libtpu }),
                None => Err(InterposeError::NoPlugin {
                    reason: "PODRING_SLICE (a virtual slice), PODRING_PJRT_PLUGIN and PODRING_LIBTPU (libtpu's file) \
                             are not set"
                        .to_owned(),
                }),
            },
        }
    }

    /// A virtual slice by name, on `plugin`, or on the CPU plugin that is found.
    pub fn virtual_slice(name: &str, plugin: Option<&Path>) -> Result<Settings, InterposeError> {
        let refused = |source| InterposeError::Slice { name: name.to_owned(), source: Box::new(source) };
        let slice = podring_topology::parse(name).map_err(refused)?;
        let plugin = match plugin {
            Some(file) => file.to_owned(),
            None => find(Want::Cpu, &[]).map_err(|error| InterposeError::NoPlugin { reason: error.to_string() })?,
        };
        Ok(Settings { plugin, wrapped: Wrapped::Virtual(slice) })
    }

    /// Whether the launcher's `RANK` and `WORLD_SIZE`, as far as they are set now, fit the slice.
    pub fn check_place(&self) -> Result<(), InterposeError> {
        match &self.wrapped {
            Wrapped::Libtpu => Ok(()),
            Wrapped::Virtual(slice) => place(slice, |name| env::var(name).ok()).map(drop),
        }
    }
}

/// This process's place on `slice` by `RANK` and `WORLD_SIZE`; alone if they are not set.
pub fn place(slice: &Slice, variable: impl Fn(&str) -> Option<String>) -> Result<Place, InterposeError> {
    let number = |name: &'static str, otherwise: u32| match variable(name) {
        None => Ok(otherwise),
        Some(value) => {
            value.trim().parse::<u32>().map_err(|_| InterposeError::Variable { variable: name, value: value.clone() })
        }
    };
    let rank = number("RANK", 0)?;
    let world = number("WORLD_SIZE", 1)?;
    let devices = slice.devices();
    if rank >= world && world <= devices {
        return Err(InterposeError::RankBeyondWorld { rank, world });
    }
    if world > devices {
        return Err(InterposeError::TooManyRanks { rank, world, slice: slice.to_string(), devices });
    }
    Ok(Place { rank, world })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(rank: &'static str, world: &'static str) -> Result<Place, InterposeError> {
        let slice = podring_topology::parse("v5e:2x2").unwrap();
        place(&slice, move |name| Some(if name == "RANK" { rank } else { world }.to_owned()))
    }

    #[test]
    fn ranks_are_the_slices_devices_in_order() {
        assert_eq!(at("3", "4"), Ok(Place { rank: 3, world: 4 }));
        assert_eq!(at("1", "2"), Ok(Place { rank: 1, world: 2 }));
        let slice = podring_topology::parse("v5e:2x2").unwrap();
        assert_eq!(place(&slice, |_| None), Ok(Place { rank: 0, world: 1 }));
    }

    #[test]
    fn more_ranks_than_chips_are_refused() {
        let error = at("4", "8").unwrap_err();
        assert_eq!(
            error.to_string(),
            "rank 4 of 8: the slice v5e:2x2 has 4 devices, and each rank is one. Choose a larger slice, or start at \
             most 4 ranks"
        );
        assert!(matches!(at("3", "2"), Err(InterposeError::RankBeyondWorld { rank: 3, world: 2 })));
        assert!(matches!(at("0", "8"), Err(InterposeError::TooManyRanks { world: 8, devices: 4, .. })));
        assert!(matches!(at("x", "4"), Err(InterposeError::Variable { variable: "RANK", .. })));
        assert!(matches!(at("-1", "4"), Err(InterposeError::Variable { variable: "RANK", .. })));
    }

    #[test]
    fn on_a_tpu_host_a_slices_name_makes_nothing_virtual() {
        let read = |pairs: &'static [(&str, &str)]| {
            Settings::read(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).into()))
        };
        let real = read(&[("PODRING_SLICE", "v5e:2x2"), ("PODRING_LIBTPU", "l.so"), ("PODRING_PJRT_PLUGIN", "c.so")]);
        assert_eq!(real, Ok(Settings { plugin: "l.so".into(), wrapped: Wrapped::Libtpu }));
        let chips = read(&[("PODRING_SLICE", "v5e:2x2"), ("PODRING_LIBTPU", ""), ("PODRING_PJRT_PLUGIN", "c.so")]);
        assert!(matches!(chips.unwrap().wrapped, Wrapped::Virtual(_)));
        assert_eq!(read(&[("PODRING_PJRT_PLUGIN", "c.so")]).unwrap().wrapped, Wrapped::Libtpu);
        assert!(matches!(read(&[]), Err(InterposeError::NoPlugin { .. })));
    }

    #[test]
    fn names_of_no_slice_are_refused() {
        let error = Settings::virtual_slice("v5e:3x7", Some(Path::new("x.so"))).unwrap_err();
        assert!(error.to_string().starts_with("PODRING_SLICE=v5e:3x7: "), "{error}");
    }
}
