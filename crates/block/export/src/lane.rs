//! Who waits for a device.
//!
//! ```text
//!   kernel ──▶ reader ─┬─ a seat is free ──▶ the reader serves the request itself
//!              reader  │
//!              reader  └─ none is ─────────▶ the device's lane: its own threads, made when needed
//! ```
//!
//! A reader serves what it took itself where it can: written bytes need no copy then, and no other thread has to wake up.
//! But a device may wait for a network, and the next request may be for another device. So one reader is always left to
//! listen, and no device takes more than half of the others' seats. What finds no seat goes to the lane of its device,
//! where it delays only requests of the same device.
//!
//! The threads that take requests of ublk devices have no seats: there is one for each device, and all goes to its lane.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::Duration;

use tracing::{debug, warn};

/// Most threads of one lane: a queue depth at which disks and registries have long reached their throughput.
const LANE_THREADS: usize = 32;
/// Threads of all lanes together, apart from the first of each lane: at 2 MiB of reserved and some 20 KiB of touched
/// memory each, still cheap.
const ALL_LANES_THREADS: usize = 1024;
/// A thread without work goes away after this.
const IDLE: Duration = Duration::from_secs(10);

/// What the lanes of one exporter share.
pub(crate) struct Crew {
    readers: usize,
    seated: AtomicUsize,
    hired: AtomicUsize,
}

/// A reader that serves a request itself.
pub(crate) struct Seat<'a> {
    crew: &'a Crew,
    lane: &'a Lane,
}

pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The threads of one device.
pub(crate) struct Lane {
    crew: Arc<Crew>,
    seated: AtomicUsize,
    state: Mutex<State>,
    wake: Condvar,
    gone: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl Crew {
    pub(crate) fn new(readers: usize) -> Arc<Self> {
        Arc::new(Self { readers, seated: AtomicUsize::new(0), hired: AtomicUsize::new(0) })
    }
}

impl Lane {
    pub(crate) fn new(crew: Arc<Crew>) -> Arc<Self> {
        Arc::new(Self {
            crew,
            seated: AtomicUsize::new(0),
            state: Mutex::default(),
            wake: Condvar::new(),
            gone: Condvar::new(),
        })
    }

    /// May the calling reader serve a request of this device itself?
    pub(crate) fn seat(&self) -> Option<Seat<'_>> {
        let seats = self.crew.readers - 1;
        if !take(&self.seated, seats.div_ceil(2)) {
            return None;
        }
        if !take(&self.crew.seated, seats) {
            self.seated.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Seat { crew: &self.crew, lane: self })
    }

    /// Has `job` done by a thread of this lane. Jobs begin in the order they came.
    ///
    /// The queue has no bound of its own: each job is a request that somebody waits for, so there are as many as the
    /// kernel lets be under way, and no more bytes than their callers hold in memory anyway.
    pub(crate) fn push(self: &Arc<Self>, job: Job) {
        let mut state = self.lock();
        state.queue.push_back(job);
        let first = state.threads == 0;
        let hire = state.queue.len() > state.idle
            && state.threads < LANE_THREADS
            && (first || take(&self.crew.hired, ALL_LANES_THREADS));
        if !hire {
            drop(state);
            self.wake.notify_one();
            return;
        }
        state.threads += 1;
        drop(state);
        let lane = Arc::clone(self);
        let spawned = thread::Builder::new().name("aenv-lane".to_owned()).spawn(move || lane.work(first));
        if let Err(error) = spawned {
            warn!(%error, "no further thread for a device; its requests go on with those it has");
            let alone = self.leave(self.lock(), first);
            if alone {
                self.drain();
            } else {
                self.wake.notify_one();
            }
        }
    }

