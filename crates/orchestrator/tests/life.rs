//! A sandbox's life over a fake VMM, fake slots and a stub of the guest agent: what is promised, and that nothing is left.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aenv_block_device::{CreateDiskError, Disk, DiskRecord, DiskStore};
use aenv_durable::Store;
use aenv_model::{Bytes, MachineShape, Phase, SandboxId, TemplateId};
use aenv_network::SlotRecord;
use aenv_orchestrator::{
    AskError, BlanksConfig, CreateError, DeleteError, Ended, EnvdConfig, Former, GuestAddress, GuestBoot,
    GuestDefaults, GuestDialer, HowToPause, Image, Keep, NewSandbox, OnExpiry, OnStop, Orchestrator,
    OrchestratorConfig, Parts, SandboxSpec, SlotLease, Slots, Source, StandbyConfig, TakenOver, TokenSeed,
};
use aenv_snapshot::CaptureStore;
use aenv_snapshot::test_support::FakeBacking;
use aenv_vmm_driver::test_support::{FakePlan, FakeVmm};
use aenv_vmm_driver::{DiskLimit, NicSpec};
use async_trait::async_trait;
use axum::Json;
use axum::http::StatusCode;
use axum::routing::{get, post};
use tokio::net::{TcpListener, TcpStream};

/// Far beyond what any of these tests takes: reached only by a hang.
const PATIENCE: Duration = Duration::from_secs(30);

const DISK_ONLY: HowToPause = HowToPause { disk_only: true, if_responsive: false };

/// The template that machines stand ready for.
const STANDING: &str = "standing";

/// The stub of a guest agent.
#[derive(Debug, Clone)]
struct Guest {
    address: SocketAddr,
    healthy: Arc<AtomicBool>,
    /// `/init` is taken and never answered.
    silent: Arc<AtomicBool>,
    inits: Arc<Mutex<Vec<serde_json::Value>>>,
    /// Commands that run.
    commands: Arc<AtomicUsize>,
}

impl Guest {
    async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let guest = Self {
            address: listener.local_addr().unwrap(),
            healthy: Arc::new(AtomicBool::new(true)),
            silent: Arc::default(),
            inits: Arc::default(),
            commands: Arc::default(),
        };
        let (healthy, silent, inits) = (guest.healthy.clone(), guest.silent.clone(), guest.inits.clone());
        let health = move || async move {
            if healthy.load(Ordering::SeqCst) { StatusCode::NO_CONTENT } else { StatusCode::SERVICE_UNAVAILABLE }
        };
        let init = move |Json(body): Json<serde_json::Value>| async move {
            inits.lock().unwrap().push(body);
            if silent.load(Ordering::SeqCst) {
                std::future::pending::<()>().await;
            }
            StatusCode::NO_CONTENT
        };
        let sync = || async { StatusCode::NO_CONTENT };
        let commands = guest.commands.clone();
        let list = move || async move {
            let processes = vec![serde_json::json!({"pid": 1}); commands.load(Ordering::SeqCst)];
            Json(serde_json::json!({ "processes": processes }))
        };
        let router = axum::Router::new()
            .route("/health", get(health))
            .route("/init", post(init))
            .route("/sync", post(sync))
            .route("/process.Process/List", post(list));
        tokio::spawn(async move { axum::serve(listener, router).await });
        guest
    }
}

#[async_trait]
impl GuestDialer for Guest {
    async fn dial(&self, _port: u16) -> io::Result<TcpStream> {
        TcpStream::connect(self.address).await
    }
}

#[derive(Debug)]
struct FakeSlots {
    guest: Guest,
    held: Arc<AtomicUsize>,
}

#[async_trait]
impl Slots for FakeSlots {
    async fn acquire(&self) -> io::Result<Box<dyn SlotLease>> {
        self.held.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(FakeSlot { guest: self.guest.clone(), held: self.held.clone() }))
    }

    async fn adopt(&self, record: &SlotRecord) -> io::Result<Box<dyn SlotLease>> {
        assert_eq!(record.tag, "fake");
        Ok(Box::new(FakeSlot { guest: self.guest.clone(), held: self.held.clone() }))
    }
}

#[derive(Debug)]
struct FakeSlot {
    guest: Guest,
    held: Arc<AtomicUsize>,
}

#[async_trait]
impl SlotLease for FakeSlot {
    fn netns(&self) -> Option<PathBuf> {
        None
    }
    fn nic(&self) -> Option<NicSpec> {
        None
    }
    fn address(&self) -> GuestAddress {
        GuestAddress { address: Ipv4Addr::new(169, 254, 0, 21), prefix: 30, gateway: Ipv4Addr::new(169, 254, 0, 22) }
    }
    fn dialer(&self) -> Arc<dyn GuestDialer> {
        Arc::new(self.guest.clone())
    }
    fn record(&self) -> Option<SlotRecord> {
        Some(SlotRecord { tag: "fake".into(), index: 1 })
    }
    fn disown(&mut self) -> io::Result<SlotRecord> {
        Ok(SlotRecord { tag: "fake".into(), index: 1 })
    }
    async fn release(&mut self) -> io::Result<()> {
        self.held.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }
}

/// Disks that are empty files; one removal can be told to fail.
#[derive(Debug)]
struct FakeDisks {
    dir: PathBuf,
    full: AtomicBool,
    remove_fails: AtomicUsize,
}

#[async_trait]
impl DiskStore for FakeDisks {
    async fn create(&self, name: &str, _base: &Path, _size: Option<Bytes>) -> Result<Disk, CreateDiskError> {
        if self.full.load(Ordering::SeqCst) {
            let (name, dir) = (name.to_owned(), self.dir.clone());
            return Err(CreateDiskError::NoSpace { name, needed: Bytes::gib(1), dir });
        }
        let path = self.dir.join(name);
        std::fs::write(&path, b"").unwrap();
        Ok(Disk { path, size: Bytes::gib(1), record: DiskRecord { name: name.to_owned() } })
    }

