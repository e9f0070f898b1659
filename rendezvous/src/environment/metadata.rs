//! The GCE metadata server, for Cloud TPU VMs whose launcher sets no variables.
//!
//! Asked only when wanted: elsewhere its name doesn't resolve, and finding that out takes time. What it says has less
//! weight than any variable.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::sync::{OnceLock, mpsc};
use std::time::{Duration, Instant};

use super::EnvironmentError;
use super::table::{Fact, Launcher, VARIABLES};

/// Where it is unless the variable `GCE_METADATA_HOST` says otherwise.
pub const HOST: &str = "metadata.google.internal";
/// The variable that has it asked.
const WANTED: &str = "PODRING_METADATA";
/// How long it has for all answers.
const LIMIT: Duration = Duration::from_secs(3);

/// An answer by attribute.
pub type Answer = BTreeMap<&'static str, String>;

/// An answer that can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("GCE metadata server {host}, attribute {attribute}: {why}")]
pub struct MetadataError {
    /// Where it was asked.
    pub host: String,
    /// For what.
    pub attribute: &'static str,
    /// What is wrong.
    pub why: String,
}

/// What it answered in this process, which stays true.
static KNOWN: OnceLock<(String, Answer)> = OnceLock::new();

/// `lookup`, and beside it the metadata server's attributes, if `PODRING_METADATA` wants them and no variable tells which
/// worker this is or who the slice's others are.
pub(super) fn beside(
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<impl Fn(&str) -> Option<String>, EnvironmentError> {
    let found = match wanted(&lookup)? {
        None => Answer::new(),
        Some(host) => match KNOWN.get() {
            Some((known, answer)) if *known == host => answer.clone(),
            _ => {
                let answer = ask(&host, LIMIT)?;
                KNOWN.get_or_init(|| (host, answer.clone()));
                answer
            }
        },
    };
    Ok(move |name: &str| found.get(name).cloned().or_else(|| lookup(name)))
}

/// Whom to ask, if anybody.
fn wanted(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<String>, EnvironmentError> {
    let set = |name: &str| lookup(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    match set(WANTED).as_deref() {
        None | Some("0") => return Ok(None),
        Some("1") => {}
        Some(other) => {
            let (name, value) = (WANTED.to_owned(), other.to_owned());
            return Err(EnvironmentError::Malformed { name, value, expected: "0 or 1" });
        }
    }
    let told = |facts: &[Fact]| {
        let tpu = VARIABLES.iter().filter(|variable| variable.launcher == Launcher::Tpu);
        tpu.filter(|variable| facts.contains(&variable.fact)).any(|variable| set(variable.name).is_some())
    };
    let all = told(&[Fact::Worker]) && told(&[Fact::WorkerHosts, Fact::ProcessAddresses]);
    Ok((!all).then(|| set("GCE_METADATA_HOST").unwrap_or_else(|| HOST.to_owned())))
}

/// Asks `host` (a name, optionally with a port) for what the table has of it. An attribute that isn't there is left out.
pub fn ask(host: &str, limit: Duration) -> Result<Answer, MetadataError> {
    let deadline = Instant::now() + limit;
    let mut found = Answer::new();
    for attribute in VARIABLES.iter().filter(|one| one.launcher == Launcher::Metadata).map(|one| one.name) {
        let bad = |why: String| MetadataError { host: host.to_owned(), attribute, why };
        let Some(text) = get(host, attribute, deadline).map_err(bad)? else { continue };
        let value = match attribute {
            // "uid:port:address" of every worker.
            "worker-network-endpoints" => {
                let address = |one: &str| one.trim().splitn(3, ':').nth(2).filter(|a| !a.is_empty()).map(str::to_owned);
                let all = text.trim().split(',').map(address).collect::<Option<Vec<String>>>();
                all.ok_or_else(|| bad(format!("{text:?}: expected uid:port:address, comma between")))?.join(",")
            }
            _ => text.trim().to_owned(),
        };
        found.insert(attribute, value);
    }
    Ok(found)
}

fn get(host: &str, attribute: &str, deadline: Instant) -> Result<Option<String>, String> {
    const LONGEST: u64 = 1 << 20;
    let left = || {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err("no answer in time".to_owned()) } else { Ok(left) }
    };
    let target = if host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) {
        host.to_owned()
    } else {
        format!("{host}:80")
    };
    let text = |error: std::io::Error| error.to_string();
    let address = resolved(target, left()?)?;
    let mut stream = TcpStream::connect_timeout(&address, left()?).map_err(text)?;
    let request = format!(
        "GET /computeMetadata/v1/instance/attributes/{attribute} HTTP/1.0\r\nHost: {host}\r\nMetadata-Flavor: Google\r\n\r\n"
    );
    stream.set_write_timeout(Some(left()?)).map_err(text)?;
    stream.write_all(request.as_bytes()).map_err(text)?;
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        stream.set_read_timeout(Some(left()?)).map_err(text)?;
        match stream.read(&mut chunk).map_err(text)? {
            0 => break,
            count => bytes.extend_from_slice(&chunk[..count]),
        }
        if bytes.len() as u64 > LONGEST {
            return Err(format!("an answer of more than {LONGEST} bytes"));
        }
    }
    let answer = String::from_utf8(bytes).map_err(|_| "an answer that isn't text".to_owned())?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("no HTTP answer")?;
    // What tells the metadata server from a captive portal or proxy.
    if !head.lines().any(|line| line.to_ascii_lowercase().replace(' ', "") == "metadata-flavor:google") {
        return Err("the answer has no Metadata-Flavor: Google".to_owned());
    }
    match head.split_whitespace().nth(1) {
        Some("200") => Ok(Some(body.to_owned())),
        Some("404") => Ok(None),
        status => Err(format!("HTTP status {}", status.unwrap_or("missing"))),
    }
}

