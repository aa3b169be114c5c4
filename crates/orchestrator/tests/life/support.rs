//! A node of fakes: a VMM, slots, disks, a backing of captures, and a stub of the guest agent.

pub(crate) use std::collections::BTreeMap;
pub(crate) use std::io;
pub(crate) use std::net::{Ipv4Addr, SocketAddr};
pub(crate) use std::path::{Path, PathBuf};
pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Mutex};
pub(crate) use std::time::Duration;

pub(crate) use aenv_block_device::{CreateDiskError, Disk, DiskRecord, DiskStore};
pub(crate) use aenv_durable::Store;
pub(crate) use aenv_model::{Bytes, MachineShape, Phase, SandboxId, TemplateId};
pub(crate) use aenv_network::{EgressPolicy, SlotRecord};
pub(crate) use aenv_orchestrator::{
    AskError, BlanksConfig, CreateError, DeleteError, Ended, EnvdConfig, Former, GuestAddress, GuestBoot,
    GuestDefaults, GuestDialer, HowToPause, Image, Keep, NewSandbox, OnExpiry, OnStop, Orchestrator,
    OrchestratorConfig, Parts, SandboxSpec, SlotLease, Slots, Source, StandbyConfig, TakenOver, TokenSeed,
};
pub(crate) use aenv_snapshot::CaptureStore;
pub(crate) use aenv_snapshot::test_support::FakeBacking;
pub(crate) use aenv_vmm_driver::test_support::{FakePlan, FakeVmm};
pub(crate) use aenv_vmm_driver::{DiskLimit, NicSpec};
pub(crate) use async_trait::async_trait;
pub(crate) use axum::Json;
pub(crate) use axum::http::StatusCode;
pub(crate) use axum::routing::{get, post};
pub(crate) use tokio::net::{TcpListener, TcpStream};

/// Far beyond what any of these tests takes: reached only by a hang.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) const DISK_ONLY: HowToPause = HowToPause { disk_only: true, if_responsive: false };

/// The template that machines stand ready for.
pub(crate) const STANDING: &str = "standing";

/// The stub of a guest agent.
#[derive(Debug, Clone)]
pub(crate) struct Guest {
    pub(crate) address: SocketAddr,
    pub(crate) healthy: Arc<AtomicBool>,
    /// `/init` is taken and never answered.
    pub(crate) silent: Arc<AtomicBool>,
    pub(crate) inits: Arc<Mutex<Vec<serde_json::Value>>>,
    /// Commands that run.
    pub(crate) commands: Arc<AtomicUsize>,
    /// How often it was asked what it uses.
    pub(crate) samples: Arc<AtomicUsize>,
    /// What its slots were told that it may reach, in order.
    pub(crate) policies: Arc<Mutex<Vec<EgressPolicy>>>,
}

