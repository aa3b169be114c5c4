//! SHA-256 as the text that records carry.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::KitError;

/// Lower-case hex of the digest of `bytes`.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Lower-case hex of the digest of a file.
pub(crate) fn sha256_file(path: &Path) -> Result<String, KitError> {
    let digest = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; 1 << 18];
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(hex::encode(hasher.finalize())),
                n => hasher.update(&buffer[..n]),
            }
        }
    };
    digest().map_err(KitError::io("read", path))
}
