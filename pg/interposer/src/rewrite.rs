//! A program with collectives among other operations, written anew with calls in their place.
//!
//! XLA's CPU backend compiles the rest of the program as it is; each call hands the fabric the memory of its operands
//! and results. Pure: bytes of an `xla.HloModuleProto` in, bytes out. What is not replaced goes on byte by byte.
//!
//! Every call takes a value that the one before it gives, so that all ranks make them in the program's order: without
//! it XLA may run two that don't depend on each other in any order, or at once.

use prost::Message as _;

use crate::ffi::{INDEX, TARGET};
use crate::hlo::{Instruction, Module};
use crate::plan::PLACES;
use crate::step::{self, Array, COLLECTIVES, Mesh, Refused, Step};
use crate::wire::{Damaged, Fields, put_bytes, put_varint, varint};

/// Fields of `xla.HloModuleProto`, `xla.HloComputationProto` and `xla.HloInstructionProto`.
const COMPUTATIONS: u64 = 3;
const INSTRUCTIONS: u64 = 2;
const NAME: u64 = 1;
const OPCODE: u64 = 2;
const SHAPE: u64 = 3;
const METADATA: u64 = 7;
const LITERAL: u64 = 8;
const TUPLE_INDEX: u64 = 13;
const CALL_TARGET: u64 = 28;
const ID: u64 = 35;
const OPERANDS: u64 = 36;
const BACKEND_CONFIG: u64 = 43;
const CONSTRAIN_LAYOUT: u64 = 56;
const OPERAND_SHAPES: u64 = 57;
const SIDE_EFFECT: u64 = 65;
const API_VERSION: u64 = 77;
const TYPED_FFI: u64 = 4;
/// Of `xla.ShapeProto` and `xla.LayoutProto`, and the code of its element types.
const ELEMENT_TYPE: u64 = 2;
const DIMENSIONS: u64 = 3;
const TUPLE_SHAPES: u64 = 4;
const LAYOUT: u64 = 5;
const MINOR_TO_MAJOR: u64 = 1;
const S32: u64 = 4;
const U32: u64 = 8;
const TUPLE: u64 = 13;
/// Of `xla.LiteralProto`.
const LITERAL_SHAPE: u64 = 1;
const LITERAL_U32S: u64 = 6;

/// Why a program can't be written anew.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unwritten {
    /// A collective in it can't be run.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// It is no such message.
    #[error("the program can't be read: {0}")]
    Damaged(#[from] Damaged),
    /// It is one, but not that of a program.
    #[error("the program can't be read: {0}")]
    Undecoded(#[from] prost::DecodeError),
}

/// What a call in a program stands for.
#[derive(Clone, Debug, PartialEq)]
pub enum Call {
    /// A collective.
    Collective(Step),
    /// The question for the participant's number, and the answer on this rank.
    Place(u32),
}

/// A program without collectives, and what its calls stand for, in the order of their numbers.
#[derive(Debug)]
pub struct Rewritten {
    pub module: Vec<u8>,
    pub calls: Vec<Call>,
    /// It is the same on all ranks.
    pub same: bool,
}

/// Writes a program for the rank at `place` of the mesh; `bytes` are those of `module`, and the calls are numbered from
/// `first` on.
pub fn rewrite(
    bytes: &[u8],
    module: &Module,
    mesh: &Mesh,
    place: Option<usize>,
    first: i64,
) -> Result<Rewritten, Unwritten> {
    let mut writer = Writer { module, mesh, place, first, calls: Vec::new(), same: true, token: None, next_id: 0 };
    let mut out = Vec::with_capacity(bytes.len() + 1024);
    for field in Fields(bytes) {
        match field? {
            (COMPUTATIONS, _, Some(computation)) => {
                put_bytes(&mut out, COMPUTATIONS, &writer.computation(computation)?)
            }
            (_, whole, _) => out.extend_from_slice(whole),
        }
    }
    Ok(Rewritten { module: out, calls: writer.calls, same: writer.same })
}

struct Writer<'a> {
    module: &'a Module,
    mesh: &'a Mesh,
    place: Option<usize>,
    first: i64,
    calls: Vec<Call>,
    same: bool,
    /// The instruction that gives the value which the next call takes.
    token: Option<i64>,
    next_id: i64,
}

