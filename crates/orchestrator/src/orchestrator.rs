//! The registry: who exists, and the door to each driver.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use aenv_block_device::{DiskRecord, DiskStore};
use aenv_durable::{Row, Store, StoreError, Table};
use aenv_model::{Bytes, CaptureId, LeaseId, Phase, SandboxId};
use aenv_network::EgressPolicy;
use aenv_snapshot::{Capture, CaptureStore};
use aenv_tasks::{StillRunning, TaskScope};
use aenv_vmm_driver::{DiskLimit, Vmm};
use jiff::Timestamp;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tracing::{debug, warn};

use crate::blanks::{Blanks, BlanksConfig};
use crate::config::{EnvdConfig, OrchestratorConfig};
use crate::driver::{Begin, Departure, Driver, Live, Status, after};
use crate::former::{Former, TakenOver, sandbox_rows};
use crate::guest;
use crate::inbox::Inbox;
use crate::journal::{Journal, JournalEntry, Level};
use crate::lease::Leases;
use crate::message::{CaptureKind, Message, Refusal};
use crate::resources::{Resources, SandboxRow, Stage, chain};
use crate::sandbox::{
    AskError, CreateError, DeleteError, Ended, Forked, HowToPause, NewSandbox, Owned, Route, SandboxInfo, SandboxSpec,
    Source, StartOrchestratorError, StartTimes, Taken,
};
use crate::seams::{GuestBoot, Slots};
use crate::stages::{OperationStage, Stages};
use crate::standby::{Standby, StandbyConfig, Standing};
use crate::token::TokenSeed;
use crate::vitals::{Sample, Vitals};

/// Asks a driver keeps while it is busy; each asker waits for its answer, so this bounds callers, not work.
const INBOX: usize = 64;

/// Ended sandboxes whose reason is remembered for whoever still asks.
const REMEMBERED: usize = 4096;

/// Of those, the newest whose journals are kept: each may have some hundred KiB.
const JOURNALS: usize = 256;

/// Serial logs of failed sandboxes that are kept over a start, newest first: enough to look into, at most 256 MiB.
const KEPT_LOGS: usize = 256;

/// What the orchestrator is made of. `server` builds these and hands them down.
pub struct Parts {
    /// Lives and their limits.
    pub config: OrchestratorConfig,
    /// How the guest agent is waited for.
    pub envd: EnvdConfig,
    /// Machines that stand ready.
    pub standby: StandbyConfig,
    /// VMMs that wait for a machine.
    pub blanks: BlanksConfig,
    /// Starts machines.
    pub vmm: Arc<dyn Vmm>,
    /// Gives network slots.
    pub slots: Arc<dyn Slots>,
    /// Gives disks.
    pub disks: Arc<dyn DiskStore>,
    /// Keeps what stopped machines are made of.
    pub captures: CaptureStore,
    /// How fast each sandbox may use its disk.
    pub disk_limit: DiskLimit,
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
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) parts: Arc<Parts>,
    pub(crate) rows: Table<SandboxRow>,
    registry: RwLock<Registry>,
    pub(crate) scope: TaskScope,
    pub(crate) start_permits: Arc<Semaphore>,
    expiry_permits: Arc<Semaphore>,
    pub(crate) standby: Standby,
    pub(crate) blanks: Arc<Blanks>,
    pub(crate) leases: Leases,
    pub(crate) stages: Stages,
    created: AtomicU64,
    not_created: AtomicU64,
}

#[derive(Debug, Default)]
struct Registry {
    live: HashMap<SandboxId, Arc<Entry>>,
    ended: HashMap<SandboxId, Past>,
    ended_order: VecDeque<SandboxId>,
}

/// What is remembered of an ended sandbox.
#[derive(Debug)]
struct Past {
    why: Ended,
    journal: Option<Arc<Journal>>,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) id: SandboxId,
    spec: Arc<SandboxSpec>,
    started_at: Timestamp,
    pub(crate) access_token: Option<String>,
    traffic_token: Option<String>,
    inbox: mpsc::Sender<Message>,
    status: watch::Receiver<Status>,
    pub(crate) journal: Arc<Journal>,
    pub(crate) vitals: Vitals,
}

