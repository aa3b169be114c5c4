//! Machines that stop and go on: pauses, snapshots, forks, and servers that come and go meanwhile.

use std::time::Duration;

use aenv_api::{
    ConnectRequest, ForkRequest, NewSandbox, NewSnapshot, PauseMode, PauseRequest, SandboxState, SnapshotInfo,
    TimeoutRequest,
};
use aenv_e2e::{Node, NodeOptions, eventually};

/// Starts something in a sandbox that goes on counting in memory, and says which process it is.
fn start_counting(node: &Node, id: &str) -> String {
    let script = "(n=0; while :; do n=$((n+1)); echo $n > /tmp/count.new; mv /tmp/count.new /tmp/count; sleep 0.05; done) \
                  >/dev/null 2>&1 & echo $!";
    node.aenv_ok(&["exec", id, "sh", "-c", script]).trim().to_owned()
}

fn count(node: &Node, id: &str) -> u64 {
    node.aenv_ok(&["exec", id, "cat", "/tmp/count"]).trim().parse().expect("a number")
}

async fn counts_on(node: &Node, id: &str) {
    let before = count(node, id);
    eventually("it goes on counting", async || (count(node, id) > before).then_some(())).await;
}

async fn pause(node: &Node, id: &str) {
    node.client().pause_sandbox(id, &PauseRequest::default()).await.expect("pause");
}

