//! Out of a sandbox.

use std::fs::{self, Metadata};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use http::StatusCode;
use jiff::Timestamp;
use tokio::time::timeout;

use super::partial::Partial;
use super::progress::Progress;
use super::{IDLE, joined, tree_path};
use crate::args::Download;
use crate::guest::Guest;
use crate::guest::files::{Entry, Kind, Rest};
use crate::output::shown;

/// Most files and directories of a tree: a guest could go on for ever.
const MOST: usize = 1_000_000;

/// A file to be copied.
#[derive(Debug)]
struct Item {
    remote: String,
    local: PathBuf,
    size: u64,
    modified: Option<Timestamp>,
}

/// Copies what was asked for; gives a sentence about it.
pub(super) async fn run(guest: &Guest, download: &Download) -> anyhow::Result<String> {
    let (remote, user) = (&*download.remote, download.user.as_deref());
    let there = guest.stat(remote, user).await.with_context(|| format!("look at {remote}"))?;
    let there = there.with_context(|| format!("there is no {remote} in the sandbox"))?;
    refuse_special(remote, there.kind)?;
    if there.kind == Kind::Directory {
        return tree(guest, download).await;
    }
    let local = target(remote, download.local.as_deref())?;
    let item = Item { remote: remote.to_owned(), local, size: there.size, modified: there.modified };
    let skipped = download.skip_same && is_same(&item, fs::symlink_metadata(&item.local).ok());
    if !skipped {
        check(&item.local, false, download.force)?;
        let progress = Progress::new(item.size);
        receive(guest, &item, download, &progress).await?;
        progress.clear();
    }
    let what = if skipped { "Skipped, as it is there," } else { "Downloaded" };
    Ok(format!("{what} {remote} to {}", item.local.display()))
}

/// Where it is to go. Errors: no name to be had, or the parent is not there.
fn target(remote: &str, local: Option<&Path>) -> anyhow::Result<PathBuf> {
    let name = || {
        let name = remote.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        let plain = !matches!(name, "" | "." | ".." | "~");
        if plain { Ok(name) } else { Err(anyhow::anyhow!("{remote:?} has no name to keep: say where it is to go")) }
    };
    let target = match local {
        None => PathBuf::from(name()?),
        Some(local) if local.is_dir() || local.as_os_str().as_encoded_bytes().ends_with(b"/") => local.join(name()?),
        Some(local) => local.to_owned(),
    };
    let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent.filter(|parent| !parent.is_dir()) {
        bail!("{} is no directory to download to", parent.display());
    }
    Ok(target)
}

async fn tree(guest: &Guest, download: &Download) -> anyhow::Result<String> {
    let remote = tree_path(&download.remote, download.user.as_deref())?;
    let root = target(remote, download.local.as_deref())?;
    let (dirs, files) = walk(guest, remote, &root).await?;
    let all = files.len();
    let files: Vec<_> = match download.skip_same {
        true => files.into_iter().filter(|item| !is_same(item, fs::symlink_metadata(&item.local).ok())).collect(),
        false => files,
    };
    for dir in &dirs {
        check(dir, true, download.force)?;
    }
    for item in &files {
        check(&item.local, false, download.force)?;
    }
    for dir in &dirs {
        if !is_dir(dir) {
            fs::create_dir(dir).with_context(|| format!("make the directory {}", shown(&dir.to_string_lossy())))?;
        }
    }
    let progress = Progress::new(files.iter().map(|item| item.size).sum());
    for item in &files {
        receive(guest, item, download, &progress).await?;
    }
    progress.clear();
    let skipped = all - files.len();
    let note = if skipped > 0 { format!(", without {skipped} files that are here") } else { String::new() };
    Ok(format!("Downloaded directory {remote} to {}{note}", root.display()))
}

/// Directories from the outermost on, and files, of the tree at `remote`, which is to be `root` here.
async fn walk(guest: &Guest, remote: &str, root: &Path) -> anyhow::Result<(Vec<PathBuf>, Vec<Item>)> {
    let mut dirs = vec![(remote.to_owned(), root.to_owned())];
    let mut files = Vec::new();
    let mut next = 0;
    while let Some((dir, local)) = dirs.get(next).cloned() {
        next += 1;
        let reading = || format!("read the directory {} in the sandbox", shown(&dir));
        let entries = guest.list(&dir).await.with_context(reading)?;
        if dirs.len() + files.len() + entries.len() > MOST {
            bail!("{} has more than {MOST} files and directories", shown(remote));
        }
        for entry in entries {
            let name = safe_name(&entry).with_context(reading)?;
            let (remote, local) = (joined(&dir, name), local.join(name));
            refuse_special(&remote, entry.kind)?;
            if entry.kind == Kind::Directory {
                dirs.push((remote, local));
            } else {
                files.push(Item { remote, local, size: entry.size, modified: entry.modified });
            }
        }
    }
    Ok((dirs.into_iter().map(|(_, local)| local).collect(), files))
}

/// A name that leads nowhere else: the guest may say anything.
fn safe_name(entry: &Entry) -> anyhow::Result<&str> {
    let name = &*entry.name;
    if matches!(name, "" | "." | "..") || name.contains(['/', '\0']) {
        bail!("the sandbox has an entry with the name {name:?}");
    }
    Ok(name)
}

fn refuse_special(path: &str, kind: Kind) -> anyhow::Result<()> {
    match kind {
        Kind::File | Kind::Directory => Ok(()),
        Kind::Symlink => bail!("{} in the sandbox is a symlink, which is not copied", shown(path)),
        Kind::Special => bail!("{} in the sandbox is neither a file nor a directory", shown(path)),
    }
}

/// A directory itself, not a link to one: a link could lead out of the tree.
fn is_dir(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
}

