//! Compiled programs: for the devices of a client, or ahead of time for a slice that isn't here.

use std::sync::Arc;

use prost::Message as _;
use smallvec::SmallVec;

use super::{
    PjrtError, Plugin,
    client::{Buffer, Client, Event},
    proto,
    sys::{self, Opaque},
    value::Value,
};

/// How a program is laid over devices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CompileOptions {
    /// The device id of each replica; their number is the number of replicas.
    pub devices: Vec<i64>,
    /// XLA's options by name (`xla_tpu_…`).
    pub overrides: Vec<(String, Value)>,
}

impl CompileOptions {
    /// One replica per device.
    pub fn on(devices: impl IntoIterator<Item = i64>) -> CompileOptions {
        CompileOptions { devices: devices.into_iter().collect(), overrides: Vec::new() }
    }

    /// As a serialized `xla.CompileOptionsProto`.
    pub(super) fn encode(&self) -> Vec<u8> {
        let replicas = self.devices.len();
        proto::CompileOptions {
            build: Some(proto::BuildOptions {
                // No default device: the assignment says where.
                device_ordinal: -1,
                num_replicas: replicas as i64,
                num_partitions: 1,
                device_assignment: Some(proto::DeviceAssignment {
                    replica_count: replicas as i32,
                    computation_count: 1,
                    computation_devices: vec![proto::ComputationDevice { replica_device_ids: self.devices.clone() }],
                }),
            }),
            overrides: self
                .overrides
                .iter()
                .map(|(name, value)| {
                    let value = match value {
                        Value::Text(text) => proto::Override::Text(text.clone()),
                        Value::Int(int) => proto::Override::Int(*int),
                        Value::Float(float) => proto::Override::Float(f64::from(*float)),
                        Value::Bool(boolean) => proto::Override::Bool(*boolean),
                        // No XLA option is a list; as text it is refused by name.
                        Value::Ints(ints) => proto::Override::Text(format!("{ints:?}")),
                    };
                    (name.clone(), proto::OptionOverride { value: Some(value) })
                })
                .collect(),
        }
        .encode_to_vec()
    }
}

/// StableHLO text as a program; borrows it.
pub(super) fn program(mlir: &str) -> sys::Program {
    const FORMAT: &str = "mlir";
    sys::Program {
        struct_size: size_of::<sys::Program>(),
        extension_start: std::ptr::null_mut(),
        // The plugin only reads it; the header's type serves both directions.
        code: mlir.as_ptr().cast_mut().cast(),
        code_size: mlir.len(),
        format: FORMAT.as_ptr().cast(),
        format_size: FORMAT.len(),
    }
}

/// A compiled program that is not (necessarily) loaded on devices: it can be asked about and saved.
pub struct Executable {
    plugin: Arc<Plugin>,
    raw: Opaque,
}

// SAFETY: a PJRT executable may be used from any thread.
unsafe impl Send for Executable {}
// SAFETY: as above.
unsafe impl Sync for Executable {}

impl Drop for Executable {
    fn drop(&mut self) {
        self.plugin.destroy(&mut sys::ExecutableDestroy { executable: self.raw, ..Default::default() });
    }
}

/// Device memory that a program takes, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Its code.
    pub code: i64,
    /// Its arguments.
    pub arguments: i64,
    /// Its results.
    pub results: i64,
    /// Arguments whose memory becomes results.
    pub aliased: i64,
    /// Its scratch memory.
    pub scratch: i64,
    /// The most at any time; zero where the plugin doesn't say.
    pub peak: i64,
}

impl Executable {
    pub(super) fn new(plugin: &Arc<Plugin>, raw: Opaque) -> Executable {
        Executable { plugin: plugin.clone(), raw }
    }

    /// Results of the program per device.
    pub fn outputs(&self) -> Result<usize, PjrtError> {
        let mut args = sys::ExecutableNumOutputs { executable: self.raw, ..Default::default() };
        self.plugin.call(&mut args)?;
        Ok(args.num_outputs)
    }

    /// Bytes of machine code.
    pub fn code_bytes(&self) -> Result<i64, PjrtError> {
        let mut args = sys::ExecutableSizeOfGeneratedCode { executable: self.raw, ..Default::default() };
        self.plugin.call(&mut args)?;
        Ok(args.size_in_bytes)
    }

