//! A whole program with a collective in it: what its parameters and results have to do with the collective.
//!
//! torch_tpu's process group compiles each collective as a program of its own: parameters, the collective, and perhaps
//! slices of its result. Those are read here; any other program with a collective is refused. Pure.

use podring_collective::Reduction;

use crate::hlo::{Instruction, Module};
use crate::step::{self, Array, COLLECTIVES, Mesh, Refused, Step, What};

/// A result of the program: part of a result of the collective, in another shape perhaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which of the collective's results.
    pub of: usize,
    /// Its first index along each axis.
    pub start: Vec<i64>,
    /// Extents of the part.
    pub sizes: Vec<i64>,
    /// The shape in which it is given.
    pub shape: Array,
}

/// A program that is one collective.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub step: Step,
    /// Which of the program's arguments are the collective's operands.
    pub arguments: Vec<usize>,
    pub results: Vec<Piece>,
}

/// What a program is.
#[derive(Clone, Debug, PartialEq)]
pub enum Program {
    /// Nobody else takes part.
    Alone,
    /// One collective.
    Collective(Box<Plan>),
}

/// Opcodes whose value depends on which participant runs them.
pub const PLACES: &[&str] = &["partition-id", "replica-id"];

/// Reads a program.
pub fn read(module: &Module, mesh: &Mesh) -> Result<Program, Refused> {
    let all = || module.computations.iter().flat_map(|computation| &computation.instructions);
    let refused = |one: &Instruction, why: &str| {
        Err(Refused { opcode: one.opcode.clone(), name: one.name.clone(), why: why.to_owned() })
    };
    if let Some(one) = all().find(|one| PLACES.contains(&one.opcode.as_str())) {
        return refused(one, "a program of one virtual chip doesn't know its place");
    }
    let mut found = all().filter(|one| COLLECTIVES.contains(&one.opcode.as_str()));
    let Some(one) = found.next() else { return Ok(Program::Alone) };
    if let Some(second) = found.next() {
        return refused(second, "a second collective in one program");
    }
    let entry = module.computations.iter().find(|computation| computation.id == module.entry_computation_id);
    let Some(entry) = entry.filter(|entry| entry.instructions.iter().any(|other| other.id == one.id)) else {
        return refused(one, "it is inside another computation than the program's own");
    };
    let by_id = |id: i64| entry.instructions.iter().find(|other| other.id == id);
    let mut step = step::read(module, &entry.instructions, one, mesh)?;
    let mut arguments = Vec::new();
    for &id in &one.operand_ids {
        match by_id(id) {
            Some(operand) if operand.opcode == "parameter" => arguments.push(operand.parameter_number as usize),
            _ => return refused(one, "its operand is computed in the same program"),
        }
    }
    let Some(mut root) = by_id(entry.root_id) else { return refused(one, "the program has no result") };
    if root.opcode == "divide" {
        // A sum divided by the number of members.
        match averaged(root, one, &step, &by_id) {
            Some(what) => (step.what, root) = (what, one),
            None => return refused(root, "expected a sum divided by the number of its members"),
        }
    }
    let results: Vec<&Instruction> = if root.opcode == "tuple" {
        match root.operand_ids.iter().map(|&id| by_id(id)).collect() {
            Some(results) => results,
            None => return refused(root, "it names an unknown instruction"),
        }
    } else {
        vec![root]
    };
    let mut pieces = Vec::new();
    for result in results {
        if result.id == one.id {
            // Its own tuple, where it gives several.
            pieces.extend((0..step.outputs.len()).map(|of| entire(of, &step)));
            continue;
        }
        match piece(result, one, &step, &by_id) {
            Some(one) => pieces.push(one),
            None => return refused(result, "a program may only cut and reshape what a collective gives"),
        }
    }
    Ok(Program::Collective(Box::new(Plan { step, arguments, results: pieces })))
}

