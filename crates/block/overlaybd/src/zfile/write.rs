//! Writing a ZFile: compression on several threads, output in order.

use std::io::{self, Seek, SeekFrom, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use aenv_model::Bytes;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use super::codec::{Algorithm, BlockSize, CRC, Compressor, block_crc, raw_crc};
use super::header::{BLOCK, Kind, ZFileInfo, to_block};

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
    /// Input that does not fill a job yet.
    pending: Vec<u8>,
    original_size: u64,
    /// Encoded lengths so far.
    jump: Vec<U32>,
    /// Where the next block goes.
    position: u64,
    workers: Workers,
}

/// Encoded blocks, in one buffer, and the length of each.
#[derive(Debug, Default)]
struct Encoded {
    bytes: Vec<u8>,
    lengths: Vec<U32>,
}

impl<W: Write> ZFileWriter<W> {
    /// Begins a file at the current end of `out`, which should be its start.
    pub fn new(mut out: W, options: ZFileOptions) -> io::Result<Self> {
        let workers = Workers::start(options)?;
        out.write_all(&to_block(Kind::ProvisionalHeader, &info(options, 0, 0, 0), 0))?;
        let pending = Vec::with_capacity(JOB);
        Ok(Self { out, options, pending, original_size: 0, jump: Vec::new(), position: BLOCK, workers })
    }

    /// Writes what is left, the jump table and the trailer. Gives back the output; nothing was synced.
    pub fn finish(mut self) -> io::Result<(W, ZFileSummary)> {
        let (summary, _) = self.end()?;
        self.out.flush()?;
        Ok((self.out, summary))
    }

    /// Hands full jobs over and writes what is ready; waits while the workers have enough to do.
    fn submit(&mut self) -> io::Result<()> {
        let input = std::mem::replace(&mut self.pending, Vec::with_capacity(JOB));
        if let Some(encoded) = self.workers.submit(input)? {
            self.append(encoded)?;
        }
        Ok(())
    }

    fn append(&mut self, encoded: Encoded) -> io::Result<()> {
        self.out.write_all(&encoded.bytes)?;
        self.position += encoded.bytes.len() as u64;
        self.jump.extend_from_slice(&encoded.lengths);
        Ok(())
    }

    /// All but the header. Also gives the check sum of the jump table.
    fn end(&mut self) -> io::Result<(ZFileSummary, u32)> {
        if !self.pending.is_empty() {
            self.submit()?;
        }
        while let Some(encoded) = self.workers.next()? {
            self.append(encoded)?;
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
        let now = buf.len().min(JOB - self.pending.len());
        self.pending.extend_from_slice(&buf[..now]);
        self.original_size += now as u64;
        if self.pending.len() == JOB {
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

/// Compresses the blocks of one job.
fn encode(compressor: &mut Compressor, options: ZFileOptions, input: &[u8]) -> io::Result<Encoded> {
    let (block_size, room) = (options.block_size.get(), options.block_size.room() + CRC);
    let mut encoded = Encoded {
        bytes: vec![0; input.len().div_ceil(block_size) * room],
        lengths: Vec::with_capacity(input.len().div_ceil(block_size)),
    };
    let mut end = 0;
    for block in input.chunks(block_size) {
        let out = &mut encoded.bytes[end..];
        let mut length = compressor.compress(block, out)?;
        if options.verify {
            let crc = block_crc(&out[..length]);
            out[length..length + CRC].copy_from_slice(&crc.to_le_bytes());
            length += CRC;
        }
        encoded.lengths.push(U32::new(length as u32));
        end += length;
    }
    encoded.bytes.truncate(end);
    Ok(encoded)
}

/// The compressing threads. They end when this is dropped.
enum Workers {
    /// No threads: jobs are done when they are submitted.
    Here(Box<Compressor>, ZFileOptions),
    /// Jobs go out through one queue; each brings back its result through a channel of its own, kept in order.
    Threads {
        jobs: Option<SyncSender<Job>>,
        running: std::collections::VecDeque<Receiver<io::Result<Encoded>>>,
        threads: Vec<JoinHandle<()>>,
    },
}

type Job = (Vec<u8>, SyncSender<io::Result<Encoded>>);

impl Workers {
    fn start(options: ZFileOptions) -> io::Result<Self> {
        if options.threads <= 1 {
            return Ok(Self::Here(Box::new(Compressor::new(options.algorithm)?), options));
        }
        let (jobs, queue) = sync_channel::<Job>(options.threads);
        let queue = Arc::new(Mutex::new(queue));
        let mut threads = Vec::new();
        for _ in 0..options.threads {
            let queue = Arc::clone(&queue);
            let mut compressor = Compressor::new(options.algorithm)?;
            threads.push(thread::Builder::new().name("zfile".to_owned()).spawn(move || {
                loop {
                    let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((input, result)) = job else { return };
                    let _ = result.send(encode(&mut compressor, options, &input)); // the writer may be gone
                }
            })?);
        }
        Ok(Self::Threads { jobs: Some(jobs), running: std::collections::VecDeque::new(), threads })
    }

    /// Takes a job, and gives back the oldest result if there are enough jobs under way.
    fn submit(&mut self, input: Vec<u8>) -> io::Result<Option<Encoded>> {
        match self {
            Self::Here(compressor, options) => encode(compressor, *options, &input).map(Some),
            Self::Threads { jobs, running, threads } => {
                let (result, receiver) = sync_channel(1);
                let sent = jobs.as_ref().is_some_and(|jobs| jobs.send((input, result)).is_ok());
                if !sent {
                    return Err(io::Error::other("the compressing threads have ended"));
                }
                running.push_back(receiver);
                if running.len() > 2 * threads.len() { self.next() } else { Ok(None) }
            }
        }
    }

    /// The oldest result; none if nothing is under way.
    fn next(&mut self) -> io::Result<Option<Encoded>> {
        let Self::Threads { running, .. } = self else { return Ok(None) };
        let Some(oldest) = running.pop_front() else { return Ok(None) };
        oldest.recv().map_err(|_| io::Error::other("a compressing thread has ended"))?.map(Some)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if let Self::Threads { jobs, threads, .. } = self {
            drop(jobs.take()); // the threads' queue ends
            for thread in threads.drain(..) {
                let _ = thread.join(); // a panic was seen as a missing result
            }
        }
    }
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Here(..) => f.write_str("Here"),
            Self::Threads { running, threads, .. } => write!(f, "{} jobs on {} threads", running.len(), threads.len()),
        }
    }
}