    /// What it takes of a device's memory.
    pub fn memory(&self) -> Result<MemoryStats, PjrtError> {
        let mut args = sys::ExecutableMemoryStats { executable: self.raw, ..Default::default() };
        self.plugin.call(&mut args)?;
        Ok(MemoryStats {
            code: args.generated_code,
            arguments: args.argument,
            results: args.output,
            aliased: args.alias,
            scratch: args.temp,
            peak: args.peak_memory,
        })
    }

    /// The program as XLA left it: serialized, with the name of its format (`hlo_with_config`).
    pub fn optimized(&self) -> Result<(Vec<u8>, String), PjrtError> {
        let mut out = sys::Program {
            struct_size: size_of::<sys::Program>(),
            extension_start: std::ptr::null_mut(),
            code: std::ptr::null_mut(),
            code_size: 0,
            format: std::ptr::null(),
            format_size: 0,
        };
        // Asked once for the size, once for the code.
        let mut args =
            sys::ExecutableOptimizedProgram { executable: self.raw, program: &mut out, ..Default::default() };
        self.plugin.call(&mut args)?;
        let mut code = vec![0u8; out.code_size];
        out.code = code.as_mut_ptr().cast();
        args.program = &mut out;
        self.plugin.call(&mut args)?;
        code.truncate(out.code_size);
        // SAFETY: a string constant of the plugin's.
        let format = unsafe { super::plugin::text(out.format, out.format_size) };
        Ok((code, format))
    }

    /// The program in the plugin's own form, for [`Client::deserialize`].
    pub fn serialize(&self) -> Result<Vec<u8>, PjrtError> {
        let mut args = sys::ExecutableSerialize { executable: self.raw, ..Default::default() };
        self.plugin.call(&mut args)?;
        let bytes = if args.serialized_bytes_size == 0 {
            Vec::new()
        } else {
            // SAFETY: the plugin's bytes, alive until the deleter runs below.
            unsafe { std::slice::from_raw_parts(args.serialized_bytes.cast::<u8>(), args.serialized_bytes_size) }
                .to_vec()
        };
        if let Some(delete) = args.deleter {
            // SAFETY: called once on what the plugin returned with it.
            unsafe { delete(args.backing) };
        }
        Ok(bytes)
    }
}

/// A program loaded on a client's devices.
pub struct Loaded {
    client: Client,
    raw: Opaque,
    executable: Executable,
    outputs: usize,
}

// SAFETY: a loaded PJRT executable may be used from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Drop for Loaded {
    fn drop(&mut self) {
        let plugin = self.client.plugin().clone();
        plugin.destroy(&mut sys::LoadedExecutableDestroy { executable: self.raw, ..Default::default() });
    }
}

/// What an execution gives: results per device, and when each device is done.
pub struct Launch {
    /// Results of each device, usable at once: they become defined when the device is done.
    pub outputs: Vec<Vec<Buffer>>,
    /// One per device.
    pub done: Vec<Event>,
}

impl Launch {
    /// Waits for every device; the first error is returned after all have ended.
    pub fn wait(self) -> Result<Vec<Vec<Buffer>>, PjrtError> {
        let mut outcome = Ok(());
        for event in &self.done {
            outcome = outcome.and(event.wait());
        }
        outcome.map(|()| self.outputs)
    }
}

impl Loaded {
    pub(super) fn new(client: Client, raw: Opaque) -> Result<Loaded, PjrtError> {
        let plugin = client.plugin().clone();
        let mut args = sys::LoadedExecutableGetExecutable { loaded: raw, ..Default::default() };
        let got = plugin.call(&mut args).and_then(|()| {
            let executable = Executable::new(&plugin, args.executable);
            let outputs = executable.outputs()?;
            Ok((executable, outputs))
        });
        match got {
            Ok((executable, outputs)) => Ok(Loaded { client, raw, executable, outputs }),
            Err(error) => {
                plugin.destroy(&mut sys::LoadedExecutableDestroy { executable: raw, ..Default::default() });
                Err(error)
            }
        }
    }

    /// The program, to be asked about.
    pub fn executable(&self) -> &Executable {
        &self.executable
    }

