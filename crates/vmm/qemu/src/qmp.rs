//! The control connection: QEMU Machine Protocol over a unix socket.
//!
//! One task owns the socket: it writes commands, matches answers to them by id, and keeps what the events told. Every
//! command has a deadline. Callers may go away at any time; a command is written whole or not at all.
//!
//! QEMU serves one client at a time, and the next one once that has closed its connection, be it by dying. A command
//! that the former client had not written to its end is forgotten with its connection; those it had are over before ours
//! begin, for QEMU runs one after the other. But an answer to it may come our way: so what precedes the greeting is
//! skipped, and ids begin where no other client's do.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aenv_vmm_driver::VmmError;
use futures::StreamExt;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::codec::{FramedRead, LinesCodec};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

use crate::commands::{Command, Event, MigrationStatus, QmpCapabilities, ShutdownReason};

/// Longest line we take from QEMU: the answers we ask for have a few hundred bytes, and a VMM that was taken over by
/// its guest shall not fill our memory.
const LINE_LIMIT: usize = 256 << 10;
/// Commands under way on one connection; callers beyond it wait.
const QUEUE: usize = 16;
/// Most lines before the greeting: the answer to a former client's last command and events around it.
const STALE_LINES: usize = 16;
/// Pause between two lines about failing disks of one machine: a guest tries again and again.
const IO_ERRORS_PAUSE: Duration = Duration::from_secs(10);

/// A control connection that is ready for commands. It is closed when this is dropped.
#[derive(Debug)]
pub(crate) struct Qmp {
    requests: mpsc::Sender<Request>,
    notices: watch::Receiver<Notices>,
    next_id: AtomicU64,
    call_timeout: Duration,
    serve: AbortOnDropHandle<()>,
}

/// What events have told so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Notices {
    /// Why the machine goes down.
    pub(crate) shutdown: Option<ShutdownReason>,
    /// The guest's kernel told that it panicked.
    pub(crate) panicked: bool,
    /// How the newest migration stands.
    pub(crate) migration: Option<MigrationStatus>,
    /// Requests of the guest to its disks that failed.
    pub(crate) io_errors: u64,
    /// When that was last told.
    pub(crate) io_errors_told: Option<Instant>,
}

#[derive(Debug)]
struct Request {
    id: u64,
    line: Vec<u8>,
    descriptor: Option<OwnedFd>,
    reply: oneshot::Sender<Result<Value, Refusal>>,
}

#[derive(Debug, Serialize)]
struct Execute<'a, C> {
    execute: &'static str,
    arguments: &'a C,
    id: u64,
}

/// Any line of the server.
#[derive(Debug, Deserialize)]
struct Incoming {
    #[serde(rename = "QMP")]
    greeting: Option<Value>,
    id: Option<u64>,
    #[serde(rename = "return")]
    answer: Option<Value>,
    error: Option<Refusal>,
    event: Option<String>,
    #[serde(default)]
    data: Value,
}

#[derive(Debug, Deserialize)]
struct Refusal {
    desc: String,
}

impl Qmp {
    /// Waits for the greeting and negotiates. `timeout` is for both together; `call_timeout` for each later command.
    ///
    /// The connection's task ends when QEMU closes the connection, as it does when it ends.
    /// Cancel safety: if dropped, the connection is closed.
    pub(crate) async fn open(stream: UnixStream, timeout: Duration, call_timeout: Duration) -> Result<Self, VmmError> {
        let operation = "start of the control connection";
        let negotiate = async {
            let (read, write) = stream.into_split();
            let mut lines = FramedRead::new(read, LinesCodec::new_with_max_length(LINE_LIMIT));
            for skipped in 0.. {
                let line = match lines.next().await {
                    Some(Ok(line)) => line,
                    Some(Err(e)) => return Err(VmmError::Ended { operation, detail: e.to_string() }),
                    None => return Err(VmmError::Ended { operation, detail: "connection closed".into() }),
                };
                if serde_json::from_str::<Incoming>(&line).is_ok_and(|line| line.greeting.is_some()) {
                    break;
                }
                if skipped == STALE_LINES {
                    return Err(VmmError::Refused { operation, detail: format!("no QMP greeting: {line}") });
                }
                debug!(line, "skipped what was meant for a former client");
            }
            let (requests, incoming) = mpsc::channel(QUEUE);
            let (notify, notices) = watch::channel(Notices::default());
            let serve = AbortOnDropHandle::new(tokio::spawn(serve(lines, write, incoming, notify)));
            let first_id = RandomState::new().hash_one(operation) >> 1; // QEMU knows numbers up to 2^64, and we count up
            let qmp = Self { requests, notices, next_id: first_id.into(), call_timeout, serve };
            qmp.execute(operation, &QmpCapabilities {}).await?;
            Ok(qmp)
        };
        tokio::time::timeout(timeout, negotiate)
            .await
            .unwrap_or(Err(VmmError::Deadline { operation, deadline: timeout }))
    }

