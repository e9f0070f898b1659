//! The table over XLA's CPU plugin, used as a framework does. One test: a process has one table.

use super::*;
use podring_ici::pjrt::{Want, find};

/// The plugin, or none where there is none and none is required.
fn plugin() -> Option<PathBuf> {
    let environment = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv");
    find(Want::Cpu, &[environment])
        .inspect_err(|error| {
            assert!(std::env::var("PODRING_REQUIRE_PJRT").as_deref() != Ok("1"), "{error}");
            eprintln!("NOT RUN: {error}");
        })
        .ok()
}

unsafe fn call<A: Arguments>(table: *const c_void, args: &mut A) -> Opaque {
    // SAFETY: the table was made from a plugin's, which has this slot.
    unsafe { table.cast::<TableHead>().add(1).cast::<Entry>().add(A::SLOT).read()(std::ptr::from_mut(args).cast()) }
}

unsafe fn said(table: *const c_void, error: Opaque) -> String {
    assert!(!error.is_null());
    let mut message = sys::ErrorMessage { error, ..Default::default() };
    let mut end = sys::ErrorDestroy { error, ..Default::default() };
    // SAFETY: an error that this table gave, ended once.
    unsafe {
        call(table, &mut message);
        let text = std::slice::from_raw_parts(message.message.cast::<u8>(), message.message_size);
        let text = String::from_utf8(text.to_vec()).unwrap();
        call(table, &mut end);
        text
    }
}

/// A sum over eight ranks between two additions, and the rank's own number.
const MIXED: &str = r#"
module @mixed attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%x: tensor<2x3xf32>) -> (tensor<2x3xf32>, tensor<ui32>) {
    %0 = stablehlo.add %x, %x : tensor<2x3xf32>
    %1 = "stablehlo.all_reduce"(%0) <{
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
      replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, use_global_device_ids
    }> ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %sum = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %sum : tensor<f32>
    }) : (tensor<2x3xf32>) -> tensor<2x3xf32>
    %2 = stablehlo.add %1, %0 : tensor<2x3xf32>
    %3 = stablehlo.partition_id : tensor<ui32>
    return %2, %3 : tensor<2x3xf32>, tensor<ui32>
  }
}
"#;

/// XLA compiles a program whose collective is a call of ours, calls it, and hands on what it says: here, with no process
/// group, that there is none.
unsafe fn programs_call_their_collectives(table: *const c_void, client: Opaque) {
    let before = crate::counts();
    let format = "mlir";
    let program = sys::Program {
        struct_size: size_of::<sys::Program>(),
        extension_start: std::ptr::null_mut(),
        code: MIXED.as_ptr().cast_mut().cast(),
        code_size: MIXED.len(),
        format: format.as_ptr().cast(),
        format_size: format.len(),
    };
    // xla.CompileOptionsProto{executable_build_options{num_replicas 1, num_partitions 8}}
    let options = [0x1au8, 4, 0x20, 1, 0x28, 8];
    let mut compile = sys::ClientCompile {
        client,
        program: &raw const program,
        compile_options: options.as_ptr().cast(),
        compile_options_size: options.len(),
        ..Default::default()
    };
    // SAFETY: arguments of these functions, objects of this client.
    unsafe {
        let error = call(table, &mut compile);
        assert!(error.is_null(), "{}", said(table, error));
        let after = crate::counts();
        assert_eq!((after.mixed - before.mixed, after.inside - before.inside), (1, 1));
        let executable = compile.executable;

        unsafe extern "C" fn kept(_: *mut c_void, _: *mut c_void) {}
        #[repr(align(64))]
        struct Numbers([f32; 6]);
        let mut numbers = Numbers([1.0; 6]);
        let float = podring_collective::DType::F32;
        let memory = numbers.0.as_mut_ptr().cast();
        let buffer = crate::memory::adopt(memory, &[2, 3], float, kept, std::ptr::null_mut()).unwrap();
        let arguments = [buffer];
        let lists = [arguments.as_ptr()];
        let mut results = [std::ptr::null_mut(); 2];
        let outputs = [results.as_mut_ptr()];
        let mut event = std::ptr::null_mut();
        // struct_size, extension, send and recv callbacks and their counts, launch id, non-donatable inputs, …
        let mut options = [0usize; 16];
        options[0] = size_of_val(&options);
        let mut execute = sys::LoadedExecutableExecute {
            executable,
            options: options.as_mut_ptr().cast(),
            argument_lists: lists.as_ptr(),
            num_devices: 1,
            num_args: 1,
            output_lists: outputs.as_ptr(),
            events: &raw mut event,
            ..Default::default()
        };
        // XLA runs a short program at once, and then says so itself; else the event does.
        let error = call(table, &mut execute);
        let refused = if error.is_null() {
            let refused = said(table, call(table, &mut sys::EventAwait { event, ..Default::default() }));
            assert!(call(table, &mut sys::EventDestroy { event, ..Default::default() }).is_null());
            for buffer in results {
                assert!(call(table, &mut sys::BufferDestroy { buffer, ..Default::default() }).is_null());
            }
            refused
        } else {
            said(table, error)
        };
        assert!(refused.contains("before init_process_group"), "{refused}");
        assert!(call(table, &mut sys::BufferDestroy { buffer, ..Default::default() }).is_null());
        assert!(call(table, &mut sys::LoadedExecutableDestroy { executable, ..Default::default() }).is_null());
    }
}

