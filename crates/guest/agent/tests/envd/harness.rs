//! One agent process per test, its clients, and a raw HTTP client that hides nothing of the wire.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use aenv_guest_proto::wire::filesystem::FilesystemClient;
use aenv_guest_proto::wire::process as wire;
use aenv_guest_proto::wire::process::ProcessClient;
use connectrpc::ConnectError;
use connectrpc::client::{ClientConfig, HttpClient};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Longest any single step of a test may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A running agent; ends with the test.
pub(crate) struct Agent {
    child: Child,
    pub(crate) address: SocketAddr,
    pub(crate) directory: tempfile::TempDir,
}

impl Agent {
    pub(crate) fn start() -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_aenv-guest"))
            .args(["envd", "--listen", "127.0.0.1:0"])
            .stderr(Stdio::piped())
            .spawn()
            .expect("start the agent");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let line = lines.next().expect("a first line").expect("text");
        let address = line.rsplit(' ').next().and_then(|word| word.parse().ok());
        let address = address.unwrap_or_else(|| panic!("unexpected first line: {line}"));
        Self { child, address, directory: tempfile::tempdir().expect("temporary directory") }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A path in the test's own directory.
    pub(crate) fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().expect("UTF-8").to_owned()
    }

    fn config(&self) -> ClientConfig {
        ClientConfig::new(format!("http://{}", self.address).parse().expect("URL"))
    }

    /// The process service, in binary protobuf as the command line speaks it.
    pub(crate) fn processes(&self) -> ProcessClient<HttpClient> {
        ProcessClient::new(HttpClient::plaintext(), self.config())
    }

    pub(crate) fn filesystem(&self) -> FilesystemClient<HttpClient> {
        FilesystemClient::new(HttpClient::plaintext(), self.config())
    }

    /// Sends one request on its own connection and reads the whole answer.
    pub(crate) async fn http(&self, method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut stream = self.send(method, target, headers, body).await;
        let mut raw = Vec::new();
        tokio::time::timeout(PATIENCE, stream.read_to_end(&mut raw)).await.expect("an answer in time").expect("read");
        Answer::parse(&raw)
    }

    /// Sends one request; the answer is the caller's to read.
    pub(crate) async fn send(&self, method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
        let mut head = format!("{method} {target} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
        let mut stream = TcpStream::connect(self.address).await.expect("connect");
        stream.write_all(head.as_bytes()).await.expect("send head");
        stream.write_all(body).await.expect("send body");
        stream
    }

    /// A Connect call with a JSON message in one envelope, as the SDKs make streaming calls.
    pub(crate) async fn stream_json(&self, rpc: &str, headers: &[(&str, &str)], message: &str) -> Vec<(u8, String)> {
        let mut all = vec![("content-type", "application/connect+json")];
        all.extend_from_slice(headers);
        let answer = self.http("POST", rpc, &all, &envelope(message)).await;
        assert_eq!(answer.status, 200, "streams always answer 200: {answer:?}");
        assert_eq!(answer.header("content-type"), Some("application/connect+json"));
        answer.envelopes()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.child.id()).expect("a pid"));
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

pub(crate) fn envelope(message: &str) -> Vec<u8> {
    let length = u32::try_from(message.len()).expect("short").to_be_bytes();
    [&[0][..], &length, message.as_bytes()].concat()
}

/// A whole HTTP answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    fn parse(raw: &[u8]) -> Self {
        let end = raw.windows(4).position(|window| window == b"\r\n\r\n").expect("a whole head");
        let head = std::str::from_utf8(&raw[..end]).expect("text head");
        let mut lines = head.split("\r\n");
        let status = lines.next().expect("status line").split(' ').nth(1).expect("status").parse().expect("number");
        let headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let mut answer = Self { status, headers, body: raw[end + 4..].to_vec() };
        if answer.header("transfer-encoding") == Some("chunked") {
            answer.body = unchunk(&answer.body);
        }
        answer
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text body")
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {}", self.text()))
    }

    /// Flag and payload of every envelope.
    pub(crate) fn envelopes(&self) -> Vec<(u8, String)> {
        let mut rest = &self.body[..];
        let mut envelopes = Vec::new();
        while !rest.is_empty() {
            let length = u32::from_be_bytes(rest[1..5].try_into().expect("four bytes")) as usize;
            envelopes.push((rest[0], String::from_utf8(rest[5..5 + length].to_vec()).expect("text")));
            rest = &rest[5 + length..];
        }
        envelopes
    }
}

fn unchunk(mut rest: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let end = rest.windows(2).position(|window| window == b"\r\n").expect("a chunk size");
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..end]).expect("text"), 16).expect("hexadecimal");
        if size == 0 {
            return body;
        }
        body.extend_from_slice(&rest[end + 2..end + 2 + size]);
        rest = &rest[end + 4 + size..];
    }
}

/// A request that runs `script` under `/bin/sh` without standard input.
pub(crate) fn shell(script: &str) -> wire::StartRequest {
    wire::StartRequest {
        process: wire::ProcessConfig {
            cmd: "/bin/sh".into(),
            args: vec!["-c".into(), script.into()],
            cwd: Some("/".into()),
            ..Default::default()
        }
        .into(),
        stdin: Some(false),
        ..Default::default()
    }
}

pub(crate) fn by_pid(pid: u32) -> wire::ProcessSelector {
    wire::ProcessSelector { selector: Some(pid.into_selector()), ..Default::default() }
}

trait IntoSelector {
    fn into_selector(self) -> wire::__buffa::oneof::process_selector::Selector;
}

impl IntoSelector for u32 {
    fn into_selector(self) -> wire::__buffa::oneof::process_selector::Selector {
        wire::__buffa::oneof::process_selector::Selector::Pid(self)
    }
}

/// What a process stream said, gathered.
#[derive(Debug, Default)]
pub(crate) struct Story {
    pub(crate) pid: u32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) pty: Vec<u8>,
    pub(crate) largest: usize,
    pub(crate) end: Option<wire::process_event::EndEvent>,
    pub(crate) error: Option<ConnectError>,
}

impl Story {
    pub(crate) fn add(&mut self, event: Option<wire::ProcessEvent>) {
        use wire::__buffa::oneof::process_event::Event;
        use wire::__buffa::oneof::process_event::data_event::Output;

        match event.and_then(|event| event.event) {
            Some(Event::Start(start)) => self.pid = start.pid,
            Some(Event::Data(data)) => {
                let (to, bytes) = match data.output {
                    Some(Output::Stdout(bytes)) => (&mut self.stdout, bytes),
                    Some(Output::Stderr(bytes)) => (&mut self.stderr, bytes),
                    Some(Output::Pty(bytes)) => (&mut self.pty, bytes),
                    None => return,
                };
                self.largest = self.largest.max(bytes.len());
                to.extend_from_slice(&bytes);
            }
            Some(Event::End(end)) => self.end = Some(*end),
            Some(Event::Keepalive(_)) | None => {}
        }
    }

    pub(crate) fn exit_code(&self) -> i32 {
        self.end.as_ref().unwrap_or_else(|| panic!("no end: {self:?}")).exit_code
    }
}
