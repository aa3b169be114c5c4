//! Watching directories with inotify.
//!
//! The kernel queues events while the call that causes them runs, and [`Watcher::collect`] reads that queue without
//! waiting: so what happened before a question is in its answer. inotify watches single directories; a recursive watcher
//! adds one for each directory below, also for those that appear later. Between a directory's appearance and our watch
//! on it things may be created in it that no event tells of: they are looked up once the watch stands, and reported as
//! created, unless an event tells of them after all.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Events kept for a caller that does not ask for them. Beyond that the watcher fails, and says so when asked.
const MOST_BUFFERED: usize = 65_536;
/// Bytes read from the kernel's queue at a time.
const READ_SIZE: usize = 16 * 1024;

/// What happened to a name in a watched directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Change {
    Create,
    Write,
    Remove,
    Rename,
    Chmod,
}

/// A change and the name it happened to, relative to the watched directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) name: PathBuf,
    pub(super) change: Change,
}

/// The watcher can no longer tell all that happens.
#[derive(Debug, thiserror::Error)]
pub(super) enum WatchError {
    #[error("watch {path}")]
    Add { path: PathBuf, source: io::Error },
    #[error("read events")]
    Read(#[source] io::Error),
    #[error("events came faster than they were read; some are lost")]
    Overflow,
}

/// One watched directory.
#[derive(Debug)]
pub(super) struct Watcher {
    fd: AsyncFd<OwnedFd>,
    state: Mutex<State>,
    pub(super) root: PathBuf,
    recursive: bool,
    /// The caller wants entries described.
    pub(super) include_entry: bool,
}

#[derive(Debug, Default)]
struct State {
    /// Watched directories, relative to the root, by watch descriptor.
    directories: HashMap<i32, PathBuf>,
    events: VecDeque<Event>,
    /// Once failed, always failed.
    overflowed: bool,
}

impl Watcher {
    /// Starts watching `root`, an existing directory. Blocks while the tree is walked. Must run inside the runtime.
    pub(super) fn start(root: PathBuf, recursive: bool, include_entry: bool) -> Result<Self, WatchError> {
        let at_root = |source: io::Error| WatchError::Add { path: root.clone(), source };
        let fd = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).map_err(|e| at_root(e.into()))?;
        let fd = crate::sys::watch_descriptor(fd).map_err(at_root)?;
        let watcher = Self { fd, state: Mutex::default(), root, recursive, include_entry };
        let mut state = watcher.state();
        let wd = watcher.add(Path::new(""))?;
        state.directories.insert(wd, PathBuf::new());
        if recursive {
            watcher.descend(&mut state, PathBuf::new())?;
        }
        drop(state);
        Ok(watcher)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic inside could lose an event at most.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there may be something to collect.
    pub(super) async fn ready(&self) -> io::Result<()> {
        self.fd.readable().await?.clear_ready();
        Ok(())
    }

    /// The next event among those collected.
    pub(super) fn pop(&self) -> Option<Event> {
        self.state().events.pop_front()
    }

    /// Takes all that was collected.
    pub(super) fn take(&self) -> Vec<Event> {
        self.state().events.drain(..).collect()
    }