    async fn remove(&self, record: &DiskRecord) -> io::Result<()> {
        let fails = self.remove_fails.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        if fails.is_ok() {
            return Err(io::Error::other("told to fail"));
        }
        aenv_durable::remove_file_if_present(&self.dir.join(&record.name))
    }
}

/// A node's worth of fakes, and what they must look like when everything is given back.
struct Bench {
    dir: tempfile::TempDir,
    store: Store,
    vmm: FakeVmm,
    guest: Guest,
    held: Arc<AtomicUsize>,
    disks: Arc<FakeDisks>,
    backing: Arc<FakeBacking>,
    captures: CaptureStore,
    orchestrator: Orchestrator,
}

impl Drop for Bench {
    /// Machines that are processes do not outlive a test that failed.
    fn drop(&mut self) {
        for name in self.vmm.live() {
            self.vmm.crash(&name, "the test is over");
        }
    }
}

impl Bench {
    async fn new() -> Self {
        Self::with(FakeVmm::in_memory()).await
    }

    async fn with(vmm: FakeVmm) -> Self {
        Self::with_config(vmm, OrchestratorConfig { on_stop: OnStop::Delete, ..OrchestratorConfig::default() }).await
    }

    async fn with_config(vmm: FakeVmm, config: OrchestratorConfig) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("node.redb")).unwrap();
        let guest = Guest::start().await;
        let held = Arc::new(AtomicUsize::new(0));
        for name in ["disks", "backing"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        for name in ["kernel", "initramfs"] {
            std::fs::write(dir.path().join(name), name).unwrap();
        }
        let (full, remove_fails) = (AtomicBool::new(false), AtomicUsize::new(0));
        let disks = Arc::new(FakeDisks { dir: dir.path().join("disks"), full, remove_fails });
        let backing = Arc::new(FakeBacking::new(dir.path().join("backing")));
        let (orchestrator, captures, _) =
            Self::start(dir.path(), &store, &vmm, &guest, &held, &disks, &backing, config).await;
        Self { dir, store, vmm, guest, held, disks, backing, captures, orchestrator }
    }

    #[allow(clippy::too_many_arguments)]
    async fn start(
        dir: &Path,
        store: &Store,
        vmm: &FakeVmm,
        guest: &Guest,
        held: &Arc<AtomicUsize>,
        disks: &Arc<FakeDisks>,
        backing: &Arc<FakeBacking>,
        config: OrchestratorConfig,
    ) -> (Orchestrator, CaptureStore, TakenOver) {
        let captures = CaptureStore::open(&dir.join("captures"), backing.clone()).unwrap();
        let former = Former::read(store).unwrap();
        captures.sweep(&former.captures(), &former.mapped()).await;
        let parts = Parts {
            config,
            envd: EnvdConfig { poll: Duration::from_millis(1), ..EnvdConfig::default() },
            standby: StandbyConfig { size: 2, templates: vec![STANDING.into()], ..StandbyConfig::default() },
            vmm: Arc::new(vmm.clone()),
            slots: Arc::new(FakeSlots { guest: guest.clone(), held: held.clone() }),
            disks: disks.clone(),
            blanks: BlanksConfig::default(),
            captures: captures.clone(),
            boot: GuestBoot { kernel: dir.join("kernel"), initramfs: dir.join("initramfs"), cmdline: "quiet".into() },
            run_dir: dir.join("run"),
            disk_limit: DiskLimit::default(),
            serial_dir: dir.join("serial"),
            seed: TokenSeed::new("seed").unwrap(),
        };
        let (orchestrator, taken_over) = Orchestrator::start(parts, store, former, &Default::default()).await.unwrap();
        (orchestrator, captures, taken_over)
    }

    /// Another server on the same home, as after the end of the first.
    async fn restart(&mut self) -> TakenOver {
        let config = OrchestratorConfig { on_stop: OnStop::Delete, ..OrchestratorConfig::default() };
        let started = Self::start(
            self.dir.path(),
            &self.store,
            &self.vmm,
            &self.guest,
            &self.held,
            &self.disks,
            &self.backing,
            config,
        );
        let (orchestrator, captures, taken_over) = started.await;
        (self.orchestrator, self.captures) = (orchestrator, captures);
        taken_over
    }

    fn sandbox(&self) -> NewSandbox {
        let keep: Keep = Box::new(());
        let image = Image { rootfs: "/rootfs".into(), disk_size: None, keep: Arc::new(keep) };
        let spec = SandboxSpec {
            template: TemplateId::new(),
            alias: Some("base".into()),
            shape: MachineShape { vcpus: 1, memory: Bytes::mib(256) },
            defaults: GuestDefaults { env: BTreeMap::new(), user: Some("user".into()), workdir: None },
            metadata: BTreeMap::new(),
            timeout: None,
            secure: true,
            private_traffic: false,
            on_expiry: OnExpiry::Delete,
            auto_resume: false,
            idle_timeout: None,
            lease: None,
            internal: false,
        };
        NewSandbox { spec, source: Source { capture: None, image: Some(image) } }
    }

    fn sandbox_with(&self, change: impl FnOnce(&mut SandboxSpec)) -> NewSandbox {
        let mut sandbox = self.sandbox();
        change(&mut sandbox.spec);
        sandbox
    }

    async fn running(&self) -> SandboxId {
        self.orchestrator.create(self.sandbox()).await.unwrap().id
    }

    fn phase(&self, id: SandboxId) -> Option<Phase> {
        self.orchestrator.get(id).ok().map(|info| info.phase)
    }

    /// Captures on the disk, once what was let go of is gone.
    async fn captures(&self) -> usize {
        self.captures.settle().await;
        count(&self.dir.path().join("captures"))
    }

    fn assert_nothing_is_held(&self) {
        assert_eq!(self.vmm.live(), Vec::<String>::new());
        assert_eq!(self.held.load(Ordering::SeqCst), 0, "slots");
        assert_eq!(count(&self.disks.dir), 0, "disks");
        assert_eq!(count(&self.dir.path().join("run")), 0, "work dirs");
        assert_eq!(self.rows(), 0, "intent rows");
    }

    fn rows(&self) -> usize {
        self.store.table::<serde_json::Value>("sandboxes", 2).list_blocking().unwrap().len()
    }

    async fn gone(&self, id: SandboxId) -> Option<Ended> {
        eventually(|| match self.orchestrator.get(id) {
            Err(AskError::NotFound { ended: Some(why), .. }) => Some(why),
            _ => None,
        })
        .await
    }
}