    /// Runs a command; `operation` says in an error what it was for.
    ///
    /// Cancel safety: if dropped, the command may or may not run.
    pub(crate) async fn execute<C: Command>(&self, operation: &'static str, command: &C) -> Result<C::Reply, VmmError> {
        self.send(operation, command, None).await
    }

    /// Runs a command that comes with a descriptor.
    pub(crate) async fn execute_with<C: Command>(
        &self,
        operation: &'static str,
        command: &C,
        descriptor: OwnedFd,
    ) -> Result<C::Reply, VmmError> {
        self.send(operation, command, Some(descriptor)).await
    }

    async fn send<C: Command>(
        &self,
        operation: &'static str,
        command: &C,
        descriptor: Option<OwnedFd>,
    ) -> Result<C::Reply, VmmError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let refused = |detail: String| VmmError::Refused { operation, detail };
        let closed = || VmmError::Ended { operation, detail: "control connection closed".into() };
        let mut line = serde_json::to_vec(&Execute { execute: C::NAME, arguments: command, id })
            .map_err(|e| refused(format!("the command cannot be written: {e}")))?;
        line.push(b'\n');
        let (reply, answer) = oneshot::channel();
        let call = async {
            self.requests.send(Request { id, line, descriptor, reply }).await.map_err(|_| closed())?;
            answer.await.map_err(|_| closed())?.map_err(|refusal| refused(refusal.desc))
        };
        let answer = tokio::time::timeout(self.call_timeout, call)
            .await
            .unwrap_or(Err(VmmError::Deadline { operation, deadline: self.call_timeout }))?;
        C::Reply::deserialize(answer).map_err(|e| refused(format!("unexpected answer to {}: {e}", C::NAME)))
    }

    /// What events have told. The sender goes away when the connection is closed, after the last event.
    pub(crate) fn notices(&self) -> watch::Receiver<Notices> {
        self.notices.clone()
    }

    /// Closes the connection and waits until that is done: from then on QEMU takes another client.
    pub(crate) async fn close(self) {
        self.serve.abort();
        let _ = self.serve.await; // the answer is that it was aborted
    }

    /// Longest wait for an answer.
    pub(crate) fn call_timeout(&self) -> Duration {
        self.call_timeout
    }
}

async fn serve(
    mut lines: FramedRead<OwnedReadHalf, LinesCodec>,
    mut write: OwnedWriteHalf,
    mut requests: mpsc::Receiver<Request>,
    notify: watch::Sender<Notices>,
) {
    let mut pending: HashMap<u64, oneshot::Sender<Result<Value, Refusal>>> = HashMap::new();
    let mut open = true;
    loop {
        tokio::select! {
            request = requests.recv(), if open => match request {
                // Written here and not raced with reading: commands are small, and QEMU always reads.
                Some(request) => match transmit(&mut write, &request).await {
                    Ok(()) => {
                        // Callers past their deadline, whom a hanging QEMU never answered.
                        pending.retain(|_, reply| !reply.is_closed());
                        pending.insert(request.id, request.reply);
                    }
                    Err(e) => debug!(error = %e, "control connection does not take a command"),
                },
                // Nobody can ask any more, but events are still of interest.
                None => open = false,
            },
            line = lines.next() => match line {
                Some(Ok(line)) => receive(&line, &mut pending, &notify),
                Some(Err(e)) => {
                    warn!(error = %e, "control connection broke");
                    break;
                }
                None => break,
            },
        }
    }
}

