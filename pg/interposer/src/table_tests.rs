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
    let mut expected = vec![0, 1, 2, 10, 11, 13, 16, 17, 18, 19, 20, 21, 23, 24, 25, 26, 30, 31, 34, 49, 50, 55, 56];
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

        assert!(call(table, &mut sys::ClientDestroy { client, ..Default::default() }).is_null());
        assert!(crate::memory::virtual_client().is_null());
    }
}
