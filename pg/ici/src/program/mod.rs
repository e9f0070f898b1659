//! StableHLO text for every collective, in podring's own layout.
//!
//! A [`Spec`] says what is asked; [`build`] writes the program for it. The same spec always gives the same text, so
//! that the text is what a compiled program is known by. A program depends on nothing but the operation, the size
//! class, the groups and (for reductions) the element type: roots of broadcasts, factors of PREMUL_SUM and the splits
//! of an uneven all-to-all are operands.
//!
//! | operation | program | bytes sent by the busiest member of k, V as given |
//! |---|---|---|
//! | all_reduce, reduce | all-reduce, or all-to-all + sum + all-gather ([`route`]) | 2V(k−1)/k |
//! | broadcast | the root's words and zeros elsewhere, all-reduced | 2V(k−1)/k |
//! | all_gather | all-gather, V the input | V(k−1) |
//! | reduce_scatter | reduce-scatter ([`Steps`]: several, one after another), or all-to-all + sum, V the output | V(k−1) |
//! | all_to_all | all-to-all, V the input | V(k−1)/k |
//! | gather, scatter | a binomial tree of permutes, V a block | V(k−1) at the root, less elsewhere |
//! | send/recv | one permute | V |
//!
//! Operations that only move data carry 32-bit words whatever the element type: one program serves every type of the
//! same bytes. A block's bytes are padded to whole rows of 512 bytes.

mod groups;
pub mod layout;
pub mod route;
mod text;

use podring_collective::{DType, Kind, Reduction};

use crate::pjrt::Element;
pub use groups::{Groups, Steps};
use layout::{LANES, TILE, class_rows};
pub use route::{Backend, How, Route, Unsupported};
use text::{Body, Val, tensor};

/// What a program does. Roots and peers are positions in the group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// `all_reduce` and `reduce`: reducing to one costs no less here.
    AllReduce,
    /// `broadcast`; the root is an operand.
    Broadcast,
    /// `all_gather`.
    AllGather,
    /// `reduce_scatter`.
    ReduceScatter,
    /// `all_to_all`, blocks laid out in equal slots.
    AllToAll,
    /// `all_to_all` on flat buffers, in which each block starts on a tile ([`layout::TILE`]); where is an operand.
    AllToAllUneven {
        /// Tiles of the flat input and output: the most that any member has.
        tiles: usize,
    },
    /// `gather`.
    Gather {
        /// Who receives.
        root: u32,
    },
    /// `scatter`.
    Scatter {
        /// Who sends.
        root: u32,
    },
    /// Sends and receives that were agreed on.
    Permute {
        /// From, to; each at most once on either side.
        pairs: Vec<(u32, u32)>,
    },
    /// `barrier`.
    Barrier,
}

/// One tensor set of a program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PartSpec {
    /// Element type.
    pub dtype: DType,
    /// For operations that reduce. The factor of PREMUL_SUM is an operand: its value here is ignored.
    pub reduction: Option<Reduction>,
    /// Elements of a block: of the whole tensor for all_reduce, broadcast and permutes; of one rank's share (the
    /// largest, where shares differ) for the others.
    pub elements: usize,
}

/// What a program is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// The operation.
    pub op: Op,
    /// The tensor sets; one but for coalesced operations, none for a barrier.
    pub parts: Vec<PartSpec>,
    /// Who takes part.
    pub groups: Groups,
    /// Which compiler it is for.
    pub backend: Backend,
    /// Sum 16-bit floats in f32 and round once.
    pub exact: bool,
    /// Mark inputs whose memory may become the output's.
    pub donate: bool,
}

/// What an argument or result is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Blocks of part n, in layout.
    Data(usize),
    /// The root's position in its group, a ui32 scalar.
    Root,
    /// PREMUL_SUM's factor of part n, a scalar of the type that is computed in.
    Factor(usize),
    /// Where each block starts in the flat input of part n: i32[k], in tiles.
    InputStarts(usize),
    /// Where each block starts in the flat output of part n: i32[k], in tiles.
    OutputStarts(usize),
}

/// An argument or result of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// What it is.
    pub role: Role,
    /// Element type.
    pub element: Element,
    /// Extents.
    pub dims: Vec<usize>,
}

impl Port {
    /// Bytes of it.
    pub fn bytes(&self) -> usize {
        self.dims.iter().product::<usize>() * self.element.size()
    }
}

