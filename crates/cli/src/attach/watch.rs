//! Beside the session: is the sandbox still there, how large is the terminal, does somebody still type?

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aenv_api::{Client, ClientError, RefreshRequest, SandboxState};
use aenv_model::SandboxId;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::TIME_TO_LIVE;
use super::ending::Ending;
use crate::guest::{Guest, TerminalSize};
use crate::terminal;

/// Silence after which the sandbox counts as lost.
pub(super) const LOST_AFTER: Duration = Duration::from_secs(10);
/// How often silence is measured.
const CHECK: Duration = Duration::from_secs(1);
/// Checks between two questions for the sandbox's state.
const CHECKS_PER_STATE: u32 = 5;
/// Longest wait for a state; less than the silence that ends the session.
const STATE_TIMEOUT: Duration = Duration::from_secs(4);
/// How often the terminal's size is looked at, for terminals that send no signal.
const SIZE_CHECK: Duration = Duration::from_millis(250);
/// How often a session that is used renews its sandbox's time.
const REFRESH: Duration = Duration::from_secs(60);
/// Longest wait for that.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(5);

/// When something was last heard of the sandbox.
#[derive(Debug, Clone)]
pub(super) struct Contact(Arc<Mutex<Instant>>);

impl Contact {
    pub(super) fn now() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }

    pub(super) fn renew(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn silence(&self) -> Duration {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }
}

/// The ending that the sandbox's state means; `None` while it runs. Errors: the state is not to be had.
pub(super) async fn ending_by_state(client: &Client, sandbox: SandboxId) -> Result<Option<Ending>, ClientError> {
    match client.sandbox(sandbox).await {
        Ok(detail) if detail.listed.state == SandboxState::Paused => Ok(Some(Ending::Paused)),
        Ok(_) => Ok(None),
        Err(error) if error.is_not_found() => Ok(Some(Ending::Deleted)),
        Err(error) => Err(error),
    }
}

/// Returns when the sandbox is paused or gone, or nothing was heard of it for too long.
pub(super) async fn for_ending(client: Client, sandbox: SandboxId, contact: Contact) -> Ending {
    let mut ticks = interval(CHECK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for check in 1u32.. {
        ticks.tick().await;
        if check.is_multiple_of(CHECKS_PER_STATE) {
            match timeout(STATE_TIMEOUT, ending_by_state(&client, sandbox)).await {
                Ok(Ok(Some(ending))) => return ending,
                Ok(Ok(None)) => contact.renew(),
                Ok(Err(_)) | Err(_) => {}
            }
        }
        if contact.silence() > LOST_AFTER {
            break;
        }
    }
    Ending::Lost
}

/// Hands every change of the terminal's size to the shell. Never returns.
pub(super) async fn for_size(guest: Guest, pid: u32, mut known: TerminalSize) {
    let mut ticks = interval(SIZE_CHECK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Without the signal, the ticks still notice.
    let mut changed = signal(SignalKind::window_change()).ok();
    loop {
        match &mut changed {
            Some(changed) => {
                tokio::select! {
                    _ = ticks.tick() => {}
                    _ = changed.recv() => {}
                }
            }
            None => drop(ticks.tick().await),
        }
        let size = terminal::size();
        if size != known && guest.resize(pid, size).await.is_ok() {
            known = size;
        }
    }
}

/// Renews the sandbox's time as long as keys are typed. Never returns.
pub(crate) async fn for_activity(client: Client, sandbox: SandboxId, activity: Arc<AtomicBool>) {
    let request = RefreshRequest { duration: Some(TIME_TO_LIVE) };
    let mut ticks = interval(REFRESH);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if activity.swap(false, Ordering::Relaxed) {
            // Missed once, it is tried again with the next key; the state's watcher tells if the sandbox is gone.
            let _ = timeout(REFRESH_TIMEOUT, client.refresh(sandbox, &request)).await;
        }
    }
}
