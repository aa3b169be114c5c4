//! From here into a sandbox.

use std::fs::{self, FileType, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use jiff::Timestamp;
use tokio::fs::File;
use tokio::io::AsyncReadExt as _;
use tokio::time::sleep;

use super::progress::Progress;
use super::{IDLE, joined, name_of, tree_path};
use crate::args::Upload;
use crate::guest::Guest;
use crate::guest::files::{Entry, Kind};

/// Bytes read at a time.
const PIECE: usize = 128 << 10;

/// A file to be copied.
#[derive(Debug)]
struct Item {
    local: PathBuf,
    remote: String,
    size: u64,
    modified: Option<Timestamp>,
}

/// Copies what was asked for; gives a sentence about it.
pub(super) async fn run(guest: &Guest, upload: &Upload) -> anyhow::Result<String> {
    let (local, user) = (&upload.local, upload.user.as_deref());
    let found = fs::symlink_metadata(local).with_context(|| format!("read {}", local.display()))?;
    if upload.remote.is_empty() {
        bail!("the path in the sandbox is empty");
    }
    refuse_special(local, found.file_type())?;
    if found.is_dir() {
        return tree(guest, upload).await;
    }
    let there = guest.stat(&upload.remote, user).await.with_context(|| format!("look at {}", upload.remote))?;
    let is_dir = there.is_some_and(|there| there.kind == Kind::Directory);
    let remote = match is_dir || upload.remote.ends_with('/') {
        true => joined_keeping_home(&upload.remote, &name_of(local)?),
        false => upload.remote.clone(),
    };
    let item = Item { local: local.clone(), remote, size: found.len(), modified: modified(&found) };
    let progress = Progress::new(item.size);
    let skipped = upload.skip_same && is_same(&item, guest.stat(&item.remote, user).await?);
    if !skipped {
        send(guest, &item, user, &progress).await?;
    }
    progress.clear();
    let what = if skipped { "Skipped, as it is there," } else { "Uploaded" };
    Ok(format!("{what} {} to {}", local.display(), item.remote))
}

/// `name` in a directory; a relative directory stays relative.
fn joined_keeping_home(dir: &str, name: &str) -> String {
    let trimmed = dir.trim_end_matches('/');
    if trimmed.is_empty() && !dir.starts_with('/') { name.to_owned() } else { joined(trimmed, name) }
}

async fn tree(guest: &Guest, upload: &Upload) -> anyhow::Result<String> {
    let remote = tree_path(&upload.remote, upload.user.as_deref())?;
    let there = guest.stat(remote, None).await.with_context(|| format!("look at {remote}"))?;
    let root = match there.map(|there| there.kind) {
        Some(Kind::Directory) => joined(remote, &name_of(&upload.local)?),
        None if upload.remote.ends_with('/') => joined(remote, &name_of(&upload.local)?),
        None => remote.to_owned(),
        Some(_) => bail!("{remote} is there in the sandbox, and is no directory"),
    };
    let (dirs, mut files) = walk(&upload.local, &root)?;
    let all = files.len();
    for dir in &dirs {
        guest.make_dir(dir).await.with_context(|| format!("make the directory {dir} in the sandbox"))?;
    }
    if upload.skip_same {
        let mut left = Vec::new();
        for item in files {
            let there = guest.stat(&item.remote, None).await.with_context(|| format!("look at {}", item.remote))?;
            if !is_same(&item, there) {
                left.push(item);
            }
        }
        files = left;
    }
    let progress = Progress::new(files.iter().map(|item| item.size).sum());
    for item in &files {
        send(guest, item, None, &progress).await?;
    }
    progress.clear();
    let skipped = all - files.len();
    let note = if skipped > 0 { format!(", without {skipped} files that are there") } else { String::new() };
    Ok(format!("Uploaded directory {} to {root}{note}", upload.local.display()))
}

/// Directories from the outermost on, and files, of the tree at `local`, which is to be `root` there.
fn walk(local: &Path, root: &str) -> anyhow::Result<(Vec<String>, Vec<Item>)> {
    let mut dirs = vec![(local.to_owned(), root.to_owned())];
    let mut files = Vec::new();
    let mut next = 0;
    while let Some((dir, remote)) = dirs.get(next).cloned() {
        next += 1;
        let reading = || format!("read the directory {}", dir.display());
        let mut entries: Vec<_> =
            fs::read_dir(&dir).and_then(Iterator::collect::<io::Result<_>>).with_context(reading)?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            let found = fs::symlink_metadata(&path).with_context(|| format!("read {}", path.display()))?;
            refuse_special(&path, found.file_type())?;
            let remote = joined(&remote, &name_of(&path)?);
            if found.is_dir() {
                dirs.push((path, remote));
            } else {
                files.push(Item { local: path, remote, size: found.len(), modified: modified(&found) });
            }
        }
    }
    Ok((dirs.into_iter().map(|(_, remote)| remote).collect(), files))
}

