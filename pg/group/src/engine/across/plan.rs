//! What a collective of a group over several slices is made of, as one rank has it. Pure: it reckons with addresses and
//! counts, and touches no memory but what it makes.

use std::collections::VecDeque;

use podring_collective::{Blocks, Collective, Kind, Part, Reduction, Tensor};
use smallvec::SmallVec;

use crate::engine::device::flat;

/// One thing to do.
pub(super) enum Step {
    Inside(Box<Collective>),
    Between(Box<Collective>),
    /// Over the fabric among all members.
    Host(Box<Collective>),
    Local(Box<dyn FnOnce() + Send>),
}

/// Address and elements of each block of a side.
fn blocks(side: &Blocks, width: usize) -> Vec<(usize, usize)> {
    if let [tensor] = &side.tensors[..] {
        let mut at = tensor.data as usize;
        let place = |&count: &usize| {
            let block = (at, count);
            at += count * width;
            block
        };
        return side.counts.iter().map(place).collect();
    }
    side.tensors.iter().zip(&side.counts).map(|(tensor, &count)| (tensor.data as usize, count)).collect()
}

/// What a reduction is inside a slice, and what between slices.
fn halves(reduction: Reduction) -> (Reduction, Reduction) {
    match reduction {
        Reduction::PreMulSum(_) => (reduction, Reduction::Sum),
        other => (other, other),
    }
}

fn part(like: &Part, reduction: Option<Reduction>, inputs: Blocks, outputs: Blocks) -> Part {
    Part { dtype: like.dtype, reduction, inputs, outputs }
}

/// Copies of (from, to, bytes), made when their time comes.
fn moves(list: Vec<(usize, usize, usize)>) -> Step {
    Step::Local(Box::new(move || {
        for (from, to, bytes) in list {
            // SAFETY: from the caller's tensors to memory of the job or the other way: both are alive until the operation
            // has ended, and they don't overlap.
            unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        }
    }))
}

/// Where this rank is among the slices.
pub(super) struct Plan {
    /// Positions in the group of each slice's members; as many in each.
    slices: Vec<Vec<u32>>,
    /// This rank: which slice of those, and which member of it.
    slice: usize,
    me: usize,
}

impl Plan {
    /// For member `me` of slice `slice`.
    pub fn new(slices: Vec<Vec<u32>>, slice: usize, me: usize) -> Plan {
        Plan { slices, slice, me }
    }

    /// Positions in the group of this slice's members.
    pub fn within(&self) -> &[u32] {
        &self.slices[self.slice]
    }

    /// Positions in the group of this rank's counterparts, itself among them: one of each slice.
    pub fn counterparts(&self) -> impl ExactSizeIterator<Item = u32> {
        self.slices.iter().map(|members| members[self.me])
    }

    /// This rank's position in the group.
    pub fn position(&self) -> u32 {
        self.slices[self.slice][self.me]
    }

    /// The slice and member of a position in the group.
    fn place(&self, position: u32) -> (usize, usize) {
        let find = |members: &Vec<u32>| members.iter().position(|&other| other == position);
        self.slices.iter().enumerate().find_map(|(slice, members)| Some((slice, find(members)?))).unwrap_or((0, 0))
    }

