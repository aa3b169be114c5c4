//! A live QEMU machine.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aenv_vmm_driver::{
    Attachment, GuestMemory, Machine, MachineExit, MachineRecord, RunState, VmmError, VmmIdentity, VmmProcess,
};
use async_trait::async_trait;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::task::AbortOnDropHandle;
use tracing::debug;

use crate::arguments::SERIAL;
use crate::commands::{
    ChardevSendBreak, Command, Cont, QueryStatus, Status, Stop, SystemPowerdown, XenSaveDevicesState,
};
use crate::console::Console;
use crate::exit::{Evidence, classify};
use crate::qmp::Qmp;

/// How long after the end of the process its connections may still bring what it said before: the kernel has closed
/// them already, so this is reading time.
const LAST_NEWS: Duration = Duration::from_secs(2);

/// Between a break and its letter, and half the time between two of them: the break and the letter reach QEMU by
/// different ways, and the guest must have taken one before the other comes. Also what the guest's kernel gets for
/// writing out its file systems before it is told to make them read-only, and again before it powers off.
const SYSRQ_PAUSE: Duration = Duration::from_millis(100);

/// Dropping it closes the connections; the process is watched further only to be reaped.
#[derive(Debug)]
pub(crate) struct QemuMachine {
    parts: Arc<Parts>,
    attachment: Attachment,
    exit: watch::Receiver<Option<MachineExit>>,
    watch: AbortOnDropHandle<()>,
}

/// What the machine and the task that watches for its end share.
#[derive(Debug)]
struct Parts {
    process: VmmProcess,
    qmp: Qmp,
    console: Console,
    killed: AtomicBool,
}

impl QemuMachine {
    pub(crate) fn new(process: VmmProcess, qmp: Qmp, console: Console, attachment: Attachment) -> Self {
        let parts = Arc::new(Parts { process, qmp, console, killed: AtomicBool::new(false) });
        let (announce, exit) = watch::channel(None);
        let watch = AbortOnDropHandle::new(tokio::spawn(watch_for_end(parts.clone(), announce)));
        Self { parts, attachment, exit, watch }
    }

    async fn call<C: Command>(&self, operation: &'static str, command: &C) -> Result<C::Reply, VmmError> {
        match self.parts.qmp.execute(operation, command).await {
            Err(VmmError::Ended { operation, detail }) => {
                // The connection is closed because the process ended: that says more.
                let end = self.ended_by(Instant::now() + LAST_NEWS).await;
                Err(VmmError::Ended { operation, detail: end.map_or(detail, |end| format!("{end:?}")) })
            }
            other => other,
        }
    }

    async fn ended_by(&self, deadline: Instant) -> Option<MachineExit> {
        let mut exit = self.exit.clone();
        let exit = timeout_at(deadline, exit.wait_for(Option::is_some)).await;
        exit.ok()?.ok()?.clone()
    }

    /// Asks the guest's kernel, without any help of its user space, to write out its file systems, to make them
    /// read-only and to power off: magic SysRq over the serial console. Distribution kernels allow these three.
    /// Goes on asking until the machine ends.
    async fn power_off_by_sysrq(&self) -> Result<Infallible, VmmError> {
        self.sysrq(b's').await?;
        self.sysrq(b'u').await?;
        loop {
            self.sysrq(b'o').await?;
        }
    }

    async fn sysrq(&self, key: u8) -> Result<(), VmmError> {
        self.call("power off", &ChardevSendBreak { id: SERIAL }).await?;
        tokio::time::sleep(SYSRQ_PAUSE).await;
        self.parts
            .console
            .write(&[key])
            .await
            .map_err(|e| VmmError::Ended { operation: "power off", detail: format!("console closed: {e}") })?;
        tokio::time::sleep(2 * SYSRQ_PAUSE).await;
        Ok(())
    }
}

async fn watch_for_end(parts: Arc<Parts>, announce: watch::Sender<Option<MachineExit>>) {
    let end = parts.process.ended().await;
    let mut notices = parts.qmp.notices();
    // The connection's task goes away after the last event.
    let _ = timeout(LAST_NEWS, notices.wait_for(|_| false)).await;
    parts.console.drained(LAST_NEWS).await;
    let exit = classify(Evidence {
        killed: parts.killed.load(Ordering::Acquire),
        end,
        notices: &notices.borrow().clone(),
        panic: parts.console.panic(),
        last_words: parts.process.last_words(),
    });
    debug!(machine = %parts.process.record().name, ?exit, "machine ended");
    announce.send_replace(Some(exit));
}

