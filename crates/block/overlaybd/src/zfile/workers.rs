//! The threads that compress: jobs go out through one queue, results come back in order.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use zerocopy::little_endian::U32;

use super::codec::{CRC, Compressor, block_crc};
use super::write::ZFileOptions;
use crate::source::Source;

/// Jobs that wait for each thread, so that it need not wait for the next.
const QUEUED: usize = 2;

/// Jobs taken and not given back, at most, for each thread. Far more than are queued, so that the caller compresses another
/// one rather than wait for a certain one.
const TAKEN: usize = 8;

/// Input read at once, so small that it is still in the nearest cache when it is compressed.
const PIECE: usize = 32 << 10;

/// Input for a worker and room for what it makes of it. Used again and again: fresh memory of this size costs as much as
/// compressing it with lz4.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// What to compress, unless there is something below. Kept for its memory.
    pub(super) input: Vec<u8>,
    /// What to compress instead.
    pub(super) instead: Option<Input>,
    pub(super) output: Output,
}

/// Input that the caller did not copy.
#[derive(Debug)]
pub(super) enum Input {
    /// Memory that is shared.
    Shared(bytes::Bytes),
    /// Bytes that are yet to be read.
    Source(Arc<dyn Source>, Range<u64>),
}

/// Encoded blocks, one after the other.
#[derive(Debug, Default)]
pub(super) struct Output {
    bytes: Vec<u8>,
    end: usize,
    /// The length of each.
    pub(super) lengths: Vec<U32>,
}

impl Output {
    /// Forgets what is there and makes sure of `room` bytes.
    fn begin(&mut self, room: usize) {
        if self.bytes.len() < room {
            self.bytes.resize(room, 0);
        }
        self.end = 0;
        self.lengths.clear();
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.end]
    }
}

type Job = (Work, SyncSender<io::Result<Work>>);

/// A job that was taken.
enum Taken {
    Done(Work),
    UnderWay(Receiver<io::Result<Work>>),
}

/// The compressing threads, and the caller's, which compresses when the others have enough to do. They end when this is
/// dropped.
pub(super) struct Workers {
    own: Encoder,
    jobs: Option<SyncSender<Job>>,
    threads: Vec<JoinHandle<()>>,
    /// Oldest first.
    taken: VecDeque<Taken>,
}

impl Workers {
    /// Starts as many threads as `options` say, less the caller's.
    pub(super) fn start(options: ZFileOptions) -> io::Result<Self> {
        let others = options.threads.saturating_sub(1);
        let (jobs, queue) = sync_channel::<Job>(QUEUED * others);
        let queue = Arc::new(Mutex::new(queue));
        let mut workers = Self {
            own: Encoder::new(options)?,
            jobs: (others > 0).then_some(jobs),
            threads: Vec::new(),
            taken: VecDeque::new(),
        };
        for _ in 0..others {
            let queue = Arc::clone(&queue);
            let mut encoder = Encoder::new(options)?;
            workers.threads.push(thread::Builder::new().name("zfile".to_owned()).spawn(move || {
                loop {
                    let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((mut work, result)) = job else { return };
                    let encoded = encoder.encode(&mut work);
                    let _ = result.send(encoded.map(|()| work)); // the writer may be gone
                }
            })?);
        }
        Ok(workers)
    }

    /// Takes a job, and gives back the oldest result if there are enough jobs under way.
    pub(super) fn submit(&mut self, work: Work) -> io::Result<Option<Work>> {
        let (result, receiver) = sync_channel(1);
        let refused = match &self.jobs {
            None => Some(work),
            Some(jobs) => match jobs.try_send((work, result)) {
                Ok(()) => None,
                Err(TrySendError::Full((work, _))) => Some(work),
                Err(TrySendError::Disconnected(_)) => {
                    return Err(io::Error::other("the compressing threads have ended"));
                }
            },
        };
        self.taken.push_back(match refused {
            None => Taken::UnderWay(receiver),
            Some(mut work) => {
                self.own.encode(&mut work)?;
                Taken::Done(work)
            }
        });
        if self.taken.len() > TAKEN * self.threads.len() { self.next() } else { Ok(None) }
    }

    /// The oldest result; none if nothing is under way.
    pub(super) fn next(&mut self) -> io::Result<Option<Work>> {
        match self.taken.pop_front() {
            None => Ok(None),
            Some(Taken::Done(work)) => Ok(Some(work)),
            Some(Taken::UnderWay(result)) => {
                result.recv().map_err(|_| io::Error::other("a compressing thread has ended"))?.map(Some)
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        drop(self.jobs.take()); // the threads' queue ends
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // a panic was seen as a missing result
        }
    }
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} jobs on {} threads", self.taken.len(), self.threads.len() + 1)
    }
}

/// What compresses, and its memory.
struct Encoder {
    options: ZFileOptions,
    compressor: Compressor,
    /// Input that was just read.
    piece: Vec<u8>,
}

impl Encoder {
    fn new(options: ZFileOptions) -> io::Result<Self> {
        Ok(Self { options, compressor: Compressor::new(options.algorithm)?, piece: Vec::new() })
    }

    /// Does one job.
    fn encode(&mut self, work: &mut Work) -> io::Result<()> {
        let (block_size, room) = (self.options.block_size.get(), self.options.block_size.room() + CRC);
        let Work { input, instead, output } = work;
        let length = match instead {
            None => input.len(),
            Some(Input::Shared(bytes)) => bytes.len(),
            Some(Input::Source(_, range)) => (range.end - range.start) as usize,
        };
        output.begin(length.div_ceil(block_size) * room);
        let (source, range) = match instead.take() {
            None => return self.encode_blocks(input, output),
            Some(Input::Shared(bytes)) => return self.encode_blocks(&bytes, output),
            Some(Input::Source(source, range)) => (source, range),
        };
        let mut piece = std::mem::take(&mut self.piece);
        piece.resize(PIECE.max(block_size), 0);
        for offset in range.clone().step_by(piece.len()) {
            let part = &mut piece[..(range.end - offset).min(PIECE.max(block_size) as u64) as usize];
            source.read_at(offset, part).map_err(|error| {
                let (length, name) = (part.len(), source.name());
                io::Error::new(error.kind(), format!("read {length} bytes at byte {offset} of {name}: {error}"))
            })?;
            self.encode_blocks(part, output)?;
        }
        self.piece = piece;
        Ok(())
    }

    fn encode_blocks(&mut self, input: &[u8], output: &mut Output) -> io::Result<()> {
        for block in input.chunks(self.options.block_size.get()) {
            let out = &mut output.bytes[output.end..];
            let mut length = self.compressor.compress(block, out)?;
            if self.options.verify {
                let crc = block_crc(&out[..length]);
                out[length..length + CRC].copy_from_slice(&crc.to_le_bytes());
                length += CRC;
            }
            output.lengths.push(U32::new(length as u32));
            output.end += length;
        }
        Ok(())
    }
}
