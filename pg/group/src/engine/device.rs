//! The engine of a group inside one slice: plain tensors go to the devices as they are, others are packed first.

use std::{sync::Arc, time::Duration};

use podring_collective::{Blocks, Collective, DType, Layout, Tensor};
use podring_ici::engine::{Call, Failure, Member, Ticket};

use super::across::Within;
use super::{Broken, DeviceCall, Engine, Operation};

/// A tensor that isn't plain, and its plain copy.
struct Packed {
    memory: Vec<u64>,
    tensor: Tensor,
    dtype: DType,
    count: usize,
    /// It is an output: the copy goes back when the operation has ended.
    back: bool,
}

impl Packed {
    fn new(tensor: &Tensor, dtype: DType, back: bool) -> Packed {
        let count = tensor.layout.numel().unwrap_or(0);
        let memory = vec![0u64; (count * dtype.size()).div_ceil(8)];
        Packed { memory, tensor: tensor.clone(), dtype, count, back }
    }

    fn data(&mut self) -> *mut u8 {
        self.memory.as_mut_ptr().cast()
    }
}

/// Replaces tensors that aren't plain by copies that are. An output in the place of an input shares its copy.
pub(super) fn pack(collective: &mut Collective) -> Option<Box<dyn FnOnce() + Send>> {
    let plain = |side: &Blocks| side.tensors.iter().all(|tensor| tensor.layout.is_plain());
    if collective.parts.iter().all(|part| plain(&part.inputs) && plain(&part.outputs)) {
        return None;
    }
    let mut copies: Vec<Packed> = Vec::new();
    for part in &mut collective.parts {
        let first = copies.len();
        for (side, back) in [(&mut part.inputs, false), (&mut part.outputs, true)] {
            for tensor in side.tensors.iter_mut().filter(|tensor| !tensor.layout.is_plain()) {
                let same =
                    |copy: &&mut Packed| back && copy.tensor.data == tensor.data && copy.tensor.layout == tensor.layout;
                let flat = Layout::flat(tensor.layout.numel().unwrap_or(0));
                if let Some(copy) = copies[first..].iter_mut().find(same) {
                    copy.back = true;
                    *tensor = Tensor { data: copy.data(), layout: flat };
                    continue;
                }
                let mut copy = Packed::new(tensor, part.dtype, back);
                if !back {
                    // SAFETY: the caller keeps its tensors readable; the copy is large enough.
                    unsafe {
                        podring_kernel::pack(&tensor.layout, part.dtype, tensor.data, copy.data(), 0..copy.count);
                    }
                }
                *tensor = Tensor { data: copy.data(), layout: flat };
                copies.push(copy);
            }
        }
    }
    Some(Box::new(move || {
        for mut copy in copies {
            if copy.back && copy.count > 0 {
                let data = copy.data();
                // SAFETY: the caller keeps its tensors writable until the operation has ended, which is after this.
                unsafe {
                    podring_kernel::unpack(&copy.tensor.layout, copy.dtype, data, copy.tensor.data, 0..copy.count);
                }
            }
        }
    }))
}

/// A group of a machine.
pub(super) struct Inside {
    member: Member,
}

impl Inside {
    pub fn new(member: Member) -> Self {
        Inside { member }
    }
}

impl Within for Inside {
    fn start(&self, seq: u64, mut call: DeviceCall, timeout: Duration) -> Arc<Ticket> {
        let after = if call.inputs.is_none() { pack(&mut call.collective) } else { None };
        let DeviceCall { collective, inputs, donate, keep, .. } = call;
        self.member.post(Call { seq, collective, inputs, donate, keep, after, timeout })
    }

    fn fail_with(&self, failure: Failure) {
        self.member.fail(failure);
    }

    fn exact_failure(&self) -> Option<Arc<Failure>> {
        self.member.failure()
    }
}

impl Engine for Inside {
    fn post(&self, seq: u64, call: DeviceCall, timeout: Duration) -> Arc<dyn Operation> {
        let ticket = self.start(seq, call, timeout);
        // Lent again once whoever holds it has let go.
        self.member.recycle(ticket.clone());
        ticket
    }

    fn warm(&self, calls: &[Collective], progress: &mut dyn FnMut(usize, usize)) -> Result<(), Broken> {
        self.member.warm(calls, progress).map_err(|failure| Broken::Device(Arc::new(failure)))
    }

    fn fail(&self, by: Option<u32>, why: &str) {
        self.member.fail(Failure::Aborted { by, why: why.to_owned() });
    }

    fn broken(&self) -> Option<Broken> {
        self.member.failure().map(Broken::Device)
    }

    fn pending(&self) -> usize {
        self.member.pending()
    }

    fn close(&self) {
        self.member.close();
    }
}

/// A flat tensor over memory of ours.
pub(super) fn flat(memory: &mut [u64], start: usize, count: usize, dtype: DType) -> Tensor {
    Tensor { data: memory.as_mut_ptr().cast::<u8>().wrapping_add(start * dtype.size()), layout: Layout::flat(count) }
}
