//! `process.Process/Start` as the node itself asks for it: one request, and messages until the one that says how it ended.
//!
//! Each message of Connect's streaming protocol is a byte of flags, the length of the rest, and JSON.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf as _, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

/// Media type of the messages.
pub const MESSAGES: &str = "application/connect+json";

/// Bytes before a message: flags, and its length, big-endian.
const PREFIX: usize = 5;

/// Flag of the message that ends a stream.
const END_OF_STREAM: u8 = 2;

/// Longest message that is taken: the agent sends output in pieces of far less.
const MESSAGE_LIMIT: usize = 4 << 20;

/// A process to be started, without input.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct NewProcess<'a> {
    /// Looked up in the guest's `PATH`.
    pub cmd: &'a str,
    /// Its arguments.
    pub args: &'a [String],
    /// On top of the sandbox's own environment.
    pub envs: &'a BTreeMap<String, String>,
    /// Where it begins; `None`: the sandbox's default.
    pub cwd: Option<&'a str>,
}

impl NewProcess<'_> {
    /// The body of the request.
    #[must_use]
    pub fn request(&self) -> Bytes {
        envelope(0, serde_json::json!({"process": self, "stdin": false}).to_string().as_bytes())
    }
}

/// A message of a stream.
fn envelope(flags: u8, message: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(PREFIX + message.len());
    bytes.extend_from_slice(&[flags]);
    bytes.extend_from_slice(&u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes());
    bytes.extend_from_slice(message);
    bytes.freeze()
}

/// What the agent says of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// It wrote to standard output.
    Stdout(Vec<u8>),
    /// It wrote to standard error.
    Stderr(Vec<u8>),
    /// It has ended.
    Ended(ProcessEnd),
    /// The stream has ended, after the process or for this reason.
    Over(Option<Refusal>),
}

/// How a process ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProcessEnd {
    /// By itself, not by a signal.
    pub exited: bool,
    /// Its status; -1 after a signal.
    pub exit_code: i32,
    /// In words: `exit status 1`, `signal: killed`.
    pub status: String,
}

/// An error of Connect's.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Refusal {
    /// One of the protocol's: `invalid_argument`, `deadline_exceeded`, ….
    pub code: String,
    /// For people.
    #[serde(default)]
    pub message: String,
}

