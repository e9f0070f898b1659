//! Every rank's steps, played against the collective itself: both by one plain reference over memory.

use super::*;
use podring_collective::{DType, Layout};
use proptest::prelude::*;
use proptest::sample::select;

/// The blocks' elements: all are of 8 bytes here.
fn read(side: &Blocks) -> Vec<Vec<u64>> {
    // SAFETY: the test's own memory, which lives as long as its collectives.
    let elements = |(at, count)| unsafe { std::slice::from_raw_parts(at as *const u64, count) }.to_vec();
    blocks(side, 8).into_iter().map(elements).collect()
}

fn write(side: &Blocks, values: &[Vec<u64>]) {
    let places = blocks(side, 8);
    assert_eq!(places.iter().map(|place| place.1).collect::<Vec<_>>(), lengths(values));
    for ((at, count), values) in places.into_iter().zip(values) {
        // SAFETY: as in `read`; nobody else holds a reference.
        unsafe { std::slice::from_raw_parts_mut(at as *mut u64, count) }.copy_from_slice(values);
    }
}

fn lengths(values: &[Vec<u64>]) -> Vec<usize> {
    values.iter().map(Vec::len).collect()
}

fn combined(reduction: Reduction, dtype: DType, values: &[u64]) -> u64 {
    if dtype == DType::I64 {
        let whole = values.iter().map(|&value| value.cast_signed());
        return match reduction {
            Reduction::Sum => whole.sum::<i64>(),
            Reduction::Min => whole.min().unwrap(),
            Reduction::BitXor => whole.fold(0, |a, b| a ^ b),
            other => panic!("{other}"),
        }
        .cast_unsigned();
    }
    let sum: f64 = values.iter().map(|&value| f64::from_bits(value)).sum();
    match reduction {
        Reduction::Sum => sum,
        Reduction::Avg => sum / values.len() as f64,
        Reduction::PreMulSum(factor) => sum * factor,
        other => panic!("{other}"),
    }
    .to_bits()
}

fn reduced(part: &Part, inputs: &[Vec<u64>]) -> Vec<u64> {
    let column = |index: usize| inputs.iter().map(|input| input[index]).collect::<Vec<_>>();
    (0..inputs[0].len()).map(|index| combined(part.reduction.unwrap(), part.dtype, &column(index))).collect()
}

/// One collective of these ranks, in their order.
fn execute(calls: &[&Collective]) {
    let kind = calls[0].kind;
    assert!(calls.iter().all(|call| call.kind == kind && call.parts.len() == calls[0].parts.len()), "{calls:?}");
    for index in 0..calls[0].parts.len() {
        let part = |rank: usize| &calls[rank].parts[index];
        let inputs: Vec<Vec<Vec<u64>>> = (0..calls.len()).map(|rank| read(&part(rank).inputs)).collect();
        let whole = || inputs.iter().map(|blocks| blocks.concat()).collect::<Vec<_>>();
        for rank in 0..calls.len() {
            let outputs = match kind {
                Kind::AllReduce => vec![reduced(part(rank), &whole())],
                Kind::Reduce { root } if root as usize == rank => vec![reduced(part(rank), &whole())],
                Kind::Broadcast { root } => vec![whole()[root as usize].clone()],
                Kind::AllGather => whole(),
                Kind::Gather { root } if root as usize == rank => whole(),
                Kind::ReduceScatter => {
                    let column: Vec<Vec<u64>> = inputs.iter().map(|blocks| blocks[rank].clone()).collect();
                    vec![reduced(part(rank), &column)]
                }
                Kind::Reduce { .. } | Kind::Gather { .. } => Vec::new(),
                other => panic!("{other:?}"),
            };
            let outputs = if part(rank).outputs.counts.len() == 1 { vec![outputs.concat()] } else { outputs };
            write(&part(rank).outputs, &outputs);
        }
    }
}

