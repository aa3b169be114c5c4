//! Work that the node itself does in a guest: commands and files, by the agent's own protocol.

use std::io;
use std::path::Path;
use std::time::Duration;

use aenv_guest_proto::{
    ENVD_PORT, MESSAGES, NewProcess, OUTPUT_GRACE, ProcessEnd, ProcessReader, Refusal, Told, credentials,
};
use aenv_model::{Command, CommandExit, Output, SandboxId};
use bytes::Bytes;
use futures::TryStreamExt as _;
use http::{Request, StatusCode, header};
use http_body::{Body, Frame};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, Limited, StreamBody};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio_util::io::ReaderStream;
use tokio_util::sync::CancellationToken;

use crate::orchestrator::Orchestrator;
use crate::seams::GuestDialer;

/// Most bytes of a refusal that are read.
const REFUSAL_LIMIT: usize = 4096;

/// Seconds without output after which the agent gives a sign of life.
const PING_SECONDS: u32 = 10;

/// Without any sign for so long, the guest counts as lost; it may be stopped for a while, or very busy.
const SILENCE: Duration = Duration::from_secs(120);

/// Longest wait for the agent to begin an answer.
const ANSWER: Duration = Duration::from_secs(60);

/// Why nothing is known about the end of a command, or a file was not written.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The sandbox does not run.
    #[error("its machine does not run")]
    NotRunning,
    /// The agent refused; code and text are the protocol's.
    #[error("{code}: {message}")]
    Refused { code: String, message: String },
    /// The connection broke.
    #[error("the connection to the guest broke: {0}")]
    Broken(#[from] io::Error),
    /// The HTTP exchange failed.
    #[error("the connection to the guest broke: {0}")]
    Http(#[from] hyper::Error),
    /// The guest gave no sign of life.
    #[error("the guest did not answer within {0:?}")]
    Silent(Duration),
}

/// A way to a guest's agent.
struct Agent {
    dialer: std::sync::Arc<dyn GuestDialer>,
    token: Option<String>,
    ended: CancellationToken,
}

impl Orchestrator {
    /// Runs a command in a running sandbox, also in one of the node itself, and waits for its end.
    ///
    /// Cancel safety: if dropped, the command goes on, and what it writes is dropped.
    pub async fn run(
        &self,
        id: SandboxId,
        command: &Command,
        output: &(dyn Fn(Output) + Send + Sync),
    ) -> Result<CommandExit, CommandError> {
        let agent = self.agent(id)?;
        let Command { program, arguments, env, user, directory, output_grace } = command;
        let process = NewProcess { cmd: program, args: arguments, envs: env, cwd: directory.as_deref() };
        let mut request = Request::post("/process.Process/Start")
            .header(header::CONTENT_TYPE, MESSAGES)
            .header(header::AUTHORIZATION, credentials(user))
            .header("keepalive-ping-interval", PING_SECONDS);
        if let Some(grace) = output_grace {
            request = request.header(OUTPUT_GRACE, grace.as_millis().to_string());
        }
        agent.call(request, whole(process.request()), |answer| follow(answer, output)).await
    }

    /// Writes a file of this host to `path` in a running sandbox, as root.
    ///
    /// Cancel safety: if dropped, a part of the file may be there.
    pub async fn put_file(&self, id: SandboxId, path: &str, file: &Path) -> Result<(), CommandError> {
        let agent = self.agent(id)?;
        let file = tokio::fs::File::open(file).await?;
        let length = file.metadata().await?.len();
        let request = Request::post(format!("/files?path={path}&username=root"))
            .header(header::CONTENT_TYPE, "application/octet-stream")
            .header(header::CONTENT_LENGTH, length);
        let body = StreamBody::new(ReaderStream::with_capacity(file, 256 << 10).map_ok(Frame::data));
        agent.call(request, http_body_util::BodyExt::boxed(body), async |_| Ok(())).await
    }

    fn agent(&self, id: SandboxId) -> Result<Agent, CommandError> {
        let (live, token) = self.live(id).ok_or(CommandError::NotRunning)?;
        Ok(Agent { dialer: live.dialer, token, ended: live.ended })
    }
}

impl Agent {
    /// Sends a request on a connection of its own and reads a successful answer, until that ends or the machine does.
    async fn call<T>(
        &self,
        request: http::request::Builder,
        body: BoxBody<Bytes, io::Error>,
        read: impl AsyncFnOnce(Incoming) -> Result<T, CommandError>,
    ) -> Result<T, CommandError> {
        let stream = self.dialer.dial(ENVD_PORT).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let mut request = request.header(header::HOST, "guest");
        if let Some(token) = &self.token {
            request = request.header("x-access-token", token);
        }
        let request = request.body(body).map_err(io::Error::other)?;
        let exchange = async {
            let answer = sender.send_request(request).await?;
            if answer.status().is_success() { read(answer.into_body()).await } else { Err(refusal(answer).await) }
        };
        // The connection is polled beside the exchange and dropped with it: no task outlives this call.
        tokio::select! {
            result = exchange => result,
            Err(error) = connection => Err(error.into()),
            () = self.ended.cancelled() => Err(CommandError::NotRunning),
        }
    }
}

fn whole(bytes: Bytes) -> BoxBody<Bytes, io::Error> {
    Full::new(bytes).map_err(|never| match never {}).boxed()
}

async fn refusal(answer: http::Response<Incoming>) -> CommandError {
    let status = answer.status();
    let body = Limited::new(answer.into_body(), REFUSAL_LIMIT).collect().await;
    let body = body.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let message = match serde_json::from_slice::<Refused>(&body) {
        Ok(refused) => refused.message,
        Err(_) => String::from_utf8_lossy(&body).trim().to_owned(),
    };
    let code = match status {
        StatusCode::UNAUTHORIZED => "unauthenticated".to_owned(),
        status => format!("HTTP status {}", status.as_u16()),
    };
    CommandError::Refused { code, message }
}

#[derive(Deserialize)]
struct Refused {
    #[serde(default)]
    message: String,
}

/// Hands output on until the process has ended.
async fn follow<B>(mut body: B, output: &(dyn Fn(Output) + Send + Sync)) -> Result<CommandExit, CommandError>
where
    B: Body<Data = Bytes, Error = hyper::Error> + Unpin,
{
    let mut reader = ProcessReader::default();
    let mut exit = None;
    let mut patience = ANSWER;
    let broken = || io::Error::from(io::ErrorKind::UnexpectedEof).into();
    loop {
        while let Some(told) = reader.next().map_err(io::Error::other)? {
            match told {
                Told::Stdout(bytes) => output(Output::Stdout(bytes)),
                Told::Stderr(bytes) => output(Output::Stderr(bytes)),
                Told::Ended(ProcessEnd { exited, exit_code, status }) => {
                    exit = Some(CommandExit { success: exited && exit_code == 0, status });
                }
                Told::Over(None) => return exit.ok_or_else(broken),
                Told::Over(Some(Refusal { code, message })) => return Err(CommandError::Refused { code, message }),
            }
        }
        let frame = tokio::time::timeout(patience, body.frame()).await;
        patience = SILENCE;
        match frame.map_err(|_| CommandError::Silent(patience))? {
            Some(frame) => {
                if let Ok(data) = frame?.into_data() {
                    reader.push(&data);
                }
            }
            None => return exit.ok_or_else(broken),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn message(flags: u8, text: &str) -> Vec<u8> {
        let mut bytes = vec![flags];
        bytes.extend_from_slice(&(text.len() as u32).to_be_bytes());
        bytes.extend_from_slice(text.as_bytes());
        bytes
    }

    async fn followed(stream: Vec<u8>) -> (Result<CommandExit, CommandError>, Vec<Output>) {
        // In pieces that end in the middle of everything.
        let pieces: Vec<_> = stream.chunks(3).map(|piece| Ok(Frame::data(Bytes::copy_from_slice(piece)))).collect();
        let outputs = Mutex::new(Vec::new());
        let body = StreamBody::new(futures::stream::iter(pieces));
        let exit = follow(body, &|output| outputs.lock().unwrap().push(output)).await;
        (exit, outputs.into_inner().unwrap())
    }

    #[tokio::test]
    async fn output_and_end_of_a_process_are_read_from_its_messages() {
        let stream = [
            message(0, r#"{"event": {"start": {"pid": 7}}}"#),
            message(0, r#"{"event": {"data": {"stdout": "b3V0"}}}"#),
            message(0, r#"{"event": {"keepalive": {}}}"#),
            message(0, r#"{"event": {"data": {"stderr": "ZXJy"}}}"#),
            message(0, r#"{"event": {"end": {"exitCode": 3, "exited": true, "status": "exit status 3"}}}"#),
            message(2, "{}"),
        ];
        let (exit, outputs) = followed(stream.concat()).await;
        assert_eq!(exit.unwrap(), CommandExit { success: false, status: "exit status 3".into() });
        assert_eq!(outputs, [Output::Stdout(b"out".into()), Output::Stderr(b"err".into())]);
        let end = message(0, r#"{"event": {"end": {"exited": true, "status": "exit status 0"}}}"#);
        assert!(followed(end).await.0.unwrap().success);
    }

    #[tokio::test]
    async fn a_refusal_is_told_as_the_agent_words_it() {
        let refused = message(2, r#"{"error": {"code": "unauthenticated", "message": "invalid username: 'x'"}}"#);
        let error = followed(refused).await.0.unwrap_err();
        assert_eq!(error.to_string(), "unauthenticated: invalid username: 'x'");
    }

    #[tokio::test]
    async fn a_stream_that_breaks_off_is_no_end_of_a_process() {
        let begun = message(0, r#"{"event": {"start": {"pid": 7}}}"#);
        assert!(matches!(followed(begun).await.0, Err(CommandError::Broken(_))));
        let huge = vec![0, 0xff, 0xff, 0xff, 0xff];
        assert!(matches!(followed(huge).await.0, Err(CommandError::Broken(_))));
    }
}
