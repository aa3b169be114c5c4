//! All devices by name, and one operation on each at a time.
//!
//! An operation runs in the daemon's scope on a thread that may block: a caller that hangs up interrupts nothing. Looking
//! at devices waits for no operation.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use aenv_block_client::{DeviceConfig, DeviceSpec, DeviceView, ErrorKind, RestackedView, Uppers};
use aenv_durable::{Row, StoreError};
use aenv_model::Bytes;
use aenv_tasks::TaskScope;
use futures::future::join_all;
use tokio::sync::{OwnedMutexGuard, Semaphore};
use tracing::{error, warn};

use crate::context::Context;
use crate::device::{CreateError, Device, Seen, create, recover};
use crate::error::{Refusal, chain};
use crate::metrics::{Observed, Snapshot};
use crate::row::Stage;

/// Devices that are brought back at a time: most of it is waiting for disks and registries.
const RECOVERIES: usize = 16;
/// Merges at a time: they are in no hurry, and share a disk with guests.
const MERGES: usize = 1;

/// Every device, and what they share.
#[derive(Debug)]
pub(crate) struct Devices {
    context: Context,
    slots: Mutex<BTreeMap<String, Arc<Slot>>>,
    /// Rows that another version of this program wrote, and why we cannot read them. Their names are taken.
    unknown: BTreeMap<String, String>,
    scope: TaskScope,
    merges: Arc<Semaphore>,
    /// Devices rest for the next process: nothing is done to them any more.
    resting: AtomicBool,
}

/// The place of a device.
#[derive(Debug, Default)]
struct Slot {
    /// Held by the operation that is under way.
    device: Arc<tokio::sync::Mutex<Option<Device>>>,
    /// What it was after the last one.
    seen: RwLock<Option<Seen>>,
    /// The slot was given up: look again. Changed only while the device is held.
    retired: AtomicBool,
}

/// An operation was refused, or failed.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) kind: ErrorKind,
    pub(crate) message: String,
}

impl Failed {
    fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    fn resting() -> Self {
        Self::new(ErrorKind::Unreachable, "aenv-blockd is stopping")
    }

    fn no_device(name: &str) -> Self {
        Self::new(ErrorKind::NotFound, format!("there is no device {name}"))
    }
}

impl<E: Refusal> From<E> for Failed {
    fn from(error: E) -> Self {
        Self { kind: error.kind(), message: chain(&error) }
    }
}

impl Slot {
    fn seen(&self) -> Option<Seen> {
        self.seen.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn show(&self, device: Option<&Device>) {
        *self.seen.write().unwrap_or_else(PoisonError::into_inner) = device.map(Device::seen);
    }
}

impl Devices {
    /// Begins to bring back what the store has. Each device can be asked for at once; operations on it wait.
    pub(crate) fn start(context: Context, scope: TaskScope) -> Result<Arc<Self>, StoreError> {
        let (mut rows, mut unknown) = (Vec::new(), BTreeMap::new());
        for (name, row) in context.rows.list()? {
            match row {
                Row::Known(row) => rows.push((name, row)),
                Row::Unknown(why) => {
                    error!(device = name, why, "a device's record cannot be read; it is left alone");
                    unknown.insert(name, why);
                }
            }
        }
        let merges = Arc::new(Semaphore::new(MERGES));
        let devices = Arc::new(Self {
            context,
            slots: Mutex::default(),
            unknown,
            scope,
            merges,
            resting: AtomicBool::new(false),
        });
        let permits = Arc::new(Semaphore::new(RECOVERIES));
        for (name, row) in rows {
            let slot = devices.slot(&name);
            *slot.seen.write().unwrap_or_else(PoisonError::into_inner) = Seen::recovering(&name, &row);
            // Nobody else has it yet.
            let Ok(guard) = Arc::clone(&slot.device).try_lock_owned() else { continue };
            let (own, permits, this) = (name.clone(), Arc::clone(&permits), Arc::clone(&devices));
            devices.scope.spawn(format!("recover {name}"), async move {
                let _permit = permits.acquire().await; // never closed
                let devices = Arc::clone(&this);
                let recovery = move |context: &Context, device: &mut Option<Device>| {
                    *device = recover(context, &name, row);
                    if device.is_some() {
                        devices.merge_if_deep(&name);
                    }
                };
                this.hold(own, slot, guard, recovery).await
            });
        }
        Ok(devices)
    }