/// A program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// StableHLO.
    pub text: String,
    /// Arguments in order.
    pub inputs: Vec<Port>,
    /// Results in order.
    pub outputs: Vec<Port>,
}

impl Program {
    /// The operation's name.
    pub fn name(&self) -> &str {
        let name = self.text.strip_prefix("module @").and_then(|rest| rest.split(' ').next());
        name.unwrap_or("a program")
    }
}

/// Why there is no program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// No way for this type or reduction.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The groups are no partition into equal parts.
    #[error("replica groups: {reason}")]
    Groups {
        /// What is wrong.
        reason: &'static str,
    },
    /// A position outside the group, or in two pairs.
    #[error("{what} {position} in a group of {size}")]
    Position {
        /// What it is: "root", "peer", "peer named twice".
        what: &'static str,
        /// The position.
        position: u32,
        /// Members of the group.
        size: usize,
    },
    /// An operation that reduces, without a reduction.
    #[error("part {part} needs a reduction")]
    NoReduction {
        /// Index of the part.
        part: usize,
    },
    /// More than XLA's 32-bit indices reach.
    #[error("{tiles} tiles of a flat all-to-all are more than 2^31 - 1")]
    TooLarge {
        /// The tiles that came.
        tiles: usize,
    },
}

impl Op {
    /// The program operation of a collective whose blocks are laid out in slots; none for point-to-point operations,
    /// whose pairs only the engine knows.
    pub fn of(kind: Kind) -> Option<Op> {
        Some(match kind {
            Kind::AllReduce | Kind::Reduce { .. } => Op::AllReduce,
            Kind::Broadcast { .. } => Op::Broadcast,
            Kind::AllGather => Op::AllGather,
            Kind::ReduceScatter => Op::ReduceScatter,
            Kind::AllToAll => Op::AllToAll,
            Kind::Gather { root } => Op::Gather { root },
            Kind::Scatter { root } => Op::Scatter { root },
            Kind::Barrier => Op::Barrier,
            Kind::Send { .. } | Kind::Recv { .. } => return None,
        })
    }

    fn name(&self) -> &'static str {
        match self {
            Op::AllReduce => "all_reduce",
            Op::Broadcast => "broadcast",
            Op::AllGather => "all_gather",
            Op::ReduceScatter => "reduce_scatter",
            Op::AllToAll => "all_to_all",
            Op::AllToAllUneven { .. } => "all_to_all_uneven",
            Op::Gather { .. } => "gather",
            Op::Scatter { .. } => "scatter",
            Op::Permute { .. } => "permute",
            Op::Barrier => "barrier",
        }
    }
}

/// A program's signature and body under construction.
struct Draft<'a> {
    spec: &'a Spec,
    body: Body<'a>,
    inputs: Vec<Port>,
    outputs: Vec<(Role, Val)>,
}

impl Draft<'_> {
    fn input(&mut self, role: Role, element: Element, dims: &[usize]) -> Val {
        let name = format!("%arg{}", self.inputs.len());
        self.inputs.push(Port { role, element, dims: dims.to_vec() });
        Val { name, element, dims: dims.to_vec() }
    }

    fn output(&mut self, part: usize, value: Val) {
        self.outputs.push((Role::Data(part), value));
    }

    fn finish(self) -> Program {
        let Draft { spec, body, inputs, outputs } = self;
        let mut donated = vec![false; outputs.len()];
        let arguments: Vec<String> = inputs
            .iter()
            .enumerate()
            .map(|(index, port)| {
                let target = outputs.iter().position(|(role, value)| {
                    spec.donate && *role == port.role && value.element == port.element && value.dims == port.dims
                });
                let alias = match target {
                    Some(target) if !donated[target] => {
                        donated[target] = true;
                        format!(" {{tf.aliasing_output = {target} : i32}}")
                    }
                    _ => String::new(),
                };
                format!("%arg{index}: {}{alias}", tensor(port.element, &port.dims))
            })
            .collect();
        let types: Vec<String> = outputs.iter().map(|(_, value)| value.ty()).collect();
        let names: Vec<&str> = outputs.iter().map(|(_, value)| value.name.as_str()).collect();
        let text = format!(
            "module @{} attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {} : i32}} {{\n  \
             func.func public @main({}) -> ({}) {{\n{}    return {} : {}\n  }}\n}}\n",
            spec.op.name(),
            spec.groups.replicas(),
            arguments.join(", "),
            types.join(", "),
            body.finish(),
            names.join(", "),
            types.join(", ")
        );
        let outputs =
            outputs.into_iter().map(|(role, value)| Port { role, element: value.element, dims: value.dims }).collect();
        Program { text, inputs, outputs }
    }
}

