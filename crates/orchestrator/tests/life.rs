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
use aenv_orchestrator::{
    AskError, CreateError, DeleteError, Ended, EnvdConfig, GuestAddress, GuestBoot, GuestDefaults, GuestDialer,
    Leftovers, NewSandbox, Orchestrator, OrchestratorConfig, Parts, SlotLease, Slots, TokenSeed, end_leftovers,
};
use aenv_vmm_driver::NicSpec;
use aenv_vmm_driver::test_support::{FakePlan, FakeVmm};
use async_trait::async_trait;
use axum::Json;
use axum::http::StatusCode;
use axum::routing::{get, post};
use tokio::net::{TcpListener, TcpStream};

/// Far beyond what any of these tests takes: reached only by a hang.
const PATIENCE: Duration = Duration::from_secs(30);

/// The stub of a guest agent.
#[derive(Debug, Clone)]
struct Guest {
    address: SocketAddr,
    healthy: Arc<AtomicBool>,
    /// `/init` is taken and never answered.
    silent: Arc<AtomicBool>,
    inits: Arc<Mutex<Vec<serde_json::Value>>>,
}

impl Guest {
    async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let guest = Self {
            address: listener.local_addr().unwrap(),
            healthy: Arc::new(AtomicBool::new(true)),
            silent: Arc::default(),
            inits: Arc::default(),
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
        let router = axum::Router::new().route("/health", get(health)).route("/init", post(init));
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
    orchestrator: Orchestrator,
}

impl Bench {
    async fn new() -> Self {
        Self::with(FakeVmm::in_memory()).await
    }

    async fn with(vmm: FakeVmm) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("node.redb")).unwrap();
        let guest = Guest::start().await;
        let held = Arc::new(AtomicUsize::new(0));
        let disk_dir = dir.path().join("disks");
        std::fs::create_dir(&disk_dir).unwrap();
        let disks =
            Arc::new(FakeDisks { dir: disk_dir, full: AtomicBool::new(false), remove_fails: AtomicUsize::new(0) });
        let parts = Parts {
            config: OrchestratorConfig::default(),
            envd: EnvdConfig { poll: Duration::from_millis(1), ..EnvdConfig::default() },
            vmm: Arc::new(vmm.clone()),
            slots: Arc::new(FakeSlots { guest: guest.clone(), held: held.clone() }),
            disks: disks.clone(),
            boot: GuestBoot { kernel: "/kernel".into(), initramfs: "/initramfs".into(), cmdline: "quiet".into() },
            run_dir: dir.path().join("run"),
            serial_dir: dir.path().join("serial"),
            seed: TokenSeed::new("seed").unwrap(),
        };
        let orchestrator = Orchestrator::start(parts, &store).unwrap();
        Self { dir, store, vmm, guest, held, disks, orchestrator }
    }

    fn sandbox(&self) -> NewSandbox {
        NewSandbox {
            template: TemplateId::new(),
            alias: Some("base".into()),
            rootfs: "/rootfs".into(),
            disk_size: None,
            shape: MachineShape { vcpus: 1, memory: Bytes::mib(256) },
            defaults: GuestDefaults { env: BTreeMap::new(), user: Some("user".into()), workdir: None },
            metadata: BTreeMap::new(),
            timeout: None,
            secure: true,
            private_traffic: false,
        }
    }

    fn assert_nothing_is_held(&self) {
        assert_eq!(self.vmm.live(), Vec::<String>::new());
        assert_eq!(self.held.load(Ordering::SeqCst), 0, "slots");
        assert_eq!(count(&self.disks.dir), 0, "disks");
        assert_eq!(count(&self.dir.path().join("run")), 0, "work dirs");
        assert_eq!(self.rows(), 0, "intent rows");
    }

    fn rows(&self) -> usize {
        self.store.table::<serde_json::Value>("sandboxes", 1).list_blocking().unwrap().len()
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
    let info = bench.orchestrator.create(bench.sandbox(), Box::new(())).await.unwrap();
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
    let error = bench.orchestrator.create(bench.sandbox(), Box::new(())).await.unwrap_err();
    assert!(matches!(error, CreateError::Step { step: "start machine", .. }), "{error:?}");
    eventually(|| (bench.rows() == 0).then_some(())).await.expect("the intent row goes");
    bench.assert_nothing_is_held();

    bench.disks.full.store(true, Ordering::SeqCst);
    let error = bench.orchestrator.create(bench.sandbox(), Box::new(())).await.unwrap_err();
    assert!(matches!(error, CreateError::NoSpace { .. }), "{error:?}");
    eventually(|| (bench.rows() == 0).then_some(())).await.expect("the intent row goes");
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_sandbox_can_be_deleted_while_its_guest_does_not_answer() {
    let bench = Bench::new().await;
    bench.guest.healthy.store(false, Ordering::SeqCst);
    let (orchestrator, sandbox) = (bench.orchestrator.clone(), bench.sandbox());
    let create = tokio::spawn(async move { orchestrator.create(sandbox, Box::new(())).await });
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
        let create = tokio::spawn(async move { orchestrator.create(sandbox, Box::new(())).await });
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
    let create = tokio::spawn(async move { orchestrator.create(sandbox, Box::new(())).await });
    let name = eventually(|| bench.vmm.live().first().cloned()).await.unwrap();
    bench.vmm.crash(&name, "out of memory");
    let error = tokio::time::timeout(PATIENCE, create).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(error, CreateError::Step { step: "wait for the guest agent", .. }), "{error:?}");
}

