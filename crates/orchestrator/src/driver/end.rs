//! Ways out: the end of a sandbox, and the end of a server that another will follow.

use std::sync::Arc;
use std::time::Duration;

use aenv_durable::crash_point;
use aenv_model::Phase;
use aenv_vmm_driver::RunState;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{Driver, Next};
use crate::journal::Level;
use crate::message::Message;
use crate::resources::chain;
use crate::sandbox::{Ended, StartTimes};

/// First and longest pause between two attempts to give back what would not go.
const RELEASE_BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

impl Driver {
    /// `Deleting`: gives everything back, however often that takes; whoever asked hears after the first attempt.
    pub(super) async fn end(mut self, why: &Ended) {
        self.close_down(Phase::Deleting);
        let permits = Arc::clone(&self.expiry_permits);
        let _permit = match why {
            // Many may expire at once. Whoever deletes one of them now does not wait for its turn among the expired.
            Ended::Expired => tokio::select! {
                permit = permits.acquire() => permit.ok(),
                message = self.inbox.next() => {
                    match message {
                        Message::Delete { reply, .. } => self.inbox.deleters.push(reply),
                        message => message.refuse(crate::message::Refusal::Gone),
                    }
                    None
                }
            },
            _ => None,
        };
        let mut pause = RELEASE_BACKOFF.0;
        loop {
            let Self { parts, rows, resources, inbox, id, .. } = &mut self;
            let work = async {
                crash_point("delete.begun");
                resources.release(parts.disks.as_ref()).await?;
                crash_point("delete.released");
                rows.remove(id.to_string()).await.map_err(|error| chain(&error))?;
                crash_point("delete.forgotten");
                Ok(())
            };
            let (released, _) = inbox.during(Phase::Deleting, &CancellationToken::new(), work).await;
            if released.is_ok() {
                // After its row: a capture that a row names must be there.
                if let Some(capture) = self.rested.take() {
                    capture.doom();
                }
                self.base = None;
            }
            for reply in self.inbox.deleters.drain(..) {
                _ = reply.send(released.clone());
            }
            let Err(failures) = released else { break };
            warn!(sandbox_id = %self.id, failures, "sandbox could not be taken down yet");
            let wait = CancellationToken::new(); // a delete that comes meanwhile is a reason to try at once
            let sleep = wait.run_until_cancelled(tokio::time::sleep(pause));
            _ = self.inbox.during(Phase::Deleting, &wait, sleep).await;
            pause = (pause * 2).min(RELEASE_BACKOFF.1);
        }
        self.tell_end(why).await;
        if matches!(why, Ended::Deleted | Ended::Expired | Ended::LeaseEnded | Ended::NodeShutdown) {
            _ = std::fs::remove_file(self.parts.serial_log(self.id)); // told nothing that anybody will look for
        }
        self.status.send_modify(|status| status.phase = Phase::Gone);
        info!(sandbox_id = %self.id, %why, "sandbox is gone");
        self.inbox.close().await;
    }

    /// With the guest's last words, whose file may go.
    async fn tell_end(&self, why: &Ended) {
        let journal = Arc::clone(&self.journal);
        _ = tokio::task::spawn_blocking(move || journal.look_at_console()).await;
        let level = match why {
            Ended::Deleted | Ended::Expired | Ended::LeaseEnded | Ended::NodeShutdown => Level::Info,
            Ended::MachineEnded(_) | Ended::Stuck(_) | Ended::StartFailed => Level::Error,
        };
        self.journal.note(level, "ended", &[("reason", &why.to_string())]);
    }

    /// Leaves the machine running for the next server.
    pub(super) async fn leave(&mut self) {
        if let Some(base) = self.base.take() {
            base.leave();
        }
        if let Some(mut slot) = self.resources.slot.take()
            && let Err(error) = slot.disown()
        {
            warn!(sandbox_id = %self.id, %error, "a network slot cannot be left");
        }
        if let Some(machine) = self.resources.machine.take() {
            machine.disown().await;
        }
        info!(sandbox_id = %self.id, "sandbox is left running");
    }

    /// The machine of a former server, which may have been stopped for a copy when that server ended.
    pub(super) async fn take_over(&mut self) -> Next {
        let Some(machine) = &self.resources.machine else {
            return Next::End(Ended::MachineEnded("it was not there any more".to_owned()));
        };
        let going = match machine.run_state().await {
            Ok(RunState::Running) => Ok(()),
            Ok(RunState::Paused) => machine.resume_vcpus().await.map_err(|error| chain(&error)),
            Ok(RunState::Unusable(state)) => Err(format!("its machine is {state}")),
            Err(error) => Err(chain(&error)),
        };
        match going {
            Ok(()) => {
                self.open_up(StartTimes::default());
                info!(sandbox_id = %self.id, "took over a sandbox of a former server");
                self.journal.note(Level::Info, "taken over by a new server", &[]);
                Next::Serve
            }
            Err(how) => {
                warn!(sandbox_id = %self.id, how, "a sandbox of a former server cannot go on");
                Next::End(Ended::MachineEnded(how))
            }
        }
    }
}
