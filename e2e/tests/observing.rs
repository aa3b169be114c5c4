//! What is told of sandboxes and of the node, and what plain HTTP can do.

use std::collections::BTreeMap;
use std::time::Duration;

use aenv_api::{
    AutoResume, ConnectRequest, ForkRequest, NewSandbox, NewSnapshot, Node as NodeInfo, PauseRequest, SandboxLogsV2,
    SandboxMetric, SandboxState, SandboxesWithMetrics, SnapshotInfo, SnapshotStatus, Team,
};
use aenv_e2e::{Node, NodeOptions, eventually};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// A node that samples its sandboxes often.
async fn node(config: &str) -> Option<Node> {
    let config = format!("orchestrator.sample_interval_secs = 1\n{config}");
    Node::start_with(NodeOptions { config, ..NodeOptions::default() }).await
}

struct Answer {
    status: u16,
    headers: reqwest::header::HeaderMap,
    text: String,
}

impl Answer {
    fn json<T: DeserializeOwned>(&self) -> T {
        assert!((200..300).contains(&self.status), "{}: {}", self.status, self.text);
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }
}

/// A request with the key.
async fn send(node: &Node, method: &str, path: &str, body: impl Into<reqwest::Body>) -> Answer {
    send_with(node, method, path, body, &[("x-api-key", node.key())]).await
}

async fn send_with(
    node: &Node,
    method: &str,
    path: &str,
    body: impl Into<reqwest::Body>,
    headers: &[(&str, &str)],
) -> Answer {
    let client = aenv_api::http_builder(&node.url()).unwrap().build().unwrap();
    let mut request = client.request(method.parse().unwrap(), format!("{}{path}", node.url())).body(body);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer = request.send().await.unwrap();
    let (status, headers) = (answer.status().as_u16(), answer.headers().clone());
    Answer { status, headers, text: answer.text().await.unwrap() }
}

async fn get<T: DeserializeOwned>(node: &Node, path: &str) -> T {
    send(node, "GET", path, "").await.json()
}

async fn create(node: &Node, request: Value) -> String {
    let request: NewSandbox = serde_json::from_value(request).unwrap();
    node.client().create_sandbox(&request).await.expect("create a sandbox").sandbox_id.to_string()
}

async fn metrics(node: &Node, id: &str) -> Vec<SandboxMetric> {
    get(node, &format!("/sandboxes/{id}/metrics")).await
}