/// Runs all ranks' steps. Who is where waits until all that belong together are there.
fn play(slices: &[Vec<u32>], mut steps: Vec<VecDeque<Step>>) {
    let columns: Vec<Vec<u32>> =
        (0..slices[0].len()).map(|member| slices.iter().map(|members| members[member]).collect()).collect();
    while steps.iter().any(|steps| !steps.is_empty()) {
        let mut went = false;
        for steps in &mut steps {
            while matches!(steps.front(), Some(Step::Local(_))) {
                if let Some(Step::Local(act)) = steps.pop_front() {
                    act();
                    went = true;
                }
            }
        }
        for (between, ranks) in slices.iter().map(|slice| (false, slice)).chain(columns.iter().map(|all| (true, all))) {
            let next = |&rank: &u32| match (steps[rank as usize].front(), between) {
                (Some(Step::Inside(call)), false) | (Some(Step::Between(call)), true) => Some(&**call),
                _ => None,
            };
            let Some(calls) = ranks.iter().map(next).collect::<Option<Vec<&Collective>>>() else { continue };
            if calls[0].kind != Kind::Barrier {
                execute(&calls);
            }
            ranks.iter().for_each(|&rank| drop(steps[rank as usize].pop_front()));
            went = true;
        }
        assert!(went, "ranks wait for each other");
    }
}

#[derive(Clone, Debug)]
struct Case {
    slices: Vec<Vec<u32>>,
    kind: Kind,
    dtype: DType,
    reduction: Reduction,
    /// Of each part, elements of each rank's block; where all have as many, the first's.
    counts: Vec<Vec<usize>>,
    /// One tensor per block, not one for all.
    listed: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    let reductions = select(vec![
        (DType::I64, Reduction::Sum),
        (DType::I64, Reduction::Min),
        (DType::I64, Reduction::BitXor),
        (DType::F64, Reduction::Sum),
        (DType::F64, Reduction::Avg),
        (DType::F64, Reduction::PreMulSum(0.5)),
    ]);
    (2usize..=4, 1usize..=4).prop_flat_map(move |(slices, members)| {
        let ranks = slices * members;
        let positions = Just((0..ranks as u32).collect::<Vec<_>>()).prop_shuffle();
        let root = 0..ranks as u32;
        let kinds = (0usize..6, root).prop_map(|(code, root)| match code {
            0 => Kind::AllReduce,
            1 => Kind::Reduce { root },
            2 => Kind::Broadcast { root },
            3 => Kind::AllGather,
            4 => Kind::ReduceScatter,
            _ => Kind::Barrier,
        });
        let block = prop_oneof![Just(0usize), 1usize..4, 4usize..40];
        let counts = prop::collection::vec(prop::collection::vec(block, ranks), 1..4);
        (positions, kinds, reductions.clone(), counts, any::<bool>()).prop_map(
            move |(positions, kind, (dtype, reduction), counts, listed)| {
                let slices = positions.chunks(members).map(<[u32]>::to_vec).collect();
                Case { slices, kind, dtype, reduction, counts, listed }
            },
        )
    })
}

/// A rank's call and its memory: per part what it reads and what it writes.
struct Call {
    collective: Collective,
    memory: Vec<[Vec<u64>; 2]>,
}

impl Case {
    fn ranks(&self) -> usize {
        self.slices.len() * self.slices[0].len()
    }

