//! Clients that mean no good, or have gone: bounded memory, no process left, and others are served.

use std::time::{Duration, Instant};

use aenv_guest_proto::wire::process as wire;
use proptest::prelude::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::harness::{Agent, PATIENCE, envelope, shell};
use crate::processes::{resident_kib, start_detached, wait_for};

const STREAMS: &[&str] = &[
    "/process.Process/Start",
    "/process.Process/Connect",
    "/process.Process/StreamInput",
    "/filesystem.Filesystem/WatchDir",
];

fn cases(number: u32) -> ProptestConfig {
    ProptestConfig { cases: number, failure_persistence: None, ..ProptestConfig::default() }
}

/// Sends a request as it is, says that nothing follows, and reads to the end. `None`: the connection was ended instead.
fn ask(agent: &Agent, runtime: &tokio::runtime::Runtime, head: &str, body: &[u8]) -> Option<u16> {
    let exchange = async {
        let mut stream = TcpStream::connect(agent.address).await.expect("connect");
        let head = format!("{head}host: test\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
        // It may answer, and end the connection, before it has read all.
        _ = stream.write_all(head.as_bytes()).await;
        _ = stream.write_all(body).await;
        let mut answer = Vec::new();
        _ = stream.read_to_end(&mut answer).await;
        std::str::from_utf8(answer.get(9..12)?).ok()?.parse().ok()
    };
    let within = async { tokio::time::timeout(PATIENCE, exchange).await.expect("an answer in time") };
    runtime.block_on(within)
}

#[test]
fn any_frames_are_answered() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let agent = runtime.block_on(async { Agent::start() });
    let frame = (any::<u8>(), prop_oneof![0..64_u32, any::<u32>()], proptest::collection::vec(any::<u8>(), 0..64));
    let wild = proptest::collection::vec(frame, 0..4).prop_map(|frames| {
        let frames =
            frames.into_iter().map(|(flags, length, bytes)| [&[flags][..], &length.to_be_bytes(), &bytes].concat());
        frames.collect::<Vec<_>>().concat()
    });
    // Messages that are nearly right go further than noise does.
    let near = (
        r#"\{"(process|event|path)": ?("[a-z/]{0,8}"|\{"(cmd|selector|pid|start|data)": ?("[a-z/]{0,8}"|-?[0-9]{1,12}|null)\}|null|[0-9]{1,4})\}"#,
        any::<bool>(),
    )
        .prop_map(|(text, whole)| {
            let bytes = envelope(&text);
            bytes[..if whole { bytes.len() } else { bytes.len() / 2 }].to_vec()
        });
    let body = prop_oneof![wild, near];
    let stream = proptest::sample::select(STREAMS);
    let codec = prop_oneof![Just("json"), Just("proto")];
    proptest!(cases(256), |(stream in stream, codec in codec, body in body)| {
        let head = format!("POST {stream} HTTP/1.1\r\ncontent-type: application/connect+{codec}\r\nconnect-timeout-ms: 500\r\n");
        let status = ask(&agent, &runtime, &head, &body);
        prop_assert!(status.is_none_or(|status| status < 500), "{status:?}");
    });
    assert_eq!(runtime.block_on(agent.http("GET", "/health", &[], b"")).status, 204);
    assert!(resident_kib(agent.pid()) < 64 * 1024);
}

#[test]
fn any_multipart_body_is_answered() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let agent = runtime.block_on(async { Agent::start() });
    let piece = prop_oneof![
        4 => Just("--b\r\n".to_owned()),
        2 => Just("--b--\r\n".to_owned()),
        4 => Just("content-disposition: form-data; name=\"file\"; filename=\"f\"\r\n".to_owned()),
        2 => r#"content-disposition: form-data; name="file"; filename="[a-z./%\\]{0,12}"?"#.prop_map(|line| line + "\r\n"),
        4 => Just("\r\n".to_owned()),
        2 => "[ -~]{0,40}".prop_map(|line| line + "\r\n"),
        1 => Just("content-length: -1\r\n".to_owned()),
    ];
    let body = proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat());
    proptest!(cases(256), |(body in body, cut in 0..400_usize, named in any::<bool>())| {
        // Always below the test's own directory, whatever a part calls itself.
        let path = agent.path(if named { "to" } else { "" });
        let head = format!("POST /files?path={path} HTTP/1.1\r\ncontent-type: multipart/form-data; boundary=b\r\n");
        let body = &body.as_bytes()[..cut.min(body.len())];
        let status = ask(&agent, &runtime, &head, body);
        prop_assert!(status.is_none_or(|status| status < 500), "{status:?} for {:?}", String::from_utf8_lossy(body));
    });
    assert!(resident_kib(agent.pid()) < 64 * 1024);
}