/// What the collective is if `root` is its sum divided by the number of members: torch_tpu's form of an average.
fn averaged<'a>(
    root: &Instruction,
    one: &Instruction,
    step: &Step,
    by_id: &dyn Fn(i64) -> Option<&'a Instruction>,
) -> Option<What> {
    let [sum, divisor] = root.operand_ids[..] else { return None };
    let spread = by_id(divisor)?;
    let constant = match (spread.opcode.as_str(), &spread.operand_ids[..]) {
        ("broadcast", &[constant]) => by_id(constant)?,
        _ => spread,
    };
    let members = step.groups.first()?.len();
    let number = constant.literal.as_ref().filter(|_| constant.opcode == "constant")?.number()?;
    if sum != one.id || step.outputs.len() != 1 || number != members as f64 || root.shape != one.shape {
        return None;
    }
    match step.what {
        What::AllReduce(Reduction::Sum) => Some(What::AllReduce(Reduction::Avg)),
        What::ReduceScatter(Reduction::Sum, axis) => Some(What::ReduceScatter(Reduction::Avg, axis)),
        _ => None,
    }
}

fn entire(of: usize, step: &Step) -> Piece {
    let shape = step.outputs[of].clone();
    Piece { of, start: vec![0; shape.dims.len()], sizes: shape.dims.clone(), shape }
}

/// What `value` is of the results of `one`; none if it is computed.
fn piece<'a>(
    value: &Instruction,
    one: &Instruction,
    step: &Step,
    by_id: &dyn Fn(i64) -> Option<&'a Instruction>,
) -> Option<Piece> {
    if value.id == one.id {
        return Some(entire(0, step));
    }
    let [operand] = value.operand_ids[..] else { return None };
    let operand = by_id(operand)?;
    match value.opcode.as_str() {
        "get-tuple-element" if operand.id == one.id => {
            let of = usize::try_from(value.tuple_index).ok().filter(|&of| of < step.outputs.len())?;
            Some(entire(of, step))
        }
        "copy" => piece(operand, one, step, by_id),
        "reshape" => {
            let mut inner = piece(operand, one, step, by_id)?;
            let (dtype, dims) = value.shape.as_ref()?.array()?;
            inner.shape = Array { dtype, dims: dims.to_vec() };
            let count: i64 = inner.sizes.iter().product();
            (inner.shape.dtype == step.outputs[inner.of].dtype && dims.iter().product::<i64>() == count)
                .then_some(inner)
        }
        "slice" => {
            let mut inner = piece(operand, one, step, by_id)?;
            // A slice of a reshaped part would need the reshape undone.
            if inner.shape.dims != inner.sizes || value.slices.len() != inner.sizes.len() {
                return None;
            }
            for (axis, cut) in value.slices.iter().enumerate() {
                if cut.stride != 1 || cut.start < 0 || cut.limit < cut.start || cut.limit > inner.sizes[axis] {
                    return None;
                }
                inner.start[axis] += cut.start;
                inner.sizes[axis] = cut.limit - cut.start;
            }
            inner.shape.dims = inner.sizes.clone();
            Some(inner)
        }
        _ => None,
    }
}

impl Piece {
    /// Whether it is all of its array.
    pub fn is_whole(&self, step: &Step) -> bool {
        self.sizes == step.outputs[self.of].dims
    }

    /// Copies it out of the collective's result, dense in row-major order.
    pub fn copy(&self, from: &[u8], whole: &Array, into: &mut [u8]) {
        let item = whole.dtype.size();
        let rank = self.sizes.len();
        if self.sizes.contains(&0) {
            return;
        }
        // Rows of the last axis, counted through the others.
        let row = self.sizes.last().map_or(1, |&size| size as usize) * item;
        let rows = self.sizes[..rank.saturating_sub(1)].iter().product::<i64>() as usize;
        for index in 0..rows {
            let (mut rest, mut place, mut stride) = (index as i64, 0i64, 1i64);
            for axis in (0..rank).rev() {
                let at = if axis + 1 == rank {
                    0
                } else {
                    let at = rest % self.sizes[axis];
                    rest /= self.sizes[axis];
                    at
                };
                place += (self.start[axis] + at) * stride;
                stride *= whole.dims[axis];
            }
            let start = place as usize * item;
            into[index * row..(index + 1) * row].copy_from_slice(&from[start..start + row]);
        }
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