impl Writer<'_> {
    fn computation(&mut self, bytes: &[u8]) -> Result<Vec<u8>, Unwritten> {
        let read = crate::hlo::Computation::decode(bytes)?;
        let own = read.id == self.module.entry_computation_id;
        // Ids carry their computation's in the upper half.
        self.next_id = read.instructions.iter().map(|one| one.id).max().unwrap_or(0) + 1;
        let mut out = Vec::with_capacity(bytes.len() + 1024);
        for field in Fields(bytes) {
            let (INSTRUCTIONS, whole, Some(payload)) = field? else {
                out.extend_from_slice(field?.1);
                continue;
            };
            let one = Instruction::decode(payload)?;
            let opcode = one.opcode.as_str();
            if COLLECTIVES.contains(&opcode) {
                if !own {
                    return Err(refused(&one, "it is inside another computation than the program's own").into());
                }
                self.call(&read.instructions, &one, payload, &mut out)?;
            } else if PLACES.contains(&opcode) {
                put_bytes(&mut out, INSTRUCTIONS, &self.own_place(&one, own)?);
            } else {
                out.extend_from_slice(whole);
            }
        }
        Ok(out)
    }

    fn id(&mut self) -> i64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// A call in place of a collective; under the collective's id there is its result.
    fn call(
        &mut self,
        entry: &[Instruction],
        one: &Instruction,
        payload: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), Unwritten> {
        let step = step::read(self.module, entry, one, self.mesh)?;
        let index = self.first + self.calls.len() as i64;
        let metadata = Fields(payload).find_map(|field| match field {
            Ok((METADATA, whole, _)) => Some(whole.to_vec()),
            _ => None,
        });
        let called = self.id();
        let name = |what: &str| format!("{}.podring.{what}", one.name);
        let token = shape(S32, &[]);

        // The call.
        let mut made = head(&name("call"), "custom-call", called);
        let results: Vec<Vec<u8>> = step.outputs.iter().map(array).chain([token.clone()]).collect();
        put_bytes(&mut made, SHAPE, &tuple(&results));
        made.extend_from_slice(&metadata.clone().unwrap_or_default());
        put_bytes(&mut made, CALL_TARGET, TARGET.as_bytes());
        operands(&mut made, one.operand_ids.iter().copied().chain(self.token));
        put_bytes(&mut made, BACKEND_CONFIG, format!("{{{INDEX} = {index} : i64}}").as_bytes());
        // Row-major, as the fabric takes them.
        put_varint(&mut made, CONSTRAIN_LAYOUT, 1);
        let order = self.token.map(|_| token.clone());
        for given in step.inputs.iter().map(array).chain(order) {
            put_bytes(&mut made, OPERAND_SHAPES, &given);
        }
        put_varint(&mut made, SIDE_EFFECT, 1);
        put_varint(&mut made, API_VERSION, TYPED_FFI);
        put_bytes(out, INSTRUCTIONS, &made);

        // Its results.
        let mut part = |id: i64, name: &str, shape: &[u8], place: usize| {
            let mut made = head(name, "get-tuple-element", id);
            put_bytes(&mut made, SHAPE, shape);
            put_varint(&mut made, TUPLE_INDEX, place as u64);
            operands(&mut made, [called]);
            put_bytes(out, INSTRUCTIONS, &made);
        };
        let several = one.shape.as_ref().is_some_and(|shape| !shape.tuple.is_empty());
        let mut parts = Vec::new();
        for (place, output) in step.outputs.iter().enumerate() {
            let (id, named) = if several { (self.id(), name(&place.to_string())) } else { (one.id, one.name.clone()) };
            part(id, &named, &array(output), place);
            parts.push(id);
        }
        let after = self.id();
        part(after, &name("after"), &token, step.outputs.len());
        self.token = Some(after);
        if several {
            let mut made = head(&one.name, "tuple", one.id);
            put_bytes(&mut made, SHAPE, &tuple(&step.outputs.iter().map(array).collect::<Vec<_>>()));
            operands(&mut made, parts);
            put_bytes(out, INSTRUCTIONS, &made);
        }
        self.calls.push(Call::Collective(step));
        Ok(())
    }

    /// What answers a question for the participant's number: a call, so that the program is the same on all ranks. Within
    /// other computations than the program's own, some of which may not call, it is a constant.
    fn own_place(&mut self, one: &Instruction, own: bool) -> Result<Vec<u8>, Unwritten> {
        let Some(place) = self.place else { return Err(refused(one, "this rank takes no part in the program").into()) };
        let (replica, partition) = (place / self.mesh.partitions, place % self.mesh.partitions);
        let number = if one.opcode == "partition-id" { partition } else { replica } as u32;
        let scalar = shape(U32, &[]);
        let mut made = head(&one.name, if own { "custom-call" } else { "constant" }, one.id);
        put_bytes(&mut made, SHAPE, &scalar);
        if own {
            let index = self.first + self.calls.len() as i64;
            self.calls.push(Call::Place(number));
            put_bytes(&mut made, CALL_TARGET, TARGET.as_bytes());
            put_bytes(&mut made, BACKEND_CONFIG, format!("{{{INDEX} = {index} : i64}}").as_bytes());
            put_varint(&mut made, CONSTRAIN_LAYOUT, 1);
            put_varint(&mut made, API_VERSION, TYPED_FFI);
        } else {
            self.same = false;
            let mut literal = Vec::new();
            put_bytes(&mut literal, LITERAL_SHAPE, &scalar);
            put_bytes(&mut literal, LITERAL_U32S, &packed([number.into()]));
            put_bytes(&mut made, LITERAL, &literal);
        }
        Ok(made)
    }
}

