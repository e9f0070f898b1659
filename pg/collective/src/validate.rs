//! What one rank can know to be wrong before a byte moves.

use thiserror::Error;

use crate::{Blocks, Collective, Kind, Part};

/// A request that can't be run as it stands.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{op}: {what}: expected {expected}, got {got}")]
pub struct Invalid {
    /// The operation's name.
    pub op: &'static str,
    /// What is wrong.
    pub what: &'static str,
    /// What would be right.
    pub expected: String,
    /// What was given.
    pub got: String,
}

pub(crate) fn validate(collective: &Collective, me: u32, size: u32) -> Result<(), Invalid> {
    let kind = collective.kind;
    let fail = |what, expected: String, got: String| Err(Invalid { op: kind.name(), what, expected, got });
    if let Some(root) = kind.root()
        && root >= size
    {
        return fail("root rank", format!("0..{size}"), root.to_string());
    }
    let peer = match kind {
        Kind::Send { to, .. } => Some(to),
        Kind::Recv { from, .. } => from,
        _ => None,
    };
    if let Some(peer) = peer {
        if peer >= size {
            return fail("peer rank", format!("0..{size}"), peer.to_string());
        }
        if peer == me {
            return fail("peer rank", format!("another rank than this one ({me})"), peer.to_string());
        }
    }
    if collective.parts.is_empty() && kind != Kind::Barrier {
        return fail("tensors", "at least one".into(), "none".into());
    }
    for part in &collective.parts {
        validate_part(kind, part, me as usize, size as usize)?;
    }
    Ok(())
}

fn validate_part(kind: Kind, part: &Part, me: usize, size: usize) -> Result<(), Invalid> {
    let fail = |what, expected: String, got: String| Err(Invalid { op: kind.name(), what, expected, got });
    for side in [&part.inputs, &part.outputs] {
        validate_side(kind, side, part.dtype.size())?;
    }
    for tensor in &part.outputs.tensors {
        if tensor.layout.may_overlap() {
            return fail(
                "output layout",
                "elements that don't share memory (an expanded tensor can't be written: clone it first)".into(),
                format!("sizes {:?} with strides {:?}", tensor.layout.sizes, tensor.layout.strides),
            );
        }
    }
    match (kind.reduces(), part.reduction) {
        (true, None) => return fail("reduction", "one".into(), "none".into()),
        (true, Some(reduction)) if !reduction.supports(part.dtype) => {
            return fail("reduction", format!("one that {} has", part.dtype), reduction.to_string());
        }
        _ => {}
    }
    let (inputs, outputs) = (&part.inputs.counts, &part.outputs.counts);
    let root = kind.root().map(|root| root as usize);
    let (want_in, want_out) = match kind {
        Kind::AllReduce | Kind::Broadcast { .. } => (1, 1),
        Kind::Reduce { .. } => (1, usize::from(root == Some(me))),
        Kind::AllGather => (1, size),
        Kind::ReduceScatter => (size, 1),
        Kind::AllToAll => (size, size),
        Kind::Gather { .. } => (1, if root == Some(me) { size } else { 0 }),
        Kind::Scatter { .. } => (if root == Some(me) { size } else { 0 }, 1),
        Kind::Barrier => (0, 0),
        Kind::Send { .. } => (1, 0),
        Kind::Recv { .. } => (0, 1),
    };
    if inputs.len() != want_in {
        return fail("input blocks", want_in.to_string(), inputs.len().to_string());
    }
    if outputs.len() != want_out {
        return fail("output blocks", want_out.to_string(), outputs.len().to_string());
    }
    // The pair of counts that must be equal on this rank: what it contributes to, or takes from, itself.
    let own = match kind {
        Kind::AllReduce | Kind::Broadcast { .. } => Some((inputs[0], outputs[0])),
        Kind::Reduce { .. } if root == Some(me) => Some((inputs[0], outputs[0])),
        Kind::AllGather => Some((outputs[me], inputs[0])),
        Kind::ReduceScatter => Some((inputs[me], outputs[0])),
        Kind::AllToAll => Some((inputs[me], outputs[me])),
        Kind::Gather { .. } if root == Some(me) => Some((outputs[me], inputs[0])),
        Kind::Scatter { .. } if root == Some(me) => Some((inputs[me], outputs[0])),
        _ => None,
    };
    match own {
        Some((expected, got)) if expected != got => {
            fail("elements this rank exchanges with itself", expected.to_string(), got.to_string())
        }
        _ => Ok(()),
    }
}

