//! The thread that speaks with the driver for one device.
//!
//! ```text
//!   driver ──descriptor, completion──▶ queue thread ──▶ lane ──▶ BlockDevice
//!          ◀──COMMIT_AND_FETCH──────── queue thread ◀──mailbox──┘
//! ```
//!
//! The driver takes answers from the thread only that fetched the request (each may have its own from Linux 6.16 on), and a
//! device may wait for a network. So this thread never serves a request: it hands over what comes to the device's lane and
//! hands back what is done. Data does not pass through here: the lane's threads move it from and to the character device.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::param::page_size;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use tracing::{debug, error, warn};
use zerocopy::IntoBytes;

use super::backend::Backend;
use super::wire::{COMMIT_AND_FETCH_REQ, Descriptor, FETCH_REQ, IoCommand, descriptors_position};
use crate::lane::become_io_flusher;

/// The queue that each device has: its requests are spread over threads behind it.
const QUEUE: u16 = 0;
/// Completion of the mailbox's poll; tags are smaller.
const WAKE: u64 = u64::MAX;

/// A queue that is served, by a thread.
pub(super) struct Queue {
    thread: Option<JoinHandle<()>>,
    mailbox: Arc<Mailbox>,
}

/// Where answers wait for the queue's thread.
struct Mailbox {
    answers: Mutex<Vec<(u16, i32)>>,
    wake: OwnedFd,
    leave: AtomicBool,
}

/// The duty to answer a request: one that is forgotten answers with an I/O error.
struct Ticket {
    tag: u16,
    answer: i32,
    mailbox: Arc<Mailbox>,
}

impl Queue {
    /// Begins to serve. On return every tag has been fetched, or none is any more.
    pub(super) fn start(backend: Arc<Backend>, depth: u16) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let mailbox = Arc::new(Mailbox { answers: Mutex::default(), wake, leave: AtomicBool::new(false) });
        let (say, hear) = mpsc::channel();
        let serve = {
            let mailbox = Arc::clone(&mailbox);
            move || {
                let mut serving = match Serving::start(backend, depth, mailbox) {
                    Ok(serving) => serving,
                    Err(error) => return drop(say.send(Err(error))),
                };
                let _ = say.send(Ok(())); // whoever asked waits for it
                if let Err(error) = serving.run() {
                    error!(device = %serving.backend.name, %error, "a ublk device is no longer served");
                }
            }
        };
        let thread = thread::Builder::new().name("aenv-ublk".to_owned()).spawn(serve)?;
        let started = hear.recv().unwrap_or_else(|_| Err(io::Error::other("the queue's thread ended")));
        let queue = Self { thread: Some(thread), mailbox };
        started.map(|()| queue)
    }

    /// Waits until the driver has taken all tags back, as it does when the device is stopped.
    pub(super) fn join(mut self) {
        self.wait();
    }

    /// Answers what is under way and serves no more. The driver keeps further requests for another server.
    pub(super) fn leave(mut self) {
        self.mailbox.leave.store(true, Ordering::Release);
        self.mailbox.wake();
        self.wait();
    }

    fn wait(&mut self) {
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            error!("the thread of a ublk device panicked");
        }
    }
}

impl Mailbox {
    fn put(&self, tag: u16, answer: i32) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        answers.push((tag, answer));
        let first = answers.len() == 1; // who finds others' answers there need not wake whoever they woke
        drop(answers);
        if first {
            self.wake();
        }
    }

    fn take(&self, into: &mut Vec<(u16, i32)>) {
        std::mem::swap(&mut *self.answers.lock().unwrap_or_else(PoisonError::into_inner), into);
    }

    fn wake(&self) {
        if let Err(error) = rustix::io::write(&self.wake, &1_u64.to_ne_bytes()) {
            error!(%error, "the thread of a ublk device cannot be woken"); // counts to 2^64 before it fails
        }
    }

    /// Makes the next wake-up one.
    fn calm(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]); // nothing there is calm too
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.mailbox.put(self.tag, self.answer);
    }
}

/// What the thread has.
struct Serving {
    /// Dropped before what its entries speak of.
    ring: IoUring,
    descriptors: Descriptors,
    backend: Arc<Backend>,
    mailbox: Arc<Mailbox>,
    /// Tags that the driver has, or that are being served.
    live: u16,
    /// Swapped with the mailbox's.
    answers: Vec<(u16, i32)>,
}

impl Serving {
    fn start(backend: Arc<Backend>, depth: u16, mailbox: Arc<Mailbox>) -> io::Result<Self> {
        become_io_flusher();
        have_no_partitions_read();
        let descriptors = Descriptors::map(&backend, depth)?;
        // Room for a command of each tag and the poll.
        let entries = u32::from(depth) + 1;
        let ring = IoUring::builder().setup_coop_taskrun().setup_single_issuer().build(entries)?;
        let mut serving = Self { ring, descriptors, backend, mailbox, live: 0, answers: Vec::new() };
        serving.listen()?;
        for tag in 0..depth {
            serving.command(FETCH_REQ, tag, 0)?;
            serving.live += 1;
        }
        serving.ring.submit()?;
        // What is refused is refused at once, and there are no requests yet.
        let refused = serving.ring.completion().find(|completion| completion.result() < 0);
        match refused {
            Some(refused) => Err(io::Error::from_raw_os_error(-refused.result())),
            None => Ok(serving),
        }
    }

