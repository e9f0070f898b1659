//! How two processes of a job make sure of each other before a byte of theirs means anything. Pure: no sockets, no clock.
//!
//! Over TCP the caller sends an [`Opening`], the called answers with a [`Reply`], the caller ends with a proof; then its
//! frames follow. Each side draws a nonce and proves with HMAC-SHA256 over everything said that it holds the job's
//! secret:
//!
//! | message | bytes | holds |
//! |---|---|---|
//! | opening | [`OPENING`] | magic, job, both processes and their ranks, the caller's nonce |
//! | reply | [`REPLY`] | magic, the called one's nonce, its MAC |
//! | proof | [`MAC`] | the caller's MAC; [`REFUSED`] if the reply proves nothing |
//!
//! The MACs of the two directions have different labels, so that neither can be played back as the other. The called one
//! proves itself first: a caller that reached a stranger says nothing that the stranger could use elsewhere.
//!
//! Within a host the opening comes with the ring's place and a MAC over both, on a Unix socket whose other end the kernel
//! vouches for. This authenticates; it does not encrypt.

use std::fmt;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::wire::{HubId, WireError};

/// Bytes of a secret, a nonce and a MAC.
pub const MAC: usize = 32;
/// Bytes of an opening.
pub const OPENING: usize = 96;
/// Bytes of a reply.
pub const REPLY: usize = 8 + 2 * MAC;

/// What a caller ends with whom the reply doesn't convince. It tells nothing of the caller's secret, and proves nothing:
/// whoever reads it may ask for a proof.
pub const REFUSED: [u8; MAC] = [0; MAC];

const OPENING_MAGIC: [u8; 8] = *b"podring\x02";
const REPLY_MAGIC: [u8; 8] = *b"podhere\x02";

type Code = Hmac<Sha256>;

/// A key that all of a job's processes hold, and nobody else. Never shown; compared in constant time.
#[derive(Clone)]
pub struct Secret([u8; MAC]);

/// No randomness is to be had.
#[derive(Debug, thiserror::Error)]
#[error("no random numbers: {0}")]
pub struct NoRandomness(String);

/// 32 random bytes.
pub fn nonce() -> Result<[u8; MAC], NoRandomness> {
    let mut bytes = [0; MAC];
    getrandom::fill(&mut bytes).map_err(|error| NoRandomness(error.to_string()))?;
    Ok(bytes)
}

impl Secret {
    /// A secret from its bytes.
    pub fn new(bytes: [u8; MAC]) -> Self {
        Secret(bytes)
    }

    /// A new one.
    pub fn fresh() -> Result<Self, NoRandomness> {
        Ok(Secret(nonce()?))
    }

    /// The secret of one job under this one.
    pub fn for_job(&self, job: u128) -> Self {
        Secret(self.sign(b"podring fabric v2 job\0\0\0", &[&job.to_le_bytes()]))
    }

    /// The key under which members of the job hand each other what they run: one of its own, so that nothing that is
    /// said on a link can stand for such a thing.
    pub fn for_programs(&self) -> Self {
        Secret(self.sign(b"podring fabric v2 progs\0", &[]))
    }

    /// What proves that a holder of this key put these bytes under this name.
    pub fn seal(&self, name: &[u8], bytes: &[u8]) -> [u8; MAC] {
        self.sign(SEALED, &[&length(name), name, &length(bytes), bytes])
    }

    /// Whether a holder of this key put these bytes under this name. In constant time.
    pub fn sealed(&self, name: &[u8], bytes: &[u8], seal: &[u8; MAC]) -> bool {
        self.verify(SEALED, &[&length(name), name, &length(bytes), bytes], seal)
    }

    /// Its bytes, for a store that is as private as the job.
    pub fn reveal(&self) -> [u8; MAC] {
        self.0
    }

    /// Every field has a fixed length, or its length before it, so that no two messages look the same when put together.
    fn code(&self, label: &[u8; 24], fields: &[&[u8]]) -> Code {
        let mut key = [0; 64];
        key[..MAC].copy_from_slice(&self.0);
        let mut code = Code::new(&key.into());
        code.update(label);
        for field in fields {
            code.update(field);
        }
        code
    }

    fn sign(&self, label: &[u8; 24], fields: &[&[u8]]) -> [u8; MAC] {
        self.code(label, fields).finalize().into_bytes().into()
    }

