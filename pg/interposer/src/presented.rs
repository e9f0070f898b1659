//! What callers see of the CPU plugin's client: a slice of the topology crate's, of which this process holds one chip.
//!
//! The plugin's devices, numbered 0, 1, 2, …, stand for the slice's devices in libtpu's list order, which is also the
//! ranks' order. Callers see libtpu's ids. A job of fewer ranks than the slice has devices sees those of its ranks:
//! torch_tpu (0.2.0) refuses a world that is neither one process nor as many as there are devices.

use std::collections::HashMap;
use std::ffi::{c_char, c_int};
use std::fs;

use podring_topology::Slice;

use crate::chips::{self, Attributes};
use crate::error::{Fault, InterposeError};
use crate::options;
use crate::programs::Programs;
use crate::settings::{Place, place};
use crate::step::Mesh;
use crate::sys::{self, NamedValue, Opaque};
use crate::table::{Handler, Interposed};

/// A client's slice.
pub struct Presented {
    slice: Slice,
    place: Place,
    /// The plugin's devices; the rank is the index.
    devices: Vec<Opaque>,
    /// Rank by the plugin's device, and by its description.
    ranks: HashMap<usize, u32>,
    /// This process's device: a list of one.
    own: [Opaque; 1],
    memories: Vec<Opaque>,
    attributes: Vec<Attributes>,
    programs: Programs,
}

// SAFETY: constant once made; the plugin's objects in it may be used from any thread.
unsafe impl Send for Presented {}
// SAFETY: as above.
unsafe impl Sync for Presented {}

impl Presented {
    /// This process's device.
    pub fn own_device(&self) -> Opaque {
        self.own[0]
    }

    /// This process.
    pub fn rank(&self) -> u32 {
        self.place.rank
    }

    /// Ranks in the job.
    pub fn world(&self) -> u32 {
        self.place.world
    }

    /// Who takes part in a program that is compiled with these options.
    pub fn mesh(&self, asked: &[u8]) -> Result<Mesh, InterposeError> {
        let assignment = options::assignment(asked)?;
        let rank = |&id: &i64| u32::try_from(id).ok().and_then(|id| self.slice.rank_of_id(id));
        let ranks: Option<Vec<u32>> = assignment.devices.iter().map(rank).collect();
        let ranks = ranks.filter(|ranks| ranks.iter().all(|&rank| rank < self.place.world));
        let ranks = ranks.ok_or(InterposeError::Options { reason: "they name devices that the job doesn't have" })?;
        Ok(Mesh { replicas: assignment.replicas, partitions: assignment.partitions, ranks })
    }

    /// The rank of a device or of a device's description.
    fn rank_of(&self, object: Opaque) -> Option<u32> {
        self.ranks.get(&(object as usize)).copied()
    }

    /// What errors call the slice.
    pub fn name(&self) -> String {
        self.slice.to_string()
    }

    /// libtpu's id of a rank's device.
    fn id_of(&self, rank: u32) -> c_int {
        // Ranks here index `devices`, of which there are as many as the slice has.
        self.slice.device(rank).map_or(-1, |device| device.id as c_int)
    }

    fn no_such(&self, what: &'static str, id: c_int, expected: String) -> Fault {
        InterposeError::NoSuchDevice { what, id, rank: self.place.rank, slice: self.slice.to_string(), expected }.into()
    }
}

/// Creates the plugin's client with one device for each rank.
pub fn create(on: &Interposed, slice: &Slice, exists: bool, args: &mut sys::ClientCreate) -> Result<Presented, Fault> {
    let place = place(slice, |name| std::env::var(name).ok())?;
    if exists {
        return Err(InterposeError::SecondClient { slice: slice.to_string(), rank: place.rank }.into());
    }
    // What a framework asks of libtpu (addresses, premapped memory, …) means nothing to the CPU plugin, which refuses
    // options that it doesn't know.
    let asked = (args.create_options, args.num_options);
    let ours = [NamedValue::int("cpu_device_count", i64::from(place.world))];
    (args.create_options, args.num_options) = (ours.as_ptr(), ours.len());
    let created = on.forward(args);
    (args.create_options, args.num_options) = asked;
    created?;
    let presented = describe(on, slice, place, args.client);
    if presented.is_err() {
        // Nobody else has it.
        let _ = on.forward(&mut sys::ClientDestroy { client: args.client, ..Default::default() });
        args.client = std::ptr::null_mut();
    }
    presented
}

