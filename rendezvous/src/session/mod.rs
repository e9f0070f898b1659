//! The ranks' side: one session per host agent, with a blocking face.

mod connect;
mod error;
mod line;
mod live;
mod sockets;
mod store;
mod stream;

use std::sync::Arc;
use std::time::{Duration, Instant};

use podring_proto as pb;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::decide::roster::{About, AgentId, Announcement, Failure, World};
use crate::refusal::Lost;
use crate::{runtime, wire};
pub use connect::Access;
pub(crate) use connect::{Connection, bracketed, connect, split as split_endpoint, split_any};
pub use error::Error;
pub(crate) use live::Tell;
pub use live::Update;
use live::{Command, View};
pub use podring_proto::{Agent, RankAt, StatusReply};
use store::blocking;
pub use store::{Asks, Store};

/// The ranks an agent speaks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// This host's name.
    pub host: String,
    /// Ranks in the world.
    pub world_size: u32,
    /// The agent's own, ascending.
    pub ranks: Vec<u32>,
    /// One for each: what the others need to know of it; opaque here.
    pub details: Vec<Vec<u8>>,
    /// The hosts of all ranks in order, where known: an equal number of ranks each.
    pub hosts: Vec<String>,
}

/// An agent's place in the job. Leaves when dropped.
pub struct Session {
    agent: AgentId,
    ranks: Ranks,
    view: watch::Receiver<View>,
    commands: mpsc::UnboundedSender<Command>,
    task: JoinHandle<()>,
}

impl Session {
    /// Connects, announces the ranks, and waits until the epoch has formed. `timeout` bounds the forming;
    /// [`Access::timeout`] bounds the connecting.
    pub fn join(access: &Access, ranks: Ranks, timeout: Duration) -> Result<Session, Error> {
        let connection = blocking(connect(access))??;
        let session = Session::over(access, connection, fresh()?, ranks, About::default(), timeout, None)?;
        session.formed(0, timeout)?;
        Ok(session)
    }

    /// Announces the ranks over a connection, and waits for nothing: `tell` hears how it goes.
    pub(crate) fn over(
        access: &Access,
        connection: Connection,
        agent: AgentId,
        ranks: Ranks,
        about: About,
        timeout: Duration,
        tell: Option<Tell>,
    ) -> Result<Session, Error> {
        let (commands, inbox) = mpsc::unbounded_channel();
        let (publish, view) = watch::channel(View::new(connection.clone()));
        let announcement = Announcement { about, ..announcement(agent, &ranks, 0, timeout) };
        let handle = runtime::handle().map_err(|error| Error::System { what: "runtime", why: error.to_string() })?;
        let task = handle.spawn(live::live(access.clone(), connection, announcement, inbox, publish, tell));
        Ok(Session { agent, ranks, view, commands, task })
    }

    /// Announces other ranks before the caller has heard of any epoch, and waits for nothing.
    pub(crate) fn announce(&self, ranks: &Ranks, about: About, timeout: Duration) {
        let announcement = Announcement { about, ..announcement(self.agent, ranks, 0, timeout) };
        let _ = self.commands.send(Command::Announce(Box::new(announcement)));
    }

    /// Tells that some ranks are gone; `how` `None`: they left in order.
    pub(crate) fn part(&self, ranks: &[u32], how: Option<&str>) {
        let _ = self.commands.send(Command::Part(ranks.to_vec(), how.map(str::to_owned)));
    }

    /// As [`Session::report`], and waits for nothing.
    pub(crate) fn report_soon(&self, mut failure: Failure) {
        let Ok((connection, epoch)) = self.standing() else { return };
        failure.epoch = epoch;
        let session = self.agent.to_le_bytes().to_vec();
        let request = pb::ReportRequest { session, failure: Some(wire::failure(&failure)) };
        let act = |mut client: connect::Client| async move { client.report(request).await };
        if let Ok(handle) = runtime::handle() {
            handle.spawn(async move {
                if let Err(error) = connection.call("report", connection.silence, act).await {
                    tracing::debug!(%error, "failure not reported");
                }
            });
        }
    }

    /// How long the coordinator waits for who isn't heard.
    pub(crate) fn silence(&self) -> Duration {
        self.view.borrow().connection.silence
    }

    /// The epoch, as it formed.
    pub fn world(&self) -> Option<Arc<World>> {
        self.view.borrow().world.clone()
    }

    /// The members that the epoch has lost.
    pub fn losses(&self) -> Vec<Arc<Lost>> {
        self.view.borrow().losses.clone()
    }

    /// The failure that a member reported of a group, if one did. The whole world is the empty group.
    pub fn failure(&self, group: &str) -> Option<Arc<Failure>> {
        self.view.borrow().failures.iter().find(|failure| failure.group == group).cloned()
    }

    /// What ended the session, if something did.
    pub fn error(&self) -> Option<Error> {
        self.view.borrow().error.clone()
    }

