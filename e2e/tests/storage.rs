//! Disks as sandboxes see them, and what the storage daemon owes them.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

use aenv_api::{NewColdSandbox, Sandbox};
use aenv_block_client::BlockdClient;
use aenv_e2e::{Machine, Node, NodeOptions, SmallHome, eventually, tiny};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Longest a command may hang on a disk that is gone.
const NO_HANG: Duration = Duration::from_secs(60);

fn sh(node: &Node, sandbox: &Sandbox, script: &str) -> Output {
    node.aenv(&["exec", &sandbox.sandbox_id.to_string(), "--", "/bin/sh", "-c", script])
}

fn sh_ok(node: &Node, sandbox: &Sandbox, script: &str) -> String {
    node.aenv_ok(&["exec", &sandbox.sandbox_id.to_string(), "--", "/bin/sh", "-c", script])
}

fn daemon(node: &Node) -> BlockdClient {
    BlockdClient::new(node.runtime().join("ublk-daemon.sock"))
}

/// What a sandbox's upper takes on the host.
fn taken(node: &Node, sandbox: &Sandbox) -> u64 {
    let dir = node.home().join("disks").join(sandbox.sandbox_id.to_string());
    let files = std::fs::read_dir(dir).expect("the disk's directory").flatten();
    files.map(|file| file.metadata().expect("look at a file").blocks() * 512).sum()
}

/// The files of converted layers.
fn commits(node: &Node) -> Vec<PathBuf> {
    let dirs = std::fs::read_dir(node.home().join("image-cache/commits")).into_iter().flatten().flatten();
    dirs.map(|dir| dir.path()).collect()
}

#[tokio::test]
async fn a_sandbox_from_an_image_gets_the_disk_size_that_it_asks_for() {
    let Some(node) = Node::start().await else { return };
    let Some(layout) = tiny::layout(&node.scratch().join("image")) else { return node.finish().await };
    let image = format!("oci:{}", layout.display());
    let cold = |size| NewColdSandbox {
        image: image.clone(),
        cpu_count: Some(1),
        memory_mb: Some(256),
        disk_size_mb: Some(size),
        ..NewColdSandbox::default()
    };
    let client = node.client();
    let small = client.create_sandbox_cold(&cold(2048)).await.unwrap_err().to_string();
    assert!(small.contains("smaller than the image's"), "{small}");
    let uneven = client.create_sandbox_cold(&cold(1500)).await.unwrap_err().to_string();
    assert!(uneven.contains("diskSizeMB"), "{uneven}");

    let sandbox = client.create_sandbox_cold(&cold(70 << 10)).await.expect("a sandbox from an image");
    assert_eq!(client.sandbox(sandbox.sandbox_id).await.expect("its detail").listed.disk_size_mb, 70 << 10);
    let blocks = sh_ok(&node, &sandbox, "df -k / | tail -n 1");
    let kib: u64 = blocks.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("df tells a size");
    assert!((66 << 20..=70 << 20).contains(&kib), "the file system has {kib} KiB");
    node.finish().await;
}

#[tokio::test]
async fn templates_share_their_layers_and_sandboxes_do_not_share_what_they_write() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("one").await else { return node.finish().await };
    let before = commits(&node);
    assert!(!before.is_empty(), "layers are kept");
    node.tiny("two").await;
    assert_eq!(commits(&node), before, "the same layers again");

    let (first, second) = (node.sandbox("one").await, node.sandbox("two").await);
    sh_ok(&node, &first, "echo mine > /file && sync");
    let there = sh(&node, &second, "cat /file");
    assert!(!there.status.success(), "{there:?}");
    node.finish().await;
}

#[tokio::test]
async fn what_a_guest_writes_is_flushed_and_what_it_trims_is_given_back() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return node.finish().await };
    let sandbox = node.sandbox("tiny").await;
    let fresh = taken(&node, &sandbox);
    let device = || async {
        let device = daemon(&node).get(&sandbox.sandbox_id.to_string()).await.expect("ask the daemon");
        device.expect("the sandbox's device").stats
    };
    let flushes = device().await.flush.operations;
    sh_ok(&node, &sandbox, "dd if=/dev/urandom of=/big bs=1048576 count=32 conv=fsync 2>&1");
    assert!(device().await.flush.operations > flushes, "fsync in the guest flushes the device");
    let written = taken(&node, &sandbox);
    assert!(written - fresh >= 32 << 20, "{fresh} bytes, then {written}");

    sh_ok(&node, &sandbox, "rm /big && sync && fstrim /");
    eventually("the space is given back", async || {
        daemon(&node).flush(&sandbox.sandbox_id.to_string()).await.expect("flush the device");
        (taken(&node, &sandbox) < fresh + (8 << 20)).then_some(())
    })
    .await;
    node.finish().await;
}

#[tokio::test]
async fn a_limited_disk_is_no_faster_than_its_limit() {
    let config = "[machine.disk_rate_limit]\nenabled = true\nbandwidth_bytes_per_sec = 4194304".to_owned();
    let Some(node) = Node::start_with(NodeOptions { config, ..NodeOptions::default() }).await else { return };
    let Some(()) = node.tiny("tiny").await else { return node.finish().await };
    let sandbox = node.sandbox("tiny").await;
    let begun = Instant::now();
    sh_ok(&node, &sandbox, "dd if=/dev/urandom of=/big bs=1048576 count=16 conv=fsync 2>&1");
    assert!(begun.elapsed() >= Duration::from_secs(3), "16 MiB at 4 MiB/s took {:?}", begun.elapsed());
    node.finish().await;
}