    /// Reads the kernel's queue until it is empty. Blocks while new directories are walked.
    pub(super) fn collect(&self) -> Result<(), WatchError> {
        let mut state = self.state();
        let mut buffer = vec![MaybeUninit::uninit(); READ_SIZE];
        let mut reader = inotify::Reader::new(self.descriptor(), &mut buffer);
        // Names found by looking, whose events may still be in the queue.
        let mut found: HashSet<PathBuf> = HashSet::new();
        loop {
            let (wd, flags, name) = match reader.next() {
                Ok(event) => {
                    let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()).to_owned());
                    (event.wd(), event.events(), name)
                }
                Err(Errno::WOULDBLOCK) => break,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(WatchError::Read(error.into())),
            };
            if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                state.overflowed = true;
            }
            if flags.contains(ReadFlags::IGNORED) {
                state.directories.remove(&wd);
            }
            // Events without a name are about a directory itself: its parent's watch tells of them.
            let (Some(directory), Some(name)) = (state.directories.get(&wd), name) else { continue };
            let path = directory.join(name);
            for change in changes(flags) {
                if change != Change::Create || !found.remove(&path) {
                    state.events.push_back(Event { name: path.clone(), change });
                }
            }
            let appeared = flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO);
            if self.recursive && appeared && flags.contains(ReadFlags::ISDIR) {
                // It may be gone again; then there is nothing to watch.
                if let Ok(wd) = self.add(&path) {
                    state.directories.insert(wd, path.clone());
                    for name in self.descend(&mut state, path)? {
                        state.events.push_back(Event { name: name.clone(), change: Change::Create });
                        found.insert(name);
                    }
                }
            }
        }
        if state.events.len() > MOST_BUFFERED {
            state.overflowed = true;
            state.events.clear();
        }
        if state.overflowed { Err(WatchError::Overflow) } else { Ok(()) }
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.fd.get_ref().as_fd()
    }

    fn add(&self, relative: &Path) -> Result<i32, WatchError> {
        let path = self.root.join(relative);
        let flags = WatchFlags::CREATE
            | WatchFlags::MOVE
            | WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE
            | WatchFlags::ONLYDIR;
        inotify::add_watch(self.descriptor(), &path, flags)
            .map_err(|error| WatchError::Add { path, source: error.into() })
    }

    /// Watches every directory below `from`, which is watched already; returns all names found there.
    fn descend(&self, state: &mut State, from: PathBuf) -> Result<Vec<PathBuf>, WatchError> {
        let mut names = Vec::new();
        let mut pending = vec![from];
        while let Some(directory) = pending.pop() {
            // What vanishes meanwhile is told by events.
            let Ok(entries) = std::fs::read_dir(self.root.join(&directory)) else { continue };
            for entry in entries.flatten() {
                let name = directory.join(entry.file_name());
                names.push(name.clone());
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    match self.add(&name) {
                        Ok(wd) => {
                            state.directories.insert(wd, name.clone());
                            pending.push(name);
                        }
                        Err(WatchError::Add { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        Ok(names)
    }
}

/// One kernel event may carry several changes; this is the order they are told in.
fn changes(flags: ReadFlags) -> impl Iterator<Item = Change> {
    [
        (ReadFlags::CREATE | ReadFlags::MOVED_TO, Change::Create),
        (ReadFlags::MOVED_FROM, Change::Rename),
        (ReadFlags::ATTRIB, Change::Chmod),
        (ReadFlags::MODIFY, Change::Write),
        (ReadFlags::DELETE, Change::Remove),
    ]
    .into_iter()
    .filter(move |(mask, _)| flags.intersects(*mask))
    .map(|(_, change)| change)
}

/// All watchers; those that are asked for their events, by id.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    inner: Mutex<Registry>,
}

#[derive(Debug, Default)]
struct Registry {
    next: u64,
    /// Those that follow new directories, however they are asked.
    recursive: Vec<Weak<Watcher>>,
    watchers: HashMap<String, (Arc<Watcher>, DropGuard)>,
}

impl Watchers {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        // Sections below insert or remove one whole entry.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of a watcher that was started, for [`Watchers::settle`].
    pub(super) fn started(&self, watcher: &Arc<Watcher>) {
        if watcher.recursive {
            let mut registry = self.registry();
            registry.recursive.retain(|known| known.strong_count() > 0);
            registry.recursive.push(Arc::downgrade(watcher));
        }
    }

    /// Lets recursive watchers follow directories that a request of ours has just made, before anything is made in
    /// them: so no event of a caller's own is missed. Blocks; costs nothing without such watchers.
    pub(super) fn settle(&self) {
        let recursive: Vec<_> = self.registry().recursive.iter().filter_map(Weak::upgrade).collect();
        for watcher in recursive {
            // A failed watcher tells whoever asks it.
            let _ = watcher.collect();
        }
    }

    /// Keeps a watcher and returns its id. The token is cancelled when it is removed.
    pub(super) fn insert(&self, watcher: Arc<Watcher>) -> (String, CancellationToken) {
        let removed = CancellationToken::new();
        let mut registry = self.registry();
        registry.next += 1;
        let id = format!("w{:08x}{:016x}", registry.next, rand_suffix());
        registry.watchers.insert(id.clone(), (watcher, removed.clone().drop_guard()));
        (id, removed)
    }

    pub(super) fn get(&self, id: &str) -> Option<Arc<Watcher>> {
        self.registry().watchers.get(id).map(|(watcher, _)| Arc::clone(watcher))
    }

    pub(super) fn remove(&self, id: &str) -> bool {
        self.registry().watchers.remove(id).is_some()
    }
}

/// Makes ids hard to mix up between sandboxes; they are no secret.
fn rand_suffix() -> u64 {
    use std::hash::{BuildHasher as _, Hasher as _, RandomState};
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn collected(watcher: &Watcher) -> Vec<(String, Change)> {
        watcher.collect().unwrap();
        watcher.take().into_iter().map(|event| (event.name.display().to_string(), event.change)).collect()
    }

    #[tokio::test]
    async fn changes_are_there_as_soon_as_they_happened() {
        let directory = tempfile::tempdir().unwrap();
        let watcher = Watcher::start(directory.path().to_owned(), false, false).unwrap();
        fs::write(directory.path().join("a"), "x").unwrap();
        let named = |change| ("a".to_owned(), change);
        assert_eq!(collected(&watcher), [named(Change::Create), named(Change::Write)]);
        fs::rename(directory.path().join("a"), directory.path().join("b")).unwrap();
        fs::remove_file(directory.path().join("b")).unwrap();
        let b = |change| ("b".to_owned(), change);
        assert_eq!(collected(&watcher), [named(Change::Rename), b(Change::Create), b(Change::Remove)]);
        fs::create_dir(directory.path().join("d")).unwrap();
        fs::write(directory.path().join("d/inner"), "").unwrap();
        assert_eq!(collected(&watcher), [("d".to_owned(), Change::Create)], "not recursive");
    }

    #[tokio::test]
    async fn a_recursive_watcher_sees_what_is_made_in_new_directories_once() {
        let directory = tempfile::tempdir().unwrap();
        let watcher = Watcher::start(directory.path().to_owned(), true, false).unwrap();
        fs::create_dir_all(directory.path().join("a/b/c")).unwrap();
        fs::write(directory.path().join("a/b/c/file"), "x").unwrap();
        let mut events = collected(&watcher);
        fs::write(directory.path().join("a/b/c/file2"), "x").unwrap();
        events.extend(collected(&watcher));
        for name in ["a", "a/b", "a/b/c", "a/b/c/file", "a/b/c/file2"] {
            let times = events.iter().filter(|event| **event == (name.to_owned(), Change::Create)).count();
            assert_eq!(times, 1, "creation of {name} in {events:?}");
        }
    }
}
