//! The part of PJRT's C interface that is used here, laid out by hand.
//!
//! Sources: `pjrt_c_api.h` of OpenXLA (the header is public; version 0.81 was read). The interface grows at the end
//! only: within major version 0 neither a table slot nor a field has moved from 0.81 to 0.117. Every argument struct
//! starts with its own size; a plugin refuses a struct smaller than it knows and reads no further than the size says.

use std::ffi::{c_char, c_int, c_void};

/// Any object of the plugin's.
pub(super) type Opaque = *mut c_void;
/// Every slot but three has this signature; the three return nothing, which reads as "no error" to nobody.
pub(super) type Entry = unsafe extern "C" fn(*mut c_void) -> Opaque;

/// What an event calls when it is ready: an error to be destroyed by the callee, or null; and the caller's own word.
pub(super) type EventCallback = unsafe extern "C" fn(Opaque, Opaque);

/// What precedes the slots in the table that `GetPjrtApi` returns.
#[repr(C)]
pub(super) struct TableHead {
    /// Bytes of the whole table.
    pub struct_size: usize,
    pub extension_start: Opaque,
    pub version_struct_size: usize,
    pub version_extension_start: Opaque,
    pub major: c_int,
    pub minor: c_int,
}

/// Arguments of one function of the table.
///
/// # Safety
/// The struct must have the layout that the function in `SLOT` expects.
pub(super) unsafe trait Arguments {
    /// Position in the table, after its head.
    const SLOT: usize;
    /// The function's name in the header.
    const NAME: &'static str;
}

macro_rules! arguments {
    ($($name:ident = $slot:literal $function:literal { $($field:ident: $ty:ty),* $(,)? })*) => { $(
        #[repr(C)]
        pub(super) struct $name {
            pub struct_size: usize,
            pub extension_start: Opaque,
            $(pub $field: $ty,)*
        }

        // SAFETY: written from the header's definition of this function's arguments.
        unsafe impl Arguments for $name {
            const SLOT: usize = $slot;
            const NAME: &'static str = concat!("PJRT_", $function);
        }

        impl Default for $name {
            fn default() -> Self {
                // SAFETY: integers, booleans and nullable pointers only; all of them may be zero.
                let mut zero: Self = unsafe { std::mem::zeroed() };
                zero.struct_size = size_of::<Self>();
                zero
            }
        }
    )* };
}

