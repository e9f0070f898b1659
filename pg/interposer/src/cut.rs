//! A program cut at its collectives: local computations, which the wrapped plugin runs, and between them the collectives,
//! which the fabric plays.
//!
//! Instructions are grouped into stages: a collective is in the first stage in which its operands are known, and what is
//! computed from its result is in the next. A stage's computation is a module of its own, put together from the
//! program's own instructions byte by byte; what comes from outside it becomes a parameter that bears the number of the
//! instruction it stands for, so that nothing that uses it is touched. A program's place among the replicas and
//! partitions is a constant: a chip runs its program as one of them.
//!
//! Pure. Field numbers are those of `hlo.proto` and `xla_data.proto`.

use std::collections::{HashMap, HashSet};

use crate::hlo::{Instruction, Module, Shape};
use crate::options::{Fields, put_bytes, put_varint, varint};
use crate::step::{self, COLLECTIVES, Mesh, Refused, Step};

/// The instruction that gives an array, and which of its arrays.
pub type Value = (i64, usize);

/// A local computation: a serialized `xla.HloModuleProto` whose result is a tuple.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    pub module: Vec<u8>,
    /// Its arguments, in order.
    pub takes: Vec<Value>,
    /// Its results, in order.
    pub gives: Vec<Value>,
}

/// A collective and where its arrays come from; its results are (`id`, 0), (`id`, 1), …
#[derive(Clone, Debug, PartialEq)]
pub struct Meeting {
    pub step: Step,
    pub takes: Vec<Value>,
    pub id: i64,
}

/// What is computed, and then exchanged.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stage {
    pub segment: Option<Segment>,
    pub meetings: Vec<Meeting>,
}

/// A program in pieces.
#[derive(Clone, Debug, PartialEq)]
pub struct Cut {
    /// The number of each argument that is used.
    pub arguments: Vec<(usize, Value)>,
    pub stages: Vec<Stage>,
    /// No value twice.
    pub results: Vec<Value>,
}

/// What costs less to compute again than to hand over.
const FREE: &[&str] = &["constant", "iota", "partition-id", "replica-id"];
/// Opcodes whose value depends on the participant.
const PLACES: &[&str] = &["partition-id", "replica-id"];

/// `xla.HloModuleProto`, `HloComputationProto`, `HloInstructionProto`.
const COMPUTATIONS: u64 = 3;
const INSTRUCTIONS: u64 = 2;
const SHAPE: u64 = 3;
/// `xla.PrimitiveType`.
const TUPLE: u64 = 13;

fn refused(one: &Instruction, why: &str) -> Refused {
    Refused { opcode: one.opcode.clone(), name: one.name.clone(), why: why.to_owned() }
}

fn damaged(module: &Module) -> Refused {
    let why = "its bytes don't read back as what they are".to_owned();
    Refused { opcode: "module".to_owned(), name: module.name.clone(), why }
}

/// The payloads of a message's field `number`.
fn payloads(message: &[u8], number: u64) -> Option<Vec<&[u8]>> {
    let mut found = Vec::new();
    for field in Fields(message) {
        match field.ok()? {
            (found_number, _, Some(payload)) if found_number == number => found.push(payload),
            _ => {}
        }
    }
    Some(found)
}

/// One program under the knife.
struct Work<'a> {
    module: &'a Module,
    /// Of the program's own computation: instructions and their bytes.
    entry: &'a [Instruction],
    raw: HashMap<i64, &'a [u8]>,
    by_id: HashMap<i64, &'a Instruction>,
    /// The other computations by id, in the module's order.
    others: Vec<(i64, &'a [u8])>,
    entry_id: i64,
    /// Replica and partition of this process.
    place: (usize, usize),
    /// The first stage in which a value is known.
    known: HashMap<i64, usize>,
    /// What is computed only where it is used.
    free: HashSet<i64>,
}