/// Descriptors go along with the first byte of the command, as `SCM_RIGHTS`.
async fn transmit(write: &mut OwnedWriteHalf, request: &Request) -> io::Result<()> {
    let mut sent = 0;
    if let Some(descriptor) = &request.descriptor {
        let stream: &UnixStream = write.as_ref();
        let send = || {
            let descriptors = [descriptor.as_fd()];
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
                return Err(io::Error::other("no room for a descriptor"));
            }
            let bytes = [io::IoSlice::new(&request.line)];
            Ok(rustix::net::sendmsg(stream, &bytes, &mut ancillary, SendFlags::NOSIGNAL)?)
        };
        sent = stream.async_io(Interest::WRITABLE, send).await?;
    }
    write.write_all(&request.line[sent..]).await
}

fn receive(
    line: &str,
    pending: &mut HashMap<u64, oneshot::Sender<Result<Value, Refusal>>>,
    notify: &watch::Sender<Notices>,
) {
    let line: Incoming = match serde_json::from_str(line) {
        Ok(line) => line,
        Err(e) => return warn!(error = %e, "unreadable line on the control connection"),
    };
    if let Some(name) = line.event {
        return notice(&name, line.data, notify);
    }
    let Some(reply) = line.id.and_then(|id| pending.remove(&id)) else { return };
    // A caller past its deadline does not listen any more.
    let _ = reply.send(match line.error {
        Some(refusal) => Err(refusal),
        None => Ok(line.answer.unwrap_or_default()),
    });
}