arguments! {
    ErrorDestroy = 0 "Error_Destroy" { error: Opaque }
    ErrorMessage = 1 "Error_Message" { error: Opaque, message: *const c_char, message_size: usize }
    ErrorGetCode = 2 "Error_GetCode" { error: Opaque, code: c_int }
    PluginInitialize = 3 "Plugin_Initialize" {}
    PluginAttributes = 4 "Plugin_Attributes" { attributes: *const NamedValue, num_attributes: usize }
    EventDestroy = 5 "Event_Destroy" { event: Opaque }
    EventIsReady = 6 "Event_IsReady" { event: Opaque, is_ready: bool }
    EventAwait = 8 "Event_Await" { event: Opaque }
    EventOnReady = 9 "Event_OnReady" { event: Opaque, callback: Option<EventCallback>, user_arg: Opaque }
    ClientCreate = 10 "Client_Create" {
        create_options: *const NamedValue,
        num_options: usize,
        kv_get_callback: Opaque,
        kv_get_user_arg: Opaque,
        kv_put_callback: Opaque,
        kv_put_user_arg: Opaque,
        client: Opaque,
        kv_try_get_callback: Opaque,
        kv_try_get_user_arg: Opaque,
    }
    ClientDestroy = 11 "Client_Destroy" { client: Opaque }
    ClientPlatformName = 12 "Client_PlatformName" { client: Opaque, text: *const c_char, text_size: usize }
    ClientPlatformVersion = 14 "Client_PlatformVersion" { client: Opaque, text: *const c_char, text_size: usize }
    ClientDevices = 15 "Client_Devices" { client: Opaque, devices: *const Opaque, num_devices: usize }
    ClientAddressableDevices = 16 "Client_AddressableDevices" {
        client: Opaque,
        devices: *const Opaque,
        num_devices: usize,
    }
    ClientCompile = 20 "Client_Compile" {
        client: Opaque,
        program: *const Program,
        compile_options: *const c_char,
        compile_options_size: usize,
        executable: Opaque,
    }
    ClientBufferFromHostBuffer = 22 "Client_BufferFromHostBuffer" {
        client: Opaque,
        data: *const c_void,
        element_type: c_int,
        dims: *const i64,
        num_dims: usize,
        byte_strides: *const i64,
        num_byte_strides: usize,
        host_buffer_semantics: c_int,
        device: Opaque,
        memory: Opaque,
        device_layout: *mut MemoryLayout,
        done_with_host_buffer: Opaque,
        buffer: Opaque,
    }
    DeviceDescriptionId = 23 "DeviceDescription_Id" { description: Opaque, id: c_int }
    DeviceDescriptionProcessIndex = 24 "DeviceDescription_ProcessIndex" { description: Opaque, process_index: c_int }
    DeviceDescriptionAttributes = 25 "DeviceDescription_Attributes" {
        description: Opaque,
        num_attributes: usize,
        attributes: *const NamedValue,
    }
    DeviceDescriptionKind = 26 "DeviceDescription_Kind" { description: Opaque, text: *const c_char, text_size: usize }
    DeviceGetDescription = 29 "Device_GetDescription" { device: Opaque, description: Opaque }
    ExecutableDestroy = 40 "Executable_Destroy" { executable: Opaque }
    ExecutableNumOutputs = 44 "Executable_NumOutputs" { executable: Opaque, num_outputs: usize }
    ExecutableSizeOfGeneratedCode = 45 "Executable_SizeOfGeneratedCodeInBytes" {
        executable: Opaque,
        size_in_bytes: i64,
    }
    ExecutableOptimizedProgram = 48 "Executable_OptimizedProgram" { executable: Opaque, program: *mut Program }
    ExecutableSerialize = 49 "Executable_Serialize" {
        executable: Opaque,
        serialized_bytes: *const c_char,
        serialized_bytes_size: usize,
        backing: Opaque,
        deleter: Option<unsafe extern "C" fn(Opaque)>,
    }
    LoadedExecutableDestroy = 50 "LoadedExecutable_Destroy" { executable: Opaque }
    LoadedExecutableGetExecutable = 51 "LoadedExecutable_GetExecutable" { loaded: Opaque, executable: Opaque }
    LoadedExecutableExecute = 55 "LoadedExecutable_Execute" {
        executable: Opaque,
        options: *mut ExecuteOptions,
        argument_lists: *const *const Opaque,
        num_devices: usize,
        num_args: usize,
        output_lists: *const *mut Opaque,
        device_complete_events: *mut Opaque,
        execute_device: Opaque,
    }
    ExecutableDeserializeAndLoad = 56 "Executable_DeserializeAndLoad" {
        client: Opaque,
        serialized_executable: *const c_char,
        serialized_executable_size: usize,
        loaded_executable: Opaque,
        overridden_options: *const c_char,
        overridden_options_size: usize,
    }
    BufferDestroy = 58 "Buffer_Destroy" { buffer: Opaque }
    BufferElementType = 59 "Buffer_ElementType" { buffer: Opaque, element_type: c_int }
    BufferDimensions = 60 "Buffer_Dimensions" { buffer: Opaque, dims: *const i64, num_dims: usize }
    BufferIsDeleted = 68 "Buffer_IsDeleted" { buffer: Opaque, is_deleted: bool }
    BufferToHostBuffer = 70 "Buffer_ToHostBuffer" {
        source: Opaque,
        host_layout: *mut MemoryLayout,
        destination: *mut c_void,
        destination_size: usize,
        event: Opaque,
    }
    BufferDataPointer = 76 "Buffer_OpaqueDeviceMemoryDataPointer" { buffer: Opaque, pointer: Opaque }
    TopologyCreate = 82 "TopologyDescription_Create" {
        name: *const c_char,
        name_size: usize,
        create_options: *const NamedValue,
        num_options: usize,
        topology: Opaque,
    }
    TopologyDestroy = 83 "TopologyDescription_Destroy" { topology: Opaque }
    TopologyPlatformVersion = 85 "TopologyDescription_PlatformVersion" {
        topology: Opaque,
        text: *const c_char,
        text_size: usize,
    }
    TopologyDevices = 86 "TopologyDescription_GetDeviceDescriptions" {
        topology: Opaque,
        descriptions: *const Opaque,
        num_descriptions: usize,
    }
    Compile = 89 "Compile" {
        topology: Opaque,
        program: *const Program,
        compile_options: *const c_char,
        compile_options_size: usize,
        client: Opaque,
        executable: Opaque,
    }
    ClientCreateView = 93 "Client_CreateViewOfDeviceBuffer" {
        client: Opaque,
        memory: Opaque,
        dims: *const i64,
        num_dims: usize,
        element_type: c_int,
        layout: Opaque,
        device: Opaque,
        on_delete: Option<unsafe extern "C" fn(Opaque, Opaque)>,
        on_delete_argument: Opaque,
        stream: isize,
        buffer: Opaque,
        memory_space: Opaque,
    }
    ExecutableMemoryStats = 96 "Executable_GetCompiledMemoryStats" {
        executable: Opaque,
        generated_code: i64,
        argument: i64,
        output: i64,
        alias: i64,
        temp: i64,
        host_generated_code: i64,
        host_argument: i64,
        host_output: i64,
        host_alias: i64,
        host_temp: i64,
        peak_memory: i64,
        total_size: i64,
        total_allocation: i64,
        indefinite_allocations: i64,
        peak_unpadded_heap: i64,
    }
}

