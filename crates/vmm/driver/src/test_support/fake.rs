//! A VMM whose machines run nothing: for the tests of the layers above.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::{
    GuestMemory, Machine, MachineExit, MachineRecord, MachineSpec, ProcessSpec, Vmm, VmmError, VmmIdentity, VmmKind,
    VmmProcess,
};

/// How the next machine behaves.
#[derive(Debug, Clone, Default)]
pub struct FakePlan {
    /// The boot takes this long.
    pub boot_takes: Duration,
    /// The boot fails (after `boot_takes`) with this text.
    pub boot_fails: Option<String>,
    /// The guest does not react to a request to power off: `shutdown` takes its whole grace and kills.
    pub ignores_shutdown: bool,
    /// `kill` takes this long.
    pub kill_takes: Duration,
    /// Calls of `pause_vcpus`, `resume_vcpus` and `save_device_state` are refused with this text.
    pub refuses_calls: Option<String>,
}

/// A VMM whose machines are entries of a table or, for tests of what outlives a server, sleeping processes.
///
/// Machines behave unless told otherwise by [`FakeVmm::plan_next`]. Clones are the same VMM, so a test keeps one while
/// the code under test owns another.
#[derive(Debug, Clone)]
pub struct FakeVmm {
    identity: VmmIdentity,
    processes: bool,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    plans: VecDeque<FakePlan>,
    booted: usize,
    live: HashMap<String, Arc<Body>>,
}

/// What exists of a fake machine.
#[derive(Debug)]
struct Body {
    spec: MachineSpec,
    plan: FakePlan,
    record: MachineRecord,
    process: Option<VmmProcess>,
    paused: Mutex<bool>,
    exit: watch::Sender<Option<MachineExit>>,
}

impl FakeVmm {
    /// Machines live in memory only; their records name no process (pid 0).
    #[must_use]
    pub fn in_memory() -> Self {
        let identity = VmmIdentity { kind: VmmKind::QemuTcg, version: "0.0-fake".into() };
        Self { identity, processes: false, shared: Arc::default() }
    }

    /// Machines are `sleep` processes, which stay when the test forgets them: end them by record or work dir.
    #[must_use]
    pub fn with_processes() -> Self {
        Self { processes: true, ..Self::in_memory() }
    }

    /// The next machine that is started, and has no plan yet, behaves like this.
    pub fn plan_next(&self, plan: FakePlan) {
        self.lock().plans.push_back(plan);
    }

    /// Names of the live machines, sorted.
    #[must_use]
    pub fn live(&self) -> Vec<String> {
        let mut names: Vec<_> = self.lock().live.keys().cloned().collect();
        names.sort();
        names
    }

    /// How many machines were booted or restored so far, failures excluded.
    #[must_use]
    pub fn started(&self) -> usize {
        self.lock().booted
    }

    /// What a live machine was made of.
    #[must_use]
    pub fn spec(&self, name: &str) -> Option<MachineSpec> {
        self.lock().live.get(name).map(|body| body.spec.clone())
    }

    /// Whether the vCPUs of a live machine are paused.
    #[must_use]
    pub fn is_paused(&self, name: &str) -> Option<bool> {
        self.lock().live.get(name).map(|body| *body.paused())
    }

    /// A live machine ends by itself: [`MachineExit::Crashed`] with `why`. False if there is none of that name.
    pub fn crash(&self, name: &str, why: &str) -> bool {
        self.end(name, MachineExit::Crashed(why.to_owned()))
    }

    /// A live machine's guest powers off. False if there is none of that name.
    pub fn power_off(&self, name: &str) -> bool {
        self.end(name, MachineExit::Shutdown)
    }

