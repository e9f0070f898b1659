//! The simulator finds what is wrong.

use super::super::{Lane, Region, Round, Space, Step};
use super::*;

const INPUT: Region = Region::whole(Space::Input, 0, 2);
const OUTPUT: Region = Region::whole(Space::Output, 0, 2);
const SCRATCH: Region = Region::whole(Space::Scratch, 0, 2);
const PARTIAL: Region = Region::whole(Space::Partial, 0, 2);

fn lane(rounds: &[&[Step]]) -> Lane {
    let rounds = rounds.iter().map(|steps| Round { steps: steps.to_vec() }).collect();
    Lane { rounds, scratch: 4, partial: 4 }
}

fn send(to: u32, tag: u32, from: Region) -> Step {
    Step::Send { to, tag, from }
}

fn recv(from: u32, tag: u32, into: Region) -> Step {
    Step::Recv { from, tag, into }
}

fn copy(from: Region, into: Region) -> Step {
    Step::Copy { from, into }
}

/// Plays lanes of two or more ranks with two elements of input and of output each.
fn fault(aliased: bool, ranks: &[&[Lane]]) -> Fault {
    let world: Vec<Rank<Raw>> = ranks
        .iter()
        .enumerate()
        .map(|(me, lanes)| Rank {
            schedule: Schedule { lanes: lanes.to_vec() },
            inputs: vec![vec![raw(me, 0, 0), raw(me, 0, 1)]],
            outputs: vec![2],
            aliases: if aliased { vec![(0, 0)] } else { vec![] },
        })
        .collect();
    play(&Hashes, &world, 2, 1).expect_err("a fault")
}

fn what(fault: Fault) -> &'static str {
    match fault {
        Fault::Step { what, .. } => what,
        other => panic!("{other}"),
    }
}

#[test]
fn bad_steps_are_named() {
    let one = |step| what(fault(false, &[&[lane(&[&[step]])]]));
    assert_eq!(one(copy(INPUT, INPUT)), "writes its input");
    assert_eq!(one(copy(INPUT, OUTPUT.part(1, 2))), "outside of its memory");
    assert_eq!(one(copy(INPUT, Region { block: 1, ..OUTPUT })), "outside of its memory");
    assert_eq!(one(copy(INPUT, OUTPUT.part(0, 1))), "has two lengths");
    assert_eq!(one(copy(INPUT, PARTIAL)), "has two types");
    assert_eq!(one(copy(SCRATCH, OUTPUT)), "reads what nothing wrote");
    assert_eq!(one(Step::Reduce { sources: vec![], into: OUTPUT }), "has sources of another length, or none");
    assert_eq!(one(Step::Reduce { sources: vec![INPUT], into: SCRATCH }), "reduces into scratch");
    assert_eq!(one(send(0, 0, INPUT)), "is with no other rank");
    assert_eq!(one(recv(7, 0, OUTPUT)), "is with no other rank");
}

#[test]
fn messages_must_match() {
    let message = |first: &[Step], second: &[Step]| match fault(false, &[&[lane(&[first])], &[lane(&[second])]]) {
        Fault::Message { sent, received, .. } => (sent, received),
        other => panic!("{other}"),
    };
    let (two, partial) = ((2, false), (2, true));
    assert_eq!(message(&[send(1, 0, INPUT)], &[]), (vec![two], vec![]));
    assert_eq!(message(&[], &[recv(0, 0, OUTPUT)]), (vec![], vec![two]));
    assert_eq!(message(&[send(1, 3, INPUT)], &[recv(0, 4, OUTPUT)]), (vec![two], vec![]));
    assert_eq!(message(&[send(1, 0, INPUT)], &[recv(0, 0, OUTPUT.part(0, 1))]), (vec![two], vec![(1, false)]));
    assert_eq!(message(&[send(1, 0, INPUT)], &[recv(0, 0, PARTIAL)]), (vec![two], vec![partial]));
    let twice = [send(1, 0, INPUT), send(1, 0, INPUT)];
    assert_eq!(message(&twice, &[recv(0, 0, OUTPUT), recv(0, 0, SCRATCH)]), (vec![two; 2], vec![two; 2]));
}