fn refuse_special(path: &Path, kind: FileType) -> anyhow::Result<()> {
    if kind.is_symlink() {
        bail!("{} is a symlink, which is not copied", path.display());
    }
    if !kind.is_dir() && !kind.is_file() {
        bail!("{} is neither a file nor a directory", path.display());
    }
    Ok(())
}

fn modified(found: &Metadata) -> Option<Timestamp> {
    found.modified().ok().and_then(|time| time.try_into().ok())
}

/// As `--skip-same` has it.
fn is_same(item: &Item, there: Option<Entry>) -> bool {
    let Some(there) = there else { return false };
    let later = matches!((item.modified, there.modified), (Some(here), Some(there)) if there > here);
    there.kind == Kind::File && there.size == item.size && later
}

/// Copies one file. Errors: also if it becomes longer or shorter meanwhile.
async fn send(guest: &Guest, item: &Item, user: Option<&str>, progress: &Progress) -> anyhow::Result<()> {
    let doing = || format!("upload {} to {}", item.local.display(), item.remote);
    progress.item(&item.local.to_string_lossy());
    let file = File::open(&item.local).await.with_context(doing)?;
    let sent = Arc::new(AtomicU64::new(0));
    let content = content(file, item.size, progress.clone(), Arc::clone(&sent));
    let writing = guest.write_file(&item.remote, user, item.size, content);
    tokio::select! {
        written = writing => written.with_context(doing),
        () = idle(&sent) => {
            Err(anyhow::anyhow!("nothing moved for {} s", IDLE.as_secs())).with_context(doing)
        }
    }
}

/// Exactly `length` bytes of a file: it may grow meanwhile. Errors: it ends before.
fn content(
    file: File,
    length: u64,
    progress: Progress,
    sent: Arc<AtomicU64>,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let pieces = futures::stream::try_unfold((file.take(length), length), |(mut file, left)| async move {
        if left == 0 {
            return Ok(None);
        }
        let mut piece = vec![0; PIECE];
        let n = file.read(&mut piece).await?;
        if n == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter meanwhile"));
        }
        piece.truncate(n);
        Ok(Some((Bytes::from(piece), (file, left - n as u64))))
    });
    pieces.inspect(move |piece| {
        if let Ok(piece) = piece {
            progress.add(piece.len() as u64);
            sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
        }
    })
}

/// Returns when nothing more was sent for long.
async fn idle(sent: &AtomicU64) {
    let mut before = None;
    loop {
        let now = sent.load(Ordering::Relaxed);
        if before.replace(now) == Some(now) {
            return;
        }
        sleep(IDLE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_walked_directories_first_and_sorted() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["b/empty", "a/.hidden"] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        for (path, text) in [("z", "1"), ("a/.hidden/y", "22"), ("a/x", "")] {
            fs::write(dir.path().join(path), text).unwrap();
        }
        let (dirs, files) = walk(dir.path(), "/srv").unwrap();
        assert_eq!(dirs, ["/srv", "/srv/a", "/srv/b", "/srv/a/.hidden", "/srv/b/empty"]);
        let files: Vec<_> = files.into_iter().map(|item| (item.remote, item.size)).collect();
        assert_eq!(files, [("/srv/z".into(), 1), ("/srv/a/x".into(), 0), ("/srv/a/.hidden/y".into(), 2)]);
    }

    #[test]
    fn links_and_devices_are_told_before_anything_is_copied() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("nowhere", dir.path().join("link")).unwrap();
        let error = walk(dir.path(), "/srv").unwrap_err().to_string();
        assert!(error.contains("link is a symlink"), "{error}");
        let error = refuse_special(Path::new("/dev/null"), fs::metadata("/dev/null").unwrap().file_type());
        assert!(error.unwrap_err().to_string().contains("neither a file nor a directory"));
    }

    #[test]
    fn what_is_there_is_the_same_by_size_and_time() {
        let at = |second| Some(Timestamp::from_second(second).unwrap());
        let item = Item { local: "x".into(), remote: "/x".into(), size: 3, modified: at(10) };
        let there = |size, second, kind| Some(Entry { name: "x".into(), kind, size, modified: at(second) });
        assert!(is_same(&item, there(3, 11, Kind::File)));
        assert!(!is_same(&item, there(3, 10, Kind::File)), "perhaps written between two ticks");
        assert!(!is_same(&item, there(2, 11, Kind::File)));
        assert!(!is_same(&item, there(3, 11, Kind::Symlink)));
        assert!(!is_same(&item, None));
    }

    #[test]
    fn a_relative_directory_stays_relative() {
        assert_eq!(joined_keeping_home("in/", "x"), "in/x");
        assert_eq!(joined_keeping_home("/", "x"), "/x");
        assert_eq!(joined_keeping_home("~", "x"), "~/x");
    }
}
