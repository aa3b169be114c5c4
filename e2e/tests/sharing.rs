//! Nodes that share a repository: what one makes, the other starts from; what one deletes, the other has no more.

#[path = "../../crates/objects/tests/support/mod.rs"]
mod s3;

use std::path::Path;

use aenv_api::{BuildState, Client, NewSandbox, NewSnapshot, SnapshotInfo, Template};
use aenv_e2e::{Node, NodeOptions, eventually};

/// Two nodes with one repository. `None`: this machine lacks something.
async fn two(repository: String) -> Option<[Node; 2]> {
    let options = NodeOptions { config: repository, ..NodeOptions::default() };
    Some([Node::start_with(options.clone()).await?, Node::start_with(options).await?])
}

fn folder(path: &Path) -> String {
    format!("[snapshot]\nrepository_backend = \"posix_fs\"\n[backend.posix_fs]\nsnapshot_store = {path:?}")
}

fn bucket(server: &s3::Server) -> String {
    format!(
        "[snapshot]\nrepository_backend = \"oss\"\n[backend.oss]\nendpoint = \"http://{}\"\nbucket = {:?}\n\
         region = {:?}\nprefix = \"aenv\"\naccess_key_id = \"us\"\naccess_key_secret = \"secret\"",
        server.host,
        s3::BUCKET,
        s3::REGION
    )
}

async fn templates(client: &Client) -> Vec<String> {
    let listed = client.list_templates::<Template>(None).await.expect("list templates");
    listed.items.into_iter().flat_map(|template| template.names).collect()
}

