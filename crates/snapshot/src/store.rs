//! All captures of a node.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use aenv_model::CaptureId;
use aenv_tasks::{StillRunning, TaskScope};
use tokio::sync::{Mutex as AsyncMutex, mpsc};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::backing::Backing;
use crate::capture::{Capture, Held, device_name, device_owner, read};
use crate::error::CaptureError;
use crate::manifest::Manifest;
use crate::take::{Copied, Stopped, copy};

/// What the directories of captures that are being made begin with.
const STAGING: &str = "new-";

/// All captures of a node. Cloning shares it.
#[derive(Debug, Clone)]
pub struct CaptureStore {
    shared: Arc<Shared>,
    scope: Arc<TaskScope>,
}

/// What a sweep found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Swept {
    /// Captures nobody needs, removed; half-made ones among them.
    pub removed: usize,
    /// What would not go.
    pub failed: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    dir: PathBuf,
    pub(crate) backing: Arc<dyn Backing>,
    live: Mutex<HashMap<CaptureId, Weak<Held>>>,
    janitor: mpsc::UnboundedSender<Chore>,
}

/// What is done behind everybody's back.
#[derive(Debug)]
enum Chore {
    /// The last handle has gone.
    LetGo { id: CaptureId, shown: bool, doomed: bool },
    /// A directory that has come to nothing.
    Discard(PathBuf),
    /// A fresh capture is to survive a crash of the host, and the next one to be no deeper.
    Settle(Capture),
    /// Everything before this is done.
    Done(tokio::sync::oneshot::Sender<()>),
}

impl CaptureStore {
    /// Captures in `dir`, which is made if absent. Call inside a runtime.
    pub fn open(dir: &Path, backing: Arc<dyn Backing>) -> Result<Self, CaptureError> {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.map_err(|error| CaptureError::io("make", dir, error))?;
        let (janitor, chores) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared { dir: dir.to_owned(), backing, live: Mutex::default(), janitor });
        let scope = TaskScope::new("captures");
        let stop = scope.token();
        let cleaning = clean(Arc::clone(&shared), chores);
        scope.spawn("captures", async move { _ = stop.run_until_cancelled(cleaning).await });
        Ok(Self { shared, scope: Arc::new(scope) })
    }

    /// Copies a machine that stands still. It may go on when this returns; [`Copied::finish`] makes the capture.
    ///
    /// Cancel safety: if dropped, nothing is left; the disk may have been sealed, which nobody sees.
    pub async fn copy(&self, stopped: Stopped<'_>) -> Result<Copied, CaptureError> {
        copy(&self.shared, stopped).await
    }

    /// The capture `id`, to be used.
    pub async fn find(&self, id: CaptureId) -> Result<Capture, CaptureError> {
        if let Some(capture) = self.shared.known(id) {
            return Ok(capture);
        }
        let shared = Arc::clone(&self.shared);
        let found = tokio::task::spawn_blocking(move || read(&shared.dir_of(id), id)).await;
        let manifest = found.map_err(|error| CaptureError::backing("read a capture", io::Error::other(error)))??;
        Ok(self.shared.register(manifest))
    }

    /// Removes all captures but those of `keep`, and half-made ones, and hides the memory of all but those of `mapped`, which
    /// running machines map. For the start: nothing else is in use.
    pub async fn sweep(&self, keep: &BTreeSet<CaptureId>, mapped: &BTreeSet<CaptureId>) -> Swept {
        let mut swept = Swept::default();
        let shown = self.shared.backing.shown().await.unwrap_or_else(|error| {
            swept.failed.push(format!("list devices: {error}"));
            Vec::new()
        });
        for name in shown {
            if device_owner(&name).is_some_and(|id| !mapped.contains(&id))
                && let Err(error) = self.shared.backing.hide(&name).await
            {
                swept.failed.push(format!("{name}: {error}"));
            }
        }
        let entries = std::fs::read_dir(&self.shared.dir).into_iter().flatten().flatten();
        for entry in entries {
            let name = entry.file_name().to_string_lossy().into_owned();
            let id = name.strip_prefix(STAGING).unwrap_or(&name).parse::<CaptureId>();
            let needed = !name.starts_with(STAGING) && id.as_ref().is_ok_and(|id| keep.contains(id));
            if needed || id.is_err() {
                continue;
            }
            match aenv_durable::remove_dir_if_present(&entry.path()) {
                Ok(()) => swept.removed += 1,
                Err(error) => swept.failed.push(format!("{}: {error}", entry.path().display())),
            }
        }
        swept
    }

    /// Where a capture is put together, and where it is to be.
    pub(crate) fn places(&self, id: CaptureId) -> (PathBuf, PathBuf) {
        (self.shared.staging_dir(id), self.shared.dir_of(id))
    }

    /// The handle of a capture that has come to its place.
    pub(crate) fn register(&self, manifest: Manifest) -> Capture {
        self.shared.register(manifest)
    }

    /// Makes a fresh capture durable soon.
    pub(crate) fn settle_later(&self, capture: &Capture) {
        self.shared.settle_later(capture.clone());
    }

    /// Waits until all that was let go of is gone.
    pub async fn settle(&self) {
        // Twice: the janitor itself may let go of one that it has been making durable.
        for _ in 0..2 {
            let (done, settled) = tokio::sync::oneshot::channel();
            if self.shared.janitor.send(Chore::Done(done)).is_ok() {
                _ = settled.await;
            }
        }
    }

    /// Ends the work behind everybody's back, once what was let go of is gone. Whatever is still shown is hidden, but for what
    /// was [left](Capture::leave).
    pub async fn close(&self, patience: Duration) -> Result<(), StillRunning> {
        let used: Vec<Capture> = self.shared.live().values().filter_map(Weak::upgrade).map(Capture).collect();
        for capture in used {
            let left = capture.0.left.load(std::sync::atomic::Ordering::Acquire);
            if !left
                && capture.0.memory.lock().await.take().is_some()
                && let Err(error) = self.shared.backing.hide(&device_name(capture.id())).await
            {
                warn!(capture = %capture.id(), %error, "the memory of a capture is still shown");
            }
        }
        _ = tokio::time::timeout(patience, self.settle()).await;
        self.scope.close(patience).await
    }
}

