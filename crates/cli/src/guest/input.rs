//! What is sent to a process, message by message.

use std::time::Duration;

use aenv_guest_proto::wire::process::process_input::Input;
use aenv_guest_proto::wire::process::stream_input_request::{DataEvent, Event, KeepAlive, StartEvent};
use aenv_guest_proto::wire::process::{ProcessInput, StreamInputRequest};

use super::selector;

/// A sign of life on an idle request: a proxy on the way may cut a silent body after 30 s.
pub(crate) const KEEPALIVE: Duration = Duration::from_secs(10);

/// The first message: what follows is for this process.
pub(crate) fn to(pid: u32) -> StreamInputRequest {
    request(Event::from(StartEvent { process: selector(pid).into(), ..Default::default() }))
}

/// As if typed at the process's terminal.
pub(crate) fn typed(chunk: Vec<u8>) -> StreamInputRequest {
    data(Input::Pty(chunk))
}

/// On the process's standard input.
pub(crate) fn piped(chunk: Vec<u8>) -> StreamInputRequest {
    data(Input::Stdin(chunk))
}

/// Nothing, said aloud.
pub(crate) fn alive() -> StreamInputRequest {
    request(Event::from(KeepAlive::default()))
}

fn data(input: Input) -> StreamInputRequest {
    let input = ProcessInput { input: Some(input), ..Default::default() };
    request(Event::from(DataEvent { input: input.into(), ..Default::default() }))
}

fn request(event: Event) -> StreamInputRequest {
    StreamInputRequest { event: Some(event), ..Default::default() }
}
