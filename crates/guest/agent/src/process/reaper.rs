//! Collects the exit status of every child, ours or adopted.
//!
//! PID 1 inherits each orphan of the machine and must reap it, but must not swallow the status of a process it started
//! itself. So exactly one thread waits, for all children, and hands each status to whoever registered the pid; what
//! nobody registered was an orphan and is dropped.
//!
//! A child may die before its spawner knows its pid. While a spawn is under way ([`Reaper::expect`]), unclaimed
//! statuses are therefore kept, and [`Expectation::claim`] looks there first.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::{io, thread};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use tokio::sync::oneshot;

use crate::sys;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// By itself, with this status (0-255).
    Code(i32),
    /// By this signal.
    Signal(i32),
}

/// Handle of the waiting thread, which lives as long as the program.
#[derive(Debug, Clone)]
pub(crate) struct Reaper {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// A child may exist now.
    spawned: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Children of ours that are not reaped yet.
    registered: HashMap<i32, oneshot::Sender<Exit>>,
    /// Spawns whose pid is not known yet.
    expected: usize,
    /// Statuses that came while `expected > 0` and belong to nobody so far.
    unclaimed: HashMap<i32, Exit>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Each section below leaves the state whole at every step, so a poisoned lock is still good.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A spawn under way; see [`Reaper::expect`].
#[derive(Debug)]
pub(crate) struct Expectation<'a> {
    shared: &'a Shared,
}

impl Reaper {
    /// Starts the waiting thread.
    pub(crate) fn start() -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let thread_shared = Arc::clone(&shared);
        thread::Builder::new()
            .name("reaper".into())
            .stack_size(64 * 1024)
            .spawn(move || reap_forever(&thread_shared))?;
        Ok(Self { shared })
    }

    /// Announces a spawn: from here on the child's status cannot be lost.
    pub(crate) fn expect(&self) -> Expectation<'_> {
        self.shared.state().expected += 1;
        Expectation { shared: &self.shared }
    }

    /// Sends `signal` to a registered process that is not reaped yet; false when there is none.
    ///
    /// The check and the signal are one step with respect to reaping, so a reused pid is never hit.
    pub(crate) fn signal(&self, pid: i32, signal: Signal) -> Result<bool, Errno> {
        let state = self.shared.state();
        if !state.registered.contains_key(&pid) {
            return Ok(false);
        }
        kill(Pid::from_raw(pid), signal).map(|()| true)
    }

    /// Sends `signal` to every member of the process group `pid` leads or led. An empty group is no error.
    pub(crate) fn signal_group(&self, pid: i32, signal: Signal) -> Result<(), Errno> {
        let _state = self.shared.state();
        match killpg(Pid::from_raw(pid), signal) {
            Err(Errno::ESRCH) => Ok(()),
            result => result,
        }
    }
}

impl Expectation<'_> {
    /// The spawn gave `pid`: its status will come through the receiver.
    pub(crate) fn claim(self, pid: i32) -> oneshot::Receiver<Exit> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.shared.state();
        match state.unclaimed.remove(&pid) {
            // The receiver is in our hands, so this cannot fail.
            Some(exit) => drop(sender.send(exit)),
            None => drop(state.registered.insert(pid, sender)),
        }
        drop(state);
        self.shared.spawned.notify_one();
        receiver
    }
}

impl Drop for Expectation<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.expected -= 1;
        if state.expected == 0 {
            state.unclaimed.clear();
        }
    }
}

fn reap_forever(shared: &Shared) {
    loop {
        match sys::peek_dead_child() {
            Ok((pid, exit)) => settle(shared, pid, exit),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => wait_for_a_child(shared),
        }
    }
}

fn settle(shared: &Shared, pid: i32, exit: Exit) {
    let mut state = shared.state();
    sys::reap(pid);
    match state.registered.remove(&pid) {
        // A receiver that is gone no longer cares.
        Some(owner) => drop(owner.send(exit)),
        None if state.expected > 0 => drop(state.unclaimed.insert(pid, exit)),
        None => {}
    }
}

/// Without children `waitid` fails at once: sleep until a spawn succeeded. Orphans come only from children.
fn wait_for_a_child(shared: &Shared) {
    let state = shared.state();
    // A child that was claimed between `waitid` and here is in `registered`.
    if state.registered.is_empty() {
        drop(shared.spawned.wait(state).unwrap_or_else(PoisonError::into_inner));
    }
}

#[cfg(test)]
#[expect(clippy::zombie_processes, reason = "the reaper waits for them; that is the point")]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    async fn run(reaper: &Reaper, script: &str) -> Exit {
        let expectation = reaper.expect();
        let child = Command::new("/bin/sh").args(["-c", script]).spawn().unwrap();
        let exit = expectation.claim(child.id() as i32);
        tokio::time::timeout(Duration::from_secs(10), exit).await.unwrap().unwrap()
    }

    #[tokio::test]
    async fn every_child_gets_its_own_status_whenever_it_dies() {
        let reaper = Reaper::start().unwrap();
        assert_eq!(run(&reaper, "exit 7").await, Exit::Code(7));
        assert_eq!(run(&reaper, "kill -9 $$").await, Exit::Signal(9));

        // Dead before it is claimed.
        let expectation = reaper.expect();
        let child = Command::new("/bin/sh").args(["-c", "exit 3"]).spawn().unwrap();
        let pid = child.id() as i32;
        while !reaper.shared.state().unclaimed.contains_key(&pid) {
            reaper.shared.spawned.notify_one();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(expectation.claim(pid).await.unwrap(), Exit::Code(3));
        assert!(reaper.shared.state().unclaimed.is_empty());
        assert_eq!(reaper.signal(pid, Signal::SIGKILL), Ok(false), "a reaped pid must not be signalled");
    }
}
