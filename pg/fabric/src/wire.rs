//! What two processes say to each other once a link is open ([`crate::handshake`]): frames.
//!
//! The same bytes travel through shared memory and TCP. All numbers are little-endian.

use serde::{Deserialize, Serialize};

/// Bytes of a frame header.
pub const HEADER: usize = 64;

/// Version of the frame format; both ends of a link must have the same.
pub const VERSION: u8 = 2;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Frame {
    /// A whole message, its bytes following.
    Eager = 1,
    /// A message is ready: `total` bytes at `addr` of the sender. The receiver reads them and answers `Ack`, or asks for
    /// them with `Clear`. `cookie` names the sender's slot.
    Ready = 2,
    /// Send the message of slot `cookie` as `Data` to my slot `addr`.
    Clear = 3,
    /// The next bytes of a message for the receiver's slot `cookie`.
    Data = 4,
    /// The message of the sender's slot `cookie` has been read, or will not be.
    Ack = 5,
    /// I am about to run this collective: for the ranks that would otherwise hear nothing from me.
    Announce = 6,
    /// The channel failed; the payload is a JSON [`crate::error::Failure`]. Of one that has a table, it asks for the
    /// receiver's row, too: who has failed already answers with its own failure.
    Abort = 7,
    /// What I called with this sequence number; the payload is its text.
    Ledger = 8,
    /// Nothing but a sign of life.
    Ping = 9,
    /// I have closed this channel.
    Bye = 10,
    /// I no longer hold `total` bytes of your eager messages: you may send as many more.
    Credit = 11,
    /// I give you up; the payload says why. The last thing on a TCP link, and the only one that goes against its direction.
    Farewell = 12,
}

impl Frame {
    fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Frame::Eager,
            2 => Frame::Ready,
            3 => Frame::Clear,
            4 => Frame::Data,
            5 => Frame::Ack,
            6 => Frame::Announce,
            7 => Frame::Abort,
            8 => Frame::Ledger,
            9 => Frame::Ping,
            10 => Frame::Bye,
            11 => Frame::Credit,
            12 => Frame::Farewell,
            _ => return None,
        })
    }
}

/// `Header::flags`: the message is point-to-point; `key` is its tag.
pub const POINT_TO_POINT: u8 = 1;

/// `Header::flags` of a [`Frame::Ledger`]: nothing with this number yet; should it come soon, another frame says what.
pub const NOT_YET: u8 = 2;

/// `Header::flags` of a [`Frame::Abort`]: it answers another one, and wants no answer.
pub const ANSWER: u8 = 4;

/// `Header::flags` of a [`Frame::Ack`]: the message was not read and won't be.
pub const DECLINED: u8 = 8;

/// What stands before every frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The frame's kind.
    pub frame: Frame,
    /// [`POINT_TO_POINT`], [`NOT_YET`], [`ANSWER`], [`DECLINED`] or 0.
    pub flags: u8,
    /// Payload bytes that follow.
    pub len: u32,
    /// The group, as its channel.
    pub channel: u64,
    /// The collective's sequence number in its group.
    pub seq: u64,
    /// Which message of the collective: part, lane and tag; for point-to-point, the user's tag.
    pub key: u64,
    /// Digest of what the sender called.
    pub fingerprint: u64,
    /// Bytes of the whole message.
    pub total: u64,
    /// An address or slot; see the frame kinds.
    pub addr: u64,
    /// A slot; see the frame kinds.
    pub cookie: u64,
}

/// Why bytes are not a header.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Unknown frame kind.
    #[error("unknown frame kind {0}")]
    Kind(u8),
    /// Another version of the format.
    #[error("frame format version {got}, this process has {VERSION}")]
    Version {
        /// The peer's.
        got: u8,
    },
    /// A payload longer than the link allows.
    #[error("payload of {got} bytes, at most {limit} allowed")]
    Length {
        /// Claimed bytes.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// The opening message isn't podring's.
    #[error("not podring's opening")]
    Hello,
}

impl Header {
    /// A header with everything unsaid zero.
    pub fn new(frame: Frame, channel: u64) -> Self {
        Header { frame, flags: 0, len: 0, channel, seq: 0, key: 0, fingerprint: 0, total: 0, addr: 0, cookie: 0 }
    }

    /// The wire form.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut out = [0u8; HEADER];
        out[0] = self.frame as u8;
        out[1] = self.flags;
        out[2] = VERSION;
        out[4..8].copy_from_slice(&self.len.to_le_bytes());
        let words = [self.channel, self.seq, self.key, self.fingerprint, self.total, self.addr, self.cookie];
        for (chunk, word) in out[8..].chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// Reads the wire form.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Self, WireError> {
        if bytes[2] != VERSION {
            return Err(WireError::Version { got: bytes[2] });
        }
        let frame = Frame::from_code(bytes[0]).ok_or(WireError::Kind(bytes[0]))?;
        let word = |index: usize| {
            let mut raw = [0u8; 8];
            raw.copy_from_slice(&bytes[8 + index * 8..16 + index * 8]);
            u64::from_le_bytes(raw)
        };
        Ok(Header {
            frame,
            flags: bytes[1],
            len: u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
            channel: word(0),
            seq: word(1),
            key: word(2),
            fingerprint: word(3),
            total: word(4),
            addr: word(5),
            cookie: word(6),
        })
    }
}

/// A process's identity, random per hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HubId(pub u128);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn headers_round_trip(kind in 1u8..=12, flags: u8, len: u32, words: [u64; 7]) {
            let header = Header {
                frame: Frame::from_code(kind).unwrap(), flags, len, channel: words[0], seq: words[1], key: words[2],
                fingerprint: words[3], total: words[4], addr: words[5], cookie: words[6],
            };
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn any_bytes_decode_or_are_refused(bytes in prop::collection::vec(any::<u8>(), HEADER)) {
            let bytes: [u8; HEADER] = bytes.try_into().unwrap();
            let _ = Header::decode(&bytes);
        }
    }
}
