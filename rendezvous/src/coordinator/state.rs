//! What the coordinator holds, under one lock, and how a decision reaches those who wait for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use podring_proto::{Agent, HelloReply, StatusReply};
use prost::Message as _;
use prost::bytes::Bytes;
use rustc_hash::FxHashMap;
use tokio::sync::{Notify, oneshot};

use super::journal::Journal;
use crate::board::Board;
use crate::decide::Answer;
use crate::decide::barrier::Barriers;
use crate::decide::keyvalue::{KeyValue, Outcome};
use crate::decide::roster::{AgentId, Announcement, Event, Outbox, Roster, World};
use crate::refusal::{Lost, Ranks, Refusal};
use crate::wire;

/// Events that wait for an agent that doesn't read. One more and the agent is lost.
pub(super) const EVENTS: usize = 1024;

/// The stream of one agent.
pub(super) struct Line {
    /// Tells this stream from another one of the same agent.
    pub(super) serial: u64,
    /// Takes an event; `false` if the agent doesn't read them.
    pub(super) send: Box<dyn Fn(Event) -> bool + Send>,
}

pub(super) struct State {
    pub(super) roster: Roster,
    pub(super) store: KeyValue,
    pub(super) barriers: Barriers,
    pub(super) lines: FxHashMap<AgentId, Line>,
    pub(super) next_line: u64,
    store_calls: FxHashMap<u64, (Option<String>, oneshot::Sender<Outcome>)>,
    barrier_calls: FxHashMap<u64, oneshot::Sender<Result<(), Refusal>>>,
    journal: Option<Journal>,
    journal_epoch: u64,
    /// Losses are warnings.
    aloud: bool,
    /// Made when the first client of this host comes; `None` in it: it can't be had.
    board: Option<Option<Arc<Board>>>,
    /// When the ticker looks next, if nobody calls it sooner.
    planned: Option<Duration>,
}

/// The state and its clock.
pub(crate) struct Shared {
    pub(super) instance: u64,
    pub(super) silence: Duration,
    pub(super) message_bytes: usize,
    began: Instant,
    state: Mutex<State>,
    /// The current world as a message: one for all hosts.
    formed: Mutex<(u64, Bytes)>,
    /// A deadline may be earlier than the ticker thinks.
    sooner: Notify,
}

impl Shared {
    pub(super) fn new(
        instance: u64,
        silence: Duration,
        message_bytes: usize,
        roster: Roster,
        mut store: KeyValue,
        journal: Option<Journal>,
        aloud: bool,
    ) -> Arc<Self> {
        if journal.is_some() {
            store.keep_journal();
        }
        let journal_epoch = roster.epoch();
        let state = State {
            roster,
            store,
            barriers: Barriers::default(),
            lines: FxHashMap::default(),
            next_line: 0,
            store_calls: FxHashMap::default(),
            barrier_calls: FxHashMap::default(),
            journal,
            journal_epoch,
            aloud,
            board: None,
            planned: None,
        };
        let (state, began) = (Mutex::new(state), Instant::now());
        let (formed, sooner) = (Mutex::new((0, Bytes::new())), Notify::new());
        Arc::new(Shared { instance, silence, message_bytes, began, state, formed, sooner })
    }

    pub(super) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Whether the caller knows this life of the store. 0 is a caller that doesn't care.
    pub(super) fn same(&self, yours: u64) -> Result<(), Refusal> {
        let current = self.instance;
        if yours != 0 && yours != current {
            return Err(Refusal::StoreLost { yours, current });
        }
        Ok(())
    }

    pub(super) fn hello(&self) -> HelloReply {
        let (epoch, limits) = {
            let state = self.state.lock();
            (state.roster.epoch(), state.store.limits())
        };
        HelloReply {
            instance: self.instance,
            epoch,
            silence_ms: wire::milliseconds(self.silence),
            message_bytes: self.message_bytes as u64,
            key_bytes: limits.key_bytes as u64,
            value_bytes: limits.value_bytes as u64,
            quiet_keys: u32::try_from(limits.keys_per_call).unwrap_or(u32::MAX),
        }
    }

    /// A world as a message.
    pub(super) fn formed(&self, world: &World) -> Bytes {
        let mut formed = self.formed.lock();
        if formed.0 != world.epoch {
            *formed = (world.epoch, wire::world(world).encode_to_vec().into());
        }
        formed.1.clone()
    }

