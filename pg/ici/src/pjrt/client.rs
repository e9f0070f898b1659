//! Clients, their devices, buffers and events.

use std::{ffi::c_void, sync::Arc};

use super::{
    DeviceDescription, Element, PjrtError, Plugin,
    executable::{CompileOptions, Loaded, program},
    plugin::text,
    sys::{self, Opaque},
    topology,
    value::{Value, write_all},
};

pub(super) struct Handle {
    pub plugin: Arc<Plugin>,
    pub raw: Opaque,
    /// Somebody else made the client and ends it.
    shared: bool,
}

// SAFETY: a PJRT client may be used from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.shared {
            return;
        }
        self.plugin.destroy(&mut sys::ClientDestroy { client: self.raw, ..Default::default() });
    }
}

/// A client: a plugin with devices. Buffers and executables keep it alive.
#[derive(Clone)]
pub struct Client {
    pub(super) handle: Arc<Handle>,
    devices: Arc<[Device]>,
}

/// A device that this process can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Device {
    /// The plugin's id of it.
    pub id: i32,
    /// The process that it belongs to.
    pub process: i32,
    raw: usize,
}

impl Client {
    /// Creates a client. XLA's CPU plugin knows the option `cpu_device_count` (an integer).
    pub fn create(plugin: &Arc<Plugin>, options: &[(&str, Value)]) -> Result<Client, PjrtError> {
        let raw_options = write_all(options);
        let mut args = sys::ClientCreate {
            create_options: raw_options.as_ptr(),
            num_options: raw_options.len(),
            ..Default::default()
        };
        plugin.call(&mut args)?;
        Client::of(Handle { plugin: plugin.clone(), raw: args.client, shared: false })
    }

    /// A client that somebody else in this process made.
    ///
    /// # Safety
    /// `raw` is a `PJRT_Client` of this plugin, alive as long as anything made here is in use.
    pub unsafe fn shared(plugin: &Arc<Plugin>, raw: *mut c_void) -> Result<Client, PjrtError> {
        Client::of(Handle { plugin: plugin.clone(), raw, shared: true })
    }

    fn of(handle: Handle) -> Result<Client, PjrtError> {
        let handle = Arc::new(handle);
        let plugin = &handle.plugin;
        let mut list = sys::ClientAddressableDevices { client: handle.raw, ..Default::default() };
        plugin.call(&mut list)?;
        let raw_devices: &[Opaque] = if list.num_devices == 0 {
            &[]
        } else {
            // SAFETY: the plugin's list, alive as long as the client.
            unsafe { std::slice::from_raw_parts(list.devices, list.num_devices) }
        };
        let devices: Result<Vec<Device>, PjrtError> = raw_devices.iter().map(|&raw| describe(plugin, raw)).collect();
        let devices = devices?.into();
        Ok(Client { handle, devices })
    }

    /// All devices that programs may name, other processes' too, in the plugin's order.
    pub fn all_devices(&self) -> Result<Vec<Device>, PjrtError> {
        self.raw_devices()?.into_iter().map(|raw| describe(self.plugin(), raw)).collect()
    }

    /// What the plugin says of each of all devices, in its order.
    pub fn descriptions(&self) -> Result<Vec<DeviceDescription>, PjrtError> {
        let one = |raw| topology::describe(self.plugin(), description(self.plugin(), raw)?);
        self.raw_devices()?.into_iter().map(one).collect()
    }

    fn raw_devices(&self) -> Result<Vec<Opaque>, PjrtError> {
        let mut list = sys::ClientDevices { client: self.handle.raw, ..Default::default() };
        self.plugin().call(&mut list)?;
        if list.num_devices == 0 {
            return Ok(Vec::new());
        }
        // SAFETY: the plugin's list, alive as long as the client.
        Ok(unsafe { std::slice::from_raw_parts(list.devices, list.num_devices) }.to_vec())
    }

    /// The plugin.
    pub fn plugin(&self) -> &Arc<Plugin> {
        &self.handle.plugin
    }

    /// The devices of this process, in the plugin's order.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The platform's name: `cpu`, `tpu`.
    pub fn platform(&self) -> Result<String, PjrtError> {
        let mut args = sys::ClientPlatformName { client: self.handle.raw, ..Default::default() };
        self.plugin().call(&mut args)?;
        // SAFETY: the client's string, alive as long as the client.
        Ok(unsafe { text(args.text, args.text_size) })
    }