    /// In constant time.
    fn verify(&self, label: &[u8; 24], fields: &[&[u8]], mac: &[u8; MAC]) -> bool {
        self.code(label, fields).verify_slice(mac).is_ok()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        // Both are keys of one label: equal MACs are equal keys, and the comparison takes constant time.
        self.verify(b"podring fabric v2 same\0\0", &[], &other.sign(b"podring fabric v2 same\0\0", &[]))
    }
}

impl Eq for Secret {}

/// The first message on a link, from the process that will send on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The job in which the two know each other.
    pub job: u128,
    /// Who opens the link.
    pub from: HubId,
    /// Whom it takes the other end for.
    pub to: HubId,
    /// Their ranks in the job.
    pub ranks: [u32; 2],
    /// Drawn for this link.
    pub nonce: [u8; MAC],
}

impl Opening {
    /// The wire form.
    pub fn encode(&self) -> [u8; OPENING] {
        let mut out = [0u8; OPENING];
        out[..8].copy_from_slice(&OPENING_MAGIC);
        out[8..24].copy_from_slice(&self.job.to_le_bytes());
        out[24..40].copy_from_slice(&self.from.0.to_le_bytes());
        out[40..56].copy_from_slice(&self.to.0.to_le_bytes());
        out[56..60].copy_from_slice(&self.ranks[0].to_le_bytes());
        out[60..64].copy_from_slice(&self.ranks[1].to_le_bytes());
        out[64..].copy_from_slice(&self.nonce);
        out
    }

    /// Reads the wire form.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes: &[u8; OPENING] = bytes.try_into().map_err(|_| WireError::Hello)?;
        if bytes[..8] != OPENING_MAGIC {
            return Err(WireError::Hello);
        }
        let number = |at: usize| u32::from_le_bytes(take(bytes, at));
        let wide = |at: usize| u128::from_le_bytes(take(bytes, at));
        Ok(Opening {
            job: wide(8),
            from: HubId(wide(24)),
            to: HubId(wide(40)),
            ranks: [number(56), number(60)],
            nonce: take(bytes, 64),
        })
    }

    /// Whether these bytes may become an opening: a stranger's are known for what they are from the first that differs.
    pub fn may_begin(bytes: &[u8]) -> bool {
        let known = bytes.len().min(OPENING_MAGIC.len());
        bytes[..known] == OPENING_MAGIC[..known]
    }

    /// The called one's answer.
    pub fn reply(&self, secret: &Secret, nonce: [u8; MAC]) -> Reply {
        Reply { nonce, mac: secret.sign(CALLED, &[&self.encode(), &nonce]) }
    }

    /// Whether an answer comes from a holder of the secret, and is to this opening.
    pub fn accepts(&self, secret: &Secret, reply: &Reply) -> bool {
        secret.verify(CALLED, &[&self.encode(), &reply.nonce], &reply.mac)
    }

    /// The caller's answer to the answer.
    pub fn proof(&self, secret: &Secret, nonce: &[u8; MAC]) -> [u8; MAC] {
        secret.sign(CALLER, &[&self.encode(), nonce])
    }

    /// Whether the caller holds the secret. `nonce` is what it was sent.
    pub fn proves(&self, secret: &Secret, nonce: &[u8; MAC], proof: &[u8; MAC]) -> bool {
        secret.verify(CALLER, &[&self.encode(), nonce], proof)
    }
}

const CALLED: &[u8; 24] = b"podring fabric v2 called";
const CALLER: &[u8; 24] = b"podring fabric v2 caller";
const LOCAL: &[u8; 24] = b"podring fabric v2 local\0";
const SEALED: &[u8; 24] = b"podring fabric v2 sealed";

fn length(bytes: &[u8]) -> [u8; 8] {
    (bytes.len() as u64).to_le_bytes()
}

fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// The answer to an [`Opening`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Drawn for this link.
    pub nonce: [u8; MAC],
    /// Over the opening and the nonce.
    pub mac: [u8; MAC],
}

impl Reply {
    /// The wire form.
    pub fn encode(&self) -> [u8; REPLY] {
        let mut out = [0u8; REPLY];
        out[..8].copy_from_slice(&REPLY_MAGIC);
        out[8..8 + MAC].copy_from_slice(&self.nonce);
        out[8 + MAC..].copy_from_slice(&self.mac);
        out
    }

