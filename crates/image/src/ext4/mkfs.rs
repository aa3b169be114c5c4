//! Making an empty ext4 file system, with `mke2fs` of e2fsprogs.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};

use aenv_model::Bytes;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use super::LABEL;

/// What tells one way of making it from another. Counted up with every change to what is below.
pub(crate) const MKFS: &str = "ext4-1";

/// All of them are mounted by Linux 6.1, and by any since 4.x. Spelled out, so that the host's `mke2fs.conf` has no say.
///
/// No journal: a disk is saved as a whole or not at all, and every write would be two. No checksums of metadata: layers are
/// checked as a whole, and each of them is seeded with a random number of the kernel's, so that no two conversions would be
/// alike. `uninit_bg` keeps the groups that nobody has used yet off the disk; `resize_inode` and `64bit` let it grow online.
const FEATURES: &str = "none,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,\
                        huge_file,dir_nlink,extra_isize,uninit_bg";
/// Any fixed ones do: of the volume, and for the order of names in directories.
const UUID: &str = "6145cf53-9e0b-4c52-8a3e-b6d1e8d2f3a1";
const HASH_SEED: &str = "c1b6f4d0-5c55-4f0e-8e36-0d3ae0f6a9b4";
/// What is customary: one inode for each 16 KiB.
const BYTES_PER_INODE: &str = "16384";
/// What `mke2fs` takes for the time. 0 would mean that nothing is given.
const TIME: &str = "1";

/// Why no file system could be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MkfsError {
    #[error("create {path}", path = path.display())]
    Create { path: PathBuf, source: io::Error },
    #[error("start {tool} (package e2fsprogs)")]
    Start { tool: &'static str, source: io::Error },
    #[error("{tool}: {status}: {words}")]
    Failed { tool: &'static str, status: ExitStatus, words: String },
    #[error("cancelled")]
    Cancelled,
}

impl MkfsError {
    /// Whether the host's disk was full. The tool tells it by its words only.
    pub(crate) fn disk_was_full(&self) -> bool {
        match self {
            Self::Create { source, .. } => {
                matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            }
            Self::Failed { words, .. } => {
                words.contains("No space left on device") || words.contains("Disk quota exceeded")
            }
            Self::Start { .. } | Self::Cancelled => false,
        }
    }
}

/// Makes the file `image` with an empty file system of `size`, the same bytes each time. The file is sparse; nothing is
/// synced. On an error it may be left behind.
///
/// Cancel safety: if dropped, the tool is killed.
pub(crate) async fn mkfs(image: &Path, size: Bytes, cancel: &CancellationToken) -> Result<(), MkfsError> {
    const TOOL: &str = "mke2fs";
    let file = std::fs::File::create(image).and_then(|file| file.set_len(size.get()));
    file.map_err(|source| MkfsError::Create { path: image.to_owned(), source })?;
    // Found where it is installed, even if the `PATH` is a user's.
    let path = ["/usr/sbin", "/sbin"].iter().map(|dir| Path::new(dir).join(TOOL)).find(|path| path.exists());
    let mut command = Command::new(path.unwrap_or_else(|| TOOL.into()));
    command
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0"])
        .args(["-i", BYTES_PER_INODE, "-L", LABEL, "-U", UUID, "-O", FEATURES])
        // A fresh sparse file is zero: inode tables count as cleared, so that no guest's kernel clears them later.
        .args(["-E", &format!("hash_seed={HASH_SEED},lazy_itable_init=0,root_owner=0:0")])
        .arg(image)
        .env_clear()
        .env("LC_ALL", "C")
        .env("E2FSPROGS_FAKE_TIME", TIME)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let start = |source| MkfsError::Start { tool: TOOL, source };
    let child = command.spawn().map_err(start)?;
    let output =
        cancel.run_until_cancelled(child.wait_with_output()).await.ok_or(MkfsError::Cancelled)?.map_err(start)?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    Err(MkfsError::Failed { tool: TOOL, status: output.status, words })
}