    /// Until the driver has taken all tags back, or this server leaves.
    fn run(&mut self) -> io::Result<()> {
        while self.live > 0 {
            match self.ring.submit_and_wait(1) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
            let (mut woken, mut poll_ended) = (false, false);
            while let Some(completion) = self.completion() {
                match u16::try_from(completion.user_data()) {
                    Ok(tag) => self.fetched(tag, completion.result()),
                    Err(_) => {
                        woken = true;
                        poll_ended |= !cqueue::more(completion.flags());
                    }
                }
            }
            if !woken {
                continue;
            }
            self.mailbox.calm(); // before looking: who comes later wakes again
            if poll_ended {
                self.listen()?;
            }
            if self.mailbox.leave.load(Ordering::Acquire) {
                self.backend.lane.close();
                self.hand_back()?;
                self.ring.submit()?;
                return Ok(());
            }
            self.hand_back()?;
        }
        Ok(())
    }

    fn completion(&mut self) -> Option<cqueue::Entry> {
        self.ring.completion().next()
    }

    /// A tag has come back: with a request, or for good.
    fn fetched(&mut self, tag: u16, result: i32) {
        if result < 0 {
            if result != -Errno::NODEV.raw_os_error() {
                let error = io::Error::from_raw_os_error(-result);
                warn!(device = %self.backend.name, tag, %error, "the ublk driver refuses a command");
            }
            self.live -= 1;
            return;
        }
        let request = self.descriptors.read(tag);
        let ticket = Ticket { tag, answer: -Errno::IO.raw_os_error(), mailbox: Arc::clone(&self.mailbox) };
        let backend = Arc::clone(&self.backend);
        self.backend.lane.push(Box::new(move || {
            let mut ticket = ticket;
            ticket.answer = backend.serve(QUEUE, tag, &request);
            drop(backend); // before the answer: whoever hears it may take the device apart
            drop(ticket);
        }));
    }

    fn hand_back(&mut self) -> io::Result<()> {
        let mut answers = std::mem::take(&mut self.answers);
        self.mailbox.take(&mut answers);
        for (tag, answer) in answers.drain(..) {
            self.command(COMMIT_AND_FETCH_REQ, tag, answer)?;
        }
        self.answers = answers;
        Ok(())
    }

    fn command(&mut self, operation: u32, tag: u16, result: i32) -> io::Result<()> {
        let command = IoCommand { q_id: QUEUE, tag, result, addr: 0 }; // no buffer: USER_COPY
        let mut bytes = [0; 16];
        bytes.copy_from_slice(command.as_bytes());
        let channel = types::Fd(self.backend.channel.as_raw_fd());
        let entry = opcode::UringCmd16::new(channel, operation).cmd(bytes).build().user_data(tag.into());
        self.push(&entry)
    }

    /// Has the mailbox's events told.
    fn listen(&mut self) -> io::Result<()> {
        let wake = types::Fd(self.mailbox.wake.as_raw_fd());
        let entry = opcode::PollAdd::new(wake, PollFlags::IN.bits().into()).multi(true).build().user_data(WAKE);
        self.push(&entry)
    }

    #[expect(unsafe_code, reason = "entries of an io_uring")]
    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        if self.ring.submission().is_full() {
            self.ring.submit()?;
        }
        // SAFETY: no entry of this ring has the kernel read or write memory of ours. Their descriptors stay open as long as
        // the ring: they are the backend's and the mailbox's, both held beside it.
        unsafe { self.ring.submission().push(entry) }.map_err(io::Error::other)
    }
}

/// The driver's descriptions of the requests of a queue.
struct Descriptors {
    start: *mut Descriptor,
    length: usize,
    depth: u16,
}

impl Descriptors {
    #[expect(unsafe_code, reason = "memory that is shared with the driver")]
    fn map(backend: &Backend, depth: u16) -> io::Result<Self> {
        let length = (usize::from(depth) * size_of::<Descriptor>()).next_multiple_of(page_size());
        let (channel, position) = (backend.channel.as_fd(), descriptors_position(QUEUE));
        // SAFETY: a fresh mapping, at an address of the kernel's choice.
        let start =
            unsafe { mmap(ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, channel, position) }?.cast();
        Ok(Self { start, length, depth })
    }

    /// The request that `tag` came back with.
    #[expect(unsafe_code, reason = "memory that is shared with the driver")]
    fn read(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "a tag of this queue");
        // SAFETY: within the mapping, which is page-aligned and lives as long as `self`. The driver wrote it before the
        // completion that was just read, and will not again before the answer. Any bits are a descriptor.
        unsafe { self.start.add(tag.into()).read_volatile() }
    }
}

impl Drop for Descriptors {
    #[expect(unsafe_code, reason = "memory that is shared with the driver")]
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and no reference into it was ever given out.
        if let Err(error) = unsafe { munmap(self.start.cast(), self.length) } {
            warn!(%error, "memory of a ublk queue stays mapped");
        }
    }
}

/// Has the kernel take this server for one that it must not trust: then it does not look for partitions when the device
/// appears. It would read what a guest wrote as a table of the host's disks, and a device may have to ask a registry first.
///
/// It asks whether the thread that fetches could do anything to the host (CAP_SYS_ADMIN). This one needs no such thing.
fn have_no_partitions_read() {
    let lowered = capabilities(None).and_then(|mut sets| {
        sets.effective.remove(CapabilitySet::SYS_ADMIN);
        set_capabilities(None, sets)
    });
    if let Err(error) = lowered {
        debug!(%error, "a ublk device is looked through for partitions");
    }
}