#[test]
fn a_virtual_slice_is_seen_and_the_rest_is_the_plugins_own() {
    let Some(file) = plugin() else { return };
    let wrapped = load(&file).unwrap();
    // SAFETY: this test is the only one that reads or writes these, and no other thread of it does.
    unsafe {
        std::env::set_var("RANK", "2");
        std::env::set_var("WORLD_SIZE", "8");
    }
    assert!(crate::configure(Settings::virtual_slice("v4:2x2x1", Some(&file)).unwrap()));
    let table = crate::api();
    assert!(!table.is_null(), "{:?}", crate::failure());
    assert!(!crate::configure(Settings { plugin: file.clone(), wrapped: Wrapped::Libtpu }));

    // As long as the plugin's, and all entries but a few the plugin's own pointers: forwarding costs nothing.
    // SAFETY: two tables of the length that the plugin's says.
    let (ours, theirs) = unsafe {
        let words = wrapped.as_ref().struct_size / size_of::<usize>();
        let slots = |table: *const c_void| std::slice::from_raw_parts(table.cast::<usize>(), words)[5..].to_vec();
        assert_eq!((*table.cast::<TableHead>()).struct_size, wrapped.as_ref().struct_size);
        (slots(table), slots(wrapped.as_ptr().cast()))
    };
    let replaced: Vec<usize> = (0..ours.len()).filter(|&slot| ours[slot] != theirs[slot]).collect();
    let mut expected =
        vec![0, 1, 2, 10, 11, 13, 16, 17, 18, 19, 20, 21, 23, 24, 25, 26, 30, 31, 34, 40, 49, 50, 51, 55, 56];
    expected.extend((ours.len() > error::PAYLOADS).then_some(error::PAYLOADS));
    assert_eq!(replaced, expected);

    // SAFETY: arguments of these functions, objects of this client, in the order that PJRT wants.
    unsafe {
        let initialize = wrapped.as_ptr().add(1).cast::<Entry>().add(3).read();
        let mut nothing = [16usize, 0];
        assert!(initialize(nothing.as_mut_ptr().cast()).is_null());
        // Options that only libtpu knows are no error.
        let asked = [sys::NamedValue::int("premapped_buffer_size", 1)];
        let mut create = sys::ClientCreate { create_options: asked.as_ptr(), num_options: 1, ..Default::default() };
        let error = call(table, &mut create);
        assert!(error.is_null(), "{}", said(table, error));
        let client = create.client;
        assert_eq!(crate::client().1, client);
        assert_eq!(crate::memory::virtual_client(), client);
        let refused = said(table, call(table, &mut sys::ClientCreate::default()));
        assert!(refused.contains("it exists already (slice v4:2x2x1, rank 2)"), "{refused}");

        let mut all = sys::ClientDevices { client, ..Default::default() };
        assert!(call(table, &mut all).is_null());
        assert_eq!(all.num_devices, 8);
        let mut mine = sys::ClientAddressableDevices { client, ..Default::default() };
        assert!(call(table, &mut mine).is_null());
        assert_eq!((mine.num_devices, *mine.devices), (1, *all.devices.add(2)));
        let device = *mine.devices;
        let mut description = sys::DeviceGetDescription { device, ..Default::default() };
        assert!(call(table, &mut description).is_null());
        let description = description.description;
        let mut process = sys::DeviceDescriptionProcessIndex { description, ..Default::default() };
        assert!(call(table, &mut process).is_null());
        let mut attributes = sys::DeviceDescriptionAttributes { description, ..Default::default() };
        assert!(call(table, &mut attributes).is_null());
        let coords = &*attributes.attributes;
        let coords = std::slice::from_raw_parts(coords.value.int64_list, coords.value_size);
        // Two cores on each chip: rank 2 is the second chip's first core.
        assert_eq!((process.process_index, coords), (2, &[1i64, 0, 0][..]));
        let mut memory = sys::DeviceMemoryStats { device, ..Default::default() };
        assert!(call(table, &mut memory).is_null());
        assert_eq!((memory.bytes_limit, memory.bytes_limit_is_set), (16 << 30, true));
        let mut lookup = sys::ClientLookupDevice { client, id: 9, ..Default::default() };
        assert!(said(table, call(table, &mut lookup)).starts_with("device 9 on rank 2 of the virtual slice v4:2x2x1"));
        let mut load = sys::ExecutableDeserializeAndLoad { client, ..Default::default() };
        assert!(said(table, call(table, &mut load)).contains("runs on no other"));

        // Memory becomes a buffer with no copy, is read back where it lies, and is given back once.
        unsafe extern "C" fn given_back(memory: *mut c_void, count: *mut c_void) {
            // SAFETY: a counter and memory from posix_memalign, both the test's.
            unsafe {
                *count.cast::<u32>() += 1;
                libc::free(memory);
            }
        }
        let mut memory = std::ptr::null_mut();
        assert_eq!(libc::posix_memalign(&mut memory, 64, 24), 0);
        memory.cast::<f32>().copy_from_nonoverlapping([0f32, 1.0, 2.0, 3.0, 4.0, 5.0].as_ptr(), 6);
        let mut count = 0u32;
        let float = podring_collective::DType::F32;
        let buffer = crate::memory::adopt(memory, &[2, 3], float, given_back, (&raw mut count).cast()).unwrap();
        let found = crate::memory::of_buffer(buffer).unwrap();
        assert_eq!((found.data, found.bytes, found.dtype), (memory, 24, Some(float)));
        assert!(call(table, &mut sys::BufferDestroy { buffer, ..Default::default() }).is_null());
        assert_eq!(count, 1);

        programs_call_their_collectives(table, client);

        assert!(call(table, &mut sys::ClientDestroy { client, ..Default::default() }).is_null());
        assert!(crate::memory::virtual_client().is_null());
    }
}
