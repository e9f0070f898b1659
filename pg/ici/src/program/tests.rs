use super::*;
use proptest::prelude::*;
use std::path::Path;

fn spec(op: Op, dtype: DType, reduction: Option<Reduction>, elements: usize, groups: Groups) -> Spec {
    let parts = if op == Op::Barrier { vec![] } else { vec![PartSpec { dtype, reduction, elements }] };
    Spec { op, parts, groups, backend: Backend::Cpu, exact: false, donate: false }
}

/// Compares with the file of this name; `PODRING_BLESS=1` writes it.
fn golden(name: &str, spec: &Spec) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(format!("{name}.mlir"));
    let text = build(spec).unwrap().text;
    if std::env::var_os("PODRING_BLESS").is_some() {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, &text).unwrap();
    }
    let expected = std::fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(text, expected, "{name} changed; PODRING_BLESS=1 accepts it");
}

#[test]
fn texts_are_as_reviewed() {
    let pairs = || Groups::new(vec![vec![0, 2], vec![3, 1]]).unwrap();
    let sum = Some(Reduction::Sum);
    golden("all_reduce_bf16", &spec(Op::AllReduce, DType::BF16, sum, 5000, Groups::all(4)));
    golden("all_reduce_avg_i32", &spec(Op::AllReduce, DType::I32, Some(Reduction::Avg), 1, pairs()));
    golden("all_reduce_xor_u8", &spec(Op::AllReduce, DType::U8, Some(Reduction::BitXor), 100, pairs()));
    let mut donated = spec(Op::AllReduce, DType::BF16, sum, 5000, Groups::all(4));
    donated.exact = true;
    donated.donate = true;
    golden("all_reduce_bf16_exact_donated", &donated);
    golden(
        "reduce_scatter_premul_f8",
        &spec(Op::ReduceScatter, DType::F8E4M3FN, Some(Reduction::PreMulSum(0.5)), 9, pairs()),
    );
    let mut coalesced = spec(Op::ReduceScatter, DType::F32, sum, 1000, Groups::all(2));
    coalesced.parts.push(PartSpec { dtype: DType::I64, reduction: Some(Reduction::Max), elements: 3 });
    golden("reduce_scatter_coalesced", &coalesced);
    golden("broadcast", &spec(Op::Broadcast, DType::F64, None, 7, pairs()));
    golden("all_gather", &spec(Op::AllGather, DType::Bool, None, 7, pairs()));
    golden("all_to_all", &spec(Op::AllToAll, DType::C128, None, 1000, Groups::all(4)));
    golden("all_to_all_uneven", &spec(Op::AllToAllUneven { tiles: 3 }, DType::F16, None, 20, Groups::all(2)));
    golden("gather", &spec(Op::Gather { root: 1 }, DType::U8, None, 3, Groups::all(3)));
    golden("scatter", &spec(Op::Scatter { root: 1 }, DType::U8, None, 3, Groups::all(3)));
    golden("gather_pieces", &spec(Op::Gather { root: 1 }, DType::U8, None, 256 << 10, Groups::all(3)));
    golden("scatter_pieces", &spec(Op::Scatter { root: 1 }, DType::U8, None, 256 << 10, Groups::all(3)));
    golden("permute", &spec(Op::Permute { pairs: vec![(0, 1), (1, 0)] }, DType::F32, None, 3, pairs()));
    golden("barrier", &spec(Op::Barrier, DType::U8, None, 0, Groups::all(4)));
}

#[test]
fn bad_specs_are_named() {
    assert!(matches!(Groups::new(vec![vec![0, 1], vec![2]]), Err(ProgramError::Groups { .. })));
    assert!(matches!(Groups::new(vec![vec![0, 0]]), Err(ProgramError::Groups { .. })));
    assert!(matches!(Groups::new(vec![]), Err(ProgramError::Groups { .. })));
    let gather = spec(Op::Gather { root: 4 }, DType::U8, None, 3, Groups::all(4));
    assert_eq!(build(&gather).unwrap_err(), ProgramError::Position { what: "root", position: 4, size: 4 });
    let twice = spec(Op::Permute { pairs: vec![(0, 1), (2, 1)] }, DType::U8, None, 3, Groups::all(4));
    assert!(matches!(build(&twice), Err(ProgramError::Position { position: 1, .. })));
    let bare = spec(Op::AllReduce, DType::F32, None, 3, Groups::all(4));
    assert_eq!(build(&bare).unwrap_err(), ProgramError::NoReduction { part: 0 });
    let c32 = spec(Op::AllReduce, DType::C32, Some(Reduction::Sum), 3, Groups::all(4));
    assert!(matches!(build(&c32), Err(ProgramError::Unsupported(_))));
    let huge = spec(Op::AllToAllUneven { tiles: 1 << 31 }, DType::U8, None, 1, Groups::all(2));
    assert!(matches!(build(&huge), Err(ProgramError::TooLarge { .. })));
}

#[test]
fn factor_and_type_of_moves_do_not_change_the_program() {
    let premul = |factor| {
        build(&spec(Op::AllReduce, DType::F32, Some(Reduction::PreMulSum(factor)), 9, Groups::all(2))).unwrap()
    };
    assert_eq!(premul(0.5), premul(2.0));
    let gather = |dtype, elements| build(&spec(Op::AllGather, dtype, None, elements, Groups::all(2))).unwrap();
    assert_eq!(gather(DType::U8, 80), gather(DType::F64, 10));
}

proptest! {
    /// The tree of a gather brings every block to the root, each once, and its order after rotation is that of ranks.
    #[test]
    fn trees_reach_everybody(members in 1usize..70, root_seed in 0usize..70) {
        let root = (root_seed % members) as u32;
        let mut held: Vec<Vec<usize>> = (0..members).map(|position| vec![position]).collect();
        let mut sent = 0;
        for step in tree_steps(members) {
            for (child, parent) in tree_step(members, root, step) {
                // Blocks that don't exist stand for members past the last.
                let full = held[parent as usize].len() == step;
                prop_assert!(full, "parent {parent} holds {} at step {step}", held[parent as usize].len());
                let moved = std::mem::take(&mut held[child as usize]);
                sent += moved.len();
                held[parent as usize].extend(moved);
            }
        }
        let at_root = &held[root as usize];
        let relative: Vec<usize> = at_root.iter().map(|block| (block + members - root as usize) % members).collect();
        prop_assert_eq!(relative, (0..members).collect::<Vec<_>>());
        prop_assert!(sent <= members * (members.ilog2() as usize + 1));
    }
}