/// Whether what is here leaves room for a directory or a file.
fn check(path: &Path, directory: bool, force: bool) -> anyhow::Result<()> {
    let Ok(found) = fs::symlink_metadata(path) else { return Ok(()) };
    let name = shown(&path.to_string_lossy());
    match (directory, found.is_dir()) {
        (true, true) => Ok(()),
        (true, false) => bail!("{name} is here, and is no directory"),
        (false, true) => bail!("{name} is here, and is a directory"),
        (false, false) if force => Ok(()),
        (false, false) => bail!("{name} is here already; --force replaces it"),
    }
}

/// As `--skip-same` has it.
fn is_same(item: &Item, here: Option<Metadata>) -> bool {
    let Some(here) = here else { return false };
    let written = here.modified().ok().and_then(|time| Timestamp::try_from(time).ok());
    let later = matches!((written, item.modified), (Some(here), Some(there)) if here > there);
    here.is_file() && here.len() == item.size && later
}

/// Copies one file, and puts it in its place when it is here whole.
async fn receive(guest: &Guest, item: &Item, download: &Download, progress: &Progress) -> anyhow::Result<()> {
    let doing = || format!("download {} to {}", shown(&item.remote), shown(&item.local.to_string_lossy()));
    progress.item(&shown(&item.remote));
    let mut partial = open(item, download).with_context(doing)?;
    let resumed = download.resume;
    match fill(guest, item, download.user.as_deref(), &mut partial, progress).await {
        Ok(()) => {}
        Err(error) if resumed => {
            return Err(error.context("what is here of it is kept for --resume")).with_context(doing);
        }
        Err(error) => return Err(error).with_context(doing),
    }
    if resumed {
        // What was continued is whole only if it is one version from its first byte to its last.
        let there = guest.stat(&item.remote, download.user.as_deref()).await.with_context(doing)?;
        if there.is_none_or(|there| (there.size, there.modified) != (item.size, item.modified)) {
            partial.restart().with_context(doing)?;
            bail!("{}: the file changed meanwhile", doing());
        }
    }
    partial.finish(&item.local, download.force).with_context(doing)
}

fn open(item: &Item, download: &Download) -> std::io::Result<Partial> {
    match item.modified.filter(|_| download.resume) {
        None => Partial::new(&item.local),
        Some(modified) => {
            let source =
                format!("{} {:?} {} {}", download.sandbox_id, download.user, item.remote, item.local.display());
            Partial::of(&item.local, &source, &format!("{} {}", modified.as_nanosecond(), item.size))
        }
    }
}

/// Brings what is missing.
async fn fill(
    guest: &Guest,
    item: &Item,
    user: Option<&str>,
    partial: &mut Partial,
    progress: &Progress,
) -> anyhow::Result<()> {
    if partial.length > item.size {
        partial.restart()?;
    }
    if partial.length > 0 && partial.length == item.size {
        progress.add(item.size);
        return Ok(());
    }
    let rest = item.modified.filter(|_| partial.length > 0);
    let rest = rest.map(|unchanged_since| Rest { from: partial.length, unchanged_since });
    let idle = || format!("nothing moved for {} s", IDLE.as_secs());
    let mut response = timeout(IDLE, guest.read_file(&item.remote, user, rest)).await.with_context(idle)??;
    if rest.is_some() && response.status() != StatusCode::PARTIAL_CONTENT {
        // All of it, as the agent has it otherwise by now.
        partial.restart()?;
    }
    progress.add(partial.length);
    while let Some(piece) = timeout(IDLE, response.chunk()).await.with_context(idle)?? {
        partial.file.write_all(&piece)?;
        progress.add(piece.len() as u64);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_download_keeps_its_name_where_none_is_given() {
        let dir = tempfile::tempdir().unwrap();
        let at = |remote: &str, local: Option<&str>| target(remote, local.map(|l| dir.path().join(l)).as_deref());
        assert_eq!(target("/srv/app.log", None).unwrap(), Path::new("app.log"));
        assert_eq!(target("notes/", None).unwrap(), Path::new("notes"));
        assert_eq!(at("/srv/app.log", Some("")).unwrap(), dir.path().join("app.log"));
        assert_eq!(at("/srv/app.log", Some("new")).unwrap(), dir.path().join("new"));
        assert!(at("/srv/app.log", Some("none/new")).unwrap_err().to_string().contains("no directory"));
        assert!(at("/srv/app.log", Some("none/")).is_err());
        for nameless in ["/", "..", "~", "a/.."] {
            assert!(target(nameless, None).is_err(), "{nameless}");
        }
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let entry = |name: &str| Entry { name: name.into(), kind: Kind::File, size: 0, modified: None };
        for name in ["", ".", "..", "../x", "a/b", "/etc/passwd"] {
            assert!(safe_name(&entry(name)).is_err(), "{name}");
        }
        assert_eq!(safe_name(&entry("..x")).unwrap(), "..x");
        let told = refuse_special("/tmp/\x1b]0;x\x07\nfake", Kind::Symlink).unwrap_err().to_string();
        assert_eq!(told, r"/tmp/\u{1b}]0;x\u{7}\nfake in the sandbox is a symlink, which is not copied");
    }

    #[test]
    fn what_is_in_the_way_is_told_and_links_are_no_directories() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link, none) = (dir.path().join("file"), dir.path().join("link"), dir.path().join("none"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(check(&none, true, false).is_ok() && check(&none, false, false).is_ok());
        assert!(check(dir.path(), true, false).is_ok());
        assert!(check(dir.path(), false, true).is_err());
        assert!(check(&file, false, true).is_ok());
        assert!(check(&file, false, false).unwrap_err().to_string().contains("--force"));
        assert!(check(&link, true, true).is_err(), "nothing is written through a link");
    }
}
