//! Reads a process's output and hands each chunk to every subscriber.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
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

/// Who follows a process's output.
#[derive(Debug, Default)]
pub(super) struct Subscribers {
    /// `None` once the process has ended: nothing more will come.
    queues: Mutex<Option<Vec<mpsc::Sender<Chunk>>>>,
}

impl Subscribers {
    pub(super) fn new() -> Self {
        Self { queues: Mutex::new(Some(Vec::new())) }
    }

    fn queues(&self) -> std::sync::MutexGuard<'_, Option<Vec<mpsc::Sender<Chunk>>>> {
        // No section below can leave the list half changed.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the output from here on. After the end the queue is closed from the beginning.
    pub(super) fn subscribe(&self) -> mpsc::Receiver<Chunk> {
        let (sender, receiver) = mpsc::channel(QUEUE);
        if let Some(queues) = &mut *self.queues() {
            queues.push(sender);
        }
        receiver
    }

    /// Closes every queue; what is in them is still received.
    pub(super) fn end(&self) {
        *self.queues() = None;
    }

    /// Gives `chunk` to every subscriber, waiting for slow ones. Without subscribers it is dropped.
    async fn deliver(&self, chunk: Chunk) {
        let queues: Vec<_> = self.queues().iter().flatten().cloned().collect();
        let mut gone = false;
        for queue in queues {
            gone |= queue.send(chunk.clone()).await.is_err();
        }
        if gone && let Some(queues) = &mut *self.queues() {
            queues.retain(|queue| !queue.is_closed());
        }
    }
}
