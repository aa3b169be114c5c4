use std::path::Path;
use std::process::Command;

use aenv_model::Bytes;
use tokio_util::sync::CancellationToken;

use super::*;

fn asked(image: &Path, request: &str) -> String {
    let output = Command::new("/usr/sbin/debugfs").args(["-R", request]).arg(image).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[tokio::test]
async fn the_empty_file_system_is_the_same_each_time_and_takes_little() {
    let dir = tempfile::tempdir().unwrap();
    let images = ["a", "b"].map(|name| dir.path().join(name));
    for image in &images {
        mkfs(image, Bytes::gib(1), &CancellationToken::new()).await.unwrap();
    }
    assert!(std::fs::read(&images[0]).unwrap() == std::fs::read(&images[1]).unwrap());
    let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&images[0]).unwrap());
    assert!(blocks * 512 < 6 << 20, "{} KiB", blocks / 2);
    let superblock = asked(&images[0], "stats");
    assert!(superblock.contains("aenv-root") && superblock.contains("resize_inode"), "{superblock}");
    assert!(!superblock.contains("has_journal") && !superblock.contains("metadata_csum"), "{superblock}");
    let groups = Command::new("/usr/sbin/dumpe2fs").arg(&images[0]).output().unwrap().stdout;
    let groups = String::from_utf8_lossy(&groups);
    assert_eq!(groups.matches("ITABLE_ZEROED").count(), 8, "no kernel has anything left to clear: {groups}");
    let checked = Command::new("/usr/sbin/e2fsck").arg("-fn").arg(&images[0]).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}

#[tokio::test]
async fn what_the_tool_says_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let error = mkfs(&dir.path().join("small"), Bytes::kib(4), &CancellationToken::new()).await.unwrap_err();
    assert!(error.to_string().contains("mke2fs"), "{error}");
    let cancel = CancellationToken::new();
    cancel.cancel();
    let error = mkfs(&dir.path().join("x"), Bytes::gib(1), &cancel).await.unwrap_err();
    assert!(matches!(error, MkfsError::Cancelled), "{error}");
}