#[tokio::test]
async fn who_sends_a_request_slowly_holds_up_nobody() {
    let agent = Agent::start();
    let before = resident_kib(agent.pid());
    let mut slow = Vec::new();
    for _ in 0..500 {
        let mut stream = TcpStream::connect(agent.address).await.unwrap();
        stream.write_all(b"POST /files?path=/tmp/x HTTP/1.1\r\nhost: t\r\nx-a: ").await.unwrap();
        slow.push(stream);
    }
    for _ in 0..3 {
        for stream in &mut slow {
            stream.write_all(b"a").await.unwrap();
        }
        assert_eq!(agent.http("GET", "/health", &[], b"").await.status, 204);
    }
    let grown = resident_kib(agent.pid()) - before;
    assert!(grown < 500 * 24, "{grown} KiB for 500 connections");
}

#[tokio::test]
async fn a_client_that_vanishes_leaves_no_process_beyond_its_deadline() {
    let agent = Agent::start();
    let before = descriptors(agent.pid());
    for _ in 0..20 {
        let message = envelope(r#"{"process": {"cmd": "/bin/sh", "args": ["-c", "yes & yes"]}, "stdin": false}"#);
        let headers = [("content-type", "application/connect+json"), ("connect-timeout-ms", "2000")];
        let mut stream = agent.send("POST", "/process.Process/Start", &headers, &message).await;
        let mut first = [0; 4096];
        stream.read_exact(&mut first).await.unwrap();
    }
    wait_for("all processes to be gone", async || {
        let listed = agent.processes().list(wire::ListRequest::default()).await.unwrap();
        listed.view().processes.is_empty() && children(agent.pid()) == 0
    })
    .await;
    wait_for("descriptors to be closed", async || descriptors(agent.pid()) <= before + 2).await;
    assert!(resident_kib(agent.pid()) < 64 * 1024);
}

#[tokio::test]
async fn a_thousand_idle_streams_are_cheap_and_end_with_their_clients() {
    let agent = Agent::start();
    let (memory, open) = (resident_kib(agent.pid()), descriptors(agent.pid()));
    let sleeper = start_detached(&agent, shell("exec sleep 600")).await;
    let message = envelope(&format!(r#"{{"process": {{"pid": {sleeper}}}}}"#));
    let mut streams = Vec::new();
    for _ in 0..1000 {
        let headers = [("content-type", "application/connect+json")];
        let mut stream = agent.send("POST", "/process.Process/Connect", &headers, &message).await;
        // It says that it follows; only then is it idle.
        let mut first = Vec::new();
        let begun = async {
            while !first.windows(7).any(|window| window == b"\"start\"") {
                assert!(stream.read_buf(&mut first).await.unwrap() > 0, "{}", String::from_utf8_lossy(&first));
            }
        };
        tokio::time::timeout(PATIENCE, begun).await.expect("the stream to start");
        streams.push(stream);
    }
    let grown = resident_kib(agent.pid()) - memory;
    assert!(grown < 1000 * 64, "{grown} KiB for 1000 streams");
    let start = Instant::now();
    assert_eq!(agent.http("GET", "/health", &[], b"").await.status, 204);
    assert!(start.elapsed() < Duration::from_secs(5));
    drop(streams);
    wait_for("descriptors to be closed", async || descriptors(agent.pid()) <= open + 8).await;
}

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// Processes that the agent has started and not collected, directly.
fn children(pid: u32) -> usize {
    let listed = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    listed.split_whitespace().count()
}
