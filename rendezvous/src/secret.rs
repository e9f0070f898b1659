//! What proves that a peer belongs to the job: a token, certificates.

use std::fmt;
use std::path::{Path, PathBuf};

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use subtle::ConstantTimeEq as _;
use tonic::metadata::{Ascii, MetadataValue};

/// A credential that can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {path:?}: {why}")]
pub struct BadCredential {
    /// Which one, e.g. `token file`.
    pub what: &'static str,
    /// Its path, empty for one that was given as text.
    pub path: PathBuf,
    /// What is wrong.
    pub why: String,
}

/// The job's token. Never shown.
#[derive(Clone)]
pub struct Token(MetadataValue<Ascii>);

impl Token {
    /// At least 16 and at most 4096 visible ASCII characters; white space around them is dropped.
    pub fn new(text: &str) -> Result<Self, BadCredential> {
        let bad = |why: String| BadCredential { what: "token", path: PathBuf::new(), why };
        let text = text.trim();
        if !(16..=4096).contains(&text.len()) {
            return Err(bad(format!("expected 16 to 4096 characters, got {}", text.len())));
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(bad("expected visible ASCII characters".to_owned()));
        }
        let mut value: MetadataValue<Ascii> = format!("Bearer {text}").parse().map_err(|_| bad("unusable".into()))?;
        value.set_sensitive(true);
        Ok(Token(value))
    }

    /// From a file that holds the token and nothing else.
    pub fn from_file(path: &Path) -> Result<Self, BadCredential> {
        let bad = |why: String| BadCredential { what: "token file", path: path.to_owned(), why };
        let text = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
        Token::new(&text).map_err(|error| bad(error.why))
    }

    /// 256 random bits.
    pub fn fresh() -> Result<Self, BadCredential> {
        let mut bytes = [0; 32];
        let bad = |error: getrandom::Error| BadCredential {
            what: "token",
            path: PathBuf::new(),
            why: format!("no randomness: {error}"),
        };
        getrandom::fill(&mut bytes).map_err(bad)?;
        Token::new(&bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    }

    /// The token itself, to be handed to those who may have it.
    pub fn reveal(&self) -> String {
        String::from_utf8_lossy(&self.0.as_bytes()["Bearer ".len()..]).into_owned()
    }

    /// Another secret, which tells nothing of the token: HMAC-SHA256 of `label` under the token (RFC 2104).
    pub fn derive(&self, label: &str) -> [u8; 32] {
        // HMAC takes keys of any length.
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(self.reveal().as_bytes()) else { unreachable!() };
        mac.update(label.as_bytes());
        mac.finalize().into_bytes().into()
    }

    pub(crate) fn header(&self) -> MetadataValue<Ascii> {
        self.0.clone()
    }

    /// The token as it is. In a time that tells nothing but the length.
    pub(crate) fn is(&self, token: &[u8]) -> bool {
        self.0.as_bytes()["Bearer ".len()..].ct_eq(token).into()
    }

    /// As a header. In a time that tells nothing but the length.
    pub(crate) fn matches(&self, header: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(header).into()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Certificates by path, PEM. Both sides show one and check the other's against `ca`.
#[derive(Clone, Debug)]
pub struct Tls {
    /// Whom to trust.
    pub ca: PathBuf,
    /// This side's certificate chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// The same, read.
pub(crate) struct Pem {
    pub(crate) ca: Vec<u8>,
    pub(crate) cert: Vec<u8>,
    pub(crate) key: Vec<u8>,
}

impl Tls {
    pub(crate) fn read(&self) -> Result<Pem, BadCredential> {
        let read = |what, path: &PathBuf, mark: &str| {
            let bad = |why: String| BadCredential { what, path: path.clone(), why };
            let bytes = std::fs::read(path).map_err(|error| bad(error.to_string()))?;
            if !String::from_utf8_lossy(&bytes).contains(mark) {
                return Err(bad(format!("no PEM block with {mark:?}")));
            }
            Ok(bytes)
        };
        Ok(Pem {
            ca: read("CA certificate", &self.ca, "CERTIFICATE-----")?,
            cert: read("certificate", &self.cert, "CERTIFICATE-----")?,
            key: read("private key", &self.key, "PRIVATE KEY-----")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens() {
        let token = Token::new("  0123456789abcdef\n").unwrap();
        assert_eq!(token.reveal(), "0123456789abcdef");
        assert!(token.matches(b"Bearer 0123456789abcdef") && token.is(b"0123456789abcdef"));
        assert!(!token.is(b"0123456789abcdeF") && !token.is(b"") && !token.is(b"Bearer 0123456789abcdef"));
        for wrong in [&b"Bearer 0123456789abcdeF"[..], b"0123456789abcdef", b"", b"Bearer 0123456789abcdef0"] {
            assert!(!token.matches(wrong));
        }
        // HMAC-SHA256, as `openssl dgst -sha256 -hmac 0123456789abcdef` has it.
        let hex: String = token.derive("podring fabric").iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "a99d45328afc078dd5bc5698366d1e88872574960632f877d52597b5ea142985");
        assert_eq!(format!("{token:?}"), "Token(..)");
        assert_ne!(Token::fresh().unwrap().reveal(), Token::fresh().unwrap().reveal());
        for bad in ["short", "0123456789 abcdef", "0123456789abcdé0", ""] {
            assert!(Token::new(bad).is_err(), "{bad}");
        }
        let error = Token::from_file(Path::new("/nonexistent/token")).unwrap_err();
        assert_eq!((error.what, error.path.as_path()), ("token file", Path::new("/nonexistent/token")));
    }
}
