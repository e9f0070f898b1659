//! One collective of a program, read from its HLO: which ranks meet, what they exchange, and where each block lies.
//!
//! Pure: no plugin, no group. Whatever isn't fully understood is refused, since a collective that is run wrong gives
//! wrong numbers and no error.

use podring_collective::{Blocks, Collective, DType, Kind, Layout, Part, Reduction, Tensor};

use crate::hlo::{Instruction, Module, Shape};

/// The program's participants: replica `r`, partition `p` is the rank at `r * partitions + p`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    pub replicas: usize,
    pub partitions: usize,
    pub ranks: Vec<u32>,
}

/// A dense array in row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    pub dtype: DType,
    pub dims: Vec<i64>,
}

/// What the members of a group do.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    AllReduce(Reduction),
    /// Blocks lie one after another along this axis of the result.
    AllGather(usize),
    /// Blocks lie one after another along this axis of the operand.
    ReduceScatter(Reduction, usize),
    /// One array, cut along this axis.
    AllToAll(usize),
    /// One array for each member.
    Exchange,
    /// Rows of an array to each member, as many as the program computes: operand, what the result holds before, and for
    /// each member where its rows begin, how many they are, where they go to in its result, and how many come from it.
    Ragged,
    /// Whom each rank sends to and receives from; who receives nothing gets zeros.
    Permute(Vec<(u32, u32)>),
}

/// A collective of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub what: What,
    /// Ranks that meet, in the order of their blocks. Every rank is in one.
    pub groups: Vec<Vec<u32>>,
    pub inputs: Vec<Array>,
    pub outputs: Vec<Array>,
}

/// Why a collective can't be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{opcode} ({name}): {why}")]
pub struct Refused {
    /// HLO's name of the operation.
    pub opcode: String,
    /// The instruction.
    pub name: String,
    /// What about it.
    pub why: String,
}

/// Opcodes that make ranks meet.
pub const COLLECTIVES: &[&str] = &[
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
    "all-reduce-start",
    "all-gather-start",
    "collective-permute-start",
    "async-start",
    "send",
    "recv",
];

impl Array {
    fn of(shape: Option<&Shape>) -> Option<Array> {
        let (dtype, dims) = shape?.array()?;
        dims.iter().all(|&dim| dim >= 0).then(|| Array { dtype, dims: dims.to_vec() })
    }

    /// Its arrays, if it is a tuple of them, else itself.
    fn list(shape: Option<&Shape>) -> Option<Vec<Array>> {
        match shape {
            Some(shape) if !shape.tuple.is_empty() => shape.tuple.iter().map(|one| Array::of(Some(one))).collect(),
            one => Some(vec![Array::of(one)?]),
        }
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.dims.iter().map(|&dim| dim as usize).product::<usize>() * self.dtype.size()
    }

    /// The block `index` of `count` along `axis`, within memory that starts at `data`.
    fn block(&self, data: *mut u8, axis: usize, index: usize, count: usize) -> Tensor {
        let mut strides = vec![1i64; self.dims.len()];
        for axis in (1..self.dims.len()).rev() {
            strides[axis - 1] = strides[axis] * self.dims[axis].max(1);
        }
        let mut sizes = self.dims.clone();
        sizes[axis] /= count as i64;
        let start = index as i64 * sizes[axis] * strides[axis];
        Tensor {
            data: data.wrapping_offset(start as isize * self.dtype.size() as isize),
            layout: Layout { sizes: sizes.into(), strides: strides.into(), conj: false, neg: false },
        }
    }

    fn whole(&self, data: *mut u8) -> Tensor {
        let count = self.dims.iter().map(|&dim| dim as usize).product();
        Tensor { data, layout: Layout::flat(count) }
    }
}

