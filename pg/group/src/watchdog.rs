//! Looks after groups from outside: spreads a failure through the group's membership, and hears of others' there.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use podring_fabric::hub::Hub;

use crate::membership::Membership;

/// How often.
const EVERY: Duration = Duration::from_millis(500);

/// What is watched of a group.
pub(crate) struct Watched {
    pub channel: u64,
    pub membership: Box<dyn Membership>,
    /// The failure has been reported, or there is nobody to report to.
    pub told: Mutex<bool>,
}

/// The groups a hub's watchdog looks after.
#[derive(Default)]
pub(crate) struct Watchdog {
    groups: Mutex<(bool, Vec<Weak<Watched>>)>,
}

impl Watchdog {
    /// Adds a group; the first one starts the thread.
    pub fn watch(self: &Arc<Self>, hub: &Hub, watched: &Arc<Watched>) {
        let mut groups = self.groups.lock();
        groups.1.retain(|group| group.strong_count() > 0);
        groups.1.push(Arc::downgrade(watched));
        if !groups.0 {
            let (me, hub) = (self.clone(), hub.clone());
            groups.0 = std::thread::Builder::new().name("podring-watchdog".into()).spawn(move || me.run(&hub)).is_ok();
        }
    }

    fn run(&self, hub: &Hub) {
        // Kept from look to look, empty between them: groups that nobody else has must end.
        let mut watched: Vec<Arc<Watched>> = Vec::new();
        loop {
            std::thread::sleep(EVERY);
            {
                let mut groups = self.groups.lock();
                groups.1.retain(|group| group.strong_count() > 0);
                if groups.1.is_empty() {
                    groups.0 = false;
                    return;
                }
                watched.extend(groups.1.iter().filter_map(Weak::upgrade));
            }
            for group in watched.drain(..) {
                look(hub, &group);
            }
        }
    }
}

fn look(hub: &Hub, group: &Watched) {
    let mut told = group.told.lock();
    if *told {
        return;
    }
    // A store that is gone is no failure of the group: the launcher may have ended before us.
    match hub.failure(group.channel) {
        Some(failure) => {
            *told = true;
            if let Err(error) = group.membership.report(&failure) {
                tracing::debug!(%error, "failure not reported");
            }
        }
        None if hub.pending(group.channel) > 0 => match group.membership.watch() {
            Ok(Some(failure)) => {
                *told = true;
                hub.fail(group.channel, failure);
            }
            Ok(None) => {}
            Err(error) => tracing::debug!(%error, "membership can't be read"),
        },
        None => {}
    }
}
