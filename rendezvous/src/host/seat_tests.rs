use std::thread;

use super::*;
use crate::coordinator::Config;

const SOON: Duration = Duration::from_secs(10);

fn joining(agent: &str, rank: u32, world_size: u32, timeout: Duration) -> Joining {
    Joining {
        // Tests run side by side in one network namespace.
        agent: format!("podring-test-{}-{agent}", std::process::id()),
        rank,
        world_size,
        host: "here".to_owned(),
        detail: Vec::new(),
        timeout,
        hosts: Vec::new(),
        expected: Vec::new(),
    }
}

#[test]
fn the_agents_rank_learns_that_no_world_forms_when_the_others_have_been_told() {
    const GUESTS: u32 = 400;
    let joining = joining("late", 0, GUESTS + 2, Duration::from_secs(1));
    let mut guests = Vec::new();
    let call_them = || {
        for rank in 1..=GUESTS {
            let line = Line::connect(&joining.agent).map_err(system("test"))?;
            let seat = pb::Seat {
                version: wire::VERSION.to_owned(),
                rank,
                world_size: joining.world_size,
                host: joining.host.clone(),
                timeout_ms: wire::milliseconds(SOON),
                ..pb::Seat::default()
            };
            line.send(&pb::RankSays { what: Some(Said::Seat(seat)) }).map_err(system("test"))?;
            guests.push(line);
        }
        Ok(())
    };
    let coordinator = Box::new(Coordinator::start(Config::default()).unwrap());
    let taken = Seat::take(Role::Coordinator(coordinator), &joining, call_them, || Wait::On);
    // From here on the process may end: nothing is left for the agent to do.
    assert!(Line::connect(&joining.agent).is_err());
    let Err(SeatError::Late(late)) = taken.map(drop) else { panic!("formed, or failed for another reason") };
    assert_eq!(late.missing.iter().map(|missing| missing.rank).collect::<Vec<_>>(), [GUESTS + 1]);
    assert_eq!(guests.len(), GUESTS as usize);
    for line in guests {
        let mut inbox = Inbox::new(TOLD);
        line.read_into(&mut inbox).unwrap();
        let says = inbox.next::<pb::AgentSays>().unwrap().and_then(|says| says.what);
        assert_eq!(says, Some(Says::Late(wire::late(&late))));
    }
}

#[test]
fn a_coordinator_that_ends_with_the_time_is_still_told_as_its_end() {
    let joining = joining("ends", 1, 2, Duration::from_millis(300));
    let listener = Listener::bind(&joining.agent).unwrap();
    let agent = thread::spawn(move || {
        // Later than the guest's time, which its agent may overrun a little.
        thread::sleep(Duration::from_millis(500));
        drop(listener);
    });
    let taken = Seat::take(Role::Guest, &joining, || Ok(()), || Wait::On);
    agent.join().unwrap();
    let Err(SeatError::Ended { why }) = taken.map(drop) else { panic!("formed, or failed for another reason") };
    assert_eq!(why, "its process ended");
}
