//! The pool: who has which number, a few slots ahead of need, and the reaper.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, error, info, warn};

use crate::config::{Ipv4Block, NetworkConfig};
use crate::connector::SocketFactory;
use crate::error::{AdoptSlotError, CloseSlotError, CreateSlotError, StartPoolError};
use crate::host::HostEgress;
use crate::name::{MAX_SLOTS, Names};
use crate::netlink::Netlink;
use crate::slot::{Lease, Slot, SlotRecord, destroy};

/// Slots made or unmade at a time. The kernel serializes most of it (the rtnl lock), so more only queue there.
const PARALLEL: usize = 8;

/// First and longest pause between attempts of the filler and the reaper.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// Attempts of the reaper at one slot, over about a minute. What then still exists is left to the next start's sweep.
const REAP_ATTEMPTS: u32 = 12;

/// What slots share. Knows the numbers; does not know the pool's tasks.
pub(crate) struct Context {
    pub(crate) names: Names,
    pub(crate) veth: Ipv4Block,
    pub(crate) host: Netlink,
    pub(crate) sockets: SocketFactory,
    /// `None`: nothing leaves.
    pub(crate) egress: Option<Arc<HostEgress>>,
    numbers: Mutex<Numbers>,
    graves: mpsc::UnboundedSender<u32>,
}

/// Which numbers are taken.
struct Numbers {
    limit: u32,
    taken: BTreeSet<u32>,
    /// Taken, by what a dead process left; to be adopted or swept.
    found: BTreeSet<u32>,
    next: u32,
}

impl Numbers {
    /// The next free number after the last one handed out, so that a name just given up is not reused at once.
    fn take(&mut self) -> Option<u32> {
        let free = |number: &u32| !self.taken.contains(number);
        let number = (self.next..self.limit).chain(0..self.next).find(free)?;
        self.taken.insert(number);
        self.next = (number + 1) % self.limit;
        Some(number)
    }
}

impl Context {
    fn numbers(&self) -> MutexGuard<'_, Numbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a number back, once nothing exists under it.
    pub(crate) fn release(&self, index: u32) {
        self.numbers().taken.remove(&index);
    }

    /// Hands a slot to the reaper. Never blocks; at most one entry a slot, so the queue is bounded by the numbers.
    pub(crate) fn reap(&self, index: u32) {
        if self.graves.send(index).is_err() {
            warn!(slot = index, "no reaper any more; the network slot is left to the next start's sweep");
        }
    }
}

/// What a sweep found and removed.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Swept {
    /// Slots of a dead predecessor that are gone now.
    pub removed: Vec<SlotRecord>,
    /// Slots of which something could not be removed, with the reason; the reaper keeps trying.
    pub failed: Vec<(SlotRecord, String)>,
}

/// The fresh slots, apart from the context so that they do not keep it alive in a circle.
struct Ready {
    slots: Mutex<VecDeque<Slot>>,
    taken: Notify,
    /// How many are to wait: more while they are taken faster than they are made, and fewer again later.
    target: AtomicUsize,
    /// Least and most of that.
    watermarks: (usize, usize),
    /// Somebody found none since the filler last looked.
    missed: AtomicBool,
    /// How long nobody must miss one until fewer wait.
    calm: Duration,
}

impl Ready {
    fn slots(&self) -> MutexGuard<'_, VecDeque<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn target(&self) -> usize {
        self.target.load(Ordering::Relaxed)
    }

    /// Somebody found none: twice as many are to wait. None are if none ever were to.
    fn miss(&self) {
        let (_, most) = self.watermarks;
        self.missed.store(true, Ordering::Relaxed);
        _ = self.target.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |target| Some((target * 2).min(most)));
        self.taken.notify_one();
    }

    /// A calm time is over: if nobody missed any, half as many are to wait. Returns those that are too many.
    fn calm_down(&self) -> Vec<Slot> {
        if self.missed.swap(false, Ordering::Relaxed) {
            return Vec::new();
        }
        let (least, _) = self.watermarks;
        _ = self.target.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |target| Some((target / 2).max(least)));
        let mut slots = self.slots();
        let kept = slots.len().min(self.target());
        slots.split_off(kept).into()
    }
}

