//! The GCE metadata server, for Cloud TPU VMs whose launcher sets no variables.
//!
//! Asked only when wanted: elsewhere its name doesn't resolve, and finding that out takes time. What it says has less
//! weight than any variable.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

/// Where it is unless the variable `GCE_METADATA_HOST` says otherwise.
pub const HOST: &str = "metadata.google.internal";

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

/// The instance attributes that Cloud TPU sets, and the variables they stand for.
const ATTRIBUTES: [(&str, &str); 3] = [
    ("agent-worker-number", "TPU_WORKER_ID"),
    ("accelerator-type", "TPU_ACCELERATOR_TYPE"),
    ("worker-network-endpoints", "TPU_WORKER_HOSTNAMES"),
];

/// Asks `host` (a name, optionally with a port). The answer is by variable; an attribute that isn't there is left out.
pub fn ask(host: &str, limit: Duration) -> Result<BTreeMap<&'static str, String>, MetadataError> {
    let deadline = Instant::now() + limit;
    let mut found = BTreeMap::new();
    for (attribute, variable) in ATTRIBUTES {
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
        found.insert(variable, value);
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
    let address = target.to_socket_addrs().map_err(text)?.next().ok_or("no address")?;
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
        assert_eq!(found["TPU_WORKER_HOSTNAMES"], "10.0.0.2,10.0.0.3");
        assert!(!found.contains_key("TPU_ACCELERATOR_TYPE"));
        let launch = Launch::read(|name| found.get(name).cloned()).unwrap();
        assert_eq!((launch.rank.unwrap().value, launch.world_size.unwrap().value), (1, 2));
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
