//! What goes over the wire, byte for byte where a client depends on it.

use std::time::Instant;

use crate::harness::{Agent, envelope};

const START: &str = "/process.Process/Start";

fn start_message(script: &str) -> String {
    serde_json::json!({
        "process": { "cmd": "/bin/sh", "args": ["-c", script], "cwd": "/" }, "stdin": false, "unknownField": [1]
    })
    .to_string()
}

#[tokio::test]
async fn a_command_is_start_data_end_and_an_end_of_stream_frame() {
    let agent = Agent::start();
    let frames = agent.stream_json(START, &[], &start_message("echo hi")).await;
    let text: Vec<&str> = frames.iter().map(|(_, text)| text.as_str()).collect();
    assert_eq!(frames.iter().map(|(flags, _)| *flags).collect::<Vec<_>>(), [0, 0, 0, 2], "{text:?}");
    assert!(text[0].starts_with(r#"{"event":{"start":{"pid":"#), "{text:?}");
    assert_eq!(text[1], r#"{"event":{"data":{"stdout":"aGkK"}}}"#);
    assert_eq!(text[2], r#"{"event":{"end":{"exited":true,"status":"exit status 0"}}}"#);
    assert_eq!(text[3], "{}");
}

#[tokio::test]
async fn errors_before_the_first_message_come_as_an_end_of_stream_frame() {
    let agent = Agent::start();
    let no_directory = r#"{"process":{"cmd":"true","cwd":"/does/not/exist"}}"#;
    let frames = agent.stream_json(START, &[], no_directory).await;
    let error: serde_json::Value = serde_json::from_str(&frames[0].1).unwrap();
    assert_eq!((frames.len(), frames[0].0), (1, 2));
    assert_eq!(error["error"]["code"], "invalid_argument");
    assert_eq!(error["error"]["message"], "cwd '/does/not/exist' does not exist");

    // "nobody-here:"
    let bad_user = [("authorization", "Basic bm9ib2R5LWhlcmU6")];
    let frames = agent.stream_json(START, &bad_user, &start_message("true")).await;
    let error: serde_json::Value = serde_json::from_str(&frames[0].1).unwrap();
    assert_eq!(error["error"]["code"], "unauthenticated");
    assert_eq!(error["error"]["message"], "invalid username: 'nobody-here'");

    let bad_timeout = [("connect-timeout-ms", "soon")];
    let frames = agent.stream_json(START, &bad_timeout, &start_message("true")).await;
    assert!(frames[0].1.contains("invalid_argument"), "{frames:?}");
}

#[tokio::test]
async fn a_unary_call_takes_the_headers_the_python_sdk_sends_and_answers_errors_by_status() {
    let agent = Agent::start();
    let headers =
        [("content-type", "application/json"), ("content-encoding", "identity"), ("accept-encoding", "identity")];
    let listed = agent.http("POST", "/process.Process/List", &headers, b"{}").await;
    assert_eq!((listed.status, listed.text()), (200, "{}"));
    assert_eq!(listed.header("content-type"), Some("application/json"));

    let missing = agent.http("POST", "/filesystem.Filesystem/Stat", &headers, br#"{"path":"/nope"}"#).await;
    assert_eq!((missing.status, &missing.json()["code"]), (404, &"not_found".into()));
    let gone = br#"{"process":{"pid":999999},"signal":"SIGNAL_SIGKILL"}"#;
    let killed = agent.http("POST", "/process.Process/SendSignal", &headers, gone).await;
    assert_eq!((killed.status, killed.json()["message"].as_str()), (404, Some("process with pid 999999 not found")));
    let headers = [("content-type", "application/json"), ("authorization", "Basic bm9ib2R5LWhlcmU6")];
    let refused = agent.http("POST", "/process.Process/List", &headers, b"{}").await;
    assert_eq!((refused.status, &refused.json()["code"]), (401, &"unauthenticated".into()));
}

#[tokio::test]
async fn input_streams_from_a_chunked_body_of_envelopes() {
    let agent = Agent::start();
    let message = r#"{"process":{"cmd":"/bin/cat","cwd":"/"},"tag":"cat"}"#;
    let running = agent.send("POST", START, &[("content-type", "application/connect+json")], &envelope(message)).await;
    let mut body = Vec::new();
    // Input for a process that may not have started yet would be refused.
    let deadline = Instant::now() + crate::harness::PATIENCE;
    loop {
        let list = agent.http("POST", "/process.Process/List", &[("content-type", "application/json")], b"{}").await;
        if list.text().contains(r#""tag":"cat""#) {
            break;
        }
        assert!(Instant::now() < deadline, "cat did not start");
    }
    for message in [
        r#"{"start":{"process":{"tag":"cat"}}}"#,
        r#"{"keepalive":{}}"#,
        r#"{"data":{"input":{"stdin":"b25lCg=="}}}"#,
        r#"{"data":{"input":{"stdin":"dHdvCg=="}}}"#,
    ] {
        body.extend_from_slice(&envelope(message));
    }
    let headers = [("content-type", "application/connect+json")];
    let answer = agent.http("POST", "/process.Process/StreamInput", &headers, &body).await;
    assert_eq!(answer.envelopes(), [(0, "{}".to_owned()), (2, "{}".to_owned())]);
    let closed = br#"{"process":{"tag":"cat"}}"#;
    let json = [("content-type", "application/json")];
    assert_eq!(agent.http("POST", "/process.Process/CloseStdin", &json, closed).await.status, 200);
    let mut stream = running;
    let mut raw = Vec::new();
    tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut raw).await.unwrap();
    let raw = String::from_utf8_lossy(&raw).into_owned();
    let said = raw.contains(r#""stdout":"b25lCnR3bwo=""#)
        || (raw.contains(r#""stdout":"b25lCg==""#) && raw.contains(r#""stdout":"dHdvCg==""#));
    assert!(said && raw.contains("exit status 0"), "{raw}");

    let unstarted = agent.http("POST", "/process.Process/StreamInput", &headers, &body[envelope_length(&body)..]).await;
    assert_eq!(unstarted.status, 200, "data before start must not crash");
    assert!(unstarted.envelopes()[0].1.contains("error"));
}

fn envelope_length(body: &[u8]) -> usize {
    5 + u32::from_be_bytes(body[1..5].try_into().unwrap()) as usize
}

#[tokio::test]
async fn health_and_init_speak_plain_http_and_the_token_guards_the_rest() {
    let agent = Agent::start();
    let health = agent.http("GET", "/health", &[], b"").await;
    assert_eq!((health.status, health.header("cache-control")), (204, Some("no-store")));

    let body = r#"{"accessToken":"tok","envVars":{"A":"1"},"defaultUser":"root","timestamp":"2030-01-01T00:00:01Z"}"#;
    let init = agent.http("POST", "/init", &[], body.as_bytes()).await;
    assert_eq!((init.status, init.header("x-envd-version")), (204, Some(aenv_guest_proto::ENVD_VERSION)));

    let unauthorized = agent.http("GET", "/envs", &[], b"").await;
    assert_eq!((unauthorized.status, unauthorized.json()["code"].as_i64()), (401, Some(401)));
    let token = [("x-access-token", "tok")];
    let envs = agent.http("GET", "/envs", &token, b"").await.json();
    assert_eq!((envs["A"].as_str(), envs["E2B_SANDBOX"].as_str()), (Some("1"), Some("true")));
    assert_eq!(agent.http("GET", "/health", &[], b"").await.status, 204);
    let rpc = agent.http("POST", "/process.Process/List", &[("content-type", "application/json")], b"{}").await;
    assert_eq!(rpc.status, 401);

    let stale = r#"{"accessToken":"tok","envVars":{"A":"2"},"timestamp":"2030-01-01T00:00:00Z"}"#;
    assert_eq!(agent.http("POST", "/init", &[], stale.as_bytes()).await.status, 204);
    assert_eq!(agent.http("GET", "/envs", &token, b"").await.json()["A"], "1", "an older request is not applied");

    let takeover = agent.http("POST", "/init", &[], br#"{"accessToken":"mine"}"#).await;
    assert_eq!((takeover.status, takeover.text()), (401, "access token validation failed"));
    let reset = agent.http("POST", "/init", &[], b"{}").await;
    assert_eq!((reset.status, reset.text()), (401, "access token reset not authorized"));
    let metrics = agent.http("GET", "/metrics", &token, b"").await.json();
    assert!(metrics["mem_total"].as_u64() > Some(0) && metrics["disk_total"].as_u64() > Some(0), "{metrics}");
}

#[tokio::test]
async fn browsers_may_ask() {
    let agent = Agent::start();
    let preflight = [
        ("origin", "https://example.com"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "x-access-token,connect-protocol-version"),
    ];
    let answer = agent.http("OPTIONS", START, &preflight, b"").await;
    assert_eq!(answer.status, 204);
    assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
    assert_eq!(answer.header("access-control-allow-headers"), Some("x-access-token,connect-protocol-version"));
    assert_eq!(answer.header("access-control-max-age"), Some("7200"));
    let health = agent.http("GET", "/health", &[("origin", "https://example.com")], b"").await;
    assert_eq!(health.header("access-control-allow-origin"), Some("*"));
}

#[tokio::test]
async fn keepalives_fill_silence_at_the_asked_interval() {
    let agent = Agent::start();
    let frames =
        agent.stream_json(START, &[("keepalive-ping-interval", "1")], &start_message("sleep 1.5; echo x")).await;
    assert_eq!(frames[1].1, r#"{"event":{"keepalive":{}}}"#, "{frames:?}");
    assert!(frames[2].1.contains("stdout"), "{frames:?}");
}
