//! What TCP links bring.

use std::time::Instant;

use super::super::endpoint::In;
use super::super::engine::Engine;
use crate::link::tcp;
use crate::wire::{Frame, HEADER, Header};

/// Bytes read from one socket before the next one's turn.
const READ_BURST: usize = 1 << 20;
/// Size of a TCP link's read buffer: holds the largest eager frame.
pub(crate) const BUFFER: usize = 256 << 10;

impl Engine {
    /// Reads what a TCP link brought, up to a limit; `true` if there may be more.
    pub(super) fn read_tcp(&mut self, endpoint: u32) -> bool {
        // Taken out so that frames can be acted on while the buffer is read; put back below.
        let In::Tcp { socket, mut buffer, mut start, mut end, mut data } =
            std::mem::replace(&mut self.endpoints[endpoint as usize].inbound, In::None)
        else {
            return false;
        };
        let (mut ended, mut dry) = (None, false);
        let mut budget = READ_BURST;
        while budget > 0 && ended.is_none() {
            if let Err(why) = self.understand(endpoint, &buffer[..end], &mut start, &mut data) {
                ended = Some(why);
                break;
            }
            if start == end {
                (start, end) = (0, 0);
            }
            let (got, wanted) = if let Some((slot, left)) = data
                && left >= HEADER
                && end == 0
                && let Some((into, room)) = self.window(endpoint, slot)
            {
                // Straight into the tensor.
                // SAFETY: the window is `room` bytes of the receive's memory.
                let window = unsafe { std::slice::from_raw_parts_mut(into, room.min(left)) };
                let wanted = window.len();
                let got = tcp::read(&socket, window);
                if let Ok(Some(bytes)) = got {
                    self.filled(slot, bytes);
                    data = (left > bytes).then_some((slot, left - bytes));
                }
                (got, wanted)
            } else {
                if start > 0 {
                    buffer.copy_within(start..end, 0);
                    (start, end) = (0, end - start);
                }
                let got = tcp::read(&socket, &mut buffer[end..]);
                let wanted = buffer.len() - end;
                end += got.ok().flatten().unwrap_or(0);
                (got, wanted)
            };
            match got {
                Ok(Some(0)) => ended = Some("its connection ended".to_owned()),
                Ok(Some(bytes)) => {
                    self.endpoints[endpoint as usize].heard = Instant::now();
                    // Less than there was room for: there was no more. What has come meanwhile makes an event.
                    budget = if bytes < wanted { 0 } else { budget.saturating_sub(bytes) };
                }
                Ok(None) => {
                    dry = true;
                    break;
                }
                Err(errno) => ended = Some(format!("connection lost: {errno}")),
            }
        }
        if ended.is_none() && !dry {
            ended = self.understand(endpoint, &buffer[..end], &mut start, &mut data).err();
        }
        let more = ended.is_none() && !dry;
        let peer = &mut self.endpoints[endpoint as usize];
        if peer.dead.is_none() {
            peer.inbound = In::Tcp { socket, buffer, start, end, data };
        }
        if let Some(why) = ended {
            self.lose(endpoint, why);
        }
        more
    }

    /// Acts on the whole frames in `buffer` from `start` on, and on parts of streamed ones.
    fn understand(
        &mut self,
        endpoint: u32,
        buffer: &[u8],
        start: &mut usize,
        data: &mut Option<(u64, usize)>,
    ) -> Result<(), String> {
        loop {
            let rest = &buffer[*start..];
            if let Some((slot, left)) = *data {
                let piece = left.min(rest.len());
                self.data(endpoint, slot, &rest[..piece]);
                *start += piece;
                *data = (left > piece).then_some((slot, left - piece));
                if data.is_some() {
                    return Ok(());
                }
                continue;
            }
            let Some(head) = rest.first_chunk::<HEADER>() else { return Ok(()) };
            let header = Header::decode(head).map_err(|error| format!("it sent what is no frame: {error}"))?;
            let len = header.len as usize;
            if header.frame == Frame::Data {
                *start += HEADER;
                match len {
                    // A message of no bytes is complete with that.
                    0 => self.data(endpoint, header.cookie, &[]),
                    _ => *data = Some((header.cookie, len)),
                }
                continue;
            }
            if len > BUFFER - HEADER {
                return Err(format!("it sent a frame of {len} bytes, more than the {} allowed", BUFFER - HEADER));
            }
            let Some(payload) = rest.get(HEADER..HEADER + len) else { return Ok(()) };
            self.handle(endpoint, &header, payload, &[]);
            *start += HEADER + len;
            if let Some(why) = &self.endpoints[endpoint as usize].dead {
                // Over that very frame: what follows it is no longer wanted.
                return Err(why.clone());
            }
        }
    }
}
