//! A group, as the hub sees it: members, what they called, and what they sent before they were asked.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use podring_collective::{Blocks, Collective, DType, Kind, Part, Reduction};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::endpoint::{OpKey, RecvKey};
use crate::error::{Failure, LedgerRow};
use crate::memory::Buffer;
use crate::schedule::Schedule;

/// Calls remembered per channel, for late checks and for error tables.
const RECORDS: usize = 64;
/// Tensors of a coalesced call whose counts a record shows.
const SHOWN: usize = 8;

/// A call, small enough to write down every time; its text is made only when somebody asks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub seq: u64,
    pub fingerprint: u64,
    kind: Kind,
    dtype: Option<DType>,
    reduction: Option<Reduction>,
    parts: u32,
    /// Of the first part.
    blocks: u32,
    first: usize,
    total: usize,
    /// Elements and dtypes of the first parts of a coalesced call.
    counts: [usize; SHOWN],
    dtypes: [Option<DType>; SHOWN],
    pub done: bool,
}

/// The blocks that tell most of a call.
fn side(part: &Part) -> &Blocks {
    if part.inputs.counts.len() > 1 || part.outputs.counts.is_empty() { &part.inputs } else { &part.outputs }
}

impl Record {
    pub fn new(seq: u64, fingerprint: u64, collective: &Collective) -> Self {
        let part = collective.parts.first();
        let side_of_first = part.map(side);
        let (mut counts, mut dtypes) = ([0; SHOWN], [None; SHOWN]);
        if collective.parts.len() > 1 {
            for (index, part) in collective.parts.iter().take(SHOWN).enumerate() {
                counts[index] = side(part).total();
                dtypes[index] = Some(part.dtype);
            }
        }
        Record {
            seq,
            fingerprint,
            kind: collective.kind,
            dtype: part.map(|part| part.dtype),
            reduction: part.and_then(|part| part.reduction),
            parts: collective.parts.len() as u32,
            blocks: side_of_first.map_or(0, |side| side.counts.len() as u32),
            first: side_of_first.and_then(|side| side.counts.first().copied()).unwrap_or(0),
            total: side_of_first.map_or(0, Blocks::total),
            counts,
            dtypes,
            done: false,
        }
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}(", self.kind.name())?;
        let mut fields: SmallVec<[String; 6]> = SmallVec::new();
        if let Some(root) = self.kind.root() {
            fields.push(format!("root={root}"));
        }
        match self.kind {
            Kind::Send { to, tag } => fields.push(format!("to={to}, tag={tag}")),
            Kind::Recv { from: Some(from), tag } => fields.push(format!("from={from}, tag={tag}")),
            Kind::Recv { from: None, tag } => fields.push(format!("from=any, tag={tag}")),
            _ => {}
        }
        if let Some(reduction) = self.reduction {
            fields.push(reduction.to_string());
        }
        if self.parts > 1 {
            let shown = SHOWN.min(self.parts as usize);
            let list = |words: &mut dyn Iterator<Item = String>| {
                let more = if self.parts as usize > shown { ",…" } else { "" };
                format!("{}{more}", words.collect::<Vec<_>>().join(","))
            };
            let (dtypes, counts) = (&self.dtypes[..shown], &self.counts[..shown]);
            let named = |dtype: &Option<DType>| dtype.map(|dtype| dtype.to_string()).unwrap_or_default();
            if dtypes.iter().all(|&dtype| dtype == self.dtype) {
                fields.push(named(&self.dtype));
            } else {
                fields.push(list(&mut dtypes.iter().map(named)));
            }
            fields.push(format!("counts={}", list(&mut counts.iter().map(usize::to_string))));
            fields.push(format!("{} tensors", self.parts));
        } else if let Some(dtype) = self.dtype {
            fields.push(dtype.to_string());
            fields.push(match self.blocks {
                0 | 1 => format!("count={}", self.first),
                blocks if self.first.checked_mul(blocks as usize) == Some(self.total) => {
                    format!("count={blocks}x{}", self.first)
                }
                blocks => format!("count={} in {blocks} blocks", self.total),
            });
        }
        write!(f, "{})", fields.join(", "))
    }
}

/// A plan and what it was made for.
pub(crate) struct Planned {
    pub kind: Kind,
    pub element: usize,
    pub accumulator: usize,
    pub inputs: SmallVec<[usize; 8]>,
    pub outputs: SmallVec<[usize; 8]>,
    pub schedule: Schedule,
    /// The first rounds send nothing to the next rank, so it must be told what this one calls.
    pub announce: bool,
}

/// A receive that waits for a point-to-point message.
pub(crate) struct Posted {
    pub from: Option<u32>,
    pub tag: u64,
    pub recv: RecvKey,
}

/// What came before it was asked for.
pub(crate) enum Body {
    /// A whole message, and what it counts of its sender's credit.
    Bytes { buffer: Option<Buffer>, len: usize, cost: usize },
    /// The offer of one.
    Ready { addr: u64, cookie: u64 },
}