    /// All there are, those that are being brought back included.
    pub(crate) fn list(&self) -> Vec<DeviceView> {
        let slots: Vec<_> = self.slots().values().cloned().collect();
        slots.iter().filter_map(|slot| slot.seen()).map(|seen| seen.view()).collect()
    }

    /// How many there are, those that are being made or brought back included.
    pub(crate) fn count(&self) -> usize {
        self.slots().len()
    }

    pub(crate) fn exporter_kind(&self) -> aenv_block_export::ExportKind {
        self.context.exporter.kind()
    }

    /// A device. Waits for it while it is made or brought back.
    pub(crate) async fn get(self: &Arc<Self>, name: &str) -> Result<DeviceView, Failed> {
        let slot = self.slots().get(name).cloned();
        if let Some(seen) = slot.and_then(|slot| slot.seen()).filter(Seen::is_settled) {
            return Ok(seen.view());
        }
        self.with_device(name, |_, device| Ok(device.seen().view())).await
    }

    pub(crate) async fn create(self: &Arc<Self>, name: &str, spec: DeviceSpec) -> Result<DeviceView, Failed> {
        if let Some(why) = self.unknown.get(name) {
            return Err(Failed::new(
                ErrorKind::Conflict,
                format!("there is a device {name} already, unreadable: {why}"),
            ));
        }
        let own = name.to_owned();
        self.run(name, true, move |context, device| {
            if let Some(stale) = device.take_if(|device| device.stage() == Stage::Creating) {
                *device = recover(context, &own, stale.into_row());
            }
            match device {
                None => *device = Some(create(context, &own, &spec)?),
                Some(found) if *found.spec() != spec || found.stage() != Stage::Ready => {
                    return Err(CreateError::Taken(own).into());
                }
                Some(found) if found.problem().is_some() => found.try_again(context)?,
                Some(_) => {}
            }
            match device.as_ref().map(Device::seen) {
                Some(seen) => Ok(seen.view()),
                None => Err(Failed::no_device(&own)),
            }
        })
        .await
    }

    pub(crate) async fn restack(self: &Arc<Self>, name: &str, layer: &Path) -> Result<RestackedView, Failed> {
        let (this, own, layer) = (Arc::clone(self), name.to_owned(), layer.to_owned());
        self.with_device(name, move |context, device| {
            let restacked = device.restack(context, &layer)?;
            this.merge_if_deep(&own);
            Ok(restacked)
        })
        .await
    }

    pub(crate) async fn resize(self: &Arc<Self>, name: &str, size: Bytes) -> Result<DeviceView, Failed> {
        self.with_device(name, move |context, device| {
            device.resize(context, size)?;
            Ok(device.seen().view())
        })
        .await
    }

    pub(crate) async fn flush(self: &Arc<Self>, name: &str) -> Result<(), Failed> {
        self.with_device(name, |_, device| Ok(device.flush()?)).await
    }

    pub(crate) async fn close(self: &Arc<Self>, name: &str, uppers: Uppers) -> Result<DeviceConfig, Failed> {
        if let Some(why) = self.unknown.get(name) {
            return Err(Failed::new(ErrorKind::Conflict, format!("the record of device {name} is unreadable: {why}")));
        }
        let absent = name.to_owned();
        self.run(name, false, move |context, slot| {
            let device = slot.take().ok_or_else(|| Failed::no_device(&absent))?;
            device.close(context, uppers).map_err(|(left, error)| {
                *slot = left.map(|device| *device);
                error.into()
            })
        })
        .await
    }

    /// Ends every device for the next process, and waits for it. What could not be done is told.
    pub(crate) async fn rest(self: &Arc<Self>) -> Vec<String> {
        self.resting.store(true, Ordering::Release);
        let names: Vec<String> = self.slots().keys().cloned().collect();
        let each = names.iter().map(|name| {
            self.run_always(name, false, |_, device| {
                device.take().map_or(Ok(()), |device| device.rest().map_err(|why| Failed::new(ErrorKind::Failed, why)))
            })
        });
        join_all(each).await.into_iter().filter_map(|result| result.err().map(|failed| failed.message)).collect()
    }

