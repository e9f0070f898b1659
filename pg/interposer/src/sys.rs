//! The part of PJRT's C interface that is overridden here, laid out by hand from `pjrt_c_api.h` (OpenXLA; 0.81 was
//! read). The interface grows at the end only; see `podring_ici::pjrt` for the versions that were tried.
//!
//! Unlike a caller, an interposer gets structs that others made, as long as *their* header says: a struct is touched
//! only after its size was found to cover the fields used.

use std::ffi::{c_char, c_int, c_void};

/// Any object of a plugin's.
pub type Opaque = *mut c_void;
/// An entry of the table; those that return nothing are declared so where they are written.
pub type Entry = unsafe extern "C" fn(*mut c_void) -> Opaque;

/// What precedes the entries.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TableHead {
    /// Bytes of the whole table.
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub version_struct_size: usize,
    pub version_extension_start: Opaque,
    pub major: c_int,
    pub minor: c_int,
}

/// The head of an extension: a list.
#[repr(C)]
pub struct ExtensionBase {
    pub struct_size: usize,
    pub kind: c_int,
    pub next: *mut ExtensionBase,
}

/// Arguments of the function in one slot of the table.
///
/// # Safety
/// The struct must have the layout that the function in `SLOT` expects.
pub unsafe trait Arguments: Sized {
    /// Position in the table, after its head.
    const SLOT: usize;
    /// The function's name in the header.
    const NAME: &'static str;
    /// Bytes up to the end of the last field: what the header calls the struct's size.
    const LEN: usize;
}

