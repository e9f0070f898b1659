//! Tensors of all sorts: the thin end, strides, device buffers, messages.

use podring_collective::{Blocks, Collective, DType, Kind, Layout, Part, Reduction, Tensor};
use podring_group::{State, engine::DeviceCall};
use podring_ici::{
    engine::Options,
    pjrt::Element,
    slice::{Callers, How, plan},
};
use podring_topology::parse;
use smallvec::SmallVec;

use crate::job::{LONG, all_reduce, barrier, finish, machine, machine_with, one, post, tensor, world};

#[test]
fn sums_on_two_devices() {
    let Some(machine) = machine(2) else { return };
    world(&machine, LONG, |group| {
        for count in [0usize, 1, 3, 1000, 70_001] {
            let mut data: Vec<f32> = (0..count).map(|i| ((i % 1000) * (group.rank() as usize + 1)) as f32).collect();
            let work = post(group, all_reduce(&mut data));
            work.wait(Some(LONG), || false).unwrap();
            assert_eq!(work.state(), State::Done);
            let times = work.times().unwrap();
            assert!(times.arrived <= times.gathered && times.gathered <= times.launched);
            assert!(times.launched <= times.computed && times.computed <= times.done);
            assert!(data.iter().enumerate().all(|(i, value)| *value == ((i % 1000) * 3) as f32), "{count}");
        }
        // The fabric's collectives and the devices' don't disturb each other.
        let (mut host, mut device) = (vec![1.0f32; 9], vec![2.0f32; 9]);
        let works =
            [group.post(all_reduce(&mut host), None, None, false).unwrap(), post(group, all_reduce(&mut device))];
        for work in works {
            work.wait(Some(LONG), || false).unwrap();
        }
        assert_eq!((host[8], device[8]), (2.0, 4.0));
    });
}

#[test]
fn second_calls_compile_nothing() {
    let Some(client) = crate::job::client(4) else { return };
    let machine = podring_ici::engine::Machine::start(client, Default::default()).unwrap();
    let compiled = world(&machine, LONG, |group| {
        let (rank, size) = (group.rank() as usize, group.size() as usize);
        let round = |count: usize, root: u32, factor: f64| {
            let mut data = vec![1.0f32; count];
            let mut all = vec![0.0f32; count * size];
            let whole = |data: &mut Vec<f32>| Blocks::whole(tensor(data));
            let cut = |data: &mut Vec<f32>| Blocks::cut(tensor(data), &vec![count; size]);
            let premul = Some(Reduction::PreMulSum(factor));
            for call in [
                all_reduce(&mut data),
                one(Kind::AllReduce, DType::F32, premul, whole(&mut data), whole(&mut data)),
                one(Kind::Broadcast { root }, DType::F32, None, whole(&mut data), whole(&mut data)),
                one(Kind::AllGather, DType::F32, None, whole(&mut data), cut(&mut all)),
                one(Kind::ReduceScatter, DType::F32, Some(Reduction::Sum), cut(&mut all), whole(&mut data)),
            ] {
                finish(group, call).unwrap();
            }
            // Splits that no two calls share.
            let share = |from: usize, to: usize| 16 + (count + 3 * from + to) % 16;
            let sent: Vec<usize> = (0..size).map(|to| share(rank, to)).collect();
            let got: Vec<usize> = (0..size).map(|from| share(from, rank)).collect();
            let (mut out, mut into) = (vec![0u8; sent.iter().sum()], vec![0u8; got.iter().sum()]);
            let (inputs, outputs) = (Blocks::cut(tensor(&mut out), &sent), Blocks::cut(tensor(&mut into), &got));
            finish(group, one(Kind::AllToAll, DType::U8, None, inputs, outputs)).unwrap();
        };
        round(5, 0, 0.5);
        finish(group, barrier()).unwrap();
        let first = machine.counts().compiled;
        finish(group, barrier()).unwrap();
        for count in 6..40 {
            round(count, count as u32 % 4, count as f64);
        }
        finish(group, barrier()).unwrap();
        (first, machine.counts().compiled)
    });
    assert_eq!(compiled[0], (7, 7), "all_reduce, with a factor, broadcast, gather, scatter, exchange, barrier");
}

#[test]
fn programs_are_compiled_ahead() {
    let Some(client) = crate::job::client(2) else { return };
    let machine = podring_ici::engine::Machine::start(client, Default::default()).unwrap();
    world(&machine, LONG, |group| {
        let mut data = vec![1.0f32; 100];
        let mut shown = Vec::new();
        let calls = [all_reduce(&mut data), barrier(), all_reduce(&mut data[..7])];
        group.warm(&calls, |done, total| shown.push((done, total))).unwrap();
        assert_eq!(shown, [(0, 3), (1, 3), (2, 3), (3, 3)]);
        assert_eq!(machine.counts().compiled, 2);
        finish(group, all_reduce(&mut data)).unwrap();
        finish(group, barrier()).unwrap();
        assert_eq!((machine.counts().compiled, data[99]), (2, 2.0));
    });
}

