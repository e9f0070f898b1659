//! Operations and the memory they touch.

use std::fmt;

use smallvec::SmallVec;

use crate::{DType, Invalid, Layout, Reduction};

/// Which operation. Roots and peers are ranks within the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Every rank ends with the reduction of all inputs.
    AllReduce,
    /// Every rank ends with the root's tensor.
    Broadcast {
        /// The rank whose tensor is sent.
        root: u32,
    },
    /// The root ends with the reduction of all inputs.
    Reduce {
        /// The rank that receives the result.
        root: u32,
    },
    /// Every rank ends with every rank's block; blocks may differ in size.
    AllGather,
    /// Rank r ends with the reduction of every rank's block r; blocks may differ in size.
    ReduceScatter,
    /// Block j of rank i becomes block i of rank j; any size per pair, zero included.
    AllToAll,
    /// The root ends with every rank's block.
    Gather {
        /// The rank that receives.
        root: u32,
    },
    /// Rank r ends with the root's block r.
    Scatter {
        /// The rank that sends.
        root: u32,
    },
    /// Nobody leaves before everybody has entered.
    Barrier,
    /// One tensor to one rank.
    Send {
        /// The receiving rank.
        to: u32,
        /// Matches the receiver's tag.
        tag: u32,
    },
    /// One tensor from one rank, or from whichever sends first.
    Recv {
        /// The sending rank; `None` for any.
        from: Option<u32>,
        /// Matches the sender's tag.
        tag: u32,
    },
}

impl Kind {
    /// The ABI code: all_reduce 0, broadcast 1, reduce 2, all_gather 3, reduce_scatter 4, all_to_all 5, gather 6,
    /// scatter 7, barrier 8, send 9, recv 10.
    pub const fn code(self) -> u8 {
        match self {
            Kind::AllReduce => 0,
            Kind::Broadcast { .. } => 1,
            Kind::Reduce { .. } => 2,
            Kind::AllGather => 3,
            Kind::ReduceScatter => 4,
            Kind::AllToAll => 5,
            Kind::Gather { .. } => 6,
            Kind::Scatter { .. } => 7,
            Kind::Barrier => 8,
            Kind::Send { .. } => 9,
            Kind::Recv { .. } => 10,
        }
    }

    /// Torch's name, e.g. `all_reduce`.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all_reduce",
            Kind::Broadcast { .. } => "broadcast",
            Kind::Reduce { .. } => "reduce",
            Kind::AllGather => "all_gather",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllToAll => "all_to_all",
            Kind::Gather { .. } => "gather",
            Kind::Scatter { .. } => "scatter",
            Kind::Barrier => "barrier",
            Kind::Send { .. } => "send",
            Kind::Recv { .. } => "recv",
        }
    }

    /// The root, for operations that have one.
    pub const fn root(self) -> Option<u32> {
        match self {
            Kind::Broadcast { root } | Kind::Reduce { root } | Kind::Gather { root } | Kind::Scatter { root } => {
                Some(root)
            }
            _ => None,
        }
    }

    /// Send and recv: matched by peer and tag, not by the group's collective sequence.
    pub const fn is_point_to_point(self) -> bool {
        matches!(self, Kind::Send { .. } | Kind::Recv { .. })
    }

    /// Operations that combine elements.
    pub const fn reduces(self) -> bool {
        matches!(self, Kind::AllReduce | Kind::Reduce { .. } | Kind::ReduceScatter)
    }
}

/// One tensor's memory. Whoever posts a collective keeps the memory alive and unmoved until the work is done.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Address of the first element (of the layout's origin, whatever the strides).
    pub data: *mut u8,
    /// Shape and strides.
    pub layout: Layout,
}

// SAFETY: a Tensor is an address plus plain data; the engine that dereferences it upholds exclusive access per region.
unsafe impl Send for Tensor {}
// SAFETY: as above; shared references give no access to the memory behind the address.
unsafe impl Sync for Tensor {}

/// One side (input or output) of a part: tensors, seen as a sequence of blocks, one per rank or just one.
///
/// Either one tensor cut into `counts` consecutive pieces, or as many tensors as counts.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    /// The tensors.
    pub tensors: SmallVec<[Tensor; 1]>,
    /// Elements per block.
    pub counts: SmallVec<[usize; 8]>,
}

impl Blocks {
    /// Nothing.
    pub fn none() -> Self {
        Blocks::default()
    }

    /// One tensor as one block.
    pub fn whole(tensor: Tensor) -> Self {
        let count = tensor.layout.numel().unwrap_or(0);
        Blocks { tensors: SmallVec::from_iter([tensor]), counts: SmallVec::from_slice(&[count]) }
    }

