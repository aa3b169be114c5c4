//! All processes started through the protocol, and for a while those that have ended.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::reaper::Reaper;
use super::running::{Limits, Running, Subscription};
use super::spawn::{Program, SpawnError, spawn};

/// How long a late follower still learns how a process ended; the protocol's number.
const REMEMBERED: Duration = Duration::from_secs(30);

/// A process as its starter described it, for listings.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Config {
    pub(crate) command: String,
    pub(crate) arguments: Vec<String>,
    pub(crate) environment: HashMap<String, String>,
    pub(crate) directory: Option<String>,
    pub(crate) tag: Option<String>,
}

/// Which process a call means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Selector {
    Pid(u32),
    Tag(String),
}

impl Selector {
    fn matches(&self, process: &Running) -> bool {
        match self {
            Self::Pid(pid) => process.pid.cast_unsigned() == *pid,
            Self::Tag(tag) => process.config.tag.as_ref() == Some(tag),
        }
    }
}

/// The table; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    reaper: Reaper,
    inner: Arc<Mutex<Inner>>,
    supervisors: TaskTracker,
}

#[derive(Debug, Default)]
struct Inner {
    running: BTreeMap<i32, Arc<Running>>,
    ended: Vec<(Instant, Arc<Running>)>,
}

impl Table {
    pub(crate) fn new(reaper: Reaper) -> Self {
        Self { reaper, inner: Arc::default(), supervisors: TaskTracker::new() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // No section below can leave the table half changed.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a program and subscribes to it before its first byte.
    ///
    /// Cancel safety: if dropped, the process may or may not have been started; if it was, it is in the table.
    pub(crate) async fn start(
        &self,
        program: Program,
        config: Config,
        limits: Limits,
    ) -> Result<Subscription, SpawnError> {
        let table = self.clone();
        let start = self.supervisors.spawn(async move {
            let reaper = table.reaper.clone();
            let runtime = tokio::runtime::Handle::current();
            let spawned = tokio::task::spawn_blocking(move || {
                let _inside = runtime.enter();
                spawn(&program, &reaper)
            });
            // A blocking task neither panics nor is cancelled while the runtime lives.
            let spawned = spawned.await.map_err(|e| SpawnError::Watch(std::io::Error::other(e)))??;
            let (process, supervision) = Running::new(config, spawned, table.reaper.clone());
            let subscription = process.subscribe(0);
            table.insert(Arc::clone(&process));
            let tracker = table.supervisors.clone();
            tracker.spawn(async move {
                process.supervise(supervision, limits).await;
                table.retire(&process);
            });
            Ok(subscription)
        });
        start.await.map_err(|e| SpawnError::Watch(std::io::Error::other(e)))?
    }

    fn insert(&self, process: Arc<Running>) {
        let mut inner = self.inner();
        // A new process takes its pid and tag over from one that has ended.
        inner.ended.retain(|(_, old)| {
            old.pid != process.pid && (old.config.tag.is_none() || old.config.tag != process.config.tag)
        });
        inner.running.insert(process.pid, process);
    }

    fn retire(&self, process: &Arc<Running>) {
        let now = Instant::now();
        let mut inner = self.inner();
        inner.ended.retain(|(end, _)| now.duration_since(*end) < REMEMBERED);
        // Its pid may be a newer process's by now.
        if inner.running.get(&process.pid).is_some_and(|current| Arc::ptr_eq(current, process)) {
            inner.running.remove(&process.pid);
            inner.ended.push((now, Arc::clone(process)));
        }
    }

    /// All that run, by pid.
    pub(crate) fn list(&self) -> Vec<Arc<Running>> {
        self.inner().running.values().filter(|process| !process.is_gone()).cloned().collect()
    }

    /// The running process that `selector` names.
    pub(crate) fn find(&self, selector: &Selector) -> Option<Arc<Running>> {
        self.inner().running.values().find(|process| !process.is_gone() && selector.matches(process)).cloned()
    }

    /// As [`Table::find`], but also one that ended a short while ago.
    pub(crate) fn find_or_recall(&self, selector: &Selector) -> Option<Arc<Running>> {
        let inner = self.inner();
        let running = inner.running.values().find(|process| selector.matches(process));
        let fresh = |end: &Instant| end.elapsed() < REMEMBERED;
        let ended = || inner.ended.iter().rev().find(|(end, p)| fresh(end) && selector.matches(p)).map(|(_, p)| p);
        running.or_else(ended).cloned()
    }

    /// Asks every process to end, kills those that have not after `patience`, and waits for their supervisors.
    pub(crate) async fn shut_down(&self, patience: Duration) {
        let signal_all = |signal| {
            for process in self.list() {
                let _ = self.reaper.signal_group(process.pid, signal);
            }
        };
        self.supervisors.close();
        signal_all(Signal::SIGTERM);
        if tokio::time::timeout(patience, self.supervisors.wait()).await.is_err() {
            for process in self.list() {
                process.kill_group();
            }
            // A process that survives SIGKILL this long is stuck in the kernel; the machine is about to go anyway.
            let _ = tokio::time::timeout(Duration::from_secs(2), self.supervisors.wait()).await;
        }
    }
}