/// A program on its way in or out.
#[repr(C)]
pub(super) struct Program {
    pub struct_size: usize,
    pub extension_start: Opaque,
    pub code: *mut c_char,
    pub code_size: usize,
    pub format: *const c_char,
    pub format_size: usize,
}

/// A name with a value.
#[repr(C)]
pub(super) struct NamedValue {
    pub struct_size: usize,
    pub extension_start: Opaque,
    pub name: *const c_char,
    pub name_size: usize,
    /// 0 string, 1 int64, 2 list of int64, 3 float, 4 bool.
    pub kind: c_int,
    pub value: NamedValueUnion,
    /// Length of strings and lists; 1 otherwise.
    pub value_size: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) union NamedValueUnion {
    pub string: *const c_char,
    pub int64: i64,
    pub int64_list: *const i64,
    pub float: f32,
    pub boolean: bool,
}

/// How an execution is to run; zero is the default throughout.
#[repr(C)]
pub(super) struct ExecuteOptions {
    pub struct_size: usize,
    pub extension_start: Opaque,
    pub send_callbacks: Opaque,
    pub recv_callbacks: Opaque,
    pub num_send_ops: usize,
    pub num_recv_ops: usize,
    pub launch_id: c_int,
    pub non_donatable: *const i64,
    pub num_non_donatable: usize,
    pub context: Opaque,
    pub call_location: *const c_char,
    pub num_tasks: usize,
    pub task_ids: *mut c_int,
    pub incarnation_ids: *mut i64,
}

/// A tiled layout; the header's union also has strides, which are smaller.
#[repr(C)]
pub(super) struct MemoryLayout {
    pub struct_size: usize,
    pub extension_start: Opaque,
    pub tiled_struct_size: usize,
    pub tiled_extension_start: Opaque,
    pub minor_to_major: *const i64,
    pub minor_to_major_size: usize,
    pub tile_dims: *const i64,
    pub tile_dim_sizes: *const usize,
    pub num_tiles: usize,
    /// 0 tiled, 1 strides.
    pub kind: c_int,
}

/// `PJRT_HostBufferSemantics_kImmutableOnlyDuringCall`.
pub(super) const ONLY_DURING_CALL: c_int = 0;
/// `PJRT_HostBufferSemantics_kImmutableZeroCopy`.
pub(super) const IMMUTABLE_ZERO_COPY: c_int = 2;
/// `PJRT_HostBufferSemantics_kMutableZeroCopy`.
pub(super) const MUTABLE_ZERO_COPY: c_int = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_the_header() {
        // Offsets as a C compiler gives them for the header of version 0.81 on a 64-bit machine.
        assert_eq!(size_of::<TableHead>(), 40);
        assert_eq!(std::mem::offset_of!(ErrorGetCode, code), 24);
        assert_eq!(std::mem::offset_of!(NamedValue, value), 40);
        assert_eq!(std::mem::offset_of!(ClientBufferFromHostBuffer, host_buffer_semantics), 72);
        assert_eq!(std::mem::offset_of!(ClientBufferFromHostBuffer, buffer), 112);
        assert_eq!(std::mem::offset_of!(ExecuteOptions, non_donatable), 56);
        assert_eq!(std::mem::offset_of!(LoadedExecutableExecute, execute_device), 72);
        assert_eq!(std::mem::offset_of!(MemoryLayout, kind), 72);
        assert_eq!(std::mem::offset_of!(ExecutableMemoryStats, peak_memory), 104);
    }
}