    /// One tensor cut into blocks of these many elements.
    pub fn cut(tensor: Tensor, counts: &[usize]) -> Self {
        Blocks { tensors: SmallVec::from_iter([tensor]), counts: SmallVec::from_slice(counts) }
    }

    /// One block per tensor.
    pub fn list(tensors: impl IntoIterator<Item = Tensor>) -> Self {
        let tensors: SmallVec<[Tensor; 1]> = tensors.into_iter().collect();
        let counts = tensors.iter().map(|tensor| tensor.layout.numel().unwrap_or(0)).collect();
        Blocks { tensors, counts }
    }

    /// Elements over all blocks.
    pub fn total(&self) -> usize {
        self.counts.iter().fold(0usize, |sum, &count| sum.saturating_add(count))
    }
}

/// One tensor set of a collective. Coalesced collectives have several; all share the operation.
#[derive(Clone, Debug)]
pub struct Part {
    /// Element type of every tensor in the part.
    pub dtype: DType,
    /// For operations that reduce.
    pub reduction: Option<Reduction>,
    /// What is read.
    pub inputs: Blocks,
    /// What is written.
    pub outputs: Blocks,
}

/// A request to a group.
#[derive(Clone, Debug)]
pub struct Collective {
    /// The operation.
    pub kind: Kind,
    /// The tensor sets; exactly one but for coalesced operations, none for a barrier.
    pub parts: SmallVec<[Part; 1]>,
}

impl Collective {
    /// Checks everything this rank alone can know. `size` is the group's, `me` this rank within it.
    pub fn validate(&self, me: u32, size: u32) -> Result<(), Invalid> {
        crate::validate::validate(self, me, size)
    }

    /// A 64-bit digest of what must agree on every rank: operation, root, dtype, reduction and its factor, and the
    /// counts that every rank knows (not the splits of an all-to-all, nor gather's and scatter's blocks: those are
    /// checked message by message). Stable across builds and machines.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Fnv::new();
        hash.word(u64::from(self.kind.code()));
        hash.word(self.kind.root().map_or(u64::MAX, u64::from));
        hash.word(self.parts.len() as u64);
        for part in &self.parts {
            hash.word(u64::from(part.dtype as u8));
            match part.reduction {
                Some(Reduction::PreMulSum(factor)) => {
                    hash.word(8);
                    hash.word(factor.to_bits());
                }
                Some(reduction) => hash.word(u64::from(reduction.code())),
                None => hash.word(u64::MAX),
            }
            for &count in self.shared_counts(part) {
                hash.word(count as u64);
            }
        }
        hash.0
    }

    fn shared_counts<'a>(&self, part: &'a Part) -> &'a [usize] {
        match self.kind {
            Kind::AllReduce | Kind::Broadcast { .. } | Kind::Reduce { .. } | Kind::ReduceScatter => &part.inputs.counts,
            Kind::AllGather => &part.outputs.counts,
            _ => &[],
        }
    }

    /// A call that is known by its size: `bytes` is the largest buffer of a rank, rounded up to whole elements, and as many
    /// of every rank where there is a block of each. Its tensors have no memory, so it can't be run. Of messages there
    /// is none.
    pub fn sized(
        kind: Kind,
        dtype: DType,
        reduction: Option<Reduction>,
        bytes: usize,
        members: usize,
    ) -> Option<Collective> {
        let flat = |count: usize| Tensor { data: std::ptr::null_mut(), layout: Layout::flat(count) };
        let one = |count: usize| Blocks::whole(flat(count));
        let count = bytes.div_ceil(dtype.size()).max(1);
        let block = count.div_ceil(members.max(1));
        let all = || Blocks::cut(flat(block * members), &vec![block; members]);
        let (inputs, outputs) = match kind {
            Kind::AllReduce | Kind::Broadcast { .. } | Kind::Reduce { .. } => (one(count), one(count)),
            Kind::AllGather | Kind::Gather { .. } => (one(block), all()),
            Kind::ReduceScatter | Kind::Scatter { .. } => (all(), one(block)),
            Kind::AllToAll => (all(), all()),
            Kind::Barrier => return Some(Collective { kind, parts: SmallVec::new() }),
            Kind::Send { .. } | Kind::Recv { .. } => return None,
        };
        let reduction = reduction.filter(|_| kind.reduces());
        Some(Collective { kind, parts: SmallVec::from_iter([Part { dtype, reduction, inputs, outputs }]) })
    }

    /// Bytes read and written by this rank.
    pub fn bytes(&self) -> (usize, usize) {
        let mut total = (0usize, 0usize);
        for part in &self.parts {
            total.0 = total.0.saturating_add(part.inputs.total().saturating_mul(part.dtype.size()));
            total.1 = total.1.saturating_add(part.outputs.total().saturating_mul(part.dtype.size()));
        }
        total
    }
}

