//! Buffers that go from chip to chip: an extension that torch_tpu (0.2.0) has its process group's send and receive by,
//! and that XLA's CPU plugin lacks. Here the fabric carries them.
//!
//! Who receives says how it can be found (a descriptor), by a way of the framework's own; who sends names it with a
//! buffer. A buffer that is to be received is there at once, and gets its value when that has come.
//!
//! Laid out by hand from `pjrt_c_api_cross_host_transfers_extension.h` (versions 5 to 8 were read).

mod receive;
mod send;

use std::ffi::{c_int, c_void};
use std::sync::{Arc, OnceLock};

use podring_collective::{Blocks, Collective, DType, Kind, Layout, Part, Tensor};
use podring_group::{Error, ProcessGroup, Work};

use crate::error::{self, Fault, InterposeError};
use crate::sys::{ExtensionBase, Opaque};
use crate::table::Interposed;
use receive::{Receive, receive};
use send::{Send, send};

/// `CrossHostTransfers` among the interface's extensions.
const KIND: c_int = 12;

#[repr(C)]
struct Extension {
    base: ExtensionBase,
    receive: unsafe extern "C" fn(*mut Receive) -> Opaque,
    send: unsafe extern "C" fn(*mut Send),
    receive_from: unsafe extern "C" fn(*mut c_void) -> Opaque,
    send_to: unsafe extern "C" fn(*mut c_void) -> Opaque,
}

// SAFETY: constant once made.
unsafe impl std::marker::Send for Extension {}
// SAFETY: as above.
unsafe impl Sync for Extension {}

/// The head of a list of extensions that continues with `others`.
pub fn extension(others: *mut ExtensionBase) -> *mut ExtensionBase {
    static EXTENSION: OnceLock<Extension> = OnceLock::new();
    let ours = EXTENSION.get_or_init(|| Extension {
        base: ExtensionBase { struct_size: size_of::<Extension>(), kind: KIND, next: others },
        receive,
        send,
        receive_from: by_key,
        send_to: by_key,
    });
    // The interface's types know no `const`; nobody writes to an extension.
    std::ptr::from_ref(&ours.base).cast_mut()
}

/// The extension's other two functions, which agree on a number instead of a descriptor: nobody was seen to use them.
unsafe extern "C" fn by_key(_args: *mut c_void) -> Opaque {
    error::give(&InterposeError::Transfer {
        what: "a transfer by key",
        why: "not to be had on a virtual slice; use MakeCrossHostReceiveBuffers and CopyToRemoteDevice".to_owned(),
    })
}

/// Where a receive can be found: the receiver's rank, and its number there, which is the message's tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Descriptor {
    rank: u32,
    number: u32,
}

impl Descriptor {
    fn text(self) -> String {
        format!("podring {} {}", self.rank, self.number)
    }

    fn parse(text: &[u8]) -> Option<Descriptor> {
        let mut words = std::str::from_utf8(text).ok()?.split(' ');
        let found = match (words.next()?, words.next()?.parse(), words.next()?.parse()) {
            ("podring", Ok(rank), Ok(number)) => Descriptor { rank, number },
            _ => return None,
        };
        words.next().is_none().then_some(found)
    }
}

/// A value in this process's memory, on its way.
struct Value {
    // The largest element type's alignment.
    memory: Vec<u128>,
    count: usize,
    dtype: DType,
}

impl Value {
    fn new(dims: &[i64], dtype: DType) -> Value {
        let count: usize = dims.iter().map(|&dim| dim.max(0) as usize).product();
        let memory = vec![0u128; (count * dtype.size()).div_ceil(size_of::<u128>())];
        Value { memory, count, dtype }
    }

    fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// A message of it. It must stay until the message has ended.
    fn message(&mut self, kind: Kind) -> Collective {
        let data = self.memory.as_mut_ptr().cast();
        let whole = Blocks::whole(Tensor { data, layout: Layout::flat(self.count) });
        let (inputs, outputs) =
            if matches!(kind, Kind::Send { .. }) { (whole, Blocks::none()) } else { (Blocks::none(), whole) };
        let part = Part { dtype: self.dtype, reduction: None, inputs, outputs };
        Collective { kind, parts: [part].into_iter().collect() }
    }
}

/// Posts a message, and calls `ended` with the value when it has ended.
fn post(
    group: &ProcessGroup,
    kind: Kind,
    mut value: Value,
    ended: impl FnOnce(Value, Option<Error>) + std::marker::Send + 'static,
) -> Result<(), InterposeError> {
    let failed = |error: Error| InterposeError::Failed { what: "a transfer", why: error.to_string() };
    let message = value.message(kind);
    let work: Arc<Work> = Arc::new(group.post(message, None, None, false).map_err(failed)?);
    let mine = work.clone();
    work.on_end(Box::new(move || ended(value, mine.error())));
    Ok(())
}

/// The words of what went wrong, which ends here.
fn taken(on: &Interposed, fault: Fault) -> String {
    match fault {
        Fault::Ours(error) => error.to_string(),
        Fault::Theirs(error) => on.take_message(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_header() {
        assert_eq!(size_of::<Extension>(), 56);
        assert_eq!(size_of::<Receive>(), 104);
        assert_eq!((send::WITHOUT_FREE, size_of::<Send>()), (64, 72));
    }

    #[test]
    fn a_descriptor_is_read_as_it_was_written() {
        let one = Descriptor { rank: 3, number: u32::MAX };
        assert_eq!(Descriptor::parse(one.text().as_bytes()), Some(one));
        for wrong in ["", "podring", "podring 1", "podring 1 2 3", "podring -1 2", "podring 1 4294967296", "other 1 2"]
        {
            assert_eq!(Descriptor::parse(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(Descriptor::parse(&[0xff, 0xfe]), None);
    }

    #[test]
    fn values_of_no_elements_and_of_none_of_a_dimension() {
        assert_eq!((Value::new(&[], DType::F64).count, Value::new(&[], DType::F64).bytes()), (1, 8));
        assert_eq!(Value::new(&[3, 0, 2], DType::BF16).bytes(), 0);
        assert_eq!(Value::new(&[3, 5], DType::C128).memory.len(), 15);
    }
}