/// Cuts a program: `raw` is the serialized module, `rank` this process's.
pub fn cut(raw: &[u8], module: &Module, mesh: &Mesh, rank: u32) -> Result<Cut, Refused> {
    let computations = payloads(raw, COMPUTATIONS).filter(|all| all.len() == module.computations.len());
    let computations = computations.ok_or_else(|| damaged(module))?;
    let index = module.computations.iter().position(|one| one.id == module.entry_computation_id);
    let index = index.ok_or_else(|| damaged(module))?;
    let entry = &module.computations[index];
    let bytes = payloads(computations[index], INSTRUCTIONS).filter(|all| all.len() == entry.instructions.len());
    let bytes = bytes.ok_or_else(|| damaged(module))?;
    let inner = |one: &&Instruction| [COLLECTIVES, PLACES].iter().any(|names| names.contains(&one.opcode.as_str()));
    let elsewhere = module.computations.iter().enumerate().filter(|(other, _)| *other != index);
    if let Some(one) = elsewhere.flat_map(|(_, other)| &other.instructions).find(inner) {
        return Err(refused(one, "it is inside another computation than the program's own"));
    }
    let Some(place) = mesh.ranks.iter().position(|&member| member == rank) else {
        let why = format!("rank {rank} is none of its participants");
        return Err(Refused { opcode: "module".to_owned(), name: module.name.clone(), why });
    };
    let instructions = &entry.instructions;
    let by_id: HashMap<i64, &Instruction> = instructions.iter().map(|one| (one.id, one)).collect();
    let root = *by_id.get(&entry.root_id).ok_or_else(|| damaged(module))?;
    let result_ids = if root.opcode == "tuple" { root.operand_ids.clone() } else { vec![root.id] };
    // A collective's operand and the program's result are arrays that somebody asks for, however cheap they are.
    let asked: HashSet<i64> = instructions
        .iter()
        .filter(|one| COLLECTIVES.contains(&one.opcode.as_str()))
        .flat_map(|one| one.operand_ids.iter().copied())
        .chain(result_ids.iter().copied())
        .collect();
    let is_free = |one: &&Instruction| FREE.contains(&one.opcode.as_str()) && !asked.contains(&one.id);
    let mut work = Work {
        module,
        entry: instructions,
        raw: instructions.iter().zip(bytes).map(|(one, raw)| (one.id, raw)).collect(),
        by_id,
        others: module
            .computations
            .iter()
            .map(|one| one.id)
            .zip(computations)
            .filter(|one| one.0 != entry.id)
            .collect(),
        entry_id: entry.id,
        place: (place / mesh.partitions.max(1), place % mesh.partitions.max(1)),
        known: HashMap::new(),
        free: instructions.iter().filter(is_free).map(|one| one.id).collect(),
    };
    let mut stages: Vec<(Vec<&Instruction>, Vec<Meeting>)> = Vec::new();
    for one in instructions {
        if one.id == root.id && root.opcode == "tuple" {
            continue;
        }
        let mut stage = 0;
        for id in &one.operand_ids {
            stage = stage.max(*work.known.get(id).ok_or_else(|| damaged(module))?);
        }
        let meets = COLLECTIVES.contains(&one.opcode.as_str());
        work.known.insert(one.id, stage + usize::from(meets));
        if stages.len() <= stage {
            stages.resize_with(stage + 1, Default::default);
        }
        if meets {
            let step = step::read(module, instructions, one, mesh)?;
            let takes = one.operand_ids.iter().map(|&id| work.array(id, one)).collect::<Result<_, _>>()?;
            stages[stage].1.push(Meeting { step, takes, id: one.id });
        } else if one.opcode != "parameter" && !work.is_part(one) && !work.free.contains(&one.id) {
            stages[stage].0.push(one);
        }
    }
    let mut results = Vec::new();
    if work.is_several(root) {
        results.extend((0..root.shape.as_ref().map_or(0, |shape| shape.tuple.len())).map(|index| (root.id, index)));
    } else {
        for &id in &result_ids {
            results.push(work.array(id, root)?);
        }
    }
    for (index, value) in results.iter().enumerate() {
        if results[..index].contains(value) {
            return Err(refused(root, "it gives one array twice"));
        }
        if work.by_id.get(&value.0).is_some_and(|one| one.opcode == "parameter") {
            return Err(refused(root, "it gives an argument back as it is"));
        }
    }
    let mut used: HashSet<Value> = results.iter().copied().collect();
    let mut made: Vec<Stage> = Vec::new();
    // From the end: what later stages use, earlier ones give.
    while let Some((local, meetings)) = stages.pop() {
        used.extend(meetings.iter().flat_map(|meeting| meeting.takes.iter().copied()));
        let segment = if local.is_empty() { None } else { work.segment(stages.len(), &local, &used)? };
        used.extend(segment.iter().flat_map(|segment| segment.takes.iter().copied()));
        made.push(Stage { segment, meetings });
    }
    made.reverse();
    let arguments = instructions.iter().filter(|one| one.opcode == "parameter" && used.contains(&(one.id, 0)));
    let arguments = arguments.map(|one| (usize::try_from(one.parameter_number).unwrap_or(usize::MAX), (one.id, 0)));
    Ok(Cut { arguments: arguments.collect(), stages: made, results })
}

