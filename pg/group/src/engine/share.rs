//! Compiled programs handed from one machine of a job to the others, through the job's store.
//!
//! Machines run what they find there, and others than the job's processes may write to a launcher's store. So each
//! program carries a seal, an HMAC-SHA256 over its name and its bytes under a key that is made of the job's secret. What
//! isn't sealed so is no program.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use podring_fabric::handshake::{MAC, Secret};
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
/// Its seal follows, and the program.
const WHOLE: u8 = 1;
/// Its seal follows, and its length, as 8 bytes, the lowest first; it is in pieces under keys of their own.
const PIECES: u8 = 2;

/// A share over a store, for machines that hold the same secret.
pub struct StoreShare {
    store: Arc<dyn Store>,
    key: Secret,
    patience: Patience,
    prefix: String,
    /// Others that may fetch a program, after whom nobody will; none if that is not known.
    others: Option<i64>,
}

impl StoreShare {
    /// Over a store that all machines of the job use. They hold `secret`, and nobody else does.
    pub fn new(store: Arc<dyn Store>, patience: Patience, secret: &Secret) -> Self {
        let key = secret.for_programs();
        StoreShare { store, key, patience, prefix: "podring/program".to_owned(), others: None }
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
        let Some((&kind, rest)) = value.split_first() else { return Ok(Fetched::Forged) };
        if kind == FAILED {
            return Ok(Fetched::Failed);
        }
        let Some((seal, rest)) = rest.split_first_chunk::<MAC>() else { return Ok(Fetched::Forged) };
        let program = match (kind, <[u8; 8]>::try_from(rest)) {
            (WHOLE, _) => Some(rest.to_vec()),
            (PIECES, Ok(length)) => self.pieces(key, u64::from_le_bytes(length))?,
            _ => None,
        };
        let name = self.name(key, "program");
        let genuine = program.filter(|program| self.key.sealed(name.as_bytes(), program, seal));
        Ok(genuine.map_or(Fetched::Forged, Fetched::Program))
    }

