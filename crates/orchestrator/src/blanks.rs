//! VMMs that have come up, each in a network slot, before anybody knows which machine they will restore.
//!
//! Those of a shape are kept by a task of its own, their keeper, from the first restore of such a machine on. Each has the
//! row of a sandbox that is starting, so that the next server ends those of a killed one; whoever takes one names its
//! directory in a row of his own before the keeper's row goes.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aenv_model::{Bytes, MachineShape, SandboxId, TemplateId};
use aenv_vmm_driver::{Blank, BlankSpec};
use serde::Deserialize;
use tokio::sync::Notify;
use tracing::{info, warn};

use crate::orchestrator::Orchestrator;
use crate::resources::{Resources, SandboxRow, chain};
use crate::sandbox::{CreateError, SandboxSpec};
use crate::seams::SlotLease;
use crate::standby::CALM;

/// Pause after a VMM could not be made to wait.
const AGAIN: Duration = Duration::from_secs(10);
/// Disks of every machine.
const DISKS: usize = 1;

/// `[pool.vmm]`: VMMs that wait for a machine to restore.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct BlanksConfig {
    /// How many for each shape of machine that is restored. 0: none.
    pub size: usize,
}

impl Default for BlanksConfig {
    fn default() -> Self {
        Self { size: 2 }
    }
}

/// All VMMs that wait.
#[derive(Default)]
pub(crate) struct Blanks {
    stocks: Mutex<HashMap<MachineShape, Stock>>,
}

struct Stock {
    ready: VecDeque<BlankMachine>,
    taken: Arc<Notify>,
}

/// One of them.
pub(crate) struct BlankMachine {
    /// Of its row.
    pub(crate) id: SandboxId,
    pub(crate) vmm: Box<dyn Blank>,
    pub(crate) slot: Box<dyn SlotLease>,
    pub(crate) work_dir: PathBuf,
}

impl Blanks {
    // Each section below is a step or two on the map, which is valid after any panic in them.
    fn stocks(&self) -> MutexGuard<'_, HashMap<MachineShape, Stock>> {
        self.stocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one for a machine of this shape.
    pub(crate) fn take(&self, shape: MachineShape) -> Option<BlankMachine> {
        let mut stocks = self.stocks();
        let stock = stocks.get_mut(&shape)?;
        let taken = stock.ready.pop_front();
        stock.taken.notify_one();
        taken
    }

    /// How its keeper is to be told, if a shape has none yet.
    fn unkept(&self, shape: MachineShape) -> Option<Arc<Notify>> {
        let mut unkept = None;
        self.stocks().entry(shape).or_insert_with(|| {
            let taken = Arc::new(Notify::new());
            unkept = Some(Arc::clone(&taken));
            Stock { ready: VecDeque::new(), taken }
        });
        unkept
    }

    fn len(&self, shape: MachineShape) -> usize {
        self.stocks().get(&shape).map_or(0, |stock| stock.ready.len())
    }

    fn add(&self, shape: MachineShape, blank: BlankMachine) {
        if let Some(stock) = self.stocks().get_mut(&shape) {
            stock.ready.push_back(blank);
        }
    }

    fn take_away(&self, shape: MachineShape) -> VecDeque<BlankMachine> {
        self.stocks().get_mut(&shape).map(|stock| std::mem::take(&mut stock.ready)).unwrap_or_default()
    }

    /// How many wait.
    pub(crate) fn total(&self) -> usize {
        self.stocks().values().map(|stock| stock.ready.len()).sum()
    }
}

impl std::fmt::Debug for Blanks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Blanks").field(&self.total()).finish()
    }
}

impl Orchestrator {
    /// Sees to it that VMMs wait for machines of this shape.
    pub(crate) fn keep_blanks(&self, shape: MachineShape) {
        if self.inner.parts.blanks.size == 0 {
            return;
        }
        if let Some(taken) = self.inner.blanks.unkept(shape) {
            let keeper = Keeper { orchestrator: self.clone(), shape };
            self.inner.scope.spawn(format!("VMMs for {shape:?}"), keeper.run(taken));
        }
    }
}

/// Keeps VMMs waiting for machines of a shape.
struct Keeper {
    orchestrator: Orchestrator,
    shape: MachineShape,
}

impl Keeper {
    async fn run(self, taken: Arc<Notify>) {
        let inner = &self.orchestrator.inner;
        let (blanks, shutdown) = (&inner.blanks, inner.scope.token());
        shutdown.run_until_cancelled(tokio::time::sleep(CALM)).await;
        while !shutdown.is_cancelled() {
            let mut pause = None;
            if blanks.len(self.shape) < inner.parts.blanks.size {
                match self.start().await {
                    Ok(Some(blank)) => {
                        blanks.add(self.shape, blank);
                        continue;
                    }
                    Ok(None) => {
                        info!("this VMM cannot come up before its machine is known");
                        return;
                    }
                    Err(error) => {
                        warn!(error = chain(&error), "no VMM waits for a machine");
                        pause = Some(AGAIN);
                    }
                }
            }
            let wait = async {
                match pause {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => {
                        taken.notified().await;
                        tokio::time::sleep(CALM).await;
                    }
                }
            };
            tokio::select! {
                () = wait => {}
                () = shutdown.cancelled() => {}
            }
        }
        for BlankMachine { id, vmm, slot, work_dir } in blanks.take_away(self.shape) {
            let blank = Some(vmm);
            inner
                .give_back(id, Resources { blank, slot: Some(slot), work_dir: Some(work_dir), ..Resources::default() })
                .await;
        }
    }

    /// Starts one. If that fails, nothing of it is left.
    async fn start(&self) -> Result<Option<BlankMachine>, CreateError> {
        let inner = &self.orchestrator.inner;
        let (id, row) = inner.new_row(SandboxSpec::internal(TemplateId::new(), self.shape), Bytes(0));
        let mut resources = Resources::default();
        match self.make(id, &row, &mut resources).await {
            Ok(Some(vmm)) => match resources.slot.take() {
                Some(slot) => Ok(Some(BlankMachine { id, vmm, slot, work_dir: row.work_dir })),
                None => Ok(None), // cannot be: it was made in one
            },
            other => {
                inner.give_back(id, resources).await;
                other.map(|_| None)
            }
        }
    }

    async fn make(
        &self,
        id: SandboxId,
        row: &SandboxRow,
        resources: &mut Resources,
    ) -> Result<Option<Box<dyn Blank>>, CreateError> {
        let (parts, rows) = (&self.orchestrator.inner.parts, &self.orchestrator.inner.rows);
        let written = rows.put(id.to_string(), row.clone()).await;
        written.map_err(CreateError::in_step(id, "write intent"))?;
        resources.work_dir = Some(row.work_dir.clone());
        crate::start::make_work_dir(&row.work_dir).map_err(CreateError::in_step(id, "create work dir"))?;
        let slot = tokio::time::timeout(parts.config.resource_timeout, parts.slots.acquire()).await;
        let slot = slot.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
        let slot = resources.slot.insert(slot.map_err(CreateError::in_step(id, "get a network slot"))?);
        let written = rows.put(id.to_string(), SandboxRow { slot: slot.record(), ..row.clone() }).await;
        written.map_err(CreateError::in_step(id, "record a network slot"))?;
        let spec = BlankSpec {
            name: format!("aenv-{id}"),
            shape: self.shape,
            disks: DISKS,
            nics: slot.nic().into_iter().collect(),
            netns: slot.netns(),
            work_dir: row.work_dir.clone(),
        };
        parts.vmm.blank(spec).await.map_err(CreateError::in_step(id, "start a VMM"))
    }
}
