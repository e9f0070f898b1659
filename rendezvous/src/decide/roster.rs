//! Membership epochs: who is in one, who is late, who is lost.
//!
//! An epoch forms when every rank of the announced world size is there; its number is above every one heard of. It
//! stays as it formed: a lost member breaks it, and its members announce themselves for the next.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::blame::blamed;
use super::{bounded, invalid};
use crate::refusal::{Late, Lost, RankAt, Refusal};

/// How many refusals a late epoch tells of.
const REFUSED: usize = 16;

/// An agent's nonce.
pub type AgentId = u128;

/// What the roster takes at most.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Ranks.
    pub world_size: usize,
    /// Bytes of what a rank tells the others of itself.
    pub detail_bytes: usize,
    /// Bytes of a host's name.
    pub host_bytes: usize,
    /// Groups of one epoch that report a failure.
    pub reports: usize,
    /// Bytes of a report's detail, its names and its table.
    pub report_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { world_size: 65_536, detail_bytes: 4096, host_bytes: 255, reports: 16_384, report_bytes: 1 << 20 }
    }
}

/// What an agent says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// Its nonce.
    pub agent: AgentId,
    /// Its host.
    pub host: String,
    /// Ranks in the world.
    pub world_size: u32,
    /// Its ranks, ascending.
    pub ranks: Vec<u32>,
    /// What the others need to know of each; opaque here.
    pub details: Vec<Vec<u8>>,
    /// The last epoch it was in; 0 if none.
    pub last_epoch: u64,
    /// How long it waits for the others.
    pub timeout: Duration,
    /// The hosts of all ranks in order, where known: an equal number of ranks each.
    pub hosts: Vec<String>,
    /// What is known besides.
    pub about: About,
}

/// What helps to name who is missing or lost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    /// The rank in whose process the agent runs.
    pub speaker: Option<u32>,
    /// Ranks that the launcher started on this host.
    pub expected: Vec<u32>,
    /// Ranks of this host that the agent refused, and why.
    pub refused: Vec<String>,
}

/// Ranks of one agent in a formed epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// The host's name.
    pub name: String,
    /// The ranks, ascending.
    pub ranks: Vec<u32>,
    /// One for each: what it told of itself.
    pub details: Vec<Vec<u8>>,
}

/// A formed epoch. The same for all its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// Its number.
    pub epoch: u64,
    /// Ranks in it.
    pub world_size: u32,
    /// Its agents, by their lowest rank.
    pub hosts: Vec<Host>,
}

impl World {
    /// The host of a rank.
    pub fn host_of(&self, rank: u32) -> Option<&str> {
        self.hosts.iter().find(|host| host.ranks.binary_search(&rank).is_ok()).map(|host| host.name.as_str())
    }
}

/// What each rank had for one field of one collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The collective's sequence number in its group.
    pub sequence: u64,
    /// The field, e.g. `dtype`.
    pub field: String,
    /// Each rank's value.
    pub held: Vec<(u32, String)>,
    /// The ranks that differ from the majority; the coordinator fills it in.
    pub blamed: Vec<u32>,
}

/// A failure that a member reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The epoch.
    pub epoch: u64,
    /// The group; empty is the whole world.
    pub group: String,
    /// The rank that reports.
    pub by: u32,
    /// Its description; opaque here.
    pub detail: Vec<u8>,
    /// The table, if ranks called different things.
    pub mismatch: Option<Mismatch>,
}

/// What an agent is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The epoch it announced itself for has formed.
    Formed(Arc<World>),
    /// It hasn't, and won't.
    Late(Arc<Late>),
    /// Its epoch lost members.
    Lost(Arc<Lost>),
    /// A member of its epoch reported a failure.
    Failed(Arc<Failure>),
    /// The coordinator ends in order: no loss.
    Closing,
}

/// Events with their receivers.
pub type Outbox = Vec<(AgentId, Event)>;

#[derive(Debug)]
struct Agent {
    host: String,
    ranks: Vec<u32>,
    details: Vec<Vec<u8>>,
    heard: Duration,
    /// The epoch it is in; 0 before one.
    epoch: u64,
    speaker: Option<u32>,
    /// It lives in the coordinator's own process, and is never silent.
    resident: bool,
}

