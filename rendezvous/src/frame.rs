//! The store stream's frames, for both sides. See podring.proto.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;

use prost::Message;

/// What a store stream begins with. Neither HTTP/2 nor TLS begins with its first byte.
pub(crate) const MAGIC: &[u8; 16] = b"podring-store/1\n";
/// Bytes of a hello and of the answer to it.
pub(crate) const HELLO: usize = 16 << 10;
/// Bytes of a frame's head.
pub(crate) const HEAD: usize = 4;
/// A buffer that grew beyond this is given back after use.
const KEPT: usize = 1 << 20;

/// Bytes as they arrive.
#[derive(Default)]
pub(crate) struct Inbound {
    pub(crate) bytes: Vec<u8>,
    /// What lies before is used up.
    from: usize,
}

/// A frame longer than the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLong(pub(crate) usize);

impl Inbound {
    /// Takes `count` bytes off, if they are there.
    pub(crate) fn take(&mut self, count: usize) -> Option<&[u8]> {
        let range = self.from..self.from + count;
        let taken = self.bytes.get(range.clone())?;
        self.from = range.end;
        Some(taken)
    }

    /// The next frame, if it is there as a whole.
    pub(crate) fn frame(&mut self, limit: usize) -> Result<Option<&[u8]>, TooLong> {
        let Some(range) = self.next(limit)? else { return Ok(None) };
        let Some(frame) = self.bytes.get(range.clone()) else { return Ok(None) };
        self.from = range.end;
        Ok(Some(frame))
    }

    fn next(&self, limit: usize) -> Result<Option<Range<usize>>, TooLong> {
        let Some(head) = self.bytes.get(self.from..self.from + HEAD) else { return Ok(None) };
        let length = head.iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
        if length > limit {
            return Err(TooLong(length));
        }
        let begin = self.from + HEAD;
        Ok(Some(begin..begin + length))
    }

    /// Makes room for what comes next: as much as has come already, not what the head promises.
    pub(crate) fn make_room(&mut self) {
        if self.from == self.bytes.len() {
            self.bytes.clear();
            if self.bytes.capacity() > KEPT {
                self.bytes = Vec::new();
            }
        } else {
            self.bytes.drain(..self.from);
        }
        self.from = 0;
        self.bytes.reserve(self.bytes.len().clamp(4096, 4 << 20));
    }
}

/// Writes a frame into `out`, alone.
pub(crate) fn encode(message: &impl Message, out: &mut Vec<u8>) {
    out.clear();
    if out.capacity() > KEPT {
        *out = Vec::new();
    }
    let length = message.encoded_len();
    out.reserve(HEAD + length);
    // Messages are bounded far below 4 GiB.
    out.extend_from_slice(&(length as u32).to_le_bytes());
    message.encode_raw(out);
}

/// The abstract Unix address beside a port: of the same network namespace, and faster.
pub(crate) fn beside(address: SocketAddr) -> String {
    format!("podring/{address}")
}

/// Under which addresses a coordinator that takes this one may have been started.
pub(crate) fn served_as(peer: SocketAddr) -> impl Iterator<Item = SocketAddr> {
    let wild = [SocketAddr::from((Ipv6Addr::UNSPECIFIED, peer.port())), (Ipv4Addr::UNSPECIFIED, peer.port()).into()];
    std::iter::once(peer).chain(wild)
}

#[cfg(test)]
mod tests {
    use podring_proto as pb;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_come_in_any_pieces() {
        let (mut all, mut out) = (Vec::new(), Vec::new());
        let sizes = [0usize, 1, 5000, 70_000];
        for size in sizes {
            encode(&pb::Value { value: vec![7; size] }, &mut out);
            all.extend_from_slice(&out);
        }
        for piece in [1, 3, 4096, all.len()] {
            let (mut inbound, mut seen) = (Inbound::default(), Vec::new());
            for bytes in all.chunks(piece) {
                inbound.make_room();
                inbound.bytes.extend_from_slice(bytes);
                while let Some(frame) = inbound.frame(1 << 20).unwrap() {
                    seen.push(pb::Value::decode(frame).unwrap().value.len());
                }
            }
            assert_eq!(seen, sizes, "{piece}");
        }
    }

    proptest! {
        /// Whatever comes: no panic, no more memory than what came and a bit, and no frame above the limit.
        #[test]
        fn garbage_is_bounded(bytes in proptest::collection::vec(any::<u8>(), 0..2000), piece in 1usize..64) {
            let mut inbound = Inbound::default();
            'all: for bytes in bytes.chunks(piece) {
                inbound.make_room();
                inbound.bytes.extend_from_slice(bytes);
                loop {
                    match inbound.frame(300) {
                        Ok(Some(frame)) => prop_assert!(frame.len() <= 300),
                        Ok(None) => break,
                        Err(TooLong(length)) => {
                            prop_assert!(length > 300);
                            break 'all;
                        }
                    }
                }
                prop_assert!(inbound.bytes.capacity() < 16 << 10);
            }
        }
    }
}