/// Writes the program.
pub fn build(spec: &Spec) -> Result<Program, ProgramError> {
    let mut draft = Draft { spec, body: Body::new(&spec.groups), inputs: Vec::new(), outputs: Vec::new() };
    if spec.op == Op::Barrier {
        let one = draft.input(Role::Data(0), Element::U32, &[]);
        let count = draft.body.all_reduce(&one, "add");
        draft.output(0, count);
        return Ok(draft.finish());
    }
    let root = (spec.op == Op::Broadcast).then(|| {
        let root = draft.input(Role::Root, Element::U32, &[]);
        let positions = spec.groups.positions();
        let position = draft.body.by_replica(&positions);
        draft.body.compare("EQ", "UNSIGNED", &position, &root)
    });
    for (index, part) in spec.parts.iter().enumerate() {
        match &spec.op {
            Op::AllReduce | Op::ReduceScatter => reduction(&mut draft, index, part)?,
            Op::AllToAllUneven { tiles } => uneven(&mut draft, index, part, *tiles)?,
            op => movement(&mut draft, index, part, op, root.as_ref())?,
        }
    }
    Ok(draft.finish())
}

fn reduction(draft: &mut Draft, index: usize, part: &PartSpec) -> Result<(), ProgramError> {
    let reduction = part.reduction.ok_or(ProgramError::NoReduction { part: index })?;
    let mut route = route::reduce(part.dtype, reduction, draft.spec.backend, draft.spec.exact)?;
    let members = draft.spec.groups.size();
    let scatter = draft.spec.op == Op::ReduceScatter;
    if scatter && draft.spec.backend == Backend::Tpu && members > 1 && members % 2 == 1 {
        // libtpu: "AllReduce fusion with 3 sized replica_groups, which is odd and greater than one".
        route.how = How::Exchange;
    }
    let (blocks, elements) = match route.how {
        How::Native if !scatter => (1, part.elements),
        How::Exchange if !scatter => (members, part.elements.div_ceil(members)),
        _ => (members, part.elements),
    };
    let rows = class_rows(elements, route.wire.size());
    let input = draft.input(Role::Data(index), route.wire, &[blocks, rows, LANES]);
    let factor = route.factor.then(|| draft.input(Role::Factor(index), route.compute, &[]));
    let body = &mut draft.body;
    let scale = |body: &mut Body, value: Val| match &factor {
        Some(factor) => {
            let spread = body.spread(factor, &value.dims);
            body.binary("multiply", &value, &spread)
        }
        None => value,
    };
    let divide = |body: &mut Body, value: Val| {
        if !route.divide {
            return value;
        }
        let literal = match value.element {
            Element::C64 | Element::C128 => format!("({members}.0, 0.0)"),
            Element::F16 | Element::Bf16 | Element::F32 | Element::F64 => format!("{members}.0"),
            _ => members.to_string(),
        };
        let count = body.constant(&literal, value.element, &value.dims);
        body.binary("divide", &value, &count)
    };
    let output = match route.how {
        How::Native => {
            let scaled = scale(body, input);
            let (width, bytes) = (scaled.element.size(), scaled.dims.iter().product::<usize>() * scaled.element.size());
            // libtpu takes 64-bit types apart.
            let steps = draft.spec.groups.steps.as_ref().filter(|steps| width <= 4 && steps.serve(bytes as u64));
            let reduced = match steps {
                Some(steps) if scatter => in_steps(body, scaled, steps, route.combine),
                _ if scatter => body.reduce_scatter(&scaled, route.combine, &draft.spec.groups.groups),
                _ => body.all_reduce(&scaled, route.combine),
            };
            divide(body, reduced)
        }
        How::Exchange => {
            let exchanged = body.all_to_all(&input);
            let wide = body.convert(&exchanged, route.compute);
            let scaled = scale(body, wide);
            let reduced = match (route.combine, route.compute) {
                ("minimum" | "maximum", Element::F16 | Element::Bf16 | Element::F32 | Element::F64) => {
                    let extreme = body.reduce(&scaled, route.combine);
                    let is_nan = body.compare("NE", "FLOAT", &scaled, &scaled);
                    let any_nan = body.reduce(&is_nan, "or");
                    let nan = body.constant(route::nan(route.compute), route.compute, &extreme.dims);
                    body.select(&any_nan, &nan, &extreme)
                }
                _ => body.reduce(&scaled, route.combine),
            };
            let divided = divide(body, reduced);
            let narrow = body.convert(&divided, route.wire);
            let block = body.reshape(&narrow, &[1, rows, LANES]);
            if scatter { block } else { body.all_gather(&block) }
        }
    };
    draft.output(index, output);
    Ok(())
}

