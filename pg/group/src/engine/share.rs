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

/// Bytes of a store's value: c10d's TCPStore takes 8 MiB at most.
const PIECE: usize = 1 << 20;
/// Larger programs are not shared: a store is no place for them.
const MOST: usize = 256 << 20;

/// What the value of a program's key begins with.
const FAILED: u8 = 0;
/// The program follows.
const WHOLE: u8 = 1;
/// Its length follows, as 8 bytes, the lowest first; it is in pieces under keys of their own.
const PIECES: u8 = 2;

/// A share over a store. What the store's clients can write, machines run: it is as private as the store.
pub struct StoreShare {
    store: Arc<dyn Store>,
    patience: Patience,
    prefix: String,
    /// Others that may fetch a program, after whom nobody will; none if that is not known.
    others: Option<i64>,
}

impl StoreShare {
    /// Over a store that all machines of the job use.
    pub fn new(store: Arc<dyn Store>, patience: Patience) -> Self {
        StoreShare { store, patience, prefix: "podring/program".to_owned(), others: None }
    }

    /// For the members of one group of a world: what a dead world's members claimed holds nobody up, and what all of them
    /// have is not kept in the store.
    pub fn of(self, world: u128, members: u32) -> Self {
        let prefix = format!("{}/{world:032x}", self.prefix);
        StoreShare { prefix, others: Some(i64::from(members) - 1), ..self }
    }

    fn name(&self, key: &str, what: &str) -> String {
        format!("{}/{key}/{what}", self.prefix)
    }

    fn piece(&self, key: &str, number: usize) -> String {
        self.name(key, &format!("program/{number}"))
    }

    /// What was published under a key, by the value of its first name.
    fn read(&self, key: &str, value: &[u8]) -> Result<Fetched, String> {
        match value.split_first() {
            Some((&WHOLE, program)) => Ok(Fetched::Program(program.to_vec())),
            Some((&PIECES, length)) => {
                let length =
                    <[u8; 8]>::try_from(length).ok().and_then(|bytes| usize::try_from(u64::from_le_bytes(bytes)).ok());
                let Some(length) = length.filter(|&length| length <= MOST) else { return Ok(Fetched::Failed) };
                let mut program = Vec::with_capacity(length);
                for number in 0..length.div_ceil(PIECE) {
                    program.extend(self.store.get(&self.piece(key, number)).map_err(words)?);
                }
                Ok(Fetched::Program(program))
            }
            _ => Ok(Fetched::Failed),
        }
    }

    /// The last to have it lets the store forget it.
    fn fetched(&self, key: &str, length: usize) -> Result<(), StoreError> {
        let Some(others) = self.others else { return Ok(()) };
        if self.store.add(&self.name(key, "fetched"), 1)? != others {
            return Ok(());
        }
        self.store.set(&self.name(key, "program"), &[FAILED])?;
        (0..length.div_ceil(PIECE))
            .filter(|_| length > PIECE)
            .try_for_each(|number| self.store.set(&self.piece(key, number), b""))
    }
}

fn words(error: StoreError) -> String {
    error.to_string()
}

impl Share for StoreShare {
    fn claim(&self, key: &str) -> Result<bool, String> {
        Ok(self.store.add(&self.name(key, "claims"), 1).map_err(words)? == 1)
    }

    fn publish(&self, key: &str, program: Option<&[u8]>) -> Result<(), String> {
        // One key for whatever comes of it: a machine that waits looks at one. It is written last.
        let value = match program {
            Some(program) if program.len() <= PIECE => [&[WHOLE], program].concat(),
            Some(program) if program.len() <= MOST => {
                for (number, piece) in program.chunks(PIECE).enumerate() {
                    self.store.set(&self.piece(key, number), piece).map_err(words)?;
                }
                [&[PIECES][..], &(program.len() as u64).to_le_bytes()].concat()
            }
            _ => vec![FAILED],
        };
        self.store.set(&self.name(key, "program"), &value).map_err(words)
    }

    fn fetch(&self, key: &str, go_on: &dyn Fn() -> bool) -> Result<Fetched, String> {
        let name = self.name(key, "program");
        let end = Instant::now() + self.patience.most;
        let mut pause = Duration::from_millis(1).min(self.patience.pause);
        loop {
            if self.store.check(std::slice::from_ref(&name)).map_err(words)? {
                let fetched = self.read(key, &self.store.get(&name).map_err(words)?)?;
                if let Fetched::Program(program) = &fetched
                    && let Err(error) = self.fetched(key, program.len())
                {
                    tracing::debug!(%error, "a program that all have stays in the store");
                }
                return Ok(fetched);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || !go_on() {
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
            let waiter = scope.spawn(|| share.fetch("a", &|| true));
            std::thread::sleep(Duration::from_millis(20));
            share.publish("a", Some(b"program")).unwrap();
            assert_eq!(waiter.join().unwrap(), Ok(Fetched::Program(b"program".to_vec())));
        });
        assert_eq!(share.claim("b"), Ok(true));
        share.publish("b", None).unwrap();
        assert_eq!(share.fetch("b", &|| true), Ok(Fetched::Failed));
    }

    #[test]
    fn a_lost_compiler_is_not_waited_for_for_ever() {
        let patience = Patience { most: Duration::from_millis(50), pause: Duration::from_millis(5) };
        let share = StoreShare::new(Arc::new(MemoryStore::default()), patience);
        let start = Instant::now();
        assert_eq!(share.fetch("nobody", &|| true), Ok(Fetched::Late));
        assert!(start.elapsed() < Duration::from_secs(20));
    }
    #[test]
    fn who_is_told_to_stop_stops() {
        let share = StoreShare::new(Arc::new(MemoryStore::default()), Patience::default());
        let start = Instant::now();
        let asked = std::sync::atomic::AtomicU32::new(0);
        let go_on = || asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 3;
        assert_eq!(share.fetch("nobody", &go_on), Ok(Fetched::Late));
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn large_programs_go_in_pieces_and_are_forgotten_when_all_have_them() {
        let store = MemoryStore::default();
        let share = || StoreShare::new(Arc::new(store.clone()), Patience::default()).of(7, 3);
        for length in [0, 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 5] {
            let key = length.to_string();
            let program: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            assert_eq!(share().claim(&key), Ok(true));
            share().publish(&key, Some(&program)).unwrap();
            for _ in 0..2 {
                assert_eq!(share().fetch(&key, &|| true), Ok(Fetched::Program(program.clone())));
            }
            // Whoever comes later compiles by itself.
            assert_eq!(share().fetch(&key, &|| true), Ok(Fetched::Failed));
            for number in 0..length.div_ceil(PIECE) {
                let piece = store.get(&share().piece(&key, number)).unwrap_or_default();
                assert!(piece.is_empty(), "{length}: {number}");
            }
        }
        // Another world's members claim anew.
        assert_eq!(StoreShare::new(Arc::new(store.clone()), Patience::default()).of(8, 3).claim("1"), Ok(true));
    }

    #[test]
    fn what_is_no_program_is_none() {
        let store = MemoryStore::default();
        let share = StoreShare::new(Arc::new(store.clone()), Patience::default());
        for value in [&[][..], &[9], &[PIECES], &[PIECES, 1, 2], &[&[PIECES][..], &u64::MAX.to_le_bytes()].concat()] {
            store.set(&share.name("a", "program"), value).unwrap();
            assert_eq!(share.fetch("a", &|| true), Ok(Fetched::Failed), "{value:?}");
        }
    }
}
