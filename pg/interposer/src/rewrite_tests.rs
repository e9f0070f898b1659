//! Programs before and after.

use podring_collective::Reduction;
use prost::Message as _;

use super::*;
use crate::hlo::{Computation, ReplicaGroup, Shape};
use crate::step::What;

const F32: i32 = 11;

fn mesh() -> Mesh {
    Mesh { replicas: 1, partitions: 2, ranks: vec![0, 1] }
}

fn instruction(id: i64, opcode: &str, dims: &[i64], operands: &[i64]) -> Instruction {
    Instruction {
        name: format!("{opcode}.{id}"),
        opcode: opcode.to_owned(),
        shape: Some(Shape { element_type: F32, dimensions: dims.to_vec(), ..Default::default() }),
        id,
        operand_ids: operands.to_vec(),
        ..Default::default()
    }
}

fn collective(id: i64, opcode: &str, dims: &[i64], operands: &[i64]) -> Instruction {
    Instruction {
        channel_id: 1,
        use_global_device_ids: true,
        called_computation_ids: vec![9],
        replica_groups: vec![ReplicaGroup { ids: vec![0, 1] }],
        ..instruction(id, opcode, dims, operands)
    }
}

/// A module of these instructions, with a field in each message that nobody here knows.
fn module(entry: Vec<Instruction>) -> (Vec<u8>, Module) {
    let parameter = |id: i64| Instruction { parameter_number: id, ..instruction(id, "parameter", &[], &[]) };
    let combine = Computation {
        instructions: vec![parameter(0), parameter(1), instruction(2, "add", &[], &[0, 1])],
        id: 9,
        root_id: 2,
    };
    let root_id = entry.last().unwrap().id;
    let entry = Computation { instructions: entry, id: 5, root_id };
    let mut bytes = Module { name: "m".into(), computations: vec![combine], entry_computation_id: 5 }.encode_to_vec();
    let mut own = entry.encode_to_vec();
    put_bytes(&mut own, 900, b"of the computation");
    put_bytes(&mut bytes, COMPUTATIONS, &own);
    put_bytes(&mut bytes, 901, b"of the module");
    let module = Module::decode(&bytes[..]).unwrap();
    (bytes, module)
}

fn entry(made: &Rewritten) -> Vec<Instruction> {
    let module = Module::decode(&made.module[..]).unwrap();
    module.computations.into_iter().find(|one| one.id == 5).unwrap().instructions
}

/// A field of an instruction's, by its number.
fn raw(made: &Rewritten, id: i64, number: u64) -> Vec<Vec<u8>> {
    let fields = |bytes: &[u8]| -> Vec<(u64, Vec<u8>)> {
        let read = |field: Result<crate::wire::Field, Damaged>| {
            field.map(|(n, whole, inner)| (n, inner.unwrap_or(whole).to_vec()))
        };
        Fields(bytes).map(read).map(Result::unwrap).collect()
    };
    for (_, computation) in fields(&made.module).into_iter().filter(|(n, _)| *n == COMPUTATIONS) {
        for (_, one) in fields(&computation).into_iter().filter(|(n, _)| *n == INSTRUCTIONS) {
            if Instruction::decode(&one[..]).unwrap().id == id {
                return fields(&one).into_iter().filter(|(n, _)| *n == number).map(|(_, value)| value).collect();
            }
        }
    }
    Vec::new()
}

#[test]
fn calls_stand_in_their_collectives_places_one_after_the_other() {
    let (bytes, module) = module(vec![
        instruction(1, "parameter", &[4], &[]),
        instruction(2, "negate", &[4], &[1]),
        collective(3, "all-reduce", &[4], &[2]),
        collective(4, "all-reduce", &[4], &[1]),
        instruction(5, "add", &[4], &[3, 4]),
    ]);
    let made = rewrite(&bytes, &module, &mesh(), Some(0), 70).unwrap();
    assert_eq!(made.calls.len(), 2);
    let sums = |call: &Call| matches!(call, Call::Collective(step) if step.what == What::AllReduce(Reduction::Sum));
    assert!(made.same && made.calls.iter().all(sums));
    let entry = entry(&made);
    assert!(entry.iter().all(|one| !COLLECTIVES.contains(&one.opcode.as_str())));
    let calls: Vec<&Instruction> = entry.iter().filter(|one| one.opcode == "custom-call").collect();
    let [first, second] = calls[..] else { panic!("{entry:?}") };
    assert_eq!(first.operand_ids, [2]);
    // The second call takes what the first one gives beside its result.
    let [operand, token] = second.operand_ids[..] else { panic!("{second:?}") };
    assert_eq!(operand, 1);
    let token = entry.iter().find(|one| one.id == token).unwrap();
    assert_eq!(
        (token.opcode.as_str(), token.tuple_index, &token.operand_ids[..]),
        ("get-tuple-element", 1, &[first.id][..])
    );
    // Users find the results under the collectives' ids.
    for (id, call) in [(3, first), (4, second)] {
        let result = entry.iter().find(|one| one.id == id).unwrap();
        assert_eq!((result.tuple_index, &result.operand_ids[..]), (0, &[call.id][..]));
        assert_eq!(result.shape.as_ref().unwrap().array().unwrap().1, [4]);
    }
    assert_eq!(raw(&made, first.id, BACKEND_CONFIG), [b"{index = 70 : i64}"]);
    assert_eq!(raw(&made, second.id, BACKEND_CONFIG), [b"{index = 71 : i64}"]);
    assert_eq!(raw(&made, second.id, OPERAND_SHAPES).len(), 2);
    // Everything is defined before it is used, once.
    let mut defined = Vec::new();
    for one in &entry {
        assert!(one.operand_ids.iter().all(|id| defined.contains(id)), "{one:?}");
        assert!(!defined.contains(&one.id), "{one:?}");
        defined.push(one.id);
    }
    // What is not known went on.
    for words in [&b"of the computation"[..], b"of the module"] {
        assert!(made.module.windows(words.len()).any(|window| window == words));
    }
}