/// A resolver may take longer than there is time; then it is left to itself.
fn resolved(target: String, limit: Duration) -> Result<SocketAddr, String> {
    let (tell, told) = mpsc::channel();
    let resolve = move || tell.send(target.to_socket_addrs().map(|mut all| all.next()));
    std::thread::Builder::new().name("podring-resolve".into()).spawn(resolve).map_err(|error| error.to_string())?;
    match told.recv_timeout(limit) {
        Ok(Ok(address)) => address.ok_or_else(|| "its name has no address".to_owned()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("its name wasn't resolved in time".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;
    use crate::environment::Launch;

    /// Answers each attribute by `answer`; `None` is a 404.
    fn fake(flavor: &'static str, answer: fn(&str) -> Option<&'static str>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut request = Vec::new();
                let mut byte = [0];
                while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
                    request.push(byte[0]);
                }
                let request = String::from_utf8(request).unwrap();
                assert!(request.contains("\r\nMetadata-Flavor: Google\r\n"), "{request}");
                let path = request.split_whitespace().nth(1).unwrap();
                let (status, body) = match answer(path.rsplit('/').next().unwrap()) {
                    Some(body) => ("200 OK", body),
                    None => ("404 Not Found", ""),
                };
                let _ = write!(stream, "HTTP/1.0 {status}\r\n{flavor}\r\n\r\n{body}");
            }
        });
        host
    }

    #[test]
    fn its_attributes_are_variables_of_the_least_weight() {
        let host = fake("Metadata-Flavor: Google", |attribute| match attribute {
            "agent-worker-number" => Some("1\n"),
            "worker-network-endpoints" => Some("abc:8470:10.0.0.2,def:8470:10.0.0.3"),
            _ => None,
        });
        let found = ask(&host, Duration::from_secs(5)).unwrap();
        assert_eq!(found["worker-network-endpoints"], "10.0.0.2,10.0.0.3");
        assert!(!found.contains_key("accelerator-type"));
        // As a process reads it.
        let read = |pairs: &[(&str, &str)]| {
            let asked = [("PODRING_METADATA", "1"), ("GCE_METADATA_HOST", host.as_str())];
            let all = [&asked[..], pairs].concat();
            let lookup = |name: &str| all.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            Launch::read(beside(lookup)?)
        };
        let launch = read(&[]).unwrap();
        let rank = launch.rank.unwrap();
        assert_eq!((rank.value, launch.world_size.unwrap().value), (1, 2));
        assert_eq!(rank.by, "agent-worker-number, worker-network-endpoints");
        // A variable goes before it, and what the two say of one thing must agree or is noted.
        let launch = read(&[("TPU_WORKER_ID", "0")]).unwrap();
        assert_eq!(launch.rank.unwrap().value, 0);
        assert_eq!(launch.notes[0].other, "agent-worker-number");
        let error = read(&[("TPU_WORKER_HOSTNAMES", "a,b,c")]).unwrap_err().to_string();
        assert!(error.contains("TPU_WORKER_HOSTNAMES") && error.contains("worker-network-endpoints"), "{error}");
        let launch = read(&[("RANK", "1"), ("WORLD_SIZE", "2")]).unwrap();
        assert_eq!(launch.rank.unwrap().by, "RANK");
    }

    #[test]
    fn it_is_asked_only_when_wanted() {
        let asked = |pairs: &[(&str, &str)]| {
            wanted(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
        };
        let (on, other) = (("PODRING_METADATA", "1"), ("GCE_METADATA_HOST", "fake:80"));
        assert_eq!(asked(&[]), Ok(None));
        assert_eq!(asked(&[other]), Ok(None));
        assert_eq!(asked(&[("PODRING_METADATA", "0"), other]), Ok(None));
        assert_eq!(asked(&[on]), Ok(Some(HOST.to_owned())));
        assert_eq!(asked(&[on, other, ("TPU_WORKER_ID", "0")]), Ok(Some("fake:80".to_owned())));
        assert_eq!(asked(&[on, ("TPU_WORKER_ID", "0"), ("TPU_WORKER_HOSTNAMES", "a")]), Ok(None));
        let error = asked(&[("PODRING_METADATA", "yes")]).unwrap_err().to_string();
        assert!(error.contains("PODRING_METADATA=\"yes\": expected 0 or 1"), "{error}");
        let nobody = beside(|name| match name {
            "PODRING_METADATA" => Some("1".to_owned()),
            "GCE_METADATA_HOST" => Some("127.0.0.1:1".to_owned()),
            _ => None,
        });
        let error = nobody.err().unwrap().to_string();
        assert!(error.contains("127.0.0.1:1") && error.ends_with("because of PODRING_METADATA"), "{error}");
    }

    #[test]
    fn others_are_told_apart_and_silence_ends() {
        let host = fake("Server: portal", |_| Some("hello"));
        assert!(ask(&host, Duration::from_secs(5)).unwrap_err().why.contains("Metadata-Flavor"));
        let host = fake("metadata-flavor: google", |attribute| (attribute != "accelerator-type").then_some("x"));
        assert!(ask(&host, Duration::from_secs(5)).unwrap_err().why.contains("uid:port:address"));
        let mute = TcpListener::bind("127.0.0.1:0").unwrap();
        let began = Instant::now();
        let error = ask(&mute.local_addr().unwrap().to_string(), Duration::from_millis(200)).unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(5), "{error}");
    }
}