fn notice(name: &str, data: Value, notify: &watch::Sender<Notices>) {
    debug!(event = name, %data, "VMM event");
    match Event::parse(name, data) {
        // Of several reasons the first is the cause.
        Some(Event::Shutdown(reason)) => notify.send_modify(|seen| _ = seen.shutdown.get_or_insert(reason)),
        Some(Event::GuestPanicked) => notify.send_modify(|seen| seen.panicked = true),
        Some(Event::Migration(status)) => notify.send_modify(|seen| seen.migration = Some(status)),
        Some(Event::BlockIoError(e)) => notify.send_modify(|seen| {
            seen.io_errors += 1;
            if seen.io_errors_told.is_none_or(|told| told.elapsed() > IO_ERRORS_PAUSE) {
                seen.io_errors_told = Some(Instant::now());
                warn!(
                    disk = e.node_name,
                    operation = e.operation,
                    no_space = e.nospace,
                    reason = e.reason,
                    so_far = seen.io_errors,
                    "guest disk I/O failed"
                );
            }
        }),
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, BufReader};

    use super::*;
    use crate::commands::{Cont, QueryMigrate, Stop};

    const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": []}}"#;

    /// A QEMU that answers the commands it gets by `answer`, until that says `None`.
    async fn qemu(
        stream: UnixStream,
        greeting: &'static str,
        answer: impl Fn(&str, u64) -> Option<String> + Send + 'static,
    ) {
        let (read, mut write) = stream.into_split();
        write.write_all(format!("{greeting}\n").as_bytes()).await.unwrap();
        let mut lines = BufReader::new(read).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let command: Value = serde_json::from_str(&line).unwrap();
            let id = command["id"].as_u64().unwrap();
            let answer = match command["execute"].as_str().unwrap() {
                "qmp_capabilities" => Some(format!(r#"{{"return": {{}}, "id": {id}}}"#)),
                other => answer(other, id),
            };
            let Some(answer) = answer else { return };
            write.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
        }
    }

    async fn connected(answer: impl Fn(&str, u64) -> Option<String> + Send + 'static) -> Qmp {
        let (ours, theirs) = UnixStream::pair().unwrap();
        tokio::spawn(qemu(theirs, GREETING, answer));
        Qmp::open(ours, Duration::from_secs(5), Duration::from_millis(300)).await.unwrap()
    }

    #[tokio::test]
    async fn answers_find_their_command_among_events_and_refusals_are_told() {
        let qmp = connected(|command, id| {
            Some(match command {
                "stop" => format!(r#"{{"event": "STOP", "timestamp": {{}}}}{}{{"return": {{}}, "id": {id}}}"#, "\n"),
                _ => format!(r#"{{"error": {{"class": "GenericError", "desc": "not now"}}, "id": {id}}}"#),
            })
        })
        .await;
        qmp.execute("pause", &Stop {}).await.unwrap();
        let error = qmp.execute("query", &QueryMigrate {}).await.unwrap_err();
        assert!(matches!(error, VmmError::Refused { operation: "query", detail } if detail == "not now"));
    }

    #[tokio::test]
    async fn a_command_without_answer_ends_at_its_deadline_and_later_ones_still_work() {
        let qmp = connected(|command, id| {
            Some(if command == "stop" { "{}".into() } else { format!(r#"{{"return": {{}}, "id": {id}}}"#) })
        })
        .await;
        let error = qmp.execute("pause", &Stop {}).await.unwrap_err();
        assert!(matches!(error, VmmError::Deadline { operation: "pause", .. }));
        qmp.execute("query", &QueryMigrate {}).await.unwrap();
    }

    #[tokio::test]
    async fn the_end_of_qemu_ends_the_calls_under_way_after_its_last_event_was_heard() {
        let qmp = connected(|command, _| {
            (command == "stop").then(|| {
                r#"{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-shutdown"}, "timestamp": {}}"#.into()
            })
        })
        .await;
        let mut notices = qmp.notices();
        let (stop, cont) = tokio::join!(qmp.execute("pause", &Stop {}), qmp.execute("resume", &Cont {}));
        assert!(matches!(stop, Err(VmmError::Ended { .. })));
        assert!(matches!(cont, Err(VmmError::Ended { .. })));
        assert!(notices.wait_for(|_| false).await.is_err(), "the sender is gone");
        assert_eq!(notices.borrow().shutdown, Some(ShutdownReason::GuestShutdown));
    }

    #[tokio::test]
    async fn who_does_not_greet_as_qmp_is_refused() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all("SSH-2.0-x\n".repeat(STALE_LINES + 1).as_bytes()).await.unwrap();
        let error = Qmp::open(ours, Duration::from_secs(5), Duration::from_secs(5)).await.unwrap_err();
        assert!(matches!(&error, VmmError::Refused { detail, .. } if detail.contains("SSH")), "{error}");
    }

    #[tokio::test]
    async fn answers_to_a_former_client_are_not_taken_for_ours() {
        const STALE: &str = r#"rest of a line"}
{"return": {}, "id": 1}
{"event": "STOP", "timestamp": {}}
{"QMP": {"version": {}, "capabilities": []}}
{"error": {"class": "GenericError", "desc": "not yours"}, "id": 1}
{"error": {"class": "GenericError", "desc": "not yours"}, "id": 2}
{"error": {"class": "GenericError", "desc": "not yours"}}"#;
        let (ours, theirs) = UnixStream::pair().unwrap();
        tokio::spawn(qemu(theirs, STALE, |_, id| Some(format!(r#"{{"return": {{}}, "id": {id}}}"#))));
        let qmp = Qmp::open(ours, Duration::from_secs(5), Duration::from_secs(5)).await.unwrap();
        qmp.execute("pause", &Stop {}).await.unwrap();
    }

    #[tokio::test]
    async fn the_connection_is_closed_with_its_owner() {
        for close in [false, true] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let served =
                tokio::spawn(qemu(theirs, GREETING, |_, id| Some(format!(r#"{{"return": {{}}, "id": {id}}}"#))));
            let qmp = Qmp::open(ours, Duration::from_secs(5), Duration::from_secs(5)).await.unwrap();
            let mut notices = qmp.notices();
            if close {
                qmp.close().await
            } else {
                drop(qmp)
            }
            tokio::time::timeout(Duration::from_secs(5), served).await.expect("not closed").unwrap();
            assert!(notices.wait_for(|_| false).await.is_err());
        }
    }
}