    /// A program in pieces; none if they aren't all there, or of other lengths. Who published it wrote them first.
    fn pieces(&self, key: &str, length: u64) -> Result<Option<Vec<u8>>, String> {
        let Some(length) = usize::try_from(length).ok().filter(|&length| length <= MOST) else { return Ok(None) };
        let mut program = Vec::new();
        for number in 0..length.div_ceil(PIECE) {
            let name = self.piece(key, number);
            // A store waits for what isn't there.
            if !self.store.check(std::slice::from_ref(&name)).map_err(words)? {
                return Ok(None);
            }
            let piece = self.store.get(&name).map_err(words)?;
            if piece.len() != PIECE.min(length - program.len()) {
                return Ok(None);
            }
            program.extend(piece);
        }
        Ok(Some(program))
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
        let name = self.name(key, "program");
        let seal = |program: &[u8]| self.key.seal(name.as_bytes(), program);
        let value = match program {
            Some(program) if program.len() <= PIECE => [&[WHOLE][..], &seal(program), program].concat(),
            Some(program) if program.len() <= MOST => {
                for (number, piece) in program.chunks(PIECE).enumerate() {
                    self.store.set(&self.piece(key, number), piece).map_err(words)?;
                }
                [&[PIECES][..], &seal(program), &(program.len() as u64).to_le_bytes()].concat()
            }
            _ => vec![FAILED],
        };
        self.store.set(&name, &value).map_err(words)
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

    fn share_of(store: &MemoryStore, patience: Patience, secret: u8) -> StoreShare {
        StoreShare::new(Arc::new(store.clone()), patience, &Secret::new([secret; MAC]))
    }

    fn share(store: &MemoryStore) -> StoreShare {
        share_of(store, Patience::default(), 1)
    }

    #[test]
    fn the_first_compiles_and_the_others_get_it() {
        let share = share(&MemoryStore::default());
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
        let share = share_of(&MemoryStore::default(), patience, 1);
        let start = Instant::now();
        assert_eq!(share.fetch("nobody", &|| true), Ok(Fetched::Late));
        assert!(start.elapsed() < Duration::from_secs(20));
    }
    #[test]
    fn who_is_told_to_stop_stops() {
        let share = share(&MemoryStore::default());
        let start = Instant::now();
        let asked = std::sync::atomic::AtomicU32::new(0);
        let go_on = || asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 3;
        assert_eq!(share.fetch("nobody", &go_on), Ok(Fetched::Late));
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn large_programs_go_in_pieces_and_are_forgotten_when_all_have_them() {
        let store = MemoryStore::default();
        let own = || share(&store).of(7, 3);
        for length in [0, 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 5] {
            let key = length.to_string();
            let program: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            assert_eq!(own().claim(&key), Ok(true));
            own().publish(&key, Some(&program)).unwrap();
            for _ in 0..2 {
                assert_eq!(own().fetch(&key, &|| true), Ok(Fetched::Program(program.clone())));
            }
            // Whoever comes later compiles by itself.
            assert_eq!(own().fetch(&key, &|| true), Ok(Fetched::Failed));
            for number in 0..length.div_ceil(PIECE) {
                let piece = store.get(&own().piece(&key, number)).unwrap_or_default();
                assert!(piece.is_empty(), "{length}: {number}");
            }
        }
        // Another world's members claim anew.
        assert_eq!(share(&store).of(8, 3).claim("1"), Ok(true));
    }

    #[test]
    fn what_is_no_program_of_this_job_is_none() {
        let store = MemoryStore::default();
        let share = share(&store);
        for value in [
            &[][..],
            &[9],
            &[WHOLE],
            &[PIECES],
            &[PIECES, 1, 2],
            &[&[PIECES; 33], &u64::MAX.to_le_bytes()[..]].concat(),
        ] {
            store.set(&share.name("a", "program"), value).unwrap();
            assert_eq!(share.fetch("a", &|| true), Ok(Fetched::Forged), "{value:?}");
        }
    }

    /// Whoever writes to the store without the job's secret: another's program, a right one under another name, of
    /// another world, altered, or with other pieces.
    #[test]
    fn what_was_forged_is_refused_and_what_a_member_wrote_is_taken() {
        for length in [100, PIECE + 100] {
            let pieces = if length > PIECE { length.div_ceil(PIECE) } else { 0 };
            let program: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            let store = MemoryStore::default();
            let member = share(&store).of(7, 9);
            let fetch = |key: &str| member.fetch(key, &|| true).unwrap();
            member.publish("right", Some(&program)).unwrap();
            assert_eq!(fetch("right"), Fetched::Program(program.clone()));
            share_of(&store, Patience::default(), 2).of(7, 9).publish("stranger", Some(&program)).unwrap();
            assert_eq!(fetch("stranger"), Fetched::Forged);
            share(&store).of(8, 9).publish("moved", Some(&program)).unwrap();
            let copy = |from: &StoreShare, key: &str, to: &str| {
                store.set(&member.name(to, "program"), &store.get(&from.name(key, "program")).unwrap()).unwrap();
                for number in 0..pieces {
                    store.set(&member.piece(to, number), &store.get(&from.piece(key, number)).unwrap()).unwrap();
                }
            };
            copy(&share(&store).of(8, 9), "moved", "moved");
            assert_eq!(fetch("moved"), Fetched::Forged);
            copy(&member, "right", "other");
            assert_eq!(fetch("other"), Fetched::Forged);
            let name = if pieces > 0 { member.piece("right", 1) } else { member.name("right", "program") };
            let mut altered = store.get(&name).unwrap();
            *altered.last_mut().unwrap() ^= 1;
            store.set(&name, &altered).unwrap();
            assert_eq!(fetch("right"), Fetched::Forged);
        }
        // Pieces that never come don't hold anybody up.
        let store = MemoryStore::default();
        let head = [&[PIECES; 33], &(3 * PIECE as u64).to_le_bytes()[..]].concat();
        store.set(&share(&store).name("a", "program"), &head).unwrap();
        assert_eq!(share(&store).fetch("a", &|| true), Ok(Fetched::Forged));
    }
}
