//! What ranks tell each other of a failure, and what an error says of it.

use std::sync::Barrier;

use super::*;

fn reduce(reduction: Reduction, data: &mut [f32]) -> Collective {
    let tensor = tensor(data);
    one(Op::AllReduce, DType::F32, Some(reduction), Blocks::whole(tensor.clone()), Blocks::whole(tensor))
}

/// A survivor that leaves while another one still waits for the stopped rank's answer isn't taken for the cause.
#[test]
fn a_survivor_that_leaves_is_not_blamed() {
    let over = Barrier::new(2);
    let errors = run(3, local, LONG, |group| {
        let mut data = vec![1.0f32; 1 << 18];
        finish(group, all_reduce(&mut data)).unwrap();
        group.set_timeout(Duration::from_millis(800));
        match group.rank() {
            0 => {
                let work = group.post(all_reduce(&mut data), None, Some(LONG), true).unwrap();
                let error = work.wait(None, || false).unwrap_err();
                over.wait();
                Some(error)
            }
            1 => {
                // As good as stopped: nobody drives it.
                group.0.process.hub.shut();
                over.wait();
                None
            }
            _ => {
                let timeout = Some(Duration::from_millis(300));
                let work = group.post(all_reduce(&mut data), None, timeout, false).unwrap();
                // Leaves after 800 ms, long before the table is closed.
                group.shutdown();
                Some(work.wait(None, || false).unwrap_err())
            }
        }
    });
    let error = errors[0].as_ref().unwrap();
    assert_eq!(error.kind(), Kind::Timeout, "{error}");
    let text = error.to_string();
    assert!(text.contains("300 ms passed on rank 2; waiting on rank"), "{text}");
    assert!(text.contains("rank 1: no answer") && text.contains("rank 2: all_reduce("), "{text}");
}

/// One rank forms the group after the others have failed in it, and one of those has left it: what they called is known
/// to it all the same, and at once.
#[test]
fn a_rank_that_comes_after_the_failure_gets_the_whole_table() {
    for late in [1000, 3000].map(Duration::from_millis) {
        let errors = run(3, local, LONG, |world| {
            let rank = world.rank();
            if rank == 2 {
                std::thread::sleep(late);
            }
            let part = world.part_named("part", &[0, 1, 2]).unwrap();
            let reduction = if rank == 1 { Reduction::Max } else { Reduction::Sum };
            let start = Instant::now();
            let error = finish(&part, reduce(reduction, &mut [1.0f32; 4])).unwrap_err();
            if rank == 2 {
                assert!(start.elapsed() < Duration::from_millis(1500), "{:?}: {error}", start.elapsed());
            }
            if rank == 0 {
                part.shutdown();
            }
            finish(world, Collective { kind: Op::Barrier, parts: SmallVec::new() }).unwrap();
            error.to_string()
        });
        // The others wait two seconds for it.
        let whole = if late < Duration::from_secs(2) { &errors[..] } else { &errors[2..] };
        for error in whole {
            for (rank, name) in [(0, "SUM"), (1, "MAX"), (2, "SUM")] {
                assert!(error.contains(&format!("rank {rank}: all_reduce({name}, float32, count=4)")), "{error}");
            }
        }
    }
}

#[test]
fn an_unlike_message_is_named_by_its_size_without_a_table() {
    let text = "recv from rank 0 on rank 1, seq 0: expected 16 bytes (4 float32), rank 0 sent";
    for (count, dtype, sent) in [(5, DType::F32, "20 bytes (5 float32)"), (4, DType::I32, "16 bytes (4 int32)")] {
        // The message comes before the receive, after it, and with a bystander.
        for (first, size) in [(0, 2), (1, 3)] {
            let errors = run(size, local, LONG, |group| {
                let mut data = vec![0.0f32; count];
                if group.rank() != first && group.rank() < 2 {
                    std::thread::sleep(Duration::from_millis(200));
                }
                let start = Instant::now();
                let work = match group.rank() {
                    0 => one(Op::Send { to: 1, tag: 0 }, dtype, None, Blocks::whole(tensor(&mut data)), Blocks::none()),
                    1 => {
                        let into = Blocks::whole(tensor(&mut data[..4]));
                        one(Op::Recv { from: Some(0), tag: 0 }, DType::F32, None, Blocks::none(), into)
                    }
                    _ => all_reduce(&mut data),
                };
                // A small message is sent whether or not it is taken.
                let first = finish(group, work);
                let error = first.and_then(|()| finish(group, all_reduce(&mut data))).unwrap_err();
                assert!(start.elapsed() < Duration::from_millis(1500), "{:?}: {error}", start.elapsed());
                error
            });
            for error in errors {
                assert_eq!(error.kind(), Kind::Mismatch, "{error}");
                assert!(error.to_string().starts_with(&format!("{text} {sent} [")), "{error}");
            }
        }
    }
}

#[test]
fn coalesced_calls_that_differ_show_where() {
    let errors = run(2, local, LONG, |group| {
        let (mut first, mut second) = ([1.0f32; 4], vec![1.0f32; 6 + group.rank() as usize]);
        let mut both = all_reduce(&mut first);
        both.parts.extend(all_reduce(&mut second).parts);
        finish(group, both).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("rank 0: all_reduce(SUM, float32, counts=4,6, 2 tensors)"), "{error}");
        assert!(error.contains("rank 1: all_reduce(SUM, float32, counts=4,7, 2 tensors)"), "{error}");
    }
}

#[test]
fn an_error_of_a_subgroup_says_whose_numbers_it_has() {
    run(3, local, LONG, |world| {
        let rank = world.rank();
        for (members, of) in [(&[1, 2][..], " of ranks 1, 2 (its rank 0)]"), (&[0, 1], ", rank 1]")] {
            if members.contains(&rank) {
                let part = world.part_named(of, members).unwrap();
                if rank == 1 {
                    part.abort("enough");
                    let error = finish(&part, all_reduce(&mut [1.0f32])).unwrap_err().to_string();
                    assert!(error.ends_with(of), "{error}");
                }
            }
            finish(world, Collective { kind: Op::Barrier, parts: SmallVec::new() }).unwrap();
        }
    });
}
