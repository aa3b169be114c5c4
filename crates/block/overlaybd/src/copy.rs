//! All bytes of a source, from front to back: copied, hashed, checked.

use std::io::{self, Write};
use std::sync::Arc;

use aenv_model::Bytes;
use sha2::{Digest, Sha256};

use crate::layer::{Layer, OpenLayerError};
use crate::source::Source;

/// Bytes read at once.
const STEP: u64 = 1 << 20;

/// Why a source could not be copied, hashed or checked.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// It could not be read.
    #[error("read {length} bytes at byte {offset} of {file}")]
    Read {
        /// Which file.
        file: String,
        /// Where, within the payload.
        offset: u64,
        /// How much.
        length: u64,
        /// Why.
        source: io::Error,
    },
    /// The output took no more.
    #[error("write a copy of {file}")]
    Write {
        /// What was copied.
        file: String,
        /// Why.
        source: io::Error,
    },
    /// The caller did not want to go on.
    #[error("given up after {0} bytes")]
    GivenUp(u64),
}

/// Writes all of `source` to `out`. `proceed` is told the bytes written so far; if it says no, the rest is not written. To
/// compress it, [`ZFileWriter::write_source`](crate::ZFileWriter::write_source) is quicker.
pub fn copy(source: &dyn Source, out: &mut dyn Write, proceed: &mut dyn FnMut(u64) -> bool) -> Result<(), CopyError> {
    let (size, file) = (source.size(), || source.name().to_owned());
    let mut buf = vec![0; STEP.min(size) as usize];
    let mut offset = 0;
    while offset < size {
        let length = STEP.min(size - offset);
        let part = &mut buf[..length as usize];
        source.read_at(offset, part).map_err(|source| CopyError::Read { file: file(), offset, length, source })?;
        out.write_all(part).map_err(|source| CopyError::Write { file: file(), source })?;
        offset += length;
        if !proceed(offset) {
            return Err(CopyError::GivenUp(offset));
        }
    }
    Ok(())
}

/// The SHA-256 of all of `source`. Meant for a thread of its own: sealing does not wait for it.
pub fn digest(source: &dyn Source, proceed: &mut dyn FnMut(u64) -> bool) -> Result<[u8; 32], CopyError> {
    let mut hashing = Sha256Writer::new(io::sink());
    copy(source, &mut hashing, proceed)?;
    Ok(hashing.finish().1)
}

/// Hashes and counts what passes through.
#[derive(Debug)]
pub struct Sha256Writer<W> {
    out: W,
    hash: Sha256,
    size: u64,
}

impl<W: Write> Sha256Writer<W> {
    /// Passes everything on to `out`.
    pub fn new(out: W) -> Self {
        Self { out, hash: Sha256::new(), size: 0 }
    }

    /// The output, the digest of what went into it, and how much that was.
    pub fn finish(self) -> (W, [u8; 32], Bytes) {
        (self.out, self.hash.finalize().into(), Bytes(self.size))
    }
}

impl<W: Write> Write for Sha256Writer<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let written = self.out.write(buf)?;
        self.hash.update(&buf[..written]);
        self.size += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Why a layer is not sound.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// It does not open.
    #[error(transparent)]
    Open(#[from] OpenLayerError),
    /// It opens, but not all of it can be read.
    #[error(transparent)]
    Read(#[from] CopyError),
}

/// Opens a layer and reads all of it, which checks every check sum there is. LSMT data has none of its own: whether it is
/// what it was, only the digest of the file tells.
pub fn verify(source: Arc<dyn Source>, proceed: &mut dyn FnMut(u64) -> bool) -> Result<Layer, VerifyError> {
    let layer = Layer::open(source)?;
    copy(&**layer.payload(), &mut io::sink(), proceed)?;
    Ok(layer)
}