impl Entry {
    fn info(&self) -> SandboxInfo {
        let status = self.status.borrow();
        SandboxInfo {
            id: self.id,
            phase: status.phase,
            template: self.spec.template,
            alias: self.spec.alias.clone(),
            started_at: self.started_at,
            end_at: status.end_at,
            shape: self.spec.shape,
            disk_size: status.disk_size,
            metadata: self.spec.metadata.clone(),
            on_expiry: self.spec.on_expiry,
            auto_resume: self.spec.auto_resume,
            disk_only: status.disk_only && status.phase.is_paused(),
            unresponsive: status.unresponsive && status.phase.is_paused(),
            start_times: status.start_times,
            access_token: self.access_token.clone(),
            traffic_token: self.traffic_token.clone(),
            egress: Arc::clone(&status.egress),
        }
    }

    fn phase(&self) -> Phase {
        self.status.borrow().phase
    }

    /// The way in, while traffic flows and the machine does not stand still.
    pub(crate) fn live(&self) -> Option<Live> {
        let status = self.status.borrow();
        status.live.clone().filter(|_| status.phase == Phase::Running)
    }
}

/// A sandbox to be driven.
pub(crate) struct ToDrive {
    pub(crate) id: SandboxId,
    pub(crate) row: SandboxRow,
    pub(crate) resources: Resources,
    pub(crate) base: Option<Capture>,
    pub(crate) rested: Option<Capture>,
    pub(crate) begin: Begin,
}