    /// Reads the wire form.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes: &[u8; REPLY] = bytes.try_into().map_err(|_| WireError::Hello)?;
        if bytes[..8] != REPLY_MAGIC {
            return Err(WireError::Hello);
        }
        Ok(Reply { nonce: take(bytes, 8), mac: take(bytes, 8 + MAC) })
    }
}

/// Bytes of a local opening.
pub const LOCAL_OPENING: usize = OPENING + 16 + MAC;

/// What opens a link within a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalOpening {
    /// As over TCP.
    pub opening: Opening,
    /// The ring's capacity in bytes.
    pub capacity: u64,
    /// Where in the opener's memory its hub id stands, so that the other can prove it reads that memory.
    pub place: u64,
    /// Over all of it.
    pub mac: [u8; MAC],
}

impl LocalOpening {
    /// Signs an opening.
    pub fn new(secret: &Secret, opening: Opening, capacity: u64, place: u64) -> Self {
        let mac = secret.sign(LOCAL, &[&opening.encode(), &capacity.to_le_bytes(), &place.to_le_bytes()]);
        LocalOpening { opening, capacity, place, mac }
    }

    /// Whether a holder of the secret has signed it.
    pub fn proves(&self, secret: &Secret) -> bool {
        let fields: [&[u8]; 3] = [&self.opening.encode(), &self.capacity.to_le_bytes(), &self.place.to_le_bytes()];
        secret.verify(LOCAL, &fields, &self.mac)
    }

    /// The wire form.
    pub fn encode(&self) -> [u8; LOCAL_OPENING] {
        let mut out = [0u8; LOCAL_OPENING];
        out[..OPENING].copy_from_slice(&self.opening.encode());
        out[OPENING..OPENING + 8].copy_from_slice(&self.capacity.to_le_bytes());
        out[OPENING + 8..OPENING + 16].copy_from_slice(&self.place.to_le_bytes());
        out[OPENING + 16..].copy_from_slice(&self.mac);
        out
    }

    /// Reads the wire form.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes: &[u8; LOCAL_OPENING] = bytes.try_into().map_err(|_| WireError::Hello)?;
        Ok(LocalOpening {
            opening: Opening::decode(&bytes[..OPENING])?,
            capacity: u64::from_le_bytes(take(bytes, OPENING)),
            place: u64::from_le_bytes(take(bytes, OPENING + 8)),
            mac: take(bytes, OPENING + 16),
        })
    }
}

/// A job, as a hub knows it: who belongs to it, and how they prove it.
#[derive(Clone, Debug)]
pub struct Job {
    /// Tells it from every other, and from its own earlier lives.
    pub id: u128,
    /// What all its processes hold.
    pub secret: Secret,
    /// Each rank's process.
    pub members: Vec<HubId>,
}

impl Job {
    /// The opening of a link between two members; `None` if one of them isn't.
    pub fn opening(&self, from: HubId, to: HubId, nonce: [u8; MAC]) -> Option<Opening> {
        let rank = |hub| self.members.iter().position(|&member| member == hub).map(|rank| rank as u32);
        Some(Opening { job: self.id, from, to, ranks: [rank(from)?, rank(to)?], nonce })
    }