fn describe(on: &Interposed, slice: &Slice, place: Place, client: Opaque) -> Result<Presented, Fault> {
    let mut list = sys::ClientDevices { client, ..Default::default() };
    on.forward(&mut list)?;
    // SAFETY: the plugin's list, alive as long as the client.
    let devices = unsafe { copied(list.devices, list.num_devices) };
    let mut ranks = HashMap::new();
    for (rank, &device) in (0..).zip(&devices) {
        let mut description = sys::DeviceGetDescription { device, ..Default::default() };
        on.forward(&mut description)?;
        ranks.insert(device as usize, rank);
        ranks.insert(description.description as usize, rank);
    }
    let Some(&own) = devices.get(place.rank as usize).filter(|_| devices.len() == place.world as usize) else {
        return Err(InterposeError::NoSuchDevice {
            what: "device",
            id: devices.len() as c_int,
            rank: place.rank,
            slice: slice.to_string(),
            expected: format!("{} devices of the wrapped plugin, got {}", place.world, devices.len()),
        }
        .into());
    };
    let mut memories = sys::DeviceAddressableMemories { device: own, ..Default::default() };
    on.forward(&mut memories)?;
    // SAFETY: as above.
    let memories = unsafe { copied(memories.memories, memories.num_memories) };
    let attributes = slice.list().take(devices.len()).map(|device| Attributes::of(&device)).collect();
    Ok(Presented {
        slice: *slice,
        place,
        devices,
        ranks,
        own: [own],
        memories,
        attributes,
        programs: Programs::default(),
    })
}

/// # Safety
/// `list` is null or points to `count` objects.
unsafe fn copied(list: *const Opaque, count: usize) -> Vec<Opaque> {
    if list.is_null() {
        return Vec::new();
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(list, count) }.to_vec()
}

macro_rules! handlers {
    ($($name:ident($args:ident: $ty:ty, $on:ident, $seen:ident) $body:block)*) => {
        $(
            struct $name;

            impl Handler for $name {
                type Args = $ty;

                fn handle($on: &Interposed, $args: &mut $ty) -> Result<(), Fault> {
                    // Without a client there are no devices to ask about: whatever the plugin says to that.
                    let Some($seen) = $on.presented() else { return $on.forward($args) };
                    let $seen = &*$seen;
                    $body
                }
            }
        )*

        /// Puts them all into the table.
        pub fn install(into: &mut Interposed) {
            $(into.set::<$name>();)*
        }
    };
}