async fn refused(node: &Node, template: &str) -> String {
    let request = NewSandbox { template_id: template.to_owned(), ..NewSandbox::default() };
    node.client().create_sandbox(&request).await.expect_err("a sandbox of nothing").to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_of_one_node_starts_on_the_other() {
    let shared = tempfile::tempdir().unwrap();
    let Some([a, b]) = two(folder(shared.path())).await else { return };
    let Some(()) = a.tiny("tiny").await else { return };
    for node in [&a, &b] {
        assert_eq!(templates(&node.client()).await, ["tiny"]);
        let id = node.sandbox("tiny").await.sandbox_id.to_string();
        assert_eq!(node.aenv_ok(&["exec", &id, "echo", "hello"]), "hello\n");
    }
    // One that was announced to one node may be built by the other.
    let image = format!("oci:{}", aenv_e2e::tiny::layout(&a.scratch().join("again")).unwrap().display());
    let announced = a.announce("second").await;
    b.begin_build(&announced, &image).await;
    for node in [&a, &b] {
        eventually("the build ends", async || {
            let (template, build) = (announced.template_id, announced.build_id);
            let status = node.client().build_status(template, build, &Default::default()).await.expect("ask for it");
            match status.status {
                BuildState::Ready => Some(()),
                BuildState::Error => panic!("{status:?}"),
                _ => None,
            }
        })
        .await;
    }
    _ = a.sandbox("second").await;
    // What one deletes, nobody finds.
    b.client().delete_template("tiny").await.expect("delete the template");
    for node in [&a, &b] {
        assert_eq!(templates(&node.client()).await, ["second"]);
        assert!(refused(node, "tiny").await.contains("not found"));
    }
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_of_one_node_goes_on_on_the_other() {
    let shared = tempfile::tempdir().unwrap();
    snapshots_go_on_elsewhere(folder(shared.path())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_takes_the_place_of_a_folder_and_layers_are_compressed_in_it() {
    let server = s3::Server::start().await;
    snapshots_go_on_elsewhere(bucket(&server)).await;
    let seen = server.seen();
    assert!(seen.iter().any(|request| request.starts_with("PUT") && request.contains("/aenv/managed-layers/")));
}

async fn snapshots_go_on_elsewhere(repository: String) {
    let Some([a, mut b]) = two(repository).await else { return };
    let Some(()) = a.tiny("tiny").await else { return };
    let id = a.sandbox("tiny").await.sandbox_id.to_string();
    let script = "echo kept > /root/file; (n=0; while :; do n=$((n+1)); echo $n > /tmp/count.new; \
                  mv /tmp/count.new /tmp/count; sleep 0.05; done) >/dev/null 2>&1 & echo $!";
    let counter = a.aenv_ok(&["exec", &id, "sh", "-c", script]).trim().to_owned();
    let boot_id = a.aenv_ok(&["exec", &id, "cat", "/proc/sys/kernel/random/boot_id"]);
    let named = NewSnapshot { name: Some("prepared".into()), ..NewSnapshot::default() };
    let snapshot = a.client().create_snapshot(&id, &named).await.expect("take a snapshot");
    let listed = b.client().list_snapshots::<SnapshotInfo>(Some(&id), None).await.expect("list snapshots");
    assert_eq!(listed.items, std::slice::from_ref(&snapshot));

    let there = b.sandbox("prepared").await.sandbox_id.to_string();
    let state = b.aenv_ok(&["exec", &there, "sh", "-c", &format!("kill -0 {counter} && cat /root/file")]);
    assert_eq!(state, "kept\n");
    assert_eq!(b.aenv_ok(&["exec", &there, "cat", "/proc/sys/kernel/random/boot_id"]), boot_id, "it was never booted");
    let count = |node: &Node, id: &str| -> u64 {
        node.aenv_ok(&["exec", id, "cat", "/tmp/count"]).trim().parse().expect("a number")
    };
    let before = count(&b, &there);
    eventually("it goes on counting", async || (count(&b, &there) > before).then_some(())).await;

    // A snapshot of that goes back, over layers that are there already.
    _ = b.aenv_ok(&["exec", &there, "sh", "-c", "echo changed > /root/file"]);
    let second = b.client().create_snapshot(&there, &NewSnapshot::default()).await.expect("take a snapshot");
    let back = a.sandbox(&second.snapshot_id.to_string()).await.sandbox_id.to_string();
    assert_eq!(a.aenv_ok(&["exec", &back, "cat", "/root/file"]), "changed\n");

    // Deleted by the one, it is gone for the other, even one that was killed meanwhile; what runs on it goes on.
    b.client().delete_template("prepared").await.expect("delete the snapshot");
    assert!(refused(&a, "prepared").await.contains("not found"));
    b.kill9();
    b.restart().await;
    assert_eq!(b.aenv_ok(&["exec", &there, "cat", "/root/file"]), "changed\n");
    let other = b.sandbox("tiny").await.sandbox_id.to_string();
    assert_eq!(b.aenv_ok(&["exec", &other, "echo", "hello"]), "hello\n");
    assert!(refused(&b, &snapshot.snapshot_id.to_string()).await.contains("not found"));
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_gone_is_told_and_a_node_goes_on_with_its_own() {
    let server = s3::Server::start().await;
    let options = NodeOptions { config: bucket(&server), ..NodeOptions::default() };
    let Some(node) = Node::start_with(options).await else { return };
    let Some(()) = node.tiny("tiny").await else { return };
    let id = node.sandbox("tiny").await.sandbox_id.to_string();
    drop(server);
    for name in [Some("prepared".to_owned()), None] {
        let refused =
            node.client().create_snapshot(&id, &NewSnapshot { name, ..NewSnapshot::default() }).await.unwrap_err();
        assert_eq!(refused.status().map(|status| status.as_u16()), Some(503), "{refused}");
        assert!(refused.to_string().contains("snapshot repository is unavailable"), "{refused}");
        assert_eq!(node.aenv_ok(&["exec", &id, "echo", "hello"]), "hello\n");
    }
    let other = node.sandbox("tiny").await.sandbox_id.to_string();
    assert_eq!(node.aenv_ok(&["exec", &other, "echo", "hello"]), "hello\n");
    node.finish_with_errors().await;
}