    /// The platform's version: build and compiler, in the plugin's words.
    pub fn platform_version(&self) -> Result<String, PjrtError> {
        let mut args = sys::ClientPlatformVersion { client: self.handle.raw, ..Default::default() };
        self.plugin().call(&mut args)?;
        // SAFETY: as above.
        Ok(unsafe { text(args.text, args.text_size) })
    }

    /// Compiles StableHLO text.
    pub fn compile(&self, mlir: &str, options: &CompileOptions) -> Result<Loaded, PjrtError> {
        let encoded = options.encode();
        let program = program(mlir);
        let mut args = sys::ClientCompile {
            client: self.handle.raw,
            program: &program,
            compile_options: encoded.as_ptr().cast(),
            compile_options_size: encoded.len(),
            ..Default::default()
        };
        self.plugin().call(&mut args)?;
        Loaded::new(self.clone(), args.executable)
    }

    /// Loads what [`super::Executable::serialize`] gave.
    ///
    /// # Safety
    /// Plugins trust these bytes: they must come from the same version of the same plugin, unaltered.
    pub unsafe fn deserialize(&self, bytes: &[u8], options: Option<&CompileOptions>) -> Result<Loaded, PjrtError> {
        let encoded = options.map(CompileOptions::encode).unwrap_or_default();
        let mut args = sys::ExecutableDeserializeAndLoad {
            client: self.handle.raw,
            serialized_executable: bytes.as_ptr().cast(),
            serialized_executable_size: bytes.len(),
            ..Default::default()
        };
        if options.is_some() {
            args.overridden_options = encoded.as_ptr().cast();
            args.overridden_options_size = encoded.len();
        }
        self.plugin().call(&mut args)?;
        Loaded::new(self.clone(), args.loaded_executable)
    }

    /// Copies `data`, dense and row-major, to a device.
    pub fn buffer(&self, data: &[u8], element: Element, dims: &[i64], device: &Device) -> Result<Buffer, PjrtError> {
        let expected = element.bytes(dims);
        if expected != Some(data.len()) {
            return Err(PjrtError::Argument {
                what: "bytes of a buffer",
                expected: format!("{expected:?} for {dims:?} of {element:?}"),
                got: data.len().to_string(),
            });
        }
        if !self.devices.contains(device) {
            return Err(PjrtError::Argument {
                what: "device",
                expected: "one of this client's".to_owned(),
                got: format!("{device:?}"),
            });
        }
        let (buffer, done) = self.host_buffer(data.as_ptr(), element, dims, device, sys::ONLY_DURING_CALL)?;
        // With these semantics it is complete already; awaited all the same, so that an error isn't lost.
        done.wait()?;
        Ok(buffer)
    }

    /// The memory holds as many elements, and stays as these semantics want it.
    fn host_buffer(
        &self,
        data: *const u8,
        element: Element,
        dims: &[i64],
        device: &Device,
        semantics: std::ffi::c_int,
    ) -> Result<(Buffer, Event), PjrtError> {
        let mut args = sys::ClientBufferFromHostBuffer {
            client: self.handle.raw,
            data: data.cast(),
            element_type: element.code(),
            dims: dims.as_ptr(),
            num_dims: dims.len(),
            host_buffer_semantics: semantics,
            device: device.raw as Opaque,
            ..Default::default()
        };
        self.plugin().call(&mut args)?;
        let done = Event::new(&self.handle.plugin, args.done_with_host_buffer);
        Ok((Buffer { client: self.handle.clone(), raw: args.buffer }, done))
    }

    /// Memory of this process as a buffer, with no copy; `donated` if an execution that it is donated to may leave its
    /// result there. The event says that the plugin is done with the memory: the buffer, and what became of it, is
    /// destroyed, and no execution uses it. A plugin may copy all the same: then the result is elsewhere.
    ///
    /// # Safety
    /// `memory` holds as many elements, is aligned to [`VIEW_ALIGNMENT`], and until the event has happened stays alive,
    /// and unwritten by others; with `donated` it is writable, and unread by others while an execution has it.
    pub(crate) unsafe fn lend(
        &self,
        memory: *mut u8,
        donated: bool,
        element: Element,
        dims: &[i64],
        device: &Device,
    ) -> Result<(Buffer, Event), PjrtError> {
        let semantics = if donated { sys::MUTABLE_ZERO_COPY } else { sys::IMMUTABLE_ZERO_COPY };
        self.host_buffer(memory, element, dims, device, semantics)
    }
}

/// What a view's memory has to be aligned to: XLA's for buffers on a CPU.
pub(crate) const VIEW_ALIGNMENT: usize = 64;

unsafe extern "C" fn nothing(_: Opaque, _: Opaque) {}

