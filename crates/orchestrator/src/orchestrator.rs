//! The registry: who exists, and the door to each driver.

use std::collections::{HashMap, VecDeque};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use aenv_block_device::DiskStore;
use aenv_durable::{Store, Table};
use aenv_model::{Bytes, Phase, SandboxId};
use aenv_tasks::{StillRunning, TaskScope};
use aenv_vmm_driver::Vmm;
use jiff::Timestamp;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::config::{EnvdConfig, OrchestratorConfig};
use crate::driver::{Driver, Message, Status, after};
use crate::leftovers::sandbox_rows;
use crate::resources::SandboxRow;
use crate::sandbox::{
    AskError, CreateError, DeleteError, Ended, Keep, NewSandbox, Route, SandboxInfo, StartOrchestratorError,
};
use crate::seams::{GuestBoot, Slots};
use crate::token::TokenSeed;

/// Asks a driver keeps while it is busy; each asker waits for its answer, so this bounds callers, not work.
const INBOX: usize = 64;

/// Ended sandboxes whose reason is remembered for whoever still asks.
const REMEMBERED: usize = 4096;

/// Serial logs of failed sandboxes that are kept over a start, newest first: enough to look into, at most 256 MiB.
const KEPT_LOGS: usize = 256;

/// What the orchestrator is made of. `server` builds these and hands them down.
pub struct Parts {
    /// Lives and their limits.
    pub config: OrchestratorConfig,
    /// How the guest agent is waited for.
    pub envd: EnvdConfig,
    /// Starts machines.
    pub vmm: Arc<dyn Vmm>,
    /// Gives network slots.
    pub slots: Arc<dyn Slots>,
    /// Gives disks.
    pub disks: Arc<dyn DiskStore>,
    /// Kernel and initramfs of cold boots.
    pub boot: GuestBoot,
    /// Where sandboxes have their private directories; made if absent.
    pub run_dir: PathBuf,
    /// Where serial logs go; made if absent. A log stays when its sandbox failed or its machine ended by itself.
    pub serial_dir: PathBuf,
    /// What tokens are derived from.
    pub seed: TokenSeed,
}

impl Parts {
    /// The serial log of a sandbox.
    pub(crate) fn serial_log(&self, id: SandboxId) -> PathBuf {
        self.serial_dir.join(format!("{id}.log"))
    }
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts")
            .field("vmm", self.vmm.identity())
            .field("run_dir", &self.run_dir)
            .finish_non_exhaustive()
    }
}

/// All sandboxes of this node. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Orchestrator {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    parts: Arc<Parts>,
    rows: Table<SandboxRow>,
    registry: RwLock<Registry>,
    scope: TaskScope,
    start_permits: Arc<Semaphore>,
    expiry_permits: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Registry {
    live: HashMap<SandboxId, Arc<Entry>>,
    ended: HashMap<SandboxId, Ended>,
    ended_order: VecDeque<SandboxId>,
}

#[derive(Debug)]
struct Entry {
    id: SandboxId,
    sandbox: Arc<NewSandbox>,
    started_at: Timestamp,
    access_token: Option<String>,
    traffic_token: Option<String>,
    inbox: mpsc::Sender<Message>,
    status: watch::Receiver<Status>,
}

impl Entry {
    fn info(&self) -> SandboxInfo {
        let status = self.status.borrow();
        SandboxInfo {
            id: self.id,
            phase: status.phase,
            template: self.sandbox.template,
            alias: self.sandbox.alias.clone(),
            started_at: self.started_at,
            end_at: status.end_at,
            shape: self.sandbox.shape,
            disk_size: status.disk_size,
            metadata: self.sandbox.metadata.clone(),
            access_token: self.access_token.clone(),
            traffic_token: self.traffic_token.clone(),
        }
    }

    fn phase(&self) -> Phase {
        self.status.borrow().phase
    }
}