#[test]
fn races_are_found_whatever_the_timing() {
    let is_race = |aliased, first: &[Lane], second: &[Lane]| {
        let fault = fault(aliased, &[first, second]);
        assert!(matches!(fault, Fault::Race { rank: 0, .. }), "{fault}");
    };
    let gives = [lane(&[&[send(0, 0, INPUT)]])];
    let swaps = [lane(&[&[send(0, 0, INPUT), recv(0, 0, OUTPUT)]])];
    // Received over what is still being sent, in the same memory only.
    is_race(
        true,
        &[lane(&[&[send(1, 0, INPUT), recv(1, 0, OUTPUT)]])],
        &[lane(&[&[send(0, 0, INPUT), recv(0, 0, SCRATCH)]])],
    );
    // Reduced over what is still being sent, or what is still coming.
    let sum = |sources: &[Region]| Step::Reduce { sources: sources.to_vec(), into: OUTPUT };
    is_race(true, &[lane(&[&[send(1, 0, INPUT), recv(1, 0, SCRATCH), sum(&[INPUT])]])], &swaps);
    is_race(false, &[lane(&[&[recv(1, 0, SCRATCH), sum(&[SCRATCH])]])], &gives);
    // Two lanes write the same, or one writes what another reads in a later round.
    let double = [lane(&[&[copy(INPUT, OUTPUT)]]), lane(&[&[copy(INPUT.part(1, 1), OUTPUT.part(1, 1))]])];
    assert!(matches!(fault(false, &[&[lane(&[&[copy(INPUT, OUTPUT)]])], &double]), Fault::Race { rank: 1, .. }));
    is_race(
        false,
        &[lane(&[&[recv(1, 0, OUTPUT)]]), lane(&[&[copy(INPUT, SCRATCH)], &[copy(OUTPUT, SCRATCH)]])],
        &gives,
    );
}

#[test]
fn waiting_in_a_circle_is_found() {
    let circle = |me: u32| lane(&[&[recv(1 - me, 0, OUTPUT)], &[send(1 - me, 0, INPUT)]]);
    let waiting = vec![(0, 0, 0), (1, 0, 0)];
    assert_eq!(fault(false, &[&[circle(0)], &[circle(1)]]), Fault::Deadlock { waiting });
}

/// Any two neighbouring rounds of a plan played as one, and any step left out, is found in one way or another.
#[test]
fn every_round_and_step_is_needed() {
    let all = [
        (Kind::AllReduce, Algorithm::OneShot),
        (Kind::AllReduce, Algorithm::Direct),
        (Kind::AllReduce, Algorithm::RecursiveDoubling),
        (Kind::AllReduce, Algorithm::RecursiveHalving),
        (Kind::AllReduce, Algorithm::Ring),
        (Kind::AllReduce, Algorithm::Hierarchical),
        (Kind::ReduceScatter, Algorithm::Ring),
        (Kind::Reduce { root: 2 }, Algorithm::Tree),
        (Kind::Broadcast { root: 2 }, Algorithm::TwoPhase),
    ];
    for (kind, algorithm) in all {
        let counts = if kind == Kind::ReduceScatter { vec![4; 6] } else { vec![24] };
        let mut case = Case { hosts: vec![0, 0, 0, 1, 1, 1], ..Case::new(kind, 6, counts) };
        case.tuning.chunk = 1 << 10..=1 << 10;
        let schedules = case.schedules(Some(algorithm)).unwrap();
        let found = |schedules: &[Schedule]| {
            (0..8).any(|seed| {
                let outcome = play(&Hashes, &case.world(schedules.to_vec(), seed < 4), 2, seed);
                outcome.map_or(true, |results| case.verify(&results, false).is_err())
            })
        };
        assert!(!found(&schedules));
        for rank in 0..6 {
            let rounds = schedules[rank].lanes[0].rounds.len();
            for round in 0..rounds {
                for step in 0..schedules[rank].lanes[0].rounds[round].steps.len() {
                    let mut broken = schedules.clone();
                    broken[rank].lanes[0].rounds[round].steps.remove(step);
                    assert!(
                        found(&broken),
                        "{kind:?} {algorithm:?}: rank {rank}, round {round}, step {step} not needed"
                    );
                }
                if round + 1 < rounds && algorithm == Algorithm::Direct {
                    let mut broken = schedules.clone();
                    let next = broken[rank].lanes[0].rounds.remove(round + 1);
                    broken[rank].lanes[0].rounds[round].steps.extend(next.steps);
                    assert!(found(&broken), "{kind:?} {algorithm:?}: rank {rank}, round {round} needs no end");
                }
            }
        }
    }
}