/// Hands out slots. Ends in [`SlotPool::close`].
pub struct SlotPool {
    context: Arc<Context>,
    ready: Arc<Ready>,
    building: Arc<Semaphore>,
    /// The filler and whoever makes a slot.
    makers: TaskTracker,
    /// Ends the makers, and refuses what comes later.
    closing: CancellationToken,
    reaper: TaskTracker,
    /// Ends the reaper once its queue is empty.
    closed: CancellationToken,
}

impl std::fmt::Debug for SlotPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SlotPool").field("tag", &self.context.names.tag()).finish_non_exhaustive()
    }
}

impl SlotPool {
    /// Starts a pool and begins to fill it. Slots that a predecessor with the same tag left are found and their numbers
    /// kept out of use until [`SlotPool::adopt`] or [`SlotPool::sweep`] takes them.
    ///
    /// Must be called in the host's netns, in a tokio runtime. One pool at a time may use a tag: see to it with the lock
    /// on the node's home.
    pub async fn start(config: NetworkConfig) -> Result<Self, StartPoolError> {
        let names = Names::new(&config.tag, &config.run_dir).ok_or_else(|| StartPoolError::Tag(config.tag.clone()))?;
        let dir = |source| StartPoolError::Dir { path: names.dir().to_owned(), source };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(names.dir()).map_err(dir)?;
        let socket = |source| StartPoolError::Socket { source };
        let host = Netlink::open(&tokio::runtime::Handle::current()).map_err(socket)?;
        let sockets = SocketFactory::start().map_err(socket)?;

        let links = host.links().await.map_err(|source| StartPoolError::Links { source })?;
        let mut found: BTreeSet<u32> = links.iter().filter_map(|(_, name)| names.index_of_link(name)).collect();
        found.append(&mut mounted(&names).map_err(dir)?);
        if !found.is_empty() {
            info!(slots = found.len(), "network slots of a predecessor found");
        }

        if config.egress.enabled {
            let addresses = host.addresses().await.map_err(|source| StartPoolError::Links { source })?;
            for (index, address) in addresses.iter().filter(|(_, address)| config.veth_cidr.net().contains(address)) {
                let link = links.iter().find(|(of, name)| of == index && names.index_of_link(name).is_none());
                if let Some((_, link)) = link {
                    let veth_cidr = config.veth_cidr.to_string();
                    warn!(link, %address, veth_cidr, "somebody else has an address of our slots: some will reach nothing");
                }
            }
        }
        let egress = HostEgress::start(&names, config.veth_cidr.net(), config.egress)?.map(Arc::new);

        let (graves, queue) = mpsc::unbounded_channel();
        let limit = config.veth_cidr.pairs().min(MAX_SLOTS);
        let numbers = Mutex::new(Numbers { limit, taken: found.clone(), found, next: 0 });
        let context = Arc::new(Context { names, veth: config.veth_cidr, host, sockets, egress, numbers, graves });
        let pool = Self {
            context,
            ready: Arc::new(Ready {
                slots: Mutex::default(),
                taken: Notify::new(),
                target: AtomicUsize::new(config.low_watermark),
                watermarks: (config.low_watermark, config.high_watermark.max(config.low_watermark)),
                missed: AtomicBool::new(false),
                calm: config.calm,
            }),
            building: Arc::new(Semaphore::new(PARALLEL)),
            makers: TaskTracker::new(),
            closing: CancellationToken::new(),
            reaper: TaskTracker::new(),
            closed: CancellationToken::new(),
        };
        pool.reaper.spawn(reap(Arc::clone(&pool.context), queue, pool.closed.clone()));
        pool.makers.spawn(fill(Arc::clone(&pool.context), Arc::clone(&pool.ready), pool.closing.clone()));
        Ok(pool)
    }

