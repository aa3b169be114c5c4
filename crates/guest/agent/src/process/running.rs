//! A started process: its input, its followers, its signals and its end.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::Signal;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncWriteExt as _, Interest};
use tokio::net::unix::pipe;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::output::{Chunk, Subscribers};
use super::reaper::{Exit, Reaper};
use super::spawn::{Spawned, TerminalSize};
use super::table::Config;

/// How long a caller that killed a process waits to see it reaped. SIGKILL takes effect at once, except for a process
/// in the midst of disk I/O.
const KILL_GRACE: Duration = Duration::from_secs(2);

/// How long a process, and its output, are followed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Limits {
    /// When it and its group are killed, whoever still follows it.
    pub(crate) deadline: Option<Instant>,
    /// For how long after its end those may still write to whom it has left its pipes. `None`: as long as they live.
    pub(crate) output_grace: Option<Duration>,
}

/// A process started by us, until it has ended and its output is delivered; afterwards the memory of its end.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) pid: i32,
    pub(crate) config: Config,
    reaper: Reaper,
    subscribers: Subscribers,
    input: Input,
    /// A signal that ends it was sent: its end is no longer held up by children that keep its pipes open.
    stopped: CancellationToken,
    exited: watch::Sender<Option<Exit>>,
    end: OnceLock<Exit>,
    /// Its deadline passed and it was killed for that.
    expired: AtomicBool,
}

#[derive(Debug)]
enum Input {
    /// `None` once closed.
    Pipe {
        pipe: Mutex<Option<pipe::Sender>>,
        closing: CancellationToken,
    },
    Terminal {
        master: Arc<AsyncFd<OwnedFd>>,
        turn: Mutex<()>,
    },
    Absent,
}

/// Input that did not reach the process, or a call that does not fit its kind of channel.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InputError {
    #[error("error writing to stdin: tty assigned to process {0}")]
    StdinOnTerminal(i32),
    #[error("error writing to tty: tty not assigned to process {0}")]
    NoTerminal(i32),
    #[error("error writing to stdin: stdin not enabled or closed")]
    Closed,
    #[error("error writing to stdin: {0}")]
    Write(io::Error),
    #[error("error writing to tty: {0}")]
    WriteTerminal(io::Error),
    #[error("error closing stdin: cannot close stdin for PTY process {0}: send byte 0x04 instead")]
    CloseTerminal(i32),
    #[error("error resizing tty: tty not assigned to process")]
    ResizeNoTerminal,
    #[error("error resizing tty: {0}")]
    Resize(io::Error),
}

impl Running {
    /// Takes over a process that was just spawned. Output is collected once [`Running::supervise`] runs.
    pub(super) fn new(config: Config, spawned: Spawned, reaper: Reaper) -> (Arc<Self>, Supervision) {
        let Spawned { pid, exit, outputs, stdin, terminal } = spawned;
        let input = match (stdin, terminal) {
            (_, Some(master)) => Input::Terminal { master, turn: Mutex::new(()) },
            (Some(pipe), None) => Input::Pipe { pipe: Mutex::new(Some(pipe)), closing: CancellationToken::new() },
            (None, None) => Input::Absent,
        };
        let running = Arc::new(Self {
            pid,
            config,
            reaper,
            subscribers: Subscribers::new(),
            input,
            stopped: CancellationToken::new(),
            exited: watch::Sender::new(None),
            end: OnceLock::new(),
            expired: AtomicBool::new(false),
        });
        (running, Supervision { exit, outputs })
    }

    /// Follows the process to its end; returns when nothing more will come of it.
    pub(super) async fn supervise(&self, supervision: Supervision, limits: Limits) {
        let Supervision { exit, outputs } = supervision;
        let pumps = futures::future::join_all(outputs.into_iter().map(|o| o.pump(&self.subscribers, &self.stopped)));
        let exit = async {
            // The reaper lives as long as the program, so the sender is not dropped.
            let exit = exit.await.unwrap_or(Exit::Signal(Signal::SIGKILL as i32));
            self.exited.send_replace(Some(exit));
            exit
        };
        let whole = async { tokio::join!(exit, pumps).0 };
        let cut = async {
            let mut exited = self.exited.subscribe();
            let _ = exited.wait_for(Option::is_some).await;
            sleep_for(limits.output_grace).await;
            self.stopped.cancel();
            std::future::pending().await
        };
        let whole = async {
            tokio::select! {
                end = whole => end,
                never = cut => never,
            }
        };
        tokio::pin!(whole);
        let end = tokio::select! {
            end = &mut whole => end,
            () = sleep_until(limits.deadline) => {
                self.expire();
                whole.await
            }
        };
        self.close_input().await;
        // The order matters to a late subscriber: a closed queue means that the end is known.
        let _ = self.end.set(end);
        self.subscribers.end();
    }

    async fn close_input(&self) {
        if let Input::Pipe { pipe, closing } = &self.input {
            closing.cancel();
            drop(pipe.lock().await.take());
        }
    }

    /// Follows the output from now on, after what is kept of it: the newest `replay` bytes at most.
    pub(crate) fn subscribe(self: &Arc<Self>, replay: usize) -> Subscription {
        let (replay, queue) = self.subscribers.subscribe(replay);
        Subscription { replay, queue, process: Arc::clone(self) }
    }

