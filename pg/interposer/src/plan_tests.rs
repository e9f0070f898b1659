//! Programs as XLA writes them down, and what they are taken for.

use podring_collective::{DType, Kind};

use super::*;
use crate::hlo::{Computation, DeviceList, Iota, Literal, ReplicaGroup, Shape, SliceDimension, SourceTarget};

const F32: i32 = 11;

fn mesh(ranks: u32) -> Mesh {
    Mesh { replicas: 1, partitions: ranks as usize, ranks: (0..ranks).collect() }
}

fn shape(dims: &[i64]) -> Option<Shape> {
    Some(Shape { element_type: F32, dimensions: dims.to_vec(), ..Default::default() })
}

fn instruction(id: i64, opcode: &str, dims: &[i64], operands: &[i64]) -> Instruction {
    Instruction {
        name: format!("{opcode}.{id}"),
        opcode: opcode.to_owned(),
        shape: shape(dims),
        id,
        operand_ids: operands.to_vec(),
        ..Default::default()
    }
}

fn collective(opcode: &str, dims: &[i64], groups: &[&[i64]]) -> Instruction {
    Instruction {
        channel_id: 1,
        use_global_device_ids: opcode != "all-to-all",
        called_computation_ids: if opcode.contains("reduce") { vec![9] } else { vec![] },
        replica_groups: groups.iter().map(|ids| ReplicaGroup { ids: ids.to_vec() }).collect(),
        ..instruction(10, opcode, dims, &[1])
    }
}

fn module(body: &str, entry: Vec<Instruction>) -> Module {
    let parameter = |id: i64| Instruction { parameter_number: id, ..instruction(id, "parameter", &[], &[]) };
    let combine = Computation {
        instructions: vec![parameter(0), parameter(1), instruction(2, body, &[], &[0, 1])],
        id: 9,
        root_id: 2,
    };
    let root_id = entry.last().unwrap().id;
    let entry = Computation { instructions: entry, id: 5, root_id };
    Module { name: "m".into(), computations: vec![combine, entry], entry_computation_id: 5 }
}

fn plan(module: &Module, ranks: u32) -> Plan {
    match read(module, &mesh(ranks)) {
        Ok(Program::Collective(plan)) => *plan,
        other => panic!("{other:?}"),
    }
}

fn why(module: &Module, ranks: u32) -> String {
    read(module, &mesh(ranks)).unwrap_err().to_string()
}

fn with(one: Instruction, argument: &[i64]) -> Vec<Instruction> {
    vec![instruction(1, "parameter", argument, &[]), one]
}

#[test]
fn every_reduction_is_read_from_its_body() {
    for (body, expected) in [
        ("add", Reduction::Sum),
        ("multiply", Reduction::Product),
        ("minimum", Reduction::Min),
        ("maximum", Reduction::Max),
    ] {
        let one = collective("all-reduce", &[4, 8], &[&[0, 1]]);
        let plan = plan(&module(body, with(one, &[4, 8])), 2);
        assert_eq!(plan.step.what, What::AllReduce(expected));
        assert_eq!(plan.step.groups, [[0, 1]]);
        assert_eq!(plan.arguments, [0]);
        assert!(plan.results[0].is_whole(&plan.step));
    }
    let one = collective("all-reduce", &[4], &[&[0, 1]]);
    assert!(why(&module("subtract", with(one.clone(), &[4])), 2).contains("its reduction is none of"));
    // Of floats there is no bitwise and.
    assert!(why(&module("and", with(one, &[4])), 2).contains("can't be computed"));
}

#[test]
fn a_body_that_does_more_than_combine_is_refused() {
    let mut made = module("add", with(collective("all-reduce", &[4], &[&[0, 1]]), &[4]));
    // add(p0, p0)
    made.computations[0].instructions[2].operand_ids = vec![0, 0];
    assert!(why(&made, 2).contains("its reduction is none of"));
}

#[test]
fn groups_are_ranks() {
    let one = collective("all-reduce", &[4], &[&[0, 2], &[1, 3]]);
    let plan = plan(&module("add", with(one, &[4])), 4);
    assert_eq!(plan.step.group_of(2), Some((&[0, 2][..], 1)));
    assert_eq!(plan.step.group_of(3), Some((&[1, 3][..], 1)));
    // In another order than the ranks', and in the compact form.
    let shuffled = Mesh { ranks: vec![3, 2, 1, 0], ..mesh(4) };
    let mut one = collective("all-reduce", &[4], &[]);
    let iota = Iota { reshape: vec![4], transpose: vec![0], groups: 2, each: 2 };
    one.devices = Some(DeviceList { groups: vec![], iota: Some(iota) });
    let Ok(Program::Collective(plan)) = read(&module("add", with(one, &[4])), &shuffled) else { panic!() };
    assert_eq!(plan.step.groups, [[3, 2], [1, 0]]);
    // No groups: all.
    let one = collective("all-reduce", &[4], &[]);
    assert_eq!(super::tests::plan(&module("add", with(one, &[4])), 3).step.groups, [[0, 1, 2]]);
}