#[derive(Debug)]
struct Forming {
    world_size: u32,
    first_host: String,
    owners: BTreeMap<u32, AgentId>,
    began: Duration,
    deadline: Duration,
    last_epoch: u64,
    hosts: Vec<String>,
    refused: Vec<String>,
}

#[derive(Debug)]
struct Formed {
    world: Arc<World>,
    owners: BTreeMap<u32, AgentId>,
    /// Ranks that are gone, with the words for it.
    gone: BTreeMap<u32, Arc<Lost>>,
    failures: FxHashMap<String, Arc<Failure>>,
}

/// An agent, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentStatus {
    /// Its host.
    pub host: String,
    /// Its ranks.
    pub ranks: Vec<u32>,
    /// Since it was heard; none for one in the coordinator's own process.
    pub silent: Duration,
    /// The epoch it is in; 0 before one.
    pub epoch: u64,
}

/// Who is there.
#[derive(Debug)]
pub struct Roster {
    limits: Limits,
    silence: Duration,
    epoch: u64,
    agents: FxHashMap<AgentId, Agent>,
    forming: Option<Forming>,
    formed: Option<Formed>,
    /// Where each rank was last seen.
    seen: FxHashMap<u32, String>,
    /// No deadline is before this one. Signs of life move deadlines back, and only a tick looks at all of them again.
    due: Option<Duration>,
}

impl Roster {
    /// Nobody there. `epoch` is the last one known; an agent is lost after `silence`.
    pub fn new(limits: Limits, silence: Duration, epoch: u64) -> Self {
        Roster {
            limits,
            silence,
            epoch,
            agents: FxHashMap::default(),
            forming: None,
            formed: None,
            seen: FxHashMap::default(),
            due: None,
        }
    }

    /// The last epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The epoch that is formed now.
    pub fn world(&self) -> Option<&Arc<World>> {
        self.formed.as_ref().map(|formed| &formed.world)
    }

    /// An agent announces its ranks for the next epoch. One that is in an epoch leaves it by this, unless it hasn't heard
    /// of that one: then it is told of it, and only the ranks that it no longer has are lost.
    pub fn announce(&mut self, now: Duration, announcement: Announcement) -> Result<Outbox, Refusal> {
        self.well_formed(&announcement)?;
        if let Some(outbox) = self.unheard(now, &announcement) {
            return Ok(outbox);
        }
        if let Err(refusal) = self.welcome(&announcement) {
            if let Some(forming) = &mut self.forming
                && forming.refused.len() < REFUSED
            {
                forming.refused.push(format!("{}: {refusal}", announcement.host));
            }
            return Err(refusal);
        }
        let Announcement { agent, host, world_size, ranks, details, last_epoch, timeout, hosts, about } = announcement;
        // An agent that adds to what it announced goes on waiting; alone, it may also change the world's size.
        let mine = |forming: &Forming| forming.owners.values().all(|owner| *owner == agent);
        let waiting = self.forming.take_if(|forming| mine(forming) && forming.world_size == world_size);
        // Its members can't go on without it; if the epoch is broken already, they know.
        let moved = self.unlist(agent, "it announced itself for the next epoch");
        let mut outbox = Vec::new();
        if let (Some(lost), Some(formed)) = (moved, &self.formed)
            && formed.failures.is_empty()
            && formed.gone.len() == lost.ranks.len()
        {
            outbox = self.tell(lost.epoch, agent, &Event::Lost(lost));
        }
        if let Some(mut waiting) = waiting {
            waiting.owners.clear();
            self.forming = Some(waiting);
        }
        let forming = self.forming.get_or_insert_with(|| Forming {
            world_size,
            first_host: host.clone(),
            owners: BTreeMap::new(),
            began: now,
            deadline: now + timeout,
            last_epoch: 0,
            hosts: Vec::new(),
            refused: Vec::new(),
        });
        forming.owners.extend(ranks.iter().map(|rank| (*rank, agent)));
        forming.deadline = forming.deadline.min(now + timeout);
        forming.last_epoch = forming.last_epoch.max(last_epoch);
        let due = forming.deadline.min(now + self.silence);
        self.due = Some(self.due.map_or(due, |known| known.min(due)));
        if !hosts.is_empty() {
            forming.hosts = hosts;
        }
        for refused in about.refused {
            if forming.refused.len() < REFUSED && !forming.refused.contains(&refused) {
                forming.refused.push(refused);
            }
        }
        for rank in about.expected {
            self.seen.entry(rank).or_insert_with(|| host.clone());
        }
        for rank in &ranks {
            self.seen.insert(*rank, host.clone());
        }
        let full = forming.owners.len() == world_size as usize;
        let resident = self.agents.get(&agent).is_some_and(|known| known.resident);
        let speaker = about.speaker;
        self.agents.insert(agent, Agent { host, ranks, details, heard: now, epoch: 0, speaker, resident });
        if full {
            outbox.extend(self.form());
        }
        Ok(outbox)
    }

