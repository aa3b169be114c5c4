//! Making an ext4 image of a directory, with `mkfs.ext4 -d` of e2fsprogs.
//!
//! That option copies owners, modes, hard links, extended attributes (of symbolic links too), access control lists,
//! device nodes and holes exactly. Looked for and found wanting in 1.47.0: the root directory keeps its own owner,
//! mode and time (set here with `debugfs` afterwards), and times have whole seconds only.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use aenv_model::Bytes;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use crate::error::{ImportError, ToolError};
use crate::unpack::Tally;

const BLOCK: u64 = 4096;
const INODE: u64 = 256;
/// All of them are mounted by Linux 6.1, and by any since 4.x. Spelled out, so that the host's `mke2fs.conf` has no say.
const FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,\
                        large_file,huge_file,dir_nlink,extra_isize,metadata_csum";
/// The volume label of every root file system.
pub const LABEL: &str = "aenv-root";

/// How large a root file system is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskSize {
    /// Never smaller than this.
    pub minimum: Bytes,
    /// What is free for the sandbox to write, at the least.
    pub slack: Bytes,
}

impl Default for DiskSize {
    /// 1 GiB, half of it free.
    fn default() -> Self {
        Self { minimum: Bytes::gib(1), slack: Bytes::mib(512) }
    }
}

impl DiskSize {
    /// The size and number of inodes for a tree.
    fn plan(self, tally: Tally) -> (Bytes, u64) {
        let content = tally.blocks * BLOCK;
        // One inode for 16 KiB of slack is the customary ratio; small files beyond it have no room for their data.
        let slack = self.slack.get().max(self.minimum.get().saturating_sub(content));
        let inodes = tally.inodes + tally.inodes / 8 + 1024 + slack / (16 << 10);
        // Inode tables, a journal of at most 1/16 (64 MiB from 2 GiB on), bitmaps and group descriptors, extent trees.
        let metadata = inodes * INODE + (content + slack) / 16 + (16 << 20);
        let size = Bytes(content + slack + metadata).max(self.minimum).round_up(Bytes::mib(1));
        (size, inodes)
    }
}

/// Makes the file `image` with a file system that holds the content of `dir`, and gives its size.
///
/// The file is sparse. On an error it may be left behind.
/// Cancel safety: if dropped, the tools are killed.
pub(crate) async fn build(
    dir: &Path,
    image: &Path,
    tally: Tally,
    size: DiskSize,
    cancel: &CancellationToken,
) -> Result<Bytes, ImportError> {
    let (mut bytes, inodes) = size.plan(tally);
    // The plan is an estimate. Where it is short, say so and take more, rather than always reserve for the worst.
    const ATTEMPTS: usize = 3;
    for attempt in 1.. {
        let file = std::fs::File::create(image).and_then(|file| file.set_len(bytes.get()));
        file.map_err(|source| ImportError::io("create", image, source))?;
        match run(mkfs(dir, image, inodes), None, cancel).await {
            Ok(()) => break,
            Err(Failure::Tool(error)) if attempt < ATTEMPTS && error.image_was_full() => {
                tracing::warn!(size = %bytes, "file system was planned too small, trying a larger one");
                bytes = Bytes(bytes.get() + bytes.get() / 4).round_up(Bytes::mib(1));
            }
            Err(failure) => return Err(failure.into_import(image)),
        }
    }
    let meta = std::fs::metadata(dir).map_err(|source| ImportError::io("look at", dir, source))?;
    let script = format!(
        "set_inode_field / mode 0{:o}\nset_inode_field / uid {}\nset_inode_field / gid {}\nset_inode_field / mtime @{}\n",
        meta.permissions().mode(),
        meta.uid(),
        meta.gid(),
        meta.mtime().clamp(0, i64::from(u32::MAX)),
    );
    let mut debugfs = tool("debugfs");
    debugfs.arg("-w").arg("-f").arg("-").arg(image);
    run(debugfs, Some(script), cancel).await.map_err(|failure| failure.into_import(image))?;
    Ok(bytes)
}

fn mkfs(dir: &Path, image: &Path, inodes: u64) -> Command {
    let mut command = tool("mkfs.ext4");
    command
        .args(["-q", "-F", "-b", "4096", "-I", "256", "-m", "0", "-L", LABEL, "-O", FEATURES])
        .arg("-N")
        .arg(inodes.to_string())
        // A fresh sparse file is zero: inode tables count as cleared, so that no guest kernel clears them in the
        // background, and the journal needs no clearing.
        .args(["-E", "lazy_itable_init=0,lazy_journal_init=1,root_owner=0:0"])
        .arg("-d")
        .arg(dir)
        .arg(image);
    command
}

/// A program of e2fsprogs, found where it is installed even if the `PATH` is a user's.
fn tool(name: &str) -> Command {
    let path = ["/usr/sbin", "/sbin"].iter().map(|dir| Path::new(dir).join(name)).find(|path| path.exists());
    let mut command = Command::new(path.unwrap_or_else(|| PathBuf::from(name)));
    command.env("LC_ALL", "C").stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

enum Failure {
    Tool(ToolError),
    Cancelled,
}

impl Failure {
    fn into_import(self, image: &Path) -> ImportError {
        match self {
            Self::Cancelled => ImportError::Cancelled,
            Self::Tool(error) if error.disk_was_full() => ImportError::NoSpace {
                doing: "make the root file system".to_owned(),
                free: crate::workspace::free_space(image.parent().unwrap_or(image)).ok(),
            },
            Self::Tool(error) => ImportError::Tool { source: error },
        }
    }
}

/// Runs a tool to its end. Only its exit status and its words count.
async fn run(mut command: Command, input: Option<String>, cancel: &CancellationToken) -> Result<(), Failure> {
    let name = Path::new(command.as_std().get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let start = |source| Failure::Tool(ToolError::Start { tool: name.clone(), source });
    command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    let mut child = command.spawn().map_err(start)?;
    let stdin = child.stdin.take();
    let work = async {
        if let (Some(mut stdin), Some(input)) = (stdin, input) {
            // A tool that ends before it reads all says why on its standard error.
            let _ = stdin.write_all(input.as_bytes()).await;
        }
        child.wait_with_output().await
    };
    let output = cancel.run_until_cancelled(work).await.ok_or(Failure::Cancelled)?.map_err(start)?;
    let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    // `debugfs` says what went wrong and exits with 0 all the same; its first line is a banner.
    let complaint = words.lines().skip_while(|line| line.starts_with("debugfs ")).collect::<Vec<_>>().join("; ");
    if output.status.success() && (name != "debugfs" || complaint.is_empty()) {
        return Ok(());
    }
    Err(Failure::Tool(ToolError::Failed { tool: name, status: output.status, words: complaint }))
}

#[cfg(test)]
mod tests;
