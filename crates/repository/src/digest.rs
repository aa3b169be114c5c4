//! SHA-256 digests of files.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::str::FromStr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aenv_block_overlaybd::Algorithm;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// `sha256:` and 64 hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

/// A text that is no digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no sha256 digest")]
pub struct ParseDigestError(String);

const PREFIX: &str = "sha256:";

impl Digest {
    /// The digest of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self::finish(Sha256::new_with_prefix(bytes))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The digits alone.
    #[must_use]
    pub fn hex(&self) -> &str {
        &self.0[PREFIX.len()..]
    }

    pub(crate) fn finish(hasher: Sha256) -> Self {
        Self(format!("{PREFIX}{}", hex::encode(hasher.finalize())))
    }
}

impl FromStr for Digest {
    type Err = ParseDigestError;

    fn from_str(text: &str) -> Result<Self, ParseDigestError> {
        let digits = text.strip_prefix(PREFIX).filter(|digits| digits.len() == 64);
        match digits.is_some_and(|digits| digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))) {
            true => Ok(Self(text.to_owned())),
            false => Err(ParseDigestError(text.to_owned())),
        }
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
        digest.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Digests that were computed: layers that many snapshots share are hashed once a process.
#[derive(Debug, Default)]
pub(crate) struct KnownDigests(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    plain: HashMap<Identity, Digest>,
    packed: HashMap<(Identity, Algorithm), PackedAs>,
}

/// Digest and length of what is published of a layer, and whether that is compressed here.
pub(crate) type PackedAs = (Digest, u64, bool);

/// Files remembered: some hundred bytes each. Beyond, all are forgotten and hashed again.
const MOST_KNOWN: usize = 50_000;

/// A file that has not been changed has the same. Links to it do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
    length: u64,
    modified: (i64, i64),
}

impl KnownDigests {
    /// What tells a file from others, and from what it was before.
    pub(crate) fn identity(&self, path: &Path) -> io::Result<Identity> {
        let metadata = std::fs::metadata(path)?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        Ok(Identity {
            device: metadata.dev(),
            inode: metadata.ino(),
            length: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        })
    }

    /// What became of a layer when it was packed.
    pub(crate) fn packed(&self, identity: &Identity, algorithm: Algorithm) -> Option<PackedAs> {
        self.lock().packed.get(&(identity.clone(), algorithm)).cloned()
    }

    pub(crate) fn remember_packed(&self, identity: Identity, algorithm: Algorithm, packed: PackedAs) {
        let mut known = self.lock();
        if known.packed.len() >= MOST_KNOWN {
            known.packed.clear();
        }
        known.packed.insert((identity, algorithm), packed);
    }

    /// Digest and length of a file that does not change meanwhile. Blocking.
    pub(crate) fn of_file(&self, path: &Path) -> io::Result<(Digest, u64)> {
        let identity = self.identity(path)?;
        if let Some(known) = self.lock().plain.get(&identity) {
            return Ok((known.clone(), identity.length));
        }
        let mut file = File::open(path)?;
        let (mut hasher, mut buffer, mut length) = (Sha256::new(), vec![0; 1 << 20], 0);
        loop {
            let read = match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            hasher.update(&buffer[..read]);
            length += read as u64;
        }
        if length != identity.length {
            return Err(io::Error::other("it changes while it is read"));
        }
        let digest = Digest::finish(hasher);
        let mut known = self.lock();
        if known.plain.len() >= MOST_KNOWN {
            known.plain.clear();
        }
        known.plain.insert(identity, digest.clone());
        Ok((digest, length))
    }

    /// Map operations only happen under it, so the map is valid after any panic.
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_has_one_spelling() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").as_str(), empty);
        assert_eq!(empty.parse(), Ok(Digest::of(b"")));
        for bad in ["", "sha256:", &empty.to_uppercase(), &empty[7..], &format!("{empty}0"), "sha256:../../x"] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_file_that_was_replaced_is_hashed_again() {
        let dir = tempfile::tempdir().unwrap();
        let (path, known) = (dir.path().join("file"), KnownDigests::default());
        for content in ["one", "two!", "three"] {
            aenv_durable::atomic_write(&path, content.as_bytes(), 0o600).unwrap();
            let expected = (Digest::of(content.as_bytes()), content.len() as u64);
            assert_eq!(known.of_file(&path).unwrap(), expected);
            assert_eq!(known.of_file(&path).unwrap(), expected);
        }
    }
}
