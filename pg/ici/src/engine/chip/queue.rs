//! Calls that wait for their turn: each fails at its deadline, whoever holds up the launches before it.

use std::{
    collections::VecDeque,
    sync::{Arc, Weak, mpsc},
    time::Instant,
};

use parking_lot::Mutex;

use super::{Group, flight::Job, thread};
use crate::{
    engine::{failure::Failure, ticket::Ticket},
    pjrt::PjrtError,
};

/// Where calls go to be launched one after another.
pub(super) struct Launcher {
    jobs: mpsc::Sender<Job>,
    now: Arc<Mutex<Option<Ahead>>>,
}

/// The call whose turn it is.
struct Ahead {
    group: Arc<Group>,
    op: &'static str,
    seq: u64,
}

impl Launcher {
    /// With a thread that ends when nobody can send any more.
    pub fn start() -> Result<Arc<Launcher>, PjrtError> {
        let (jobs, posted) = mpsc::channel::<Job>();
        let now: Arc<Mutex<Option<Ahead>>> = Arc::default();
        let shown = now.clone();
        thread("podring-chip", move || {
            for job in posted {
                let ahead =
                    Ahead { group: job.group.clone(), op: job.call.collective.kind.name(), seq: job.ticket.seq() };
                *shown.lock() = Some(ahead);
                job.run();
                let done = shown.lock().take();
                drop(done);
            }
        })?;
        Ok(Arc::new(Launcher { jobs, now }))
    }

    /// Gives the job back if there is nobody to launch it.
    pub fn send(&self, job: Job) -> Option<Job> {
        self.jobs.send(job).err().map(|refused| refused.0)
    }

    /// What is under way, in words.
    fn ahead(&self) -> Option<String> {
        let now = self.now.lock();
        now.as_ref().map(|Ahead { group, op, seq }| format!("{op}, seq {seq}, of group {}", group.name))
    }
}

struct Waiting {
    group: Weak<Group>,
    ticket: Arc<Ticket>,
    op: &'static str,
    deadline: Instant,
}

/// What a chip's calls wait for their turn in, over all its groups.
#[derive(Default)]
pub(super) struct Queue {
    waiting: VecDeque<Waiting>,
    /// The landing thread looks at it again and again.
    watched: bool,
}

impl Queue {
    /// Whether the landing thread has to be told.
    #[must_use]
    pub fn enter(&mut self, job: &Job) -> bool {
        let (group, op) = (Arc::downgrade(&job.group), job.call.collective.kind.name());
        self.waiting.push_back(Waiting { group, ticket: job.ticket.clone(), op, deadline: job.deadline });
        !std::mem::replace(&mut self.watched, true)
    }

    /// Its turn has come.
    pub fn leave(&mut self, ticket: &Arc<Ticket>) {
        if let Some(place) = self.waiting.iter().position(|one| Arc::ptr_eq(&one.ticket, ticket)) {
            self.waiting.remove(place);
        }
    }

    pub fn watched(&self) -> bool {
        self.watched
    }

    /// Nothing has happened for a while: whether there is anything to look at.
    pub fn idle(&mut self) {
        self.watched = !self.waiting.is_empty();
    }

    /// Takes out what is overdue. What is the next to be launched finds out itself.
    pub fn overdue(&mut self, now: Instant) -> Vec<(Arc<Group>, Failure)> {
        let mut failed = Vec::new();
        self.waiting.retain(|one| {
            if now < one.deadline || one.ticket.ended() {
                return !one.ticket.ended();
            }
            let Some(group) = one.group.upgrade() else { return false };
            let Some(ahead) = group.jobs.ahead() else { return true };
            let after_ms = u64::try_from(one.ticket.timeout().as_millis()).unwrap_or(u64::MAX);
            failed.push((
                group,
                Failure::Queued { op: one.op.to_owned(), seq: one.ticket.seq(), after_ms, ahead: Some(ahead) },
            ));
            false
        });
        failed
    }
}