impl Orchestrator {
    /// Takes over what a former server left, and is ready to create. `kept` are captures that others keep too.
    ///
    /// Comes before the network's own sweep (by name): what is taken over keeps its slot.
    pub async fn start(
        parts: Parts,
        store: &Store,
        former: Former,
        kept: &BTreeSet<CaptureId>,
    ) -> Result<(Self, TakenOver), StartOrchestratorError> {
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
            standby: Standby::default(),
            blanks: Arc::default(),
            leases: Leases::load(store)?,
            stages: Stages::default(),
            created: AtomicU64::new(0),
            not_created: AtomicU64::new(0),
        };
        let orchestrator = Self { inner: Arc::new(inner) };
        let inner = &orchestrator.inner;
        let (found, ended, mut taken_over) = former.take_over(&inner.parts, &inner.rows, kept).await?;
        for sandbox in found {
            match &sandbox.begin {
                Begin::Running => taken_over.running += 1,
                _ => taken_over.paused += 1,
            }
            orchestrator.drive(sandbox);
        }
        for (id, why) in ended {
            orchestrator.write(|registry| registry.bury(id, why));
        }
        inner.scope.spawn("leases", orchestrator.clone().keep_leases());
        inner.scope.spawn("samples", orchestrator.clone().keep_watch());
        Ok((orchestrator, taken_over))
    }

    /// Makes a driver and its entry.
    fn drive(&self, sandbox: ToDrive) -> Arc<Entry> {
        let ToDrive { id, row, resources, base, rested, begin } = sandbox;
        let inner = &self.inner;
        let spec = Arc::new(row.spec.clone());
        let access_token = spec.secure.then(|| inner.parts.seed.access_token(id));
        let traffic_token = spec.private_traffic.then(|| inner.parts.seed.traffic_token(id));
        let phase = match &begin {
            Begin::Create { .. } => Phase::Creating,
            Begin::Running => Phase::Running,
            Begin::Paused => Phase::Paused,
        };
        let disk_only = rested.as_ref().is_some_and(|capture| capture.state().is_none());
        let (end_at, disk_size, unresponsive) = (row.end_at, row.disk_size, row.unresponsive);
        let start_times = StartTimes::default();
        let egress = Arc::new(spec.egress.clone());
        let status = Status { phase, end_at, disk_size, disk_only, unresponsive, start_times, egress, live: None };
        let (status, status_reader) = watch::channel(status);
        let (inbox, incoming) = mpsc::channel(INBOX);
        let journal = Arc::new(Journal::new(inner.parts.serial_log(id)));
        let entry = Arc::new(Entry {
            id,
            spec: Arc::clone(&spec),
            started_at: row.started_at,
            access_token: access_token.clone(),
            traffic_token,
            inbox,
            status: status_reader,
            journal: Arc::clone(&journal),
            vitals: Vitals::default(),
        });
        self.write(|registry| registry.live.insert(id, Arc::clone(&entry)));
        let driver = Driver {
            id,
            parts: Arc::clone(&inner.parts),
            rows: inner.rows.clone(),
            blanks: Arc::clone(&inner.blanks),
            spec,
            access_token,
            inbox: Inbox::new(incoming),
            status,
            start_permits: Arc::clone(&inner.start_permits),
            expiry_permits: Arc::clone(&inner.expiry_permits),
            shutdown: inner.scope.token(),
            journal,
            stages: inner.stages.clone(),
            row,
            resources,
            base,
            rested,
        };
        let registry = self.clone();
        inner.scope.spawn(format!("sandbox {id}"), async move {
            match driver.run(begin).await {
                Departure::Ended(why) => registry.write(|registry| registry.bury(id, why)),
                Departure::PutAway => registry.write(|registry| _ = registry.live.remove(&id)),
            }
        });
        entry
    }

    /// Creates a sandbox and waits until its guest is ready.
    ///
    /// Cancel safety: if dropped, the sandbox is created all the same and lives until its deadline.
    pub async fn create(&self, sandbox: NewSandbox) -> Result<SandboxInfo, CreateError> {
        self.admit(1)?;
        let standing = self.take_standing(&sandbox.spec, &sandbox.source);
        let stage = if sandbox.source.capture.is_some() { OperationStage::RESTORE } else { OperationStage::BOOT };
        let created = self.inner.stages.time(stage, self.create_on(sandbox, standing)).await;
        let count = if created.is_ok() { &self.inner.created } else { &self.inner.not_created };
        count.fetch_add(1, Ordering::Relaxed);
        created
    }

    /// Can so many sandboxes be started, or wait for it, beside those that do?
    pub fn admit(&self, count: usize) -> Result<(), CreateError> {
        let starting = |entry: &&Arc<Entry>| entry.phase() == Phase::Creating;
        let starting = self.read(|registry| registry.live.values().filter(starting).count());
        let room = self.inner.parts.config.max_queued_starts.saturating_sub(starting);
        if count > room { Err(CreateError::Full { starting, room }) } else { Ok(()) }
    }

    async fn create_on(&self, sandbox: NewSandbox, standing: Option<Standing>) -> Result<SandboxInfo, CreateError> {
        let inner = &self.inner;
        let NewSandbox { spec, source } = sandbox;
        let shape = spec.shape;
        if let Some(lease) = spec.lease.filter(|lease| !inner.leases.contains(*lease)) {
            return Err(CreateError::NoLease(lease));
        }
        let (id, row, resources, base) = match standing {
            Some(Standing { id, row, resources, base }) => {
                let SandboxRow { spec, started_at, end_at, .. } = inner.new_row(spec, row.disk_size).1;
                (id, SandboxRow { spec, started_at, end_at, ..row }, resources, base)
            }
            None => {
                let disk_size = match (&source.capture, &source.image) {
                    (Some(capture), _) => capture.manifest().disk_size,
                    (None, image) => image.as_ref().and_then(|image| image.disk_size).unwrap_or(Bytes(0)),
                };
                let (id, row) = inner.new_row(spec, disk_size);
                (id, row, Resources::default(), None)
            }
        };
        if resources.machine.is_none() && inner.scope.token().is_cancelled() {
            return Err(CreateError::ShuttingDown);
        }
        if source.capture.is_some() {
            self.keep_blanks(shape);
        }
        let (started, outcome) = oneshot::channel();
        let begin = Begin::Create { source, started };
        let entry = self.drive(ToDrive { id, row, resources, base, rested: None, begin });
        outcome.await.unwrap_or(Err(CreateError::ShuttingDown))?;
        Ok(entry.info())
    }

    /// The sandbox, unless it is ending or gone, or of the node itself.
    pub fn get(&self, id: SandboxId) -> Result<SandboxInfo, AskError> {
        self.shown(id).map(|entry| entry.info())
    }

    /// Every sandbox that is neither ending nor gone nor of the node itself, in no particular order.
    #[must_use]
    pub fn list(&self) -> Vec<SandboxInfo> {
        let shown = |entry: &&Arc<Entry>| !entry.spec.internal;
        self.read(|registry| registry.live.values().filter(shown).map(|entry| entry.info()).collect::<Vec<_>>())
            .into_iter()
            .filter(|info| !info.phase.is_ending())
            .collect()
    }

    /// Every sandbox that users see.
    pub(crate) fn entries(&self) -> Vec<Arc<Entry>> {
        self.read(|registry| registry.live.values().filter(|entry| !entry.spec.internal).cloned().collect())
    }

    /// What the records own now: of sandboxes that have a machine or are about to, and of machines that stand ready.
    pub async fn owned(&self) -> Result<Owned, StoreError> {
        let rows = self.inner.rows.clone();
        let rows =
            tokio::task::spawn_blocking(move || rows.list_blocking()).await.map_err(|_| StoreError::Closed)??;
        let mut owned = Owned::default();
        for (_, row) in rows {
            let Row::Known(row) = row else { continue };
            // A paused sandbox's row may still name what it had.
            if matches!(row.stage, Stage::Paused(_)) && row.machine.is_none() && row.base.is_none() {
                continue;
            }
            owned.slots += usize::from(row.slot.is_some());
            let beside = row.beside.map(|beside| (beside.work_dir, beside.disk));
            for (work_dir, disk) in [Some((row.work_dir, row.disk)), beside].into_iter().flatten() {
                owned.work_dirs.insert(work_dir);
                owned.disks.insert(disk.name);
            }
        }
        Ok(owned)
    }

    /// What a sandbox used, newest last. A paused one has what it had.
    pub fn samples(&self, id: SandboxId) -> Result<Vec<Sample>, AskError> {
        self.shown(id).map(|entry| entry.vitals.samples())
    }

    /// The newest sample of a sandbox, if there is one.
    pub fn newest_sample(&self, id: SandboxId) -> Result<Option<Sample>, AskError> {
        self.shown(id).map(|entry| entry.vitals.newest())
    }

    /// What a sandbox went through and what its guest said, oldest first; for a while also after its end.
    pub async fn journal(&self, id: SandboxId) -> Result<Vec<JournalEntry>, AskError> {
        let found = self.read(|registry| match (registry.live.get(&id), registry.ended.get(&id)) {
            (Some(entry), _) => (!entry.spec.internal).then(|| Arc::clone(&entry.journal)),
            (None, past) => past.and_then(|past| past.journal.clone()),
        });
        let journal = found.ok_or_else(|| self.not_found(id))?;
        let read = move || {
            journal.look_at_console();
            journal.entries()
        };
        tokio::task::spawn_blocking(read).await.map_err(|_| self.not_found(id))
    }

    /// Notes something that happened to a sandbox elsewhere. Nothing if there is no such sandbox.
    pub fn note(&self, id: SandboxId, level: Level, message: &str, fields: &[(&'static str, &str)]) {
        if let Ok(entry) = self.entry(id) {
            entry.journal.note(level, message, fields);
        }
    }

    /// How creates have ended since the start of the node.
    #[must_use]
    pub fn creates(&self) -> Creates {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Creates { succeeded: count(&self.inner.created), failed: count(&self.inner.not_created) }
    }

    /// Counts of what is done to sandboxes.
    #[must_use]
    pub fn stages(&self) -> &Stages {
        &self.inner.stages
    }

    /// How many VMMs wait for a machine.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.inner.blanks.total()
    }

    /// How many machines stand ready.
    #[must_use]
    pub fn standing(&self) -> usize {
        self.inner.standby.total()
    }

    /// The way into a running sandbox; `None` if it is not running.
    #[must_use]
    pub fn route(&self, id: SandboxId) -> Option<Route> {
        let entry = self.entry(id).ok().filter(|entry| !entry.spec.internal)?;
        let live = entry.status.borrow().live.clone()?;
        let in_use = live.activity.begin();
        Some(Route { dialer: live.dialer, traffic_token: entry.traffic_token.clone(), ended: live.ended, in_use })
    }

    /// Sets the deadline to `life` from now, also to an earlier one. Waits through what is under way.
    pub async fn set_timeout(&self, id: SandboxId, life: Duration) -> Result<Timestamp, AskError> {
        self.ask(id, "set the timeout of", |reply| Message::Deadline { life, shorten: true, reply }).await
    }

    /// Moves the deadline to `life` from now unless it is later already. Waits through what is under way.
    pub async fn extend(&self, id: SandboxId, life: Duration) -> Result<Timestamp, AskError> {
        self.ask(id, "extend", |reply| Message::Deadline { life, shorten: false, reply }).await
    }

    /// Resumes it if it is paused; its deadline is `life` from now, or later if it ran and was later. `afresh`: if it is
    /// paused, it is booted from its disk as it would be after a shutdown. True if it was resumed.
    ///
    /// Cancel safety: if dropped, it is resumed all the same.
    pub async fn connect(&self, id: SandboxId, life: Duration, afresh: bool) -> Result<bool, AskError> {
        let reboots = afresh && self.get(id).is_ok_and(|info| info.phase.is_paused() && !info.disk_only);
        self.keep_blanks_of(id);
        let start = || self.ask(id, "connect to", |reply| Message::Start { life, connect: true, reply });
        if reboots {
            // What its guest has not written to its disk yet is in its memory alone.
            start().await?;
            self.pause(id, HowToPause { disk_only: true, ..HowToPause::default() }).await?;
        }
        start().await
    }

    /// Resumes it if it is paused, and sets its deadline to `life` from now. True if it was resumed.
    ///
    /// Cancel safety: if dropped, it is resumed all the same.
    pub async fn resume(&self, id: SandboxId, life: Duration) -> Result<bool, AskError> {
        self.keep_blanks_of(id);
        self.ask(id, "resume", |reply| Message::Start { life, connect: false, reply }).await
    }

    /// Resumes a paused sandbox that is to be resumed by traffic. False if it is not to be, or is not paused.
    ///
    /// Cancel safety: if dropped, it is resumed all the same.
    pub async fn wake(&self, id: SandboxId) -> Result<bool, AskError> {
        let info = self.get(id)?;
        let wakes = info.auto_resume && !info.disk_only;
        if !wakes || !(info.phase.is_paused() || info.phase == Phase::Resuming) {
            return Ok(false);
        }
        let config = &self.inner.parts.config;
        let given = self.entry(id)?.spec.timeout.unwrap_or(config.default_timeout);
        self.connect(id, given.max(config.auto_resume_least), false).await?;
        Ok(true)
    }

    /// One that was paused once may be paused again.
    fn keep_blanks_of(&self, id: SandboxId) {
        if let Ok(entry) = self.entry(id) {
            self.keep_blanks(entry.spec.shape);
        }
    }

    /// Pauses it: its machine is ended, and what it was is kept. False if it was paused already.
    ///
    /// Cancel safety: if dropped, it is paused all the same.
    pub async fn pause(&self, id: SandboxId, how: HowToPause) -> Result<bool, AskError> {
        self.ask(id, "pause", |reply| Message::Pause { how, reply }).await
    }

    /// Changes what a running sandbox may reach. Connections that it has go on.
    ///
    /// Cancel safety: if dropped, it is done all the same.
    pub async fn set_network(&self, id: SandboxId, policy: EgressPolicy) -> Result<(), AskError> {
        self.ask(id, "change the network of", |reply| Message::Network { policy, reply }).await
    }

    /// Copies a running sandbox, which stands still for a moment. Whoever asks keeps the capture, or dooms it. `disk_only`:
    /// without its memory; its guest writes to the disk what only that has.
    ///
    /// Cancel safety: if dropped, the sandbox goes on and nothing is left.
    pub async fn capture(&self, id: SandboxId, disk_only: bool) -> Result<Taken, AskError> {
        let kind = CaptureKind::Snapshot { disk_only };
        self.ask(id, "capture", |reply| Message::Capture { kind, reply }).await
    }

    /// Puts a machine that goes on from `capture` in the place of a running sandbox's own. Until it is ready, the sandbox runs
    /// on, and it goes on doing so if that fails. Its connections are cut; id, tokens and deadline stay.
    ///
    /// Cancel safety: if dropped, it is done all the same.
    pub async fn roll_back(&self, id: SandboxId, capture: Capture) -> Result<SandboxInfo, AskError> {
        self.ask(id, "roll back", |reply| Message::Rollback { capture, reply }).await?;
        self.get(id)
    }

    /// Copies a running sandbox `count` times: children of its memory and disk, with ids and tokens of their own, that live for
    /// `life` (`None`: as long as the source was given).
    ///
    /// Cancel safety: if dropped, the children are made all the same.
    pub async fn fork(&self, id: SandboxId, count: usize, life: Option<Duration>) -> Result<Forked, AskError> {
        let orchestrator = self.clone();
        let fork = async move {
            let kind = CaptureKind::Fork;
            let taken = orchestrator.ask(id, "fork", |reply| Message::Capture { kind, reply }).await?;
            let child = || {
                let spec = SandboxSpec { timeout: life.or(taken.spec.timeout), ..(*taken.spec).clone() };
                let source = Source { capture: Some(taken.capture.clone()), ..Source::default() };
                // Their capture is for them alone: none would stand ready for another fork.
                orchestrator.create_on(NewSandbox { spec, source }, None)
            };
            let children = futures::future::join_all((0..count).map(|_| child())).await;
            taken.capture.doom(); // it stays as long as a child runs on it
            let captured_at = taken.capture.manifest().captured_at;
            Ok(Forked { children, captured_at, stall: taken.stall })
        };
        let stages = self.inner.stages.clone();
        let fork = async move { stages.time(OperationStage::FORK, fork).await };
        match self.inner.scope.spawn(format!("fork of {id}"), fork).await {
            Ok(forked) => forked,
            Err(_) => Err(self.not_found(id)),
        }
    }

    /// Sends an ask to a driver and waits for the answer.
    async fn ask<T>(
        &self,
        id: SandboxId,
        asked: &'static str,
        message: impl FnOnce(crate::message::Reply<T>) -> Message,
    ) -> Result<T, AskError> {
        let entry = self.entry(id)?;
        let (reply, answer) = oneshot::channel();
        if entry.inbox.send(message(reply)).await.is_err() {
            return Err(self.not_found(id));
        }
        match answer.await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(Refusal::Busy(phase))) => Err(AskError::Busy { id, phase, asked }),
            Ok(Err(Refusal::Failed(error))) => Err(error),
            Ok(Err(Refusal::Gone)) | Err(_) => Err(self.not_found(id)),
        }
    }

    /// Has a running sandbox's guest run a login shell, so that what commands need is in its memory. An image may have none.
    pub async fn exercise(&self, id: SandboxId) {
        if let Some((live, token)) = self.live(id)
            && let Err(error) = guest::exercise(live.dialer.as_ref(), token.as_deref()).await
        {
            debug!(sandbox_id = %id, %error, "a guest has run no command");
        }
    }

    /// The way to a running sandbox's agent, with its token.
    pub(crate) fn live(&self, id: SandboxId) -> Option<(Live, Option<String>)> {
        let entry = self.entry(id).ok()?;
        let live = entry.status.borrow().live.clone()?;
        Some((live, entry.access_token.clone()))
    }

    /// Ends a sandbox in whatever phase it is, and waits until nothing of it is left. Concurrent deletes join.
    ///
    /// Cancel safety: if dropped, the sandbox is deleted all the same.
    pub async fn delete(&self, id: SandboxId) -> Result<(), DeleteError> {
        self.end(id, Ended::Deleted).await
    }

    /// The sandboxes under a lease, in whatever phase.
    pub(crate) fn under_lease(&self, lease: LeaseId) -> Vec<SandboxId> {
        let under = |entry: &&Arc<Entry>| entry.spec.lease == Some(lease);
        self.read(|registry| registry.live.values().filter(under).map(|entry| entry.id).collect())
    }

    pub(crate) async fn end(&self, id: SandboxId, why: Ended) -> Result<(), DeleteError> {
        let entry = self.read(|registry| registry.live.get(&id).cloned()).ok_or_else(|| self.not_found(id))?;
        let (reply, answer) = oneshot::channel();
        if entry.inbox.send(Message::Delete { why, reply }).await.is_err() {
            return Err(self.not_found(id).into());
        }
        match answer.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(failures)) => Err(DeleteError::Unfinished { id, failures }),
            Err(_) => Err(self.not_found(id).into()),
        }
    }

    /// Puts every sandbox away as `on_stop` says, and waits for their drivers.
    pub async fn close(&self, patience: Duration) -> Result<(), StillRunning> {
        self.inner.scope.close(patience).await
    }

    /// An entry that is neither ending nor gone: to the outside a sandbox is not there any more once its end began.
    fn entry(&self, id: SandboxId) -> Result<Arc<Entry>, AskError> {
        self.read(|registry| registry.live.get(&id).cloned())
            .filter(|entry| !entry.phase().is_ending())
            .ok_or_else(|| self.not_found(id))
    }

    /// An entry that users may see.
    fn shown(&self, id: SandboxId) -> Result<Arc<Entry>, AskError> {
        self.entry(id).ok().filter(|entry| !entry.spec.internal).ok_or_else(|| self.not_found(id))
    }

    fn not_found(&self, id: SandboxId) -> AskError {
        AskError::NotFound { id, ended: self.read(|registry| registry.ended.get(&id).map(|past| past.why.clone())) }
    }

    // Each section below is one map operation or a short walk: the maps are valid after any panic in them.
    fn read<R>(&self, look: impl FnOnce(&Registry) -> R) -> R {
        look(&self.inner.registry.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write<R>(&self, change: impl FnOnce(&mut Registry) -> R) -> R {
        change(&mut self.inner.registry.write().unwrap_or_else(PoisonError::into_inner))
    }
}

/// How creates have ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Creates {
    /// There was a sandbox.
    pub succeeded: u64,
    /// There was none.
    pub failed: u64,
}

