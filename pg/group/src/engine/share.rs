//! Compiled programs handed from one machine of a job to the others, through the job's store.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use podring_ici::cache::{Fetched, Share};

use crate::store::{Store, StoreError};

/// How long a machine waits for a program that another one compiles.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Then it compiles by itself.
    pub most: Duration,
    /// The longest pause between two looks.
    pub pause: Duration,
}

impl Default for Patience {
    /// Two minutes: what libtpu takes for the largest programs that were tried.
    fn default() -> Self {
        Patience { most: Duration::from_secs(120), pause: Duration::from_millis(100) }
    }
}

/// A share over a store. What the store's clients can write, machines run: it is as private as the store.
pub struct StoreShare {
    store: Arc<dyn Store>,
    patience: Patience,
}

impl StoreShare {
    /// Over a store that all machines of the job use.
    pub fn new(store: Arc<dyn Store>, patience: Patience) -> Self {
        StoreShare { store, patience }
    }
}

fn name(key: &str, what: &str) -> String {
    format!("podring/program/{key}/{what}")
}

fn words(error: StoreError) -> String {
    error.to_string()
}

impl Share for StoreShare {
    fn claim(&self, key: &str) -> Result<bool, String> {
        Ok(self.store.add(&name(key, "claims"), 1).map_err(words)? == 1)
    }

    fn publish(&self, key: &str, program: Option<&[u8]>) -> Result<(), String> {
        // One key for both: a machine that waits looks at one.
        let value = match program {
            Some(program) => [&[1], program].concat(),
            None => vec![0],
        };
        self.store.set(&name(key, "program"), &value).map_err(words)
    }

    fn fetch(&self, key: &str) -> Result<Fetched, String> {
        let key = name(key, "program");
        let end = Instant::now() + self.patience.most;
        let mut pause = Duration::from_millis(1).min(self.patience.pause);
        loop {
            if self.store.check(std::slice::from_ref(&key)).map_err(words)? {
                let value = self.store.get(&key).map_err(words)?;
                return Ok(match value.split_first() {
                    Some((1, program)) => Fetched::Program(program.to_vec()),
                    _ => Fetched::Failed,
                });
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Fetched::Late);
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(self.patience.pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

    #[test]
    fn the_first_compiles_and_the_others_get_it() {
        let share = StoreShare::new(Arc::new(MemoryStore::default()), Patience::default());
        assert_eq!(share.claim("a"), Ok(true));
        assert_eq!(share.claim("a"), Ok(false));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| share.fetch("a"));
            std::thread::sleep(Duration::from_millis(20));
            share.publish("a", Some(b"program")).unwrap();
            assert_eq!(waiter.join().unwrap(), Ok(Fetched::Program(b"program".to_vec())));
        });
        assert_eq!(share.claim("b"), Ok(true));
        share.publish("b", None).unwrap();
        assert_eq!(share.fetch("b"), Ok(Fetched::Failed));
    }

    #[test]
    fn a_lost_compiler_is_not_waited_for_for_ever() {
        let patience = Patience { most: Duration::from_millis(50), pause: Duration::from_millis(5) };
        let share = StoreShare::new(Arc::new(MemoryStore::default()), patience);
        let start = Instant::now();
        assert_eq!(share.fetch("nobody"), Ok(Fetched::Late));
        assert!(start.elapsed() < Duration::from_secs(20));
    }
}