    pub(super) fn status(&self) -> StatusReply {
        self.with(|state, now| {
            let (world_size, missing) = state.roster.lacking();
            let agents = state.roster.agents(now).into_iter();
            let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
            StatusReply {
                instance: self.instance,
                epoch: state.roster.epoch(),
                world_size,
                agents: agents
                    .map(|agent| Agent {
                        host: agent.host,
                        ranks: agent.ranks,
                        silent_ms: wire::milliseconds(agent.silent),
                        epoch: agent.epoch,
                    })
                    .collect(),
                keys: state.store.num_keys() as u64,
                store_bytes: state.store.bytes() as u64,
                waiting: count(state.store.waiting() + state.barriers.waiting()),
                missing: wire::ranks_at(&missing),
                program: concat!("podring ", env!("CARGO_PKG_VERSION")).to_owned(),
            }
        })
    }

    /// Does something with the state, then tells whom it concerns.
    pub(super) fn with<R>(&self, act: impl FnOnce(&mut State, Duration) -> R) -> R {
        let mut state = self.state.lock();
        state.take_in();
        let result = act(&mut state, self.now());
        state.settle();
        state.show();
        let due = state.next_deadline();
        // A wait that ends after the ticker's next look doesn't wake it: most end otherwise before that.
        let sooner = due.is_some_and(|due| state.planned.is_none_or(|planned| due < planned));
        if sooner {
            state.planned = due;
        }
        drop(state);
        if sooner {
            self.sooner.notify_one();
        }
        result
    }

    /// Where clients of this host see which keys exist, if that can be had, and whether it is new. For the one thread
    /// that serves them.
    pub(super) fn board(&self) -> (Option<Arc<Board>>, bool) {
        if let Some(board) = &self.state.lock().board {
            return (board.clone(), false);
        }
        // Not under the lock: that takes milliseconds.
        let board = Board::new()
            .inspect_err(|error| tracing::info!(%error, "no board of the keys: sets and waits take a message each"))
            .ok()
            .map(Arc::new);
        self.with(|state, _| {
            if let Some(board) = board.clone() {
                state.store.keep_presence(move |key| board.print(key));
            }
            state.board = Some(board.clone());
        });
        (board, true)
    }

    /// A client of this host, by its name in quiet calls, has no connection any more.
    pub(super) fn gone(&self, client: u64) {
        self.with(|state, _| {
            if let Some(Some(board)) = &state.board {
                board.free(client);
            }
        });
    }

    /// Lets go of the journal, so that another coordinator can take it.
    pub(super) fn close(&self) {
        self.with(|state, _| state.journal = None);
    }

    /// Keeps the deadlines until it is dropped.
    pub(super) async fn tick(self: Arc<Self>) {
        loop {
            let due = self.with(|state, now| {
                let (gone, outbox) = state.roster.tick(now);
                state.tell_of_late(&outbox);
                state.deliver(outbox);
                gone.iter().for_each(|lost| state.gone(lost, true));
                state.store.tick(now);
                let world = state.roster.world().cloned();
                state.barriers.tick(now, |rank| world.as_ref()?.host_of(rank).map(str::to_owned));
                state.planned = state.next_deadline();
                state.planned
            });
            match due {
                // A pause at least: many deadlines that lie close together are one piece of work.
                Some(due) => {
                    let pause = due.saturating_sub(self.now()).max(Duration::from_millis(2));
                    let _ = tokio::time::timeout(pause, self.sooner.notified()).await;
                }
                None => self.sooner.notified().await,
            }
        }
    }

    /// Waits for an answer of the store's. A caller who goes away takes his request with him. `pop` is the queue that
    /// the call takes from.
    pub(super) async fn store_answer(
        self: &Arc<Self>,
        pop: Option<String>,
        ask: impl FnOnce(&mut KeyValue, Duration) -> Result<Answer<Outcome>, Refusal>,
    ) -> Result<Outcome, Refusal> {
        let answer = self.with(|state, now| match ask(&mut state.store, now)? {
            Answer::Now(outcome) => Ok(Err(outcome)),
            Answer::Later(id) => {
                let (tx, rx) = oneshot::channel();
                state.store_calls.insert(id, (pop.clone(), tx));
                Ok(Ok(Waiting { shared: Arc::clone(self), id, pop, rx }))
            }
        })?;
        match answer {
            Err(outcome) => Ok(outcome),
            Ok(mut waiting) => (&mut waiting.rx).await.map_err(|_| Refusal::UnknownSession),
        }
    }

