//! A VMM whose machines run nothing: for the tests of the layers above.

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::{
    AdoptError, Attachment, Blank, BlankSpec, GuestMemory, Machine, MachineExit, MachineRecord, MachineSpec,
    ProcessSpec, RunState, Vmm, VmmError, VmmIdentity, VmmKind, VmmProcess,
};

/// Exists in the work dir of a machine that is a process while its vCPUs are paused: that outlives us, too.
const PAUSED_MARK: &str = "vcpus-paused";

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
    /// An adoption finds it alive, but gets no answer.
    pub ignores_adoption: bool,
}

/// A VMM whose machines are entries of a table or, for tests of what outlives a server, sleeping processes.
///
/// Machines behave unless told otherwise by [`FakeVmm::plan_next`]. Clones are the same VMM, so a test keeps one while
/// the code under test owns another, and a second owner adopts what the first one left. A machine that is a process is
/// adopted by any other such VMM, too, one of a later process included.
#[derive(Debug, Clone)]
pub struct FakeVmm {
    identity: VmmIdentity,
    processes: bool,
    blanks: bool,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    plans: VecDeque<FakePlan>,
    births: u64,
    booted: usize,
    adopted: usize,
    live: HashMap<String, Arc<Body>>,
    waiting: usize,
    /// Pid and start time of those that ended: the kernel may take a moment to let go of one.
    ended: HashSet<(u32, u64)>,
}

/// What exists of a fake machine.
#[derive(Debug)]
struct Body {
    /// `None`: started by another process.
    spec: Option<MachineSpec>,
    plan: FakePlan,
    record: MachineRecord,
    process: Option<VmmProcess>,
    paused: Mutex<bool>,
    exit: watch::Sender<Option<MachineExit>>,
}

impl FakeVmm {
    /// Machines live in memory only; their records name no process (pid 0), so only adoption finds them.
    #[must_use]
    pub fn in_memory() -> Self {
        let identity = VmmIdentity { kind: VmmKind::QemuTcg, version: "0.0-fake".into() };
        Self { identity, processes: false, blanks: false, shared: Arc::default() }
    }

    /// The same; it comes up before its machine is known, if asked to.
    #[must_use]
    pub fn with_blanks(self) -> Self {
        Self { blanks: true, ..self }
    }

    /// How many of it wait for a machine.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.lock().waiting
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

    /// How many machines were adopted so far, failures excluded.
    #[must_use]
    pub fn adopted(&self) -> usize {
        self.lock().adopted
    }

    /// What a live machine of this VMM was made of.
    #[must_use]
    pub fn spec(&self, name: &str) -> Option<MachineSpec> {
        self.lock().live.get(name).and_then(|body| body.spec.clone())
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
            self.lock().ended.insert((body.record.pid, body.record.start_time));
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
        let attachment = Attachment {
            vmm: self.identity.clone(),
            serial_log: spec.serial_log.clone(),
            serial_log_limit: spec.serial_log_limit,
            memory_image: spec.memory_image.clone().unwrap_or_else(|| spec.work_dir.join("memory")),
        };
        let nowhere = MachineRecord {
            name: spec.name.clone(),
            pid: 0,
            start_time: self.next_birth(),
            work_dir: spec.work_dir.clone(),
            attachment: None,
        };
        let record = process.as_ref().map_or(nowhere, |process| process.record().clone());
        let record = MachineRecord { attachment: Some(attachment), ..record };
        let body =
            Body { record, process, plan, paused: Mutex::new(false), exit: watch::channel(None).0, spec: Some(spec) };
        if paused {
            body.pause(true)?;
        }
        body.process.iter().for_each(VmmProcess::release);
        self.lock().booted += 1;
        Ok(self.own(body))
    }

    /// Tells a machine in memory from all others, former ones of its name included.
    fn next_birth(&self) -> u64 {
        let mut shared = self.lock();
        shared.births += 1;
        shared.births
    }

