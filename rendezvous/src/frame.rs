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

    /// Where the next frame's message is or will be.
    pub(crate) fn next(&self, limit: usize) -> Result<Option<Range<usize>>, TooLong> {
        let Some(head) = self.bytes.get(self.from..self.from + HEAD) else { return Ok(None) };
        let length = head.iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
        if length > limit {
            return Err(TooLong(length));
        }
        let begin = self.from + HEAD;
        Ok(Some(begin..begin + length))
    }

    /// A message that `next` found, used up now.
    pub(crate) fn used(&mut self, range: Range<usize>) -> &[u8] {
        self.from = range.end;
        self.bytes.get(range).unwrap_or_default()
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

// What moves many keys is written and read without a copy of each. The numbers are those of the fields in podring.proto,
// as (number << 3 | wire type); a test holds them against the generated code.

const NUMBER: u64 = 1 << 3;
const QUIET: u64 = 18 << 3;
const AFTER: u64 = 19 << 3;
const CALL_MULTI_GET: u64 = 10 << 3 | 2;
const CALL_MULTI_SET: u64 = 11 << 3 | 2;
const REPLY_VALUES: u64 = 8 << 3 | 2;
const INSTANCE: u64 = 1 << 3 | 1;
const KEYS: u64 = 2 << 3 | 2;
const VALUES: u64 = 3 << 3 | 2;
const TIMEOUT: u64 = 3 << 3;
const EACH_VALUE: u64 = 1 << 3 | 2;

fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn varint_len(value: u64) -> usize {
    (70 - (value | 1).leading_zeros() as usize) / 7
}

fn bytes(tag: u64, bytes: &[u8], out: &mut Vec<u8>) {
    varint(tag, out);
    varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

fn bytes_len<B: AsRef<[u8]>>(all: impl IntoIterator<Item = B>) -> usize {
    let one = |bytes: B| bytes.as_ref().len();
    all.into_iter().map(one).map(|len| 1 + varint_len(len as u64) + len).sum()
}

/// What a message says beside its one field with contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct About {
    pub(crate) number: u64,
    /// How many quiet calls came before.
    pub(crate) after: u64,
    pub(crate) quiet: bool,
}

/// Begins a frame with a message whose field has `inner` bytes.
fn begin(About { number, after, quiet }: About, field: u64, inner: usize, out: &mut Vec<u8>) {
    out.clear();
    if out.capacity() > KEPT {
        *out = Vec::new();
    }
    let before = if after > 0 { varint_len(AFTER) + varint_len(after) } else { 0 };
    let before = before + if quiet { varint_len(QUIET) + 1 } else { 0 };
    let length = 1 + varint_len(number) + before + 1 + varint_len(inner as u64) + inner;
    out.reserve(HEAD + length);
    out.extend_from_slice(&(length as u32).to_le_bytes());
    varint(NUMBER, out);
    varint(number, out);
    if after > 0 {
        varint(AFTER, out);
        varint(after, out);
    }
    if quiet {
        varint(QUIET, out);
        varint(1, out);
    }
    varint(field, out);
    varint(inner as u64, out);
}

/// A frame with a call of multi_set.
pub(crate) fn multi_set<K: AsRef<str>, V: AsRef<[u8]>>(
    about: About,
    instance: u64,
    keys: &[K],
    values: &[V],
    out: &mut Vec<u8>,
) {
    let inner = 9 + bytes_len(keys.iter().map(|key| key.as_ref().as_bytes())) + bytes_len(values);
    begin(about, CALL_MULTI_SET, inner, out);
    varint(INSTANCE, out);
    out.extend_from_slice(&instance.to_le_bytes());
    keys.iter().for_each(|key| bytes(KEYS, key.as_ref().as_bytes(), out));
    values.iter().for_each(|value| bytes(VALUES, value.as_ref(), out));
}

/// A frame with a call of multi_get.
pub(crate) fn multi_get<K: AsRef<str>>(about: About, instance: u64, keys: &[K], timeout_ms: u32, out: &mut Vec<u8>) {
    let timeout = u64::from(timeout_ms);
    let inner = 9 + bytes_len(keys.iter().map(|key| key.as_ref().as_bytes())) + 1 + varint_len(timeout);
    begin(about, CALL_MULTI_GET, inner, out);
    varint(INSTANCE, out);
    out.extend_from_slice(&instance.to_le_bytes());
    keys.iter().for_each(|key| bytes(KEYS, key.as_ref().as_bytes(), out));
    varint(TIMEOUT, out);
    varint(timeout, out);
}

/// A frame with the answer to multi_get.
pub(crate) fn values<'a>(number: u64, values: impl Iterator<Item = &'a [u8]> + Clone, out: &mut Vec<u8>) {
    let inner = bytes_len(values.clone());
    begin(About { number, ..About::default() }, REPLY_VALUES, inner, out);
    values.for_each(|value| bytes(EACH_VALUE, value, out));
}