impl<'a> Work<'a> {
    /// A collective with several results.
    fn is_several(&self, one: &Instruction) -> bool {
        COLLECTIVES.contains(&one.opcode.as_str()) && one.shape.as_ref().is_some_and(|shape| !shape.tuple.is_empty())
    }

    /// One of several results of a collective.
    fn is_part(&self, one: &Instruction) -> bool {
        let of = |id: &i64| self.by_id.get(id).is_some_and(|of| self.is_several(of));
        one.opcode == "get-tuple-element" && one.operand_ids.first().is_some_and(of)
    }

    /// The array that an instruction gives, for `user`.
    fn array(&self, id: i64, user: &Instruction) -> Result<Value, Refused> {
        let one = *self.by_id.get(&id).ok_or_else(|| damaged(self.module))?;
        if !one.shape.as_ref().is_some_and(Shape::is_array) {
            return Err(refused(
                user,
                &format!("it takes {} ({}), which is no array, from another stage", one.name, one.opcode),
            ));
        }
        match self.is_part(one) {
            true => Ok((one.operand_ids[0], usize::try_from(one.tuple_index).unwrap_or(usize::MAX))),
            false => Ok((id, 0)),
        }
    }

    /// The computation of `local`, of whose values those in `used` are wanted. None if none is.
    fn segment(&self, stage: usize, local: &[&Instruction], used: &HashSet<Value>) -> Result<Option<Segment>, Refused> {
        let inside: HashSet<i64> = local.iter().map(|one| one.id).collect();
        let gives: Vec<&Instruction> = local.iter().filter(|one| used.contains(&(one.id, 0))).copied().collect();
        if gives.is_empty() {
            return Ok(None);
        }
        let mut takes: Vec<Value> = Vec::new();
        let mut parameters: Vec<(i64, &[u8])> = Vec::new();
        let mut instructions: Vec<Vec<u8>> = Vec::new();
        let mut copied: HashSet<i64> = HashSet::new();
        let mut called: HashSet<i64> = HashSet::new();
        for one in local {
            for &id in &one.operand_ids {
                if inside.contains(&id) || !copied.insert(id) {
                    continue;
                }
                if self.free.contains(&id) {
                    instructions.push(self.placed(id)?);
                    continue;
                }
                takes.push(self.array(id, one)?);
                parameters.push((id, self.shape(id)?));
            }
            called.extend(&one.called_computation_ids);
            instructions.push(self.placed(one.id)?);
        }
        let mut shapes = Vec::new();
        let mut body = Vec::new();
        put_bytes(&mut body, 1, b"main");
        for (number, (id, shape)) in parameters.iter().enumerate() {
            let mut one = Vec::new();
            put_bytes(&mut one, 1, format!("argument.{number}").as_bytes());
            put_bytes(&mut one, 2, b"parameter");
            put_bytes(&mut one, SHAPE, shape);
            put_varint(&mut one, 9, number as u64);
            put_varint(&mut one, 35, *id as u64);
            put_bytes(&mut body, INSTRUCTIONS, &one);
            put_bytes(&mut shapes, 1, shape);
        }
        for one in &instructions {
            put_bytes(&mut body, INSTRUCTIONS, one);
        }
        // The result: a tuple of its own number.
        let mut result = Vec::new();
        put_varint(&mut result, 2, TUPLE);
        let mut operands = Vec::new();
        for one in &gives {
            put_bytes(&mut result, 4, self.shape(one.id)?);
            varint(&mut operands, one.id as u64);
        }
        let root = self.entry.iter().map(|one| one.id).max().unwrap_or(0) + 1;
        let mut tuple = Vec::new();
        put_bytes(&mut tuple, 1, b"results");
        put_bytes(&mut tuple, 2, b"tuple");
        put_bytes(&mut tuple, SHAPE, &result);
        put_varint(&mut tuple, 35, root as u64);
        put_bytes(&mut tuple, 36, &operands);
        put_bytes(&mut body, INSTRUCTIONS, &tuple);
        put_bytes(&mut shapes, 2, &result);
        for number in 0..parameters.len() {
            put_bytes(&mut shapes, 3, format!("argument.{number}").as_bytes());
        }
        put_bytes(&mut body, 4, &shapes);
        put_varint(&mut body, 5, self.entry_id as u64);
        put_varint(&mut body, 6, root as u64);

        let mut module = Vec::new();
        put_bytes(&mut module, 1, format!("{}.stage{stage}", self.module.name).as_bytes());
        put_bytes(&mut module, 2, b"main");
        for raw in self.reached(called) {
            put_bytes(&mut module, COMPUTATIONS, raw);
        }
        put_bytes(&mut module, COMPUTATIONS, &body);
        put_bytes(&mut module, 4, &shapes);
        put_varint(&mut module, 6, self.entry_id as u64);
        Ok(Some(Segment { module, takes, gives: gives.iter().map(|one| (one.id, 0)).collect() }))
    }

