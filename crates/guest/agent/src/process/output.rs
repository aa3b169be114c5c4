//! Reads a process's output and hands each chunk to every subscriber.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Most bytes in one event from a pipe; the protocol's limit.
const PIPE_CHUNK: usize = 32 * 1024;
/// Most bytes in one event from a terminal; the protocol's limit.
const TERMINAL_CHUNK: usize = 16 * 1024;
/// Chunks that wait for one subscriber before the process is held back: 256 KiB at most.
pub(super) const QUEUE: usize = 8;
/// Most bytes still collected from a pipe after its process was killed: all that Linux lets a pipe hold by default.
/// A surviving child that goes on writing must not keep the stream open.
const LAST_WORDS: usize = 1024 * 1024;
/// Newest bytes of a process's output that a follower who comes later still gets.
pub(super) const REPLAY: usize = 64 * 1024;

/// Where a chunk came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Stdout,
    Stderr,
    Terminal,
}

/// A piece of output, shared by all who get it.
#[derive(Debug, Clone)]
pub(crate) struct Chunk {
    pub(crate) source: Source,
    pub(crate) bytes: Bytes,
}

/// The reading end of one output of a process.
#[derive(Debug)]
pub(super) struct Output {
    source: Source,
    end: End,
}

#[derive(Debug)]
enum End {
    Pipe(pipe::Receiver),
    Terminal(Arc<AsyncFd<OwnedFd>>),
}

impl Output {
    pub(super) fn pipe(source: Source, receiver: pipe::Receiver) -> Self {
        Self { source, end: End::Pipe(receiver) }
    }

    pub(super) fn terminal(master: Arc<AsyncFd<OwnedFd>>) -> Self {
        Self { source: Source::Terminal, end: End::Terminal(master) }
    }

    /// Reads until the last writer is gone, or until `stop`: then what is there already is still delivered.
    pub(super) async fn pump(self, subscribers: &Subscribers, stop: &CancellationToken) {
        loop {
            tokio::select! {
                ready = self.readable() => {
                    if ready.is_err() {
                        return;
                    }
                }
                () = stop.cancelled() => return self.finish(subscribers).await,
            }
            match self.try_read() {
                Ok(chunk) if chunk.is_empty() => return,
                Ok(bytes) => subscribers.deliver(Chunk { source: self.source, bytes }).await,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // EIO is how a terminal says that its last writer is gone.
                Err(_) => return,
            }
        }
    }

    async fn finish(&self, subscribers: &Subscribers) {
        let mut left = LAST_WORDS;
        while left > 0 {
            match self.try_read() {
                Ok(bytes) if !bytes.is_empty() => {
                    left = left.saturating_sub(bytes.len());
                    subscribers.deliver(Chunk { source: self.source, bytes }).await;
                }
                _ => return,
            }
        }
    }

    async fn readable(&self) -> io::Result<()> {
        match &self.end {
            End::Pipe(receiver) => receiver.readable().await,
            End::Terminal(master) => master.readable().await.map(|mut guard| guard.retain_ready()),
        }
    }

    /// One read without waiting. The buffer lives on the stack only here, so an idle process costs none.
    fn try_read(&self) -> io::Result<Bytes> {
        match &self.end {
            End::Pipe(receiver) => {
                let mut buffer = [0; PIPE_CHUNK];
                receiver.try_read(&mut buffer).map(|n| Bytes::copy_from_slice(&buffer[..n]))
            }
            End::Terminal(master) => {
                let mut buffer = [0; TERMINAL_CHUNK];
                master
                    .try_io(tokio::io::Interest::READABLE, |fd| Ok(rustix::io::read(fd, &mut buffer)?))
                    .map(|n| Bytes::copy_from_slice(&buffer[..n]))
            }
        }
    }
}

/// Who follows a process's output, and what those get who come late.
#[derive(Debug)]
pub(super) struct Subscribers {
    audience: Mutex<Audience>,
}

#[derive(Debug)]
struct Audience {
    /// `None` once the process has ended: nothing more will come.
    queues: Option<Vec<mpsc::Sender<Chunk>>>,
    kept: Kept,
}

impl Subscribers {
    pub(super) fn new() -> Self {
        Self { audience: Mutex::new(Audience { queues: Some(Vec::new()), kept: Kept::default() }) }
    }