#[test]
fn several_results_stay_a_tuple() {
    let array = Shape { element_type: F32, dimensions: vec![4], ..Default::default() };
    let both = Shape { element_type: 13, tuple: vec![array.clone(), array], ..Default::default() };
    let (bytes, module) = module(vec![
        instruction(1, "parameter", &[4], &[]),
        instruction(2, "negate", &[4], &[1]),
        Instruction { shape: Some(both), ..collective(3, "all-reduce", &[4], &[1, 2]) },
    ]);
    let made = rewrite(&bytes, &module, &mesh(), Some(0), 1).unwrap();
    let entry = entry(&made);
    let result = entry.iter().find(|one| one.id == 3).unwrap();
    assert_eq!((result.opcode.as_str(), result.operand_ids.len()), ("tuple", 2));
    assert_eq!(result.shape.as_ref().unwrap().tuple.len(), 2);
    let places: Vec<i64> =
        result.operand_ids.iter().map(|id| entry.iter().find(|one| one.id == *id).unwrap().tuple_index).collect();
    assert_eq!(places, [0, 1]);
}

#[test]
fn a_rank_asks_for_its_place_when_the_program_runs() {
    let (bytes, module) =
        module(vec![instruction(21, "partition-id", &[], &[]), instruction(22, "replica-id", &[], &[])]);
    let ranks = [0, 1].map(|place| rewrite(&bytes, &module, &mesh(), Some(place), 64).unwrap());
    // The program is the same, the answers are not.
    assert_eq!(ranks[0].module, ranks[1].module);
    assert_eq!(ranks[0].calls, [Call::Place(0), Call::Place(0)]);
    assert_eq!(ranks[1].calls, [Call::Place(1), Call::Place(0)]);
    assert!(ranks.iter().all(|made| made.same));
    assert!(entry(&ranks[1]).iter().all(|one| one.opcode == "custom-call"));
    assert_eq!(raw(&ranks[1], 21, BACKEND_CONFIG), [b"{index = 64 : i64}"]);
    assert_eq!(raw(&ranks[1], 22, BACKEND_CONFIG), [b"{index = 65 : i64}"]);
    let outside = rewrite(&bytes, &module, &mesh(), None, 1).unwrap_err();
    assert!(outside.to_string().contains("takes no part"), "{outside}");
}

#[test]
fn a_ranks_place_within_a_loop_is_a_number() {
    let (bytes, mut inner) = module(vec![instruction(1, "parameter", &[4], &[])]);
    drop(bytes);
    inner.computations[0].instructions.push(instruction(21, "partition-id", &[], &[]));
    inner.computations[0].instructions.push(instruction(22, "replica-id", &[], &[]));
    let made = rewrite(&inner.encode_to_vec(), &inner, &mesh(), Some(1), 1).unwrap();
    assert!(!made.same && made.calls.is_empty());
    for (id, number) in [(21, 1), (22, 0)] {
        let literal = raw(&made, id, LITERAL).remove(0);
        let numbers: Vec<Vec<u8>> = Fields(&literal)
            .map(Result::unwrap)
            .filter(|(n, ..)| *n == LITERAL_U32S)
            .map(|(_, _, inner)| inner.unwrap().to_vec())
            .collect();
        assert_eq!(numbers, [[number]]);
    }
}

#[test]
fn what_cannot_be_run_is_refused() {
    // In a loop's body there may be any number of them.
    let (_, mut inner) = module(vec![instruction(1, "parameter", &[4], &[])]);
    inner.computations[0].instructions.push(collective(3, "all-reduce", &[4], &[0]));
    let bytes = inner.encode_to_vec();
    let error = rewrite(&bytes, &inner, &mesh(), Some(0), 1).unwrap_err();
    assert!(error.to_string().contains("inside another computation"), "{error}");
    let (bytes, module) =
        module(vec![instruction(1, "parameter", &[4], &[]), collective(3, "collective-broadcast", &[4], &[1])]);
    let error = rewrite(&bytes, &module, &mesh(), Some(0), 1).unwrap_err();
    assert!(error.to_string().contains("can't be run on a virtual slice"), "{error}");
    assert!(matches!(rewrite(&bytes[..7], &module, &mesh(), Some(0), 1), Err(Unwritten::Damaged(_))));
}
