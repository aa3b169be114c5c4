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
use crate::workspace::free_space;

const BLOCK: u64 = 4096;
const INODE: u64 = 256;
/// Smallest file system that is made: half of it is the smallest journal and its like.
const SMALLEST: u64 = 16 << 20;
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

/// The measures of a file system to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Plan {
    size: Bytes,
    inodes: u64,
    journal: Bytes,
}

impl DiskSize {
    fn plan(self, tally: Tally) -> Plan {
        let content = tally.blocks * BLOCK;
        let size = (content + self.slack.get()).max(self.minimum.get()).max(SMALLEST);
        // One inode for 16 KiB of free space is the customary ratio; the image's own come on top.
        let inodes = tally.inodes + 1024 + size.saturating_sub(content) / (16 << 10);
        // A journal of this size is never the bottleneck of one sandbox, and every block of it is written over time.
        let journal = Bytes(size / 64).max(Bytes::mib(4)).min(Bytes::mib(64)).round_up(Bytes::mib(1));
        // Bitmaps, group descriptors with room to grow, extent trees: well below 1/32.
        let needed = content + self.slack.get() + inodes * INODE + journal.get() + size / 32 + (1 << 20);
        Plan { size: Bytes(needed.max(self.minimum.get()).max(SMALLEST)).round_up(Bytes::mib(1)), inodes, journal }
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
    let mut plan = size.plan(tally);
    let folder = image.parent().unwrap_or(image);
    let free = free_space(folder).map_err(|source| ImportError::io("look at the space of", folder, source))?;
    let written = tally.blocks * BLOCK + tally.inodes * INODE + plan.journal.get();
    if written > free.get() {
        return Err(ImportError::NoSpace { doing: "make the root file system".to_owned(), free: Some(free) });
    }
    // The plan is an estimate. Where it is short, say so and take more, rather than always reserve for the worst.
    const ATTEMPTS: usize = 3;
    for attempt in 1.. {
        let file = std::fs::File::create(image).and_then(|file| file.set_len(plan.size.get()));
        file.map_err(|source| ImportError::io("create", image, source))?;
        match run(mkfs(dir, image, plan), None, cancel).await {
            Ok(()) => break,
            Err(Failure::Tool(error)) if attempt < ATTEMPTS && error.image_was_full() => {
                tracing::warn!(size = %plan.size, "file system was planned too small, trying a larger one");
                plan.size = Bytes(plan.size.get() + plan.size.get() / 4).round_up(Bytes::mib(1));
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
    Ok(plan.size)
}

fn mkfs(dir: &Path, image: &Path, plan: Plan) -> Command {
    let mut command = tool("mkfs.ext4");
    command
        .args(["-q", "-F", "-b", "4096", "-I", "256", "-m", "0", "-L", LABEL, "-O", FEATURES])
        .arg("-N")
        .arg(plan.inodes.to_string())
        .arg("-J")
        .arg(format!("size={}", plan.journal.get() >> 20))
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
                free: free_space(image.parent().unwrap_or(image)).ok(),
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