    /// The same for a barrier.
    pub(super) async fn barrier_answer(
        self: &Arc<Self>,
        ask: impl FnOnce(&mut State, Duration) -> Result<Answer<()>, Refusal>,
    ) -> Result<(), Refusal> {
        let waiting = self.with(|state, now| match ask(state, now)? {
            Answer::Now(()) => Ok(None),
            Answer::Later(id) => {
                let (tx, rx) = oneshot::channel();
                state.barrier_calls.insert(id, tx);
                let shared = Arc::clone(self);
                let cancel = Cancel(Some(move || {
                    shared.with(|state, _| {
                        state.barrier_calls.remove(&id);
                        state.barriers.cancel(id);
                    });
                }));
                Ok(Some((rx, cancel)))
            }
        })?;
        let Some((rx, mut cancel)) = waiting else { return Ok(()) };
        let outcome = rx.await.unwrap_or(Err(Refusal::UnknownSession));
        cancel.0 = None;
        outcome
    }
}

/// A call of the store's that waits.
struct Waiting {
    shared: Arc<Shared>,
    id: u64,
    pop: Option<String>,
    rx: oneshot::Receiver<Outcome>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.rx.close();
        let unread = self.rx.try_recv().ok();
        let (id, pop) = (self.id, self.pop.take());
        self.shared.with(|state, _| {
            if state.store_calls.remove(&id).is_some() {
                state.store.cancel(id);
            }
            state.give_back(pop.as_deref(), unread);
        });
    }
}

/// Does something when dropped, unless it is emptied before.
struct Cancel<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for Cancel<F> {
    fn drop(&mut self) {
        if let Some(act) = self.0.take() {
            act();
        }
    }
}

impl State {
    fn next_deadline(&self) -> Option<Duration> {
        let all = [self.roster.next_deadline(), self.store.next_deadline(), self.barriers.next_deadline()];
        all.into_iter().flatten().min()
    }

    /// Hands events to their agents' streams.
    pub(super) fn deliver(&mut self, outbox: Outbox) {
        let mut stuck = Vec::new();
        for (agent, event) in outbox {
            if let Some(line) = self.lines.get(&agent)
                && !(line.send)(event)
            {
                stuck.push(agent);
            }
        }
        for agent in stuck {
            self.lose(agent, "it doesn't read its events");
        }
    }

    /// Some of an agent's ranks are gone.
    pub(super) fn part(&mut self, agent: AgentId, ranks: &[u32], how: Option<&str>) {
        let (lost, outbox) = self.roster.part(agent, ranks, how);
        self.deliver(outbox);
        if let Some(lost) = lost {
            self.gone(&lost, how.is_some());
        }
    }

    /// An agent leaves of its own will.
    pub(super) fn leave(&mut self, agent: AgentId) {
        self.lines.remove(&agent);
        if let Some(lost) = self.roster.leave(agent) {
            self.gone(&lost, false);
        }
    }

    /// An agent announces its ranks. `line`: its stream, if it is a new one; given a number.
    pub(super) fn announce(
        &mut self,
        now: Duration,
        announcement: Announcement,
        line: Option<Box<dyn Fn(Event) -> bool + Send>>,
    ) -> Result<u64, Refusal> {
        let agent = announcement.agent;
        if line.is_none() && !self.lines.contains_key(&agent) {
            return Err(Refusal::UnknownSession);
        }
        let before = self.roster.epoch();
        let mut outbox = self.roster.announce(now, announcement)?;
        let follows = line.is_none();
        let serial = match line {
            Some(send) => {
                self.next_line += 1;
                self.lines.insert(agent, Line { serial: self.next_line, send });
                self.next_line
            }
            None => 0,
        };
        let gone = outbox.iter().find_map(|(_, event)| match event {
            Event::Lost(lost) => Some(Arc::clone(lost)),
            _ => None,
        });
        let current = self.roster.epoch();
        if follows && current == before {
            // Its stream has told it already.
            outbox.retain(|(to, _)| *to != agent);
        }
        self.deliver(outbox);
        if let Some(lost) = gone {
            self.gone(&lost, false);
        }
        if current != before {
            let ranks = self.roster.world().map_or(0, |world| world.world_size);
            tracing::info!(ranks, "epoch {current} has formed");
            self.barriers.superseded(current);
        }
        Ok(serial)
    }