/// A message that came before it was asked for.
pub(crate) struct Early {
    pub fingerprint: u64,
    pub total: u64,
    pub body: Body,
}

/// The same, point to point.
pub(crate) struct EarlyDirect {
    pub from: u32,
    pub tag: u64,
    pub early: Early,
}

/// What an inquest knows of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It called this, or is gone: nothing will change it.
    Called(String),
    Gone(String),
    /// It had called nothing with the number in question when it was asked. It says so again when it does call.
    NotYet(String),
}

/// A failed channel gathers what each rank had called before it tells its operations.
pub(crate) struct Inquest {
    pub failure: Failure,
    pub seq: u64,
    pub rows: Vec<Option<Answer>>,
    pub until: Instant,
}

impl Answer {
    /// How a table shows it.
    pub fn text(self) -> String {
        match self {
            Answer::Called(text) | Answer::Gone(text) | Answer::NotYet(text) => text,
        }
    }
}

impl Inquest {
    /// Nothing more is worth waiting for. Of ranks that differ, one that comes a moment later may be one more side, so
    /// it is waited for; where a deadline passed, whoever hasn't called by then is late, and where fewer than two have
    /// called, the difference isn't in collectives.
    fn settled(&self) -> bool {
        let callers = self.rows.iter().filter(|row| matches!(row, Some(Answer::Called(_)))).count();
        let patient = matches!(self.failure, Failure::Mismatch { .. }) && callers >= 2;
        self.rows.iter().all(|row| match row {
            None => false,
            Some(Answer::NotYet(_)) => !patient,
            Some(Answer::Called(_) | Answer::Gone(_)) => true,
        })
    }
}

pub(crate) struct Channel {
    pub name: String,
    pub me: u32,
    /// Endpoint of each rank; `u32::MAX` for this one.
    pub members: Vec<u32>,
    pub rank_of: FxHashMap<u32, u32>,
    pub hosts: Vec<u32>,
    /// Ranks that closed the channel.
    pub left: Vec<bool>,
    /// Ranks that said that the group failed: their leaving follows from that.
    pub knows: Vec<bool>,
    pub failed: Option<Arc<Failure>>,
    pub inquest: Option<Inquest>,
    /// One more than the highest collective sequence number started.
    pub started: u64,
    pub records: VecDeque<Record>,
    pub active: SmallVec<[(u64, OpKey); 8]>,
    pub posted: Vec<Posted>,
    pub early: VecDeque<EarlyDirect>,
    /// Fingerprints seen for collectives not started here yet.
    pub heard: FxHashMap<u64, SmallVec<[(u32, u64); 4]>>,
    pub plans: FxHashMap<u64, Arc<Planned>>,
    /// Operations with this channel under way, point-to-point ones included.
    pub pending: usize,
}

/// The ledger row of a rank that didn't answer in time.
const SILENT: &str = "no answer";
/// How that of a rank begins that hadn't called anything with the number when it was asked.
const NOTHING_YET: &str = "nothing yet";

impl Channel {
    /// A channel whose members are yet to be named.
    pub fn new(name: String, me: u32, size: usize) -> Self {
        Channel {
            name,
            me,
            members: Vec::with_capacity(size),
            rank_of: FxHashMap::default(),
            hosts: Vec::with_capacity(size),
            left: vec![false; size],
            knows: vec![false; size],
            failed: None,
            inquest: None,
            started: 0,
            records: VecDeque::new(),
            active: SmallVec::new(),
            posted: Vec::new(),
            early: VecDeque::new(),
            heard: FxHashMap::default(),
            plans: FxHashMap::default(),
            pending: 0,
        }
    }

    pub fn size(&self) -> u32 {
        self.members.len() as u32
    }

    pub fn record(&mut self, record: Record) {
        if self.records.len() == RECORDS {
            self.records.pop_front();
        }
        self.records.push_back(record);
    }

    pub fn mark_done(&mut self, seq: u64) {
        if let Some(record) =
            self.records.iter_mut().rev().find(|record| record.seq == seq && !record.kind.is_point_to_point())
        {
            record.done = true;
        }
    }

    /// The fingerprint of a collective started here, if it is still remembered.
    pub fn fingerprint(&self, seq: u64) -> Option<u64> {
        self.records
            .iter()
            .rev()
            .find(|record| record.seq == seq && !record.kind.is_point_to_point())
            .map(|record| record.fingerprint)
    }

    /// This rank's row for `seq`.
    pub fn called(&self, seq: u64) -> Answer {
        called(&self.records, seq)
    }