    /// A fresh slot: a waiting one, else a new one.
    ///
    /// Cancel safety: a slot that is being made when this is dropped goes to the waiting ones.
    pub async fn acquire(&self) -> Result<Slot, CreateSlotError> {
        if self.closing.is_cancelled() {
            return Err(CreateSlotError::Closed);
        }
        let waiting = self.ready.slots().pop_front();
        if let Some(slot) = waiting {
            self.ready.taken.notify_one();
            return Ok(slot);
        }
        self.ready.miss();
        let (reply, result) = oneshot::channel();
        let (context, ready, building) =
            (Arc::clone(&self.context), Arc::clone(&self.ready), Arc::clone(&self.building));
        let closing = self.closing.clone();
        self.makers.spawn(async move {
            // The semaphore is never closed.
            let Ok(_permit) = building.acquire().await else { return };
            if reply.is_closed() {
                return;
            }
            if let Err(Ok(unwanted)) = reply.send(create(&context).await) {
                keep(&ready, unwanted, ready.watermarks.1, &closing).await;
            }
        });
        result.await.unwrap_or(Err(CreateSlotError::Closed))
    }

    /// Takes over a slot that a predecessor disowned, or left when it was killed.
    ///
    /// Errors: `NotOurs`; `Gone`, and what is left of it is reaped; `Inspect`, and it may be tried again. Cancel safety:
    /// if dropped, the slot is reaped.
    pub async fn adopt(&self, record: &SlotRecord) -> Result<Slot, AdoptSlotError> {
        let index = record.index;
        let not_ours = || AdoptSlotError::NotOurs { tag: record.tag.clone(), index };
        if record.tag != self.context.names.tag() {
            return Err(not_ours());
        }
        {
            let mut numbers = self.context.numbers();
            if !numbers.taken.contains(&index) {
                return Err(AdoptSlotError::Gone { index, what: "all of it".to_owned() });
            }
            if !numbers.found.remove(&index) {
                return Err(not_ours());
            }
        }
        let adopted = Slot::adopt(Lease::new(Arc::clone(&self.context), index)).await;
        if let Err(AdoptSlotError::Inspect { .. }) = adopted {
            self.context.numbers().found.insert(index);
        }
        adopted
    }

    /// Removes every slot that a predecessor left and that was not adopted, except those in `keep`, which may still be
    /// adopted, or swept, later.
    ///
    /// Cancel safety: what was not reached stays for another sweep.
    pub async fn sweep(&self, keep: &[SlotRecord]) -> Swept {
        let tag = self.context.names.tag();
        let kept: BTreeSet<u32> = keep.iter().filter(|record| record.tag == tag).map(|record| record.index).collect();
        let found: Vec<u32> = self.context.numbers().found.difference(&kept).copied().collect();
        let context = &self.context;
        let ends = futures::stream::iter(found).map(async |index| (index, destroy(context, index).await));
        let mut ends = std::pin::pin!(ends.buffer_unordered(PARALLEL));
        let mut swept = Swept::default();
        while let Some((index, end)) = ends.next().await {
            let record = SlotRecord { tag: tag.to_owned(), index };
            context.numbers().found.remove(&index);
            match end {
                Ok(()) => {
                    context.release(index);
                    swept.removed.push(record);
                }
                Err(error) => {
                    context.reap(index);
                    swept.failed.push((record, error.to_string()));
                }
            }
        }
        swept.removed.sort_by_key(|record| record.index);
        swept
    }

    /// How many fresh slots wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.ready.slots().len()
    }

    /// Removes the waiting slots, lets the reaper finish and ends the pool's tasks. Slots handed out stay usable and can
    /// still be closed; one dropped after this is left to the next start's sweep.
    ///
    /// Reports each slot that is not wholly gone. Cancel safety: may be called again.
    pub async fn close(&self) -> Result<(), Vec<CloseSlotError>> {
        self.closing.cancel();
        self.makers.close();
        self.makers.wait().await;
        let waiting: Vec<Slot> = self.ready.slots().drain(..).collect();
        let ends = futures::stream::iter(waiting).map(Slot::close).buffer_unordered(PARALLEL);
        let failed: Vec<CloseSlotError> = ends.filter_map(async |end| end.err()).collect().await;
        self.closed.cancel();
        self.reaper.close();
        self.reaper.wait().await;
        // A slot that is left needs the host's rules; the next start has them in its hands.
        if let Some(egress) = &self.context.egress
            && self.context.numbers().taken.is_empty()
            && let Err(error) = egress.remove()
        {
            warn!(%error, "cannot remove the host's table of network slots; left to the next start");
        }
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }
}

