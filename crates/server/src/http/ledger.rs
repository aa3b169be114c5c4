//! `GET /debug/ledger`: what this node's records own, beside what is there.
//!
//! While something is under way the two may differ for a moment. What stays without an owner is a leak.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aenv_vmm_driver::find_by_work_dir;
use axum::Json;
use axum::extract::State;
use serde::Serialize;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::App;
use super::error::ApiError;

/// One kind of thing.
#[derive(Debug, Serialize)]
pub(crate) struct Account {
    /// How many the records own.
    owned: usize,
    /// How many there are.
    live: usize,
    /// Those that no record owns.
    unowned: Vec<String>,
}

impl Account {
    fn of(live: Vec<String>, owned: impl IntoIterator<Item = String>) -> Self {
        let owned: BTreeSet<String> = owned.into_iter().collect();
        let all = live.len();
        let unowned = live.into_iter().filter(|name| !owned.contains(name)).collect();
        Self { owned: owned.len(), live: all, unowned }
    }
}

/// The answer.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Ledger {
    /// Nothing is without an owner.
    clean: bool,
    /// VMM processes, by their private directories.
    machines: Account,
    /// Those directories.
    work_dirs: Account,
    /// Disks of machines.
    disks: Account,
    /// Memory that machines go on from, by its capture.
    memories: Account,
    /// Network namespaces: of machines, and waiting in the pool.
    slots: Counts,
    /// Machines that stand ready; counted above too.
    standing: usize,
    /// VMMs that wait for a machine; counted above too.
    waiting: usize,
    /// Open descriptors of this server.
    descriptors: usize,
    /// Mounts below this node's directories.
    mounts: usize,
}

#[derive(Debug, Serialize)]
struct Counts {
    owned: usize,
    live: usize,
}

impl Ledger {
    /// By kind: how many are owned, live, and live without an owner.
    pub(super) fn counts(&self) -> Vec<(&'static str, [i64; 3])> {
        let accounts = [
            ("machines", &self.machines),
            ("work_dirs", &self.work_dirs),
            ("disks", &self.disks),
            ("memories", &self.memories),
        ];
        let counted = accounts.map(|(kind, account)| (kind, [account.owned, account.live, account.unowned.len()]));
        let Counts { owned, live } = self.slots;
        let slots = ("slots", [owned, live, live.saturating_sub(owned)]);
        counted.into_iter().chain([slots]).map(|(kind, counts)| (kind, counts.map(|count| count as i64))).collect()
    }
}

/// How long a ledger is good enough for whoever may ask at any time: to take one is work.
const FRESH: Duration = Duration::from_secs(5);

/// The ledger that was taken last.
#[derive(Debug, Default)]
pub(crate) struct LastLedger(Mutex<Option<(Instant, Arc<Ledger>)>>);

/// A ledger of the last few seconds.
pub(super) async fn recent(app: &App) -> Result<Arc<Ledger>, ApiError> {
    // Whoever comes while one is taken waits for it.
    let mut last = app.last_ledger.0.lock().await;
    if let Some((taken, ledger)) = &*last
        && taken.elapsed() < FRESH
    {
        return Ok(Arc::clone(ledger));
    }
    let ledger = Arc::new(take(app).await?);
    *last = Some((Instant::now(), Arc::clone(&ledger)));
    Ok(ledger)
}

/// `GET /debug/ledger`: always a fresh one.
pub(super) async fn show(State(app): State<App>) -> Result<Json<Ledger>, ApiError> {
    take(&app).await.map(Json)
}

async fn take(app: &App) -> Result<Ledger, ApiError> {
    // What is there comes first: what goes meanwhile has its record longer than itself.
    let devices = app.blockd.list().await.map_err(|error| ApiError::unavailable(format!("ask blockd: {error}")))?;
    let (run_dir, netns) = (app.sandboxes_dir.clone(), app.config.runtime_path.join("netns"));
    let roots = [app.config.home_path.clone(), app.config.runtime_path.clone()];
    let looked = tokio::task::spawn_blocking(move || {
        let machines = find_by_work_dir(&run_dir).map_err(|error| format!("look for machines: {error}"))?;
        let machines: Vec<_> = machines.into_iter().map(|machine| machine.work_dir.display().to_string()).collect();
        Ok::<_, String>((
            machines,
            paths(&run_dir),
            paths(&netns).len(),
            mounts(&roots),
            paths(Path::new("/proc/self/fd")),
        ))
    });
    let looked = looked.await.map_err(|error| error.to_string()).and_then(|looked| looked);
    let (machines, dirs, netns, mounts, descriptors) = looked.map_err(ApiError::unavailable)?;
    let owned = app.orchestrator.owned().await.map_err(|error| ApiError::unavailable(error.to_string()))?;

    let owned_dirs = || owned.work_dirs.iter().map(|dir| dir.display().to_string());
    let (memories, disks): (Vec<_>, Vec<_>) =
        devices.into_iter().map(|device| device.name).partition(|name| aenv_snapshot::device_owner(name).is_some());
    let captured = memories.iter().filter(|name| {
        aenv_snapshot::device_owner(name).is_some_and(|id| app.captures_dir.join(id.to_string()).exists())
    });
    let captured: Vec<String> = captured.cloned().collect();
    // Conversions of images have disks of their own, which are gone when they are over.
    let disks = disks.into_iter().filter(|name| !name.starts_with(aenv_image::DEVICE_PREFIX)).collect();
    let ledger = Ledger {
        clean: true,
        machines: Account::of(machines, owned_dirs()),
        work_dirs: Account::of(dirs, owned_dirs()),
        disks: Account::of(disks, owned.disks.iter().cloned()),
        memories: Account::of(memories, captured),
        slots: Counts { owned: owned.slots + app.slots.waiting(), live: netns },
        standing: app.orchestrator.standing(),
        waiting: app.orchestrator.waiting(),
        descriptors: descriptors.len(),
        mounts,
    };
    let accounts = [&ledger.machines, &ledger.work_dirs, &ledger.disks, &ledger.memories];
    let clean = accounts.iter().all(|account| account.unowned.is_empty());
    Ok(Ledger { clean, ..ledger })
}

fn paths(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path().display().to_string()).collect()
}

/// Mounts at or below `roots`.
fn mounts(roots: &[PathBuf]) -> usize {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // The fifth field is where it is mounted (proc_pid_mountinfo(5)).
    let places = table.lines().filter_map(|line| line.split(' ').nth(4));
    places.filter(|place| roots.iter().any(|root| Path::new(place).starts_with(root))).count()
}