    /// Computations that those called call in turn, in the module's order: callees come first there.
    fn reached(&self, mut called: HashSet<i64>) -> Vec<&'a [u8]> {
        let mut rest: Vec<i64> = called.iter().copied().collect();
        while let Some(id) = rest.pop() {
            let Some(one) = self.module.computations.iter().find(|one| one.id == id) else { continue };
            for &inner in one.instructions.iter().flat_map(|one| &one.called_computation_ids) {
                if called.insert(inner) {
                    rest.push(inner);
                }
            }
        }
        self.others.iter().filter(|(id, _)| called.contains(id)).map(|&(_, raw)| raw).collect()
    }

    fn shape(&self, id: i64) -> Result<&'a [u8], Refused> {
        let raw = self.raw.get(&id).copied().ok_or_else(|| damaged(self.module))?;
        payloads(raw, SHAPE).and_then(|shapes| shapes.first().copied()).ok_or_else(|| damaged(self.module))
    }

    /// An instruction's bytes; of one that asks for this process's place, a constant's.
    fn placed(&self, id: i64) -> Result<Vec<u8>, Refused> {
        let (Some(one), Some(raw)) = (self.by_id.get(&id), self.raw.get(&id)) else { return Err(damaged(self.module)) };
        let number = match one.opcode.as_str() {
            "replica-id" => self.place.0,
            "partition-id" => self.place.1,
            _ => return Ok(raw.to_vec()),
        };
        let shape = self.shape(id)?;
        let (mut literal, mut word) = (Vec::new(), Vec::new());
        put_bytes(&mut literal, 1, shape);
        varint(&mut word, number as u64);
        // Both are u32.
        put_bytes(&mut literal, 6, &word);
        let mut constant = Vec::new();
        put_bytes(&mut constant, 1, one.name.as_bytes());
        put_bytes(&mut constant, 2, b"constant");
        put_bytes(&mut constant, SHAPE, shape);
        put_bytes(&mut constant, 8, &literal);
        put_varint(&mut constant, 35, id as u64);
        Ok(constant)
    }
}

