//! What can be wrong, and that everybody hears of it by name while the process lives.

use std::{process::Command, time::Duration};

use podring_collective::{Blocks, DType, Kind};
use podring_group::{Kind as ErrorKind, ProcessGroup, engine::DeviceCall};
use podring_ici::{engine::Options, pjrt::Value};
use podring_topology::parse;

use crate::job::{LONG, all_reduce, barrier, client, finish, machine, machine_with, one, post, run, tensor, world};

#[test]
fn a_mismatch_gives_every_rank_the_same_table() {
    let Some(machine) = machine(3) else { return };
    let errors = world(&machine, LONG, |group| {
        let mut data = vec![1.0f32; if group.rank() == 2 { 5 } else { 4 }];
        let error = finish(group, all_reduce(&mut data)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        assert_eq!(finish(group, all_reduce(&mut data)).unwrap_err().kind(), ErrorKind::Mismatch);
        assert!(group.error().is_some());
        error.to_string()
    });
    let table = |text: &str| text[..text.find(" [group").unwrap()].to_owned();
    for error in &errors {
        assert_eq!(table(error), table(&errors[0]));
        assert!(error.contains("seq 0") && error.contains("count=5"), "{error}");
    }
    // The machine lives.
    world(&machine, LONG, |group| finish(group, barrier()).unwrap());
}

#[test]
fn splits_that_only_two_ranks_know_are_compared() {
    let Some(machine) = machine(2) else { return };
    for error in world(&machine, LONG, |group| {
        let (mut out, mut into) = (vec![0i32; 6], vec![0i32; 6]);
        let mine = if group.rank() == 0 { [2usize, 4] } else { [3, 3] };
        let (inputs, outputs) = (Blocks::cut(tensor(&mut out), &mine), Blocks::cut(tensor(&mut into), &mine));
        finish(group, one(Kind::AllToAll, DType::I32, None, inputs, outputs)).unwrap_err()
    }) {
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert!(error.to_string().contains("rank 0 sends 4 elements to rank 1, which expects 3"), "{error}");
    }
}

#[test]
fn a_timeout_names_who_is_late_and_reaches_all() {
    let Some(machine) = machine(3) else { return };
    let errors = world(&machine, LONG, |group| {
        let mut data = vec![0.0f32; 4];
        // All begin together.
        finish(group, all_reduce(&mut data)).unwrap();
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_secs(3));
        }
        group.set_timeout(Duration::from_secs(1));
        finish(group, all_reduce(&mut data)).unwrap_err()
    });
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let text = error.to_string();
        assert!(text.contains("waiting on rank 1") && text.contains("rank 1: nothing yet"), "{text}");
    }
}

#[test]
fn who_leaves_or_aborts_fails_those_who_wait() {
    let Some(machine) = machine(2) else { return };
    run(&machine, LONG, |rank| {
        let world = rank.world().unwrap();
        let other = rank.group("other", &[0, 1]).unwrap();
        let mut data = vec![0.0f32; 4];
        if rank.rank == 1 {
            drop(other);
            std::thread::sleep(Duration::from_millis(100));
            world.abort("enough");
        } else {
            let error = finish(&other, all_reduce(&mut data)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
            assert!(error.to_string().contains("rank 1 has left"), "{error}");
            let error = finish(&world, all_reduce(&mut data)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
            assert!(error.to_string().contains("enough"), "{error}");
        }
    });
}

#[test]
fn a_refused_program_names_itself_the_group_the_slice_and_the_plugins_words() {
    let overrides = vec![("xla_there_is_no_such_option".to_owned(), Value::Bool(true))];
    let slice = Some(parse("v5e:1x2").unwrap());
    let Some(machine) = machine_with(2, Options { slice, overrides, ..Options::default() }) else { return };
    for error in world(&machine, LONG, |group| finish(group, all_reduce(&mut [0.0f32; 4])).unwrap_err()) {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        let text = error.to_string();
        for word in
            ["compiling all_reduce(SUM, float32, count=4)", "group world", "v5e:1x2", "xla_there_is_no_such_option"]
        {
            assert!(text.contains(word), "{text} lacks {word}");
        }
    }
}

#[test]
fn a_device_count_that_is_not_the_jobs_is_named() {
    let Some(machine) = machine(4) else { return };
    run(&machine, LONG, |rank| {
        if rank.rank == 3 {
            return;
        }
        let Err(error) = rank.world_of(3) else { panic!("3 ranks on 4 devices") };
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("3 ranks, but 1 slice of 4 devices"), "{error}");
    });
    let Some(client) = client(2) else { return };
    let slice = Some(parse("v5e:2x2").unwrap());
    let Err(error) = podring_ici::engine::Machine::start(client, Options { slice, ..Options::default() }) else {
        panic!("2 devices for 2x2")
    };
    assert!(error.to_string().contains("expected 4, those of slice v5e:2x2, got 2"), "{error}");
}

#[test]
fn a_group_without_devices_says_so() {
    let runtime = podring_group::Runtime::start(Default::default()).unwrap();
    let config = podring_group::Config {
        rank: 0,
        size: 1,
        name: "alone".into(),
        global_ranks: None,
        timeout: LONG,
        store: std::sync::Arc::new(podring_group::MemoryStore::default()),
        rendezvous: None,
    };
    let group = ProcessGroup::form(&runtime, config, || false).unwrap();
    let Err(error) = group.post_device(DeviceCall::staged(barrier())) else { panic!("it ran") };
    assert!(error.to_string().contains("barrier of device buffers, but this rank has no device"), "{error}");
    group.shutdown();
    runtime.stop();
}

const CHILD: &str = "PODRING_TEST_OUT_OF_MEMORY";

/// In a process of its own, whose memory is limited.
#[test]
fn out_of_device_memory_is_an_error_of_all_ranks() {
    if std::env::var_os(CHILD).is_some() {
        return starve();
    }
    if crate::job::plugin().is_none() {
        return;
    }
    let name = "failures::out_of_device_memory_is_an_error_of_all_ranks";
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads", "1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("lived on"), "{text}");
}

fn limit(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a plain struct, read during the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
}

fn starve() {
    let Some(machine) = machine(2) else { return };
    run(&machine, LONG, |rank| {
        let world = rank.world().unwrap();
        let other = rank.group("other", &[0, 1]).unwrap();
        // Of a size class's own size, so that nothing is laid out on the way.
        let mut data = vec![1.0f32; 128 << 20];
        finish(&world, barrier()).unwrap();
        finish(&other, barrier()).unwrap();
        if rank.rank == 0 {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
            let used: u64 = line.trim().trim_end_matches("kB").trim().parse().unwrap();
            limit((used << 10) + (96 << 20));
        }
        // Not by the group that is about to fail: a rank may hear of that while it is still in here.
        finish(&other, barrier()).unwrap();
        let error = post(&world, all_reduce(&mut data)).wait(Some(LONG), || false).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("all_reduce(SUM, float32, count=134217728)"), "{text}");
        assert!(text.contains("group world") && text.to_lowercase().contains("memory"), "{text}");
        finish(&other, barrier()).unwrap();
        if rank.rank == 0 {
            limit(libc::RLIM_INFINITY);
        }
        finish(&other, all_reduce(&mut data[..100])).unwrap();
        assert_eq!(data[99], 2.0);
    });
    println!("lived on");
}