/// A stream that says nothing that can be understood.
#[derive(Debug, thiserror::Error)]
pub enum StreamProblem {
    /// Longer than any message.
    #[error("a message of {0} bytes")]
    Long(usize),
    /// No JSON, or other than the protocol's.
    #[error("a message that is none: {0}")]
    Json(#[from] serde_json::Error),
    /// Output that is no base64.
    #[error("output that is none: {0}")]
    Output(#[from] base64::DecodeError),
}

/// Reads such a stream from pieces of any length. Holds one message at most.
#[derive(Debug, Default)]
pub struct ProcessReader {
    unread: BytesMut,
}

impl ProcessReader {
    /// Takes what has arrived.
    pub fn push(&mut self, piece: &[u8]) {
        self.unread.extend_from_slice(piece);
    }

    /// What is told next. `None`: more has to arrive.
    #[expect(clippy::should_implement_trait, reason = "there may be more after `None`")]
    pub fn next(&mut self) -> Result<Option<Told>, StreamProblem> {
        while let Some((flags, message)) = self.message()? {
            if flags & END_OF_STREAM != 0 {
                return Ok(Some(Told::Over(serde_json::from_slice::<Last>(&message)?.error)));
            }
            let Event { data, end } = serde_json::from_slice::<Message>(&message)?.event;
            let Data { stdout, stderr } = data.unwrap_or_default();
            // Of all these there is one; starts and signs of life are none of them.
            match (stdout, stderr, end) {
                (Some(text), ..) => return Ok(Some(Told::Stdout(STANDARD.decode(text)?))),
                (_, Some(text), _) => return Ok(Some(Told::Stderr(STANDARD.decode(text)?))),
                (.., Some(end)) => return Ok(Some(Told::Ended(end))),
                (None, None, None) => {}
            }
        }
        Ok(None)
    }

    /// Takes a whole message off the front.
    fn message(&mut self) -> Result<Option<(u8, Bytes)>, StreamProblem> {
        let Some((prefix, rest)) = self.unread.split_first_chunk::<PREFIX>() else { return Ok(None) };
        let [flags, length @ ..] = *prefix;
        let length = u32::from_be_bytes(length) as usize;
        if length > MESSAGE_LIMIT {
            return Err(StreamProblem::Long(length));
        }
        if rest.len() < length {
            return Ok(None);
        }
        self.unread.advance(PREFIX);
        Ok(Some((flags, self.unread.split_to(length).freeze())))
    }
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    event: Event,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Event {
    data: Option<Data>,
    end: Option<ProcessEnd>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Data {
    stdout: Option<String>,
    stderr: Option<String>,
}

/// The message that ends a stream.
#[derive(Deserialize)]
struct Last {
    error: Option<Refusal>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(pieces: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Result<Vec<Told>, StreamProblem> {
        let (mut reader, mut told) = (ProcessReader::default(), Vec::new());
        for piece in pieces {
            reader.push(piece.as_ref());
            while let Some(one) = reader.next()? {
                told.push(one);
            }
        }
        Ok(told)
    }

    #[test]
    fn a_stream_is_read_however_it_is_cut() {
        let stream = [
            envelope(0, br#"{"event": {"start": {"pid": 7}}}"#),
            envelope(0, br#"{"event": {"data": {"stdout": "b3V0"}}}"#),
            envelope(0, br#"{"event": {"keepalive": {}}}"#),
            envelope(0, br#"{"event": {"data": {"stderr": "ZXJy"}}}"#),
            envelope(0, br#"{"event": {"end": {"exitCode": 3, "exited": true, "status": "exit status 3"}}}"#),
            envelope(2, b"{}"),
        ]
        .concat();
        let end = ProcessEnd { exited: true, exit_code: 3, status: "exit status 3".into() };
        let expected = [Told::Stdout(b"out".into()), Told::Stderr(b"err".into()), Told::Ended(end), Told::Over(None)];
        for size in [1, 7, 4096] {
            assert_eq!(read(stream.chunks(size)).unwrap(), expected);
        }
        let refused = envelope(2, br#"{"error": {"code": "unauthenticated", "message": "who?"}}"#);
        let refusal = Refusal { code: "unauthenticated".into(), message: "who?".into() };
        assert_eq!(read([refused]).unwrap(), [Told::Over(Some(refusal))]);
    }

    #[test]
    fn nonsense_is_told_apart_from_what_has_not_arrived() {
        assert!(read([[0, 0, 0, 0]]).unwrap().is_empty());
        assert!(matches!(read([[0, 0xff, 0xff, 0xff, 0xff]]), Err(StreamProblem::Long(_))));
        assert!(matches!(read([envelope(0, b"[")]), Err(StreamProblem::Json(_))));
        let output = envelope(0, br#"{"event": {"data": {"stdout": "?"}}}"#);
        assert!(matches!(read([output]), Err(StreamProblem::Output(_))));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_to_an_end(bytes in proptest::collection::vec(any::<u8>(), 0..256), size in 1..32_usize) {
            // Short lengths: else nothing of it would be a message.
            let bytes: Vec<u8> = bytes.chunks(5).flat_map(|chunk| [&[chunk[0], 0, 0, 0][..], &chunk[1..]].concat()).collect();
            let whole = read([&bytes]).ok();
            prop_assert_eq!(read(bytes.chunks(size)).ok(), whole);
        }

        #[test]
        fn output_comes_back_as_it_was(output in proptest::collection::vec(any::<u8>(), 0..512), size in 1..64_usize) {
            let message = serde_json::json!({"event": {"data": {"stdout": STANDARD.encode(&output)}}}).to_string();
            let told = read(envelope(0, message.as_bytes()).chunks(size)).unwrap();
            prop_assert_eq!(told, [Told::Stdout(output)]);
        }
    }
}