    fn end(&self, name: &str, exit: MachineExit) -> bool {
        let body = self.lock().live.remove(name);
        if let Some(body) = &body {
            body.announce(exit);
            body.process.iter().for_each(VmmProcess::signal_kill);
        }
        body.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn start(&self, spec: MachineSpec, paused: bool) -> Result<Box<dyn Machine>, VmmError> {
        let plan = self.lock().plans.pop_front().unwrap_or_default();
        tokio::time::sleep(plan.boot_takes).await;
        if let Some(why) = plan.boot_fails {
            return Err(VmmError::Ended { operation: "boot", detail: why });
        }
        if self.lock().live.contains_key(&spec.name) {
            return Err(VmmError::Refused { operation: "boot", detail: format!("machine {} is live", spec.name) });
        }
        let process = if self.processes { Some(VmmProcess::spawn(sleeper(&spec)).await?) } else { None };
        let nowhere = MachineRecord { name: spec.name.clone(), pid: 0, start_time: 0, work_dir: spec.work_dir.clone() };
        let record = process.as_ref().map_or(nowhere, |process| process.record().clone());
        if let Some(process) = &process {
            process.release();
        }
        let body = Arc::new(Body {
            record,
            process,
            plan,
            paused: Mutex::new(paused),
            exit: watch::channel(None).0,
            spec: spec.clone(),
        });
        let mut shared = self.lock();
        shared.booted += 1;
        shared.live.insert(spec.name, body.clone());
        drop(shared);
        if let Some(process) = &body.process {
            tokio::spawn(follow(process.end(), body.record.clone(), self.clone()));
        }
        Ok(Box::new(FakeMachine { vmm: self.clone(), body }))
    }
}

fn sleeper(spec: &MachineSpec) -> ProcessSpec {
    ProcessSpec {
        name: spec.name.clone(),
        work_dir: spec.work_dir.clone(),
        binary: "/bin/sleep".into(),
        args: vec!["infinity".into()],
        netns: spec.netns.clone(),
        inherit: Vec::new(),
    }
}

/// A sleeper that is killed from outside is a machine that crashed.
async fn follow(mut end: watch::Receiver<Option<crate::ProcessEnd>>, record: MachineRecord, vmm: FakeVmm) {
    if end.wait_for(Option::is_some).await.is_ok()
        && vmm.lock().live.get(&record.name).is_some_and(|body| body.record == record)
    {
        vmm.crash(&record.name, "killed from outside");
    }
}

impl Body {
    fn paused(&self) -> MutexGuard<'_, bool> {
        self.paused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first end that is announced is the one that happened.
    fn announce(&self, exit: MachineExit) {
        self.exit.send_if_modified(|known| {
            let first = known.is_none();
            known.get_or_insert(exit);
            first
        });
    }
}

#[async_trait]
impl Vmm for FakeVmm {
    fn identity(&self) -> &VmmIdentity {
        &self.identity
    }

    async fn boot(&self, spec: MachineSpec) -> Result<Box<dyn Machine>, VmmError> {
        self.start(spec, false).await
    }

    async fn restore(&self, spec: MachineSpec, state: &Path) -> Result<Box<dyn Machine>, VmmError> {
        let io_error = |source| VmmError::Io { operation: "read device state", path: state.to_owned(), source };
        std::fs::read(state).map_err(io_error)?;
        self.start(spec, true).await
    }
}

#[derive(Debug)]
struct FakeMachine {
    vmm: FakeVmm,
    body: Arc<Body>,
}

impl FakeMachine {
    fn call(&self, operation: &'static str) -> Result<(), VmmError> {
        if let Some(exit) = &*self.body.exit.borrow() {
            return Err(VmmError::Ended { operation, detail: format!("{exit:?}") });
        }
        match &self.body.plan.refuses_calls {
            Some(why) => Err(VmmError::Refused { operation, detail: why.clone() }),
            None => Ok(()),
        }
    }

    fn exit_now(&self) -> Option<MachineExit> {
        self.body.exit.borrow().clone()
    }

    async fn end(&self, exit: MachineExit) -> Result<MachineExit, VmmError> {
        if self.exit_now().is_none() && !self.vmm.end(&self.body.record.name, exit.clone()) {
            self.body.announce(exit.clone());
        }
        if let Some(process) = &self.body.process {
            process.kill().await?;
        }
        Ok(self.exit_now().unwrap_or(exit))
    }
}

#[async_trait]
impl Machine for FakeMachine {
    fn record(&self) -> MachineRecord {
        self.body.record.clone()
    }

    fn exit(&self) -> watch::Receiver<Option<MachineExit>> {
        self.body.exit.subscribe()
    }