impl Guest {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let guest = Self {
            address: listener.local_addr().unwrap(),
            healthy: Arc::new(AtomicBool::new(true)),
            silent: Arc::default(),
            inits: Arc::default(),
            policies: Arc::default(),
            commands: Arc::default(),
            samples: Arc::default(),
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
        let (healthy, samples) = (guest.healthy.clone(), guest.samples.clone());
        let usage = move || async move {
            let number = samples.fetch_add(1, Ordering::SeqCst);
            let usage = serde_json::json!({
                "ts": 1, "cpu_count": 2, "cpu_used_pct": 12.5, "mem_total": 4096, "mem_used": number, "mem_cache": 7,
                "mem_total_mib": 0, "mem_used_mib": 0, "disk_used": 1, "disk_total": 2,
            });
            let status = if healthy.load(Ordering::SeqCst) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
            (status, Json(usage))
        };
        let commands = guest.commands.clone();
        let list = move || async move {
            let processes = vec![serde_json::json!({"pid": 1}); commands.load(Ordering::SeqCst)];
            Json(serde_json::json!({ "processes": processes }))
        };
        let router = axum::Router::new()
            .route("/health", get(health))
            .route("/init", post(init))
            .route("/sync", post(sync))
            .route("/metrics", get(usage))
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
pub(crate) struct FakeSlots {
    pub(crate) guest: Guest,
    pub(crate) held: Arc<AtomicUsize>,
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
pub(crate) struct FakeSlot {
    pub(crate) guest: Guest,
    pub(crate) held: Arc<AtomicUsize>,
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
    async fn set_policy(&self, policy: &EgressPolicy) -> io::Result<()> {
        self.guest.policies.lock().unwrap().push(policy.clone());
        Ok(())
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
pub(crate) struct FakeDisks {
    pub(crate) dir: PathBuf,
    pub(crate) full: AtomicBool,
    pub(crate) remove_fails: AtomicUsize,
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
pub(crate) struct Bench {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) store: Store,
    pub(crate) vmm: FakeVmm,
    pub(crate) guest: Guest,
    pub(crate) held: Arc<AtomicUsize>,
    pub(crate) disks: Arc<FakeDisks>,
    pub(crate) backing: Arc<FakeBacking>,
    pub(crate) captures: CaptureStore,
    pub(crate) orchestrator: Orchestrator,
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
    pub(crate) async fn new() -> Self {
        Self::with(FakeVmm::in_memory()).await
    }

    pub(crate) async fn with(vmm: FakeVmm) -> Self {
        Self::with_config(vmm, OrchestratorConfig { on_stop: OnStop::Delete, ..OrchestratorConfig::default() }).await
    }

    pub(crate) async fn with_config(vmm: FakeVmm, config: OrchestratorConfig) -> Self {
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
    pub(crate) async fn start(
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
            boot: GuestBoot {
                kernel: dir.join("kernel"),
                initramfs: dir.join("initramfs"),
                cmdline: "quiet".into(),
                resolver: None,
            },
            run_dir: dir.join("run"),
            disk_limit: DiskLimit::default(),
            serial_dir: dir.join("serial"),
            seed: TokenSeed::new("seed").unwrap(),
        };
        let (orchestrator, taken_over) = Orchestrator::start(parts, store, former, &Default::default()).await.unwrap();
        (orchestrator, captures, taken_over)
    }

    /// Another server on the same home, as after the end of the first.
    pub(crate) async fn restart(&mut self) -> TakenOver {
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

    pub(crate) fn sandbox(&self) -> NewSandbox {
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
            egress: EgressPolicy::default(),
            on_expiry: OnExpiry::Delete,
            auto_resume: false,
            idle_timeout: None,
            lease: None,
            internal: false,
        };
        NewSandbox { spec, source: Source { capture: None, image: Some(image) } }
    }

    pub(crate) fn sandbox_with(&self, change: impl FnOnce(&mut SandboxSpec)) -> NewSandbox {
        let mut sandbox = self.sandbox();
        change(&mut sandbox.spec);
        sandbox
    }

    pub(crate) async fn running(&self) -> SandboxId {
        self.orchestrator.create(self.sandbox()).await.unwrap().id
    }

    pub(crate) fn phase(&self, id: SandboxId) -> Option<Phase> {
        self.orchestrator.get(id).ok().map(|info| info.phase)
    }

    /// Captures on the disk, once what was let go of is gone.
    pub(crate) async fn captures(&self) -> usize {
        self.captures.settle().await;
        count(&self.dir.path().join("captures"))
    }

    pub(crate) fn assert_nothing_is_held(&self) {
        assert_eq!(self.vmm.live(), Vec::<String>::new());
        assert_eq!(self.held.load(Ordering::SeqCst), 0, "slots");
        assert_eq!(count(&self.disks.dir), 0, "disks");
        assert_eq!(count(&self.dir.path().join("run")), 0, "work dirs");
        assert_eq!(self.rows(), 0, "intent rows");
    }

    pub(crate) fn rows(&self) -> usize {
        self.store.table::<serde_json::Value>("sandboxes", 2).list_blocking().unwrap().len()
    }

    pub(crate) async fn gone(&self, id: SandboxId) -> Option<Ended> {
        eventually(|| match self.orchestrator.get(id) {
            Err(AskError::NotFound { ended: Some(why), .. }) => Some(why),
            _ => None,
        })
        .await
    }
}

pub(crate) fn count(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

/// What `look` finds before the patience ends.
pub(crate) async fn eventually<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while tokio::time::Instant::now() < deadline {
        if let Some(found) = look() {
            return Some(found);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    None
}