#[test]
fn strided_tensors_are_packed() {
    let Some(machine) = machine(2) else { return };
    world(&machine, LONG, |group| {
        // Columns 0 and 2 of a 3×4 matrix, transposed.
        let mut data: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let layout = Layout {
            sizes: SmallVec::from_slice(&[2, 3]),
            strides: SmallVec::from_slice(&[2, 4]),
            conj: false,
            neg: false,
        };
        let strided = Tensor { data: data.as_mut_ptr().cast(), layout };
        let both = Blocks::whole(strided);
        finish(group, one(Kind::AllReduce, DType::F32, Some(Reduction::Sum), both.clone(), both)).unwrap();
        let expected: Vec<f32> = (0..12).map(|i| if i % 2 == 0 { 2.0 * i as f32 } else { i as f32 }).collect();
        assert_eq!(data, expected);
        // Lists of tensors, one of them empty.
        let mut mine = vec![group.rank() as i16 + 1; 3 * group.rank() as usize];
        let (mut first, mut second) = (vec![0i16; 0], vec![0i16; 3]);
        let outputs = Blocks::list([tensor(&mut first), tensor(&mut second)]);
        finish(group, one(Kind::AllGather, DType::I16, None, Blocks::whole(tensor(&mut mine)), outputs)).unwrap();
        assert_eq!(second, [2, 2, 2]);
    });
}

#[test]
fn coalesced_parts_go_together() {
    let Some(machine) = machine(2) else { return };
    world(&machine, LONG, |group| {
        let (mut a, mut b) = (vec![1.5f32; 5], vec![i64::from(group.rank()); 300]);
        let part = |dtype, reduction, data: Tensor| Part {
            dtype,
            reduction: Some(reduction),
            inputs: Blocks::whole(data.clone()),
            outputs: Blocks::whole(data),
        };
        let parts =
            [part(DType::F32, Reduction::Sum, tensor(&mut a)), part(DType::I64, Reduction::Max, tensor(&mut b))];
        finish(group, Collective { kind: Kind::AllReduce, parts: parts.into_iter().collect() }).unwrap();
        assert_eq!((a[4], b[299]), (3.0, 1));
    });
}

#[test]
fn buffers_stay_on_the_devices() {
    let Some(machine) = machine(2) else { return };
    world(&machine, LONG, |group| {
        let client = machine.client();
        let device = client.devices()[group.rank() as usize];
        let laid = 1.0f32.to_le_bytes().repeat(1024);
        let mut buffer = client.buffer(&laid, Element::F32, &[1, 8, 128], &device).unwrap();
        for (round, donate) in [true, false].into_iter().enumerate() {
            // Only says how many elements there are.
            let nothing = Tensor { data: std::ptr::dangling_mut(), layout: Layout::flat(1000) };
            let both = Blocks::whole(nothing);
            let call = one(Kind::AllReduce, DType::F32, Some(Reduction::Sum), both.clone(), both);
            let inputs = Some(SmallVec::from_iter([buffer]));
            let call = DeviceCall { inputs, donate, ..DeviceCall::staged(call) };
            let work = group.post_device(call).unwrap();
            work.wait(Some(LONG), || false).unwrap();
            let mut outputs = work.take_outputs();
            buffer = outputs.pop().unwrap();
            let mut read = vec![0u8; 4096];
            buffer.read(&mut read).unwrap();
            assert_eq!(read[..4000], ((2 << round) as f32).to_le_bytes().repeat(1000));
        }
    });
}

#[test]
fn messages_match_by_peer_and_tag() {
    let Some(machine) = machine(4) else { return };
    world(&machine, LONG, |group| {
        let (rank, size) = (group.rank(), group.size());
        for count in [0usize, 1, 1000, 50_000] {
            let to = (rank + 1) % size;
            let from = (rank + size - 1) % size;
            let mut out: [Vec<i32>; 2] = [vec![rank as i32; count], vec![rank as i32 + 10; count]];
            let mut into: [Vec<i32>; 2] = [vec![-1; count], vec![-1; count]];
            let [first, second] = &mut out;
            let [low, high] = &mut into;
            let send = |data: &mut [i32], tag| {
                let kind = Kind::Send { to, tag };
                post(group, one(kind, DType::I32, None, Blocks::whole(tensor(data)), Blocks::none()))
            };
            let receive = |data: &mut [i32], from, tag| {
                let kind = Kind::Recv { from, tag };
                post(group, one(kind, DType::I32, None, Blocks::none(), Blocks::whole(tensor(data))))
            };
            // The tags are received in the other order than sent, one from anybody.
            let works = [receive(high, None, 2), send(first, 1), send(second, 2), receive(low, Some(from), 1)];
            for work in &works {
                work.wait(Some(LONG), || false).unwrap();
            }
            assert_eq!(works[0].source(), Some(from));
            assert_eq!(into, [vec![from as i32; count], vec![from as i32 + 10; count]]);
        }
    });
}

