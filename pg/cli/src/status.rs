//! `podring status`: what a coordinator knows, for people and tools. See docs/rendezvous.md.

use std::path::PathBuf;
use std::time::Duration;

use podring_rendezvous::bootstrap::{BadSetting, Settings};
use podring_rendezvous::secret::{BadCredential, Tls, Token};
use podring_rendezvous::session::{self, Access, StatusReply, Store};
use serde_json::json;

use crate::coordinator::seconds;
use crate::terminal;

const EXAMPLES: &str = "\
Examples:
  podring status --coordinator 10.0.0.1:29400 --token-file token
  PODRING_COORDINATOR=10.0.0.1:29400 podring status --json

A coordinator inside rank 0 says where it listens with PODRING_LOG=info, and can be asked if the job has a token of its
own (PODRING_TOKEN_FILE) or certificates.";

/// Show who is in a job: ask its coordinator
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Where the coordinator listens [default: PODRING_COORDINATOR]
    #[arg(long, value_name = "HOST:PORT", value_parser = endpoint)]
    coordinator: Option<String>,
    /// File with the job's token [default: PODRING_TOKEN_FILE]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// This side's certificate chain (PEM) [default: PODRING_TLS_CERT]
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
    tls_cert: Option<PathBuf>,
    /// Its private key (PEM) [default: PODRING_TLS_KEY]
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_ca"])]
    tls_key: Option<PathBuf>,
    /// Who must have signed the other side's certificate (PEM) [default: PODRING_TLS_CA]
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_key"])]
    tls_ca: Option<PathBuf>,
    /// The name in the coordinator's certificate [default: PODRING_TLS_NAME, else the host of its address]
    #[arg(long, value_name = "NAME")]
    tls_name: Option<String>,
    /// How long to try to reach it
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "5")]
    timeout: Duration,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("which coordinator? give --coordinator HOST:PORT, or set PODRING_COORDINATOR")]
    Nowhere,
    #[error(transparent)]
    Setting(#[from] BadSetting),
    #[error(transparent)]
    Token(#[from] BadCredential),
    #[error(transparent)]
    Asking(#[from] session::Error),
}

/// Asks once.
pub(crate) fn run(args: Args) -> Result<i32, Error> {
    let json = args.json;
    let access = access(args, |name| std::env::var(name).ok())?;
    let store = Store::connect(&access)?;
    let status = store.status()?;
    let endpoint = store.endpoint();
    terminal::out(&if json { as_json(endpoint, &status) } else { as_text(endpoint, &status) });
    Ok(0)
}

fn endpoint(text: &str) -> Result<String, String> {
    let one = |name: &str| (name == "PODRING_COORDINATOR").then(|| text.to_owned());
    match Settings::from_lookup(one) {
        Ok(Settings { coordinator: Some(endpoint), .. }) => Ok(endpoint),
        Ok(_) => Err("expected host:port".to_owned()),
        Err(bad) => Err(format!("expected {}", bad.expected)),
    }
}

/// A flag decides, else its variable.
fn access(args: Args, variable: impl Fn(&str) -> Option<String>) -> Result<Access, Error> {
    let Args { coordinator, token_file, tls_cert, tls_key, tls_ca, tls_name, timeout, json: _ } = args;
    let given = match (tls_cert, tls_key, tls_ca) {
        (Some(cert), Some(key), Some(ca)) => Some(Tls { ca, cert, key }),
        _ => None,
    };
    let settings = Settings::from_lookup(|name| match name {
        "PODRING_COORDINATOR" => variable(name).filter(|_| coordinator.is_none()),
        "PODRING_TLS_CERT" | "PODRING_TLS_KEY" | "PODRING_TLS_CA" => variable(name).filter(|_| given.is_none()),
        "PODRING_TOKEN_FILE" | "PODRING_TLS_NAME" => variable(name),
        _ => None,
    })?;
    let endpoint = coordinator.or(settings.coordinator).ok_or(Error::Nowhere)?;
    let token = token_file.or(settings.token_file).map(|path| Token::from_file(&path)).transpose()?;
    let (tls, server_name) = (given.or(settings.tls), tls_name.or(settings.tls_name));
    Ok(Access { token, tls, server_name, timeout, ..Access::new(endpoint) })
}

/// Whether an epoch forms: somebody waits for it.
fn forming(status: &StatusReply) -> bool {
    !status.missing.is_empty() || status.agents.iter().any(|agent| agent.epoch == 0 && !agent.ranks.is_empty())
}

/// Ranks of the formed epoch that have left or are lost.
fn gone(status: &StatusReply) -> Vec<u32> {
    if status.epoch == 0 || forming(status) {
        return Vec::new();
    }
    let here = |rank: &u32| status.agents.iter().any(|agent| agent.epoch == status.epoch && agent.ranks.contains(rank));
    (0..status.world_size).filter(|rank| !here(rank)).collect()
}

fn as_json(endpoint: &str, status: &StatusReply) -> String {
    let agents: Vec<_> = status
        .agents
        .iter()
        .map(|agent| {
            let (host, ranks) = (&agent.host, &agent.ranks);
            json!({ "host": host, "ranks": ranks, "epoch": agent.epoch, "silent_ms": agent.silent_ms })
        })
        .collect();
    let missing: Vec<_> = status
        .missing
        .iter()
        .map(|at| json!({ "rank": at.rank, "host": Some(&at.host).filter(|host| !host.is_empty()) }))
        .collect();
    let report = json!({
        "coordinator": endpoint,
        "program": status.program,
        // Beyond what all JSON readers take for a number.
        "instance": format!("{:016x}", status.instance),
        "epoch": status.epoch,
        "world_size": status.world_size,
        "forming": forming(status),
        "agents": agents,
        "missing": missing,
        "gone": gone(status),
        "keys": status.keys,
        "store_bytes": status.store_bytes,
        "waiting": status.waiting,
    });
    format!("{report:#}")
}

fn as_text(endpoint: &str, status: &StatusReply) -> String {
    let (epoch, size) = (status.epoch, status.world_size);
    let mut lines = vec![format!("{} at {endpoint}", status.program.escape_debug())];
    let gone = gone(status);
    let plural = |count: usize| if count == 1 { "" } else { "s" };
    lines.push(if status.agents.is_empty() {
        format!("epoch {epoch}: nobody is there")
    } else if forming(status) {
        let waited = match status.missing.len() {
            0 => String::new(),
            count => format!(": {count} rank{} missing", plural(count)),
        };
        format!("epoch {} forms, of {size} ranks{waited}", epoch + 1)
    } else if gone.is_empty() {
        format!("epoch {epoch}, all of {size} ranks")
    } else {
        let count = gone.len();
        format!("epoch {epoch}, {size} ranks, of which {count} left or {} lost: {}", are(count), ranges(&gone))
    });
    for at in &status.missing {
        let host = if at.host.is_empty() { "on an unknown host".to_owned() } else { format!("on {}", shown(&at.host)) };
        lines.push(format!("  missing: rank {} {host}", at.rank));
    }
    let rows: Vec<[String; 4]> = status
        .agents
        .iter()
        .map(|agent| {
            let epoch = if agent.epoch == 0 { "waits".to_owned() } else { agent.epoch.to_string() };
            let heard = format!("{:.1} s ago", f64::from(agent.silent_ms) / 1e3);
            [shown(&agent.host), ranges(&agent.ranks), epoch, heard]
        })
        .collect();
    if !rows.is_empty() {
        let head = ["host", "ranks", "epoch", "last heard"].map(str::to_owned);
        let table: Vec<&[String; 4]> = std::iter::once(&head).chain(&rows).collect();
        let width = |column: usize| table.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths = [width(0), width(1), width(2)];
        for [host, ranks, epoch, heard] in table {
            let [first, second, third] = widths;
            lines.push(format!("  {host:first$}  {ranks:second$}  {epoch:third$}  {heard}"));
        }
    }
    let (keys, bytes, waiting) = (status.keys, status.store_bytes, status.waiting);
    lines.push(format!("store: {keys} keys, {bytes} bytes; {waiting} calls wait there or in barriers"));
    lines.join("\n")
}

fn are(count: usize) -> &'static str {
    if count == 1 { "is" } else { "are" }
}

/// A name of others' making, which may hold anything.
fn shown(name: &str) -> String {
    name.escape_debug().to_string()
}

/// Ascending numbers, neighbours as a range: `0-3,6`.
fn ranges(numbers: &[u32]) -> String {
    let mut spans: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match spans.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => spans.push((number, number)),
        }
    }
    let one = |(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    spans.iter().map(one).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use podring_rendezvous::session::{Agent, RankAt};

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parse(args: &[&str]) -> Result<Args, clap::Error> {
        Cli::try_parse_from(std::iter::once(&"podring").chain(args)).map(|cli| cli.args)
    }

    #[test]
    fn flags_come_before_variables() {
        let variables = |name: &str| match name {
            "PODRING_COORDINATOR" => Some("there:1".to_owned()),
            "PODRING_TLS_NAME" => Some("name".to_owned()),
            "PODRING_SILENCE_MS" => Some("not asked for".to_owned()),
            _ => None,
        };
        let access = |args: &[&str]| access(parse(args).unwrap(), variables);
        assert_eq!(access(&[]).unwrap().endpoints, ["there:1"]);
        let other = access(&["--coordinator", "[::1]:2", "--tls-name", "x"]).unwrap();
        assert_eq!((other.endpoints, other.server_name), (vec!["[::1]:2".to_owned()], Some("x".to_owned())));
        assert_eq!(access(&["--timeout", "1"]).unwrap().server_name.unwrap(), "name");
        let nowhere = super::access(parse(&[]).unwrap(), |_| None).unwrap_err();
        assert!(nowhere.to_string().contains("PODRING_COORDINATOR"), "{nowhere}");
        let half = super::access(parse(&[]).unwrap(), |name| (name == "PODRING_TLS_CA").then(|| "ca".to_owned()));
        assert!(half.unwrap_err().to_string().contains("PODRING_TLS_CERT"));
        for bad in ["here", "::1:5", "here:0", ""] {
            assert!(parse(&["--coordinator", bad]).is_err(), "{bad}");
        }
    }

    fn agent(host: &str, ranks: &[u32], epoch: u64) -> Agent {
        Agent { host: host.to_owned(), ranks: ranks.to_vec(), silent_ms: 340, epoch }
    }

    #[test]
    fn who_is_there_late_and_gone() {
        let formed = StatusReply {
            epoch: 3,
            world_size: 6,
            agents: vec![agent("a", &[0, 1, 2], 3), agent("b\x1b", &[5], 3)],
            keys: 7,
            program: "podring 1.2.3".to_owned(),
            ..StatusReply::default()
        };
        let text = as_text("here:1", &formed);
        assert!(
            text.starts_with("podring 1.2.3 at here:1\nepoch 3, 6 ranks, of which 2 left or are lost: 3-4\n"),
            "{text}"
        );
        assert!(text.contains("\n  a        0-2    3      0.3 s ago\n  b\\u{1b}  5      3 "), "{text}");
        assert!(text.ends_with("store: 7 keys, 0 bytes; 0 calls wait there or in barriers"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&as_json("here:1", &formed)).unwrap();
        assert_eq!((&json["gone"], &json["forming"]), (&json!([3, 4]), &json!(false)));

        let missing = vec![RankAt { rank: 1, host: "b".to_owned() }, RankAt { rank: 2, host: String::new() }];
        let late = StatusReply { world_size: 3, agents: vec![agent("a", &[0], 0)], missing, ..StatusReply::default() };
        let text = as_text("here:1", &late);
        assert!(text.contains("\nepoch 1 forms, of 3 ranks: 2 ranks missing\n"), "{text}");
        assert!(text.contains("\n  missing: rank 1 on b\n  missing: rank 2 on an unknown host\n"), "{text}");
        assert!(text.contains("  waits  "), "{text}");
        let json: serde_json::Value = serde_json::from_str(&as_json("here:1", &late)).unwrap();
        assert_eq!(json["missing"], json!([{ "rank": 1, "host": "b" }, { "rank": 2, "host": null }]));
        assert_eq!(json["gone"], json!([]));

        let nobody = as_text("here:1", &StatusReply::default());
        assert!(nobody.contains("\nepoch 0: nobody is there\n"), "{nobody}");
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
    }
}