impl Client {
    /// Memory of this process as a buffer, with no copy.
    ///
    /// # Safety
    /// The devices' memory is this process's. `memory` is aligned to [`VIEW_ALIGNMENT`], holds as many elements, and
    /// stays as it is as long as the buffer, or an execution that reads it, goes on.
    pub(crate) unsafe fn view(
        &self,
        memory: *const u8,
        element: Element,
        dims: &[i64],
        device: &Device,
    ) -> Result<Buffer, PjrtError> {
        let mut args = sys::ClientCreateView {
            client: self.handle.raw,
            memory: memory.cast_mut().cast(),
            dims: dims.as_ptr(),
            num_dims: dims.len(),
            element_type: element.code(),
            device: device.raw as Opaque,
            // XLA's CPU plugin calls it unasked.
            on_delete: Some(nothing),
            ..Default::default()
        };
        self.plugin().call(&mut args)?;
        Ok(Buffer { client: self.handle.clone(), raw: args.buffer })
    }
}

fn description(plugin: &Plugin, device: Opaque) -> Result<Opaque, PjrtError> {
    let mut args = sys::DeviceGetDescription { device, ..Default::default() };
    plugin.call(&mut args)?;
    Ok(args.description)
}

fn describe(plugin: &Plugin, raw: Opaque) -> Result<Device, PjrtError> {
    let description = description(plugin, raw)?;
    let mut id = sys::DeviceDescriptionId { description, ..Default::default() };
    plugin.call(&mut id)?;
    let mut process = sys::DeviceDescriptionProcessIndex { description, ..Default::default() };
    plugin.call(&mut process)?;
    Ok(Device { id: id.id, process: process.process_index, raw: raw as usize })
}

/// Memory of a device.
pub struct Buffer {
    pub(super) client: Arc<Handle>,
    pub(super) raw: Opaque,
}

// SAFETY: a PJRT buffer may be used from any thread.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.client.plugin.destroy(&mut sys::BufferDestroy { buffer: self.raw, ..Default::default() });
    }
}

impl Buffer {
    /// Extents.
    pub fn dims(&self) -> Result<Vec<i64>, PjrtError> {
        let mut args = sys::BufferDimensions { buffer: self.raw, ..Default::default() };
        self.client.plugin.call(&mut args)?;
        if args.num_dims == 0 {
            return Ok(Vec::new());
        }
        // SAFETY: the buffer's own list, copied at once.
        Ok(unsafe { std::slice::from_raw_parts(args.dims, args.num_dims) }.to_vec())
    }

    /// Element type; none for a type that this crate doesn't use.
    pub fn element(&self) -> Result<Option<Element>, PjrtError> {
        let mut args = sys::BufferElementType { buffer: self.raw, ..Default::default() };
        self.client.plugin.call(&mut args)?;
        Ok(Element::from_code(args.element_type))
    }

    /// Whether the memory was given away to an execution (donated).
    pub fn is_deleted(&self) -> Result<bool, PjrtError> {
        let mut args = sys::BufferIsDeleted { buffer: self.raw, ..Default::default() };
        self.client.plugin.call(&mut args)?;
        Ok(args.is_deleted)
    }

    /// Where it lies, for plugins whose devices are this machine's CPUs.
    ///
    /// # Safety
    /// The memory is the plugin's: it may be read once the buffer is computed, as long as the buffer is alive and not
    /// donated, and only if the devices' memory is this process's.
    pub(crate) unsafe fn address(&self) -> Result<*const u8, PjrtError> {
        let mut args = sys::BufferDataPointer { buffer: self.raw, ..Default::default() };
        self.client.plugin.call(&mut args)?;
        Ok(args.pointer.cast_const().cast())
    }

    /// Waits until the buffer is computed, then copies it to `out`, dense and row-major.
    pub fn read(&self, out: &mut [u8]) -> Result<(), PjrtError> {
        let dims = self.dims()?;
        if let Some(element) = self.element()?
            && element.bytes(&dims) != Some(out.len())
        {
            return Err(PjrtError::Argument {
                what: "bytes to read",
                expected: format!("{:?} for {dims:?} of {element:?}", element.bytes(&dims)),
                got: out.len().to_string(),
            });
        }
        let minor_to_major: Vec<i64> = (0..dims.len() as i64).rev().collect();
        let mut layout = sys::MemoryLayout {
            struct_size: size_of::<sys::MemoryLayout>(),
            extension_start: std::ptr::null_mut(),
            tiled_struct_size: 56,
            tiled_extension_start: std::ptr::null_mut(),
            minor_to_major: minor_to_major.as_ptr(),
            minor_to_major_size: minor_to_major.len(),
            tile_dims: std::ptr::null(),
            tile_dim_sizes: std::ptr::null(),
            num_tiles: 0,
            kind: 0,
        };
        let mut args = sys::BufferToHostBuffer {
            source: self.raw,
            host_layout: &mut layout,
            destination: out.as_mut_ptr().cast::<c_void>(),
            destination_size: out.len(),
            ..Default::default()
        };
        self.client.plugin.call(&mut args)?;
        // `out` is borrowed until the copy is done.
        Event::new(&self.client.plugin, args.event).wait()
    }
}