#[test]
fn a_callback_may_wait_for_a_collective_and_nobody_need_wait() {
    let Some(machine) = machine(2) else { return };
    world(&machine, LONG, |group| {
        let (send, receive) = std::sync::mpsc::channel();
        let mut data = vec![1.0f32; 64];
        let work = post(group, all_reduce(&mut data));
        let inner = group.clone();
        work.on_end(Box::new(move || {
            let mut data = vec![1.0f32; 64];
            send.send(finish(&inner, all_reduce(&mut data)).map(|()| data[0])).unwrap();
        }));
        // Nobody waits for the first.
        assert_eq!(receive.recv_timeout(LONG).unwrap().unwrap(), 2.0);
        assert_eq!((work.state(), data[63]), (State::Done, 2.0));
    });
}

/// Memory as PyTorch aligns it; `shift` bytes further for such as isn't.
struct Aligned(Vec<[u128; 4]>, usize);

impl Aligned {
    fn new(count: usize, shift: usize) -> Aligned {
        let lines = vec![[0; 4]; (count * 4 + shift).div_ceil(64) + 1];
        let start = lines.as_ptr().cast::<u8>().align_offset(64) + shift;
        Aligned(lines, start)
    }

    fn tensor(&self, count: usize) -> Tensor {
        Tensor { data: self.0.as_ptr().cast::<u8>().wrapping_add(self.1).cast_mut(), layout: Layout::flat(count) }
    }

    fn fill(&mut self, count: usize, value: impl Fn(usize) -> f32) {
        let data: *mut f32 = self.tensor(count).data.cast();
        for index in 0..count {
            // SAFETY: inside the memory, which is borrowed.
            unsafe { data.add(index).write(value(index)) };
        }
    }

    fn is(&self, count: usize, value: impl Fn(usize) -> f32) -> bool {
        let data: *const f32 = self.tensor(count).data.cast();
        // SAFETY: as above.
        (0..count).all(|index| unsafe { data.add(index).read() } == value(index))
    }
}

#[test]
fn large_tensors_are_lent_to_devices_and_results_land_in_them() {
    let Some(machine) = machine(2) else { return };
    // A size class of its own, and one that is padded; the second is too small to be worth it.
    for (count, lends) in [(256 << 10, true), ((256 << 10) + 1, false), (1 << 10, false)] {
        for shift in [0, 4] {
            // Rank 1's memory is as it should be.
            let before = machine.lent();
            world(&machine, LONG, |group| {
                let me = group.rank();
                let shift = if me == 0 { shift } else { 0 };
                let value = |rank: u32, index: usize| (index % 1000) as f32 * (rank + 1) as f32;
                let sum = |index: usize| value(0, index) + value(1, index);
                let (mut a, mut b) = (Aligned::new(2 * count, shift), Aligned::new(2 * count, shift));
                let whole = |data: &Aligned| Blocks::whole(data.tensor(count));
                let halves = |data: &Aligned| Blocks::cut(data.tensor(2 * count), &[count; 2]);
                let reset = |a: &mut Aligned, b: &mut Aligned| {
                    a.fill(2 * count, |index| value(me, index));
                    b.fill(2 * count, |_| -1.0);
                };
                let run = |kind: Kind, inputs: Blocks, outputs: Blocks| {
                    let reduction = kind.reduces().then_some(Reduction::Sum);
                    finish(group, one(kind, DType::F32, reduction, inputs, outputs)).unwrap();
                };
                reset(&mut a, &mut b);
                run(Kind::AllReduce, whole(&a), whole(&a));
                assert!(a.is(count, sum), "in place");
                reset(&mut a, &mut b);
                run(Kind::AllReduce, whole(&a), whole(&b));
                assert!(b.is(count, sum) && a.is(count, |index| value(me, index)), "out of place");
                // The output begins in the input's middle.
                reset(&mut a, &mut b);
                let middle =
                    Tensor { data: a.tensor(count).data.wrapping_add(count / 32 * 64), layout: Layout::flat(count) };
                run(Kind::AllReduce, whole(&a), Blocks::whole(middle));
                let start = count / 32 * 16;
                let mixed = |index: usize| if index < start { value(me, index) } else { sum(index - start) };
                assert!(a.is(start + count, mixed), "overlapping");
                for root in 0..2 {
                    reset(&mut a, &mut b);
                    let to = if me == root { whole(&a) } else { Blocks::none() };
                    run(Kind::Reduce { root }, whole(&a), to);
                    assert!(a.is(count, |index| if me == root { sum(index) } else { value(me, index) }), "reduce");
                    reset(&mut a, &mut b);
                    run(Kind::Broadcast { root }, whole(&a), whole(&a));
                    assert!(a.is(count, |index| value(root, index)), "broadcast");
                }
                reset(&mut a, &mut b);
                run(Kind::AllGather, whole(&a), halves(&b));
                assert!(b.is(2 * count, |index| value((index / count) as u32, index % count)), "all_gather");
                reset(&mut a, &mut b);
                run(Kind::ReduceScatter, halves(&a), whole(&b));
                assert!(b.is(count, |index| sum(me as usize * count + index)), "reduce_scatter");
                for in_place in [false, true] {
                    reset(&mut a, &mut b);
                    run(Kind::AllToAll, halves(&a), halves(if in_place { &a } else { &b }));
                    let got = |index: usize| value((index / count) as u32, me as usize * count + index % count);
                    assert!(if in_place { a.is(2 * count, got) } else { b.is(2 * count, got) }, "all_to_all");
                }
            });
            let after = machine.lent();
            // Of each rank: all_reduce and all_to_all twice, its own reduce, two broadcasts, which land; the inputs of
            // all_gather and reduce_scatter. A rank that can't lend where a broadcast's root can lets none land.
            let expected = match (lends, shift) {
                (true, 0) => (2 * 9, 2 * 7),
                (true, _) => (9, 6),
                (false, _) => (0, 0),
            };
            assert_eq!((after.0 - before.0, after.1 - before.1), expected, "{count} {shift}");
        }
    }
}