#[tokio::test]
async fn a_create_whose_client_hangs_up_goes_on() {
    let bench = Bench::new().await;
    bench.vmm.plan_next(FakePlan { boot_takes: Duration::from_millis(50), ..FakePlan::default() });
    let create = bench.orchestrator.create(bench.sandbox(), Box::new(()));
    assert!(tokio::time::timeout(Duration::from_millis(5), create).await.is_err());
    eventually(|| bench.orchestrator.list().first().filter(|info| info.phase == Phase::Running).map(|_| ()))
        .await
        .expect("it runs");
}

#[tokio::test]
async fn an_expired_sandbox_is_ended_with_its_reason() {
    let bench = Bench::new().await;
    let sandbox = NewSandbox { timeout: Some(Duration::from_millis(50)), ..bench.sandbox() };
    let id = bench.orchestrator.create(sandbox, Box::new(())).await.unwrap().id;
    assert_eq!(bench.gone(id).await, Some(Ended::Expired));
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn connect_never_shortens_and_timeout_may() {
    let bench = Bench::new().await;
    let info = bench.orchestrator.create(bench.sandbox(), Box::new(())).await.unwrap();
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
    let id = bench.orchestrator.create(bench.sandbox(), Box::new(())).await.unwrap().id;
    bench.vmm.crash(&format!("aenv-{id}"), "triple fault");
    assert_eq!(bench.gone(id).await, Some(Ended::MachineEnded("triple fault".into())));
    let message = bench.orchestrator.get(id).unwrap_err().to_string();
    assert!(message.contains("triple fault"), "{message}");
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_delete_that_cannot_finish_says_so_and_the_next_one_finishes_it() {
    let bench = Bench::new().await;
    let id = bench.orchestrator.create(bench.sandbox(), Box::new(())).await.unwrap().id;
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
    let id = bench.orchestrator.create(bench.sandbox(), Box::new(())).await.unwrap().id;
    let deletes = futures::future::join_all((0..8).map(|_| bench.orchestrator.delete(id))).await;
    assert!(deletes.iter().all(Result::is_ok), "{deletes:?}");
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn closing_ends_every_sandbox_and_refuses_new_ones() {
    let bench = Bench::new().await;
    for _ in 0..4 {
        bench.orchestrator.create(bench.sandbox(), Box::new(())).await.unwrap();
    }
    bench.orchestrator.close(PATIENCE).await.unwrap();
    bench.assert_nothing_is_held();
    assert!(matches!(bench.orchestrator.create(bench.sandbox(), Box::new(())).await, Err(CreateError::ShuttingDown)));
}

#[tokio::test]
async fn what_a_killed_server_left_is_ended_by_the_next_one() {
    let bench = Bench::with(FakeVmm::with_processes()).await;
    let id = bench.orchestrator.create(bench.sandbox(), Box::new(())).await.unwrap().id;
    // A killed server runs no destructor and closes nothing: its successor sees the same store and processes.
    let leftovers = end_leftovers(&bench.store, bench.disks.as_ref()).await.unwrap();
    assert_eq!(leftovers, Leftovers { ended: 1, ..Leftovers::default() });
    assert_eq!(bench.rows(), 0);
    assert_eq!(count(&bench.disks.dir), 0);
    eventually(|| bench.vmm.live().is_empty().then_some(())).await.expect("the VMM process is gone");
    assert!(matches!(bench.gone(id).await, Some(Ended::MachineEnded(_))));
}
