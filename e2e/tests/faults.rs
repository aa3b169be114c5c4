//! A server that ends at a given step of an operation: whatever the step, the next server finds the sandbox as it was before
//! or as it is after, and nothing without an owner.

use aenv_api::{
    ConnectRequest, ListQuery, ListedSandbox, NewSandbox, NewSnapshot, PauseRequest, RollbackRequest, SnapshotInfo,
};
use aenv_e2e::{Node, NodeOptions, eventually};
use serde_json::Value;

/// A node with one sandbox that counts in its memory.
struct Bench {
    node: Node,
    id: String,
}

impl Bench {
    async fn start() -> Option<Self> {
        Self::start_with(String::new()).await
    }

    async fn start_with(config: String) -> Option<Self> {
        let options = NodeOptions { waiting_vmms: 1, config, ..NodeOptions::default() };
        let node = Node::start_with(options).await?;
        node.tiny("tiny").await?;
        let id = node.sandbox("tiny").await.sandbox_id.to_string();
        let script = "(n=0; while :; do n=$((n+1)); echo $n > /tmp/count.new; mv /tmp/count.new /tmp/count; sleep 0.05; \
                      done) >/dev/null 2>&1 & echo kept > /root/file";
        _ = node.aenv_ok(&["exec", &id, "sh", "-c", script]);
        Some(Self { node, id })
    }

    /// Another server, which ends at `place` in the course of `operation`; and the one after that.
    async fn crash(&mut self, place: &str, operation: impl AsyncFnOnce(&Node, &str)) {
        self.node.kill9();
        self.node.restart_to_crash_at(place).await;
        operation(&self.node, &self.id).await;
        let node = &mut self.node;
        eventually(&format!("the server comes to {place}"), async || node.has_ended().then_some(())).await;
        self.node.restart().await;
    }

    /// The sandbox goes on, with its memory and its files, and nothing else has anything.
    async fn check(&self, place: &str) {
        let Self { node, id } = self;
        let request = ConnectRequest { timeout: Some(600), memory: None };
        node.client().connect_sandbox(id, &request).await.unwrap_or_else(|error| panic!("{place}: {error}"));
        assert_eq!(node.aenv_ok(&["exec", id, "cat", "/root/file"]), "kept\n", "{place}");
        let count = || node.aenv_ok(&["exec", id, "cat", "/tmp/count"]).trim().parse::<u64>().expect("a number");
        let before = count();
        eventually(&format!("it goes on counting after {place}"), async || (count() > before).then_some(())).await;
        self.check_ledger(place, 1).await;
    }