#[test]
fn groups_that_do_not_fit_are_refused() {
    for (groups, expected) in [
        (&[&[0i64, 1][..]][..], "a participant is in no replica group"),
        (&[&[0, 1], &[1, 2]], "a participant is in two"),
        (&[&[0, 1, 2, 3, 4]], "name others than the 4"),
        (&[&[0, 1, 2], &[3]], "of unequal sizes"),
    ] {
        let one = collective("all-reduce", &[4], groups);
        let said = why(&module("add", with(one, &[4])), 4);
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn gathering_and_scattering_along_any_axis() {
    for axis in 0..2 {
        let mut dims = [4, 6];
        dims[axis] *= 2;
        let one = Instruction { dimensions: vec![axis as i64], ..collective("all-gather", &dims, &[&[0, 1]]) };
        let gather = plan(&module("add", with(one, &[4, 6])), 2);
        assert_eq!(gather.step.what, What::AllGather(axis));
        let one = Instruction { dimensions: vec![axis as i64], ..collective("reduce-scatter", &[4, 6], &[&[0, 1]]) };
        let scatter = plan(&module("add", with(one, &dims)), 2);
        assert_eq!(scatter.step.what, What::ReduceScatter(Reduction::Sum, axis));
        let wanted = gather.step.collective(2, &[std::ptr::dangling_mut()], &[std::ptr::dangling_mut()]).unwrap();
        assert_eq!((wanted.kind, wanted.validate(0, 2)), (Kind::AllGather, Ok(())));
    }
    let one = Instruction { dimensions: vec![0], ..collective("all-gather", &[9, 6], &[&[0, 1]]) };
    assert!(why(&module("add", with(one, &[4, 6])), 2).contains("2 times"));
}

#[test]
fn blocks_of_an_axis_lie_where_they_belong() {
    let step = Step {
        what: What::AllGather(1),
        groups: vec![vec![0, 1]],
        inputs: vec![Array { dtype: DType::U8, dims: vec![2, 3] }],
        outputs: vec![Array { dtype: DType::U8, dims: vec![2, 6] }],
    };
    let mut memory = [0u8; 12];
    let made = step.collective(2, &[std::ptr::dangling_mut()], &[memory.as_mut_ptr()]).unwrap();
    let second = &made.parts[0].outputs.tensors[1];
    assert_eq!(second.data as usize - memory.as_ptr() as usize, 3);
    assert_eq!((&second.layout.sizes[..], &second.layout.strides[..]), (&[2i64, 3][..], &[6i64, 1][..]));
}

#[test]
fn both_forms_of_all_to_all() {
    let one = Instruction { dimensions: vec![0], ..collective("all-to-all", &[4, 2], &[&[0, 1]]) };
    assert_eq!(plan(&module("add", with(one, &[4, 2])), 2).step.what, What::AllToAll(0));
    let mut one = collective("all-to-all", &[], &[&[0, 1]]);
    one.shape = Some(Shape { tuple: vec![shape(&[2]).unwrap(); 2], ..Default::default() });
    one.operand_ids = vec![1, 2];
    let entry = vec![
        instruction(1, "parameter", &[2], &[]),
        Instruction { parameter_number: 1, ..instruction(2, "parameter", &[2], &[]) },
        one,
    ];
    let plan = plan(&module("add", entry), 2);
    assert_eq!((plan.step.what, plan.arguments, plan.results.len()), (What::Exchange, vec![0, 1], 2));
}

#[test]
fn permutations_name_ranks_once() {
    let pair = |source, target| SourceTarget { source, target };
    let mut one = collective("collective-permute", &[4], &[]);
    one.source_target_pairs = vec![pair(0, 1), pair(1, 2)];
    let made = plan(&module("add", with(one.clone(), &[4])), 3);
    assert_eq!(made.step.what, What::Permute(vec![(0, 1), (1, 2)]));
    one.source_target_pairs = vec![pair(0, 1), pair(2, 1)];
    assert!(why(&module("add", with(one, &[4])), 3).contains("twice"));
}

#[test]
fn slices_of_a_gathered_list_are_copied_out() {
    let gather = Instruction { dimensions: vec![0], ..collective("all-gather", &[4, 2], &[&[0, 1]]) };
    let slice = |id, start| Instruction {
        slices: vec![
            SliceDimension { start, limit: start + 2, stride: 1 },
            SliceDimension { start: 0, limit: 2, stride: 1 },
        ],
        ..instruction(id, "slice", &[2, 2], &[10])
    };
    let reshape = instruction(13, "reshape", &[4], &[12]);
    let root = instruction(14, "tuple", &[], &[11, 13]);
    let entry = vec![instruction(1, "parameter", &[2, 2], &[]), gather, slice(11, 0), slice(12, 2), reshape, root];
    let plan = plan(&module("add", entry), 2);
    assert_eq!(plan.results.len(), 2);
    assert_eq!(plan.results[1].shape.dims, [4]);
    let from: Vec<u8> = (0..32).collect();
    let mut into = [0u8; 16];
    plan.results[1].copy(&from, &plan.step.outputs[0], &mut into);
    assert_eq!(into[..], from[16..]);
    // The middle two columns of four.
    let middle =
        Piece { of: 0, start: vec![1, 1], sizes: vec![2, 2], shape: Array { dtype: DType::U8, dims: vec![2, 2] } };
    let whole = Array { dtype: DType::U8, dims: vec![3, 4] };
    let from: Vec<u8> = (0..12).collect();
    let mut into = [0u8; 4];
    middle.copy(&from, &whole, &mut into);
    assert_eq!(into, [5, 6, 9, 10]);
}

#[test]
fn a_sum_over_the_number_of_members_is_an_average() {
    let over = |number: f32, body: &str| {
        let mut entry = with(collective("all-reduce", &[4], &[&[0, 1]]), &[4]);
        let literal = Some(Literal { f32: vec![number], ..Default::default() });
        entry.push(Instruction { literal, ..instruction(11, "constant", &[], &[]) });
        entry.push(instruction(12, "broadcast", &[4], &[11]));
        entry.push(instruction(13, "divide", &[4], &[10, 12]));
        read(&module(body, entry), &mesh(2))
    };
    let Ok(Program::Collective(plan)) = over(2.0, "add") else { panic!() };
    assert_eq!((plan.step.what, plan.results.len()), (What::AllReduce(Reduction::Avg), 1));
    assert!(over(3.0, "add").is_err());
    assert!(over(2.0, "maximum").is_err());
}

#[test]
fn what_is_more_than_a_collective_is_refused() {
    let alone = module("add", vec![instruction(1, "parameter", &[4], &[]), instruction(2, "negate", &[4], &[1])]);
    assert_eq!(read(&alone, &mesh(2)), Ok(Program::Alone));
    let mut entry = with(collective("all-reduce", &[4], &[&[0, 1]]), &[4]);
    entry.push(instruction(11, "negate", &[4], &[10]));
    assert!(why(&module("add", entry.clone()), 2).contains("only cut and reshape"));
    entry.push(Instruction { id: 12, ..collective("all-reduce", &[4], &[&[0, 1]]) });
    assert!(why(&module("add", entry), 2).contains("a second collective"));
    let placed = vec![instruction(1, "partition-id", &[], &[])];
    assert!(why(&module("add", placed), 2).contains("doesn't know its place"));
    for opcode in ["collective-broadcast", "ragged-all-to-all", "all-reduce-start", "send"] {
        let one = collective(opcode, &[4], &[&[0, 1]]);
        assert!(why(&module("add", with(one, &[4])), 2).contains("can't be run"), "{opcode}");
    }
}

#[test]
fn rows_for_each_member_are_read_as_such() {
    let list = |id| Instruction {
        shape: Some(Shape { element_type: 5, dimensions: vec![2], ..Default::default() }),
        ..instruction(id, "parameter", &[2], &[])
    };
    let one = |operands: &[i64]| Instruction {
        use_global_device_ids: false,
        operand_ids: operands.to_vec(),
        ..collective("ragged-all-to-all", &[8, 3], &[&[0, 1]])
    };
    let parameters = || {
        let rows = [instruction(1, "parameter", &[4, 3], &[]), instruction(2, "parameter", &[8, 3], &[])];
        rows.into_iter().chain((3..7).map(list))
    };
    let with = |one: Instruction| module("add", parameters().chain([one]).collect());
    let plan = plan(&with(one(&[1, 2, 3, 4, 5, 6])), 2);
    assert_eq!((plan.step.what, plan.step.groups), (What::Ragged, vec![vec![0, 1]]));
    assert!(why(&with(one(&[1, 2, 3, 4, 5])), 2).contains("four lists of 2 whole numbers"));
    // Rows of one shape in both.
    let mut other = with(one(&[1, 2, 3, 4, 5, 6]));
    other.computations[1].instructions[0].shape = shape(&[4, 2]);
    assert!(why(&other, 2).contains("rows of one shape"));
}