/// Fields as they come; `None` where they are none.
#[derive(Clone)]
pub(crate) struct Fields<'a>(&'a [u8]);

pub(crate) enum Field<'a> {
    Number(u64),
    Fixed(u64),
    Bytes(&'a [u8]),
}

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for (index, byte) in self.0.iter().take(10).enumerate() {
            value |= u64::from(byte & 0x7f).checked_shl(7 * index as u32)?;
            if byte & 0x80 == 0 {
                self.0 = &self.0[index + 1..];
                return Some(value);
            }
        }
        None
    }

    fn cut(&mut self, count: usize) -> Option<&'a [u8]> {
        let (cut, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(cut)
    }

    /// The next field: `Ok(None)` at the end.
    fn field(&mut self) -> Result<Option<(u64, Field<'a>)>, ()> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let tag = self.varint().ok_or(())?;
        let field = match tag & 7 {
            0 => Field::Number(self.varint().ok_or(())?),
            1 => Field::Fixed(u64::from_le_bytes(self.cut(8).and_then(|cut| cut.try_into().ok()).ok_or(())?)),
            2 => {
                let count = self.varint().and_then(|count| usize::try_from(count).ok()).ok_or(())?;
                Field::Bytes(self.cut(count).ok_or(())?)
            }
            _ => return Err(()),
        };
        Ok(Some((tag, field)))
    }

    /// A call or an answer, if its field with contents is the one wanted.
    fn of(message: &'a [u8], wanted: u64) -> Option<(About, Fields<'a>)> {
        let (mut fields, mut about, mut found) = (Fields(message), About::default(), None);
        while let Some((tag, field)) = fields.field().ok()? {
            match (tag, field) {
                (NUMBER, Field::Number(value)) => about.number = value,
                (AFTER, Field::Number(value)) => about.after = value,
                (QUIET, Field::Number(value)) => about.quiet = value != 0,
                (tag, Field::Bytes(inner)) if tag == wanted && found.is_none() => found = Some(Fields(inner)),
                _ => return None,
            }
        }
        Some((about, found?))
    }
}

/// A call of many keys, not copied out of its frame.
pub(crate) struct Many<'a> {
    pub(crate) about: About,
    pub(crate) instance: u64,
    pub(crate) keys: Vec<&'a str>,
    /// Of multi_set.
    pub(crate) values: Option<Vec<&'a [u8]>>,
}

