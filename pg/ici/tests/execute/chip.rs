//! A process's own chip: what its groups make of failures and deadlines. XLA's CPU plugin with one device stands for it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};
use podring_collective::{Blocks, Collective, DType, Kind, Layout, Part, Reduction, Tensor};
use podring_ici::{
    cache::Share,
    engine::{Call, Chip, ChipOptions, GroupSpec, Peers, Seat, Ticket, Waited},
    pjrt::{Client, Value},
};

use crate::machine::plugin;

const LONG: Duration = Duration::from_secs(60);

/// Nobody else: what they would be told is kept.
#[derive(Default)]
struct Alone {
    told: Mutex<Vec<String>>,
    /// Launches wait while it is shut.
    shut: Mutex<bool>,
    opened: Condvar,
}

impl Peers for Alone {
    fn most(&self, _: &mut [u64], _: Duration) -> Result<(), String> {
        Ok(())
    }

    fn over(&self) -> Option<String> {
        None
    }

    fn fail(&self, why: &str) {
        self.told.lock().push(why.to_owned());
    }

    fn share(&self) -> Option<&dyn Share> {
        let mut shut = self.shut.lock();
        while *shut && !self.opened.wait_for(&mut shut, LONG).timed_out() {}
        None
    }
}

fn chip(overrides: &[&str]) -> Option<Arc<Chip>> {
    let client = Client::create(&plugin()?, &[("cpu_device_count", Value::Int(1))]).unwrap();
    let overrides = overrides.iter().map(|name| ((*name).to_owned(), Value::Bool(true))).collect();
    let options = ChipOptions { on_host: true, played: true, overrides, ..ChipOptions::default() };
    Some(Chip::start(client, options).unwrap())
}

fn open(chip: &Arc<Chip>, id: u64, name: &str) -> (Seat, Arc<Alone>) {
    let peers = Arc::new(Alone::default());
    let spec = GroupSpec { id, name: name.to_owned(), devices: vec![0] };
    let runner = Arc::new(|callback: podring_ici::engine::Callback| drop(std::thread::spawn(callback)));
    (chip.open(1, &spec, 0, peers.clone(), runner).unwrap(), peers)
}

/// `data` stays alive until the ticket has ended and nothing of its group is under way.
fn all_reduce(seat: &Seat, seq: u64, data: &mut [f32], timeout: Duration) -> Arc<Ticket> {
    let both = Blocks::whole(Tensor { data: data.as_mut_ptr().cast(), layout: Layout::flat(data.len()) });
    let part = Part { dtype: DType::F32, reduction: Some(Reduction::Sum), inputs: both.clone(), outputs: both };
    let collective = Collective { kind: Kind::AllReduce, parts: [part].into_iter().collect() };
    seat.post(Call { seq, collective, inputs: None, donate: false, keep: None, after: None, timeout })
}

#[test]
fn a_launch_that_fails_is_told_to_the_others() {
    let Some(chip) = chip(&["xla_there_is_no_such_option"]) else { return };
    let (seat, peers) = open(&chip, 7, "world");
    let mut data = [1.0; 4];
    let ticket = all_reduce(&seat, 0, &mut data, LONG);
    assert_eq!(ticket.wait(Some(LONG), || false), Waited::Ended);
    let failure = ticket.failure().unwrap().to_string();
    assert!(failure.contains("compiling all_reduce") && failure.contains("xla_there_is_no_such_option"), "{failure}");
    assert_eq!(*peers.told.lock(), [failure]);
    // Once, and nobody is told what the others know already: that this member was told to end.
    all_reduce(&seat, 1, &mut data, LONG).wait(Some(LONG), || false);
    assert_eq!(peers.told.lock().len(), 1);
    let (seat, peers) = open(&chip, 8, "other");
    seat.fail(podring_ici::engine::Failure::Aborted { by: None, why: "enough".to_owned() });
    assert!(peers.told.lock().is_empty());
}

#[test]
fn a_call_that_waits_behind_another_groups_fails_at_its_own_deadline() {
    let Some(chip) = chip(&[]) else { return };
    let ((slow, held), (quick, peers)) = (open(&chip, 7, "slow"), open(&chip, 8, "quick"));
    let (mut first, mut second, mut third) = ([1.0; 4], [1.0; 4], [1.0; 4]);
    *held.shut.lock() = true;
    let ahead = all_reduce(&slow, 5, &mut first, LONG);
    let start = Instant::now();
    let late = all_reduce(&quick, 3, &mut second, Duration::from_millis(200));
    assert_eq!(late.wait(Some(LONG), || false), Waited::Ended);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let failure = late.failure().unwrap().to_string();
    let expected =
        "all_reduce, seq 3: the timeout of 200 ms passed while it waited behind all_reduce, seq 5, of group slow";
    assert_eq!(failure, expected);
    assert_eq!(*peers.told.lock(), [failure]);
    // The one ahead is none the worse, nor is what comes behind.
    assert!(!ahead.ended() && quick.failure().is_some());
    let behind = all_reduce(&slow, 6, &mut third, LONG);
    *held.shut.lock() = false;
    held.opened.notify_all();
    for ticket in [ahead, behind] {
        assert_eq!(ticket.wait(Some(LONG), || false), Waited::Ended);
        assert_eq!(ticket.failure(), None);
    }
    assert_eq!((first, third), ([1.0; 4], [1.0; 4]));
}