    fn call(&self, rank: usize) -> Call {
        let mut call = Call { collective: Collective { kind: self.kind, parts: SmallVec::new() }, memory: Vec::new() };
        if self.kind == Kind::Barrier {
            return call;
        }
        for (index, counts) in self.counts.iter().enumerate() {
            let (all, own, same) = (counts.clone(), vec![counts[rank]], vec![counts[0]]);
            let (inputs, outputs) = match self.kind {
                Kind::AllGather => (own, all),
                Kind::ReduceScatter => (all, own),
                Kind::Reduce { root } if root as usize != rank => (same, Vec::new()),
                _ => (same.clone(), same),
            };
            // Every average on the way is exact, for at most four slices of at most four.
            let value = |at: usize| ((rank * 31 + index * 7 + at * 13) % 101) as i64 * 144 - 50 * 144;
            let bits = |value: i64| if self.dtype == DType::I64 { value as u64 } else { (value as f64).to_bits() };
            let read: Vec<u64> = (0..inputs.iter().sum()).map(|at| bits(value(at))).collect();
            let written = vec![u64::MAX; outputs.iter().sum()];
            call.memory.push([read, written]);
            let [read, written] = call.memory.last_mut().unwrap();
            // A broadcast is in place.
            let written = if matches!(self.kind, Kind::Broadcast { .. }) { &mut *read } else { written };
            let written = self.side(written.as_mut_ptr(), &outputs);
            let part = Part {
                dtype: self.dtype,
                reduction: self.kind.reduces().then_some(self.reduction),
                inputs: self.side(read.as_mut_ptr(), &inputs),
                outputs: written,
            };
            call.collective.parts.push(part);
        }
        call
    }

    fn side(&self, memory: *mut u64, counts: &[usize]) -> Blocks {
        let tensor = |start: usize, count: usize| Tensor {
            data: memory.wrapping_add(start).cast(),
            layout: Layout::flat(count),
        };
        if counts.is_empty() {
            return Blocks::none();
        }
        if !self.listed {
            return Blocks::cut(tensor(0, counts.iter().sum()), counts);
        }
        let mut at = 0;
        Blocks::list(counts.iter().map(|&count| {
            at += count;
            tensor(at - count, count)
        }))
    }
}

fn check(case: &Case) {
    let calls = || (0..case.ranks()).map(|rank| case.call(rank)).collect::<Vec<_>>();
    let (wanted, got) = (calls(), calls());
    if case.kind != Kind::Barrier {
        execute(&wanted.iter().map(|call| &call.collective).collect::<Vec<_>>());
    }
    let mut memory: Vec<Vec<Vec<u64>>> = vec![Vec::new(); case.ranks()];
    let mut steps: Vec<VecDeque<Step>> = (0..case.ranks()).map(|_| VecDeque::new()).collect();
    for (slice, members) in case.slices.iter().enumerate() {
        for (me, &rank) in members.iter().enumerate() {
            let (plan, rank) = (Plan::new(case.slices.clone(), slice, me), rank as usize);
            assert_eq!(plan.position() as usize, rank);
            steps[rank] = plan.steps(&got[rank].collective, &mut memory[rank]);
        }
    }
    play(&case.slices, steps);
    for (rank, (wanted, got)) in wanted.iter().zip(&got).enumerate() {
        assert_eq!(wanted.memory, got.memory, "rank {rank}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn the_steps_do_what_the_collective_does(case in cases()) {
        check(&case);
    }
}

#[test]
fn what_halves_would_change_goes_over_the_fabric_whole() {
    let plan = Plan::new(vec![vec![0, 1], vec![2, 3]], 1, 0);
    let whole = |kind, dtype, reduction| {
        let call = Collective::sized(kind, dtype, reduction, 64, 4).unwrap();
        let steps = plan.steps(&call, &mut Vec::new());
        steps.len() == 1 && matches!(&steps[0], Step::Host(same) if same.fingerprint() == call.fingerprint())
    };
    assert!(whole(Kind::AllReduce, DType::I32, Some(Reduction::Avg)));
    assert!(whole(Kind::AllToAll, DType::F32, None));
    assert!(whole(Kind::Gather { root: 1 }, DType::F32, None));
    assert!(whole(Kind::Scatter { root: 1 }, DType::F32, None));
    assert!(!whole(Kind::AllReduce, DType::I32, Some(Reduction::Sum)));
}

#[test]
fn within_one_slice_it_is_the_program_alone() {
    let plan = Plan::new(vec![vec![2, 0, 1]], 0, 2);
    let call = Collective::sized(Kind::AllReduce, DType::F32, Some(Reduction::Sum), 64, 3).unwrap();
    let steps = plan.steps(&call, &mut Vec::new());
    assert!(matches!(&steps.into_iter().collect::<Vec<_>>()[..], [Step::Inside(_)]));
}
