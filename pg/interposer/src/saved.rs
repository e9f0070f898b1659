//! Programs with collectives as bytes: to be kept in files, and handed to the other ranks of a job.
//!
//! What XLA compiled says nothing of the collectives that are played in its place: they are in the program as XLA wrote
//! it down, which goes along. What comes of both depends on no rank (a rank's own place is asked for when the program
//! runs), so that one rank's program is every rank's.

use crate::wire::{Damaged, Fields, put_bytes};

/// Of what follows; another layout gets another.
const MAGIC: &[u8; 16] = b"podring on XLA 1";
const OPTIONS: u64 = 1;
const MODULE: u64 = 2;
const COMPILED: u64 = 3;

/// A program.
#[derive(Debug, PartialEq, Eq)]
pub struct Saved<'a> {
    /// The compile options that the framework gave.
    pub options: &'a [u8],
    /// As it was before it was compiled: an `xla.HloModuleProto`.
    pub module: &'a [u8],
    /// What the wrapped plugin made of it, in its own form.
    pub compiled: &'a [u8],
}

impl<'a> Saved<'a> {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        put_bytes(&mut out, OPTIONS, self.options);
        put_bytes(&mut out, MODULE, self.module);
        put_bytes(&mut out, COMPILED, self.compiled);
        out
    }

    pub fn decode(bytes: &'a [u8]) -> Result<Saved<'a>, Damaged> {
        let fields = bytes.strip_prefix(MAGIC).ok_or(Damaged("they are no program of a virtual slice"))?;
        let [mut options, mut module, mut compiled] = [None; 3];
        for field in Fields(fields) {
            match field? {
                (OPTIONS, _, payload) => options = payload,
                (MODULE, _, payload) => module = payload,
                (COMPILED, _, payload) => compiled = payload,
                _ => {}
            }
        }
        match (options, module, compiled) {
            (Some(options), Some(module), Some(compiled)) => Ok(Saved { options, module, compiled }),
            _ => Err(Damaged("a part of the program is missing")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes_that_end_early_are_no_program() {
        let whole = Saved { options: b"options", module: b"module", compiled: b"compiled" }.encode();
        for cut in 0..whole.len() {
            assert!(Saved::decode(&whole[..cut]).is_err(), "{cut}");
        }
    }

    proptest! {
        #[test]
        fn what_is_saved_comes_back(parts in prop::array::uniform3(prop::collection::vec(any::<u8>(), 0..300))) {
            let [options, module, compiled] = &parts;
            let saved = Saved { options, module, compiled };
            let bytes = saved.encode();
            prop_assert_eq!(Saved::decode(&bytes), Ok(saved));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = Saved::decode(&[&MAGIC[..], &bytes].concat());
        }
    }
}