    /// Starts the program on its devices; `arguments` has one list per device, all of one length.
    ///
    /// With `donate`, arguments that the program marks as reusable are given away and are deleted afterwards.
    pub fn launch(&self, arguments: &[Vec<&Buffer>], donate: bool) -> Result<Launch, PjrtError> {
        let count = arguments.first().map_or(0, Vec::len);
        if let Some(other) = arguments.iter().find(|list| list.len() != count) {
            return Err(PjrtError::Argument {
                what: "arguments of a device",
                expected: count.to_string(),
                got: other.len().to_string(),
            });
        }
        let flat: SmallVec<[&Buffer; 32]> = arguments.iter().flatten().copied().collect();
        let (mut outputs, mut done) = (Vec::new(), Vec::new());
        self.launch_flat(
            arguments.len(),
            &flat,
            donate,
            |_, _, buffer| outputs.push(buffer),
            |_, event| done.push(event),
        )?;
        let mut outputs = outputs.into_iter();
        Ok(Launch { outputs: done.iter().map(|_| outputs.by_ref().take(self.outputs).collect()).collect(), done })
    }

    /// As [`Loaded::launch`], with the arguments of all devices one after another; results go to `output` (device,
    /// index, buffer) and `done` (device, event), device by device. Allocates nothing for small programs.
    pub fn launch_flat(
        &self,
        devices: usize,
        arguments: &[&Buffer],
        donate: bool,
        mut output: impl FnMut(usize, usize, Buffer),
        mut done: impl FnMut(usize, Event),
    ) -> Result<(), PjrtError> {
        let count = arguments.len() / devices.max(1);
        if count * devices != arguments.len() {
            return Err(PjrtError::Argument {
                what: "arguments",
                expected: format!("as many for each of {devices} devices"),
                got: arguments.len().to_string(),
            });
        }
        let raw: SmallVec<[Opaque; 32]> = arguments.iter().map(|buffer| buffer.raw).collect();
        let lists: SmallVec<[*const Opaque; 16]> = (0..devices).map(|device| raw[device * count..].as_ptr()).collect();
        let mut raw_outputs: SmallVec<[Opaque; 16]> = smallvec::smallvec![std::ptr::null_mut(); self.outputs * devices];
        let base = raw_outputs.as_mut_ptr();
        let output_lists: SmallVec<[*mut Opaque; 16]> =
            (0..devices).map(|device| base.wrapping_add(device * self.outputs)).collect();
        let mut events: SmallVec<[Opaque; 16]> = smallvec::smallvec![std::ptr::null_mut(); devices];
        let keep: SmallVec<[i64; 16]> = if donate { SmallVec::new() } else { (0..count as i64).collect() };
        let mut options = sys::ExecuteOptions {
            struct_size: size_of::<sys::ExecuteOptions>(),
            extension_start: std::ptr::null_mut(),
            send_callbacks: std::ptr::null_mut(),
            recv_callbacks: std::ptr::null_mut(),
            num_send_ops: 0,
            num_recv_ops: 0,
            launch_id: 0,
            non_donatable: keep.as_ptr(),
            num_non_donatable: keep.len(),
            context: std::ptr::null_mut(),
            call_location: std::ptr::null(),
            num_tasks: 0,
            task_ids: std::ptr::null_mut(),
            incarnation_ids: std::ptr::null_mut(),
        };
        let plugin = self.client.plugin();
        let mut args = sys::LoadedExecutableExecute {
            executable: self.raw,
            options: &mut options,
            argument_lists: lists.as_ptr(),
            num_devices: devices,
            num_args: count,
            output_lists: output_lists.as_ptr(),
            device_complete_events: events.as_mut_ptr(),
            ..Default::default()
        };
        plugin.call(&mut args)?;
        for device in 0..devices {
            for index in 0..self.outputs {
                let raw = raw_outputs[device * self.outputs + index];
                output(device, index, Buffer { client: self.client.handle.clone(), raw });
            }
            done(device, Event::new(plugin, events[device]));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_encoded_as_xla_reads_them() {
        let bytes = CompileOptions::on([3, 1]).encode();
        // build(3){device_ordinal(1)=-1, replicas(4)=2, partitions(5)=1, assignment(9){2, 1, (3){(1)[3, 1]}}}
        let expected = [
            0x1a, 0x1b, 0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01, 0x20, 0x02, 0x28, 0x01, 0x4a,
            0x0a, 0x08, 0x02, 0x10, 0x01, 0x1a, 0x04, 0x0a, 0x02, 0x03, 0x01,
        ];
        assert_eq!(bytes, expected);
    }
}