    /// Ends the threads once the queue is empty, and waits for them.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        self.wake.notify_all();
        while state.threads > 0 {
            state = self.gone.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self, first: bool) {
        become_io_flusher();
        let mut state = self.lock();
        loop {
            if let Some(job) = state.queue.pop_front() {
                drop(state);
                job();
                state = self.lock();
                continue;
            }
            if state.closed {
                break;
            }
            state.idle += 1;
            let (woken, waited) = self.wake.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if waited.timed_out() && state.queue.is_empty() {
                break;
            }
        }
        self.leave(state, first);
    }

    /// Counts one thread less. True if none is left.
    fn leave(&self, mut state: MutexGuard<'_, State>, first: bool) -> bool {
        state.threads -= 1;
        if !first {
            self.crew.hired.fetch_sub(1, Ordering::Relaxed);
        }
        self.gone.notify_all();
        state.threads == 0
    }

    /// Does what is queued on the calling thread.
    fn drain(&self) {
        loop {
            let Some(job) = self.lock().queue.pop_front() else { return };
            job();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        self.crew.seated.fetch_sub(1, Ordering::Relaxed);
        self.lane.seated.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Tells the kernel that this thread is part of a disk: when it needs memory, the kernel must not get it by writing to
/// that same disk (prctl(2), PR_SET_IO_FLUSHER). Needs CAP_SYS_RESOURCE; without it, such a disk must not hold swap.
pub(crate) fn become_io_flusher() {
    thread_local! {
        static TOLD: Once = const { Once::new() };
    }
    TOLD.with(|told| {
        told.call_once(|| {
            if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
                debug!(%error, "a thread that serves disks is an ordinary one to the kernel");
            }
        });
    });
}

/// Counts one up, unless `most` are counted already.
fn take(counter: &AtomicUsize, most: usize) -> bool {
    let more = |count| (count < most).then_some(count + 1);
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn one_reader_is_always_left_and_no_device_takes_all_seats() {
        let crew = Crew::new(8);
        let (slow, other) = (Lane::new(Arc::clone(&crew)), Lane::new(Arc::clone(&crew)));
        let slow_seats: Vec<_> = std::iter::from_fn(|| slow.seat()).collect();
        let other_seats: Vec<_> = std::iter::from_fn(|| other.seat()).collect();
        assert_eq!((slow_seats.len(), other_seats.len()), (4, 3));
        drop(slow_seats);
        assert!(other.seat().is_some());
        assert!(Lane::new(Crew::new(1)).seat().is_none(), "the only reader listens");
    }

    #[test]
    fn a_lane_does_many_jobs_at_once_and_ends_when_closed() {
        let lane = Lane::new(Crew::new(1));
        let (say, hear) = mpsc::channel();
        let barrier = Arc::new(std::sync::Barrier::new(LANE_THREADS));
        for number in 0..2 * LANE_THREADS {
            let (say, barrier) = (say.clone(), Arc::clone(&barrier));
            lane.push(Box::new(move || {
                barrier.wait(); // passes only if as many threads are here
                say.send(number).expect("send");
            }));
        }
        let mut done: Vec<_> = hear.iter().take(2 * LANE_THREADS).collect();
        done.sort_unstable();
        assert_eq!(done, (0..2 * LANE_THREADS).collect::<Vec<_>>());
        lane.close();
        assert_eq!((lane.lock().threads, lane.crew.hired.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn each_lane_has_a_thread_though_all_others_took_what_there_is() {
        let crew = Crew::new(1);
        crew.hired.store(ALL_LANES_THREADS, Ordering::Relaxed);
        let lane = Lane::new(Arc::clone(&crew));
        let (say, hear) = mpsc::channel();
        for number in 0..3 {
            let say = say.clone();
            lane.push(Box::new(move || say.send(number).expect("send")));
        }
        assert_eq!(hear.iter().take(3).collect::<Vec<_>>(), [0, 1, 2], "one thread keeps the order");
        lane.close();
        assert_eq!(crew.hired.load(Ordering::Relaxed), ALL_LANES_THREADS);
    }
}