impl Orchestrator {
    /// Ready to create. [`crate::end_leftovers`] comes before: two machines must never have one disk.
    pub fn start(parts: Parts, store: &Store) -> Result<Self, StartOrchestratorError> {
        for path in [&parts.run_dir, &parts.serial_dir] {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)
                .map_err(|source| StartOrchestratorError::Directory { path: path.clone(), source })?;
        }
        prune(&parts.serial_dir, KEPT_LOGS);
        let inner = Inner {
            start_permits: Arc::new(Semaphore::new(parts.config.start_permits())),
            expiry_permits: Arc::new(Semaphore::new(parts.config.max_concurrent_expiries.max(1))),
            parts: Arc::new(parts),
            rows: sandbox_rows(store),
            registry: RwLock::default(),
            scope: TaskScope::new("sandboxes"),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Creates a sandbox and waits until its guest is ready. `keep` is held until nothing of the source is needed.
    ///
    /// Cancel safety: if dropped, the sandbox is created all the same and lives until its deadline.
    pub async fn create(&self, sandbox: NewSandbox, keep: Keep) -> Result<SandboxInfo, CreateError> {
        let inner = &self.inner;
        if inner.scope.token().is_cancelled() {
            return Err(CreateError::ShuttingDown);
        }
        let id = SandboxId::new();
        let sandbox = Arc::new(sandbox);
        let access_token = sandbox.secure.then(|| inner.parts.seed.access_token(id));
        let traffic_token = sandbox.private_traffic.then(|| inner.parts.seed.traffic_token(id));
        let life = sandbox.timeout.unwrap_or(inner.parts.config.default_timeout);
        let (status, status_reader) = watch::channel(Status {
            phase: Phase::Creating,
            end_at: after(life),
            disk_size: sandbox.disk_size.unwrap_or(Bytes(0)),
            live: None,
        });
        let (inbox, inbox_reader) = mpsc::channel(INBOX);
        let (started, outcome) = oneshot::channel();
        let entry = Arc::new(Entry {
            id,
            sandbox: Arc::clone(&sandbox),
            started_at: Timestamp::now(),
            access_token: access_token.clone(),
            traffic_token,
            inbox,
            status: status_reader,
        });
        self.write(|registry| registry.live.insert(id, Arc::clone(&entry)));
        let driver = Driver {
            id,
            parts: Arc::clone(&inner.parts),
            rows: inner.rows.clone(),
            sandbox,
            keep: Some(keep),
            access_token,
            inbox: inbox_reader,
            status,
            started,
            start_permits: Arc::clone(&inner.start_permits),
            expiry_permits: Arc::clone(&inner.expiry_permits),
            shutdown: inner.scope.token(),
        };
        let registry = self.clone();
        inner.scope.spawn(format!("sandbox {id}"), async move {
            let why = driver.run().await;
            registry.write(|registry| registry.bury(id, why));
        });
        outcome.await.unwrap_or(Err(CreateError::ShuttingDown))?;
        Ok(entry.info())
    }

    /// The sandbox, unless it is ending or gone.
    pub fn get(&self, id: SandboxId) -> Result<SandboxInfo, AskError> {
        self.entry(id).map(|entry| entry.info())
    }

    /// Every sandbox that is neither ending nor gone, in no particular order.
    #[must_use]
    pub fn list(&self) -> Vec<SandboxInfo> {
        self.read(|registry| registry.live.values().map(|entry| entry.info()).collect::<Vec<_>>())
            .into_iter()
            .filter(|info| matches!(info.phase, Phase::Creating | Phase::Running))
            .collect()
    }

    /// The way into a running sandbox; `None` if it is not running.
    #[must_use]
    pub fn route(&self, id: SandboxId) -> Option<Route> {
        let entry = self.entry(id).ok()?;
        let live = entry.status.borrow().live.clone()?;
        Some(Route { dialer: live.dialer, traffic_token: entry.traffic_token.clone(), ended: live.ended })
    }

    /// Sets the deadline to `life` from now, also to an earlier one. Waits through a start.
    pub async fn set_timeout(&self, id: SandboxId, life: Duration) -> Result<Timestamp, AskError> {
        self.deadline(id, life, true).await
    }

    /// Moves the deadline to `life` from now unless it is later already. Waits through a start.
    pub async fn extend(&self, id: SandboxId, life: Duration) -> Result<Timestamp, AskError> {
        self.deadline(id, life, false).await
    }

    async fn deadline(&self, id: SandboxId, life: Duration, shorten: bool) -> Result<Timestamp, AskError> {
        let entry = self.entry(id)?;
        let (reply, answer) = oneshot::channel();
        let sent = entry.inbox.send(Message::Deadline { life, shorten, reply }).await;
        match (sent, answer.await) {
            (Ok(()), Ok(Some(end_at))) => Ok(end_at),
            _ => Err(self.not_found(id)),
        }
    }

    /// Ends a sandbox in whatever phase it is, and waits until nothing of it is left. Concurrent deletes join.
    ///
    /// Cancel safety: if dropped, the sandbox is deleted all the same.
    pub async fn delete(&self, id: SandboxId) -> Result<(), DeleteError> {
        let entry = self.read(|registry| registry.live.get(&id).cloned()).ok_or_else(|| self.not_found(id))?;
        let (reply, answer) = oneshot::channel();
        if entry.inbox.send(Message::Delete { why: Ended::Deleted, reply }).await.is_err() {
            return Err(self.not_found(id).into());
        }
        match answer.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(failures)) => Err(DeleteError::Unfinished { id, failures }),
            Err(_) => Err(self.not_found(id).into()),
        }
    }

    /// Ends every sandbox and waits for their drivers.
    pub async fn close(&self, patience: Duration) -> Result<(), StillRunning> {
        self.inner.scope.close(patience).await
    }

    /// An entry that is neither ending nor gone: to the outside a sandbox is not there any more once its end began.
    fn entry(&self, id: SandboxId) -> Result<Arc<Entry>, AskError> {
        self.read(|registry| registry.live.get(&id).cloned())
            .filter(|entry| matches!(entry.phase(), Phase::Creating | Phase::Running))
            .ok_or_else(|| self.not_found(id))
    }

    fn not_found(&self, id: SandboxId) -> AskError {
        AskError::NotFound { id, ended: self.read(|registry| registry.ended.get(&id).cloned()) }
    }

    // Each section below is one map operation or a short walk: the maps are valid after any panic in them.
    fn read<R>(&self, look: impl FnOnce(&Registry) -> R) -> R {
        look(&self.inner.registry.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write<R>(&self, change: impl FnOnce(&mut Registry) -> R) -> R {
        change(&mut self.inner.registry.write().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Removes all but the newest `keep` files of `dir`. What cannot be looked at or removed stays.
fn prune(dir: &Path, keep: usize) {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut files: Vec<_> =
        entries.filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path()))).collect();
    files.sort_by_key(|(modified, _)| std::cmp::Reverse(*modified));
    for (_, path) in files.into_iter().skip(keep) {
        _ = std::fs::remove_file(path);
    }
}

impl Registry {
    fn bury(&mut self, id: SandboxId, why: Ended) {
        self.live.remove(&id);
        self.ended.insert(id, why);
        self.ended_order.push_back(id);
        if self.ended_order.len() > REMEMBERED
            && let Some(oldest) = self.ended_order.pop_front()
        {
            self.ended.remove(&oldest);
        }
    }
}