    /// Dead by our signal: it no longer counts as running, although its last output may still be on its way.
    pub(super) fn is_gone(&self) -> bool {
        self.stopped.is_cancelled() && self.exited.borrow().is_some()
    }

    /// Sends SIGTERM or SIGKILL to the process itself, not its group. After SIGKILL it is reaped when this returns.
    pub(crate) async fn signal(&self, signal: Signal) -> Result<(), Errno> {
        self.reaper.signal(self.pid, signal)?;
        self.stop_collecting(signal);
        if signal == Signal::SIGKILL {
            self.wait_reaped().await;
        }
        Ok(())
    }

    /// A process that handles SIGTERM may go on and write: its output is collected until it is dead.
    fn stop_collecting(&self, signal: Signal) {
        if signal == Signal::SIGKILL || self.exited.borrow().is_some() {
            self.stopped.cancel();
            return;
        }
        let (mut exited, stopped) = (self.exited.subscribe(), self.stopped.clone());
        // Ends with the process, whose supervisor the table's tracker awaits.
        tokio::spawn(async move {
            let _ = exited.wait_for(Option::is_some).await;
            stopped.cancel();
        });
    }

    /// Kills the whole process group because the deadline has passed.
    pub(crate) fn expire(&self) {
        self.expired.store(true, Ordering::Relaxed);
        self.kill_group();
    }

    /// Kills the process and everything in its group.
    pub(super) fn kill_group(&self) {
        let _ = self.reaper.signal_group(self.pid, Signal::SIGKILL);
        self.stopped.cancel();
    }

    /// Waits a short while until the process is reaped.
    pub(crate) async fn wait_reaped(&self) {
        let mut exited = self.exited.subscribe();
        let _ = tokio::time::timeout(KILL_GRACE, exited.wait_for(Option::is_some)).await;
    }

    /// Writes to standard input, waiting while the process does not read.
    ///
    /// Cancel safety: if dropped, some of `bytes` may have been written.
    pub(crate) async fn write_stdin(&self, bytes: &[u8]) -> Result<(), InputError> {
        let (pipe, closing) = match &self.input {
            Input::Pipe { pipe, closing } => (pipe, closing),
            Input::Terminal { .. } => return Err(InputError::StdinOnTerminal(self.pid)),
            Input::Absent => return Err(InputError::Closed),
        };
        let write = async {
            let mut pipe = pipe.lock().await;
            let pipe = pipe.as_mut().ok_or(InputError::Closed)?;
            pipe.write_all(bytes).await.map_err(InputError::Write)
        };
        tokio::select! {
            biased;
            () = closing.cancelled() => Err(InputError::Closed),
            result = write => result,
        }
    }

    /// Writes to the terminal, as if typed.
    ///
    /// Cancel safety: if dropped, some of `bytes` may have been written.
    pub(crate) async fn write_terminal(&self, mut bytes: &[u8]) -> Result<(), InputError> {
        let Input::Terminal { master, turn } = &self.input else {
            return Err(InputError::NoTerminal(self.pid));
        };
        let _turn = turn.lock().await;
        while !bytes.is_empty() {
            let written = master
                .async_io(Interest::WRITABLE, |fd| Ok(rustix::io::write(fd, bytes)?))
                .await
                .map_err(InputError::WriteTerminal)?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// Closes standard input: the process reads end of file. Closing twice is fine.
    pub(crate) async fn close_stdin(&self) -> Result<(), InputError> {
        if let Input::Terminal { .. } = self.input {
            return Err(InputError::CloseTerminal(self.pid));
        }
        self.close_input().await;
        Ok(())
    }

    /// Changes the terminal's size; the foreground processes get SIGWINCH.
    pub(crate) fn resize(&self, size: TerminalSize) -> Result<(), InputError> {
        let Input::Terminal { master, .. } = &self.input else {
            return Err(InputError::ResizeNoTerminal);
        };
        rustix::termios::tcsetwinsize(master.get_ref(), size.into()).map_err(|e| InputError::Resize(e.into()))
    }
}

/// What the supervisor needs and nobody else.
#[derive(Debug)]
pub(super) struct Supervision {
    exit: tokio::sync::oneshot::Receiver<Exit>,
    outputs: Vec<super::output::Output>,
}

/// One follower of a process. Dropping it leaves the process alone.
#[derive(Debug)]
pub(crate) struct Subscription {
    /// What came before, and is still to be told.
    replay: VecDeque<Chunk>,
    queue: mpsc::Receiver<Chunk>,
    pub(crate) process: Arc<Running>,
}

/// What a follower learns.
#[derive(Debug)]
pub(crate) enum Followed {
    Output(Chunk),
    Ended(Exit),
    /// Killed because its deadline had passed.
    Expired,
}

impl Subscription {
    /// The next chunk, or how it ended.
    ///
    /// Cancel safety: nothing is lost when dropped.
    pub(crate) async fn next(&mut self) -> Followed {
        if let Some(chunk) = self.replay.pop_front() {
            return Followed::Output(chunk);
        }
        if let Some(chunk) = self.queue.recv().await {
            return Followed::Output(chunk);
        }
        if self.process.expired.load(Ordering::Relaxed) {
            return Followed::Expired;
        }
        // Queues are closed only after the end was set; a dropped table would be the one exception.
        self.process.end.get().map_or(Followed::Expired, |exit| Followed::Ended(*exit))
    }
}

async fn sleep_for(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
