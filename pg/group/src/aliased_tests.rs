//! Tensors of one call that share memory: the result is that of inputs copied beforehand and outputs copied back in order.

use super::*;

/// A tensor: elements of the arena, from `at` on, `stride` apart.
#[derive(Clone, Copy, Debug)]
struct Place {
    at: usize,
    len: usize,
    stride: usize,
}

/// One call's parts: inputs and outputs.
type Case = (Op, Vec<(Vec<Place>, Vec<Place>)>);

const fn flat(at: usize, len: usize) -> Place {
    Place { at, len, stride: 1 }
}

/// Every operation, with memory shared in every way that is not the one in place, and in that one. Blocks of `k`; all
/// lies within the first 3 · size · k elements.
fn cases(me: usize, size: usize, k: usize) -> Vec<Case> {
    let other = (me + 1) % size;
    let part_way = k.div_ceil(2);
    let block = |number: usize| flat(number * k, k);
    let all = flat(0, size * k);
    let list = || (0..size).map(block).collect::<Vec<_>>();
    let aside = |number: usize| block(size + number);
    // A list of places of their own, but for one that is `shared`.
    let with = |at: usize, shared: Place| -> Vec<Place> {
        (0..size).map(|number| if number == at { shared } else { aside(number) }).collect()
    };
    let mut cases: Vec<Case> = Vec::new();
    let mut one = |kind, inputs: Vec<Place>, outputs: Vec<Place>| cases.push((kind, vec![(inputs, outputs)]));
    for shift in [0, 1, part_way] {
        let moved = flat(shift, k);
        one(Op::AllReduce, vec![block(0)], vec![moved]);
        one(Op::AllReduce, vec![moved], vec![block(0)]);
        for root in 0..size {
            let (is_root, root) = (root == me, root as u32);
            one(Op::Broadcast { root }, vec![block(0)], vec![moved]);
            one(Op::Reduce { root }, vec![block(0)], if is_root { vec![moved] } else { vec![] });
        }
        // A slot of a large tensor: the own one, another's, and one across two.
        for slot in [me, other, size - 2] {
            let slot = flat((slot * k + shift).min((size - 1) * k), k);
            one(Op::AllGather, vec![slot], vec![all]);
            one(Op::ReduceScatter, vec![all], vec![slot]);
            for root in 0..size {
                let (is_root, root) = (root == me, root as u32);
                one(Op::Gather { root }, vec![slot], if is_root { vec![all] } else { vec![] });
                one(Op::Scatter { root }, if is_root { vec![all] } else { vec![] }, vec![slot]);
            }
        }
        one(Op::AllToAll, vec![all], vec![flat(shift, size * k)]);
    }
    for at in [me, other] {
        let x = block(0);
        one(Op::AllGather, vec![x], with(at, x));
        one(Op::ReduceScatter, with(at, x), vec![x]);
        for root in 0..size {
            let (is_root, root) = (root == me, root as u32);
            let some = |places: Vec<Place>| if is_root { places } else { vec![] };
            one(Op::Gather { root }, vec![x], some(with(at, x)));
            one(Op::Scatter { root }, some(with(at, x)), vec![x]);
        }
    }
    // The same tensor for everybody.
    let same = || vec![block(0); size];
    one(Op::AllGather, vec![aside(0)], same());
    one(Op::AllGather, vec![block(0)], same());
    one(Op::ReduceScatter, same(), vec![block(0)]);
    one(Op::AllToAll, same(), same());
    // Outputs that lap over the next one.
    one(Op::AllToAll, list(), (0..size).map(|number| flat(number * part_way, k)).collect());
    one(Op::AllToAll, list(), list());
    one(Op::AllToAll, list(), list().into_iter().rev().collect());
    let strided = || (0..size).map(|number| Place { at: number, len: k, stride: size });
    one(Op::AllToAll, strided().collect(), strided().rev().collect());
    one(Op::AllToAll, list(), strided().collect());
    one(Op::AllToAll, strided().collect(), list());
    one(Op::AllGather, vec![block(0)], strided().collect());
    // Parts: one twice, and one that reads what the one before it writes.
    let part = |from: usize, to: usize| (vec![block(from)], vec![block(to)]);
    cases.push((Op::AllReduce, vec![part(0, 0), part(0, 0)]));
    cases.push((Op::AllReduce, vec![part(0, 1), part(1, 2)]));
    cases.push((Op::AllReduce, vec![part(0, 0), part(1, 1), part(2, 2)]));
    cases
}