/// After each step a member holds fewer blocks, summed over more members; the last block goes where it belongs.
fn in_steps(body: &mut Body, blocks: Val, steps: &Steps, combine: &str) -> Val {
    let step = |held: Val, groups: &Vec<Vec<u32>>| body.reduce_scatter(&held, combine, groups);
    let block = steps.groups.iter().fold(blocks, step);
    if steps.moves.is_empty() { block } else { body.permute(&block, &steps.moves) }
}

fn movement(
    draft: &mut Draft,
    index: usize,
    part: &PartSpec,
    op: &Op,
    is_root: Option<&Val>,
) -> Result<(), ProgramError> {
    let members = draft.spec.groups.size();
    let rows = class_rows((part.elements * part.dtype.size()).div_ceil(4), 4);
    let block = [1, rows, LANES];
    let blocks = [members, rows, LANES];
    let role = Role::Data(index);
    let outside = |what, position: u32| ProgramError::Position { what, position, size: members };
    let output = match op {
        Op::Broadcast => {
            let input = draft.input(role, Element::U32, &block);
            let body = &mut draft.body;
            let zero = body.constant("0", Element::U32, &block);
            let own = match is_root {
                Some(is_root) => {
                    let everywhere = body.spread(is_root, &block);
                    body.select(&everywhere, &input, &zero)
                }
                None => input,
            };
            body.all_reduce(&own, "add")
        }
        Op::AllGather => {
            let input = draft.input(role, Element::U32, &block);
            draft.body.all_gather(&input)
        }
        Op::AllToAll => {
            let input = draft.input(role, Element::U32, &blocks);
            draft.body.all_to_all(&input)
        }
        Op::Gather { root } | Op::Scatter { root } if *root as usize >= members => {
            return Err(outside("root", *root));
        }
        Op::Gather { root } => {
            let input = draft.input(role, Element::U32, &block);
            gather(draft, input, *root)
        }
        Op::Scatter { root } => {
            let input = draft.input(role, Element::U32, &blocks);
            scatter(draft, input, *root)
        }
        Op::Permute { pairs } => {
            let (mut sources, mut targets) = (vec![false; members], vec![false; members]);
            for &(source, target) in pairs {
                for (seen, peer) in [(&mut sources, source), (&mut targets, target)] {
                    match seen.get_mut(peer as usize) {
                        None => return Err(outside("peer", peer)),
                        Some(true) => return Err(outside("peer named twice:", peer)),
                        Some(seen) => *seen = true,
                    }
                }
            }
            let input = draft.input(role, Element::U32, &block);
            let everywhere = in_every_group(&draft.spec.groups, pairs);
            draft.body.permute(&input, &everywhere)
        }
        // The callers handle these.
        Op::AllReduce | Op::ReduceScatter | Op::AllToAllUneven { .. } | Op::Barrier => return Ok(()),
    };
    draft.output(index, output);
    Ok(())
}

/// Pairs of positions as pairs of replicas, in every group.
fn in_every_group(groups: &Groups, pairs: &[(u32, u32)]) -> Vec<(u32, u32)> {
    let of = |group: &[u32], (source, target): (u32, u32)| (group[source as usize], group[target as usize]);
    groups.groups.iter().flat_map(|group| pairs.iter().map(|&pair| of(group, pair))).collect()
}

/// Senders and receivers of a binomial tree's step, as positions: member `root + step + i·2·step` and its parent.
fn tree_step(members: usize, root: u32, step: usize) -> Vec<(u32, u32)> {
    let position = |relative: usize| ((relative + root as usize) % members) as u32;
    (step..members).step_by(2 * step).map(|child| (position(child), position(child - step))).collect()
}

