//! Sudden ends: of the server, of a VMM, of the disk's free space.

use std::process::Command;

use aenv_api::NewSandbox;
use aenv_e2e::{Machine, Node, NodeOptions, eventually};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[tokio::test]
async fn the_next_server_ends_what_a_killed_one_left_and_says_so() {
    let Some(mut node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return node.finish().await };
    for _ in 0..2 {
        node.sandbox("tiny").await;
    }
    node.kill9();
    assert_eq!(node.vmm_pids().len(), 2, "machines outlive the server");
    node.restart().await;
    assert_eq!(node.vmm_pids(), Vec::<i32>::new());
    let log = node.log();
    assert!(log.contains("found sandboxes that a former server left") && log.contains("ended=2"), "{log}");
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
    for start in starts {
        assert!(start.await.unwrap().is_err(), "a killed server answers nobody");
    }
    node.restart().await;
    eventually("all machines are ended", async || node.vmm_pids().is_empty().then_some(())).await;
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

/// A home on a file system of its own, gone with this value.
struct SmallHome {
    dir: tempfile::TempDir,
}

impl SmallHome {
    fn mount(size: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={size},mode=0755");
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "aenv-e2e"]).arg(dir.path()).status();
        assert!(status.unwrap().success());
        Self { dir }
    }
}

impl Drop for SmallHome {
    fn drop(&mut self) {
        _ = nix::mount::umount2(self.dir.path(), nix::mount::MntFlags::MNT_DETACH);
    }
}

#[tokio::test]
async fn a_full_disk_is_reported_and_leaves_nothing_half_made() {
    if Machine::find().is_none() {
        return;
    }
    let small = SmallHome::mount("96m");
    let home = small.dir.path().join("home");
    std::fs::create_dir(&home).unwrap();
    let options = NodeOptions { home: Some(home.clone()), ..NodeOptions::default() };
    let Some(node) = Node::start_with(options).await else { return };
    // The small Debian does not fit: the build says why, and only that.
    let image = format!("oci:{}", node.machine().image.display());
    let status = node.build("base", &image).await;
    let reason = status.reason.map(|reason| reason.message).unwrap_or_default();
    assert!(reason.contains("no space"), "{reason}");
    let left: Vec<_> = std::fs::read_dir(home.join("imports")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");

    // The tiny image fits; then the rest of the disk is taken away.
    let Some(()) = node.tiny("tiny").await else { return node.finish_with_errors().await };
    let ballast = home.join("ballast");
    let fill = Command::new("dd").args(["if=/dev/zero", "bs=64k"]).arg(format!("of={}", ballast.display())).output();
    assert!(!fill.unwrap().status.success(), "the disk took everything");
    let request = NewSandbox { template_id: "tiny".into(), ..NewSandbox::default() };
    let error = node.client().create_sandbox(&request).await.unwrap_err();
    assert_eq!(error.status().map(|status| status.as_u16()), Some(507), "{error}");
    assert!(error.to_string().contains("not enough disk space"), "{error}");
    std::fs::remove_file(ballast).unwrap();
    let sandbox = node.sandbox("tiny").await;
    node.client().delete_sandbox(sandbox.sandbox_id).await.unwrap();
    node.finish_with_errors().await;
}
