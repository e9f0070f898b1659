//! Compiled programs shared between the machines of a job.

use std::{sync::Arc, thread, time::Duration};

use podring_collective::{Blocks, Collective, DType, Kind, Reduction};
use podring_group::{
    MemoryStore, Secret, Store,
    engine::{Patience, StoreShare},
};
use podring_ici::{
    cache::{Counts, Share},
    engine::{GroupSpec, Machine, Options},
};

use crate::job::{all_reduce, barrier, machine_with, one, tensor};

fn sharing(store: &MemoryStore, patience: Patience) -> Option<Arc<Machine>> {
    let share: Arc<dyn Share> = Arc::new(StoreShare::new(Arc::new(store.clone()), patience, &Secret::new([1; 32])));
    machine_with(2, Options { share: Some(share), ..Options::default() })
}

/// Compiles a job's programs on one machine, as the first member of a group.
fn warm(machine: &Arc<Machine>) -> Counts {
    let spec = GroupSpec { id: 1, name: "warm".into(), devices: vec![0, 1] };
    let member = machine.open(&spec, 0, Arc::new(|callback| drop(thread::spawn(callback)))).unwrap();
    let (mut data, mut all) = (vec![0.0f32; 10], vec![0.0f32; 20]);
    let gather: Collective = {
        let outputs = Blocks::cut(tensor(&mut all), &[10, 10]);
        one(Kind::AllGather, DType::F32, None, Blocks::whole(tensor(&mut data)), outputs)
    };
    let max = {
        let both = Blocks::whole(tensor(&mut data));
        one(Kind::AllReduce, DType::F32, Some(Reduction::Max), both.clone(), both)
    };
    member.warm(&[all_reduce(&mut data), gather, barrier(), max], |_, _| ()).unwrap();
    machine.counts()
}

#[test]
fn one_machine_compiles_and_the_others_get_it() {
    let store = MemoryStore::default();
    let Some(first) = sharing(&store, Patience::default()) else { return };
    let machines =
        [first, sharing(&store, Patience::default()).unwrap(), sharing(&store, Patience::default()).unwrap()];
    let counts: Vec<Counts> = thread::scope(|scope| {
        let running: Vec<_> = machines.iter().map(|machine| scope.spawn(|| warm(machine))).collect();
        running.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert_eq!(counts.iter().map(|one| one.compiled).sum::<u64>(), 4, "{counts:?}");
    assert_eq!(counts.iter().map(|one| one.received).sum::<u64>(), 8, "{counts:?}");
}

/// A store whose writes of programs are lost or spoiled.
struct Lossy {
    inner: MemoryStore,
    spoil: bool,
}

impl Store for Lossy {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), podring_group::StoreError> {
        if !key.ends_with("/program") {
            return self.inner.set(key, value);
        }
        if !self.spoil {
            return Ok(());
        }
        let mut spoiled = value.to_vec();
        let middle = spoiled.len() / 2;
        spoiled[middle] ^= 1;
        self.inner.set(key, &spoiled)
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, podring_group::StoreError> {
        self.inner.get(key)
    }

    fn check(&self, keys: &[String]) -> Result<bool, podring_group::StoreError> {
        self.inner.check(keys)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, podring_group::StoreError> {
        self.inner.add(key, amount)
    }
}

#[test]
fn a_lost_damaged_or_forged_program_is_compiled_here() {
    // Lost, damaged, and written by one who doesn't hold the job's secret.
    for (lost, spoil, author) in [(true, false, 1), (false, true, 1), (false, false, 2)] {
        let inner = MemoryStore::default();
        let lossy = Lossy { inner: inner.clone(), spoil };
        let store: Arc<dyn Store> = if lost || spoil { Arc::new(lossy) } else { Arc::new(inner) };
        let patience = Patience { most: Duration::from_millis(100), pause: Duration::from_millis(10) };
        let sharing = |secret: u8| {
            let share: Arc<dyn Share> = Arc::new(StoreShare::new(store.clone(), patience, &Secret::new([secret; 32])));
            machine_with(2, Options { share: Some(share), ..Options::default() })
        };
        let (Some(first), Some(second)) = (sharing(author), sharing(1)) else { return };
        assert_eq!(warm(&first).compiled, 4);
        let counts = warm(&second);
        assert_eq!((counts.compiled, counts.received), (4, 0), "{counts:?}");
        assert_eq!(counts.damaged, if lost { 0 } else { 4 }, "{counts:?}");
    }
}