impl Shared {
    pub(crate) fn dir_of(&self, id: CaptureId) -> PathBuf {
        self.dir.join(id.to_string())
    }

    pub(crate) fn staging_dir(&self, id: CaptureId) -> PathBuf {
        self.dir.join(format!("{STAGING}{id}"))
    }

    fn known(&self, id: CaptureId) -> Option<Capture> {
        self.live().get(&id)?.upgrade().map(Capture)
    }

    /// The one handle of a capture that is there.
    pub(crate) fn register(self: &Arc<Self>, manifest: Manifest) -> Capture {
        let mut live = self.live();
        if let Some(held) = live.get(&manifest.id).and_then(Weak::upgrade) {
            return Capture(held);
        }
        let id = manifest.id;
        let held = Arc::new(Held {
            store: Arc::clone(self),
            manifest,
            doomed: CancellationToken::new(),
            left: false.into(),
            merged_memory: OnceLock::new(),
            merged_disk: OnceLock::new(),
            memory: AsyncMutex::default(),
        });
        live.insert(id, Arc::downgrade(&held));
        Capture(held)
    }

    pub(crate) fn let_go(&self, id: CaptureId, shown: bool, doomed: bool) {
        let mut live = self.live();
        // Somebody may have found it again meanwhile.
        if live.get(&id).is_some_and(|held| held.strong_count() == 0) {
            live.remove(&id);
        }
        drop(live);
        _ = self.janitor.send(Chore::LetGo { id, shown, doomed });
    }

    pub(crate) fn discard(&self, dir: PathBuf) {
        _ = self.janitor.send(Chore::Discard(dir));
    }

    pub(crate) fn settle_later(&self, capture: Capture) {
        _ = self.janitor.send(Chore::Settle(capture));
    }

    /// Map operations only happen under it, so the map is valid after any panic.
    fn live(&self) -> MutexGuard<'_, HashMap<CaptureId, Weak<Held>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The janitor.
async fn clean(shared: Arc<Shared>, mut chores: mpsc::UnboundedReceiver<Chore>) {
    while let Some(chore) = chores.recv().await {
        match chore {
            // Somebody has found it again.
            Chore::LetGo { id, .. } if shared.known(id).is_some() => {}
            Chore::LetGo { id, shown, doomed } => {
                if shown && let Err(error) = shared.backing.hide(&device_name(id)).await {
                    warn!(capture = %id, %error, "the memory of a capture is still shown");
                    continue; // its files are in use; the next start's sweep removes both
                }
                if doomed {
                    remove(shared.dir_of(id)).await;
                }
            }
            Chore::Discard(dir) => remove(dir).await,
            Chore::Settle(capture) => settle(capture).await,
            Chore::Done(done) => _ = done.send(()),
        }
    }
}

async fn remove(dir: PathBuf) {
    let path = dir.clone();
    match tokio::task::spawn_blocking(move || aenv_durable::remove_dir_if_present(&path)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(path = %dir.display(), %error, "could not remove a capture"),
        Err(error) => warn!(path = %dir.display(), %error, "could not remove a capture"),
    }
}

async fn settle(capture: Capture) {
    let work = move || -> io::Result<()> {
        let dir = capture.dir();
        for entry in std::fs::read_dir(&dir)? {
            std::fs::File::open(entry?.path())?.sync_all()?;
        }
        aenv_durable::sync_dir(&dir)?;
        dir.parent().map_or(Ok(()), aenv_durable::sync_dir)?;
        capture.shorten()
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {} // gone meanwhile
        Ok(Err(error)) => warn!(%error, "a capture may not survive a crash of the host, or is deeper than need be"),
        Err(error) => warn!(%error, "a capture may not survive a crash of the host, or is deeper than need be"),
    }
}
