//! Sandboxes in groups: batches and their leases, requests that are sent twice, and what is left after much of everything.

use std::collections::BTreeMap;
use std::time::Duration;

use aenv_api::{
    Batch, ConnectRequest, ForkRequest, Lease, NewSandbox, NewSnapshot, PauseRequest, Sandbox, SandboxState,
};
use aenv_e2e::{Node, NodeOptions, eventually};
use serde_json::{Value, json};

/// One request; its status, the headers of its answer, and that as JSON.
async fn post(node: &Node, path: &str, key: Option<&str>, body: &Value) -> (u16, reqwest::header::HeaderMap, Value) {
    let client = aenv_api::http_builder(&node.url()).unwrap().build().unwrap();
    let mut request = client.post(format!("{}{path}", node.url())).header("x-api-key", node.key()).json(body);
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    let answer = request.send().await.unwrap();
    let (status, headers) = (answer.status().as_u16(), answer.headers().clone());
    (status, headers, answer.json().await.unwrap_or_default())
}

async fn ledger(node: &Node) -> Value {
    let client = aenv_api::http_builder(&node.url()).unwrap().build().unwrap();
    let request = client.get(format!("{}/debug/ledger", node.url())).header("x-api-key", node.key());
    request.send().await.unwrap().json().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_comes_together_and_ends_with_its_lease() {
    let Some(mut node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let wanted = json!({"templateID": "tiny", "count": 4, "lease": {"timeout": 60}, "metadata": {"group": "one"}});
    let (status, _, answer) = post(&node, "/sandboxes/batch", Some("batch-1"), &wanted).await;
    assert_eq!(status, 201, "{answer}");
    let batch: Batch = serde_json::from_value(answer.clone()).unwrap();
    let ids: Vec<_> = batch.sandboxes.iter().map(|one| one.sandbox.as_ref().expect("a sandbox").sandbox_id).collect();
    let lease = batch.lease.expect("a lease");
    for id in &ids {
        assert_eq!(node.aenv_ok(&["exec", &id.to_string(), "echo", "here"]), "here\n");
    }
    // A client that did not get the answer asks again, maybe another server by then.
    node.kill9();
    node.restart().await;
    let (status, headers, again) = post(&node, "/sandboxes/batch", Some("batch-1"), &wanted).await;
    assert_eq!((status, &again), (201, &answer));
    assert_eq!(headers["idempotency-replayed"], "true");
    assert_eq!(node.vmm_pids().len(), 4, "nothing was made again");
    let (status, _, other) =
        post(&node, "/sandboxes/batch", Some("batch-1"), &json!({"templateID": "tiny", "count": 1})).await;
    assert_eq!((status, &other["error_code"]), (422, &json!("idempotency_request_mismatch")), "{other}");

    let path = format!("/leases/{}/renew", lease.lease_id);
    let (status, _, renewed) = post(&node, &path, None, &json!({})).await;
    assert_eq!(status, 200, "{renewed}");
    assert!(serde_json::from_value::<Lease>(renewed).unwrap().end_at > lease.end_at);
    let shown = ledger(&node).await;
    assert_eq!((&shown["clean"], &shown["machines"]["owned"]), (&json!(true), &json!(4)), "{shown}");
    _ = post(&node, &path, None, &json!({"timeout": 1})).await;
    eventually("they end with it", async || node.vmm_pids().is_empty().then_some(())).await;
    eventually("their end is told", async || {
        let gone = node.client().sandbox(ids[0]).await.unwrap_err().to_string();
        gone.contains("its lease ended").then_some(())
    })
    .await;
    eventually("it is forgotten", async || (post(&node, &path, None, &json!({})).await.0 == 404).then_some(())).await;

    let invalid = [
        (json!({"templateID": "tiny", "count": 0}), 400, "count"),
        (json!({"templateID": "tiny", "count": 1000}), 400, "count"),
        (json!({"templateID": "ghost", "count": 2}), 404, "ghost"),
        (json!({"templateID": "tiny", "count": 2, "lease": {"timeout": 0}}), 400, "lease.timeout"),
        (json!({"templateID": "tiny", "count": 2, "leaseID": lease.lease_id}), 201, ""),
    ];
    for (body, expected, part) in invalid {
        let (status, _, answer) = post(&node, "/sandboxes/batch", None, &body).await;
        assert_eq!(status, expected, "{answer}");
        assert!(answer["message"].as_str().unwrap_or_default().contains(part), "{answer}");
        if status == 201 {
            let batch: Batch = serde_json::from_value(answer).unwrap();
            let errors = batch.sandboxes.iter().map(|one| one.error.as_ref().expect("it has ended"));
            assert!(errors.clone().count() == 2 && errors.clone().all(|error| error.code == 404));
        }
    }
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_than_can_wait_is_refused_as_a_whole() {
    let config = "[orchestrator]\nmax_queued_starts = 3\n".to_owned();
    let config = config.replace("[orchestrator]\n", "orchestrator.");
    let Some(node) = Node::start_with(NodeOptions { config, ..Default::default() }).await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let (status, headers, answer) =
        post(&node, "/sandboxes/batch", None, &json!({"templateID": "tiny", "count": 4})).await;
    assert_eq!((status, &answer["error_code"]), (429, &json!("sandbox_capacity_unavailable")), "{answer}");
    assert!(headers["retry-after"].to_str().unwrap().parse::<u32>().is_ok());
    assert!(node.vmm_pids().is_empty(), "none was started");
    let (status, _, answer) = post(&node, "/sandboxes/batch", None, &json!({"templateID": "tiny", "count": 3})).await;
    assert_eq!(status, 201, "{answer}");
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_that_is_sent_twice_makes_one_sandbox() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let wanted = json!({"templateID": "tiny", "timeout": 300});
    let (first, second) = tokio::join!(
        post(&node, "/v2/sandboxes", Some("once"), &wanted),
        post(&node, "/v2/sandboxes", Some("once"), &wanted)
    );
    let mut statuses = [first.0, second.0];
    statuses.sort_unstable();
    assert!(matches!(statuses, [201, 409] | [201, 201]), "{statuses:?}");
    let (status, _, third) = post(&node, "/v2/sandboxes", Some("once"), &wanted).await;
    assert_eq!(status, 201);
    let sandbox: Sandbox = serde_json::from_value(third).unwrap();
    assert_eq!(node.vmm_pids().len(), 1);
    assert_eq!(node.aenv_ok(&["exec", &sandbox.sandbox_id.to_string(), "echo", "here"]), "here\n");
    let (status, _, refused) = post(&node, "/v2/sandboxes", Some("Not A Key"), &wanted).await;
    assert!(status == 400 && refused["message"].as_str().unwrap().contains("Idempotency-Key"), "{refused}");
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_sandbox_is_paused_and_a_command_holds_that_off() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let wanted = NewSandbox { template_id: "tiny".into(), idle_timeout: Some(2), ..NewSandbox::default() };
    let id = node.client().create_sandbox(&wanted).await.expect("create").sandbox_id.to_string();
    let state = async |id: &str| node.client().sandbox(id).await.unwrap().listed.state;
    // Longer than nobody may use it; `aenv exec` is connected all the time.
    let begun = std::time::Instant::now();
    assert_eq!(node.aenv_ok(&["exec", &id, "sh", "-c", "sleep 5; echo done"]), "done\n");
    assert!(begun.elapsed() > Duration::from_secs(5));
    assert_eq!(state(&id).await, SandboxState::Running);
    eventually("it is paused", async || (state(&id).await == SandboxState::Paused).then_some(())).await;
    node.finish().await;
}

/// What a sandbox is known to hold.
#[derive(Clone, Default)]
struct Known {
    files: BTreeMap<u32, u32>,
    paused: bool,
}

/// Numbers that are as good as random and the same each time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }
}

/// `AENV_E2E_OPERATIONS` (60) operations on at most six sandboxes, or twelve from 500 operations on, the server killed now and
/// then: what was acknowledged is there, and nothing is left over.
#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_done_nothing_acknowledged_is_lost_and_nothing_leaks() {
    let operations = std::env::var("AENV_E2E_OPERATIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let most = if operations < 500 { 6 } else { 12 };
    let options = NodeOptions { waiting_vmms: 2, ..NodeOptions::default() };
    let Some(mut node) = Node::start_with(options).await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let mut known: BTreeMap<String, Known> = BTreeMap::new();
    let mut dice = Dice(20_261_130);
    // Longer than all of it takes.
    const LIFE: u32 = 6 * 3600;
    let born = async |node: &Node, template: &str| {
        let request = NewSandbox { template_id: template.to_owned(), timeout: Some(LIFE), ..NewSandbox::default() };
        node.client().create_sandbox(&request).await.expect("create").sandbox_id.to_string()
    };
    let check = |node: &Node, id: &str, known: &Known| {
        for (file, content) in &known.files {
            let path = format!("/root/{file}");
            assert_eq!(node.aenv_ok(&["exec", id, "cat", &path]), format!("{content}\n"), "{path} of {id}");
        }
    };
    for operation in 0..operations {
        let ids: Vec<String> = known.keys().cloned().collect();
        if ids.is_empty() || (ids.len() < most && dice.roll(6) == 0) {
            known.insert(born(&node, "tiny").await, Known::default());
            continue;
        }
        let id = ids[dice.roll(ids.len())].clone();
        let one = known.get_mut(&id).unwrap();
        if one.paused {
            let request = ConnectRequest { timeout: Some(LIFE), memory: None };
            node.client().connect_sandbox(&id, &request).await.unwrap_or_else(|error| panic!("{operation}: {error}"));
            one.paused = false;
            check(&node, &id, one);
            continue;
        }
        match dice.roll(12) {
            0..=3 => {
                let (file, content) = (dice.roll(4) as u32, operation as u32);
                let script = format!("echo {content} > /root/{file}");
                _ = node.aenv_ok(&["exec", &id, "sh", "-c", &script]);
                one.files.insert(file, content);
            }
            4 | 5 => {
                node.client().pause_sandbox(&id, &PauseRequest::default()).await.expect("pause");
                one.paused = true;
            }
            6 | 7 => {
                let copy = one.clone();
                let snapshot = node.client().create_snapshot(&id, &NewSnapshot::default()).await.expect("snapshot");
                if known.len() < most {
                    let other = born(&node, &snapshot.snapshot_id.to_string()).await;
                    check(&node, &other, &copy);
                    known.insert(other, copy);
                } else {
                    // What it does now is forgotten again.
                    _ = node.aenv_ok(&["exec", &id, "sh", "-c", "rm -f /root/*"]);
                    _ = node.aenv_ok(&["rollback", &id, &snapshot.snapshot_id.to_string()]);
                    check(&node, &id, &copy);
                }
                node.client().delete_template(snapshot.snapshot_id).await.expect("delete the snapshot");
            }
            8 if ids.len() < most => {
                let copy = one.clone();
                let children = node.client().fork_sandbox(&id, &ForkRequest::default()).await.expect("fork");
                let child = children[0].sandbox.as_ref().expect("a child").sandbox_id.to_string();
                check(&node, &child, &copy);
                known.insert(child, copy);
            }
            9 => {
                node.client().delete_sandbox(&id).await.expect("delete");
                known.remove(&id);
            }
            10 => {
                node.kill9();
                node.restart().await;
            }
            _ => check(&node, &id, one),
        }
    }
    for (id, one) in &known {
        if one.paused {
            let request = ConnectRequest { timeout: Some(LIFE), memory: None };
            node.client().connect_sandbox(id, &request).await.expect("connect");
        }
        check(&node, id, one);
    }
    eventually("nothing is without an owner", async || {
        let shown = ledger(&node).await;
        let even = |kind: &str| shown[kind]["owned"] == shown[kind]["live"];
        (shown["clean"] == true && even("machines") && even("slots")).then_some(())
    })
    .await;
    for id in known.keys() {
        node.client().delete_sandbox(id).await.expect("delete");
    }
    node.finish().await;
}

/// `AENV_E2E_CYCLES` (30) sandboxes, one after the other: the server ends with what it began with.
#[tokio::test(flavor = "multi_thread")]
async fn many_lives_leave_nothing_behind() {
    let cycles: usize = std::env::var("AENV_E2E_CYCLES").ok().and_then(|text| text.parse().ok()).unwrap_or(30);
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let life = async || {
        let id = node.sandbox("tiny").await.sandbox_id;
        node.client().delete_sandbox(id).await.expect("delete");
    };
    // Pools fill and caches warm.
    for _ in 0..5 {
        life().await;
    }
    let settled = || async {
        eventually("it has settled", async || {
            let shown = ledger(&node).await;
            (shown["clean"] == true && shown["slots"]["owned"] == shown["slots"]["live"]).then_some(shown)
        })
        .await
    };
    let before = settled().await;
    for _ in 0..cycles {
        life().await;
    }
    let after = settled().await;
    for kind in ["machines", "workDirs", "disks", "memories", "slots"] {
        assert_eq!(after[kind]["live"], before[kind]["live"], "{kind}: {before} {after}");
    }
    assert_eq!(after["mounts"], before["mounts"]);
    let descriptors = |shown: &Value| shown["descriptors"].as_u64().unwrap();
    // Connections of ours come and go.
    assert!(descriptors(&after) <= descriptors(&before) + 8, "{before} {after}");
    node.finish().await;
}