impl Drop for SlotPool {
    fn drop(&mut self) {
        self.closing.cancel();
        // Slots still waiting go to the reaper, which empties its queue before it ends.
        let waiting: Vec<Slot> = self.ready.slots().drain(..).collect();
        if !waiting.is_empty() {
            warn!(slots = waiting.len(), "network pool dropped without close");
        }
        drop(waiting);
        self.closed.cancel();
    }
}

/// Numbers of the namespaces in our directory.
fn mounted(names: &Names) -> io::Result<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(names.dir())? {
        found.extend(entry?.file_name().to_str().and_then(|name| names.index_of_netns(name)));
    }
    Ok(found)
}

async fn create(context: &Arc<Context>) -> Result<Slot, CreateSlotError> {
    let started = Instant::now();
    let (taken, limit) = {
        let mut numbers = context.numbers();
        (numbers.take(), numbers.limit)
    };
    let index = taken.ok_or(CreateSlotError::Exhausted(limit))?;
    let slot = Slot::create(Lease::new(Arc::clone(context), index)).await?;
    debug!(slot = index, elapsed_ms = started.elapsed().as_millis() as u64, "network slot made");
    Ok(slot)
}

/// Puts a slot that nobody took among the waiting ones, or closes it if there are enough.
async fn keep(ready: &Ready, slot: Slot, most: usize, closing: &CancellationToken) {
    let extra = {
        let mut slots = ready.slots();
        if slots.len() < most && !closing.is_cancelled() {
            slots.push_back(slot);
            None
        } else {
            Some(slot)
        }
    };
    if let Some(slot) = extra {
        end(slot).await;
    }
}

async fn end(unused: Slot) {
    if let Err(error) = unused.close().await {
        warn!(%error, "cannot close an unused network slot; the reaper goes on");
    }
}

/// Keeps as many slots waiting as are to wait.
async fn fill(context: Arc<Context>, ready: Arc<Ready>, closing: CancellationToken) {
    let mut pause = BACKOFF.0;
    let mut calm = tokio::time::interval_at(tokio::time::Instant::now() + ready.calm, ready.calm);
    calm.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while !closing.is_cancelled() {
        let waiting = ready.slots().len();
        if waiting >= ready.target() {
            tokio::select! {
                () = ready.taken.notified() => continue,
                _ = calm.tick() => {
                    for slot in ready.calm_down() {
                        end(slot).await;
                    }
                    continue;
                }
                () = closing.cancelled() => return,
            }
        }
        match create(&context).await {
            Ok(slot) => {
                pause = BACKOFF.0;
                keep(&ready, slot, ready.target(), &closing).await;
            }
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "cannot make a network slot ahead of need");
                tokio::select! {
                    () = tokio::time::sleep(pause) => pause = (pause * 2).min(BACKOFF.1),
                    () = closing.cancelled() => return,
                }
            }
        }
    }
}

/// Removes slots that were dropped or did not close, each until it is gone or the attempts are used up.
async fn reap(context: Arc<Context>, mut queue: mpsc::UnboundedReceiver<u32>, closed: CancellationToken) {
    loop {
        let index = tokio::select! {
            biased;
            next = queue.recv() => next,
            () = closed.cancelled() => None,
        };
        let Some(index) = index else { return };
        let mut pause = BACKOFF.0;
        for attempt in 1.. {
            match destroy(&context, index).await {
                Ok(()) => {
                    context.release(index);
                    info!(slot = index, "network slot reaped");
                    break;
                }
                // The number stays taken: something still exists under it.
                Err(error) if attempt >= REAP_ATTEMPTS || closed.is_cancelled() => {
                    error!(%error, attempt, "cannot reap network slot; left to the next start's sweep");
                    break;
                }
                Err(error) => warn!(%error, attempt, "cannot reap network slot yet"),
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(BACKOFF.1),
                () = closed.cancelled() => {}
            }
        }
    }
}