/// Steps of the tree: 1, 2, 4, … below the number of members.
fn tree_steps(members: usize) -> Vec<usize> {
    std::iter::successors(Some(1), |step| Some(step * 2)).take_while(|&step| step < members).collect()
}

/// Blocks from as many bytes on are moved along a tree one by one, in a loop. Several at once would be padded, joined and
/// cut by code that grows with their size: 64 MiB among 16 took libtpu 1.8 s and 2.3 MiB of code, in a loop a quarter.
const PIECE: usize = 256 << 10;

fn in_pieces(block: &Val) -> bool {
    block.dims[1..].iter().product::<usize>() * block.element.size() >= PIECE
}

/// Where a tree's block lies that is the `relative`-th from the root on: at its member's position.
fn place(body: &mut Body, relative: &Val, from: usize, members: usize) -> Val {
    let number = |body: &mut Body, value: usize| body.constant(&value.to_string(), Element::S32, &[]);
    let (from, members) = (number(body, from % members), number(body, members));
    let place = body.binary("add", relative, &from);
    body.binary("remainder", &place, &members)
}

/// [`gather`] block by block: each member keeps those it holds where the root will have them.
fn gather_pieces(draft: &mut Draft, input: &Val, root: usize) -> Val {
    let groups = &draft.spec.groups;
    let members = groups.size();
    let body = &mut draft.body;
    let mut dims = input.dims.clone();
    dims[0] = members;
    let nothing = body.constant("0", input.element, &dims);
    let own = body.constant(&root.to_string(), Element::S32, &[]);
    let mut held = body.dynamic_update_slice(&nothing, input, &own);
    for step in tree_steps(members) {
        let pairs = in_every_group(groups, &tree_step(members, root as u32, step));
        // Who receives nothing writes zeros where it holds nothing, or no longer needs it.
        held = body.repeat(step.min(members - step), &held, |body, index, held| {
            let from = place(body, index, root, members);
            let block = body.dynamic_slice(held, &from, 1);
            let received = body.permute(&block, &pairs);
            let to = place(body, index, root + step, members);
            body.dynamic_update_slice(held, &received, &to)
        });
    }
    held
}

/// [`scatter`] block by block.
fn scatter_pieces(draft: &mut Draft, input: &Val, root: usize) -> Val {
    let groups = &draft.spec.groups;
    let members = groups.size();
    let positions = groups.positions();
    let body = &mut draft.body;
    let mut held = input.clone();
    for &step in tree_steps(members).iter().rev() {
        let down = upside_down(tree_step(members, root as u32, step));
        let takes = receives(body, &positions, &down);
        let pairs = in_every_group(groups, &down);
        held = body.repeat(step.min(members - step), &held, |body, index, held| {
            let from = place(body, index, root + step, members);
            let block = body.dynamic_slice(held, &from, 1);
            let received = body.permute(&block, &pairs);
            let to = place(body, index, root, members);
            let own = body.dynamic_slice(held, &to, 1);
            let takes = body.spread(&takes, &own.dims);
            let kept = body.select(&takes, &received, &own);
            body.dynamic_update_slice(held, &kept, &to)
        });
    }
    body.slice(&held, root, root + 1)
}

/// Every child hands all it holds to its parent, which appends it: the root ends with all blocks, itself first.
fn gather(draft: &mut Draft, input: Val, root: u32) -> Val {
    if in_pieces(&input) {
        return gather_pieces(draft, &input, root as usize);
    }
    let groups = &draft.spec.groups;
    let members = groups.size();
    let body = &mut draft.body;
    let mut held = input;
    for step in tree_steps(members) {
        let pairs = in_every_group(groups, &tree_step(members, root, step));
        let received = body.permute(&held, &pairs);
        held = body.concatenate(&[held, received]);
    }
    rotate(body, &held, members, (members - root as usize) % members)
}

/// Parents and children instead of children and parents.
fn upside_down(step: Vec<(u32, u32)>) -> Vec<(u32, u32)> {
    step.into_iter().map(|(child, parent)| (parent, child)).collect()
}

/// Whether this replica's position is a target.
fn receives(body: &mut Body, positions: &[u32], pairs: &[(u32, u32)]) -> Val {
    let is_target: Vec<u32> =
        positions.iter().map(|&position| u32::from(pairs.iter().any(|&(_, target)| target == position))).collect();
    let target = body.by_replica(&is_target);
    let one = body.constant("1", Element::U32, &[]);
    body.compare("EQ", "UNSIGNED", &target, &one)
}