    /// Puts a machine among the live ones.
    fn own(&self, body: Body) -> Box<dyn Machine> {
        let body = Arc::new(body);
        self.lock().live.insert(body.record.name.clone(), body.clone());
        if let Some(process) = &body.process {
            tokio::spawn(follow(process.end(), body.record.clone(), self.clone()));
        }
        Box::new(FakeMachine { vmm: self.clone(), body })
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

    fn pause(&self, pause: bool) -> Result<(), VmmError> {
        if self.process.is_some() {
            let mark = self.record.work_dir.join(PAUSED_MARK);
            let marked = match pause {
                true => std::fs::write(&mark, ""),
                false => std::fs::remove_file(&mark).or_else(|e| match e.kind() {
                    std::io::ErrorKind::NotFound => Ok(()),
                    _ => Err(e),
                }),
            };
            marked.map_err(|source| VmmError::Io { operation: "mark paused vCPUs", path: mark, source })?;
        }
        *self.paused() = pause;
        Ok(())
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

    async fn blank(&self, spec: BlankSpec) -> Result<Option<Box<dyn Blank>>, VmmError> {
        if !self.blanks {
            return Ok(None);
        }
        self.lock().waiting += 1;
        Ok(Some(Box::new(FakeBlank { vmm: self.clone(), spec })))
    }

    async fn adopt(&self, record: &MachineRecord) -> Result<Box<dyn Machine>, AdoptError> {
        let (name, pid) = (record.name.clone(), record.pid);
        if self.lock().ended.contains(&(pid, record.start_time)) {
            return Err(AdoptError::Gone { name, pid });
        }
        let process = if self.processes { Some(VmmProcess::adopt(record.clone()).await?) } else { None };
        let known = self.lock().live.get(&name).cloned();
        let machine: Box<dyn Machine> = match (known, process) {
            (Some(body), _) if body.record.is_same_process(record) => {
                if body.plan.ignores_adoption {
                    let source = VmmError::Deadline { operation: "adoption", deadline: Duration::ZERO };
                    return Err(AdoptError::Unresponsive { name, pid, source });
                }
                Box::new(FakeMachine { vmm: self.clone(), body })
            }
            (_, Some(process)) => self.own(Body {
                record: record.clone(),
                process: Some(process),
                plan: FakePlan::default(),
                paused: record.work_dir.join(PAUSED_MARK).exists().into(),
                exit: watch::channel(None).0,
                spec: None,
            }),
            (Some(_), None) => return Err(AdoptError::NotOurs { name, pid }),
            (None, None) => return Err(AdoptError::Gone { name, pid }),
        };
        self.lock().adopted += 1;
        Ok(machine)
    }
}

/// Counted while it is there.
struct FakeBlank {
    vmm: FakeVmm,
    spec: BlankSpec,
}

impl Drop for FakeBlank {
    fn drop(&mut self) {
        self.vmm.lock().waiting -= 1;
    }
}

#[async_trait]
impl Blank for FakeBlank {
    async fn restore(self: Box<Self>, spec: MachineSpec, state: &Path) -> Result<Box<dyn Machine>, VmmError> {
        if (&spec.work_dir, spec.shape) != (&self.spec.work_dir, self.spec.shape) {
            return Err(VmmError::Refused { operation: "restore", detail: "it waits for another machine".into() });
        }
        self.vmm.restore(spec, state).await
    }

    async fn end(self: Box<Self>) -> Result<(), VmmError> {
        Ok(())
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

    fn identity(&self) -> &VmmIdentity {
        self.body.record.attachment.as_ref().map_or(&self.vmm.identity, |attachment| &attachment.vmm)
    }

    fn exit(&self) -> watch::Receiver<Option<MachineExit>> {
        self.body.exit.subscribe()
    }

    async fn pause_vcpus(&self) -> Result<(), VmmError> {
        self.call("stop")?;
        self.body.pause(true)
    }

    async fn resume_vcpus(&self) -> Result<(), VmmError> {
        self.call("cont")?;
        self.body.pause(false)
    }

    async fn run_state(&self) -> Result<RunState, VmmError> {
        match self.exit_now() {
            Some(exit) => Err(VmmError::Ended { operation: "query of the run state", detail: format!("{exit:?}") }),
            None => Ok(if *self.body.paused() { RunState::Paused } else { RunState::Running }),
        }
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

    async fn disown(self: Box<Self>) -> MachineRecord {
        self.record()
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
    async fn a_machine_in_memory_is_adopted_by_its_record_as_long_as_it_lives() {
        let (vmm, dir) = (FakeVmm::in_memory(), Path::new("/nowhere"));
        let record = vmm.boot(spec("a", dir)).await.unwrap().disown().await;
        let machine = vmm.adopt(&record).await.unwrap();
        machine.pause_vcpus().await.unwrap();
        drop(machine);
        let machine = vmm.adopt(&record).await.unwrap();
        assert_eq!(machine.run_state().await.unwrap(), RunState::Paused);
        let stranger = MachineRecord { start_time: 77, ..record.clone() };
        assert!(matches!(vmm.adopt(&stranger).await, Err(AdoptError::NotOurs { .. })));
        machine.kill().await.unwrap();
        assert!(matches!(vmm.adopt(&record).await, Err(AdoptError::Gone { .. })));

        vmm.plan_next(FakePlan { ignores_adoption: true, ..FakePlan::default() });
        let record = vmm.boot(spec("a", dir)).await.unwrap().record();
        assert!(matches!(vmm.adopt(&record).await, Err(AdoptError::Unresponsive { .. })));
        assert_eq!(vmm.adopted(), 2);
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