/// `paused` is what a stop, or a restore, leaves; the next three are stations of saving device state, whose server died.
fn run_state(status: Status) -> RunState {
    match status.status.as_str() {
        _ if status.running => RunState::Running,
        "paused" | "save-vm" | "finish-migrate" | "postmigrate" => RunState::Paused,
        _ => RunState::Unusable(status.status),
    }
}

#[async_trait]
impl Machine for QemuMachine {
    fn record(&self) -> MachineRecord {
        MachineRecord { attachment: Some(self.attachment.clone()), ..self.parts.process.record().clone() }
    }

    fn identity(&self) -> &VmmIdentity {
        &self.attachment.vmm
    }

    fn exit(&self) -> watch::Receiver<Option<MachineExit>> {
        self.exit.clone()
    }

    async fn pause_vcpus(&self) -> Result<(), VmmError> {
        self.call("pause", &Stop {}).await.map(drop)
    }

    async fn resume_vcpus(&self) -> Result<(), VmmError> {
        self.call("resume", &Cont {}).await.map(drop)
    }

    async fn run_state(&self) -> Result<RunState, VmmError> {
        self.call("query of the run state", &QueryStatus {}).await.map(run_state)
    }

    async fn save_device_state(&self, to: &Path) -> Result<(), VmmError> {
        self.call("save device state", &XenSaveDevicesState { filename: to, live: false }).await.map(drop)
    }

    async fn guest_memory(&self) -> Result<GuestMemory, VmmError> {
        let (pid, image) = (self.parts.process.record().pid, self.attachment.memory_image.clone());
        let find = tokio::task::spawn_blocking(move || GuestMemory::of_image(pid, &image));
        find.await.unwrap_or_else(|e| Err(std::io::Error::other(e))).map_err(|source| VmmError::Io {
            operation: "find guest memory of",
            path: self.attachment.memory_image.clone(),
            source,
        })
    }

    /// Half of the grace is for the guest's own way to power off, upon the ACPI power button; the other half for its
    /// kernel's, where nobody listens to the button.
    async fn shutdown(&self, grace: Duration) -> Result<MachineExit, VmmError> {
        let deadline = Instant::now() + grace;
        let ask = async {
            self.resume_vcpus().await?; // a paused guest hears nothing
            self.call("power off", &SystemPowerdown {}).await?;
            if let Some(exit) = self.ended_by(deadline - grace / 2).await {
                return Ok(Some(exit));
            }
            tokio::select! {
                exit = self.ended_by(deadline) => Ok(exit),
                asked = self.power_off_by_sysrq() => asked.map(|never| match never {}),
            }
        };
        match timeout_at(deadline, ask).await {
            Ok(Ok(Some(exit))) => Ok(exit),
            // It had its chance, whatever went wrong with asking.
            Ok(Ok(None)) | Err(_) => self.kill().await,
            Ok(Err(error)) => {
                let error: VmmError = error;
                debug!(machine = %self.parts.process.record().name, %error, "cannot ask the guest to power off");
                self.kill().await
            }
        }
    }

    async fn kill(&self) -> Result<MachineExit, VmmError> {
        self.parts.killed.store(true, Ordering::Release);
        self.parts.process.kill().await?;
        // The watching task goes away unheard only with the runtime.
        Ok(self.ended_by(Instant::now() + 3 * LAST_NEWS).await.unwrap_or(MachineExit::Killed))
    }

    async fn disown(self: Box<Self>) -> MachineRecord {
        let record = self.record();
        let Self { parts, watch, .. } = *self;
        watch.abort();
        let _ = watch.await; // whether it was aborted or had just heard of the end
        // It had the only other reference.
        if let Some(parts) = Arc::into_inner(parts) {
            parts.qmp.close().await;
            parts.console.close().await;
        }
        record
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_stopped_machine_counts_as_paused() {
        let state = |status: &str, running| run_state(Status { running, status: status.into() });
        assert_eq!(state("running", true), RunState::Running);
        assert_eq!(state("paused", false), RunState::Paused);
        for unusable in ["prelaunch", "inmigrate", "internal-error", "shutdown", "some-day"] {
            assert_eq!(state(unusable, false), RunState::Unusable(unusable.into()));
        }
    }
}