/// Reads a collective.
pub fn read(module: &Module, entry: &[Instruction], one: &Instruction, mesh: &Mesh) -> Result<Step, Refused> {
    let refused = |why: String| Refused { opcode: one.opcode.clone(), name: one.name.clone(), why };
    let inputs: Option<Vec<Array>> = one
        .operand_ids
        .iter()
        .map(|&id| Array::of(entry.iter().find(|other| other.id == id)?.shape.as_ref()))
        .collect();
    let (Some(inputs), Some(outputs)) = (inputs, Array::list(one.shape.as_ref())) else {
        return Err(refused("an operand or result is no dense array of a type that collectives know".to_owned()));
    };
    let axis = |array: &Array| match one.dimensions[..] {
        [axis] if axis >= 0 && (axis as usize) < array.dims.len() => Ok(axis as usize),
        _ => Err(refused(format!("expected one dimension of {:?}, got {:?}", array.dims, one.dimensions))),
    };
    let single = || match (&inputs[..], &outputs[..]) {
        ([input], [output]) => Ok((input, output)),
        _ => Err(refused(format!("expected one operand and one result, got {} and {}", inputs.len(), outputs.len()))),
    };
    let reduction = || {
        reduction(module, one)
            .ok_or_else(|| refused("its reduction is none of sum, product, minimum, maximum, and, or, xor".to_owned()))
    };
    let members = |groups: &[Vec<u32>]| groups.first().map_or(1, Vec::len) as i64;
    let groups = groups(one, mesh).map_err(refused)?;
    let n = members(&groups);
    let what = match one.opcode.as_str() {
        "all-reduce" => {
            if inputs != outputs {
                return Err(refused("operands and results differ in shape".to_owned()));
            }
            What::AllReduce(reduction()?)
        }
        "all-gather" => {
            let (input, output) = single()?;
            let axis = axis(output)?;
            scaled(input, output, axis, n).map_err(refused)?;
            What::AllGather(axis)
        }
        "reduce-scatter" => {
            let (input, output) = single()?;
            let axis = axis(input)?;
            scaled(output, input, axis, n).map_err(refused)?;
            What::ReduceScatter(reduction()?, axis)
        }
        "all-to-all" if one.dimensions.is_empty() => {
            let equal = inputs.iter().chain(&outputs).all(|array| *array == inputs[0]);
            if inputs.len() as i64 != n || outputs.len() as i64 != n || !equal {
                return Err(refused(format!("expected {n} equal operands and results, one for each member")));
            }
            What::Exchange
        }
        "all-to-all" => {
            let (input, output) = single()?;
            let axis = axis(input)?;
            if input != output || input.dims[axis] % n != 0 {
                return Err(refused(format!("dimension {axis} of {:?} doesn't divide over {n} members", input.dims)));
            }
            What::AllToAll(axis)
        }
        "ragged-all-to-all" => {
            let [given, before, numbers @ ..] = &inputs[..] else {
                return Err(refused(format!("expected six operands, got {}", inputs.len())));
            };
            let listed = |array: &Array| matches!(array.dtype, DType::I32 | DType::I64) && array.dims == [n];
            let rows = !given.dims.is_empty() && given.dims.len() == before.dims.len();
            let alike = rows && given.dtype == before.dtype && given.dims[1..] == before.dims[1..];
            if numbers.len() != 4 || !numbers.iter().all(listed) || !alike || outputs != [before.clone()] {
                return Err(refused(format!(
                    "expected two arrays of rows of one shape, and four lists of {n} whole numbers"
                )));
            }
            What::Ragged
        }
        "collective-permute" => {
            let (input, output) = single()?;
            if input != output {
                return Err(refused("operand and result differ in shape".to_owned()));
            }
            What::Permute(pairs(one, mesh).map_err(refused)?)
        }
        _ => return Err(refused("this collective can't be run on a virtual slice".to_owned())),
    };
    if let What::AllReduce(reduction) | What::ReduceScatter(reduction, _) = what
        && let Some(array) = inputs.iter().find(|array| !reduction.supports(array.dtype))
    {
        return Err(refused(format!("{reduction} of {} can't be computed", array.dtype)));
    }
    Ok(Step { what, groups, inputs, outputs })
}