    fn audience(&self) -> std::sync::MutexGuard<'_, Audience> {
        // No section below can leave it half changed.
        self.audience.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the output: what is kept of it, `replay` bytes at most, and all that comes from here on. After the end the
    /// queue is closed from the beginning.
    pub(super) fn subscribe(&self, replay: usize) -> (VecDeque<Chunk>, mpsc::Receiver<Chunk>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        // One lock for both: no chunk is missed, none comes twice.
        let mut audience = self.audience();
        if let Some(queues) = &mut audience.queues {
            queues.push(sender);
        }
        (audience.kept.newest(replay), receiver)
    }

    /// Closes every queue; what is in them is still received.
    pub(super) fn end(&self) {
        self.audience().queues = None;
    }

    /// Gives `chunk` to every subscriber, waiting for slow ones. Without subscribers it is only kept.
    async fn deliver(&self, chunk: Chunk) {
        let queues: Vec<_> = {
            let mut audience = self.audience();
            audience.kept.add(&chunk);
            audience.queues.iter().flatten().cloned().collect()
        };
        let mut gone = false;
        for queue in queues {
            gone |= queue.send(chunk.clone()).await.is_err();
        }
        if gone && let Some(queues) = &mut self.audience().queues {
            queues.retain(|queue| !queue.is_closed());
        }
    }
}

/// The newest output, [`REPLAY`] bytes at most, in the order in which it came.
#[derive(Debug, Default)]
struct Kept {
    /// Neighbours are of different sources: small chunks cost no more than their bytes.
    runs: VecDeque<(Source, BytesMut)>,
    length: usize,
}

impl Kept {
    fn add(&mut self, chunk: &Chunk) {
        let bytes = &chunk.bytes[chunk.bytes.len().saturating_sub(REPLAY)..];
        match self.runs.back_mut() {
            Some((source, run)) if *source == chunk.source => run.extend_from_slice(bytes),
            _ => self.runs.push_back((chunk.source, BytesMut::from(bytes))),
        }
        self.length += bytes.len();
        while self.length > REPLAY
            && let Some((_, oldest)) = self.runs.front_mut()
        {
            let surplus = (self.length - REPLAY).min(oldest.len());
            oldest.advance(surplus);
            self.length -= surplus;
            if oldest.is_empty() {
                self.runs.pop_front();
            }
        }
    }

    fn newest(&self, bytes: usize) -> VecDeque<Chunk> {
        let mut surplus = self.length.saturating_sub(bytes);
        let mut chunks = VecDeque::with_capacity(self.runs.len());
        for (source, run) in &self.runs {
            let cut = surplus.min(run.len());
            surplus -= cut;
            // As long as any other chunk.
            chunks.extend(
                run[cut..]
                    .chunks(TERMINAL_CHUNK)
                    .map(|piece| Chunk { source: *source, bytes: Bytes::copy_from_slice(piece) }),
            );
        }
        chunks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(source: Source, bytes: &[u8]) -> Chunk {
        Chunk { source, bytes: Bytes::copy_from_slice(bytes) }
    }

    fn text(chunks: &VecDeque<Chunk>) -> Vec<(Source, String)> {
        chunks.iter().map(|chunk| (chunk.source, String::from_utf8_lossy(&chunk.bytes).into_owned())).collect()
    }

    #[test]
    fn the_newest_output_is_kept_in_its_order() {
        let mut kept = Kept::default();
        for (source, bytes) in
            [(Source::Stdout, "a"), (Source::Stdout, "b"), (Source::Stderr, "c"), (Source::Stdout, "d")]
        {
            kept.add(&chunk(source, bytes.as_bytes()));
        }
        let all = [(Source::Stdout, "ab"), (Source::Stderr, "c"), (Source::Stdout, "d")];
        assert_eq!(text(&kept.newest(REPLAY)), all.map(|(source, bytes)| (source, bytes.to_owned())));
        let last = [(Source::Stderr, "c"), (Source::Stdout, "d")];
        assert_eq!(text(&kept.newest(2)), last.map(|(source, bytes)| (source, bytes.to_owned())));
        assert!(kept.newest(0).is_empty());
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut kept = Kept::default();
        for round in 0..100_u8 {
            let source = if round % 2 == 0 { Source::Stdout } else { Source::Stderr };
            kept.add(&chunk(source, &vec![round; 3000]));
        }
        kept.add(&chunk(Source::Terminal, &vec![b'x'; REPLAY - 1]));
        assert_eq!((kept.length, kept.runs.len()), (REPLAY, 2));
        kept.add(&chunk(Source::Terminal, &vec![b'y'; 2 * REPLAY]));
        assert_eq!((kept.length, kept.runs.len()), (REPLAY, 1));
        assert!(kept.newest(REPLAY).iter().all(|chunk| chunk.bytes.iter().all(|byte| *byte == b'y')));
    }
}
