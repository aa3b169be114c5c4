//! Content digests, `ALGORITHM:HEX`.

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::Digest as _;

/// The algorithms that the OCI image specification registers and that are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Algorithm {
    Sha256,
    Sha512,
}

/// A digest whose text is known to be well-formed, so that it may name a file.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest {
    algorithm: Algorithm,
    hex: String,
}

/// A text that is no digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no sha256 or sha512 digest")]
pub struct ParseDigestError(String);

impl Digest {
    pub(crate) fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// The name of the algorithm, as in the digest's text.
    pub(crate) fn algorithm_name(&self) -> &'static str {
        match self.algorithm {
            Algorithm::Sha256 => "sha256",
            Algorithm::Sha512 => "sha512",
        }
    }

    pub(crate) fn hex(&self) -> &str {
        &self.hex
    }

    /// The SHA-256 of `data`.
    pub(crate) fn of(data: &[u8]) -> Self {
        let mut hasher = Hasher::new(Algorithm::Sha256);
        hasher.update(data);
        hasher.finish()
    }

    /// A SHA-256 that was computed elsewhere.
    pub(crate) fn from_sha256(bytes: [u8; 32]) -> Self {
        Self { algorithm: Algorithm::Sha256, hex: hex::encode(bytes) }
    }

    /// As part of a file's name: `ALGORITHM-HEX`.
    pub(crate) fn dashed(&self) -> String {
        format!("{}-{}", self.algorithm_name(), self.hex)
    }

    /// What [`Self::dashed`] made.
    pub(crate) fn from_dashed(name: &str) -> Option<Self> {
        name.replacen('-', ":", 1).parse().ok()
    }
}

impl FromStr for Digest {
    type Err = ParseDigestError;

    fn from_str(text: &str) -> Result<Self, ParseDigestError> {
        let refuse = || ParseDigestError(text.to_owned());
        let (name, hex) = text.split_once(':').ok_or_else(refuse)?;
        let (algorithm, length) = match name {
            "sha256" => (Algorithm::Sha256, 64),
            "sha512" => (Algorithm::Sha512, 128),
            _ => return Err(refuse()),
        };
        if hex.len() != length || !hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(refuse());
        }
        Ok(Self { algorithm, hex: hex.to_owned() })
    }
}

impl TryFrom<String> for Digest {
    type Error = ParseDigestError;

    fn try_from(text: String) -> Result<Self, ParseDigestError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm_name(), self.hex)
    }
}

/// A digest in the making.
pub(crate) enum Hasher {
    Sha256(sha2::Sha256),
    Sha512(sha2::Sha512),
}

impl Hasher {
    pub(crate) fn new(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::Sha256 => Self::Sha256(sha2::Sha256::new()),
            Algorithm::Sha512 => Self::Sha512(sha2::Sha512::new()),
        }
    }

    pub(crate) fn update(&mut self, data: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(data),
            Self::Sha512(hasher) => hasher.update(data),
        }
    }

    pub(crate) fn finish(self) -> Digest {
        match self {
            Self::Sha256(hasher) => Digest { algorithm: Algorithm::Sha256, hex: hex::encode(hasher.finalize()) },
            Self::Sha512(hasher) => Digest { algorithm: Algorithm::Sha512, hex: hex::encode(hasher.finalize()) },
        }
    }
}

/// A reader that digests what passes through it.
pub(crate) struct Digesting<R> {
    input: R,
    hasher: Hasher,
}

impl<R> Digesting<R> {
    pub(crate) fn new(input: R, algorithm: Algorithm) -> Self {
        Self { input, hasher: Hasher::new(algorithm) }
    }

    pub(crate) fn finish(self) -> Digest {
        self.hasher.finish()
    }
}

impl<R: Read> Read for Digesting<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.input.read(buffer)?;
        self.hasher.update(&buffer[..n]);
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_that_could_name_another_file_is_refused() {
        let good = format!("sha256:{}", "a".repeat(64));
        assert_eq!(good.parse::<Digest>().unwrap().to_string(), good);
        for text in ["", "sha256:", "sha256:../../etc", "md5:00", &good.to_uppercase(), &good[1..], &format!("{good}0")]
        {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_digest_is_told_from_the_name_of_its_file() {
        let digest = Digest::of(b"x");
        assert_eq!(Digest::from_dashed(&digest.dashed()), Some(digest));
        assert_eq!(Digest::from_dashed("sha256-zz"), None);
    }
}