macro_rules! arguments {
    ($($name:ident = $slot:literal $function:literal { $($field:ident: $ty:ty),* ; $last:ident: $last_ty:ty })*) => { $(
        #[repr(C)]
        pub struct $name {
            pub struct_size: usize,
            pub extension_start: Opaque,
            $(pub $field: $ty,)*
            pub $last: $last_ty,
        }

        // SAFETY: written from the header's definition of this function's arguments.
        unsafe impl Arguments for $name {
            const SLOT: usize = $slot;
            const NAME: &'static str = concat!("PJRT_", $function);
            const LEN: usize = std::mem::offset_of!($name, $last) + size_of::<$last_ty>();
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
    ErrorDestroy = 0 "Error_Destroy" { ; error: Opaque }
    ErrorMessage = 1 "Error_Message" { error: Opaque, message: *const c_char; message_size: usize }
    ErrorGetCode = 2 "Error_GetCode" { error: Opaque; code: c_int }
    ClientCreate = 10 "Client_Create" {
        create_options: *const NamedValue,
        num_options: usize,
        kv_get_callback: Opaque,
        kv_get_user_arg: Opaque,
        kv_put_callback: Opaque,
        kv_put_user_arg: Opaque,
        client: Opaque,
        kv_try_get_callback: Opaque;
        kv_try_get_user_arg: Opaque
    }
    ClientDestroy = 11 "Client_Destroy" { ; client: Opaque }
    ClientProcessIndex = 13 "Client_ProcessIndex" { client: Opaque; process_index: c_int }
    ClientDevices = 15 "Client_Devices" { client: Opaque, devices: *const Opaque; num_devices: usize }
    ClientAddressableDevices = 16 "Client_AddressableDevices" {
        client: Opaque, devices: *const Opaque; num_devices: usize
    }
    ClientLookupDevice = 17 "Client_LookupDevice" { client: Opaque, id: c_int; device: Opaque }
    ClientLookupAddressableDevice = 18 "Client_LookupAddressableDevice" {
        client: Opaque, local_hardware_id: c_int; device: Opaque
    }
    ClientAddressableMemories = 19 "Client_AddressableMemories" {
        client: Opaque, memories: *const Opaque; num_memories: usize
    }
    ClientCompile = 20 "Client_Compile" {
        client: Opaque,
        program: *const Program,
        compile_options: *const c_char,
        compile_options_size: usize;
        executable: Opaque
    }
    ClientDefaultDeviceAssignment = 21 "Client_DefaultDeviceAssignment" {
        client: Opaque, num_replicas: c_int, num_partitions: c_int, size: usize; assignment: *mut c_int
    }
    DeviceDescriptionId = 23 "DeviceDescription_Id" { description: Opaque; id: c_int }
    DeviceDescriptionProcessIndex = 24 "DeviceDescription_ProcessIndex" { description: Opaque; process_index: c_int }
    DeviceDescriptionAttributes = 25 "DeviceDescription_Attributes" {
        description: Opaque, num_attributes: usize; attributes: *const NamedValue
    }
    DeviceDescriptionKind = 26 "DeviceDescription_Kind" { description: Opaque, text: *const c_char; text_size: usize }
    DeviceGetDescription = 29 "Device_GetDescription" { device: Opaque; description: Opaque }
    DeviceIsAddressable = 30 "Device_IsAddressable" { device: Opaque; is_addressable: bool }
    DeviceLocalHardwareId = 31 "Device_LocalHardwareId" { device: Opaque; local_hardware_id: c_int }
    DeviceAddressableMemories = 32 "Device_AddressableMemories" {
        device: Opaque, memories: *const Opaque; num_memories: usize
    }
    DeviceMemoryStats = 34 "Device_MemoryStats" {
        device: Opaque,
        bytes_in_use: i64,
        peak_bytes_in_use: i64,
        peak_bytes_in_use_is_set: bool,
        num_allocs: i64,
        num_allocs_is_set: bool,
        largest_alloc_size: i64,
        largest_alloc_size_is_set: bool,
        bytes_limit: i64;
        bytes_limit_is_set: bool
    }
    EventDestroy = 5 "Event_Destroy" { ; event: Opaque }
    EventAwait = 8 "Event_Await" { ; event: Opaque }
    EventOnReady = 9 "Event_OnReady" {
        event: Opaque, callback: Option<unsafe extern "C" fn(Opaque, *mut c_void)>; argument: *mut c_void
    }
    DeviceDefaultMemory = 33 "Device_DefaultMemory" { device: Opaque; memory: Opaque }
    BufferDimensions = 60 "Buffer_Dimensions" { buffer: Opaque, dims: *const i64; num_dims: usize }
    BufferToHost = 70 "Buffer_ToHostBuffer" {
        buffer: Opaque, layout: *const MemoryLayout, memory: *mut c_void, size: usize; event: Opaque
    }
    TransferDestroy = 101 "AsyncHostToDeviceTransferManager_Destroy" { ; manager: Opaque }
    TransferData = 102 "AsyncHostToDeviceTransferManager_TransferData" {
        manager: Opaque,
        index: c_int,
        data: *const c_void,
        offset: i64,
        size: i64,
        is_last: bool;
        event: Opaque
    }
    ClientCreateLater = 103 "Client_CreateBuffersForAsyncHostToDevice" {
        client: Opaque,
        shapes: *const ShapeSpec,
        num_shapes: usize,
        layouts: Opaque,
        num_layouts: usize,
        memory: Opaque;
        manager: Opaque
    }
    TransferRetrieve = 104 "AsyncHostToDeviceTransferManager_RetrieveBuffer" {
        manager: Opaque, index: c_int; buffer: Opaque
    }
    TransferFail = 108 "AsyncHostToDeviceTransferManager_SetBufferError" {
        manager: Opaque, index: c_int, code: c_int, message: *const c_char; message_size: usize
    }
    LoadedExecutableDestroy = 50 "LoadedExecutable_Destroy" { ; executable: Opaque }
    LoadedExecutableExecute = 55 "LoadedExecutable_Execute" {
        executable: Opaque,
        options: Opaque,
        argument_lists: *const *const Opaque,
        num_devices: usize,
        num_args: usize,
        output_lists: *const *mut Opaque,
        events: *mut Opaque;
        execute_device: Opaque
    }
    BufferDestroy = 58 "Buffer_Destroy" { ; buffer: Opaque }
    BufferReadyEvent = 72 "Buffer_ReadyEvent" { buffer: Opaque; event: Opaque }
    BufferElementType = 59 "Buffer_ElementType" { buffer: Opaque; element_type: c_int }
    BufferGetMemoryLayout = 63 "Buffer_GetMemoryLayout" { buffer: Opaque; layout: MemoryLayout }
    BufferOnDeviceSize = 64 "Buffer_OnDeviceSizeInBytes" { buffer: Opaque; bytes: usize }
    BufferUnsafePointer = 73 "Buffer_UnsafePointer" { buffer: Opaque; pointer: usize }
    ClientCreateView = 93 "Client_CreateViewOfDeviceBuffer" {
        client: Opaque,
        memory: *mut c_void,
        dims: *const i64,
        num_dims: usize,
        element_type: c_int,
        layout: Opaque,
        device: Opaque,
        on_delete: Option<unsafe extern "C" fn(*mut c_void, *mut c_void)>,
        on_delete_argument: *mut c_void,
        stream: isize,
        buffer: Opaque;
        memory_space: Opaque
    }
    ExecutableDestroy = 40 "Executable_Destroy" { ; executable: Opaque }
    LoadedExecutableGetExecutable = 51 "LoadedExecutable_GetExecutable" { loaded: Opaque; executable: Opaque }
    ExecutableSerialize = 49 "Executable_Serialize" {
        executable: Opaque,
        serialized_bytes: *const c_char,
        serialized_bytes_size: usize,
        backing: Opaque;
        deleter: Option<unsafe extern "C" fn(Opaque)>
    }
    ExecutableDeserializeAndLoad = 56 "Executable_DeserializeAndLoad" {
        client: Opaque,
        serialized_executable: *const c_char,
        serialized_executable_size: usize;
        loaded_executable: Opaque
    }
}

/// Arguments of `PJRT_Executable_DeserializeAndLoad` as headers have them since options can be given with them.
#[repr(C)]
pub struct DeserializeWithOptions {
    pub first: ExecutableDeserializeAndLoad,
    pub options: *const c_char,
    pub options_size: usize,
}

// SAFETY: the function's arguments, with what newer headers have behind them.
unsafe impl Arguments for DeserializeWithOptions {
    const SLOT: usize = ExecutableDeserializeAndLoad::SLOT;
    const NAME: &'static str = ExecutableDeserializeAndLoad::NAME;
    const LEN: usize = size_of::<DeserializeWithOptions>();
}

/// How a buffer's elements lie in memory.
#[repr(C)]
pub struct MemoryLayout {
    pub struct_size: usize,
    pub extension_start: Opaque,
    pub tiled_size: usize,
    pub tiled_extension: Opaque,
    pub minor_to_major: *const i64,
    pub minor_to_major_size: usize,
    pub tile_dims: *const i64,
    pub tile_dim_sizes: *const usize,
    pub num_tiles: usize,
    /// 0 tiled, 1 strides: then the fields above are others.
    pub kind: c_int,
}

/// Shape and element type of a buffer to come.
#[repr(C)]
pub struct ShapeSpec {
    pub struct_size: usize,
    pub extension_start: Opaque,
    pub dims: *const i64,
    pub num_dims: usize,
    pub element_type: c_int,
}

/// A program on its way in.
#[repr(C)]
pub struct Program {
    pub struct_size: usize,
    pub extension_start: Opaque,
    pub code: *mut c_char,
    pub code_size: usize,
    pub format: *const c_char,
    pub format_size: usize,
}

/// A name with a value.
#[repr(C)]
pub struct NamedValue {
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
pub union NamedValueUnion {
    pub int64: i64,
    pub int64_list: *const i64,
}

impl NamedValue {
    /// An integer; `name` must outlive it.
    pub fn int(name: &'static str, value: i64) -> NamedValue {
        NamedValue {
            struct_size: size_of::<NamedValue>(),
            extension_start: std::ptr::null_mut(),
            name: name.as_ptr().cast(),
            name_size: name.len(),
            kind: 1,
            value: NamedValueUnion { int64: value },
            value_size: 1,
        }
    }

    /// A list of integers, which must stay where it is as long as this.
    pub fn ints(name: &'static str, list: &[i64]) -> NamedValue {
        NamedValue {
            kind: 2,
            value: NamedValueUnion { int64_list: list.as_ptr() },
            value_size: list.len(),
            ..NamedValue::int(name, 0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_header() {
        // As a C compiler gives the header's *_STRUCT_SIZE constants on a 64-bit machine.
        assert_eq!(size_of::<TableHead>(), 40);
        assert_eq!(ClientProcessIndex::LEN, 28);
        assert_eq!(ClientCreate::LEN, 88);
        assert_eq!(ClientCompile::LEN, 56);
        assert_eq!(ClientDefaultDeviceAssignment::LEN, 48);
        assert_eq!(DeviceIsAddressable::LEN, 25);
        assert_eq!(DeviceMemoryStats::LEN, 89);
        assert_eq!(ExecutableSerialize::LEN, 56);
        // The layout is a struct within, whose padding the header counts.
        assert_eq!(size_of::<BufferGetMemoryLayout>(), 104);
        assert_eq!((size_of::<MemoryLayout>(), size_of::<ShapeSpec>()), (80, 40));
        assert_eq!((TransferData::LEN, ClientCreateLater::LEN, TransferFail::LEN), (72, 72, 48));
        assert_eq!(ClientCreateView::LEN, 112);
        assert_eq!(size_of::<NamedValue>(), 56);
    }
}
