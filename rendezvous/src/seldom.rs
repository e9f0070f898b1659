//! For messages that a stranger could cause without end.

use std::time::{Duration, Instant};

const PAUSE: Duration = Duration::from_secs(10);

/// Lets something be said at most every ten seconds.
#[derive(Debug, Default)]
pub(crate) struct Seldom(Option<Instant>);

impl Seldom {
    pub(crate) fn may(&mut self, now: Instant) -> bool {
        let may = self.0.is_none_or(|last| now.saturating_duration_since(last) >= PAUSE);
        if may {
            self.0 = Some(now);
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn once_in_a_while() {
        let (mut seldom, now) = (Seldom::default(), Instant::now());
        let said = [0, 1, 9, 10, 19, 25].map(|seconds| seldom.may(now + Duration::from_secs(seconds)));
        assert_eq!(said, [true, false, false, true, false, true]);
    }
}