/// The mirror of [`gather`]: whoever holds several blocks hands the upper half on.
fn scatter(draft: &mut Draft, input: Val, root: u32) -> Val {
    if in_pieces(&input) {
        return scatter_pieces(draft, &input, root as usize);
    }
    let groups = &draft.spec.groups;
    let members = groups.size();
    let positions = groups.positions();
    let body = &mut draft.body;
    let steps = tree_steps(members);
    let places = 1 << steps.len();
    let mut held = rotate(body, &input, members, root as usize);
    if places > members {
        let mut dims = held.dims.clone();
        dims[0] = places - members;
        let nobody = body.constant("0", Element::U32, &dims);
        held = body.concatenate(&[held, nobody]);
    }
    for &step in steps.iter().rev() {
        let lower = body.slice(&held, 0, step);
        let upper = body.slice(&held, step, 2 * step);
        let down = upside_down(tree_step(members, root, step));
        let received = body.permute(&upper, &in_every_group(groups, &down));
        let takes = receives(body, &positions, &down);
        let takes = body.spread(&takes, &lower.dims);
        held = body.select(&takes, &received, &lower);
    }
    held
}

/// The first `members` blocks, starting with block `first`.
fn rotate(body: &mut Body, value: &Val, members: usize, first: usize) -> Val {
    if first == 0 {
        return if value.dims[0] == members { value.clone() } else { body.slice(value, 0, members) };
    }
    let back = body.slice(value, first, members);
    let front = body.slice(value, 0, first);
    body.concatenate(&[back, front])
}

/// Blocks lie one after another in flat buffers, each from a tile's beginning; where they start is an operand, so that no
/// split compiles again. Starts count along a dimension of their own: cut at any element instead, 64 MiB took libtpu
/// 14 s. Blocks are cut out and put in by loops: one after another in the text, those of 16 members took libtpu 1.5 s and
/// 2.5 MiB of code, in loops a tenth.
///
/// Each block travels in a slot of the largest block's class. Blocks are unpacked in order of their start, so that the
/// padding behind one is overwritten by the next.
fn uneven(draft: &mut Draft, index: usize, part: &PartSpec, tiles: usize) -> Result<(), ProgramError> {
    let members = draft.spec.groups.size();
    let per_tile = TILE / 4 / LANES;
    let slot = class_rows((part.elements * part.dtype.size()).div_ceil(4), 4) / per_tile;
    if i32::try_from(tiles.saturating_add(slot)).is_err() {
        return Err(ProgramError::TooLarge { tiles: tiles.saturating_add(slot) });
    }
    let flat = class_rows(tiles * TILE / 4, 4) / per_tile;
    let shape = |tiles: usize| [tiles, per_tile, LANES];
    let input = draft.input(Role::Data(index), Element::U32, &shape(flat));
    let from = draft.input(Role::InputStarts(index), Element::S32, &[members]);
    let to = draft.input(Role::OutputStarts(index), Element::S32, &[members]);
    let body = &mut draft.body;
    // Padding, so that a slot read or written at the end isn't moved inwards.
    let room = body.constant("0", Element::U32, &shape(slot));
    let padded = body.concatenate(&[input, room]);
    let width = body.constant(&slot.to_string(), Element::S32, &[]);
    let nothing = body.constant("0", Element::U32, &shape(members * slot));
    let laid = body.repeat(members, &nothing, |body, member, laid| {
        let start = body.entry(&from, member);
        let block = body.dynamic_slice(&padded, &start, slot);
        let place = body.binary("multiply", member, &width);
        body.dynamic_update_slice(laid, &block, &place)
    });
    let laid = body.reshape(&laid, &[members, slot * per_tile, LANES]);
    let exchanged = body.all_to_all(&laid);
    let exchanged = body.reshape(&exchanged, &shape(members * slot));
    let nothing = body.constant("0", Element::U32, &shape(flat + slot));
    let out = body.repeat(members, &nothing, |body, member, out| {
        let start = body.entry(&to, member);
        let place = body.binary("multiply", member, &width);
        let block = body.dynamic_slice(&exchanged, &place, slot);
        body.dynamic_update_slice(out, &block, &start)
    });
    let output = body.slice(&out, 0, flat);
    draft.output(index, output);
    Ok(())
}

#[cfg(test)]
mod tests;