    /// Tells every agent that this is the end, in order.
    pub(super) fn close(&mut self) {
        let agents: Vec<AgentId> = self.lines.keys().copied().collect();
        self.deliver(agents.into_iter().map(|agent| (agent, Event::Closing)).collect());
    }

    /// An agent is gone.
    pub(super) fn lose(&mut self, agent: AgentId, how: &str) {
        self.lines.remove(&agent);
        let manned = self.roster.manned(agent);
        let (lost, outbox) = self.roster.lost(agent, how);
        self.deliver(outbox);
        if let Some(lost) = lost {
            self.gone(&lost, manned);
        }
    }

    /// Ranks of the epoch are gone; `badly`: not in order.
    fn gone(&mut self, lost: &Lost, badly: bool) {
        let Lost { epoch, host, ranks, .. } = lost;
        if badly && self.aloud {
            tracing::warn!("{lost}");
        } else if badly {
            tracing::info!("{lost}");
        } else if !ranks.is_empty() {
            tracing::info!("{} on {host} left epoch {epoch}", Ranks(ranks));
        }
        self.barriers.lost(lost);
    }

    /// The coordinator's own word for an epoch that didn't form.
    fn tell_of_late(&self, outbox: &Outbox) {
        let late = outbox.iter().find_map(|(_, event)| match event {
            Event::Late(late) => Some(late),
            _ => None,
        });
        match late {
            Some(late) if self.aloud => tracing::warn!("no epoch has formed: {late}"),
            Some(late) => tracing::info!("no epoch has formed: {late}"),
            None => {}
        }
    }

    /// A value taken for a caller who is gone goes back where it was.
    fn give_back(&mut self, pop: Option<&str>, outcome: Option<Outcome>) {
        if let (Some(key), Some(Outcome::Values(values))) = (pop, outcome) {
            values.into_iter().for_each(|value| self.store.unpop(key, value));
        }
    }

    /// Takes in the sets that clients of this host have made, before anything else is done or answered.
    fn take_in(&mut self) {
        let Some(Some(board)) = &self.board else { return };
        if board.has_news() {
            let board = Arc::clone(board);
            let end = board.take_in(&mut self.store);
            self.settle();
            board.taken(end);
        }
    }

    /// Shows clients of this host whether they may make sets without a call. With a journal none may: who has seen a key
    /// is to find it after a restart.
    fn show(&mut self) {
        while let Some(Some(board)) = &self.board {
            let (keys, bytes) = Board::promises();
            let open = self.journal.is_none() && self.store.has_room_for(keys, bytes);
            let waiting = self.store.waiting();
            board.show(waiting, open);
            // A set made just before that was shown wakes nobody who has begun to wait.
            if waiting == 0 || !board.has_news() {
                return;
            }
            self.take_in();
        }
    }

    /// Answers the calls whose answer is there, writes the journal, and shows which keys exist.
    fn settle(&mut self) {
        // A value that goes back may wake somebody else.
        loop {
            let woken = self.store.woken();
            if woken.is_empty() {
                break;
            }
            for (id, outcome) in woken {
                let Some((pop, caller)) = self.store_calls.remove(&id) else { continue };
                self.give_back(pop.as_deref(), caller.send(outcome).err());
            }
        }
        for (id, outcome) in self.barriers.passed() {
            if let Some(caller) = self.barrier_calls.remove(&id) {
                let _ = caller.send(outcome);
            }
        }
        self.write_journal();
        // The last of all: who sees a key there finds it in the store, and a restart with the journal finds it too.
        if let Some(Some(board)) = &self.board {
            self.store.presence(|print, exists| board.turn(print, exists));
        }
    }

    fn write_journal(&mut self) {
        let epoch = self.roster.epoch();
        let Some(journal) = &mut self.journal else { return };
        let changes = self.store.changes();
        let formed = (epoch != self.journal_epoch).then_some(epoch);
        if changes.is_empty() && formed.is_none() {
            return;
        }
        self.journal_epoch = epoch;
        if let Err(error) = journal.write(changes, formed) {
            tracing::error!(%error, "the journal can't be written and is removed: a restart will lose the store");
            self.journal = None;
        }
    }
}