impl fmt::Display for Collective {
    /// What a rank called, for error tables: `all_reduce(SUM, float32, count=1024)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}(", self.kind.name())?;
        let mut comma = "";
        if let Some(root) = self.kind.root() {
            write!(f, "root={root}")?;
            comma = ", ";
        }
        match self.kind {
            Kind::Send { to, tag } => write!(f, "to={to}, tag={tag}, ")?,
            Kind::Recv { from: Some(from), tag } => write!(f, "from={from}, tag={tag}, ")?,
            Kind::Recv { from: None, tag } => write!(f, "from=any, tag={tag}, ")?,
            _ => {}
        }
        for (index, part) in self.parts.iter().enumerate() {
            if index == 8 {
                write!(f, ", … {} tensors in all", self.parts.len())?;
                break;
            }
            f.write_str(comma)?;
            comma = ", ";
            if let Some(reduction) = part.reduction {
                write!(f, "{reduction}, ")?;
            }
            write!(f, "{}, ", part.dtype)?;
            let blocks = if part.inputs.counts.len() > 1 || part.outputs.counts.is_empty() {
                &part.inputs.counts
            } else {
                &part.outputs.counts
            };
            match blocks.as_slice() {
                [] => f.write_str("count=0")?,
                [one] => write!(f, "count={one}")?,
                [first, rest @ ..] if rest.iter().all(|count| count == first) => {
                    write!(f, "count={}x{first}", blocks.len())?;
                }
                many if many.len() <= 16 => write!(f, "counts={many:?}")?,
                many => write!(f, "counts={:?}… of {} ranks", &many[..16], many.len())?,
            }
        }
        f.write_str(")")
    }
}

/// FNV-1a over 64-bit words: small, stable, and good enough to tell calls apart (not against an adversary).
struct Fnv(u64);

impl Fnv {
    fn new() -> Self {
        Fnv(0xcbf2_9ce4_8422_2325)
    }

    fn word(&mut self, word: u64) {
        for byte in word.to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(count: usize) -> Tensor {
        Tensor { data: std::ptr::null_mut(), layout: Layout::flat(count) }
    }

    fn all_reduce(dtype: DType, reduction: Reduction, count: usize) -> Collective {
        Collective {
            kind: Kind::AllReduce,
            parts: SmallVec::from_iter([Part {
                dtype,
                reduction: Some(reduction),
                inputs: Blocks::whole(tensor(count)),
                outputs: Blocks::whole(tensor(count)),
            }]),
        }
    }

    #[test]
    fn fingerprints_tell_what_must_agree() {
        let base = all_reduce(DType::F32, Reduction::Sum, 8).fingerprint();
        assert_eq!(base, all_reduce(DType::F32, Reduction::Sum, 8).fingerprint());
        assert_ne!(base, all_reduce(DType::F32, Reduction::Sum, 9).fingerprint());
        assert_ne!(base, all_reduce(DType::I32, Reduction::Sum, 8).fingerprint());
        assert_ne!(base, all_reduce(DType::F32, Reduction::Max, 8).fingerprint());
        let half = all_reduce(DType::F32, Reduction::PreMulSum(0.5), 8).fingerprint();
        assert_ne!(half, all_reduce(DType::F32, Reduction::PreMulSum(0.25), 8).fingerprint());
        let root = |root| Collective { kind: Kind::Gather { root }, parts: SmallVec::new() }.fingerprint();
        assert_ne!(root(0), root(1));
    }

    #[test]
    fn fingerprint_is_pinned() {
        // Ranks of different builds compare these: a change here is a wire change.
        assert_eq!(all_reduce(DType::F32, Reduction::Sum, 8).fingerprint(), 0xd1d4_fe85_4573_21ff);
    }

    #[test]
    fn display_names_the_call() {
        assert_eq!(all_reduce(DType::BF16, Reduction::Avg, 3).to_string(), "all_reduce(AVG, bfloat16, count=3)");
        let gather = Collective {
            kind: Kind::Gather { root: 2 },
            parts: SmallVec::from_iter([Part {
                dtype: DType::U8,
                reduction: None,
                inputs: Blocks::whole(tensor(1)),
                outputs: Blocks::list([tensor(1), tensor(2)]),
            }]),
        };
        assert_eq!(gather.to_string(), "gather(root=2, uint8, counts=[1, 2])");
    }
}
