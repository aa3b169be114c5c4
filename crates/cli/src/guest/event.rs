//! What the agent tells of a process.

use aenv_guest_proto::wire::process::process_event::data_event::Output;
use aenv_guest_proto::wire::process::process_event::{EndEvent, Event as WireEvent};
use aenv_guest_proto::wire::process::{
    ConnectResponse, ConnectResponseView, ProcessEvent, StartResponse, StartResponseView,
};
use bytes::Bytes;
use connectrpc::ConnectError;
use connectrpc::client::ServerStream;
use http_body_util::combinators::UnsyncBoxBody;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Events between the network and whoever prints them: at 32 KiB each, a few MiB at most. A full queue stops reading,
/// which stops the sender.
const QUEUE: usize = 64;

/// One thing that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// It runs, under this pid.
    Started { pid: u32 },
    /// It wrote to standard output.
    Stdout(Vec<u8>),
    /// It wrote to standard error.
    Stderr(Vec<u8>),
    /// It wrote to its terminal.
    Terminal(Vec<u8>),
    /// Nothing happened, and the agent says so.
    Alive,
    /// It has ended.
    Ended(Exit),
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Exit {
    /// As a shell reports it: the exit code, or 128 and the signal.
    pub(crate) code: u8,
}

/// The events of one process, in order. Reading goes on in a task of its own, which ends with this.
#[derive(Debug)]
pub(crate) struct Events {
    queue: mpsc::Receiver<Result<Event, ConnectError>>,
    _reader: JoinSet<()>,
}

/// The body that a stream's messages are read from.
pub(crate) type Body = UnsyncBoxBody<Bytes, reqwest::Error>;

/// Reads a stream of `$response` until its end. A macro, as the two streams share no trait.
macro_rules! pump {
    ($stream:expr, $response:ty) => {{
        let mut stream = $stream;
        Events::read(async move |queue: mpsc::Sender<Result<Event, ConnectError>>| {
            loop {
                let event = match stream.message::<$response>().await {
                    Ok(Some(message)) => message.to_owned_message().event.into_option().and_then(Event::of),
                    Ok(None) => break,
                    Err(error) => {
                        // The reader may have lost interest.
                        let _ = queue.send(Err(error)).await;
                        break;
                    }
                };
                if let Some(event) = event
                    && queue.send(Ok(event)).await.is_err()
                {
                    break;
                }
            }
        })
    }};
}

impl Events {
    pub(super) fn of_start(stream: ServerStream<Body, StartResponseView<'static>>) -> Self {
        pump!(stream, StartResponse)
    }

    pub(super) fn of_connect(stream: ServerStream<Body, ConnectResponseView<'static>>) -> Self {
        pump!(stream, ConnectResponse)
    }

    fn read<F: Future<Output = ()> + Send + 'static>(
        pump: impl FnOnce(mpsc::Sender<Result<Event, ConnectError>>) -> F,
    ) -> Self {
        let (sender, queue) = mpsc::channel(QUEUE);
        let mut reader = JoinSet::new();
        reader.spawn(pump(sender));
        Self { queue, _reader: reader }
    }

    /// The next event; `None` after the agent has closed the stream in order. Cancel safety: nothing is lost.
    ///
    /// Errors: the agent's refusal, or the stream broke off.
    pub(crate) async fn next(&mut self) -> Result<Option<Event>, ConnectError> {
        self.queue.recv().await.transpose()
    }
}

impl Event {
    /// `None` for an event that this client does not know.
    fn of(event: ProcessEvent) -> Option<Self> {
        Some(match event.event? {
            WireEvent::Start(start) => Self::Started { pid: start.pid },
            WireEvent::Data(data) => match data.output? {
                Output::Stdout(bytes) => Self::Stdout(bytes),
                Output::Stderr(bytes) => Self::Stderr(bytes),
                Output::Pty(bytes) => Self::Terminal(bytes),
            },
            WireEvent::End(end) => Self::Ended(Exit::of(&end)),
            WireEvent::Keepalive(_) => Self::Alive,
        })
    }
}

impl Exit {
    /// The wire tells a signal only by name, in `status`: `signal: killed`.
    fn of(end: &EndEvent) -> Self {
        if end.exited {
            // The low octet is what a parent process would see.
            return Self { code: end.exit_code.to_le_bytes()[0] };
        }
        let signal = end.status.strip_prefix("signal: ").and_then(signal_number);
        Self { code: signal.map_or(1, |number| 128u8.saturating_add(number)) }
    }
}

/// The number of a signal by the name that the agent has for it.
fn signal_number(name: &str) -> Option<u8> {
    let name = name.trim_end_matches(" (core dumped)");
    if let Some(number) = name.strip_prefix("signal ") {
        return number.parse().ok();
    }
    // Linux, all architectures that we run on.
    let names = [
        (1, "hangup"),
        (2, "interrupt"),
        (3, "quit"),
        (4, "illegal instruction"),
        (5, "trace/breakpoint trap"),
        (6, "aborted"),
        (7, "bus error"),
        (8, "floating point exception"),
        (9, "killed"),
        (10, "user defined signal 1"),
        (11, "segmentation fault"),
        (12, "user defined signal 2"),
        (13, "broken pipe"),
        (14, "alarm clock"),
        (15, "terminated"),
        (16, "stack fault"),
        (17, "child exited"),
        (18, "continued"),
        (19, "stopped (signal)"),
        (20, "stopped"),
        (21, "stopped (tty input)"),
        (22, "stopped (tty output)"),
        (23, "urgent I/O condition"),
        (24, "CPU time limit exceeded"),
        (25, "file size limit exceeded"),
        (26, "virtual timer expired"),
        (27, "profiling timer expired"),
        (28, "window changed"),
        (29, "I/O possible"),
        (30, "power failure"),
        (31, "bad system call"),
    ];
    names.into_iter().find_map(|(number, known)| (known == name).then_some(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(exited: bool, exit_code: i32, status: &str) -> u8 {
        Exit::of(&EndEvent { exited, exit_code, status: status.into(), ..Default::default() }).code
    }

    #[test]
    fn an_exit_code_is_handed_on() {
        assert_eq!(ended(true, 0, "exit status 0"), 0);
        assert_eq!(ended(true, 255, "exit status 255"), 255);
    }

    #[test]
    fn a_signal_becomes_what_a_shell_makes_of_it() {
        assert_eq!(ended(false, -1, "signal: killed"), 137);
        assert_eq!(ended(false, -1, "signal: terminated"), 143);
        assert_eq!(ended(false, -1, "signal: segmentation fault (core dumped)"), 139);
        assert_eq!(ended(false, -1, "signal: signal 34"), 162);
    }

    #[test]
    fn an_end_of_an_unknown_kind_is_a_failure() {
        assert_eq!(ended(false, -1, "vanished"), 1);
        assert_eq!(ended(false, 0, ""), 1);
    }
}
