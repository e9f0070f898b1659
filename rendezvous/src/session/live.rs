//! The task that keeps a session alive: the streams of membership and heartbeat, and a new connection when the
//! coordinator was restarted.

use std::sync::Arc;
use std::time::Duration;

use podring_proto as pb;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::connect::{Access, Connection, call_error, connect};
use super::error::Error;
use crate::decide::roster::{Announcement, Event, Failure, World};
use crate::refusal::{Lost, Refusal};
use crate::{chain, wire};

/// What the session is asked to do.
pub(super) enum Command {
    Announce(Box<Announcement>),
    /// Ranks that are gone; `None`: they left in order.
    Part(Vec<u32>, Option<String>),
    Leave,
}

/// What happens to a session.
#[derive(Clone, Debug)]
pub enum Update {
    /// The coordinator told something.
    Event(Event),
    /// The session is over.
    Ended(Error),
}

/// Hears of it, on one of the runtime's threads: must not wait.
pub(crate) type Tell = Box<dyn Fn(Update) + Send + Sync>;

/// What is known.
#[derive(Clone)]
pub(super) struct View {
    pub(super) connection: Connection,
    pub(super) world: Option<Arc<World>>,
    pub(super) last_epoch: u64,
    pub(super) losses: Vec<Arc<Lost>>,
    pub(super) failures: Vec<Arc<Failure>>,
    pub(super) error: Option<Error>,
    /// Counts the changes.
    pub(super) changes: u64,
}

impl View {
    pub(super) fn new(connection: Connection) -> View {
        let (losses, failures) = (Vec::new(), Vec::new());
        View { connection, world: None, last_epoch: 0, losses, failures, error: None, changes: 0 }
    }

    /// Takes an event in; whether the session goes on.
    fn learn(&mut self, event: Event) -> bool {
        self.changes += 1;
        match event {
            Event::Formed(world) => {
                self.last_epoch = world.epoch;
                self.world = Some(world);
                self.losses.clear();
                self.failures.clear();
            }
            Event::Late(late) => {
                self.error = Some(Error::Late(late.as_ref().clone()));
                return false;
            }
            Event::Closing => {
                self.error = Some(Error::Closed { endpoint: self.connection.endpoint.to_string() });
                return false;
            }
            Event::Lost(lost) => self.losses.push(lost),
            Event::Failed(failure) => self.failures.push(failure),
        }
        true
    }
}

/// Why a stream is over.
enum End {
    Left,
    Failed(Error),
    /// Worth another connection.
    Broken(String),
}

/// Lives until the session leaves or fails.
pub(super) async fn live(
    access: Access,
    mut connection: Connection,
    mut announcement: Announcement,
    mut inbox: mpsc::UnboundedReceiver<Command>,
    view: watch::Sender<View>,
    tell: Option<Tell>,
) {
    let fail = |error: Error| {
        view.send_modify(|view| {
            view.error = Some(error.clone());
            view.changes += 1;
        });
        if let Some(tell) = &tell {
            tell(Update::Ended(error));
        }
    };
    loop {
        let how = match stream(&connection, &mut announcement, &mut inbox, &view, tell.as_ref()).await {
            End::Left => return,
            End::Failed(error) => return fail(error),
            End::Broken(how) => how,
        };
        // A coordinator that was restarted is back soon. Everybody announces itself again: the next epoch.
        // The loss of one that isn't waited for (rank 0 has it) is told otherwise.
        if access.patience.is_none_or(|patience| patience > connection.silence) {
            tracing::warn!(endpoint = %connection.endpoint, how, "lost the coordinator, trying again");
        } else {
            tracing::info!(endpoint = %connection.endpoint, how, "lost the coordinator, trying again");
        }
        let again = Access { timeout: access.patience.unwrap_or(connection.silence), ..access.clone() };
        let found = tokio::select! {
            found = connect(&again) => found,
            () = gone(&mut announcement, &mut inbox) => return,
        };
        connection = match found {
            Ok(connection) => connection,
            Err(Error::Absent { endpoint, why, .. }) => {
                return fail(Error::CoordinatorLost { endpoint, how: format!("{how}; then {why}") });
            }
            Err(error) => return fail(error),
        };
        announcement.last_epoch = view.borrow().last_epoch;
        view.send_modify(|view| view.connection = connection.clone());
    }
}