    async fn check_ledger(&self, place: &str, machines: u64) {
        let node = &self.node;
        let client = aenv_api::http_builder(&node.url()).unwrap().build().unwrap();
        eventually(&format!("what {place} left is gone"), async || {
            let request = client.get(format!("{}/debug/ledger", node.url())).header("x-api-key", node.key());
            let shown: Value = request.send().await.unwrap().json().await.unwrap();
            let even = |kind: &str| shown[kind]["owned"] == shown[kind]["live"];
            let machines = machines + shown["waiting"].as_u64().expect("a number");
            (shown["clean"] == true && even("slots") && shown["machines"]["live"] == machines).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_that_is_cut_off_costs_nothing() {
    let Some(mut bench) = Bench::start().await else { return };
    for place in ["pause.stopped", "pause.copied", "pause.finished", "pause.recorded", "pause.released"] {
        bench.crash(place, async |node, id| _ = node.client().pause_sandbox(id, &PauseRequest::default()).await).await;
        bench.check(place).await;
    }
    bench.node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resume_that_is_cut_off_costs_nothing() {
    let Some(mut bench) = Bench::start().await else { return };
    let connect = ConnectRequest { timeout: Some(600), memory: None };
    for place in ["start.intent", "start.prepared", "start.machine", "start.ready", "resume.recorded"] {
        bench.node.client().pause_sandbox(&bench.id, &PauseRequest::default()).await.expect("pause");
        bench.crash(place, async |node, id| _ = node.client().connect_sandbox(id, &connect).await).await;
        bench.check(place).await;
    }
    bench.node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_is_cut_off_is_there_or_not() {
    let Some(mut bench) = Bench::start().await else { return };
    for place in ["capture.stopped", "capture.copied", "capture.finished", "snapshot.recorded"] {
        bench.crash(place, async |node, id| _ = node.client().create_snapshot(id, &NewSnapshot::default()).await).await;
        bench.check(place).await;
        let snapshots = bench.node.client().list_snapshots::<SnapshotInfo>(Some(&bench.id), None).await.unwrap().items;
        assert_eq!(snapshots.len(), usize::from(place == "snapshot.recorded"), "{place}");
        for snapshot in snapshots {
            let other = bench.node.sandbox(&snapshot.snapshot_id.to_string()).await.sandbox_id.to_string();
            assert_eq!(bench.node.aenv_ok(&["exec", &other, "cat", "/root/file"]), "kept\n");
            bench.node.client().delete_sandbox(&other).await.unwrap();
        }
    }
    bench.node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_on_its_way_to_other_nodes_is_there_for_all_or_for_none() {
    let shared = tempfile::tempdir().unwrap();
    let config = format!(
        "[snapshot]\nrepository_backend = \"posix_fs\"\n[backend.posix_fs]\nsnapshot_store = {:?}",
        shared.path()
    );
    let Some(mut bench) = Bench::start_with(config).await else { return };
    for place in ["publish.leased", "publish.sent", "publish.named", "publish.committed"] {
        let name = place.replace('.', "-");
        let request = NewSnapshot { name: Some(name.clone()), ..NewSnapshot::default() };
        bench.crash(place, async |node, id| _ = node.client().create_snapshot(id, &request).await).await;
        bench.check(place).await;
        let client = bench.node.client();
        let snapshots = client.list_snapshots::<SnapshotInfo>(Some(&bench.id), None).await.unwrap().items;
        assert_eq!(snapshots.len(), usize::from(place == "publish.committed"), "{place}");
        let wanted = NewSandbox { template_id: name.clone(), timeout: Some(600), ..NewSandbox::default() };
        let started = client.create_sandbox(&wanted).await;
        assert_eq!(started.is_ok(), place == "publish.committed", "{place}: {started:?}");
        if let Ok(other) = started {
            let other = other.sandbox_id.to_string();
            assert_eq!(bench.node.aenv_ok(&["exec", &other, "cat", "/root/file"]), "kept\n");
            client.delete_sandbox(&other).await.unwrap();
            client.delete_template(&name).await.unwrap();
        }
    }
    // What is left of the others holds up no other snapshot.
    let snapshot = bench.node.client().create_snapshot(&bench.id, &NewSnapshot::default()).await.expect("snapshot");
    bench.node.client().delete_template(snapshot.snapshot_id).await.unwrap();
    bench.node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollback_that_is_cut_off_is_done_or_not() {
    let Some(mut bench) = Bench::start().await else { return };
    let snapshot = bench.node.client().create_snapshot(&bench.id, &NewSnapshot::default()).await.expect("snapshot");
    let request = RollbackRequest { snapshot_id: snapshot.snapshot_id.to_string() };
    for place in
        ["start.intent", "start.prepared", "start.machine", "start.ready", "rollback.swapped", "rollback.ended"]
    {
        _ = bench.node.aenv_ok(&["exec", &bench.id, "sh", "-c", "echo late > /root/late"]);
        bench.crash(place, async |node, id| _ = node.client().roll_back_sandbox(id, &request).await).await;
        bench.check(place).await;
        let late = bench.node.aenv_ok(&["exec", &bench.id, "sh", "-c", "cat /root/late 2>/dev/null || echo back"]);
        assert_eq!(late, if place.starts_with("start") { "late\n" } else { "back\n" }, "{place}");
    }
    bench.node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_or_a_delete_that_is_cut_off_leaves_a_sandbox_or_none() {
    let Some(mut bench) = Bench::start().await else { return };
    let wanted = NewSandbox { template_id: "tiny".into(), timeout: Some(600), ..NewSandbox::default() };
    let others = async |bench: &Bench| {
        let list = bench.node.client().list_sandboxes::<ListedSandbox>(&ListQuery::default()).await.unwrap().items;
        let ids = list.into_iter().map(|sandbox| sandbox.sandbox_id.to_string());
        ids.filter(|id| *id != bench.id).collect::<Vec<_>>()
    };
    for place in ["start.intent", "start.prepared", "start.machine", "start.ready", "create.recorded"] {
        bench.crash(place, async |node, _| _ = node.client().create_sandbox(&wanted).await).await;
        let left = others(&bench).await;
        assert_eq!(left.len(), usize::from(place == "create.recorded"), "{place}");
        for id in left {
            assert_eq!(bench.node.aenv_ok(&["exec", &id, "echo", "here"]), "here\n");
            bench.node.client().delete_sandbox(&id).await.unwrap();
        }
        bench.check(place).await;
    }
    for place in ["delete.begun", "delete.released", "delete.forgotten"] {
        let other = bench.node.sandbox("tiny").await.sandbox_id.to_string();
        bench.crash(place, async |node, _| _ = node.client().delete_sandbox(&other).await).await;
        for id in others(&bench).await {
            bench.node.client().delete_sandbox(&id).await.unwrap();
        }
        bench.check(place).await;
    }
    bench.node.finish().await;
}