#[tokio::test]
async fn a_killed_daemon_is_back_at_once_and_hangs_nobody() {
    let Some(node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return node.finish().await };
    // Booted: its memory is its own. That of one that goes on from a template is a mapping of what the daemon serves.
    let image = format!("oci:{}", node.scratch().join("tiny").display());
    let cold = NewColdSandbox { image, cpu_count: Some(1), memory_mb: Some(256), ..NewColdSandbox::default() };
    let sandbox = node.client().create_sandbox_cold(&cold).await.expect("boot a sandbox");
    let restored = node.sandbox("tiny").await;
    sh_ok(&node, &sandbox, "echo kept > /kept && sync");
    let killed = node.blockd_pid().expect("the daemon runs");
    kill(Pid::from_raw(killed), Signal::SIGKILL).expect("kill the daemon");
    let begun = Instant::now();
    let write = "timeout 20 dd if=/dev/zero of=/more bs=65536 count=64 conv=fsync 2>&1; echo done";
    drop(sh(&node, &sandbox, write)); // an error, or an end: but no hang
    assert!(begun.elapsed() < NO_HANG, "a command hung for {:?}", begun.elapsed());

    let back = eventually("the daemon is back", async || node.blockd_pid().filter(|pid| *pid != killed)).await;
    assert_ne!(back, killed);
    let name = sandbox.sandbox_id.to_string();
    let device = eventually("the device is back", async || daemon(&node).get(&name).await.ok().flatten()).await;
    assert_eq!(device.problem, None);
    // One whose memory was the daemon's goes on or ends, and whoever asks for it hears which.
    let write = "timeout 20 dd if=/dev/zero of=/more bs=65536 count=64 conv=fsync 2>&1; echo done";
    drop(sh(&node, &restored, write));
    assert!(begun.elapsed() < 2 * NO_HANG, "a command hung for {:?}", begun.elapsed());
    if let Err(gone) = node.client().sandbox(restored.sandbox_id).await {
        let told = eventually("its end is told", async || {
            let text = node.client().sandbox(restored.sandbox_id).await.err()?.to_string();
            text.contains("its machine ended").then_some(text)
        });
        assert!(told.await.contains("SIGBUS"), "{gone}");
    }
    // Everybody else goes on, and this sandbox can be deleted.
    let other = node.sandbox("tiny").await;
    assert_eq!(sh_ok(&node, &other, "echo well"), "well\n");
    node.client().delete_sandbox(sandbox.sandbox_id).await.expect("delete the sandbox whose disk had gone");
    node.finish_with_errors().await;
}

#[tokio::test]
async fn a_full_host_disk_is_an_error_for_who_writes_and_nobody_else() {
    if Machine::find().is_none() {
        return;
    }
    let small = SmallHome::mount("320m");
    let options = NodeOptions { home: Some(small.path()), ..NodeOptions::default() };
    let Some(node) = Node::start_with(options).await else { return };
    let Some(()) = node.tiny("tiny").await else { return node.finish().await };
    let (greedy, other) = (node.sandbox("tiny").await, node.sandbox("tiny").await);
    sh_ok(&node, &other, "echo kept > /kept && sync");
    let full = sh(&node, &greedy, "dd if=/dev/urandom of=/big bs=1048576 count=512 conv=fsync 2>&1");
    assert!(!full.status.success(), "512 MiB in a home of 320: {full:?}");
    assert_eq!(sh_ok(&node, &other, "cat /kept"), "kept\n");
    node.client().delete_sandbox(greedy.sandbox_id).await.expect("delete the sandbox");
    sh_ok(&node, &other, "echo again > /again && sync && cat /again");
    node.finish_with_errors().await;
}

#[tokio::test]
async fn a_server_killed_while_it_converts_goes_on_where_it_was() {
    let Some(mut node) = Node::start().await else { return };
    let Some(()) = node.tiny("tiny").await else { return node.finish().await };
    let image = format!("oci:{}", node.machine().image.display());
    node.start_build("big", &image).await;
    eventually("the conversion is under way", async || {
        daemon(&node).list().await.ok()?.iter().any(|device| device.name.starts_with("convert-")).then_some(())
    })
    .await;
    node.kill9();
    node.restart().await;
    let devices = daemon(&node).list().await.expect("list the devices");
    assert!(devices.is_empty(), "{devices:?}");
    assert!(loops_of(node.home()).is_empty() && loops_of(node.runtime()).is_empty());
    node.debian("big").await;
    let sandbox = node.sandbox("big").await;
    assert_eq!(sh_ok(&node, &sandbox, "echo well"), "well\n");
    node.finish().await;
}

/// Backing files of loop devices below `dir`.
fn loops_of(dir: &Path) -> Vec<String> {
    let devices = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let backing = devices.filter_map(|device| std::fs::read_to_string(device.path().join("loop/backing_file")).ok());
    backing.filter(|file| file.starts_with(&*dir.to_string_lossy())).collect()
}