/// Something that will have happened.
pub struct Event {
    plugin: Arc<Plugin>,
    raw: Opaque,
}

// SAFETY: a PJRT event may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub(super) fn new(plugin: &Arc<Plugin>, raw: Opaque) -> Event {
        Event { plugin: plugin.clone(), raw }
    }

    /// Whether it has happened, well or not.
    pub fn is_ready(&self) -> Result<bool, PjrtError> {
        if self.raw.is_null() {
            return Ok(true);
        }
        let mut args = sys::EventIsReady { event: self.raw, ..Default::default() };
        self.plugin.call(&mut args)?;
        Ok(args.is_ready)
    }

    /// Calls `target` once when it has happened: at once on this thread, or later on one of the plugin's, which must not be
    /// kept. An event that can't be subscribed to is an error; then nothing is called.
    pub fn on_ready<T: OnReady>(&self, target: Arc<T>) -> Result<(), PjrtError> {
        self.tell::<T, false>(target)
    }

    /// As [`Event::on_ready`], but calls [`OnReady::released`].
    pub fn on_released<T: OnReady>(&self, target: Arc<T>) -> Result<(), PjrtError> {
        self.tell::<T, true>(target)
    }

    fn tell<T: OnReady, const RELEASED: bool>(&self, target: Arc<T>) -> Result<(), PjrtError> {
        if self.raw.is_null() {
            if RELEASED {
                target.released(Ok(()));
            } else {
                target.ready(Ok(()));
            }
            return Ok(());
        }
        let user_arg = Arc::into_raw(target).cast_mut().cast::<c_void>();
        let callback = Some(trampoline::<T, RELEASED> as sys::EventCallback);
        let mut args = sys::EventOnReady { event: self.raw, callback, user_arg, ..Default::default() };
        let outcome = self.plugin.call(&mut args);
        if outcome.is_err() {
            // SAFETY: the plugin refused: it will not call, so that the reference is still ours.
            drop(unsafe { Arc::from_raw(user_arg.cast::<T>()) });
        }
        outcome
    }

    /// Waits for it; its error is the error of what it stands for.
    pub fn wait(&self) -> Result<(), PjrtError> {
        if self.raw.is_null() {
            return Ok(());
        }
        self.plugin.call(&mut sys::EventAwait { event: self.raw, ..Default::default() })
    }
}

/// Who is told that an event has happened.
pub trait OnReady: Send + Sync + 'static {
    /// The plugin, for reading its errors.
    fn plugin(&self) -> Option<&Arc<Plugin>>;
    /// It has happened, well or not. Runs on a thread of the plugin's: must be quick.
    fn ready(&self, outcome: Result<(), PjrtError>);
    /// As [`OnReady::ready`], for events of another kind: memory is no longer used.
    fn released(&self, outcome: Result<(), PjrtError>) {
        drop(outcome);
    }
}

unsafe extern "C" fn trampoline<T: OnReady, const RELEASED: bool>(error: Opaque, user_arg: Opaque) {
    // SAFETY: made by `on_ready` from an Arc<T>; a plugin calls once.
    let target = unsafe { Arc::from_raw(user_arg.cast_const().cast::<T>()) };
    // A panic must not reach the plugin's frames.
    let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let outcome = match (error.is_null(), target.plugin()) {
            (true, _) => Ok(()),
            (false, Some(plugin)) => Err(plugin.take_error(error, "PJRT_LoadedExecutable_Execute")),
            (false, None) => Err(PjrtError::Argument {
                what: "who reads the error",
                expected: "a plugin".to_owned(),
                got: "none".to_owned(),
            }),
        };
        if RELEASED { target.released(outcome) } else { target.ready(outcome) }
    }));
    if told.is_err() {
        tracing::error!("a panic while an execution's end was told");
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            self.plugin.destroy(&mut sys::EventDestroy { event: self.raw, ..Default::default() });
        }
    }
}
