//! Operations that run one after another, whichever group of the process they are of.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Job, Shared};

/// Operations that run one after another.
#[derive(Default)]
pub(crate) struct Line(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    /// Whose turn it is.
    now: Option<Ahead>,
    jobs: VecDeque<(Arc<Shared>, Job)>,
    /// A thread looks at the deadlines of those who wait.
    watched: bool,
}

/// An operation that others wait behind.
struct Ahead {
    group: Arc<Shared>,
    op: &'static str,
    seq: u64,
}

impl Ahead {
    fn new(group: &Arc<Shared>, job: &Job) -> Ahead {
        Ahead { group: group.clone(), op: job.call.collective.kind.name(), seq: job.operation.ticket.seq() }
    }
}

/// How often deadlines of what waits are looked at.
const LOOK: Duration = Duration::from_millis(50);

impl Line {
    /// The job, if it is its turn; else it waits for it.
    pub(super) fn take(self: &Arc<Self>, group: &Arc<Shared>, job: Job) -> Option<Job> {
        let mut waiting = self.0.lock();
        if waiting.now.is_none() {
            waiting.now = Some(Ahead::new(group, &job));
            return Some(job);
        }
        waiting.jobs.push_back((group.clone(), job));
        if !waiting.watched {
            let line = Arc::downgrade(self);
            let watch = move || while line.upgrade().is_some_and(|line| line.look()) {};
            waiting.watched = std::thread::Builder::new().name("podring-line".to_owned()).spawn(watch).is_ok();
        }
        None
    }

    /// The next, now that one has ended.
    pub(super) fn next(&self) -> Option<(Arc<Shared>, Job)> {
        let mut waiting = self.0.lock();
        let next = waiting.jobs.pop_front();
        let now = next.as_ref().map(|(group, job)| Ahead::new(group, job));
        let ended = std::mem::replace(&mut waiting.now, now);
        drop(waiting);
        drop(ended);
        next
    }

    /// Fails what is overdue before its turn has come; after a moment. Whether anything still waits.
    fn look(&self) -> bool {
        std::thread::sleep(LOOK);
        let (overdue, ahead, goes_on) = {
            let mut waiting = self.0.lock();
            let now = Instant::now();
            let (overdue, others): (VecDeque<_>, VecDeque<_>) =
                std::mem::take(&mut waiting.jobs).into_iter().partition(|(_, job)| now >= job.end);
            waiting.jobs = others;
            waiting.watched = !waiting.jobs.is_empty();
            let ahead = waiting.now.as_ref().filter(|_| !overdue.is_empty());
            let ahead = ahead.map(|Ahead { group, op, seq }| format!("{op}, seq {seq}, of group {}", group.name));
            (overdue, ahead, waiting.watched)
        };
        for (group, job) in overdue {
            group.late(job, ahead.clone());
        }
        goes_on
    }

    /// What a group has waiting.
    pub(super) fn withdraw(&self, group: &Shared) -> Vec<Job> {
        let mut waiting = self.0.lock();
        let (own, others) =
            std::mem::take(&mut waiting.jobs).into_iter().partition(|(of, _)| std::ptr::eq(&**of, group));
        waiting.jobs = others;
        let own: VecDeque<(Arc<Shared>, Job)> = own;
        own.into_iter().map(|(_, job)| job).collect()
    }
}