impl Segment {
    /// Its instructions' opcodes, for looking at.
    #[cfg(test)]
    fn opcodes(&self) -> Vec<String> {
        use prost::Message as _;
        let module = Module::decode(&self.module[..]).unwrap();
        let entry = module.computations.iter().find(|one| one.id == module.entry_computation_id).unwrap();
        entry.instructions.iter().map(|one| one.opcode.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::hlo::{Computation, ReplicaGroup};

    fn one(id: i64, opcode: &str, operands: &[i64]) -> Instruction {
        Instruction {
            name: format!("{opcode}.{id}"),
            opcode: opcode.to_owned(),
            shape: Some(Shape { element_type: 11, dimensions: vec![4], ..Default::default() }),
            id,
            operand_ids: operands.to_vec(),
            ..Default::default()
        }
    }

    fn sum(id: i64, operand: i64) -> Instruction {
        let groups = vec![ReplicaGroup { ids: vec![0, 1] }];
        Instruction { called_computation_ids: vec![9], replica_groups: groups, ..one(id, "all-reduce", &[operand]) }
    }

    fn module(entry: Vec<Instruction>) -> Module {
        let parameter = |number: i64| Instruction { parameter_number: number, ..one(number, "parameter", &[]) };
        let add = vec![parameter(0), parameter(1), one(2, "add", &[0, 1])];
        let root_id = entry.last().unwrap().id;
        let computations = vec![
            Computation { instructions: add, id: 9, root_id: 2 },
            Computation { instructions: entry, id: 5, root_id },
        ];
        Module { name: "m".into(), computations, entry_computation_id: 5 }
    }

    fn pieces(module: &Module, rank: u32) -> Result<Cut, Refused> {
        let mesh = Mesh { replicas: 2, partitions: 1, ranks: vec![0, 1] };
        cut(&module.encode_to_vec(), module, &mesh, rank)
    }

    #[test]
    fn what_is_computed_before_and_after_is_cut_off() {
        let entry = vec![
            one(1, "parameter", &[]),
            one(2, "negate", &[1]),
            sum(3, 2),
            one(4, "add", &[3, 1]),
            sum(6, 4),
            one(7, "negate", &[6]),
        ];
        let cut = pieces(&module(entry), 0).unwrap();
        assert_eq!(cut.arguments, [(0, (1, 0))]);
        assert_eq!(cut.results, [(7, 0)]);
        assert_eq!(cut.stages.len(), 3);
        let of = |stage: usize| cut.stages[stage].segment.clone().unwrap();
        assert_eq!(of(0).opcodes(), ["parameter", "negate", "tuple"]);
        assert_eq!((of(1).takes, of(1).gives), (vec![(3, 0), (1, 0)], vec![(4, 0)]));
        assert_eq!(of(2).opcodes(), ["parameter", "negate", "tuple"]);
        let meets: Vec<Vec<Value>> =
            cut.stages.iter().flat_map(|stage| stage.meetings.iter().map(|one| one.takes.clone())).collect();
        assert_eq!(meets, [[(2, 0)], [(4, 0)]]);
    }

    #[test]
    fn a_place_is_a_constant_and_cheap_things_are_computed_where_they_are_used() {
        let id =
            Instruction { shape: Some(Shape { element_type: 8, ..Default::default() }), ..one(2, "replica-id", &[]) };
        let entry = vec![one(1, "parameter", &[]), id, one(3, "select", &[2, 1]), sum(4, 3), one(5, "select", &[2, 4])];
        let module = module(entry);
        for rank in [0, 1] {
            let cut = pieces(&module, rank).unwrap();
            for stage in &cut.stages {
                let segment = stage.segment.as_ref().unwrap();
                assert!(segment.opcodes().contains(&"constant".to_owned()), "{:?}", segment.opcodes());
                assert!(!segment.opcodes().contains(&"replica-id".to_owned()));
                assert_eq!(segment.takes.len(), 1);
            }
        }
        // The two ranks' programs differ in that constant alone.
        let lengths = [0, 1].map(|rank| pieces(&module, rank).unwrap().stages[0].segment.clone().unwrap().module);
        assert_ne!(lengths[0], lengths[1]);
        assert_eq!(lengths[0].len(), lengths[1].len());
    }

    #[test]
    fn independent_collectives_meet_in_one_stage() {
        let second = Instruction { parameter_number: 1, ..one(2, "parameter", &[]) };
        let entry = vec![one(1, "parameter", &[]), second, sum(3, 1), sum(4, 2), one(5, "tuple", &[3, 4])];
        let cut = pieces(&module(entry), 1).unwrap();
        assert_eq!(cut.stages.len(), 1);
        assert!(cut.stages[0].segment.is_none());
        assert_eq!(cut.stages[0].meetings.len(), 2);
        assert_eq!(cut.results, [(3, 0), (4, 0)]);
        assert_eq!(cut.arguments, [(0, (1, 0)), (1, (2, 0))]);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        let argument = vec![one(1, "parameter", &[]), sum(2, 1), one(3, "tuple", &[2, 1])];
        assert!(pieces(&module(argument), 0).unwrap_err().to_string().contains("an argument back as it is"));
        let twice = vec![one(1, "parameter", &[]), sum(2, 1), one(3, "tuple", &[2, 2])];
        assert!(pieces(&module(twice), 0).unwrap_err().to_string().contains("one array twice"));
        let ragged = vec![one(1, "parameter", &[]), one(2, "ragged-all-to-all", &[1])];
        assert!(pieces(&module(ragged), 0).unwrap_err().to_string().contains("can't be run on a virtual slice"));
        let outside = vec![one(1, "parameter", &[]), sum(2, 1)];
        assert!(pieces(&module(outside), 7).unwrap_err().to_string().contains("rank 7 is none of its participants"));
    }
}
