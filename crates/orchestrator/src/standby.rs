//! Machines that stand ready: restored from a template's capture before anybody asks, never yet used, vCPUs stopped.
//!
//! A create takes one and lets it go on. What its guest would only do for the first time, finding its way back into its
//! caches and running a first command, it has done already. A capture that creates ask for is kept stocked by a task of its
//! own, its keeper, until nobody has asked for a while.
//!
//! Each machine has the row of a sandbox that is starting, under the id that the sandbox will have: whatever ends this
//! server, the next one ends the machine.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aenv_model::{CaptureId, MachineShape, SandboxId};
use aenv_network::EgressPolicy;
use aenv_snapshot::Capture;
use serde::Deserialize;
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::config::secs;
use crate::guest;
use crate::orchestrator::Orchestrator;
use crate::resources::{Resources, SandboxRow, chain};
use crate::sandbox::{CreateError, GuestDefaults, SandboxSpec, Source};
use crate::start::{Start, start};

/// Pause between an ask and the making of another machine: whoever asked has the CPUs for himself meanwhile.
pub(crate) const CALM: Duration = Duration::from_secs(1);
/// Pause after a machine could not be made to stand ready.
const AGAIN: Duration = Duration::from_secs(10);

/// `[pool.sandbox]`: machines that stand ready.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct StandbyConfig {
    /// How many for each template or snapshot that creates ask for. Each takes the memory of an idle sandbox. 0: none.
    pub size: usize,
    /// Names and ids of the templates and snapshots that have them. Empty: all.
    pub templates: Vec<String>,
    /// How long they are kept after the last create.
    #[serde(rename = "idle_secs", deserialize_with = "secs")]
    pub idle: Duration,
}

impl Default for StandbyConfig {
    fn default() -> Self {
        Self { size: 0, templates: Vec::new(), idle: Duration::from_secs(600) }
    }
}

impl StandbyConfig {
    fn serves(&self, spec: &SandboxSpec) -> bool {
        let named = |name: &String| Some(name) == spec.alias.as_ref() || *name == spec.template.to_string();
        self.size > 0 && !spec.internal && (self.templates.is_empty() || self.templates.iter().any(named))
    }
}

/// All machines that stand ready.
#[derive(Default)]
pub(crate) struct Standby {
    stocks: Mutex<HashMap<CaptureId, Stock>>,
}

/// Those of one capture.
struct Stock {
    ready: VecDeque<Standing>,
    last_asked: Instant,
    asked: Arc<Notify>,
}

/// One of them.
pub(crate) struct Standing {
    pub(crate) id: SandboxId,
    pub(crate) row: SandboxRow,
    pub(crate) resources: Resources,
    pub(crate) base: Option<Capture>,
}

impl Standby {
    // Each section below is a few steps on the map, which is valid after any panic in them.
    fn stocks(&self) -> MutexGuard<'_, HashMap<CaptureId, Stock>> {
        self.stocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one of a capture's; and how its keeper, if it has none yet, is to be told of more asks.
    fn ask(&self, capture: CaptureId, shape: MachineShape) -> (Option<Standing>, Option<Arc<Notify>>) {
        let mut stocks = self.stocks();
        let mut unkept = None;
        let stock = stocks.entry(capture).or_insert_with(|| {
            let asked = Arc::new(Notify::new());
            unkept = Some(Arc::clone(&asked));
            Stock { ready: VecDeque::new(), last_asked: Instant::now(), asked }
        });
        stock.last_asked = Instant::now();
        stock.asked.notify_one();
        let fits = stock.ready.front().is_some_and(|standing| standing.row.spec.shape == shape);
        (if fits { stock.ready.pop_front() } else { None }, unkept)
    }

    fn len(&self, capture: CaptureId) -> usize {
        self.stocks().get(&capture).map_or(0, |stock| stock.ready.len())
    }

    pub(crate) fn total(&self) -> usize {
        self.stocks().values().map(|stock| stock.ready.len()).sum()
    }

    fn add(&self, capture: CaptureId, standing: Standing) {
        if let Some(stock) = self.stocks().get_mut(&capture) {
            stock.ready.push_back(standing);
        }
    }

    fn last_asked(&self, capture: CaptureId) -> Option<Instant> {
        self.stocks().get(&capture).map(|stock| stock.last_asked)
    }

    /// Takes a capture's stock away, unless somebody has asked since `before`.
    fn close(&self, capture: CaptureId, before: Instant) -> Option<VecDeque<Standing>> {
        let mut stocks = self.stocks();
        stocks.get(&capture).filter(|stock| stock.last_asked <= before)?;
        stocks.remove(&capture).map(|stock| stock.ready)
    }
}

impl std::fmt::Debug for Standby {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ready: Vec<_> = self.stocks().iter().map(|(capture, stock)| (*capture, stock.ready.len())).collect();
        f.debug_tuple("Standby").field(&ready).finish()
    }
}

