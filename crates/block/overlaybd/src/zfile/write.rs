//! Writing a ZFile: compression on several threads, output in order.

use std::io::{self, Seek, SeekFrom, Write};
use std::sync::Arc;
use std::thread;

use aenv_model::Bytes;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use super::codec::{Algorithm, BlockSize, raw_crc};
use super::header::{BLOCK, Kind, ZFileInfo, to_block};
use super::workers::{Input, Work, Workers};
use crate::source::Source;

/// Uncompressed bytes a worker takes at once: large enough that handing them over costs nothing.
const JOB: usize = 256 << 10;

/// How a ZFile is to be made.
#[derive(Debug, Clone, Copy)]
pub struct ZFileOptions {
    /// The compressor.
    pub algorithm: Algorithm,
    /// Uncompressed bytes of a block.
    pub block_size: BlockSize,
    /// Put a check sum behind every block.
    pub verify: bool,
    /// Threads that compress; 1 compresses in the caller's.
    pub threads: usize,
}

impl Default for ZFileOptions {
    /// lz4, 4 KiB, with check sums, on all cores.
    fn default() -> Self {
        Self {
            algorithm: Algorithm::Lz4,
            block_size: BlockSize::DEFAULT,
            verify: true,
            threads: thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// What was written.
#[derive(Debug, Clone, Copy)]
pub struct ZFileSummary {
    /// How it was made.
    pub info: ZFileInfo,
    /// Size of the ZFile.
    pub size: Bytes,
}

/// Compresses what is written to it. Dropped without [`finish`](Self::finish), the file is not a ZFile.
#[derive(Debug)]
pub struct ZFileWriter<W> {
    out: W,
    options: ZFileOptions,
    /// Holds input that does not fill a job yet.
    pending: Work,
    /// Done with, to be used again.
    spare: Vec<Work>,
    original_size: u64,
    /// Encoded lengths so far.
    jump: Vec<U32>,
    /// Where the next block goes.
    position: u64,
    workers: Workers,
}

impl<W: Write> ZFileWriter<W> {
    /// Begins a file at the current end of `out`, which should be its start.
    pub fn new(mut out: W, options: ZFileOptions) -> io::Result<Self> {
        let workers = Workers::start(options)?;
        out.write_all(&to_block(Kind::ProvisionalHeader, &info(options, 0, 0, 0), 0))?;
        let (pending, spare) = (Work::default(), Vec::new());
        Ok(Self { out, options, pending, spare, original_size: 0, jump: Vec::new(), position: BLOCK, workers })
    }

    /// Writes what is left, the jump table and the trailer. Gives back the output; nothing was synced.
    pub fn finish(mut self) -> io::Result<(W, ZFileSummary)> {
        let (summary, _) = self.end()?;
        self.out.flush()?;
        Ok((self.out, summary))
    }

    /// Writes all of `bytes`, most of them without copying them first.
    pub fn write_shared(&mut self, mut bytes: bytes::Bytes) -> io::Result<()> {
        while !bytes.is_empty() {
            if bytes.len() >= JOB && self.pending.input.is_empty() {
                self.submit_instead(Input::Shared(bytes.split_to(JOB)))?;
            } else {
                // Before the first full job, and behind the last.
                let now = bytes.len().min(JOB - self.pending.input.len());
                self.write_all(&bytes.split_to(now))?;
            }
        }
        Ok(())
    }

    /// Writes all of `source`. It is read by the threads that compress, so that no single one has to copy everything.
    /// `proceed` is told the bytes of it taken so far; if it says no, this fails with `Interrupted`.
    pub fn write_source(&mut self, source: &Arc<dyn Source>, proceed: &mut dyn FnMut(u64) -> bool) -> io::Result<()> {
        let size = source.size();
        let mut offset = 0;
        while offset < size {
            let left = size - offset;
            if left >= JOB as u64 && self.pending.input.is_empty() {
                self.submit_instead(Input::Source(Arc::clone(source), offset..offset + JOB as u64))?;
                offset += JOB as u64;
            } else {
                let mut part = vec![0; left.min((JOB - self.pending.input.len()) as u64) as usize];
                source.read_at(offset, &mut part)?;
                self.write_all(&part)?;
                offset += part.len() as u64;
            }
            if !proceed(offset) {
                return Err(io::Error::new(io::ErrorKind::Interrupted, format!("given up after {offset} bytes")));
            }
        }
        Ok(())
    }

    /// Hands over a full job that is not in `pending`.
    fn submit_instead(&mut self, input: Input) -> io::Result<()> {
        let work = Work { instead: Some(input), ..self.spare.pop().unwrap_or_default() };
        self.original_size += JOB as u64;
        match self.workers.submit(work)? {
            Some(done) => self.append(done),
            None => Ok(()),
        }
    }

    /// Hands full jobs over and writes what is ready; waits while the workers have enough to do.
    fn submit(&mut self) -> io::Result<()> {
        let mut next = self.spare.pop().unwrap_or_default();
        next.input.clear();
        let work = std::mem::replace(&mut self.pending, next);
        match self.workers.submit(work)? {
            Some(done) => self.append(done),
            None => Ok(()),
        }
    }

    fn append(&mut self, done: Work) -> io::Result<()> {
        self.out.write_all(done.output.bytes())?;
        self.position += done.output.bytes().len() as u64;
        self.jump.extend_from_slice(&done.output.lengths);
        self.spare.push(done);
        Ok(())
    }

    /// All but the header. Also gives the check sum of the jump table.
    fn end(&mut self) -> io::Result<(ZFileSummary, u32)> {
        if !self.pending.input.is_empty() {
            self.submit()?;
        }
        while let Some(done) = self.workers.next()? {
            self.append(done)?;
        }
        let table = self.jump.as_bytes();
        let index_crc = raw_crc(0, table);
        self.out.write_all(table)?;
        let info = info(self.options, self.position, self.jump.len() as u64, self.original_size);
        self.out.write_all(&to_block(Kind::Trailer, &info, index_crc))?;
        Ok((ZFileSummary { info, size: Bytes(self.position + table.len() as u64 + BLOCK) }, index_crc))
    }
}

impl<W: Write + Seek> ZFileWriter<W> {
    /// Like [`finish`](Self::finish), and puts the final values into the header, so that a reader saves the trailer.
    /// The file must begin at the start of the output.
    pub fn finish_with_header(mut self) -> io::Result<(W, ZFileSummary)> {
        let (mut summary, index_crc) = self.end()?;
        summary.info.header_overwritten = true;
        self.out.seek(SeekFrom::Start(0))?;
        self.out.write_all(&to_block(Kind::FinalHeader, &summary.info, index_crc))?;
        self.out.seek(SeekFrom::End(0))?;
        self.out.flush()?;
        Ok((self.out, summary))
    }
}

impl<W: Write> Write for ZFileWriter<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let input = &mut self.pending.input;
        input.reserve_exact(JOB - input.len());
        let now = buf.len().min(JOB - input.len());
        input.extend_from_slice(&buf[..now]);
        self.original_size += now as u64;
        if input.len() == JOB {
            self.submit()?;
        }
        Ok(now)
    }

    /// Does nothing for input that has not been compressed: a block is cut only where it is full.
    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn info(options: ZFileOptions, index_offset: u64, block_count: u64, original_size: u64) -> ZFileInfo {
    ZFileInfo {
        algorithm: options.algorithm,
        block_size: options.block_size,
        verify: options.verify,
        digest: true,
        header_overwritten: false,
        original_size: Bytes(original_size),
        block_count,
        index_offset,
    }
}