/// `large` is `small` with `axis` `times` as long.
fn scaled(small: &Array, large: &Array, axis: usize, times: i64) -> Result<(), String> {
    let mut expected = small.clone();
    if let Some(dim) = expected.dims.get_mut(axis) {
        *dim *= times;
    }
    if expected == *large {
        Ok(())
    } else {
        Err(format!("expected {:?} to be {times} times {:?} along {axis}", large.dims, small.dims))
    }
}

/// What the computation that a collective names does with its two parameters.
fn reduction(module: &Module, one: &Instruction) -> Option<Reduction> {
    let [id] = one.called_computation_ids[..] else { return None };
    let body = module.computations.iter().find(|computation| computation.id == id)?;
    let root = body.instructions.iter().find(|instruction| instruction.id == body.root_id)?;
    let parameter = |id: i64| {
        let found = body.instructions.iter().find(|instruction| instruction.id == id)?;
        (found.opcode == "parameter").then_some(found.parameter_number)
    };
    let mut operands = root.operand_ids.iter().map(|&id| parameter(id)).collect::<Option<Vec<i64>>>()?;
    operands.sort_unstable();
    if operands != [0, 1] {
        return None;
    }
    Some(match root.opcode.as_str() {
        "add" => Reduction::Sum,
        "multiply" => Reduction::Product,
        "minimum" => Reduction::Min,
        "maximum" => Reduction::Max,
        "and" => Reduction::BitAnd,
        "or" => Reduction::BitOr,
        "xor" => Reduction::BitXor,
        _ => return None,
    })
}

/// The groups of ranks, by HLO's rules for what the numbers in `replica_groups` are: without a channel replicas, with
/// one and `use_global_device_ids` places in the mesh, with one and without it partitions (for the collectives that
/// move) or replicas of all partitions (for those that reduce and gather).
fn groups(one: &Instruction, mesh: &Mesh) -> Result<Vec<Vec<u32>>, String> {
    if one.opcode == "collective-permute" {
        return Ok(Vec::new());
    }
    let written: Vec<Vec<i64>> = match &one.devices {
        Some(list) if !list.groups.is_empty() => list.groups.iter().map(|group| group.ids.clone()).collect(),
        Some(list) if list.iota.is_some() => {
            let expanded = list.iota.as_ref().and_then(crate::hlo::Iota::expand);
            expanded.ok_or("its replica groups don't fit together")?
        }
        _ => one.replica_groups.iter().map(|group| group.ids.clone()).collect(),
    };
    let total = mesh.replicas * mesh.partitions;
    let moves = matches!(one.opcode.as_str(), "all-to-all" | "ragged-all-to-all");
    let (numbered, each): (usize, Box<dyn Fn(usize) -> Vec<usize>>) =
        match (one.channel_id > 0, one.use_global_device_ids) {
            (true, true) => (total, Box::new(|id| vec![id])),
            (true, false) if moves && mesh.replicas == 1 => (mesh.partitions, Box::new(|id| vec![id])),
            (true, false) if !moves => {
                let partitions = mesh.partitions;
                (mesh.replicas, Box::new(move |id| (id * partitions..(id + 1) * partitions).collect()))
            }
            (false, false) if mesh.partitions == 1 => (mesh.replicas, Box::new(|id| vec![id])),
            (false, true) => return Err("use_global_device_ids without a channel".to_owned()),
            _ => {
                return Err(format!(
                    "groups within one of {} replicas and {} partitions are not supported",
                    mesh.replicas, mesh.partitions
                ));
            }
        };
    let written = if written.is_empty() { vec![(0..numbered as i64).collect()] } else { written };
    let mut seen = vec![false; total];
    let mut groups = Vec::new();
    for group in written {
        let mut ranks = Vec::new();
        for id in group {
            let id = usize::try_from(id).ok().filter(|&id| id < numbered);
            let id = id.ok_or_else(|| format!("its replica groups name others than the {numbered} participants"))?;
            for place in each(id) {
                if std::mem::replace(&mut seen[place], true) {
                    return Err("a participant is in two replica groups".to_owned());
                }
                ranks.push(mesh.ranks[place]);
            }
        }
        groups.push(ranks);
    }
    if seen.contains(&false) {
        return Err("a participant is in no replica group".to_owned());
    }
    if groups.iter().any(|group| group.len() != groups[0].len()) {
        return Err("its replica groups are of unequal sizes".to_owned());
    }
    Ok(groups)
}