    /// What an agent hears that is in an epoch and doesn't know, and what the others hear of it.
    fn unheard(&mut self, now: Duration, announcement: &Announcement) -> Option<Outbox> {
        let id = announcement.agent;
        let agent = self.agents.get_mut(&id).filter(|agent| agent.epoch > announcement.last_epoch)?;
        let epoch = agent.epoch;
        let world = self.formed.as_ref().map(|formed| &formed.world).filter(|world| world.epoch == epoch)?;
        let formed = Event::Formed(Arc::clone(world));
        agent.heard = now;
        let gone: Vec<u32> =
            agent.ranks.iter().copied().filter(|rank| announcement.ranks.binary_search(rank).is_err()).collect();
        let (_, mut outbox) = self.part(id, &gone, Some("its agent announced itself without it"));
        outbox.push((id, formed));
        let mut losses: Vec<&Arc<Lost>> = self.formed.iter().flat_map(|formed| formed.gone.values()).collect();
        losses.dedup_by(|one, other| Arc::ptr_eq(one, other));
        outbox.extend(losses.into_iter().map(|lost| (id, Event::Lost(Arc::clone(lost)))));
        Some(outbox)
    }

    /// An agent gives a sign of life.
    pub fn beat(&mut self, now: Duration, agent: AgentId) -> Result<(), Refusal> {
        self.agents.get_mut(&agent).ok_or(Refusal::UnknownSession)?.heard = now;
        Ok(())
    }

    /// An agent leaves of its own will. Nobody is told, but whoever needs it later is.
    pub fn leave(&mut self, agent: AgentId) -> Option<Arc<Lost>> {
        let lost = self.unlist(agent, "it left");
        self.agents.remove(&agent);
        lost
    }

    /// An agent is gone: every other member of its epoch is told. One whose own rank had left in order counts as
    /// having left: nothing is known against its other ranks.
    pub fn lost(&mut self, agent: AgentId, how: &str) -> (Option<Arc<Lost>>, Outbox) {
        let manned = self.manned(agent);
        let lost = self.unlist(agent, how);
        self.agents.remove(&agent);
        let outbox = match &lost {
            Some(lost) if manned => self.tell(lost.epoch, agent, &Event::Lost(Arc::clone(lost))),
            _ => Vec::new(),
        };
        (lost, outbox)
    }

    /// Whether an agent's own rank is still there: else its end is none that anybody is told of.
    pub fn manned(&self, agent: AgentId) -> bool {
        self.agents.get(&agent).is_none_or(|a| a.speaker.is_none_or(|own| a.ranks.contains(&own)))
    }

