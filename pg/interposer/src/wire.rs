//! Protobuf messages field by field: what is not known here goes on byte by byte.

/// Bytes that are no such message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Damaged(pub &'static str);

/// A field: its number, itself as it stands, and its payload if it is length-delimited.
pub type Field<'a> = (u64, &'a [u8], Option<&'a [u8]>);

/// The fields of a message.
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>, Damaged>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let read = self.read();
        if read.is_err() {
            self.0 = &[];
        }
        Some(read)
    }
}

impl<'a> Fields<'a> {
    fn read(&mut self) -> Result<Field<'a>, Damaged> {
        let start = self.0;
        let key = take_varint(&mut self.0)?;
        let mut payload = None;
        match key & 7 {
            0 => drop(take_varint(&mut self.0)?),
            1 => drop(take(&mut self.0, 8)?),
            2 => {
                let length = take_varint(&mut self.0)?;
                payload = Some(take(&mut self.0, usize::try_from(length).map_err(|_| Damaged("a length too large"))?)?);
            }
            5 => drop(take(&mut self.0, 4)?),
            _ => return Err(Damaged("an unknown wire type")),
        }
        Ok((key >> 3, &start[..start.len() - self.0.len()], payload))
    }
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Result<&'a [u8], Damaged> {
    let (head, tail) = bytes.split_at_checked(count).ok_or(Damaged("they end within a field"))?;
    *bytes = tail;
    Ok(head)
}

/// The number at the head of `bytes`, which move on behind it.
pub fn take_varint(bytes: &mut &[u8]) -> Result<u64, Damaged> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(bytes, 1)?[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(Damaged("a number of more than ten bytes"))
}

/// A number as it stands in messages.
pub fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value > 0x7f {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A field that is a number.
pub fn put_varint(out: &mut Vec<u8>, field: u64, value: u64) {
    varint(out, field << 3);
    varint(out, value);
}

/// A field that is a string, a message or packed numbers.
pub fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}