    async fn pause_vcpus(&self) -> Result<(), VmmError> {
        self.call("stop")?;
        *self.body.paused() = true;
        Ok(())
    }

    async fn resume_vcpus(&self) -> Result<(), VmmError> {
        self.call("cont")?;
        *self.body.paused() = false;
        Ok(())
    }

    async fn save_device_state(&self, to: &Path) -> Result<(), VmmError> {
        self.call("save device state")?;
        if !*self.body.paused() {
            return Err(VmmError::Refused { operation: "save device state", detail: "the vCPUs run".into() });
        }
        let io_error = |source| VmmError::Io { operation: "write device state", path: to.to_owned(), source };
        std::fs::write(to, format!("state of {}", self.body.record.name)).map_err(io_error)
    }

    async fn guest_memory(&self) -> Result<GuestMemory, VmmError> {
        self.call("find guest memory")?;
        Ok(GuestMemory { pid: self.body.record.pid, ranges: Vec::new() })
    }

    async fn shutdown(&self, grace: Duration) -> Result<MachineExit, VmmError> {
        if self.body.plan.ignores_shutdown && self.exit_now().is_none() {
            let mut exit = self.exit();
            if tokio::time::timeout(grace, exit.wait_for(Option::is_some)).await.is_err() {
                return self.kill().await;
            }
        }
        self.end(MachineExit::Shutdown).await
    }

    async fn kill(&self) -> Result<MachineExit, VmmError> {
        tokio::time::sleep(self.body.plan.kill_takes).await;
        self.end(MachineExit::Killed).await
    }
}

#[cfg(test)]
mod tests {
    use aenv_model::{Bytes, MachineShape};

    use super::*;
    use crate::{OrphanEnd, end_orphan};

    fn spec(name: &str, work_dir: &Path) -> MachineSpec {
        MachineSpec {
            name: name.into(),
            shape: MachineShape { vcpus: 1, memory: Bytes::mib(128) },
            kernel: "/boot/kernel".into(),
            initramfs: "/boot/initramfs".into(),
            cmdline: String::new(),
            disks: Vec::new(),
            nics: Vec::new(),
            netns: None,
            work_dir: work_dir.to_owned(),
            serial_log: work_dir.join("serial.log"),
            serial_log_limit: Bytes::kib(64),
            memory_image: None,
        }
    }

    #[tokio::test]
    async fn machines_end_the_way_they_are_told() {
        let (vmm, dir) = (FakeVmm::in_memory(), Path::new("/nowhere"));
        vmm.plan_next(FakePlan { boot_fails: Some("no kernel".into()), ..FakePlan::default() });
        assert!(matches!(vmm.boot(spec("a", dir)).await, Err(VmmError::Ended { .. })));

        let machine = vmm.boot(spec("a", dir)).await.unwrap();
        assert!(vmm.boot(spec("a", dir)).await.is_err(), "one live machine a name");
        assert!(vmm.crash("a", "bug"));
        assert_eq!(*machine.exit().borrow(), Some(MachineExit::Crashed("bug".into())));
        assert_eq!(machine.kill().await.unwrap(), MachineExit::Crashed("bug".into()));

        vmm.plan_next(FakePlan { ignores_shutdown: true, ..FakePlan::default() });
        let machine = vmm.boot(spec("b", dir)).await.unwrap();
        assert_eq!(vmm.live(), ["b"]);
        assert_eq!(machine.shutdown(Duration::from_millis(5)).await.unwrap(), MachineExit::Killed);
        assert_eq!((vmm.live().len(), vmm.started()), (0, 2));
    }

    #[tokio::test]
    async fn a_machine_that_is_a_process_can_be_ended_by_its_record() {
        let dir = tempfile::tempdir().unwrap();
        let vmm = FakeVmm::with_processes();
        let machine = vmm.boot(spec("a", dir.path())).await.unwrap();
        assert_eq!(end_orphan(&machine.record()).await.unwrap(), OrphanEnd::Ended);
        let mut exit = machine.exit();
        let exit =
            tokio::time::timeout(Duration::from_secs(10), exit.wait_for(Option::is_some)).await.unwrap().unwrap();
        assert!(matches!(&*exit, Some(MachineExit::Crashed(_))));
    }
}