    /// Waits until something has changed about the session since it was last looked at this way; whether it has.
    pub fn changed(&self, seen: &mut u64, limit: Duration) -> Result<bool, Error> {
        let mut view = self.view.clone();
        let waited = blocking(async {
            timeout(limit, view.wait_for(|view| view.changes != *seen)).await.is_ok_and(|found| found.is_ok())
        })?;
        let now = self.view.borrow().changes;
        Ok(waited && std::mem::replace(seen, now) != now)
    }

    /// Announces the same ranks for the next epoch, and waits until it has formed.
    pub fn rejoin(&self, timeout: Duration) -> Result<Arc<World>, Error> {
        self.rejoin_as(self.ranks.clone(), timeout)
    }

    /// Announces other ranks for the next epoch, and waits until it has formed.
    pub fn rejoin_as(&self, ranks: Ranks, timeout: Duration) -> Result<Arc<World>, Error> {
        let epoch = self.view.borrow().last_epoch;
        let announcement = announcement(self.agent, &ranks, epoch, timeout);
        if self.commands.send(Command::Announce(Box::new(announcement))).is_err() {
            return Err(self.ended());
        }
        self.formed(epoch, timeout)
    }

    /// Waits until `members` (empty: the whole world) have arrived at the barrier. `ranks` are those that arrive by
    /// this call (empty: all of this agent's).
    pub fn barrier(&self, name: &str, ranks: &[u32], members: &[u32], timeout: Duration) -> Result<(), Error> {
        let (connection, epoch) = self.standing()?;
        let ranks = if ranks.is_empty() { self.ranks.ranks.clone() } else { ranks.to_vec() };
        let request = pb::BarrierRequest {
            session: self.agent.to_le_bytes().to_vec(),
            epoch,
            name: name.to_owned(),
            ranks,
            members: members.to_vec(),
            timeout_ms: wire::milliseconds(timeout),
        };
        let limit = timeout + connection.silence;
        let act = |mut client: connect::Client| async move { client.barrier(request).await };
        blocking(connection.call("barrier", limit, act))?.map(drop)
    }

    /// Tells every member that a group failed. Returns the report that stands, which is the first.
    pub fn report(&self, failure: Failure) -> Result<Failure, Error> {
        let (connection, _) = self.standing()?;
        let session = self.agent.to_le_bytes().to_vec();
        let request = pb::ReportRequest { session, failure: Some(wire::failure(&failure)) };
        let act = |mut client: connect::Client| async move { client.report(request).await };
        let reply = blocking(connection.call("report", connection.silence, act))??;
        Ok(reply.first.map_or(failure, wire::from_failure))
    }

    /// The coordinator's store, of its present life.
    pub fn store(&self) -> Store {
        Store::over(self.view.borrow().connection.clone())
    }

    /// Leaves: no loss for the others, unless they need this agent's ranks.
    pub fn leave(mut self) {
        let _ = self.commands.send(Command::Leave);
        let _ = blocking(async { timeout(Duration::from_secs(1), &mut self.task).await });
    }

    fn standing(&self) -> Result<(Connection, u64), Error> {
        let view = self.view.borrow();
        match (&view.error, &view.world) {
            (Some(error), _) => Err(error.clone()),
            (None, world) => Ok((view.connection.clone(), world.as_ref().map_or(0, |world| world.epoch))),
        }
    }

    fn formed(&self, after: u64, limit: Duration) -> Result<Arc<World>, Error> {
        let began = Instant::now();
        let mut view = self.view.clone();
        let done = |view: &View| view.error.is_some() || view.world.as_ref().is_some_and(|world| world.epoch > after);
        // The coordinator keeps the deadline, so that all hear the same; this is for when it doesn't answer.
        let limit = limit + self.view.borrow().connection.silence;
        let found =
            blocking(async { timeout(limit, view.wait_for(done)).await.map(|found| found.map(|v| v.clone())) })?;
        match found {
            Ok(Ok(View { error: Some(error), .. })) => Err(error),
            Ok(Ok(View { world: Some(world), .. })) => Ok(world),
            Ok(_) => Err(self.ended()),
            Err(_) => {
                let endpoint = self.view.borrow().connection.endpoint.to_string();
                Err(Error::Timeout { call: "join", endpoint, waited: began.elapsed() })
            }
        }
    }

    fn ended(&self) -> Error {
        let view = self.view.borrow();
        let endpoint = view.connection.endpoint.to_string();
        view.error.clone().unwrap_or(Error::CoordinatorLost { endpoint, how: "the session has ended".to_owned() })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The task ends by itself; a coordinator that doesn't answer mustn't hold it.
        let _ = self.commands.send(Command::Leave);
    }
}

/// A nonce for an agent.
pub(crate) fn fresh() -> Result<AgentId, Error> {
    let mut nonce = [0; 16];
    getrandom::fill(&mut nonce).map_err(|error| Error::System { what: "randomness", why: error.to_string() })?;
    Ok(AgentId::from_le_bytes(nonce))
}

fn announcement(agent: AgentId, ranks: &Ranks, last_epoch: u64, timeout: Duration) -> Announcement {
    let Ranks { host, world_size, ranks, details, hosts } = ranks.clone();
    Announcement { agent, host, world_size, ranks, details, last_epoch, timeout, hosts, about: About::default() }
}