async fn connect(node: &Node, id: &str) {
    let request = ConnectRequest { timeout: Some(300), memory: None };
    node.client().connect_sandbox(id, &request).await.expect("connect");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_sandbox_has_no_process_and_goes_on_where_it_was() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let id = node.sandbox("tiny").await.sandbox_id.to_string();
    let counter = start_counting(&node, &id);
    let boot_id = node.aenv_ok(&["exec", &id, "cat", "/proc/sys/kernel/random/boot_id"]);
    _ = node.aenv_ok(&["exec", &id, "sh", "-c", "echo kept > /root/file"]);
    for _ in 0..3 {
        pause(&node, &id).await;
        let detail = node.client().sandbox(&id).await.unwrap();
        assert_eq!((detail.listed.state, detail.pause_mode), (SandboxState::Paused, Some(PauseMode::Full)));
        eventually("its VMM is gone", async || node.vmm_pids().is_empty().then_some(())).await;
        connect(&node, &id).await;
        counts_on(&node, &id).await;
        let clock = node.aenv_ok(&["exec", &id, "busybox", "date", "+%s"]);
        let clock: f64 = clock.trim().parse().expect("a time");
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        assert!((now - clock).abs() < 5.0, "the guest's clock says {clock}, it is {now}");
    }
    let state = node.aenv_ok(&["exec", &id, "sh", "-c", &format!("kill -0 {counter} && cat /root/file")]);
    assert_eq!(state, "kept\n");
    assert_eq!(node.aenv_ok(&["exec", &id, "cat", "/proc/sys/kernel/random/boot_id"]), boot_id, "it was never booted");
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_pauses_keep_everything_and_their_chains_short() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let id = node.sandbox("tiny").await.sandbox_id.to_string();
    for round in 0..14 {
        // Some of memory, some of the disk, each round other than before; an older part is written again.
        let script = format!(
            "for n in {round} $(( {round} / 2 )); do for dir in /dev/shm /root; do \
             busybox yes {round}-$n | busybox head -c 300000 > $dir/$n; done; done"
        );
        _ = node.aenv_ok(&["exec", &id, "sh", "-c", &script]);
        pause(&node, &id).await;
        connect(&node, &id).await;
    }
    let check = "for n in 0 1 2 3 4 5 6 7 8 9 10 11 12 13; do \
                 last=$(( n * 2 + 1 > 13 ? (n * 2 > 13 ? n : n * 2) : n * 2 + 1 )); \
                 for f in /dev/shm/$n /root/$n; do \
                 busybox yes $last-$n | busybox head -c 300000 | busybox cmp - $f || echo $f differs; done; done";
    assert_eq!(node.aenv_ok(&["exec", &id, "sh", "-c", check]), "");
    pause(&node, &id).await;
    let captures = node.home().join("captures");
    let manifests = std::fs::read_dir(&captures).unwrap().map(|entry| entry.unwrap().path().join("capture.json"));
    for manifest in manifests {
        let manifest: serde_json::Value = serde_json::from_slice(&std::fs::read(manifest).unwrap()).unwrap();
        let layers = manifest["machine"]["memory_layers"].as_array().map_or(0, Vec::len);
        assert!((1..=12).contains(&layers), "{layers} layers of memory");
    }
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_of_the_disk_alone_boots_and_keeps_files() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let id = node.sandbox("tiny").await.sandbox_id.to_string();
    let boot_id = node.aenv_ok(&["exec", &id, "cat", "/proc/sys/kernel/random/boot_id"]);
    _ = node.aenv_ok(&["exec", &id, "sh", "-c", "echo kept > /root/file"]);
    let request = PauseRequest { memory: Some(false), ..PauseRequest::default() };
    node.client().pause_sandbox(&id, &request).await.expect("pause");
    assert_eq!(node.client().sandbox(&id).await.unwrap().pause_mode, Some(PauseMode::Filesystem));
    connect(&node, &id).await;
    assert_eq!(node.aenv_ok(&["exec", &id, "cat", "/root/file"]), "kept\n");
    assert_ne!(node.aenv_ok(&["exec", &id, "cat", "/proc/sys/kernel/random/boot_id"]), boot_id);
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forks_are_alike_and_apart() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let id = node.sandbox("tiny").await.sandbox_id.to_string();
    start_counting(&node, &id);
    _ = node.aenv_ok(&["exec", &id, "sh", "-c", "echo shared > /root/file"]);
    let request = ForkRequest { count: Some(4), timeout: None };
    let children = node.client().fork_sandbox(&id, &request).await.expect("fork");
    let children: Vec<_> = children.into_iter().map(|child| child.sandbox.expect("a child")).collect();
    let mut randoms = Vec::new();
    for child in &children {
        let id = child.sandbox_id.to_string();
        counts_on(&node, &id).await;
        assert_eq!(node.aenv_ok(&["exec", &id, "cat", "/root/file"]), "shared\n");
        _ = node.aenv_ok(&["exec", &id, "sh", "-c", "echo own > /root/file"]);
        randoms.push(node.aenv_ok(&["exec", &id, "sh", "-c", "head -c 32 /dev/urandom | md5sum; hostname"]));
    }
    assert_eq!(node.aenv_ok(&["exec", &id, "cat", "/root/file"]), "shared\n", "a child's write reached its source");
    counts_on(&node, &id).await;
    randoms.sort();
    randoms.dedup();
    assert_eq!(randoms.len(), 4, "{randoms:?}");
    let grandchild = children[0].sandbox_id.to_string();
    let grandchildren = node.client().fork_sandbox(&grandchild, &ForkRequest::default()).await.expect("fork a fork");
    let grandchild = grandchildren[0].sandbox.as_ref().expect("a grandchild").sandbox_id.to_string();
    assert_eq!(node.aenv_ok(&["exec", &grandchild, "cat", "/root/file"]), "own\n");
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_outlive_their_sandbox_and_the_server() {
    let Some(mut node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let id = node.sandbox("tiny").await.sandbox_id.to_string();
    start_counting(&node, &id);
    let named = NewSnapshot { name: Some("prepared".into()), ..NewSnapshot::default() };
    let snapshot = node.client().create_snapshot(&id, &named).await.expect("take a snapshot");
    assert_eq!(snapshot.names, ["prepared"]);
    counts_on(&node, &id).await;
    let again = node.client().create_snapshot(&id, &named).await.unwrap_err();
    assert!(again.to_string().contains("'prepared' is taken"), "{again}");
    node.client().delete_sandbox(&id).await.unwrap();
    let listed = node.client().list_snapshots::<SnapshotInfo>(Some(&id), None).await.unwrap();
    assert_eq!(listed.items, std::slice::from_ref(&snapshot));

    node.kill9();
    node.restart().await;
    for template in ["prepared".to_owned(), snapshot.snapshot_id.to_string()] {
        let id = node.sandbox(&template).await.sandbox_id.to_string();
        counts_on(&node, &id).await;
        // What runs on it goes on when it is deleted.
        if template != "prepared" {
            node.client().delete_template(&template).await.expect("delete the snapshot");
            counts_on(&node, &id).await;
            pause(&node, &id).await;
            connect(&node, &id).await;
            counts_on(&node, &id).await;
        }
    }
    let gone = NewSandbox { template_id: "prepared".into(), ..NewSandbox::default() };
    assert!(node.client().create_sandbox(&gone).await.unwrap_err().to_string().contains("not found"));
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_pauses_forks_and_takes_snapshots() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let id = node.aenv_ok(&["start", "tiny", "--detach"]).trim().to_owned();
    start_counting(&node, &id);
    let state = |id: &str| {
        let list = node.aenv_ok(&["list", "--output", "table"]);
        let line = list.lines().find(|line| line.starts_with(id)).unwrap_or_else(|| panic!("{id} is not in {list}"));
        line.split_whitespace().nth(2).expect("a state").to_owned()
    };
    assert_eq!(node.aenv_ok(&["pause", &id]), format!("Paused {id}\n"));
    assert_eq!(state(&id), "paused");
    let exec = node.aenv(&["exec", &id, "true"]);
    let told = String::from_utf8_lossy(&exec.stderr).into_owned();
    assert!(!exec.status.success() && told.contains(&format!("aenv resume {id}")), "{told}");
    assert_eq!(node.aenv_ok(&["resume", &id]), format!("Resumed {id}\n"));
    assert_eq!(state(&id), "running");
    counts_on(&node, &id).await;

    let children = node.aenv_ok(&["fork", &id, "--count", "2"]);
    assert_eq!(children.lines().count(), 2, "{children}");
    for child in children.lines() {
        counts_on(&node, child).await;
        assert_eq!(node.aenv_ok(&["delete", child]), format!("Deleted sandbox {child}\n"));
    }

    let created = node.aenv_ok(&["snapshot", "create", &id, "--name", "prepared"]);
    let snapshot = created.trim().strip_prefix("Created snapshot ").expect("its id");
    let listed = node.aenv_ok(&["snapshot", "list", "--sandbox-id", &id, "--output", "table"]);
    let named = listed.lines().nth(1).is_some_and(|line| line.starts_with(snapshot) && line.contains("prepared"));
    assert!(named, "{listed}");
    let other = node.aenv_ok(&["start", "prepared", "--detach"]).trim().to_owned();
    counts_on(&node, &other).await;
    let refused = node.aenv(&["snapshot", "delete", "tiny"]);
    assert!(!refused.status.success(), "a template is no snapshot");
    assert_eq!(node.aenv_ok(&["snapshot", "delete", "prepared"]), format!("Deleted snapshot {snapshot}\n"));
    assert_eq!(node.aenv_ok(&["snapshot", "list"]), "[]\n");

    // What `start` made is kept when its time is over.
    assert_eq!(node.aenv_ok(&["timeout", &id, "0"]), format!("Timeout for {id} set to 0s\n"));
    eventually("its deadline pauses it", async || (state(&id) == "paused").then_some(())).await;
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_pauses_and_traffic_resumes() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let request = NewSandbox {
        template_id: "tiny".into(),
        auto_pause: Some(true),
        auto_resume: Some(aenv_api::AutoResume { enabled: true }),
        ..NewSandbox::default()
    };
    let id = node.client().create_sandbox(&request).await.unwrap().sandbox_id.to_string();
    start_counting(&node, &id);
    node.client().set_timeout(&id, &TimeoutRequest { timeout: 0 }).await.unwrap();
    eventually("its deadline pauses it", async || {
        let detail = node.client().sandbox(&id).await.unwrap();
        (detail.listed.state == SandboxState::Paused).then_some(())
    })
    .await;
    let health = reqwest::Client::new()
        .get(format!("{}/health", node.url()))
        .header("e2b-sandbox-id", &id)
        .header("e2b-sandbox-port", "49983")
        .timeout(Duration::from_secs(60));
    assert!(health.send().await.unwrap().status().is_success());
    assert_eq!(node.client().sandbox(&id).await.unwrap().listed.state, SandboxState::Running);
    counts_on(&node, &id).await;
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_costs_no_sandbox() {
    let Some(mut node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let (running, paused) = (node.sandbox("tiny").await, node.sandbox("tiny").await);
    let (running, paused) = (running.sandbox_id.to_string(), paused.sandbox_id.to_string());
    for id in [&running, &paused] {
        start_counting(&node, id);
    }
    pause(&node, &paused).await;
    let vmms = node.vmm_pids();
    node.kill9();
    node.restart().await;
    assert_eq!(node.vmm_pids(), vmms);
    counts_on(&node, &running).await;
    connect(&node, &paused).await;
    counts_on(&node, &paused).await;
    // What was taken over does all that it did before.
    pause(&node, &running).await;
    connect(&node, &running).await;
    counts_on(&node, &running).await;
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_server_pauses_or_leaves_what_runs() {
    for (on_stop, machines) in [("pause", 0), ("leave", 1)] {
        let options = NodeOptions { on_stop: Some(on_stop), ..NodeOptions::default() };
        let Some(mut node) = Node::start_with(options).await else { return };
        let Some(()) = node.tiny("tiny").await else { return };
        let id = node.sandbox("tiny").await.sandbox_id.to_string();
        start_counting(&node, &id);
        node.stop().await;
        assert_eq!(node.vmm_pids().len(), machines, "{on_stop}");
        node.restart().await;
        connect(&node, &id).await;
        counts_on(&node, &id).await;
        node.client().delete_sandbox(&id).await.unwrap();
        node.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_is_rolled_back_in_place() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let id = node.sandbox("tiny").await.sandbox_id.to_string();
    let counter = start_counting(&node, &id);
    _ = node.aenv_ok(&["exec", &id, "sh", "-c", "echo early > /root/file"]);
    let snapshot = node.client().create_snapshot(&id, &NewSnapshot::default()).await.expect("snapshot").snapshot_id;
    let then = count(&node, &id);
    _ = node.aenv_ok(&["exec", &id, "sh", "-c", &format!("echo late > /root/file; kill {counter}")]);
    for _ in 0..2 {
        let told = node.aenv_ok(&["rollback", &id, &snapshot.to_string()]);
        assert_eq!(told, format!("Rolled back {id} to {snapshot}\n"));
        assert_eq!(node.aenv_ok(&["exec", &id, "cat", "/root/file"]), "early\n");
        counts_on(&node, &id).await;
        eventually("one machine is left", async || (node.vmm_pids().len() == 1).then_some(())).await;
    }
    assert!(count(&node, &id) < then + 2000);
    // What it was rolled back to is not touched by what it does since.
    _ = node.aenv_ok(&["exec", &id, "sh", "-c", "echo later > /root/file"]);
    let other = node.sandbox(&snapshot.to_string()).await.sandbox_id.to_string();
    assert_eq!(node.aenv_ok(&["exec", &other, "cat", "/root/file"]), "early\n");
    let refused = node.aenv(&["rollback", &other, &snapshot.to_string()]);
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && words.contains("snapshotID"), "{words}");
    pause(&node, &id).await;
    connect(&node, &id).await;
    assert_eq!(node.aenv_ok(&["exec", &id, "cat", "/root/file"]), "later\n");
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_of_the_disk_alone_boots_with_its_files() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let id = node.sandbox("tiny").await.sandbox_id.to_string();
    let boot_id = node.aenv_ok(&["exec", &id, "cat", "/proc/sys/kernel/random/boot_id"]);
    _ = node.aenv_ok(&["exec", &id, "sh", "-c", "echo kept > /root/file"]);
    let request = NewSnapshot { memory: Some(false), ..NewSnapshot::default() };
    let snapshot = node.client().create_snapshot(&id, &request).await.expect("snapshot").snapshot_id;
    let other = node.sandbox(&snapshot.to_string()).await.sandbox_id.to_string();
    assert_eq!(node.aenv_ok(&["exec", &other, "cat", "/root/file"]), "kept\n");
    assert_ne!(node.aenv_ok(&["exec", &other, "cat", "/proc/sys/kernel/random/boot_id"]), boot_id);
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn creates_take_machines_that_stand_ready() {
    let config = "[pool.sandbox]\nsize = 1\n".to_owned();
    let Some(mut node) = Node::start_with(NodeOptions { config, ..NodeOptions::default() }).await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let mut hosts = Vec::new();
    for machines in [2, 3, 4] {
        let id = node.sandbox("tiny").await.sandbox_id.to_string();
        eventually("another stands ready", async || (node.vmm_pids().len() == machines).then_some(())).await;
        hosts.push(node.aenv_ok(&["exec", &id, "sh", "-c", "hostname; head -c 32 /dev/urandom | md5sum"]));
        assert!(hosts.last().unwrap().starts_with(&format!("aenv-{}", id.rsplit('-').next().unwrap())));
    }
    hosts.dedup();
    assert_eq!(hosts.len(), 3, "each is somebody else");
    node.kill9();
    node.restart().await;
    eventually("what stood ready is gone", async || (node.vmm_pids().len() == 3).then_some(())).await;
    node.finish().await;
}