    /// A failure whose table another rank has gathered, with what this one knows of those who didn't answer there.
    pub fn complete(&self, mut failure: Failure) -> Failure {
        let Some((seq, ledger)) = failure.ledger_mut() else { return failure };
        for row in ledger.iter_mut().filter(|row| row.called == SILENT) {
            let known = if row.rank == self.me {
                Some(self.called(seq))
            } else {
                let inquest = self.inquest.as_ref().filter(|inquest| inquest.seq == seq);
                inquest.and_then(|inquest| inquest.rows.get(row.rank as usize).cloned().flatten())
            };
            if let Some(known) = known {
                row.called = known.text();
            }
        }
        failure
    }

    /// A failure as a call that comes after it is told of it: if ranks differed in that very call, its row is known now.
    /// (Where a deadline passed, that it hadn't come by then is what the table is there to show.)
    pub fn with_call(&self, failure: &Arc<Failure>, record: &Record) -> Arc<Failure> {
        let open = |row: &LedgerRow| row.called == SILENT || row.called.starts_with(NOTHING_YET);
        let mut told = (**failure).clone();
        if matches!(told, Failure::Mismatch { .. })
            && !record.kind.is_point_to_point()
            && let Some((seq, ledger)) = told.ledger_mut()
            && seq == record.seq
            && let Some(row) = ledger.iter_mut().find(|row| row.rank == self.me && open(row))
        {
            row.called = record.to_string();
            return Arc::new(told);
        }
        failure.clone()
    }

    /// The failure with its table, once every member has answered or time is up.
    pub fn verdict(&mut self, now: Instant) -> Option<Failure> {
        let inquest = self.inquest.as_ref()?;
        if now < inquest.until && !inquest.settled() {
            return None;
        }
        let Inquest { mut failure, rows, .. } = self.inquest.take()?;
        if let Some((_, ledger)) = failure.ledger_mut() {
            *ledger = rows
                .into_iter()
                .enumerate()
                .map(|(rank, row)| LedgerRow {
                    rank: rank as u32,
                    called: row.map_or_else(|| SILENT.into(), Answer::text),
                })
                .collect();
        }
        Some(failure)
    }
}

/// The row for `seq` of a rank that called `records`.
fn called(records: &VecDeque<Record>, seq: u64) -> Answer {
    let collectives = || records.iter().rev().filter(|record| !record.kind.is_point_to_point());
    if let Some(record) = collectives().find(|record| record.seq == seq) {
        return Answer::Called(format!("{record}{}", if record.done { ", finished" } else { "" }));
    }
    Answer::NotYet(match collectives().next() {
        Some(last) => format!(
            "{NOTHING_YET}; its last call was seq {}: {last}{}",
            last.seq,
            if last.done { ", finished" } else { ", not finished" }
        ),
        None => NOTHING_YET.into(),
    })
}

/// A channel that failed and was closed: what its other members may still ask for.
pub(crate) struct Past {
    pub id: u64,
    pub failure: Arc<Failure>,
    records: VecDeque<Record>,
}

impl Past {
    pub fn new(id: u64, failure: Arc<Failure>, channel: Channel) -> Self {
        Past { id, failure, records: channel.records }
    }

    /// The row for `seq`.
    pub fn called(&self, seq: u64) -> Answer {
        called(&self.records, seq)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use podring_collective::{Layout, Tensor};

    #[test]
    fn records_print_what_was_called() {
        let barrier = Collective { kind: Kind::Barrier, parts: SmallVec::new() };
        assert_eq!(Record::new(3, 0, &barrier).to_string(), "barrier()");
        let send = Collective { kind: Kind::Send { to: 2, tag: 7 }, parts: SmallVec::new() };
        assert_eq!(Record::new(3, 0, &send).to_string(), "send(to=2, tag=7)");
        let coalesced = |parts: &[(DType, usize)]| {
            let part = |&(dtype, count): &(DType, usize)| {
                let tensor = Tensor { data: std::ptr::null_mut(), layout: Layout::flat(count) };
                let (inputs, outputs) = (Blocks::whole(tensor.clone()), Blocks::whole(tensor));
                Part { dtype, reduction: Some(Reduction::Sum), inputs, outputs }
            };
            let call = Collective { kind: Kind::AllReduce, parts: parts.iter().map(part).collect() };
            Record::new(3, 0, &call).to_string()
        };
        let one = coalesced(&[(DType::F32, 4)]);
        assert_eq!(one, "all_reduce(SUM, float32, count=4)");
        let two = coalesced(&[(DType::F32, 4), (DType::F32, 6)]);
        assert_eq!(two, "all_reduce(SUM, float32, counts=4,6, 2 tensors)");
        let mixed = coalesced(&[(DType::F32, 4), (DType::I32, 4)]);
        assert_eq!(mixed, "all_reduce(SUM, float32,int32, counts=4,4, 2 tensors)");
        let many = coalesced(&[(DType::F32, 1); 9]);
        assert_eq!(many, "all_reduce(SUM, float32, counts=1,1,1,1,1,1,1,1,…, 9 tensors)");
    }
}