impl Orchestrator {
    /// A machine for a sandbox to be, if one stands ready. Sees to it that there will be more.
    pub(crate) fn take_standing(&self, spec: &SandboxSpec, source: &Source) -> Option<Standing> {
        let parts = &self.inner.parts;
        let capture = source.capture.as_ref().filter(|_| parts.standby.serves(spec))?;
        let machine = capture.manifest().machine.as_ref()?;
        // One that is to go is not kept: a deleted template's, and a copy of another node's.
        if machine.vmm != *parts.vmm.identity() || capture.is_doomed() {
            return None;
        }
        let (standing, unkept) = self.inner.standby.ask(capture.id(), spec.shape);
        if let Some(asked) = unkept {
            // Whoever asks first does not tell the others' guests what it is.
            let spec = SandboxSpec {
                metadata: BTreeMap::new(),
                defaults: GuestDefaults::default(),
                secure: false,
                egress: EgressPolicy::sealed(), // whose it will be says more
                lease: None,
                internal: true,
                ..spec.clone()
            };
            let keeper = Keeper { orchestrator: self.clone(), capture: capture.clone(), spec };
            self.inner.scope.spawn(format!("standby of {}", capture.id()), keeper.run(asked));
        }
        standing
    }
}

/// Keeps a capture stocked.
struct Keeper {
    orchestrator: Orchestrator,
    capture: Capture,
    spec: SandboxSpec,
}

impl Keeper {
    async fn run(self, asked: Arc<Notify>) {
        let inner = &self.orchestrator.inner;
        let (standby, config) = (&inner.standby, &inner.parts.standby);
        let (capture, shutdown) = (self.capture.id(), inner.scope.token());
        shutdown.run_until_cancelled(tokio::time::sleep(CALM)).await;
        let left = loop {
            let mut pause = config.idle;
            if standby.len(capture) < config.size {
                match self.stand().await {
                    Ok(standing) => {
                        standby.add(capture, standing);
                        continue;
                    }
                    Err(CreateError::Deleted { .. }) => {} // the server is being stopped
                    Err(error) => {
                        warn!(%capture, error = chain(&error), "no machine stands ready");
                        pause = pause.min(AGAIN);
                    }
                }
            }
            let Some(last_asked) = standby.last_asked(capture) else { return };
            let asked = async {
                asked.notified().await;
                tokio::time::sleep(CALM).await;
            };
            let over = tokio::select! {
                () = asked => false,
                () = tokio::time::sleep_until((last_asked + config.idle).min(Instant::now() + pause)) => {
                    last_asked.elapsed() >= config.idle
                }
                () = self.capture.doomed() => true,
                () = shutdown.cancelled() => true,
            };
            if over {
                let before = if shutdown.is_cancelled() { Instant::now() } else { last_asked };
                match standby.close(capture, before) {
                    Some(left) => break left,
                    None => continue, // somebody was quicker
                }
            }
        };
        for Standing { id, resources, .. } in left {
            inner.give_back(id, resources).await;
        }
    }

    /// Makes a machine stand ready. If it fails, nothing of it is left.
    async fn stand(&self) -> Result<Standing, CreateError> {
        let inner = &self.orchestrator.inner;
        let (id, row) = inner.new_row(self.spec.clone(), self.capture.manifest().disk_size);
        let mut standing = Standing { id, row, resources: Resources::default(), base: None };
        let made = self.make(&mut standing).await;
        match made {
            Ok(()) => Ok(standing),
            Err(error) => {
                inner.give_back(id, standing.resources).await;
                Err(error)
            }
        }
    }

    async fn make(&self, standing: &mut Standing) -> Result<(), CreateError> {
        let inner = &self.orchestrator.inner;
        let Standing { id, row, resources, base } = standing;
        let (id, cancel) = (*id, inner.scope.token());
        let begin = Start {
            parts: &inner.parts,
            rows: &inner.rows,
            id,
            present: None,
            spec: &self.spec,
            access_token: None,
            blanks: &inner.blanks,
            cancel: &cancel,
        };
        let _permit = begin.permit(&inner.start_permits).await?;
        let source = Source { capture: Some(self.capture.clone()), image: None };
        *base = start(&begin, source, row, resources).await?.base;
        if let Some(slot) = &resources.slot
            && let Err(error) = guest::exercise(slot.dialer().as_ref(), None).await
        {
            debug!(sandbox_id = %id, %error, "a guest that is to stand ready has run no command"); // it may have no shell
        }
        if let Some(machine) = &resources.machine {
            machine.pause_vcpus().await.map_err(CreateError::in_step(id, "stop the machine"))?;
        }
        // With its machine: whoever finds the row can end it.
        inner.rows.put(id.to_string(), row.clone()).await.map_err(CreateError::in_step(id, "record the machine"))
    }
}