impl<'a> Many<'a> {
    /// `None` for any other call, and for one that isn't as it should be: that is for the generated code to say.
    pub(crate) fn read(message: &'a [u8]) -> Option<Many<'a>> {
        let set = Fields::of(message, CALL_MULTI_SET);
        let is_set = set.is_some();
        let (about, mut fields) = set.or_else(|| Fields::of(message, CALL_MULTI_GET))?;
        let mut many = Many { about, instance: 0, keys: Vec::new(), values: is_set.then(Vec::new) };
        while let Some((tag, field)) = fields.field().ok()? {
            match (tag, field, &mut many.values) {
                (INSTANCE, Field::Fixed(instance), _) => many.instance = instance,
                (KEYS, Field::Bytes(key), _) => many.keys.push(std::str::from_utf8(key).ok()?),
                (VALUES, Field::Bytes(value), Some(values)) => values.push(value),
                (TIMEOUT, Field::Number(_), None) => {}
                _ => return None,
            }
        }
        Some(many)
    }
}

/// The values of an answer to multi_get, not copied out of their frame. `None` for any other answer.
pub(crate) fn read_values(message: &[u8]) -> Option<(u64, Vec<&[u8]>)> {
    let (About { number, .. }, mut fields) = Fields::of(message, REPLY_VALUES)?;
    let mut values = Vec::new();
    while let Some(field) = fields.field().ok()? {
        match field {
            (EACH_VALUE, Field::Bytes(value)) => values.push(value),
            _ => return None,
        }
    }
    Some((number, values))
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
        /// By hand and by the generated code: the same.
        #[test]
        fn many_keys_are_written_and_read_as_generated(
            number in any::<u64>(),
            after in any::<u64>(),
            quiet in any::<bool>(),
            instance in any::<u64>(),
            timeout_ms in any::<u32>(),
            pairs in proptest::collection::vec(("[a-zé]{0,200}", proptest::collection::vec(any::<u8>(), 0..200)), 0..20),
        ) {
            use pb::store_call::Call;
            use pb::store_reply::Reply;
            let (keys, all): (Vec<String>, Vec<Vec<u8>>) = pairs.into_iter().unzip();
            let mut out = Vec::new();
            let about = About { number, after, quiet };
            multi_set(about, instance, &keys, &all, &mut out);
            prop_assert_eq!(out.len() - HEAD, u32::from_le_bytes(out[..HEAD].try_into().unwrap()) as usize);
            let request = pb::MultiSetRequest { instance, keys: keys.clone(), values: all.clone() };
            let expected = pb::StoreCall { number, after, quiet, call: Some(Call::MultiSet(request)) };
            prop_assert_eq!(pb::StoreCall::decode(&out[HEAD..]).unwrap(), expected.clone());
            let generated = expected.encode_to_vec();
            for message in [&out[HEAD..], &generated[..]] {
                let many = Many::read(message).unwrap();
                prop_assert_eq!((many.about, many.instance), (about, instance));
                prop_assert_eq!(many.keys, keys.clone());
                prop_assert_eq!(many.values.unwrap(), all.clone());
            }
            multi_get(About { quiet: false, ..about }, instance, &keys, timeout_ms, &mut out);
            let request = pb::MultiGetRequest { instance, keys: keys.clone(), timeout_ms };
            let expected = pb::StoreCall { number, after, quiet: false, call: Some(Call::MultiGet(request)) };
            prop_assert_eq!(pb::StoreCall::decode(&out[HEAD..]).unwrap(), expected.clone());
            let generated = expected.encode_to_vec();
            let many = Many::read(&generated).unwrap();
            prop_assert!(many.values.is_none() && many.keys == keys && many.instance == instance);
            values(number, all.iter().map(Vec::as_slice), &mut out);
            let expected = pb::StoreReply { number, reply: Some(Reply::Values(pb::Values { values: all.clone() })) };
            prop_assert_eq!(pb::StoreReply::decode(&out[HEAD..]).unwrap(), expected.clone());
            let generated = expected.encode_to_vec();
            prop_assert_eq!(read_values(&generated).unwrap(), (number, all.iter().map(Vec::as_slice).collect()));
        }

        /// Whatever comes in a frame: no panic, and what is read is what the generated code reads.
        #[test]
        fn garbage_in_a_frame(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0usize..60) {
            let _ = (Many::read(&bytes), read_values(&bytes));
            let mut out = Vec::new();
            multi_set(About { number: 7, after: 3, quiet: true }, 9, &["a", "bc"], &[&b"1"[..], b"22"], &mut out);
            let message = &out[HEAD..];
            let torn = &message[..cut.min(message.len())];
            if let Some(many) = Many::read(torn) {
                let read = pb::StoreCall::decode(torn).unwrap();
                prop_assert_eq!(many.about.number, read.number);
            }
        }

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
