//! Small arguments that many launches share.

use std::sync::Arc;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::stage::Shape;
use crate::pjrt::{Buffer, Client, Element, PjrtError};

/// Buffers of constants that are kept at most.
const CONSTANTS: usize = 512;
/// Stand-ins for the arguments of ranks that have none are kept up to this size.
const STAND_IN: usize = 1 << 20;

#[derive(Clone, PartialEq, Eq, Hash)]
struct Constant {
    device: u32,
    element: Element,
    dims: SmallVec<[i64; 4]>,
    /// None for zeros of any size.
    value: Option<SmallVec<[u8; 16]>>,
}

/// Buffers by what they hold, on the devices of one client.
#[derive(Default)]
pub(super) struct Constants(Mutex<FxHashMap<Constant, Arc<Buffer>>>);

impl Constants {
    /// A buffer of these bytes, or of zeros, on a device by its index.
    pub fn get(
        &self,
        client: &Client,
        device: u32,
        shape: &Shape,
        value: Option<&[u8]>,
    ) -> Result<Arc<Buffer>, PjrtError> {
        let key = Constant {
            device,
            element: shape.element,
            dims: shape.dims.clone(),
            value: value.map(SmallVec::from_slice),
        };
        if let Some(known) = self.0.lock().get(&key) {
            return Ok(known.clone());
        }
        let zeros;
        let bytes = match value {
            Some(value) => value,
            None => {
                zeros = vec![0; shape.bytes];
                &zeros
            }
        };
        let place = &client.devices()[device as usize];
        let buffer = Arc::new(client.buffer(bytes, shape.element, &shape.dims, place)?);
        if shape.bytes <= STAND_IN {
            let mut constants = self.0.lock();
            if constants.len() >= CONSTANTS {
                constants.clear();
            }
            constants.insert(key, buffer.clone());
        }
        Ok(buffer)
    }
}