    /// Whether an opening names members of this job, by their ranks.
    pub fn knows(&self, opening: &Opening) -> bool {
        let is = |rank: u32, hub| self.members.get(rank as usize) == Some(&hub);
        opening.job == self.id && is(opening.ranks[0], opening.from) && is(opening.ranks[1], opening.to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn job() -> Job {
        Job { id: 7, secret: Secret::new([1; MAC]), members: vec![HubId(10), HubId(11), HubId(12)] }
    }

    fn opening() -> Opening {
        job().opening(HubId(10), HubId(12), [5; MAC]).unwrap()
    }

    #[test]
    fn both_sides_prove_themselves() {
        let (job, opening) = (job(), opening());
        assert!(job.knows(&opening));
        let reply = opening.reply(&job.secret, [6; MAC]);
        assert!(opening.accepts(&job.secret, &reply));
        let proof = opening.proof(&job.secret, &reply.nonce);
        assert!(opening.proves(&job.secret, &reply.nonce, &proof));
        assert!(LocalOpening::new(&job.secret, opening, 1, 2).proves(&job.secret));
    }

    #[test]
    fn another_secret_job_rank_direction_or_nonce_proves_nothing() {
        let (job, opening) = (job(), opening());
        let reply = opening.reply(&job.secret, [6; MAC]);
        let proof = opening.proof(&job.secret, &reply.nonce);
        let stranger = Secret::new([2; MAC]);
        assert!(!opening.accepts(&stranger, &reply) && !opening.proves(&stranger, &reply.nonce, &proof));
        assert!(!LocalOpening::new(&stranger, opening, 1, 2).proves(&job.secret));
        // What one side has said can't be played back by the other, nor on another link.
        assert_ne!(reply.mac, proof);
        assert!(!opening.proves(&job.secret, &reply.nonce, &reply.mac));
        assert!(!opening.proves(&job.secret, &[7; MAC], &proof));
        let others = [
            Opening { job: 8, ..opening },
            Opening { from: HubId(11), ..opening },
            Opening { to: HubId(11), ..opening },
            Opening { ranks: [1, 2], ..opening },
            Opening { ranks: [0, 1], ..opening },
            Opening { nonce: [4; MAC], ..opening },
        ];
        for other in others {
            assert!(!other.accepts(&job.secret, &reply), "{other:?}");
            assert!(!other.proves(&job.secret, &reply.nonce, &proof), "{other:?}");
            assert!(!job.knows(&other) || other.nonce != opening.nonce, "{other:?}");
        }
        assert!(job.opening(HubId(10), HubId(13), [0; MAC]).is_none());
    }

    #[test]
    fn secrets_are_told_apart_and_never_shown() {
        let (a, b) = (Secret::new([1; MAC]), Secret::new([2; MAC]));
        assert!(a != b && a == a.clone());
        assert_ne!(a.for_job(1), a.for_job(2));
        assert_ne!(a.for_job(1), a);
        assert_ne!(Secret::fresh().unwrap(), Secret::fresh().unwrap());
        assert_eq!(format!("{a:?}"), "Secret(..)");
        assert!(!format!("{:?}", job()).contains("[1, 1"));
    }

    #[test]
    fn a_seal_holds_for_one_key_one_name_and_these_bytes() {
        let key = job().secret.for_programs();
        let seal = key.seal(b"name", b"bytes");
        assert!(key.sealed(b"name", b"bytes", &seal));
        // The boundary between name and bytes counts too.
        for (name, bytes) in [(&b"nam"[..], &b"ebytes"[..]), (b"names", b"bytes"), (b"name", b"byte"), (b"name", b"")] {
            assert!(!key.sealed(name, bytes, &seal));
        }
        for other in [job().secret, Secret::new([2; MAC]).for_programs()] {
            assert!(!other.sealed(b"name", b"bytes", &seal));
        }
    }

    /// HMAC-SHA256 as RFC 4231 has it, test case 2, so that this is the HMAC everybody means.
    #[test]
    fn the_code_is_hmac_sha256() {
        let mac = Code::new_from_slice(b"Jefe").unwrap().chain_update(b"what do ya want for nothing?").finalize();
        let hex: String = mac.into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }

    proptest! {
        #[test]
        fn messages_round_trip(words: [u128; 3], ranks: [u32; 2], nonce: [u8; MAC], mac: [u8; MAC], numbers: [u64; 2]) {
            let opening = Opening { job: words[0], from: HubId(words[1]), to: HubId(words[2]), ranks, nonce };
            prop_assert_eq!(Opening::decode(&opening.encode()), Ok(opening));
            let reply = Reply { nonce, mac };
            prop_assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
            let local = LocalOpening { opening, capacity: numbers[0], place: numbers[1], mac };
            prop_assert_eq!(LocalOpening::decode(&local.encode()), Ok(local));
        }

        /// Whatever is changed in an opening, a reply to the original isn't one to it.
        #[test]
        fn every_bit_counts(at in 8usize..OPENING, bit in 0u32..8) {
            let (job, opening) = (job(), opening());
            let mut bytes = opening.encode();
            bytes[at] ^= 1 << bit;
            let changed = Opening::decode(&bytes).unwrap();
            prop_assert!(!changed.accepts(&job.secret, &opening.reply(&job.secret, [6; MAC])));
        }

        #[test]
        fn any_bytes_decode_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let begins = Opening::may_begin(&bytes);
            prop_assert!(Opening::decode(&bytes).is_err() || begins);
            let _ = Reply::decode(&bytes);
            let _ = LocalOpening::decode(&bytes);
        }
    }
}