/// Groups of other sizes than powers of two, with blocks that go one by one.
#[test]
fn large_blocks_find_every_root() {
    let Some(machine) = machine(5) else { return };
    world(&machine, LONG, |group| {
        let (me, count) = (group.rank(), 90_000);
        for root in 0..5 {
            let value = |from: u32, to: u32| (from * 8 + to + root) as i32;
            let mut mine = vec![value(me, root); count];
            let mut all = vec![-1; if me == root { 5 * count } else { 0 }];
            let to = if me == root { Blocks::cut(tensor(&mut all), &[count; 5]) } else { Blocks::none() };
            finish(group, one(Kind::Gather { root }, DType::I32, None, Blocks::whole(tensor(&mut mine)), to)).unwrap();
            assert!(all.iter().enumerate().all(|(index, got)| *got == value((index / count) as u32, root)), "{root}");
            all.iter_mut().enumerate().for_each(|(index, block)| *block = value(root, (index / count) as u32));
            let from = if me == root { Blocks::cut(tensor(&mut all), &[count; 5]) } else { Blocks::none() };
            finish(group, one(Kind::Scatter { root }, DType::I32, None, from, Blocks::whole(tensor(&mut mine))))
                .unwrap();
            assert!(mine.iter().all(|got| *got == value(root, me)), "{root}");
        }
    });
}

/// On a square slice a large reduce_scatter goes along one axis after the other, and the last blocks go home.
#[test]
fn a_square_slice_scatters_in_steps() {
    let slice = parse("v5e:4x4").unwrap();
    let everybody: Vec<u32> = (0..16).collect();
    let planned = plan(&slice, &[everybody], Callers::Members).unwrap();
    let How::Whole(launch) = planned.how else { panic!("{planned:?}") };
    let count = 128 << 10;
    assert!(launch.groups.steps.unwrap().serve(16 * count as u64 * 4));
    let Some(machine) = machine_with(16, Options { slice: Some(slice), ..Options::default() }) else { return };
    let value = |rank: usize, index: usize| ((index * 31 + rank * 7) % 101) as i32;
    world(&machine, LONG, |group| {
        let me = group.rank() as usize;
        let mut input: Vec<i32> = (0..16 * count).map(|index| value(me, index)).collect();
        let mut output = vec![0i32; count];
        let (inputs, outputs) = (Blocks::cut(tensor(&mut input), &[count; 16]), Blocks::whole(tensor(&mut output)));
        finish(group, one(Kind::ReduceScatter, DType::I32, Some(Reduction::Sum), inputs, outputs)).unwrap();
        for (index, &got) in output.iter().enumerate().step_by(97) {
            assert_eq!(got, (0..16).map(|rank| value(rank, me * count + index)).sum::<i32>(), "rank {me}, {index}");
        }
    });
}