fn refused(one: &Instruction, why: &str) -> Refused {
    Refused { opcode: one.opcode.clone(), name: one.name.clone(), why: why.to_owned() }
}

fn packed(numbers: impl IntoIterator<Item = u64>) -> Vec<u8> {
    let mut out = Vec::new();
    numbers.into_iter().for_each(|number| varint(&mut out, number));
    out
}

fn head(name: &str, opcode: &str, id: i64) -> Vec<u8> {
    let mut made = Vec::new();
    put_bytes(&mut made, NAME, name.as_bytes());
    put_bytes(&mut made, OPCODE, opcode.as_bytes());
    put_varint(&mut made, ID, id as u64);
    made
}

fn operands(made: &mut Vec<u8>, ids: impl IntoIterator<Item = i64>) {
    put_bytes(made, OPERANDS, &packed(ids.into_iter().map(|id| id as u64)));
}

/// A dense array in row-major order.
fn shape(element_type: u64, dims: &[i64]) -> Vec<u8> {
    let mut layout = Vec::new();
    put_bytes(&mut layout, MINOR_TO_MAJOR, &packed((0..dims.len() as u64).rev()));
    let mut made = Vec::new();
    put_varint(&mut made, ELEMENT_TYPE, element_type);
    put_bytes(&mut made, DIMENSIONS, &packed(dims.iter().map(|&dim| dim as u64)));
    put_bytes(&mut made, LAYOUT, &layout);
    made
}

fn array(array: &Array) -> Vec<u8> {
    shape(crate::hlo::element_type(array.dtype), &array.dims)
}

fn tuple(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut made = Vec::new();
    put_varint(&mut made, ELEMENT_TYPE, TUPLE);
    parts.iter().for_each(|part| put_bytes(&mut made, TUPLE_SHAPES, part));
    made
}

#[cfg(test)]
#[path = "rewrite_tests.rs"]
mod tests;
