//! Bytes of a local file.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Take};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use crate::digest::{Digest, Digesting};

/// A stretch of a file: a blob on its own, or a member of an uncompressed archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Slice {
    path: PathBuf,
    offset: u64,
    length: u64,
}

impl Slice {
    /// A whole file. Errors as `stat` does, and `InvalidInput` for anything that is no regular file.
    pub(crate) fn whole(path: &Path) -> io::Result<Self> {
        let meta = std::fs::metadata(path)?;
        if !meta.is_file() {
            let kind = if meta.file_type().is_fifo() { "a fifo" } else { "not a regular file" };
            return Err(io::Error::new(io::ErrorKind::InvalidInput, kind));
        }
        Ok(Self { path: path.to_owned(), offset: 0, length: meta.len() })
    }

    pub(crate) fn part(path: &Path, offset: u64, length: u64) -> Self {
        Self { path: path.to_owned(), offset, length }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    pub(crate) fn open(&self) -> io::Result<BufReader<Take<File>>> {
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.offset))?;
        Ok(BufReader::with_capacity(128 << 10, file.take(self.length)))
    }

    /// Whether it is all of its file.
    pub(crate) fn is_whole(&self) -> io::Result<bool> {
        Ok(self.offset == 0 && std::fs::metadata(&self.path)?.len() == self.length)
    }

    /// Writes all bytes to `out`. `pass` is asked before each piece.
    pub(crate) fn copy(&self, out: &mut impl io::Write, mut pass: impl FnMut() -> io::Result<()>) -> io::Result<()> {
        let mut input = self.open()?;
        let mut buffer = vec![0; 128 << 10];
        loop {
            pass()?;
            match input.read(&mut buffer)? {
                0 => return Ok(()),
                n => out.write_all(&buffer[..n])?,
            }
        }
    }

    /// All bytes, which must be at most `limit`.
    pub(crate) fn read(&self, limit: u64) -> io::Result<Vec<u8>> {
        if self.length > limit {
            let problem = format!("{} bytes long, more than {limit}", self.length);
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        }
        let mut data = Vec::new();
        self.open()?.read_to_end(&mut data)?;
        Ok(data)
    }

    /// The digest of the bytes, by the algorithm of `like`. `pass` is asked before each piece.
    pub(crate) fn digest(&self, like: &Digest, mut pass: impl FnMut() -> io::Result<()>) -> io::Result<Digest> {
        let mut reader = Digesting::new(self.open()?, like.algorithm());
        let mut buffer = vec![0; 128 << 10];
        loop {
            pass()?;
            if reader.read(&mut buffer)? == 0 {
                return Ok(reader.finish());
            }
        }
    }
}