fn pairs(one: &Instruction, mesh: &Mesh) -> Result<Vec<(u32, u32)>, String> {
    let numbered = match (one.channel_id > 0, mesh.replicas, mesh.partitions) {
        (true, 1, partitions) => partitions,
        (false, replicas, 1) => replicas,
        _ => return Err("permutations among both replicas and partitions are not supported".to_owned()),
    };
    let rank = |id: i64| {
        let place = usize::try_from(id).ok().filter(|&id| id < numbered);
        place.map(|place| mesh.ranks[place]).ok_or_else(|| format!("it names others than the {numbered} participants"))
    };
    let pairs: Result<Vec<(u32, u32)>, String> =
        one.source_target_pairs.iter().map(|pair| Ok((rank(pair.source)?, rank(pair.target)?))).collect();
    let pairs = pairs?;
    for (index, pair) in pairs.iter().enumerate() {
        if pairs[..index].iter().any(|other| other.0 == pair.0 || other.1 == pair.1) {
            return Err("a participant sends or receives twice".to_owned());
        }
    }
    Ok(pairs)
}

impl Step {
    /// The group that `rank` is in, and its place there.
    pub fn group_of(&self, rank: u32) -> Option<(&[u32], usize)> {
        self.groups.iter().find_map(|group| Some((&group[..], group.iter().position(|&member| member == rank)?)))
    }

    /// The collective among `count` members, on memory. None for a permutation, which is no collective of the
    /// group's, and for what depends on values.
    pub fn collective(&self, count: usize, inputs: &[*mut u8], outputs: &[*mut u8]) -> Option<Collective> {
        let blocks = |array: &Array, data: *mut u8, axis: usize| {
            Blocks::list((0..count).map(|index| array.block(data, axis, index, count)))
        };
        let one = |kind: Kind, reduction: Option<Reduction>, ins: Blocks, outs: Blocks| Collective {
            kind,
            parts: [Part { dtype: self.inputs[0].dtype, reduction, inputs: ins, outputs: outs }].into_iter().collect(),
        };
        let whole = |array: &Array, data: *mut u8| Blocks::whole(array.whole(data));
        Some(match self.what {
            What::AllReduce(reduction) => Collective {
                kind: Kind::AllReduce,
                parts: (0..self.inputs.len())
                    .map(|index| Part {
                        dtype: self.inputs[index].dtype,
                        reduction: Some(reduction),
                        inputs: whole(&self.inputs[index], inputs[index]),
                        outputs: whole(&self.outputs[index], outputs[index]),
                    })
                    .collect(),
            },
            What::AllGather(axis) => one(
                Kind::AllGather,
                None,
                whole(&self.inputs[0], inputs[0]),
                blocks(&self.outputs[0], outputs[0], axis),
            ),
            What::ReduceScatter(reduction, axis) => one(
                Kind::ReduceScatter,
                Some(reduction),
                blocks(&self.inputs[0], inputs[0], axis),
                whole(&self.outputs[0], outputs[0]),
            ),
            What::AllToAll(axis) => one(
                Kind::AllToAll,
                None,
                blocks(&self.inputs[0], inputs[0], axis),
                blocks(&self.outputs[0], outputs[0], axis),
            ),
            What::Exchange => one(
                Kind::AllToAll,
                None,
                Blocks::list(self.inputs.iter().zip(inputs).map(|(array, &data)| array.whole(data))),
                Blocks::list(self.outputs.iter().zip(outputs).map(|(array, &data)| array.whole(data))),
            ),
            What::Ragged | What::Permute(_) => return None,
        })
    }
}