async fn stream(
    connection: &Connection,
    announcement: &mut Announcement,
    inbox: &mut mpsc::UnboundedReceiver<Command>,
    view: &watch::Sender<View>,
    tell: Option<&Tell>,
) -> End {
    let (say, said) = mpsc::channel(16);
    if say.send(announce(announcement)).await.is_err() {
        return End::Broken("no stream".to_owned());
    }
    let mut client = connection.client.clone();
    // Answered when the announcement is: a refusal is this call's.
    let joining = connection.sockets.answer(client.join(ReceiverStream::new(said)));
    let mut events = match timeout(connection.silence, joining).await {
        Ok(Ok(events)) => events.into_inner(),
        Ok(Err(status)) => return end("join", connection, &status),
        Err(_) => return End::Broken(format!("no answer to the announcement for {:?}", connection.silence)),
    };
    let session = announcement.agent.to_le_bytes().to_vec();
    let (beat, beats) = mpsc::channel(16);
    let beating = connection.sockets.answer(client.heartbeat(ReceiverStream::new(beats)));
    let mut echoes: Streaming<pb::Beat> = match timeout(connection.silence, beating).await {
        Ok(Ok(echoes)) => echoes.into_inner(),
        Ok(Err(status)) => return end("heartbeat", connection, &status),
        Err(_) => return End::Broken(format!("no heartbeat stream for {:?}", connection.silence)),
    };
    let mut pulse = interval((connection.silence / 4).max(Duration::from_millis(1)));
    pulse.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut number, mut heard) = (0, Instant::now());
    loop {
        tokio::select! {
            event = events.message() => match event {
                Ok(Some(event)) => {
                    heard = Instant::now();
                    let Some(event) = wire::from_event(event) else { continue };
                    let mut goes_on = true;
                    view.send_modify(|view| goes_on = view.learn(event.clone()));
                    if let Some(tell) = tell {
                        tell(Update::Event(event));
                    }
                    if !goes_on {
                        leave(say, &mut events).await;
                        return End::Left;
                    }
                }
                Ok(None) => return End::Broken("it ended the stream".to_owned()),
                Err(status) => return end("join", connection, &status),
            },
            echo = echoes.message() => match echo {
                Ok(Some(_)) => heard = Instant::now(),
                Ok(None) => return End::Broken("it ended the heartbeat".to_owned()),
                Err(status) => return end("heartbeat", connection, &status),
            },
            _ = pulse.tick() => {
                if heard.elapsed() >= connection.silence {
                    return End::Broken(format!("silent for {:?}", connection.silence));
                }
                number += 1;
                // A full channel is a coordinator that doesn't read: the silence above will tell.
                let _ = beat.try_send(pb::Beat { session: session.clone(), number });
            },
            command = inbox.recv() => match command {
                Some(Command::Announce(next)) => {
                    *announcement = *next;
                    if say.send(announce(announcement)).await.is_err() {
                        return End::Broken("the stream is closed".to_owned());
                    }
                }
                Some(Command::Part(ranks, how)) => {
                    part(announcement, &ranks);
                    let part = pb::join_request::What::Part(pb::Part { ranks, how: how.unwrap_or_default() });
                    if say.send(pb::JoinRequest { what: Some(part) }).await.is_err() {
                        return End::Broken("the stream is closed".to_owned());
                    }
                }
                Some(Command::Leave) | None => {
                    leave(say, &mut events).await;
                    return End::Left;
                }
            },
        }
    }
}

/// Says goodbye. The coordinator ends the stream when it has heard us; bounded, should it be gone.
async fn leave(say: mpsc::Sender<pb::JoinRequest>, events: &mut Streaming<pb::JoinEvent>) {
    let leave = pb::join_request::What::Leave(pb::Leave {});
    let _ = say.try_send(pb::JoinRequest { what: Some(leave) });
    drop(say);
    let _ = timeout(Duration::from_secs(1), async { while let Ok(Some(_)) = events.message().await {} }).await;
}

/// Ranks that are gone aren't announced again.
fn part(announcement: &mut Announcement, gone: &[u32]) {
    let mut kept = announcement.ranks.iter().map(|rank| !gone.contains(rank));
    announcement.details.retain(|_| kept.next().unwrap_or(false));
    announcement.ranks.retain(|rank| !gone.contains(rank));
}

/// While there is no coordinator: takes commands in; returns when asked to leave.
async fn gone(announcement: &mut Announcement, inbox: &mut mpsc::UnboundedReceiver<Command>) {
    loop {
        match inbox.recv().await {
            Some(Command::Announce(next)) => *announcement = *next,
            Some(Command::Part(ranks, _)) => part(announcement, &ranks),
            Some(Command::Leave) | None => return,
        }
    }
}

fn announce(announcement: &Announcement) -> pb::JoinRequest {
    pb::JoinRequest { what: Some(pb::join_request::What::Announce(wire::announce(announcement))) }
}

fn end(call: &'static str, connection: &Connection, status: &Status) -> End {
    match call_error(call, &connection.endpoint, status) {
        // It gave us up, or was restarted between two calls: announcing again is the remedy.
        Error::Refused { refusal: Refusal::UnknownSession, .. } => End::Broken("it gave this session up".to_owned()),
        Error::CoordinatorLost { .. } => End::Broken(chain(status)),
        error => End::Failed(error),
    }
}