    /// Some of an agent's ranks are gone, as it says itself. `how` `None`: they left in order. Otherwise every other
    /// member of the epoch is told.
    pub fn part(&mut self, id: AgentId, ranks: &[u32], how: Option<&str>) -> (Option<Arc<Lost>>, Outbox) {
        let Some(agent) = self.agents.get_mut(&id) else { return (None, Vec::new()) };
        let gone: Vec<u32> = agent.ranks.iter().copied().filter(|rank| ranks.contains(rank)).collect();
        if gone.is_empty() {
            return (None, Vec::new());
        }
        // Once formed the details are the epoch's, and none is left here.
        if agent.details.len() == agent.ranks.len() {
            let mut kept = agent.ranks.iter().map(|rank| !gone.contains(rank));
            agent.details.retain(|_| kept.next().unwrap_or(false));
        }
        agent.ranks.retain(|rank| !gone.contains(rank));
        let (host, epoch) = (agent.host.clone(), agent.epoch);
        if let Some(forming) = &mut self.forming {
            forming.owners.retain(|rank, owner| *owner != id || !gone.contains(rank));
        }
        let Some(formed) = self.formed.as_mut().filter(|formed| formed.world.epoch == epoch) else {
            return (None, Vec::new());
        };
        formed.owners.retain(|rank, owner| *owner != id || !gone.contains(rank));
        let told = how.is_some();
        let how = how.unwrap_or("it left").to_owned();
        let lost = Arc::new(Lost { epoch, host, ranks: gone, how, speaker: None });
        formed.gone.extend(lost.ranks.iter().map(|rank| (*rank, Arc::clone(&lost))));
        let outbox = if told { self.tell(epoch, id, &Event::Lost(Arc::clone(&lost))) } else { Vec::new() };
        (Some(lost), outbox)
    }

    /// An agent lives in the coordinator's own process: it is never silent.
    pub fn resident(&mut self, agent: AgentId) {
        if let Some(agent) = self.agents.get_mut(&agent) {
            agent.resident = true;
        }
    }

    /// Ends what is overdue.
    pub fn tick(&mut self, now: Duration) -> (Vec<Arc<Lost>>, Outbox) {
        let (mut gone, mut outbox) = (Vec::new(), Vec::new());
        let silent = |agent: &Agent| !agent.resident && now.saturating_sub(agent.heard) >= self.silence;
        let silent: Vec<AgentId> = self.agents.iter().filter(|(_, a)| silent(a)).map(|(id, _)| *id).collect();
        for agent in silent {
            let (lost, events) = self.lost(agent, &format!("silent for {:?}", self.silence));
            gone.extend(lost);
            outbox.extend(events);
        }
        if self.forming.as_ref().is_some_and(|forming| forming.deadline <= now)
            && let Some(forming) = self.forming.take()
        {
            let missing = self.missing(&forming);
            let waited = now - forming.began;
            let late = Late { missing, waited, world_size: forming.world_size, refused: forming.refused };
            let event = Event::Late(Arc::new(late));
            let mut agents: Vec<AgentId> = forming.owners.into_values().collect();
            agents.sort_unstable();
            agents.dedup();
            outbox.extend(agents.into_iter().map(|agent| (agent, event.clone())));
        }
        let silent = self.agents.values().filter(|agent| !agent.resident).map(|agent| agent.heard + self.silence);
        self.due = silent.chain(self.forming.as_ref().map(|forming| forming.deadline)).min();
        (gone, outbox)
    }

