//! Collectives: what C++ describes, as the core's own, and how it is posted.

use std::ffi::c_void;

use podring_collective::{Blocks, Collective, DType, Kind as Op, Layout, Part, Reduction, Tensor};
use podring_group::engine::DeviceCall;
use podring_group::{Error, Keep, ProcessGroup, Work};
use smallvec::SmallVec;

use super::group::group;
use super::{RawError, duration, guarded};

const SYNC: u32 = 1;
const DEVICE: u32 = 2;
const CONJ: u32 = 1;
const NEG: u32 = 2;
const NO_REDUCTION: u8 = 255;

#[repr(C)]
pub(super) struct RawTensor {
    data: *mut c_void,
    sizes: *const i64,
    strides: *const i64,
    dims: u32,
    flags: u32,
}

#[repr(C)]
pub(super) struct RawSide {
    tensors: *const RawTensor,
    n_tensors: u64,
    counts: *const u64,
    n_counts: u64,
}

#[repr(C)]
pub(super) struct RawPart {
    dtype: u8,
    reduction: u8,
    factor: f64,
    inputs: RawSide,
    outputs: RawSide,
}

#[repr(C)]
pub(super) struct RawCollective {
    kind: u32,
    root: i32,
    tag: u32,
    n_parts: u32,
    parts: *const RawPart,
    timeout_ms: i64,
    flags: u32,
}

#[repr(C)]
pub(super) struct RawSized {
    kind: u32,
    dtype: u8,
    reduction: u8,
    bytes: u64,
}

/// What C gave, as the core's own request. A part the core can't express is an error that names it.
///
/// # Safety
/// `raw` and all it points to must be valid, as the header describes.
unsafe fn collective(raw: &RawCollective, rank: u32) -> Result<Collective, Error> {
    let root = raw.root as u32;
    let invalid = |what: &'static str, expected: &str, got: String| Error::Invalid {
        rank,
        source: podring_collective::Invalid { op: "post", what, expected: expected.to_owned(), got },
    };
    let kind = match raw.kind {
        0 => Op::AllReduce,
        1 => Op::Broadcast { root },
        2 => Op::Reduce { root },
        3 => Op::AllGather,
        4 => Op::ReduceScatter,
        5 => Op::AllToAll,
        6 => Op::Gather { root },
        7 => Op::Scatter { root },
        8 => Op::Barrier,
        9 => Op::Send { to: root, tag: raw.tag },
        10 => Op::Recv { from: u32::try_from(raw.root).ok(), tag: raw.tag },
        other => return Err(invalid("kind", "0 to 10", other.to_string())),
    };
    let mut parts = SmallVec::new();
    for index in 0..raw.n_parts as usize {
        // SAFETY: `n_parts` parts by the header.
        let part = unsafe { &*raw.parts.add(index) };
        let dtype = DType::from_code(part.dtype)
            .ok_or_else(|| invalid("dtype code", "one of PodringDType", part.dtype.to_string()))?;
        let reduction = match part.reduction {
            NO_REDUCTION => None,
            code => Some(
                Reduction::from_code(code, part.factor)
                    .ok_or_else(|| invalid("reduction code", "0 to 8", code.to_string()))?,
            ),
        };
        // SAFETY: passed on.
        let (inputs, outputs) = unsafe { (side(&part.inputs), side(&part.outputs)) };
        parts.push(Part { dtype, reduction, inputs, outputs });
    }
    Ok(Collective { kind, parts })
}

/// # Safety
/// As for `collective`.
unsafe fn side(raw: &RawSide) -> Blocks {
    let tensors = (0..raw.n_tensors as usize).map(|index| {
        // SAFETY: `n_tensors` tensors, each with `dims` sizes and strides, by the header.
        unsafe {
            let tensor = &*raw.tensors.add(index);
            let dims = |from: *const i64| {
                if tensor.dims == 0 {
                    SmallVec::new()
                } else {
                    SmallVec::from_slice(std::slice::from_raw_parts(from, tensor.dims as usize))
                }
            };
            let layout = Layout {
                sizes: dims(tensor.sizes),
                strides: dims(tensor.strides),
                conj: tensor.flags & CONJ != 0,
                neg: tensor.flags & NEG != 0,
            };
            Tensor { data: tensor.data.cast(), layout }
        }
    });
    if raw.counts.is_null() {
        return Blocks::list(tensors);
    }
    // SAFETY: `n_counts` counts by the header.
    let counts = unsafe { std::slice::from_raw_parts(raw.counts, raw.n_counts as usize) };
    Blocks { tensors: tensors.collect(), counts: counts.iter().map(|&count| count as usize).collect() }
}

