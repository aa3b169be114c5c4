//! Sudden ends: of the server, of a VMM, of the disk's free space.

use std::process::Command;

use aenv_api::{ClientError, ConnectRequest, ListQuery, ListedSandbox, NewSandbox, PauseRequest, SandboxState};
use aenv_e2e::{Machine, Node, NodeOptions, SmallHome, eventually};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[tokio::test]
async fn the_next_server_takes_over_what_runs_and_tells_of_what_does_not() {
    let Some(mut node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return node.finish().await };
    for _ in 0..2 {
        node.sandbox("tiny").await;
    }
    node.kill9();
    let vmms = node.vmm_pids();
    assert_eq!(vmms.len(), 2, "machines outlive the server");
    kill(Pid::from_raw(vmms[0]), Signal::SIGKILL).unwrap();
    node.restart().await;
    assert_eq!(node.vmm_pids(), vmms[1..]);
    let log = node.log();
    assert!(log.contains("found sandboxes of a former server") && log.contains("running: 1"), "{log}");
    assert!(log.contains("ended: 1"), "{log}");
    let listed = node.client().list_sandboxes::<ListedSandbox>(&ListQuery::default()).await.unwrap().items;
    assert_eq!(listed.len(), 1);
    assert_eq!(node.aenv_ok(&["exec", &listed[0].sandbox_id.to_string(), "echo", "still"]), "still\n");
    // What was acknowledged is still there: the template starts another sandbox.
    let again = node.sandbox("tiny").await;
    assert_eq!(node.aenv_ok(&["exec", &again.sandbox_id.to_string(), "echo", "again"]), "again\n");
    node.finish().await;
}

#[tokio::test]
async fn a_server_killed_while_sandboxes_start_leaves_nothing_that_is_not_found() {
    let Some(mut node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return node.finish().await };
    let client = node.client();
    let starts: Vec<_> = (0..4)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                let request = NewSandbox { template_id: "tiny".into(), ..NewSandbox::default() };
                client.create_sandbox(&request).await
            })
        })
        .collect();
    eventually("a machine was started", async || (!node.vmm_pids().is_empty()).then_some(())).await;
    node.kill9();
    let mut answered = 0;
    for start in starts {
        answered += usize::from(start.await.unwrap().is_ok());
    }
    node.restart().await;
    // Those that were ready go on; whatever was half made is ended.
    eventually("each machine is a sandbox's", async || {
        let listed = node.client().list_sandboxes::<ListedSandbox>(&ListQuery::default()).await.unwrap().items;
        (listed.len() == node.vmm_pids().len() && listed.len() >= answered).then_some(())
    })
    .await;
    node.finish().await;
}

#[tokio::test]
async fn a_killed_vmm_is_noticed_and_its_sandbox_gone_with_a_reason() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return node.finish().await };
    let sandbox = node.sandbox("tiny").await;
    kill(Pid::from_raw(node.vmm_pids()[0]), Signal::SIGKILL).unwrap();
    let client = node.client();
    let error = eventually("the end is noticed", async || client.sandbox(sandbox.sandbox_id).await.err()).await;
    assert!(error.is_not_found(), "{error}");
    let reason = eventually("the reason is told", async || {
        let text = client.sandbox(sandbox.sandbox_id).await.err()?.to_string();
        text.contains("its machine ended").then_some(text)
    })
    .await;
    assert!(reason.contains(&sandbox.sandbox_id.to_string()), "{reason}");
    node.finish().await;
}

#[tokio::test]
async fn a_full_disk_is_reported_and_leaves_nothing_half_made() {
    let Some((node, small)) = on_a_small_disk().await else { return };
    let home = small.path();
    // With what is left, the small Debian does not fit: the build says why, and only that.
    let free = || {
        let home = nix::sys::statvfs::statvfs(&home).unwrap();
        home.blocks_available() * home.fragment_size()
    };
    let most = home.join("most-of-it");
    std::fs::write(&most, vec![0; free().saturating_sub(48 << 20) as usize]).unwrap();
    let image = format!("oci:{}", node.machine().image.display());
    let status = node.build("base", &image).await;
    let reason = status.reason.map(|reason| reason.message).unwrap_or_default();
    assert!(reason.contains("no space"), "{reason}");
    let left: Vec<_> = std::fs::read_dir(home.join("image-cache/staging")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");

    // Then the rest of the disk is taken away.
    let ballast = fill(&home);
    let request = NewSandbox { template_id: "tiny".into(), ..NewSandbox::default() };
    let error = node.client().create_sandbox(&request).await.unwrap_err();
    assert_no_space(&error);
    std::fs::remove_file(ballast).unwrap();
    let sandbox = node.sandbox("tiny").await;
    node.client().delete_sandbox(sandbox.sandbox_id).await.unwrap();
    node.finish_with_errors().await;
}

#[tokio::test]
async fn a_pause_that_finds_the_disk_full_leaves_the_sandbox_as_it_was() {
    let Some((node, small)) = on_a_small_disk().await else { return };
    let home = small.path();
    let id = node.sandbox("tiny").await.sandbox_id.to_string();
    _ = node.aenv_ok(&["exec", &id, "sh", "-c", "echo kept > /root/file; echo there > /dev/shm/memory; sync"]);

    let ballast = fill(&home);
    let error = node.client().pause_sandbox(&id, &PauseRequest::default()).await.unwrap_err();
    assert_no_space(&error);
    let shown = node.client().sandbox(&id).await.unwrap();
    assert_eq!(shown.listed.state, SandboxState::Running);
    let kept = ["exec", &id, "cat", "/root/file", "/dev/shm/memory"];
    assert_eq!(node.aenv_ok(&kept), "kept\nthere\n", "it runs on");

    std::fs::remove_file(ballast).unwrap();
    _ = node.aenv_ok(&["exec", &id, "sh", "-c", "echo more >> /root/file; sync"]);
    node.client().pause_sandbox(&id, &PauseRequest::default()).await.expect("pause with room again");
    node.client().connect_sandbox(&id, &ConnectRequest { timeout: Some(600), memory: None }).await.expect("resume");
    assert_eq!(node.aenv_ok(&kept), "kept\nmore\nthere\n");
    node.client().delete_sandbox(&id).await.unwrap();
    node.finish_with_errors().await;
}

/// A node with a template whose home has 320 MiB, and that home, which goes after it. `None`: this machine lacks something.
async fn on_a_small_disk() -> Option<(Node, SmallHome)> {
    Machine::find()?;
    let small = SmallHome::mount("320m");
    let options = NodeOptions { home: Some(small.path()), ..NodeOptions::default() };
    let node = Node::start_with(options).await?;
    match node.tiny("tiny").await {
        Some(()) => Some((node, small)),
        None => {
            node.finish_with_errors().await;
            None
        }
    }
}

fn assert_no_space(error: &ClientError) {
    assert_eq!(error.status().map(|status| status.as_u16()), Some(507), "{error}");
    assert!(error.to_string().contains("not enough disk space"), "{error}");
}

/// Takes away what is left of the disk of `home`, until the file is removed.
fn fill(home: &std::path::Path) -> std::path::PathBuf {
    let ballast = home.join("ballast");
    let fill = Command::new("dd").args(["if=/dev/zero", "bs=64k"]).arg(format!("of={}", ballast.display())).output();
    assert!(!fill.unwrap().status.success(), "the disk took everything");
    ballast
}