    /// When [`Roster::tick`] is due next, at the earliest.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.due
    }

    /// Whether an agent may speak for these ranks in this epoch.
    pub fn standing(&self, agent: AgentId, epoch: u64, ranks: &[u32]) -> Result<&Arc<World>, Refusal> {
        let known = self.agents.get(&agent).ok_or(Refusal::UnknownSession)?;
        let Some(formed) = self.formed.as_ref().filter(|formed| formed.world.epoch == epoch) else {
            return Err(Refusal::Stale { yours: epoch, current: self.epoch });
        };
        if known.epoch != epoch {
            return Err(invalid("epoch", format!("{epoch}, which {} isn't in", known.host)));
        }
        match ranks.iter().find(|rank| known.ranks.binary_search(rank).is_err()) {
            Some(rank) => Err(invalid("rank", format!("{rank}, which {} doesn't have", known.host))),
            None => Ok(&formed.world),
        }
    }

    /// The loss of one of these ranks, if one is gone from the current epoch.
    pub fn gone(&self, ranks: &[u32]) -> Option<Arc<Lost>> {
        let gone = &self.formed.as_ref()?.gone;
        if gone.is_empty() {
            return None;
        }
        ranks.iter().find_map(|rank| gone.get(rank)).cloned()
    }

    /// A member reports a failure. The first report of a group stands and is returned; every member is told of it.
    pub fn report(&mut self, agent: AgentId, mut failure: Failure) -> Result<(Arc<Failure>, Outbox), Refusal> {
        self.standing(agent, failure.epoch, &[failure.by])?;
        let mismatch = failure.mismatch.as_ref();
        let table = mismatch.map_or(0, |m| m.field.len() + m.held.iter().map(|(_, v)| 8 + v.len()).sum::<usize>());
        bounded("bytes of a report", failure.detail.len() + failure.group.len() + table, self.limits.report_bytes)?;
        let Some(formed) = &mut self.formed else { return Err(Refusal::UnknownSession) };
        if let Some(first) = formed.failures.get(&failure.group) {
            return Ok((Arc::clone(first), Vec::new()));
        }
        bounded("groups that failed", formed.failures.len() + 1, self.limits.reports)?;
        if let Some(mismatch) = &mut failure.mismatch {
            mismatch.blamed = blamed(mismatch.held.iter().map(|(rank, value)| (*rank, value.as_str())));
        }
        let failure = Arc::new(failure);
        formed.failures.insert(failure.group.clone(), Arc::clone(&failure));
        let outbox = self.tell(failure.epoch, agent, &Event::Failed(Arc::clone(&failure)));
        Ok((failure, outbox))
    }

    /// The agents, by their lowest rank.
    pub fn agents(&self, now: Duration) -> Vec<AgentStatus> {
        let status = |agent: &Agent| AgentStatus {
            host: agent.host.clone(),
            ranks: agent.ranks.clone(),
            silent: if agent.resident { Duration::ZERO } else { now.saturating_sub(agent.heard) },
            epoch: agent.epoch,
        };
        let mut all: Vec<AgentStatus> = self.agents.values().map(status).collect();
        all.sort_by(|a, b| a.ranks.cmp(&b.ranks));
        all
    }

    /// The world size that forms or is formed, and the ranks the forming epoch lacks.
    pub fn lacking(&self) -> (u32, Vec<RankAt>) {
        match (&self.forming, &self.formed) {
            (Some(forming), _) => (forming.world_size, self.missing(forming)),
            (None, Some(formed)) => (formed.world.world_size, Vec::new()),
            (None, None) => (0, Vec::new()),
        }
    }

    fn well_formed(&self, announcement: &Announcement) -> Result<(), Refusal> {
        let Announcement { host, world_size, ranks, details, hosts, .. } = announcement;
        bounded("world size", *world_size as usize, self.limits.world_size)?;
        bounded("bytes of a host's name", host.len(), self.limits.host_bytes)?;
        if host.is_empty() {
            return Err(invalid("host", "no name"));
        }
        if ranks.is_empty() || ranks.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(invalid("ranks", format!("{ranks:?}: expected at least one, ascending")));
        }
        if let Some(rank) = ranks.last().filter(|rank| **rank >= *world_size) {
            return Err(invalid("rank", format!("{rank} with a world size of {world_size}")));
        }
        if details.len() != ranks.len() {
            return Err(invalid("details", format!("{} for {} ranks", details.len(), ranks.len())));
        }
        let longest = details.iter().map(Vec::len).max().unwrap_or(0);
        bounded("bytes of a rank's detail", longest, self.limits.detail_bytes)?;
        if !hosts.is_empty() && !(*world_size as usize).is_multiple_of(hosts.len()) {
            return Err(invalid("hosts", format!("{} for {world_size} ranks", hosts.len())));
        }
        let longest = hosts.iter().map(String::len).max().unwrap_or(0);
        bounded("bytes of a host's name", longest, self.limits.host_bytes)?;
        bounded("ranks expected", announcement.about.expected.len(), *world_size as usize)?;
        bounded("refusals", announcement.about.refused.len(), REFUSED)?;
        let longest = announcement.about.refused.iter().map(String::len).max().unwrap_or(0);
        bounded("bytes of a refusal", longest, 4 * self.limits.host_bytes)
    }

    fn welcome(&self, announcement: &Announcement) -> Result<(), Refusal> {
        let Announcement { agent, host, world_size, ranks, .. } = announcement;
        if let Some(forming) = &self.forming
            && forming.world_size != *world_size
            && forming.owners.values().any(|owner| owner != agent)
        {
            let host = forming.first_host.clone();
            return Err(Refusal::SizesDiffer { yours: *world_size, theirs: forming.world_size, host });
        }
        let forming = self.forming.as_ref().map(|forming| &forming.owners);
        let formed = self.formed.as_ref().map(|formed| &formed.owners);
        for rank in ranks {
            for owners in [forming, formed].into_iter().flatten() {
                let holder = owners.get(rank).filter(|owner| *owner != agent);
                if let Some(holder) = holder.and_then(|owner| self.agents.get(owner)) {
                    let (rank, holder, second) = (*rank, holder.host.clone(), host.clone());
                    return Err(Refusal::Twin { rank, holder, second });
                }
            }
        }
        Ok(())
    }

    fn form(&mut self) -> Outbox {
        let Some(forming) = self.forming.take() else { return Vec::new() };
        self.epoch = self.epoch.max(forming.last_epoch) + 1;
        let mut hosts = Vec::new();
        let mut members = Vec::new();
        for (rank, owner) in &forming.owners {
            let Some(agent) = self.agents.get_mut(owner) else { continue };
            if agent.ranks.first() == Some(rank) {
                agent.epoch = self.epoch;
                members.push(*owner);
                let details = std::mem::take(&mut agent.details);
                hosts.push(Host { name: agent.host.clone(), ranks: agent.ranks.clone(), details });
            }
        }
        let world = Arc::new(World { epoch: self.epoch, world_size: forming.world_size, hosts });
        let event = Event::Formed(Arc::clone(&world));
        self.formed =
            Some(Formed { world, owners: forming.owners, gone: BTreeMap::new(), failures: FxHashMap::default() });
        members.into_iter().map(|agent| (agent, event.clone())).collect()
    }

    /// Takes an agent's ranks off the lists. The loss, if the current epoch had it.
    fn unlist(&mut self, id: AgentId, how: &str) -> Option<Arc<Lost>> {
        if let Some(forming) = &mut self.forming {
            forming.owners.retain(|_, owner| *owner != id);
            if forming.owners.is_empty() {
                self.forming = None;
            }
        }
        let agent = self.agents.get_mut(&id)?;
        let epoch = std::mem::take(&mut agent.epoch);
        let formed = self.formed.as_mut().filter(|formed| formed.world.epoch == epoch)?;
        formed.owners.retain(|_, owner| *owner != id);
        let (host, ranks) = (agent.host.clone(), agent.ranks.clone());
        let lost = Arc::new(Lost { epoch, host, ranks, how: how.to_owned(), speaker: agent.speaker });
        formed.gone.extend(lost.ranks.iter().map(|rank| (*rank, Arc::clone(&lost))));
        Some(lost)
    }

    fn tell(&self, epoch: u64, but: AgentId, event: &Event) -> Outbox {
        let members = self.agents.iter().filter(|(id, agent)| agent.epoch == epoch && **id != but);
        members.map(|(id, _)| (*id, event.clone())).collect()
    }

    fn missing(&self, forming: &Forming) -> Vec<RankAt> {
        let per_host = forming.world_size as usize / forming.hosts.len().max(1);
        let listed = |rank: u32| forming.hosts.get(rank as usize / per_host.max(1));
        let absent = (0..forming.world_size).filter(|rank| !forming.owners.contains_key(rank));
        absent.map(|rank| RankAt { rank, host: listed(rank).or_else(|| self.seen.get(&rank)).cloned() }).collect()
    }
}

#[cfg(test)]
#[path = "roster_tests.rs"]
mod tests;