pub(super) unsafe extern "C" fn post(
    handle: *mut ProcessGroup,
    raw: *const RawCollective,
    keep: *mut c_void,
    release: unsafe extern "C" fn(*mut c_void),
    out: *mut *mut Work,
    error: *mut RawError,
) -> i32 {
    // SAFETY: the header says that drop(keep) may be called once on any thread. From here on it will be.
    let keep = unsafe { Keep::new(keep, release) };
    guarded(error, || {
        // SAFETY: a live handle and a valid description by the header.
        let (group, raw) = unsafe { (group(handle), &*raw) };
        // SAFETY: as above.
        let collective = unsafe { collective(raw, group.rank()) }?;
        let timeout = (raw.timeout_ms > 0).then(|| duration(raw.timeout_ms));
        let work = if raw.flags & DEVICE != 0 && group.has_devices() {
            group.post_device(DeviceCall { keep: Some(keep), timeout, ..DeviceCall::staged(collective) })?
        } else {
            group.post(collective, Some(keep), timeout, raw.flags & SYNC != 0)?
        };
        // SAFETY: the caller's place for the handle.
        unsafe { out.write(Box::into_raw(Box::new(work))) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn group_warm_up(
    handle: *mut ProcessGroup,
    calls: *const RawSized,
    n_calls: u64,
    ready: *mut u64,
    error: *mut RawError,
) -> i32 {
    guarded(error, || {
        // SAFETY: a live handle by the header.
        let group = unsafe { group(handle) };
        let raw = match n_calls {
            0 => &[],
            // SAFETY: that many calls by the header.
            count => unsafe { std::slice::from_raw_parts(calls, count as usize) },
        };
        let calls = raw.iter().map(|raw| sized(raw, group)).collect::<Result<Vec<Collective>, Error>>()?;
        let mut done = 0;
        group.warm(&calls, |count, _| done = count)?;
        // SAFETY: the caller's place for the number.
        unsafe { ready.write(done as u64) };
        Ok(())
    })
}

/// A call to come, as the core's own.
fn sized(raw: &RawSized, group: &ProcessGroup) -> Result<Collective, Error> {
    let invalid = |what: &'static str, expected: &str, got: String| Error::Invalid {
        rank: group.rank(),
        source: podring_collective::Invalid { op: "warm_up", what, expected: expected.to_owned(), got },
    };
    let dtype = DType::from_code(raw.dtype)
        .ok_or_else(|| invalid("dtype code", "one of PodringDType", raw.dtype.to_string()))?;
    let kind = match raw.kind {
        0 => Op::AllReduce,
        1 => Op::Broadcast { root: 0 },
        2 => Op::Reduce { root: 0 },
        3 => Op::AllGather,
        4 => Op::ReduceScatter,
        5 => Op::AllToAll,
        8 => Op::Barrier,
        other => return Err(invalid("kind", "0 to 5, or 8", other.to_string())),
    };
    // PREMUL_SUM's factor is an operand of its program.
    let reduction = Reduction::from_code(raw.reduction, 1.0);
    if kind.reduces() && reduction.is_none() {
        return Err(invalid("reduction code", "0 to 8", raw.reduction.to_string()));
    }
    let bytes = usize::try_from(raw.bytes).ok().filter(|&bytes| bytes <= isize::MAX as usize / 2);
    let bytes = bytes.ok_or_else(|| invalid("bytes", "at most 2^62", raw.bytes.to_string()))?;
    Collective::sized(kind, dtype, reduction, bytes, group.size() as usize)
        .ok_or_else(|| invalid("kind", "no message", kind.name().to_owned()))
}