async fn messages(node: &Node, id: &str, query: &str) -> Vec<String> {
    let logs: SandboxLogsV2 = get(node, &format!("/v2/sandboxes/{id}/logs?{query}")).await;
    logs.logs.into_iter().map(|entry| entry.message).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_sandbox_uses_is_sampled_while_it_runs_and_kept_while_it_is_paused() {
    let Some(node) = node("").await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let auto_resume = Some(AutoResume { enabled: true });
    let request = NewSandbox { template_id: "tiny".into(), auto_pause: Some(true), auto_resume, ..Default::default() };
    let id = node.client().create_sandbox(&request).await.expect("create a sandbox").sandbox_id.to_string();
    let first = eventually("two samples are there", async || {
        Some(metrics(&node, &id).await).filter(|samples| samples.len() > 1)
    })
    .await;
    let detail = node.client().sandbox(&id).await.unwrap().listed;
    assert!(first.windows(2).all(|pair| pair[0].timestamp < pair[1].timestamp), "oldest first");
    let SandboxMetric { timestamp, timestamp_unix, cpu_count, cpu_used_pct, mem_used, mem_total, .. } = first[1];
    assert!((timestamp.as_second(), detail.cpu_count) == (timestamp_unix, cpu_count) && timestamp > detail.started_at);
    assert!((0.0..=100.0).contains(&cpu_used_pct), "{cpu_used_pct}");
    assert!(mem_used > 0 && mem_used < mem_total && mem_total <= detail.memory_mb << 20);
    assert!(first[1].disk_used > 0 && first[1].disk_total >= first[1].disk_used && first[1].mem_cache > 0);
    let window = |start: i64, end: i64| format!("/sandboxes/{id}/metrics?start={start}&end={end}");
    let within: Vec<SandboxMetric> = get(&node, &window(timestamp_unix, timestamp_unix)).await;
    assert!(!within.is_empty() && within.iter().all(|metric| metric.timestamp_unix == timestamp_unix));
    assert_eq!(get::<Vec<SandboxMetric>>(&node, &window(0, 1000)).await, [], "before it was there");
    let refused = send(&node, "GET", &format!("/sandboxes/{id}/metrics?start=soon"), "").await;
    assert!(refused.status == 400 && refused.text.contains("start"), "{}", refused.text);

    // A pause costs nothing and keeps what there is; nobody is woken.
    node.client().pause_sandbox(&id, &PauseRequest::default()).await.expect("pause");
    let paused = metrics(&node, &id).await;
    assert!(paused.len() >= first.len());
    tokio::time::sleep(Duration::from_millis(2500)).await; // two rounds
    assert_eq!(metrics(&node, &id).await, paused);
    assert_eq!(node.client().sandbox(&id).await.unwrap().listed.state, SandboxState::Paused);
    let nobody = "01936f8e-72f5-7000-8000-000000000001";
    let all: SandboxesWithMetrics = get(&node, &format!("/sandboxes/metrics?sandbox_ids={id},{nobody}")).await;
    assert_eq!(all.sandboxes, BTreeMap::from([(id.parse().unwrap(), *paused.last().unwrap())]));
    assert_eq!(send(&node, "GET", "/sandboxes/metrics", "").await.status, 400);
    node.client().connect_sandbox(&id, &ConnectRequest { timeout: Some(300), memory: None }).await.expect("resume");
    let after = eventually("samples go on", async || {
        Some(metrics(&node, &id).await).filter(|samples| samples.len() > paused.len())
    })
    .await;
    assert_eq!(after[..paused.len()], paused);

    // To be sampled is no use.
    let idle = create(&node, json!({"templateID": "tiny", "idleTimeout": 2})).await;
    eventually("it is paused", async || {
        let state = node.client().sandbox(&idle).await.unwrap().listed.state;
        (state == SandboxState::Paused).then_some(())
    })
    .await;
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_life_of_a_sandbox_can_be_read_also_after_its_end() {
    let Some(node) = node("").await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let id = node.sandbox("tiny").await.sandbox_id.to_string();
    node.client().pause_sandbox(&id, &PauseRequest::default()).await.expect("pause");
    node.client().connect_sandbox(&id, &ConnectRequest { timeout: Some(300), memory: None }).await.expect("resume");
    let snapshot = send(&node, "POST", &format!("/sandboxes/{id}/snapshots"), "{}").await;
    let told: SnapshotInfo = snapshot.json();
    assert_eq!(snapshot.headers["x-agentenv-consistency"], "full");
    assert_eq!(snapshot.headers["x-agentenv-captured-at"].to_str().unwrap(), told.captured_at.unwrap().to_string());
    let fork = send(&node, "POST", &format!("/sandboxes/{id}/fork"), json!(ForkRequest::default()).to_string()).await;
    assert!(fork.headers.contains_key("x-agentenv-captured-at"), "{}", fork.text);
    let told = ["created", "paused", "resumed", "snapshot taken", "forked"];
    assert_eq!(messages(&node, &id, "level=info").await, told);
    let backward = messages(&node, &id, "level=info&direction=backward&limit=2").await;
    assert_eq!(backward, ["forked", "snapshot taken"]);

    // As the command line of E2B reads it: lines, and a start that goes on after the last of them.
    let v1: Value = get(&node, &format!("/sandboxes/{id}/logs")).await;
    let lines = v1["logs"].as_array().unwrap();
    let line: Value = serde_json::from_str(lines[0]["line"].as_str().unwrap()).unwrap();
    assert_eq!(
        (&line["level"], &line["logger"], &line["template"]),
        (&json!("info"), &json!("sandbox"), &json!("tiny"))
    );
    let last: jiff::Timestamp = lines.last().unwrap()["timestamp"].as_str().unwrap().parse().unwrap();
    let next = format!("/sandboxes/{id}/logs?start={}", last.as_millisecond() + 1);
    assert_eq!(get::<Value>(&node, &next).await["logs"], json!([]));
    node.client().delete_sandbox(&id).await.expect("delete");
    let rest: Value = get(&node, &next).await;
    assert!(
        rest["logEntries"][0]["message"] == "ended" && rest["logEntries"][0]["fields"]["reason"] == "it was deleted"
    );
    assert_eq!(send(&node, "GET", "/sandboxes/01936f8e-72f5-7000-8000-000000000001/logs", "").await.status, 404);

    // What a guest says on its console while it boots.
    let cold =
        json!({"image": format!("oci:{}", node.scratch().join("tiny").display()), "memoryMB": 256, "cpuCount": 1});
    let cold: Value = send(&node, "POST", "/sandboxes-cold", cold.to_string()).await.json();
    let id = cold["sandboxID"].as_str().unwrap();
    let logs: SandboxLogsV2 = get(&node, &format!("/v2/sandboxes/{id}/logs")).await;
    let loggers: Vec<_> = logs.logs.iter().map(|entry| entry.fields["logger"].as_str()).collect();
    assert!(loggers.contains(&"guest") || loggers.contains(&"console"), "{logs:?}");
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_http_runs_commands_moves_files_and_tells_of_the_node() {
    let Some(node) = node("node_identity.node_id = \"one\"").await else { return };
    node.debian("base").await;
    let id = node.sandbox("base").await.sandbox_id.to_string();
    let execute = async |body: Value| send(&node, "POST", &format!("/sandboxes/{id}/execute"), body.to_string()).await;
    let done: Value = execute(json!({"command": "echo out; echo err >&2; exit 3"})).await.json();
    let expected = json!({"stdout": "out\n", "stderr": "err\n", "exitCode": 3, "error": "exit status 3"});
    assert_eq!(done, expected);
    let asked =
        json!({"command": "echo $WORD; pwd; id -un; cat", "env": {"WORD": "hi"}, "cwd": "/usr", "user": "root"});
    let done: Value = execute(asked).await.json();
    assert_eq!(done, json!({"stdout": "hi\n/usr\nroot\n", "stderr": "", "exitCode": 0}));
    let late = execute(json!({"command": "sleep 60", "timeout": 1})).await;
    assert!(late.status == 408 && late.text.contains("command_timeout"), "{}", late.text);
    for (body, part) in [
        (json!({}), "command"),
        (json!({"command": "true", "timeout": 0}), "timeout"),
        (json!({"command": "true", "user": "nobody-here"}), "nobody-here"),
        (json!({"command": "true", "cwd": "/no/such/place"}), "/no/such/place"),
    ] {
        let refused = execute(body).await;
        assert!(refused.status == 400 && refused.text.contains(part), "{}: {}", refused.status, refused.text);
    }
    let bytes: Vec<u8> = (0..3_000_000).map(|n: u32| n.to_le_bytes()[0] ^ n.to_le_bytes()[1]).collect();
    let write = format!("/sandboxes/{id}/files/write");
    let written: Value =
        send(&node, "POST", &format!("{write}?path=/tmp/a%20file&user=root"), bytes.clone()).await.json();
    assert_eq!(written, json!({"name": "a file", "path": "/tmp/a file", "type": "file"}));
    let read = send(&node, "GET", &format!("/sandboxes/{id}/files/read?path=/tmp/a%20file"), "").await;
    assert_eq!(read.headers["content-length"], "3000000");
    let body = json!({"path": "/tmp/b", "content": "aGVsbG8=", "encoding": "base64"});
    _ = send(&node, "POST", &write, body.to_string()).await.json::<Value>();
    let read = async |path: &str| send(&node, "GET", &format!("/sandboxes/{id}/files/read?path={path}"), "").await;
    assert_eq!(read("/tmp/b").await.text, "hello");
    let missing = read("/tmp/none").await;
    assert!(missing.status == 404 && missing.text.contains("/tmp/none"), "{}", missing.text);
    assert_eq!(send(&node, "GET", &format!("/sandboxes/{id}/files/read"), "").await.status, 400);

    // Of the node: to everybody, and to whom has the key.
    let scrape = send_with(&node, "GET", "/metrics", "", &[]).await;
    assert!(scrape.headers["content-type"].to_str().unwrap().starts_with("text/plain; version=0.0.4"));
    for line in [
        "agentenv_sandboxes{phase=\"running\"} 1",
        "agentenv_sandbox_creates_total{status=\"ok\"} 2",
        "agentenv_ledger_unowned{kind=\"disks\"} 0",
        "agentenv_sandbox_stage_duration_seconds_count{operation=\"create_warm\",stage=\"create_sandbox\",status=\"ok\"} 1",
        "agentenv_sandbox_stage_duration_seconds_count{operation=\"create_warm\",stage=\"load_snapshot\",status=\"ok\"} 1",
        "agentenv_http_request_duration_seconds_count{method=\"POST\",route=\"/sandboxes/{sandbox_id}/execute\",\
         route_source=\"control_plane\",status=\"2xx\"} 2",
    ] {
        assert!(scrape.text.lines().any(|found| found == line), "{line} in\n{}", scrape.text);
    }
    assert!(!scrape.text.contains(&id), "no ids");
    let document: Value = send_with(&node, "GET", "/openapi.json", "", &[]).await.json();
    assert!(document["paths"]["/sandboxes/{id}/execute"]["post"].is_object());
    assert!(send_with(&node, "GET", "/docs", "", &[]).await.text.contains("/openapi.json"));
    let token = node.client().sandbox(&id).await.unwrap().envd_access_token.unwrap();
    let headers = [("e2b-sandbox-id", &*id), ("e2b-sandbox-port", "49983"), ("x-access-token", &*token)];
    let guests: Value = send_with(&node, "GET", "/metrics", "", &headers).await.json();
    assert!(guests["mem_total"].is_u64(), "the guest's own: {guests}");
    let nodes: Vec<NodeInfo> = get(&node, "/nodes").await;
    let [one] = &nodes[..] else { panic!("{nodes:?}") };
    assert_eq!((&*one.id, &*one.status, one.sandbox_count, one.sandbox_starting_count), ("one", "ready", 1, Some(0)));
    assert!(one.metrics.allocated_cpu == 1 && one.metrics.cpu_count >= 1 && !one.metrics.disks.is_empty(), "{one:?}");
    let detail: NodeInfo = get(&node, "/nodes/one").await;
    assert!(detail.sandbox_starting_count.is_none() && detail.cached_builds.is_some());
    assert_eq!(send(&node, "GET", "/nodes/two", "").await.status, 404);
    assert_eq!(get::<Vec<NodeInfo>>(&node, "/nodes?clusterID=other").await, []);
    let teams: Vec<Team> = get(&node, "/teams").await;
    assert!(teams.len() == 1 && teams[0].is_default);
    let params = format!("/sandboxes/{id}/custom-extension-params");
    assert_eq!(get::<Value>(&node, &params).await, json!({}));
    assert_eq!(send(&node, "PATCH", &params, "{\"a\": 1}").await.status, 400);

    node.client().pause_sandbox(&id, &PauseRequest::default()).await.expect("pause");
    let refused = execute(json!({"command": "true"})).await;
    assert!(refused.status == 409 && refused.text.contains("paused"), "{}: {}", refused.status, refused.text);
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_nobody_waits_for_is_of_use_before_other_nodes_have_it() {
    let shared = tempfile::tempdir().unwrap();
    let store = shared.path();
    let config = format!("snapshot.repository_backend = \"posix_fs\"\nbackend.posix_fs.snapshot_store = {store:?}\n");
    let (Some(a), Some(b)) = (node(&config).await, node(&config).await) else { return };
    let Some(()) = a.tiny("tiny").await else { return };
    let id = a.sandbox("tiny").await.sandbox_id.to_string();
    _ = a.aenv_ok(&["exec", &id, "sh", "-c", "echo kept > /root/file"]);
    let request = NewSnapshot { name: Some("soon".into()), wait: Some(false), ..NewSnapshot::default() };
    let told = a.client().create_snapshot(&id, &request).await.expect("take a snapshot");
    assert_ne!(told.status, SnapshotStatus::Failed);
    let here = a.sandbox("soon").await.sandbox_id.to_string();
    assert_eq!(a.aenv_ok(&["exec", &here, "cat", "/root/file"]), "kept\n");
    for node in [&a, &b] {
        eventually("it is ready", async || {
            let snapshot = node.client().snapshot(told.snapshot_id).await.ok()?;
            assert_ne!(snapshot.status, SnapshotStatus::Failed, "{snapshot:?}");
            (snapshot.status == SnapshotStatus::Ready).then_some(())
        })
        .await;
        let listed: Vec<SnapshotInfo> = get(node, "/snapshots?name=team/soon:default").await;
        assert_eq!(listed.iter().map(|info| info.snapshot_id).collect::<Vec<_>>(), [told.snapshot_id]);
        assert_eq!((listed[0].captured_at, listed[0].consistency), (told.captured_at, told.consistency));
    }
    assert_eq!(get::<Vec<SnapshotInfo>>(&a, "/snapshots?name=other").await, []);
    let there = b.sandbox("soon").await.sandbox_id.to_string();
    assert_eq!(b.aenv_ok(&["exec", &there, "cat", "/root/file"]), "kept\n");
    a.finish().await;
    b.finish().await;
}