impl Inner {
    /// The row of a sandbox that begins now, under a new id.
    pub(crate) fn new_row(&self, spec: SandboxSpec, disk_size: Bytes) -> (SandboxId, SandboxRow) {
        let id = SandboxId::new();
        let row = SandboxRow {
            stage: Stage::Starting,
            started_at: Timestamp::now(),
            end_at: after(spec.timeout.unwrap_or(self.parts.config.default_timeout)),
            spec,
            work_dir: self.parts.run_dir.join(id.to_string()),
            disk: DiskRecord { name: id.to_string() },
            disk_size,
            unresponsive: false,
            machine: None,
            slot: None,
            boot: None,
            base: None,
            beside: None,
        };
        (id, row)
    }

    /// Gives back what was made ahead of a sandbox, and forgets its row. What would not go is the next start's to end.
    pub(crate) async fn give_back(&self, id: SandboxId, mut resources: Resources) {
        if let Err(failures) = resources.release(self.parts.disks.as_ref()).await {
            warn!(sandbox_id = %id, failures, "what was made ahead of a sandbox would not go");
        } else if let Err(error) = self.rows.remove(id.to_string()).await {
            warn!(sandbox_id = %id, error = chain(&error), "could not forget what was made ahead of a sandbox");
        }
        _ = std::fs::remove_file(self.parts.serial_log(id)); // it told nothing that anybody will look for
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
        let journal =
            self.live.remove(&id).filter(|entry| !entry.spec.internal).map(|entry| Arc::clone(&entry.journal));
        self.ended.insert(id, Past { why, journal });
        self.ended_order.push_back(id);
        // Counted from the newest: those whose time is over lose their journals one by one.
        if let Some(oldest) = self.ended_order.len().checked_sub(JOURNALS + 1).and_then(|at| self.ended_order.get(at))
            && let Some(past) = self.ended.get_mut(oldest)
        {
            past.journal = None;
        }
        if self.ended_order.len() > REMEMBERED
            && let Some(oldest) = self.ended_order.pop_front()
        {
            self.ended.remove(&oldest);
        }
    }
}
