//! Writing a lane, and cutting buffers into shards and slices.

use super::{Lane, Region, Round, Schedule, Space, Step};

/// A lane being written, from one rank's view. Rounds are numbered alike on all ranks, and the number is the message's
/// tag; a round in which this rank has nothing to do costs nothing, for [`Draft::finish`] drops it.
#[derive(Default)]
pub(super) struct Draft {
    lane: Lane,
}

impl Draft {
    /// Fresh temporary memory in Scratch or Partial.
    pub fn temporary(&mut self, space: Space, len: usize) -> Region {
        let used = if space == Space::Partial { &mut self.lane.partial } else { &mut self.lane.scratch };
        let offset = *used;
        *used += len;
        Region { space, block: 0, offset, len }
    }

    fn push(&mut self, round: usize, step: Step) {
        if self.lane.rounds.len() <= round {
            self.lane.rounds.resize_with(round + 1, Round::default);
        }
        self.lane.rounds[round].steps.push(step);
    }

    /// A message whose length only its two ranks know: sent even if empty, so that a disagreement is noticed.
    pub fn send_always(&mut self, round: usize, to: u32, from: Region) {
        self.push(round, Step::Send { to, tag: round as u32, from });
    }

    /// The other end of [`Draft::send_always`].
    pub fn recv_always(&mut self, round: usize, from: u32, into: Region) {
        self.push(round, Step::Recv { from, tag: round as u32, into });
    }

    /// A message whose length every rank knows: left out if empty.
    pub fn send(&mut self, round: usize, to: u32, from: Region) {
        if from.len > 0 {
            self.send_always(round, to, from);
        }
    }

    /// The other end of [`Draft::send`].
    pub fn recv(&mut self, round: usize, from: u32, into: Region) {
        if into.len > 0 {
            self.recv_always(round, from, into);
        }
    }

    pub fn copy(&mut self, round: usize, from: Region, into: Region) {
        if into.len > 0 {
            self.push(round, Step::Copy { from, into });
        }
    }

    pub fn reduce(&mut self, round: usize, sources: impl Into<Vec<Region>>, into: Region) {
        if into.len > 0 {
            self.push(round, Step::Reduce { sources: sources.into(), into });
        }
    }

    /// Every member of `group` sends each other member what `send` says of that member's place, and receives as many
    /// elements as `own` has, of the kind `space`. Returns the contributions in the group's order, `own` among them.
    pub fn exchange(
        &mut self,
        round: usize,
        group: &[u32],
        place: usize,
        send: impl Fn(usize) -> Region,
        own: Region,
        space: Space,
    ) -> Vec<Region> {
        let sources: Vec<Region> =
            (0..group.len()).map(|other| if other == place { own } else { self.temporary(space, own.len) }).collect();
        for other in after(place, group.len()) {
            self.send(round, group[other], send(other));
        }
        for other in before(place, group.len()) {
            self.recv(round, group[other], sources[other]);
        }
        sources
    }

    /// Every member of `group` sends each other member the region that `at` says of its own place, and receives the
    /// others'.
    pub fn share(&mut self, round: usize, group: &[u32], place: usize, own: Region, at: impl Fn(usize) -> Region) {
        for other in after(place, group.len()) {
            self.send(round, group[other], own);
        }
        for other in before(place, group.len()) {
            self.recv(round, group[other], at(other));
        }
    }

    pub fn finish(mut self) -> Lane {
        self.lane.rounds.retain(|round| !round.steps.is_empty());
        self.lane
    }
}

/// Places after `place`, round the group: where to send first, so that not everybody sends to the same one.
pub(super) fn after(place: usize, len: usize) -> impl Iterator<Item = usize> {
    (1..len).map(move |step| (place + step) % len)
}

/// Places before `place`, round the group: whose messages come first when all send in [`after`]'s order.
pub(super) fn before(place: usize, len: usize) -> impl Iterator<Item = usize> {
    (1..len).map(move |step| (place + len - step) % len)
}

/// Cuts a region into `parts` of nearly equal size, on multiples of `granule` elements.
#[derive(Clone, Copy)]
pub(super) struct Shards {
    whole: Region,
    parts: usize,
    granule: usize,
}

impl Shards {
    pub fn new(whole: Region, parts: usize, granule: usize) -> Self {
        Shards { whole, parts, granule }
    }

    fn start(&self, part: usize) -> usize {
        let units = self.whole.len.div_ceil(self.granule);
        let (each, rest) = (units / self.parts, units % self.parts);
        ((each * part + rest.min(part)) * self.granule).min(self.whole.len)
    }

    /// Part `part`; empty from `parts` on.
    pub fn get(&self, part: usize) -> Region {
        self.range(part, part + 1)
    }

    /// Parts `from..to` together.
    pub fn range(&self, from: usize, to: usize) -> Region {
        let (start, end) = (self.start(from.min(self.parts)), self.start(to.min(self.parts)));
        self.whole.part(start, end - start)
    }
}

/// Cuts several regions into equally long slices, one lane each; short regions run out of slices first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slices {
    /// Elements per slice.
    pub step: usize,
    /// Slices of the longest region.
    pub lanes: usize,
}

impl Slices {
    /// Slices of at most about `chunk` elements for regions of at most `longest`, on multiples of `granule` elements.
    pub fn new(longest: usize, chunk: usize, granule: usize) -> Self {
        let wanted = longest.div_ceil(chunk.max(1)).max(1);
        let step = longest.div_ceil(wanted).max(1).next_multiple_of(granule);
        Slices { step, lanes: longest.div_ceil(step) }
    }

    /// A region's slice for a lane; may be empty.
    pub fn of(&self, lane: usize, region: Region) -> Region {
        let start = (lane * self.step).min(region.len);
        region.part(start, self.step.min(region.len - start))
    }

    /// A schedule of one lane per slice.
    pub fn schedule(&self, mut write: impl FnMut(usize, &mut Draft)) -> Schedule {
        let lanes = (0..self.lanes).map(|lane| {
            let mut draft = Draft::default();
            write(lane, &mut draft);
            draft.finish()
        });
        Schedule { lanes: lanes.collect() }
    }
}

/// A schedule of one lane.
pub(super) fn single(write: impl FnOnce(&mut Draft)) -> Schedule {
    let mut draft = Draft::default();
    write(&mut draft);
    Schedule { lanes: vec![draft.finish()] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_and_slices_tile_what_they_cut() {
        for len in [0usize, 1, 5, 16, 17, 100, 1023] {
            for granule in [1usize, 4, 16] {
                for parts in 1..9usize {
                    let whole = Region::whole(Space::Input, 0, len);
                    let shards = Shards::new(whole, parts, granule);
                    let slices = Slices::new(shards.get(0).len, 7, granule);
                    let mut seen = vec![0; len];
                    for part in 0..parts {
                        assert!(shards.get(part).len <= shards.get(0).len);
                        for lane in 0..slices.lanes {
                            let slice = slices.of(lane, shards.get(part));
                            assert!(slice.len <= 7usize.next_multiple_of(granule));
                            assert!(slice.len == 0 || slice.offset.is_multiple_of(granule));
                            seen[slice.offset..slice.offset + slice.len].iter_mut().for_each(|seen| *seen += 1);
                        }
                    }
                    assert!(seen.iter().all(|&seen| seen == 1), "{len} {granule} {parts}");
                }
            }
        }
    }
}
