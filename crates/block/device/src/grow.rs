//! Makes the ext filesystem in an image fill it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use tokio::process::Command;

/// Longest run of one tool: a check of a large, full image reads all its metadata from a slow disk.
const PATIENCE: Duration = Duration::from_secs(300);

/// Whether the image holds an ext2/3/4 filesystem: the superblock's magic, at 56 in the block at 1024.
pub(crate) fn is_ext(image: &File) -> io::Result<bool> {
    let mut magic = [0; 2];
    match image.read_exact_at(&mut magic, 1024 + 56) {
        Ok(()) => Ok(u16::from_le_bytes(magic) == 0xEF53),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Grows the filesystem in the file `image` to the file's length. The error is a reason for people.
///
/// Cancel safety: if dropped, the tool is killed and the image is of no further use.
pub(crate) async fn fill(image: &Path) -> Result<(), String> {
    let refused = run("resize2fs", &[], image).await?;
    if refused.status.success() {
        return Ok(());
    }
    // It refuses a filesystem that was not unmounted cleanly, or was mounted after its last check.
    let check = run("e2fsck", &["-f", "-p"], image).await?;
    // 1: errors were found and all of them corrected.
    if !matches!(check.status.code(), Some(0 | 1)) {
        return Err(format!("e2fsck finds its filesystem damaged: {}", words(&check)));
    }
    let again = run("resize2fs", &[], image).await?;
    if again.status.success() { Ok(()) } else { Err(format!("resize2fs fails: {}", words(&again))) }
}

async fn run(tool: &str, options: &[&str], image: &Path) -> Result<Output, String> {
    let program =
        find(tool).ok_or_else(|| format!("{tool} is not installed (Debian, Ubuntu: apt-get install e2fsprogs)"))?;
    let mut command = Command::new(program);
    command.args(options).arg(image).stdin(Stdio::null()).env("LC_ALL", "C").kill_on_drop(true);
    match tokio::time::timeout(PATIENCE, command.output()).await {
        Ok(output) => output.map_err(|error| format!("{tool} cannot be run: {error}")),
        Err(_) => Err(format!("{tool} did not finish in {} s", PATIENCE.as_secs())),
    }
}

/// Looks in `PATH` and where Debian keeps filesystem tools, which is not in every user's `PATH`.
pub(crate) fn find(tool: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(usual).map(|dir| dir.join(tool)).find(|program| program.is_file())
}

/// What the tool said, on one line and not endless.
fn words(output: &Output) -> String {
    let text = [output.stderr.as_slice(), output.stdout.as_slice()].concat();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.join(" ").chars().take(500).collect()
}