fn elements(arena: &[i64], place: Place) -> Vec<i64> {
    (0..place.len).map(|index| arena[place.at + index * place.stride]).collect()
}

/// As one block, or cut into as many as the operation has.
fn side(tensors: Vec<Tensor>, blocks: usize) -> Blocks {
    match tensors.as_slice() {
        [whole] if blocks > 1 => {
            let each = whole.layout.numel().unwrap() / blocks;
            Blocks::cut(whole.clone(), &vec![each; blocks])
        }
        _ => Blocks::list(tensors),
    }
}

fn call(kind: Op, size: usize, parts: impl Iterator<Item = (Vec<Tensor>, Vec<Tensor>)>) -> Collective {
    let many = |wanted: &[Op]| if wanted.contains(&kind) { size } else { 1 };
    let root = kind.root().unwrap_or(0);
    let blocks = (
        many(&[Op::ReduceScatter, Op::AllToAll, Op::Scatter { root }]),
        many(&[Op::AllGather, Op::AllToAll, Op::Gather { root }]),
    );
    let reduction = kind.reduces().then_some(Reduction::Sum);
    let part = |(inputs, outputs)| Part {
        dtype: DType::I64,
        reduction,
        inputs: side(inputs, blocks.0),
        outputs: side(outputs, blocks.1),
    };
    Collective { kind, parts: parts.map(part).collect() }
}

/// The call with the arena's own memory.
fn shared(arena: &mut [i64], (kind, parts): &Case, size: usize) -> Collective {
    let base = arena.as_mut_ptr();
    let tensor = |place: &Place| {
        let mut layout = Layout::flat(place.len);
        layout.strides[0] = place.stride as i64;
        assert!(place.at + (place.len - 1) * place.stride < arena.len());
        Tensor { data: base.wrapping_add(place.at).cast(), layout }
    };
    let tensors = |places: &[Place]| places.iter().map(tensor).collect();
    call(*kind, size, parts.iter().map(|(inputs, outputs)| (tensors(inputs), tensors(outputs))))
}

/// What the arena is to be: the call with every tensor in memory of its own.
fn expected(group: &ProcessGroup, arena: &[i64], (kind, parts): &Case, size: usize) -> Vec<i64> {
    let mut copies: Vec<[Vec<Vec<i64>>; 2]> = parts
        .iter()
        .map(|(inputs, outputs)| {
            let read = inputs.iter().map(|&place| elements(arena, place)).collect();
            [read, outputs.iter().map(|place| vec![-1; place.len]).collect()]
        })
        .collect();
    let apart = copies.iter_mut().map(|[inputs, outputs]| {
        (inputs.iter_mut().map(|data| tensor(data)).collect(), outputs.iter_mut().map(|data| tensor(data)).collect())
    });
    finish(group, call(*kind, size, apart)).unwrap();
    let mut arena = arena.to_vec();
    for ((_, places), [_, results]) in parts.iter().zip(&copies) {
        for (place, result) in places.iter().zip(results) {
            for (index, value) in result.iter().enumerate() {
                arena[place.at + index * place.stride] = *value;
            }
        }
    }
    arena
}

fn aliased(group: &ProcessGroup) {
    let (me, size) = (group.rank() as usize, group.size() as usize);
    for (k, times) in [(2usize, 10), (1000, 3), (40_000, 1)] {
        let arena: Vec<i64> = (0..3 * size * k).map(|at| ((me + 1) * 1_000_003 + at) as i64).collect();
        for case in cases(me, size, k) {
            let wanted = expected(group, &arena, &case, size);
            for time in 0..times {
                let mut arena = arena.clone();
                let call = shared(&mut arena, &case, size);
                finish(group, call).unwrap();
                let wrong = arena.iter().zip(&wanted).position(|(got, wanted)| got != wanted);
                assert_eq!(wrong, None, "rank {me} of {size}, blocks of {k}, time {time}: {case:?}");
            }
        }
    }
}

#[test]
fn tensors_that_share_memory() {
    run(2, local, LONG, aliased);
    run(3, local, LONG, aliased);
    run(3, staged, LONG, aliased);
    run(3, two_hosts, LONG, aliased);
}
