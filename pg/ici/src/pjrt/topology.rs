//! Slices that aren't here: described and compiled for by libtpu, with no TPU.

use std::sync::Arc;

use super::{
    PjrtError, Plugin,
    executable::{CompileOptions, Executable, program},
    plugin::text,
    sys::{self, Opaque},
    value::{Value, read_all, write_all},
};

/// A slice as the plugin knows it.
pub struct Topology {
    plugin: Arc<Plugin>,
    raw: Opaque,
}

// SAFETY: a PJRT topology is constant and may be used from any thread.
unsafe impl Send for Topology {}
// SAFETY: as above.
unsafe impl Sync for Topology {}

impl Drop for Topology {
    fn drop(&mut self) {
        self.plugin.destroy(&mut sys::TopologyDestroy { topology: self.raw, ..Default::default() });
    }
}

/// A device of a topology.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceDescription {
    /// The plugin's id of it.
    pub id: i32,
    /// The process (host) that it belongs to.
    pub process: i32,
    /// Its kind, such as `TPU v5 lite`.
    pub kind: String,
    /// What else the plugin tells: libtpu gives `coords`, `core_on_chip`, `slice_index`.
    pub attributes: Vec<(String, Value)>,
}

impl Topology {
    /// The slice of this name (`v5e:4x4`), with libtpu's options (`num_slices`, `wrap`, `chip_config_name`).
    pub fn create(plugin: &Arc<Plugin>, name: &str, options: &[(&str, Value)]) -> Result<Topology, PjrtError> {
        let raw_options = write_all(options);
        let mut args = sys::TopologyCreate {
            name: name.as_ptr().cast(),
            name_size: name.len(),
            create_options: raw_options.as_ptr(),
            num_options: raw_options.len(),
            ..Default::default()
        };
        plugin.call(&mut args)?;
        Ok(Topology { plugin: plugin.clone(), raw: args.topology })
    }

    /// The compiler's version, in the plugin's words.
    pub fn platform_version(&self) -> Result<String, PjrtError> {
        let mut args = sys::TopologyPlatformVersion { topology: self.raw, ..Default::default() };
        self.plugin.call(&mut args)?;
        // SAFETY: the topology's string, alive as long as the topology.
        Ok(unsafe { text(args.text, args.text_size) })
    }

    /// Every device, in the plugin's order.
    pub fn devices(&self) -> Result<Vec<DeviceDescription>, PjrtError> {
        let mut args = sys::TopologyDevices { topology: self.raw, ..Default::default() };
        self.plugin.call(&mut args)?;
        if args.num_descriptions == 0 {
            return Ok(Vec::new());
        }
        // SAFETY: the topology's own list, alive as long as the topology.
        let raw = unsafe { std::slice::from_raw_parts(args.descriptions, args.num_descriptions) };
        raw.iter().map(|&description| describe(&self.plugin, description)).collect()
    }

    /// Compiles StableHLO text for devices of this slice.
    pub fn compile(&self, mlir: &str, options: &CompileOptions) -> Result<Executable, PjrtError> {
        let encoded = options.encode();
        let program = program(mlir);
        let mut args = sys::Compile {
            topology: self.raw,
            program: &program,
            compile_options: encoded.as_ptr().cast(),
            compile_options_size: encoded.len(),
            ..Default::default()
        };
        self.plugin.call(&mut args)?;
        Ok(Executable::new(&self.plugin, args.executable))
    }
}

/// What a description says; its strings and lists are copied.
pub(super) fn describe(plugin: &Plugin, description: Opaque) -> Result<DeviceDescription, PjrtError> {
    let mut id = sys::DeviceDescriptionId { description, ..Default::default() };
    plugin.call(&mut id)?;
    let mut process = sys::DeviceDescriptionProcessIndex { description, ..Default::default() };
    plugin.call(&mut process)?;
    let mut kind = sys::DeviceDescriptionKind { description, ..Default::default() };
    plugin.call(&mut kind)?;
    let mut attributes = sys::DeviceDescriptionAttributes { description, ..Default::default() };
    plugin.call(&mut attributes)?;
    Ok(DeviceDescription {
        id: id.id,
        process: process.process_index,
        // SAFETY: the description's string, alive as long as its topology or client.
        kind: unsafe { text(kind.text, kind.text_size) },
        // SAFETY: the description's list, alive as long.
        attributes: unsafe { read_all(attributes.attributes, attributes.num_attributes) },
    })
}