fn validate_side(kind: Kind, side: &Blocks, element: usize) -> Result<(), Invalid> {
    let fail = |what, expected: String, got: String| Err(Invalid { op: kind.name(), what, expected, got });
    let mut total = 0usize;
    for tensor in &side.tensors {
        let bytes = tensor.layout.numel().and_then(|numel| numel.checked_mul(element));
        match bytes {
            Some(bytes) if bytes <= isize::MAX as usize => total += bytes / element,
            _ => return fail("tensor size", "below 2^63 bytes".into(), format!("sizes {:?}", tensor.layout.sizes)),
        }
        if tensor.data.is_null() && bytes != Some(0) {
            return fail("tensor memory", "an address".into(), "null".into());
        }
    }
    let tensors = side.tensors.len();
    if tensors > 1 && tensors != side.counts.len() {
        return fail("tensors", format!("one, or one for each of {} blocks", side.counts.len()), tensors.to_string());
    }
    if total != side.total() {
        return fail("elements of the splits together", total.to_string(), side.total().to_string());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Tensor;
    use crate::{DType, Layout, Reduction};
    use smallvec::SmallVec;

    fn tensor(count: usize) -> Tensor {
        Tensor { data: std::ptr::dangling_mut(), layout: Layout::flat(count) }
    }

    fn one(kind: Kind, reduction: Option<Reduction>, inputs: Blocks, outputs: Blocks) -> Collective {
        Collective { kind, parts: SmallVec::from_iter([Part { dtype: DType::F32, reduction, inputs, outputs }]) }
    }

    #[test]
    fn accepts_what_is_right() {
        let gather =
            one(Kind::AllGather, None, Blocks::whole(tensor(3)), Blocks::list([tensor(1), tensor(3), tensor(0)]));
        assert_eq!(gather.validate(1, 3), Ok(()));
        let barrier = Collective { kind: Kind::Barrier, parts: SmallVec::new() };
        assert_eq!(barrier.validate(0, 1), Ok(()));
    }

    #[test]
    fn names_what_is_wrong() {
        let what = |collective: Collective| collective.validate(0, 2).unwrap_err().what;
        let sum = Some(Reduction::Sum);
        let (three, four) = (|| Blocks::whole(tensor(3)), || Blocks::whole(tensor(4)));
        assert_eq!(what(one(Kind::Broadcast { root: 2 }, None, three(), three())), "root rank");
        assert_eq!(what(one(Kind::Send { to: 0, tag: 0 }, None, three(), Blocks::none())), "peer rank");
        assert_eq!(what(one(Kind::AllReduce, None, three(), three())), "reduction");
        assert_eq!(what(one(Kind::AllReduce, Some(Reduction::BitXor), three(), three())), "reduction");
        assert_eq!(what(one(Kind::AllGather, None, three(), three())), "output blocks");
        assert_eq!(what(one(Kind::AllReduce, sum, three(), four())), "elements this rank exchanges with itself");
        let short = Blocks::cut(tensor(4), &[1, 2]);
        assert_eq!(
            what(one(Kind::ReduceScatter, sum, short, Blocks::whole(tensor(1)))),
            "elements of the splits together"
        );
        let mut expanded = tensor(4);
        expanded.layout.strides[0] = 0;
        assert_eq!(what(one(Kind::AllReduce, sum, four(), Blocks::whole(expanded))), "output layout");
        assert_eq!(what(Collective { kind: Kind::AllReduce, parts: SmallVec::new() }), "tensors");
    }
}