fn count(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

/// What `look` finds before the patience ends.
async fn eventually<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while tokio::time::Instant::now() < deadline {
        if let Some(found) = look() {
            return Some(found);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    None
}

#[tokio::test]
async fn a_created_sandbox_runs_is_initialised_and_leaves_nothing_when_deleted() {
    let bench = Bench::new().await;
    let info = bench.orchestrator.create(bench.sandbox()).await.unwrap();
    assert_eq!(info.phase, Phase::Running);
    assert_eq!(bench.orchestrator.list().len(), 1);
    assert!(bench.orchestrator.route(info.id).is_some());
    let init = bench.guest.inits.lock().unwrap()[0].clone();
    assert_eq!(init["accessToken"], *info.access_token.as_ref().unwrap());
    assert_eq!(init["defaultUser"], "user");
    let spec = bench.vmm.spec(&format!("aenv-{}", info.id)).unwrap();
    assert!(spec.cmdline.starts_with("quiet aenv.root=/dev/vda aenv.ip=169.254.0.21/30"), "{}", spec.cmdline);

    let ended = bench.orchestrator.route(info.id).unwrap().ended;
    bench.orchestrator.delete(info.id).await.unwrap();
    assert!(ended.is_cancelled(), "traffic goes on");
    bench.assert_nothing_is_held();
    assert_eq!(bench.gone(info.id).await, Some(Ended::Deleted));
    assert!(matches!(bench.orchestrator.delete(info.id).await, Err(DeleteError::Ask(AskError::NotFound { .. }))));
}

#[tokio::test]
async fn a_start_that_fails_gives_everything_back_before_it_says_so() {
    let bench = Bench::new().await;
    bench.vmm.plan_next(FakePlan { boot_fails: Some("no".into()), ..FakePlan::default() });
    let error = bench.orchestrator.create(bench.sandbox()).await.unwrap_err();
    assert!(matches!(error, CreateError::Step { step: "start machine", .. }), "{error:?}");
    eventually(|| (bench.rows() == 0).then_some(())).await.expect("the intent row goes");
    bench.assert_nothing_is_held();

    bench.disks.full.store(true, Ordering::SeqCst);
    let error = bench.orchestrator.create(bench.sandbox()).await.unwrap_err();
    assert!(matches!(error, CreateError::NoSpace { .. }), "{error:?}");
    eventually(|| (bench.rows() == 0).then_some(())).await.expect("the intent row goes");
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_sandbox_can_be_deleted_while_its_guest_does_not_answer() {
    let bench = Bench::new().await;
    bench.guest.healthy.store(false, Ordering::SeqCst);
    let (orchestrator, sandbox) = (bench.orchestrator.clone(), bench.sandbox());
    let create = tokio::spawn(async move { orchestrator.create(sandbox).await });
    let id = eventually(|| bench.vmm.live().first().map(|name| name["aenv-".len()..].parse().unwrap())).await.unwrap();
    tokio::time::timeout(PATIENCE, bench.orchestrator.delete(id)).await.unwrap().unwrap();
    assert!(matches!(create.await.unwrap(), Err(CreateError::Deleted { .. })));
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_guest_that_falls_silent_in_its_init_holds_up_neither_its_delete_nor_news_of_its_end() {
    let bench = Bench::new().await;
    bench.guest.silent.store(true, Ordering::SeqCst);
    for crash in [false, true] {
        bench.guest.inits.lock().unwrap().clear();
        let (orchestrator, sandbox) = (bench.orchestrator.clone(), bench.sandbox());
        let create = tokio::spawn(async move { orchestrator.create(sandbox).await });
        eventually(|| (!bench.guest.inits.lock().unwrap().is_empty()).then_some(())).await.expect("init is called");
        let name = bench.vmm.live()[0].clone();
        if crash {
            bench.vmm.crash(&name, "killed");
        } else {
            bench.orchestrator.delete(name["aenv-".len()..].parse().unwrap()).await.unwrap();
        }
        // The deadline of the start is a minute; this ends at once.
        tokio::time::timeout(PATIENCE, create).await.unwrap().unwrap().unwrap_err();
    }
    eventually(|| (bench.rows() == 0).then_some(())).await.expect("the intent rows go");
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_machine_that_dies_while_its_guest_boots_fails_the_create() {
    let bench = Bench::new().await;
    bench.guest.healthy.store(false, Ordering::SeqCst);
    let (orchestrator, sandbox) = (bench.orchestrator.clone(), bench.sandbox());
    let create = tokio::spawn(async move { orchestrator.create(sandbox).await });
    let name = eventually(|| bench.vmm.live().first().cloned()).await.unwrap();
    bench.vmm.crash(&name, "out of memory");
    let error = tokio::time::timeout(PATIENCE, create).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(error, CreateError::Step { step: "wait for the guest agent", .. }), "{error:?}");
}

#[tokio::test]
async fn a_create_whose_client_hangs_up_goes_on() {
    let bench = Bench::new().await;
    bench.vmm.plan_next(FakePlan { boot_takes: Duration::from_millis(50), ..FakePlan::default() });
    let create = bench.orchestrator.create(bench.sandbox());
    assert!(tokio::time::timeout(Duration::from_millis(5), create).await.is_err());
    eventually(|| bench.orchestrator.list().first().filter(|info| info.phase == Phase::Running).map(|_| ()))
        .await
        .expect("it runs");
}

#[tokio::test]
async fn an_expired_sandbox_is_ended_with_its_reason() {
    let bench = Bench::new().await;
    let sandbox = bench.sandbox_with(|spec| spec.timeout = Some(Duration::from_millis(50)));
    let id = bench.orchestrator.create(sandbox).await.unwrap().id;
    assert_eq!(bench.gone(id).await, Some(Ended::Expired));
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn connect_never_shortens_and_timeout_may() {
    let bench = Bench::new().await;
    let info = bench.orchestrator.create(bench.sandbox()).await.unwrap();
    let kept = bench.orchestrator.extend(info.id, Duration::from_secs(1)).await.unwrap();
    assert_eq!(kept, bench.orchestrator.get(info.id).unwrap().end_at);
    assert!(kept > jiff::Timestamp::now() + jiff::SignedDuration::from_secs(200));
    let longer = bench.orchestrator.extend(info.id, Duration::from_secs(1000)).await.unwrap();
    assert!(longer > kept);
    bench.orchestrator.set_timeout(info.id, Duration::ZERO).await.unwrap();
    assert_eq!(bench.gone(info.id).await, Some(Ended::Expired));
}

#[tokio::test]
async fn a_crashed_machine_is_noticed_and_told() {
    let bench = Bench::new().await;
    let id = bench.orchestrator.create(bench.sandbox()).await.unwrap().id;
    bench.vmm.crash(&format!("aenv-{id}"), "triple fault");
    assert_eq!(bench.gone(id).await, Some(Ended::MachineEnded("triple fault".into())));
    let message = bench.orchestrator.get(id).unwrap_err().to_string();
    assert!(message.contains("triple fault"), "{message}");
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_delete_that_cannot_finish_says_so_and_the_next_one_finishes_it() {
    let bench = Bench::new().await;
    let id = bench.orchestrator.create(bench.sandbox()).await.unwrap().id;
    bench.disks.remove_fails.store(1, Ordering::SeqCst);
    let error = bench.orchestrator.delete(id).await.unwrap_err();
    assert!(matches!(&error, DeleteError::Unfinished { failures, .. } if failures.contains("remove disk")), "{error}");
    assert!(bench.orchestrator.get(id).is_err(), "a sandbox whose end began is not shown");
    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn concurrent_deletes_share_one_outcome() {
    let bench = Bench::new().await;
    bench.vmm.plan_next(FakePlan { kill_takes: Duration::from_millis(50), ..FakePlan::default() });
    let id = bench.orchestrator.create(bench.sandbox()).await.unwrap().id;
    let deletes = futures::future::join_all((0..8).map(|_| bench.orchestrator.delete(id))).await;
    assert!(deletes.iter().all(Result::is_ok), "{deletes:?}");
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn closing_ends_every_sandbox_and_refuses_new_ones() {
    let bench = Bench::new().await;
    for _ in 0..4 {
        bench.orchestrator.create(bench.sandbox()).await.unwrap();
    }
    bench.orchestrator.close(PATIENCE).await.unwrap();
    bench.assert_nothing_is_held();
    assert!(matches!(bench.orchestrator.create(bench.sandbox()).await, Err(CreateError::ShuttingDown)));
}

#[tokio::test]
async fn a_paused_sandbox_has_no_machine_and_goes_on_when_it_is_resumed() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let ended = bench.orchestrator.route(id).unwrap().ended;
    assert!(bench.orchestrator.pause(id, HowToPause::default()).await.unwrap());
    assert!(ended.is_cancelled(), "traffic goes on");
    assert_eq!(bench.phase(id), Some(Phase::Paused));
    assert!(bench.orchestrator.route(id).is_none());
    eventually(|| bench.vmm.live().is_empty().then_some(())).await.expect("the machine is gone");
    assert!(!bench.orchestrator.pause(id, HowToPause::default()).await.unwrap(), "paused already");
    assert_eq!(bench.captures().await, 1);

    assert!(bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap());
    assert_eq!(bench.phase(id), Some(Phase::Running));
    let spec = bench.vmm.spec(&format!("aenv-{id}")).unwrap();
    let memory = spec.memory_image.expect("the memory of the capture");
    assert_eq!(std::fs::read_to_string(&memory).unwrap(), memory.file_name().unwrap().to_str().unwrap());
    assert!(spec.kernel.starts_with(bench.dir.path().join("captures")), "the kernel it was booted with");
    assert_eq!(bench.vmm.is_paused(&format!("aenv-{id}")), Some(false));
    assert_eq!(bench.guest.inits.lock().unwrap().len(), 2, "told the time, its tokens and entropy again");
    assert!(!bench.orchestrator.connect(id, Duration::from_secs(1), false).await.unwrap(), "it runs");

    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
    assert_eq!(bench.captures().await, 0);
    assert_eq!(bench.backing.visible(), Vec::<String>::new());
}

#[tokio::test]
async fn layers_of_memory_pile_up_over_pauses_and_old_captures_go() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    for round in 1..=3 {
        bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
        // The one that it ran on goes behind its back.
        eventually(|| (count(&bench.dir.path().join("captures")) == 1).then_some(())).await.expect("one is left");
        let dir = std::fs::read_dir(bench.dir.path().join("captures")).unwrap().next().unwrap().unwrap().path();
        let layers = std::fs::read_dir(&dir)
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("memory-"));
        assert_eq!(layers.count(), round);
        bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap();
    }
    bench.orchestrator.delete(id).await.unwrap();
    assert_eq!(bench.captures().await, 0);
}

#[tokio::test]
async fn a_pause_that_fails_lets_the_sandbox_run_on() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    bench.backing.fail_with(Some(io::ErrorKind::StorageFull));
    let error = bench.orchestrator.pause(id, HowToPause::default()).await.unwrap_err();
    assert!(matches!(error, AskError::Capture { .. }), "{error:?}");
    assert_eq!(bench.phase(id), Some(Phase::Running));
    assert!(bench.orchestrator.route(id).is_some());
    assert_eq!(bench.vmm.is_paused(&format!("aenv-{id}")), Some(false));
    assert_eq!(bench.captures().await, 0);
    bench.backing.fail_with(None);
    assert!(bench.orchestrator.pause(id, HowToPause::default()).await.unwrap());
    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
    assert_eq!(bench.captures().await, 0);
}

#[tokio::test]
async fn a_resume_that_fails_costs_nothing() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    bench.vmm.plan_next(FakePlan { boot_fails: Some("no".into()), ..FakePlan::default() });
    let error = bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap_err();
    assert!(matches!(error, AskError::Resume { .. }), "{error:?}");
    assert_eq!(bench.phase(id), Some(Phase::Paused));
    assert_eq!(bench.captures().await, 1);
    assert!(bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap());
    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn many_who_resume_at_once_share_one_machine() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    let before = bench.vmm.started();
    let connects = (0..8).map(|n| bench.orchestrator.connect(id, Duration::from_secs(60 + n), false));
    let outcomes = futures::future::join_all(connects).await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert_eq!(bench.vmm.started() - before, 1);
    assert!(bench.orchestrator.get(id).unwrap().end_at > jiff::Timestamp::now() + jiff::SignedDuration::from_secs(60));
}

#[tokio::test]
async fn a_pause_of_the_disk_alone_boots_when_it_is_resumed() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    bench.orchestrator.pause(id, DISK_ONLY).await.unwrap();
    assert!(bench.orchestrator.get(id).unwrap().disk_only);
    bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap();
    assert!(!bench.orchestrator.get(id).unwrap().disk_only);
    assert_eq!(bench.vmm.spec(&format!("aenv-{id}")).unwrap().memory_image, None);
    // Its memory has nothing to do with what it was booted on.
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap();
    assert!(bench.vmm.spec(&format!("aenv-{id}")).unwrap().memory_image.is_some());
    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn forks_share_a_capture_that_goes_with_the_last_of_them() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let (children, _) = bench.orchestrator.fork(id, 4, None).await.unwrap();
    let children: Vec<_> = children.into_iter().map(|child| child.unwrap()).collect();
    assert_eq!(bench.phase(id), Some(Phase::Running));
    let mut tokens: Vec<_> = children.iter().map(|child| child.access_token.clone().unwrap()).collect();
    tokens.sort();
    tokens.dedup();
    assert_eq!(tokens.len(), 4, "each has tokens of its own");
    let memory = |id| bench.vmm.spec(&format!("aenv-{id}")).unwrap().memory_image;
    assert!(children.iter().all(|child| memory(child.id) == memory(children[0].id)), "one memory for all");
    assert_eq!(bench.captures().await, 1);
    for child in &children {
        assert_eq!(bench.captures().await, 1);
        bench.orchestrator.delete(child.id).await.unwrap();
    }
    assert_eq!(bench.captures().await, 0);
    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_capture_that_is_kept_starts_others_and_one_that_is_doomed_does_not_stay() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let taken = bench.orchestrator.capture(id, false).await.unwrap();
    bench.orchestrator.delete(id).await.unwrap();
    let source = Source { capture: Some(taken.capture.clone()), image: None };
    let other = bench.orchestrator.create(NewSandbox { spec: (*taken.spec).clone(), source }).await.unwrap();
    bench.orchestrator.delete(other.id).await.unwrap();
    assert_eq!(bench.captures().await, 1);
    taken.capture.doom();
    drop(taken);
    assert_eq!(bench.captures().await, 0);
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_rollback_swaps_machines_and_leaves_one() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let taken = bench.orchestrator.capture(id, false).await.unwrap();
    let before = bench.orchestrator.get(id).unwrap();
    let (first, way_in) = (bench.vmm.live(), bench.orchestrator.route(id).unwrap());
    for _ in 0..2 {
        let after = bench.orchestrator.roll_back(id, taken.capture.clone()).await.unwrap();
        assert_eq!((after.id, after.phase, after.end_at), (id, Phase::Running, before.end_at));
        assert_eq!(after.access_token, before.access_token);
        // Answered by the new machine's driver, which has ended the other one by then.
        bench.orchestrator.extend(id, Duration::ZERO).await.unwrap();
        assert_eq!(bench.vmm.live().len(), 1);
    }
    assert!(way_in.ended.is_cancelled(), "whoever was connected is not any more");
    assert_ne!(bench.vmm.live(), first);
    taken.capture.doom();
    drop(taken);
    assert_eq!(bench.captures().await, 1, "the machine is over it");
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    assert!(bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap());
    bench.orchestrator.delete(id).await.unwrap();
    assert_eq!(bench.captures().await, 0);
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_rollback_that_fails_leaves_the_machine_as_it_is() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let capture = bench.orchestrator.capture(id, false).await.unwrap().capture;
    let (machines, way_in) = (bench.vmm.live(), bench.orchestrator.route(id).unwrap());
    bench.disks.full.store(true, Ordering::SeqCst);
    let error = bench.orchestrator.roll_back(id, capture.clone()).await.unwrap_err();
    assert!(matches!(&error, AskError::Rollback { source, .. } if matches!(**source, CreateError::NoSpace { .. })));
    assert_eq!((bench.phase(id), bench.vmm.live()), (Some(Phase::Running), machines));
    assert!(!way_in.ended.is_cancelled(), "nobody has noticed");
    bench.disks.full.store(false, Ordering::SeqCst);
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    let busy = bench.orchestrator.roll_back(id, capture).await.unwrap_err();
    assert!(matches!(busy, AskError::Busy { phase: Phase::Paused, .. }));
    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_delete_ends_a_rollback_and_both_machines() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let capture = bench.orchestrator.capture(id, false).await.unwrap().capture;
    bench.guest.silent.store(true, Ordering::SeqCst);
    let asked = tokio::spawn({
        let orchestrator = bench.orchestrator.clone();
        async move { orchestrator.roll_back(id, capture).await }
    });
    eventually(|| (bench.vmm.live().len() == 2).then_some(())).await.expect("it is under way");
    assert_eq!(bench.phase(id), Some(Phase::RollingBack));
    assert!(bench.orchestrator.route(id).is_some(), "traffic flows meanwhile");
    bench.orchestrator.delete(id).await.unwrap();
    assert!(matches!(asked.await.unwrap(), Err(AskError::NotFound { .. })));
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_rollback_that_a_killed_server_left_is_undone_or_done() {
    let mut bench = Bench::with(FakeVmm::with_processes()).await;
    let id = bench.running().await;
    let capture = bench.orchestrator.capture(id, false).await.unwrap().capture;
    let first = bench.vmm.live();
    bench.guest.silent.store(true, Ordering::SeqCst);
    let asked = tokio::spawn({
        let orchestrator = bench.orchestrator.clone();
        async move { orchestrator.roll_back(id, capture).await }
    });
    eventually(|| (bench.vmm.live().len() == 2).then_some(())).await.expect("it is under way");
    bench.guest.silent.store(false, Ordering::SeqCst);
    let taken_over = bench.restart().await;
    asked.abort();
    assert_eq!(taken_over, TakenOver { running: 1, ..TakenOver::default() });
    assert_eq!(bench.vmm.live(), first, "the present machine was the one that counted");
    bench.orchestrator.delete(id).await.unwrap();
    assert_eq!(bench.vmm.live(), Vec::<String>::new());
}

#[tokio::test]
async fn a_capture_without_memory_boots() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let taken = bench.orchestrator.capture(id, true).await.unwrap();
    assert!(taken.capture.state().is_none());
    let source = Source { capture: Some(taken.capture.clone()), image: None };
    let other = bench.orchestrator.create(NewSandbox { spec: (*taken.spec).clone(), source }).await.unwrap();
    assert_eq!(bench.vmm.spec(&format!("aenv-{}", other.id)).unwrap().memory_image, None);
    assert_eq!(bench.phase(id), Some(Phase::Running));
}

#[tokio::test]
async fn a_guest_that_is_to_answer_before_a_pause_and_does_not_runs_on() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let if_responsive = HowToPause { if_responsive: true, ..HowToPause::default() };
    bench.guest.healthy.store(false, Ordering::SeqCst);
    let error = bench.orchestrator.pause(id, if_responsive).await.unwrap_err();
    assert!(matches!(error, AskError::Unresponsive { .. }));
    assert!(bench.orchestrator.route(id).is_some());
    bench.guest.healthy.store(true, Ordering::SeqCst);
    assert!(bench.orchestrator.pause(id, if_responsive).await.unwrap());
}

#[tokio::test]
async fn a_lease_that_is_not_renewed_ends_its_sandboxes_and_their_children() {
    let bench = Bench::new().await;
    let lease = bench.orchestrator.grant_lease(Duration::from_secs(60)).await.unwrap();
    let under = |bench: &Bench| bench.sandbox_with(|spec| spec.lease = Some(lease.id));
    let one = bench.orchestrator.create(under(&bench)).await.unwrap().id;
    let two = bench.orchestrator.create(under(&bench)).await.unwrap().id;
    let (children, _) = bench.orchestrator.fork(one, 1, None).await.unwrap();
    let child = children.into_iter().next().unwrap().unwrap().id;
    bench.orchestrator.pause(two, HowToPause::default()).await.unwrap();
    let other = bench.running().await;
    let renewed = bench.orchestrator.renew_lease(lease.id, None).await.unwrap().unwrap();
    assert!(renewed.end_at >= lease.end_at);
    bench.orchestrator.renew_lease(lease.id, Some(Duration::from_millis(20))).await.unwrap();
    for id in [one, two, child] {
        assert_eq!(bench.gone(id).await, Some(Ended::LeaseEnded));
    }
    assert_eq!(bench.phase(other), Some(Phase::Running));
    assert_eq!(bench.orchestrator.renew_lease(lease.id, None).await.unwrap(), None);
    assert!(!bench.orchestrator.end_lease(lease.id).await.unwrap());
    let late = bench.orchestrator.create(under(&bench)).await.unwrap_err();
    assert!(matches!(late, CreateError::NoLease(id) if id == lease.id));
    bench.orchestrator.delete(other).await.unwrap();
    eventually(|| (bench.rows() == 0).then_some(())).await.expect("nothing is left");
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_lease_outlives_its_server() {
    let mut bench = Bench::with(FakeVmm::with_processes()).await;
    let lease = bench.orchestrator.grant_lease(Duration::from_secs(60)).await.unwrap().id;
    let id = bench.orchestrator.create(bench.sandbox_with(|spec| spec.lease = Some(lease))).await.unwrap().id;
    bench.restart().await;
    assert!(bench.orchestrator.renew_lease(lease, None).await.unwrap().is_some());
    assert!(bench.orchestrator.end_lease(lease).await.unwrap());
    assert_eq!(bench.gone(id).await, Some(Ended::LeaseEnded));
    assert_eq!(bench.vmm.live(), Vec::<String>::new());
}

#[tokio::test]
async fn a_sandbox_that_nobody_uses_is_paused_and_one_in_use_is_not() {
    let bench = Bench::new().await;
    let idle = |bench: &Bench| bench.sandbox_with(|spec| spec.idle_timeout = Some(Duration::from_millis(50)));
    let id = bench.orchestrator.create(idle(&bench)).await.unwrap().id;
    let route = bench.orchestrator.route(id).unwrap();
    let used = bench.orchestrator.create(idle(&bench)).await.unwrap().id;
    let in_use = bench.orchestrator.route(used).unwrap();
    drop(route);
    eventually(|| (bench.phase(id) == Some(Phase::Paused)).then_some(())).await.expect("it is paused");
    assert_eq!(bench.phase(used), Some(Phase::Running), "a connection holds it off");
    bench.guest.commands.store(1, Ordering::SeqCst);
    drop(in_use);
    tokio::time::sleep(Duration::from_millis(200)).await; // several times over
    assert_eq!(bench.phase(used), Some(Phase::Running), "a command holds it off");
    bench.guest.commands.store(0, Ordering::SeqCst);
    eventually(|| (bench.phase(used) == Some(Phase::Paused)).then_some(())).await.expect("it is paused");
    assert!(bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap());
    eventually(|| (bench.phase(id) == Some(Phase::Paused)).then_some(())).await.expect("and again after a resume");
}

#[tokio::test]
async fn creates_beyond_the_queue_are_refused() {
    let config = OrchestratorConfig { max_queued_starts: 2, on_stop: OnStop::Delete, ..OrchestratorConfig::default() };
    let bench = Bench::with_config(FakeVmm::in_memory(), config).await;
    bench.guest.healthy.store(false, Ordering::SeqCst);
    let creates: Vec<_> = (0..2)
        .map(|_| {
            let (orchestrator, sandbox) = (bench.orchestrator.clone(), bench.sandbox());
            tokio::spawn(async move { orchestrator.create(sandbox).await })
        })
        .collect();
    eventually(|| bench.orchestrator.admit(1).is_err().then_some(())).await.expect("the queue is full");
    let refused = bench.orchestrator.create(bench.sandbox()).await.unwrap_err();
    assert!(matches!(refused, CreateError::Full { starting: 2, room: 0 }));
    bench.guest.healthy.store(true, Ordering::SeqCst);
    for create in creates {
        create.await.unwrap().unwrap();
    }
    bench.running().await;
}

#[tokio::test]
async fn a_machine_goes_on_in_a_vmm_that_waited() {
    let bench = Bench::with(FakeVmm::in_memory().with_blanks()).await;
    let id = bench.running().await;
    let waiting = || eventually(|| (bench.orchestrator.waiting() == 2).then_some(()));
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    assert_eq!(bench.vmm.waiting(), 0, "none before the first restore");
    for _ in 0..3 {
        assert!(bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap());
        waiting().await.expect("there will be others");
        assert_eq!((bench.vmm.waiting(), bench.rows()), (2, 3));
        bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    }
    let own = format!("run/{id}");
    assert!(bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap());
    let spec = bench.vmm.spec(&format!("aenv-{id}")).unwrap();
    assert!(!spec.work_dir.ends_with(own), "it is in the directory of a VMM that waited");
    // One that cannot restore is no obstacle.
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    waiting().await.expect("there are others");
    bench.vmm.plan_next(FakePlan { boot_fails: Some("told to".into()), ..FakePlan::default() });
    assert!(bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap());
    bench.orchestrator.close(PATIENCE).await.unwrap();
    assert_eq!(bench.vmm.waiting(), 0);
    bench.assert_nothing_is_held();
}

/// A sandbox of the template that machines stand ready for, from a capture made for it.
async fn standing(bench: &Bench) -> NewSandbox {
    let id = bench.running().await;
    let capture = bench.orchestrator.capture(id, false).await.unwrap().capture;
    bench.orchestrator.delete(id).await.unwrap();
    let NewSandbox { spec, .. } = bench.sandbox_with(|spec| spec.alias = Some(STANDING.into()));
    NewSandbox { spec, source: Source { capture: Some(capture), image: None } }
}

#[tokio::test]
async fn a_create_takes_a_machine_that_stands_ready() {
    let bench = Bench::new().await;
    let sandbox = standing(&bench).await;
    let stocked = || eventually(|| (bench.orchestrator.standing() == 2).then_some(()));
    let first = bench.orchestrator.create(sandbox.clone()).await.unwrap();
    assert!(first.start_times.prepare > Duration::ZERO);
    stocked().await.expect("there will be others");
    assert_eq!(bench.orchestrator.list().len(), 1, "nobody sees them");
    let ready = bench.vmm.live();
    let mut created = vec![first];
    for _ in 0..2 {
        let info = bench.orchestrator.create(sandbox.clone()).await.unwrap();
        assert!(ready.contains(&format!("aenv-{}", info.id)), "{ready:?}");
        assert_eq!(info.start_times.prepare, Duration::ZERO);
        let init = bench.guest.inits.lock().unwrap().iter().rev().find(|init| !init["accessToken"].is_null()).cloned();
        assert_eq!(init.unwrap()["accessToken"].as_str(), info.access_token.as_deref(), "it has its own token");
        assert!(bench.orchestrator.route(info.id).is_some());
        created.push(info);
    }
    stocked().await.expect("the stock is filled up");
    let capture = sandbox.source.capture.unwrap();
    capture.doom();
    drop(capture);
    eventually(|| (bench.orchestrator.standing() == 0).then_some(())).await.expect("they go with their capture");
    for info in created {
        bench.orchestrator.delete(info.id).await.unwrap();
    }
    eventually(|| (bench.rows() == 0).then_some(())).await.expect("they are gone");
    bench.assert_nothing_is_held();
    assert_eq!(bench.captures().await, 0);
}

#[tokio::test]
async fn a_machine_that_stood_ready_and_died_is_replaced() {
    let bench = Bench::new().await;
    let sandbox = standing(&bench).await;
    let first = bench.orchestrator.create(sandbox.clone()).await.unwrap();
    eventually(|| (bench.orchestrator.standing() == 2).then_some(())).await.expect("others stand ready");
    for name in bench.vmm.live().iter().filter(|name| **name != format!("aenv-{}", first.id)) {
        bench.vmm.crash(name, "out of memory");
    }
    let info = bench.orchestrator.create(sandbox).await.unwrap();
    assert!(info.start_times.prepare > Duration::ZERO);
    assert_eq!(bench.phase(info.id), Some(Phase::Running));
    bench.orchestrator.close(PATIENCE).await.unwrap();
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn machines_that_stood_ready_end_with_a_killed_server() {
    let mut bench = Bench::with(FakeVmm::with_processes()).await;
    let sandbox = standing(&bench).await;
    let first = bench.orchestrator.create(sandbox).await.unwrap();
    eventually(|| (bench.orchestrator.standing() == 2).then_some(())).await.expect("others stand ready");
    let taken_over = bench.restart().await;
    assert_eq!(taken_over, TakenOver { running: 1, ended: 2, ..TakenOver::default() });
    assert_eq!(bench.vmm.live(), [format!("aenv-{}", first.id)]);
}

#[tokio::test]
async fn a_deadline_pauses_what_is_to_be_paused() {
    let bench = Bench::new().await;
    let sandbox = bench.sandbox_with(|spec| {
        (spec.timeout, spec.on_expiry, spec.auto_resume) = (Some(Duration::from_millis(30)), OnExpiry::Pause, true);
    });
    let id = bench.orchestrator.create(sandbox).await.unwrap().id;
    eventually(|| (bench.phase(id) == Some(Phase::Paused)).then_some(())).await.expect("it is paused");
    assert!(bench.orchestrator.wake(id).await.unwrap());
    let least = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(290);
    assert!(bench.orchestrator.get(id).unwrap().end_at > least, "traffic gives it time");
    assert!(!bench.orchestrator.wake(id).await.unwrap(), "it runs");
    bench.orchestrator.pause(id, DISK_ONLY).await.unwrap();
    assert!(!bench.orchestrator.wake(id).await.unwrap(), "traffic does not boot");
}

#[tokio::test]
async fn what_cannot_be_done_in_a_phase_is_refused_with_its_name() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    let error = bench.orchestrator.fork(id, 1, None).await.unwrap_err();
    assert!(error.to_string().contains("is paused: cannot fork it now"), "{error}");
    let error = bench.orchestrator.set_timeout(id, Duration::from_secs(1)).await.unwrap_err();
    assert!(matches!(error, AskError::Busy { phase: Phase::Paused, .. }), "{error:?}");
}

#[tokio::test]
async fn a_capture_of_another_vmm_boots_its_image_or_is_refused() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let taken = bench.orchestrator.capture(id, false).await.unwrap();
    let path = taken.capture.dir().join("capture.json");
    let capture_id = taken.capture.id();
    let spec = (*taken.spec).clone();
    drop(taken);
    let text = std::fs::read_to_string(&path).unwrap().replace("0.0-fake", "9.9-other");
    std::fs::write(&path, text).unwrap();
    bench.captures.settle().await;
    let capture = bench.captures.find(capture_id).await.unwrap();
    let source = Source { capture: Some(capture.clone()), image: None };
    let error = bench.orchestrator.create(NewSandbox { spec: spec.clone(), source }).await.unwrap_err();
    assert!(error.to_string().contains("9.9-other"), "{error}");
    let source = Source { capture: Some(capture), image: bench.sandbox().source.image };
    let info = bench.orchestrator.create(NewSandbox { spec, source }).await.unwrap();
    assert_eq!(bench.vmm.spec(&format!("aenv-{}", info.id)).unwrap().memory_image, None);
}

#[tokio::test]
async fn what_a_killed_server_left_running_is_taken_over_by_the_next_one() {
    let mut bench = Bench::with(FakeVmm::with_processes()).await;
    let (running, paused) = (bench.running().await, bench.running().await);
    bench.orchestrator.pause(paused, HowToPause::default()).await.unwrap();
    bench.orchestrator.extend(running, Duration::from_secs(1000)).await.unwrap();
    let before = bench.orchestrator.get(running).unwrap();
    // A killed server runs no destructor and closes nothing: its successor sees the same store and processes.
    let taken_over = bench.restart().await;
    assert_eq!(taken_over, TakenOver { running: 1, paused: 1, ..TakenOver::default() });
    let after = bench.orchestrator.get(running).unwrap();
    assert_eq!((after.end_at, after.started_at), (before.end_at, before.started_at));
    assert_eq!(after.access_token, before.access_token);
    eventually(|| bench.orchestrator.route(running)).await.expect("the way in");
    assert!(bench.orchestrator.resume(paused, Duration::from_secs(60)).await.unwrap());
    for id in [running, paused] {
        bench.orchestrator.delete(id).await.unwrap();
    }
    assert_eq!(bench.vmm.live(), Vec::<String>::new());
    assert_eq!(bench.rows(), 0);
    assert_eq!(bench.captures().await, 0);
}

#[tokio::test]
async fn a_machine_that_ended_while_there_was_no_server_is_told_to_have_ended() {
    let mut bench = Bench::with(FakeVmm::with_processes()).await;
    let id = bench.running().await;
    bench.vmm.crash(&format!("aenv-{id}"), "killed");
    eventually(|| bench.orchestrator.get(id).is_err().then_some(())).await.expect("it is noticed");
    let taken_over = bench.restart().await;
    assert_eq!(taken_over.running, 0);
    assert!(bench.orchestrator.get(id).is_err());
}

#[tokio::test]
async fn a_server_that_is_stopped_leaves_its_sandboxes_as_it_is_told() {
    let config = |on_stop| OrchestratorConfig { on_stop, ..OrchestratorConfig::default() };
    let mut bench = Bench::with_config(FakeVmm::with_processes(), config(OnStop::Pause)).await;
    let id = bench.running().await;
    bench.orchestrator.close(PATIENCE).await.unwrap();
    assert_eq!(bench.vmm.live(), Vec::<String>::new());
    assert_eq!(bench.restart().await, TakenOver { paused: 1, ..TakenOver::default() });
    bench.orchestrator.delete(id).await.unwrap();

    let mut bench = Bench::with_config(FakeVmm::with_processes(), config(OnStop::Leave)).await;
    let id = bench.running().await;
    bench.orchestrator.close(PATIENCE).await.unwrap();
    assert_eq!(bench.vmm.live(), [format!("aenv-{id}")]);
    assert_eq!(bench.restart().await, TakenOver { running: 1, ..TakenOver::default() });
    bench.orchestrator.delete(id).await.unwrap();
    assert_eq!(bench.vmm.live(), Vec::<String>::new());
}
