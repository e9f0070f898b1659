//! The agent that lives in the coordinator's own process: the same decisions, with no connection between.

use std::sync::Arc;
use std::time::Duration;

use super::state::Shared;
use crate::decide::roster::{AgentId, Announcement, Event, Failure};
use crate::refusal::Refusal;

/// Its place. What happens to it is told by the function it announced itself with.
pub(crate) struct Resident {
    pub(super) shared: Arc<Shared>,
    pub(super) agent: AgentId,
}

impl Resident {
    /// Its nonce.
    pub(crate) fn agent(&self) -> AgentId {
        self.agent
    }

    /// How long the coordinator waits for who isn't heard.
    pub(crate) fn silence(&self) -> Duration {
        self.shared.silence
    }

    /// Announces the agent's ranks. `tell` must not call back; the first one given stays.
    pub(crate) fn announce(
        &self,
        announcement: Announcement,
        tell: impl Fn(Event) + Send + 'static,
    ) -> Result<(), Refusal> {
        self.shared.with(|state, now| {
            let line = (!state.lines.contains_key(&self.agent)).then(|| {
                Box::new(move |event| {
                    tell(event);
                    true
                }) as _
            });
            state.announce(now, announcement, line)?;
            state.roster.resident(self.agent);
            Ok(())
        })
    }

    /// Some of its ranks are gone; `how` `None` if they left in order.
    pub(crate) fn part(&self, ranks: &[u32], how: Option<&str>) {
        self.shared.with(|state, _| state.part(self.agent, ranks, how));
    }

    /// One of its ranks reports a failure. Returns the report that stands.
    pub(crate) fn report(&self, failure: Failure) -> Result<Arc<Failure>, Refusal> {
        self.shared.with(|state, _| {
            let (first, outbox) = state.roster.report(self.agent, failure)?;
            state.deliver(outbox);
            Ok(first)
        })
    }

    /// It leaves.
    pub(crate) fn leave(&self) {
        self.shared.with(|state, _| state.leave(self.agent));
    }
}