    /// What a collective is made of. Tensors are plain.
    pub fn steps(&self, call: &Collective, memory: &mut Vec<Vec<u64>>) -> VecDeque<Step> {
        if self.slices.len() == 1 {
            return VecDeque::from([Step::Inside(Box::new(call.clone()))]);
        }
        let integers = |part: &Part| part.reduction == Some(Reduction::Avg) && !part.dtype.is_floating();
        let kind = call.kind;
        let alone = matches!(
            kind,
            Kind::AllToAll | Kind::Gather { .. } | Kind::Scatter { .. } | Kind::Send { .. } | Kind::Recv { .. }
        );
        if alone || call.parts.iter().any(integers) {
            return VecDeque::from([Step::Host(Box::new(call.clone()))]);
        }
        let (k, me) = (self.within().len(), self.me);
        let mut room = |part: &Part, count: usize| -> Tensor {
            memory.push(vec![0u64; (count * part.dtype.size()).div_ceil(8)]);
            let last = memory.len() - 1;
            flat(&mut memory[last], 0, count, part.dtype)
        };
        let mut lists: [SmallVec<[Part; 1]>; 3] = Default::default();
        let (mut before, mut after) = (Vec::new(), Vec::new());
        // The kinds of the three steps; none where this rank has none.
        let kinds: [Option<Kind>; 3] = match kind {
            Kind::AllReduce | Kind::Reduce { .. } => {
                let root = kind.root().map(|root| self.place(root));
                for one in &call.parts {
                    let count = one.inputs.total();
                    let piece = count.div_ceil(k);
                    let counts: Vec<usize> = (0..k).map(|i| count.saturating_sub(i * piece).min(piece)).collect();
                    let shard = room(one, counts[me]);
                    let (inside, between) = one.reduction.map(halves).unzip();
                    let input = Blocks::cut(one.inputs.tensors[0].clone(), &counts);
                    lists[0].push(part(one, inside, input, Blocks::whole(shard.clone())));
                    let here = root.is_none_or(|(slice, _)| slice == self.slice);
                    let outputs = if here { Blocks::whole(shard.clone()) } else { Blocks::none() };
                    lists[1].push(part(one, between, Blocks::whole(shard.clone()), outputs));
                    let whole = match root {
                        Some(place) if place != (self.slice, me) => Blocks::none(),
                        _ => Blocks::cut(one.outputs.tensors[0].clone(), &counts),
                    };
                    lists[2].push(part(one, None, Blocks::whole(shard), whole));
                }
                match root {
                    None => [Some(Kind::ReduceScatter), Some(Kind::AllReduce), Some(Kind::AllGather)],
                    Some((slice, member)) => [
                        Some(Kind::ReduceScatter),
                        Some(Kind::Reduce { root: slice as u32 }),
                        (slice == self.slice).then_some(Kind::Gather { root: member as u32 }),
                    ],
                }
            }
            Kind::Broadcast { root } => {
                let (slice, member) = self.place(root);
                for one in &call.parts {
                    lists[1].push(one.clone());
                    let output = || Blocks::whole(one.outputs.tensors[0].clone());
                    lists[2].push(part(one, None, output(), output()));
                }
                [
                    None,
                    (member == me).then_some(Kind::Broadcast { root: slice as u32 }),
                    Some(Kind::Broadcast { root: member as u32 }),
                ]
            }
            Kind::AllGather | Kind::ReduceScatter => {
                let gathers = kind == Kind::AllGather;
                for one in &call.parts {
                    let width = one.dtype.size();
                    let whole = if gathers { &one.outputs } else { &one.inputs };
                    let column = |i: usize| -> Vec<usize> {
                        self.slices.iter().map(|members| whole.counts[members[i] as usize]).collect()
                    };
                    let sums: Vec<usize> = (0..k).map(|i| column(i).iter().sum()).collect();
                    let mine = room(one, sums[me]);
                    let all = room(one, sums.iter().sum());
                    let places = blocks(whole, width);
                    let mut at = all.data as usize;
                    for i in 0..k {
                        for members in &self.slices {
                            let (address, count) = places[members[i] as usize];
                            let bytes = count * width;
                            if gathers {
                                after.push((at, address, bytes));
                            } else {
                                before.push((address, at, bytes));
                            }
                            at += bytes;
                        }
                    }
                    let (inside, between) = one.reduction.map(halves).unzip();
                    if gathers {
                        lists[1].push(part(one, None, one.inputs.clone(), Blocks::cut(mine.clone(), &column(me))));
                        lists[2].push(part(one, None, Blocks::whole(mine), Blocks::cut(all, &sums)));
                    } else {
                        lists[0].push(part(one, inside, Blocks::cut(all, &sums), Blocks::whole(mine.clone())));
                        lists[1].push(part(one, between, Blocks::cut(mine, &column(me)), one.outputs.clone()));
                    }
                }
                if gathers {
                    [None, Some(Kind::AllGather), Some(Kind::AllGather)]
                } else {
                    [Some(Kind::ReduceScatter), Some(Kind::ReduceScatter), None]
                }
            }
            _ => [Some(Kind::Barrier); 3],
        };
        let mut steps = VecDeque::new();
        if !before.is_empty() {
            steps.push_back(moves(before));
        }
        for (index, (kind, parts)) in kinds.into_iter().zip(lists).enumerate() {
            let Some(kind) = kind else { continue };
            let collective = Box::new(Collective { kind, parts });
            steps.push_back(if index == 1 { Step::Between(collective) } else { Step::Inside(collective) });
        }
        if !after.is_empty() {
            steps.push_back(moves(after));
        }
        steps
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
