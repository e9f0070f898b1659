//! The part of `podring bench rendezvous` that puts the store beside TCPStore: the same loops, in Python, over both.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::python::{Error, Interpreter};

/// Whose store to measure beside ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Peer {
    /// torch.distributed.TCPStore
    Tcpstore,
}

/// Calls per second over all clients, medians.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Pair {
    tcpstore: f64,
    podring: f64,
    /// Podring's rate by TCPStore's.
    ratio: f64,
}

/// What so many clients at a time got.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Side {
    clients: u32,
    /// set, get, check, add and compare_set of one key, in turns.
    single: Pair,
    /// multi_set and multi_get of 64 keys, in turns.
    multi: Pair,
    /// Waits that a set ended: one sets a key that all clients wait for, then waits for theirs.
    wait: Pair,
    set: Pair,
    get: Pair,
    add: Pair,
}

impl Side {
    pub(super) fn line(&self) -> String {
        let Side { clients, single, multi, wait, set, get, add } = self;
        let pair = |Pair { tcpstore, podring, ratio }: &Pair| format!("{podring:.0} : {tcpstore:.0} = {ratio:.2}");
        format!(
            "{clients} client{}, podring : TCPStore in calls/s: single {}, multi {}, waits {} (set {}, get {}, add {})",
            super::plural(*clients),
            pair(single),
            pair(multi),
            pair(wait),
            pair(set),
            pair(get),
            pair(add),
        )
    }
}

/// The worst ratio of each kind, over the numbers of clients.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Ratios {
    pub(super) single: f64,
    pub(super) multi: f64,
    pub(super) wait: f64,
}

impl Ratios {
    pub(super) fn of(sides: &[Side]) -> Ratios {
        let worst = |ratio: fn(&Side) -> f64| sides.iter().map(ratio).fold(f64::INFINITY, f64::min);
        Ratios {
            single: worst(|side| side.single.ratio),
            multi: worst(|side| side.multi.ratio),
            wait: worst(|side| side.wait.ratio),
        }
    }
}

/// Why there is nothing to compare.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unmeasured {
    #[error(transparent)]
    Python(#[from] Error),
    #[error("the store's comparison printed {said:?}: {source}")]
    Unreadable { said: String, source: serde_json::Error },
}

/// Measures, each rate `turns` times for `seconds`.
pub(super) fn measure(seconds: f64, turns: u32) -> Result<Vec<Side>, Unmeasured> {
    let (seconds_text, turns_text) = (seconds.to_string(), turns.to_string());
    let limit = Duration::from_secs(120) + Duration::from_secs_f64(seconds) * turns * 60;
    let args = ["-m", "podring._bench_store", &seconds_text, &turns_text];
    let said = Interpreter::find(None).output(&args, "", limit)?;
    let line = said.lines().last().unwrap_or_default();
    serde_json::from_str(line).map_err(|source| Unmeasured::Unreadable { said: line.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_counts() {
        let pair = |ratio: f64| format!(r#"{{"tcpstore": 10.0, "podring": {}, "ratio": {ratio}}}"#, 10.0 * ratio);
        let side = |clients: u32, ratio: f64| {
            let kinds = ["single", "multi", "wait", "set", "get", "add"];
            let fields: Vec<String> = kinds.iter().map(|kind| format!("\"{kind}\": {}", pair(ratio))).collect();
            format!(r#"{{"clients": {clients}, {}}}"#, fields.join(", "))
        };
        let sides: Vec<Side> = serde_json::from_str(&format!("[{}, {}]", side(1, 3.0), side(8, 0.5))).unwrap();
        assert_eq!(Ratios::of(&sides), Ratios { single: 0.5, multi: 0.5, wait: 0.5 });
        assert!(sides[0].line().starts_with("1 client, ") && sides[1].line().contains("5 : 10 = 0.50"));
    }
}