    /// Merges the layers of a device in the background, if they are too many.
    fn merge_if_deep(self: &Arc<Self>, name: &str) {
        let (this, name) = (Arc::clone(self), name.to_owned());
        self.scope.spawn(format!("merge layers of {name}"), async move {
            let merges = Arc::clone(&this.merges);
            let token = this.scope.token();
            let _permit = tokio::select! {
                permit = merges.acquire_owned() => permit,
                () = token.cancelled() => return,
            };
            let planned = this.with_device(&name, |context, device| {
                device.plan_merge(context).map_err(|error| Failed::new(ErrorKind::Failed, chain(&error)))
            });
            let merge = match planned.await {
                Ok(Some(merge)) => merge,
                Ok(None) => return,
                Err(failed) => return warn!(device = name, error = failed.message, "no merge of layers"),
            };
            let done = tokio::task::spawn_blocking(move || (merge.run(), merge)).await;
            let Ok((Some(result), merge)) = done else { return };
            let ended = this.with_device(&name, move |context, device| {
                device.end_merge(context, &merge, result);
                Ok(())
            });
            let _ = ended.await; // it is gone, and has removed what the merge made
        });
    }

    async fn with_device<T: Send + 'static>(
        self: &Arc<Self>,
        name: &str,
        operation: impl FnOnce(&Context, &mut Device) -> Result<T, Failed> + Send + 'static,
    ) -> Result<T, Failed> {
        let absent = name.to_owned();
        self.run(name, false, move |context, device| match device {
            Some(device) => operation(context, device),
            None => Err(Failed::no_device(&absent)),
        })
        .await
    }

    /// Does `operation` on the device of that name, or on its absence, after all that came before it. Refuses once devices
    /// rest: one that is not there then may well be in the store.
    async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        name: &str,
        make: bool,
        operation: impl FnOnce(&Context, &mut Option<Device>) -> Result<T, Failed> + Send + 'static,
    ) -> Result<T, Failed> {
        let this = Arc::clone(self);
        let ended = self.run_always(name, make, move |context, device| {
            if this.resting.load(Ordering::Acquire) {
                return Err(Failed::resting());
            }
            operation(context, device)
        });
        match ended.await {
            Err(Failed { kind: ErrorKind::NotFound, .. }) if self.resting.load(Ordering::Acquire) => {
                Err(Failed::resting())
            }
            ended => ended,
        }
    }

    async fn run_always<T: Send + 'static>(
        self: &Arc<Self>,
        name: &str,
        make: bool,
        operation: impl FnOnce(&Context, &mut Option<Device>) -> Result<T, Failed> + Send + 'static,
    ) -> Result<T, Failed> {
        let (this, own) = (Arc::clone(self), name.to_owned());
        let work = async move {
            loop {
                let slot = if make { Some(this.slot(&own)) } else { this.slots().get(&own).cloned() };
                let Some(slot) = slot else { return Err(Failed::no_device(&own)) };
                let guard = Arc::clone(&slot.device).lock_owned().await;
                if !slot.retired.load(Ordering::Acquire) {
                    return this.hold(own, slot, guard, operation).await.unwrap_or_else(Err);
                }
            }
        };
        let ended = self.scope.spawn(format!("operation on {name}"), work).await;
        ended.unwrap_or_else(|error| Err(Failed::new(ErrorKind::Failed, format!("the operation ended early: {error}"))))
    }

    /// Does `operation` on a thread that may block, with the device held, and shows what came of it.
    async fn hold<T: Send + 'static>(
        self: &Arc<Self>,
        name: String,
        slot: Arc<Slot>,
        mut guard: OwnedMutexGuard<Option<Device>>,
        operation: impl FnOnce(&Context, &mut Option<Device>) -> T + Send + 'static,
    ) -> Result<T, Failed> {
        let this = Arc::clone(self);
        let work = move || {
            let result = operation(&this.context, &mut guard);
            slot.show(guard.as_ref());
            if guard.is_none() {
                slot.retired.store(true, Ordering::Release);
                this.slots().remove(&name);
            }
            result
        };
        let ended = tokio::task::spawn_blocking(work).await;
        ended.map_err(|error| Failed::new(ErrorKind::Failed, format!("the operation ended early: {error}")))
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Slot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The slot of that name, new if need be.
    fn slot(&self, name: &str) -> Arc<Slot> {
        Arc::clone(self.slots().entry(name.to_owned()).or_default())
    }
}

impl Observed for Devices {
    fn snapshot(&self) -> Snapshot {
        let views = self.list();
        let cache = self.context.layers.cache();
        Snapshot {
            broken: views.iter().filter(|view| view.problem.is_some()).count() as u64,
            devices: views.into_iter().map(|view| (view.name, view.stats)).collect(),
            cache: cache.stats(),
            cache_bytes: (cache.bytes(), cache.capacity()),
        }
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