handlers! {
    ProcessIndex(args: sys::ClientProcessIndex, on, seen) {
        let _ = on;
        args.process_index = seen.place.rank as c_int;
        Ok(())
    }
    AddressableDevices(args: sys::ClientAddressableDevices, on, seen) {
        let _ = on;
        (args.devices, args.num_devices) = (seen.own.as_ptr(), 1);
        Ok(())
    }
    AddressableMemories(args: sys::ClientAddressableMemories, on, seen) {
        let _ = on;
        (args.memories, args.num_memories) = (seen.memories.as_ptr(), seen.memories.len());
        Ok(())
    }
    LookupDevice(args: sys::ClientLookupDevice, on, seen) {
        let _ = on;
        let rank = u32::try_from(args.id).ok().and_then(|id| seen.slice.rank_of_id(id));
        let Some(&device) = rank.and_then(|rank| seen.devices.get(rank as usize)) else {
            return Err(seen.no_such("device", args.id, format!("the id of one of the job's {} devices", seen.devices.len())));
        };
        args.device = device;
        Ok(())
    }
    LookupAddressableDevice(args: sys::ClientLookupAddressableDevice, on, seen) {
        let _ = on;
        // A process holds one device, which is its first.
        if args.local_hardware_id != 0 {
            return Err(seen.no_such("local device", args.local_hardware_id, "0".to_owned()));
        }
        args.device = seen.own[0];
        Ok(())
    }
    DefaultDeviceAssignment(args: sys::ClientDefaultDeviceAssignment, on, seen) {
        on.forward(args)?;
        let count = (args.num_replicas.max(0) as usize * args.num_partitions.max(0) as usize).min(args.size);
        if !args.assignment.is_null() {
            // SAFETY: the caller's array of `size` numbers, which the plugin has just filled.
            let ids = unsafe { std::slice::from_raw_parts_mut(args.assignment, count) };
            ids.iter_mut().for_each(|id| *id = seen.id_of(*id as u32));
        }
        Ok(())
    }
    Id(args: sys::DeviceDescriptionId, on, seen) {
        let Some(rank) = seen.rank_of(args.description) else { return on.forward(args) };
        args.id = seen.id_of(rank);
        Ok(())
    }
    DeviceProcess(args: sys::DeviceDescriptionProcessIndex, on, seen) {
        let Some(rank) = seen.rank_of(args.description) else { return on.forward(args) };
        args.process_index = rank as c_int;
        Ok(())
    }
    DeviceAttributes(args: sys::DeviceDescriptionAttributes, on, seen) {
        let Some(rank) = seen.rank_of(args.description) else { return on.forward(args) };
        // In the client's `Presented`, which lives until the client is destroyed, as the attributes have to.
        let values = seen.attributes[rank as usize].values();
        (args.attributes, args.num_attributes) = (values.as_ptr(), values.len());
        Ok(())
    }
    DeviceKind(args: sys::DeviceDescriptionKind, on, seen) {
        let Some(_) = seen.rank_of(args.description) else { return on.forward(args) };
        let kind = chips::kind(seen.slice.generation());
        (args.text, args.text_size) = (kind.as_ptr().cast::<c_char>(), kind.len());
        Ok(())
    }
    IsAddressable(args: sys::DeviceIsAddressable, on, seen) {
        let _ = on;
        args.is_addressable = args.device == seen.own[0];
        Ok(())
    }
    LocalHardwareId(args: sys::DeviceLocalHardwareId, on, seen) {
        let _ = on;
        args.local_hardware_id = if args.device == seen.own[0] { 0 } else { -1 };
        Ok(())
    }
    MemoryStats(args: sys::DeviceMemoryStats, on, seen) {
        let _ = on;
        let (in_use, peak) = resident();
        // Callers need not have cleared what a newer interface has after these fields.
        let from = std::mem::offset_of!(sys::DeviceMemoryStats, bytes_in_use);
        // SAFETY: the caller's struct, as long as it says, from the first result on.
        unsafe {
            std::ptr::from_mut(args).cast::<u8>().add(from).write_bytes(0, args.struct_size - from);
        }
        args.bytes_in_use = in_use;
        (args.peak_bytes_in_use, args.peak_bytes_in_use_is_set) = (peak, true);
        (args.bytes_limit, args.bytes_limit_is_set) = (chips::memory(&seen.slice) as i64, true);
        Ok(())
    }
    Compile(args: sys::ClientCompile, on, seen) {
        seen.programs.compile(on, seen, args)
    }
    Execute(args: sys::LoadedExecutableExecute, on, seen) {
        seen.programs.execute(on, seen, args)
    }
    ExecutableEnd(args: sys::LoadedExecutableDestroy, on, seen) {
        seen.programs.forget(args.executable);
        on.forward(args)
    }
    Executable(args: sys::LoadedExecutableGetExecutable, on, seen) {
        on.forward(args)?;
        seen.programs.named(args.loaded, args.executable);
        Ok(())
    }
    NameEnd(args: sys::ExecutableDestroy, on, seen) {
        seen.programs.unnamed(args.executable);
        on.forward(args)
    }
    Serialize(args: sys::ExecutableSerialize, on, seen) {
        seen.programs.serialize(on, seen, args)
    }
    DeserializeAndLoad(args: sys::ExecutableDeserializeAndLoad, on, seen) {
        seen.programs.deserialize(on, seen, args)
    }
}

/// The process's resident memory now and at its highest, bytes: what a virtual chip can say of its memory.
fn resident() -> (i64, i64) {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim().strip_suffix("kB")?.trim().parse::<i64>().ok()
    };
    (kib("VmRSS:").unwrap_or(0) * 1024, kib("VmHWM:").unwrap_or(0) * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_memory() {
        let (now, peak) = resident();
        assert!(now > 0 && peak >= now);
    }
}
