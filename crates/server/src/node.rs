//! One node, built top to bottom: what exists, in which order it starts, and in which order it stops.

use std::collections::BTreeSet;
use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aenv_block_client::{BlockdClient, LayeredDiskStore};
use aenv_block_device::DiskStore;
use aenv_block_overlaybd::Mode;
use aenv_durable::Store;
use aenv_guest_kit::{GuestKit, KitConfig};
use aenv_image::{ImageCache, Importer, ImporterConfig, LeaseKind};
use aenv_model::Bytes;
use aenv_network::SlotPool;
use aenv_orchestrator::{Former, GuestBoot, Orchestrator, TokenSeed};
use aenv_proxy::{Proxy, Targets};
use aenv_snapshot::{CaptureStore, HostBacking};
use aenv_tasks::TaskScope;
use aenv_template::{ImportImage, Templates};
use aenv_vmm_driver::Vmm as _;
use aenv_vmm_qemu::{AccelChoice, Qemu};
use anyhow::{Context as _, Result, bail};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::audit::Audit;
use crate::config::{Config, UpperMode, VirtualizationMode};
use crate::disks::LeasedDisks;
use crate::host::CpuMeter;
use crate::http::{App, AppParts, LastLedger, NodeRoutes, Once, router};
use crate::keys::Keys;
use crate::metrics::{MeteredBacking, Metrics};
use crate::repository;
use crate::secrets::{ApiKey, token_seed};
use crate::serve::serve;
use crate::storage::Storage;
use crate::tls::Tls;
use crate::workshop::NodeWorkshop;

/// File of the home that holds the node's tag.
const TAG_FILE: &str = "node-tag";
/// Locked by the server of a home.
const HOME_LOCK: &str = "node.lock";
/// Locked by the server of a runtime directory.
const RUNTIME_LOCK: &str = "server.lock";

/// How long requests that are being answered may go on once all sandboxes have ended.
const DRAIN: Duration = Duration::from_secs(2);

/// A running node. Ends with [`Node::stop`].
#[derive(Debug)]
pub struct Node {
    address: SocketAddr,
    orchestrator: Orchestrator,
    templates: Templates,
    importer: Arc<Importer>,
    slots: Arc<SlotPool>,
    captures: CaptureStore,
    storage: Storage,
    /// What goes on beside everything: the daemon is watched, the image cache collected.
    beside: TaskScope,
    proxy: Arc<Proxy>,
    stop_serving: CancellationToken,
    serving: JoinHandle<()>,
    runtime_path: PathBuf,
    /// Held for the node's life: a second server on the same home is refused.
    _locks: [File; 2],
}

/// Directories of a node below its home and runtime paths.
struct Layout {
    secrets: PathBuf,
    guest: PathBuf,
    cache: PathBuf,
    disks: PathBuf,
    captures: PathBuf,
    templates: PathBuf,
    uploads: PathBuf,
    serial: PathBuf,
    sandboxes: PathBuf,
    slots: PathBuf,
}

impl Layout {
    fn make(config: &Config) -> Result<Self> {
        let (home, runtime) = (&config.home_path, &config.runtime_path);
        let layout = Self {
            secrets: home.join("secrets"),
            guest: config.guest.kit_path.clone(),
            cache: config.cache_path.clone(),
            disks: home.join("disks"),
            captures: home.join("captures"),
            templates: home.join("templates"),
            uploads: home.join("uploads"),
            serial: home.join("logs/serial"),
            sandboxes: runtime.join("sandboxes"),
            slots: runtime.to_owned(),
        };
        for dir in [&layout.guest, &layout.cache, &layout.disks, &layout.templates] {
            make_dir(dir)?;
        }
        Ok(layout)
    }
}

impl Node {
    /// Starts every part and serves. What a former server left is taken over first, or ended, and told.
    pub async fn start(config: Config) -> Result<Self> {
        let layout = Layout::make(&config)?;
        make_dir(&layout.slots)?;
        let locks = [lock_dir(&config.home_path, HOME_LOCK)?, lock_dir(&config.runtime_path, RUNTIME_LOCK)?];
        raise_file_limit();
        // Before anything is made that a failure would leave behind; clients wait in the kernel's queue meanwhile.
        let listener = TcpListener::bind(config.api_addr)
            .await
            .with_context(|| format!("listen on {} (API_ADDR)", config.api_addr))?;
        let storage = Storage::start(&config).await?;
        // Boxed: all parts of a node on one stack are a lot.
        let started = Box::pin(Self::start_on(storage.clone(), listener, config, layout, locks)).await;
        if started.is_err() {
            storage.stop().await;
        }
        started
    }

    async fn start_on(
        storage: Storage,
        listener: TcpListener,
        config: Config,
        layout: Layout,
        locks: [File; 2],
    ) -> Result<Self> {
        let address = listener.local_addr()?;
        let key = ApiKey::find(&layout.secrets).context("find the API key")?;
        let tls = Tls::load(&config.tls).context("load the certificate ([tls])")?;
        let seed = match &config.sandbox.access_token_hash_seed {
            Some(seed) => seed.clone(),
            None => token_seed(&layout.secrets).context("find the token seed")?,
        };
        let seed = TokenSeed::new(&seed).context("sandbox.access_token_hash_seed must not be blank")?;
        let store = Store::open(&config.home_path.join("node.redb"))?;
        let keys = Keys::load(&store, key)?;
        let metrics = Metrics::default();
        let shared = repository::open(&config, &metrics)?;

        let tag = node_tag(&config.home_path)?;
        let cache = ImageCache::open(&config.image.cache.root_dir, &tag, config.image.cache.cache());
        let cache = cache.context("open the image cache")?;
        let layered = Arc::new(LayeredDiskStore::new(storage.client(), &layout.disks, upper_mode(&config)));
        let disks: Arc<dyn DiskStore> =
            Arc::new(LeasedDisks { disks: Arc::clone(&layered), cache: cache.clone(), metrics: metrics.clone() });
        let backing = HostBacking { client: storage.client(), disks: layered };
        let backing = MeteredBacking { backing, metrics: metrics.clone() };
        let captures = CaptureStore::open(&layout.captures, Arc::new(backing))?;
        let former = Former::read(&store)?;
        // Work of a former server ended with it.
        cache.reconcile(LeaseKind::Operation, BTreeSet::new()).await.context("look through the image cache")?;
        if !former.has_unknown() {
            // Sandboxes that did not outlive the former server need no layers.
            cache.reconcile(LeaseKind::Runtime, former.disks()).await.context("look through the image cache")?;
        }
        let of_templates = aenv_template::captures(&store)?;
        let kept = of_templates.clone().unwrap_or_default();
        if of_templates.is_some() && !former.has_unknown() {
            // With unknown records we cannot tell garbage from theirs.
            let needed = former.captures().union(&kept).copied().collect();
            let swept = captures.sweep(&needed, &former.mapped()).await;
            if swept != Default::default() {
                warn!(removed = swept.removed, failed = ?swept.failed, "swept captures that nobody needs");
            }
        }

        let memory = host_memory()?;
        let kit = provision(&config, &layout).await?;
        let vmm = probe_vmm(&config, &layout, &kit).await?;
        info!(vmm = ?vmm.identity().kind, version = vmm.identity().version, kernel = kit.kernel_version, "machines");

        let importer = importer(&config, cache.clone(), storage.client()).await?;

        let egress = config.network.egress();
        let resolver = egress.resolver.filter(|_| egress.enabled);
        let slots = SlotPool::start(aenv_network::NetworkConfig {
            veth_cidr: config.network.internal.veth_cidr,
            low_watermark: config.pool.low_watermark,
            high_watermark: config.pool.high_watermark,
            egress,
            ..aenv_network::NetworkConfig::new(layout.slots.clone(), tag)
        });
        let slots = Arc::new(slots.await.context("start the network")?);
        let orchestrator = Orchestrator::start(
            aenv_orchestrator::Parts {
                config: config.orchestrator.clone(),
                envd: config.envd.clone(),
                standby: config.pool.sandbox.clone(),
                blanks: config.pool.vmm.clone(),
                vmm: Arc::new(vmm),
                slots: Arc::clone(&slots) as Arc<dyn aenv_orchestrator::Slots>,
                disks,
                captures: captures.clone(),
                disk_limit: config.machine.disk_rate_limit.limit(),
                boot: GuestBoot { kernel: kit.kernel, initramfs: kit.initramfs, cmdline: kit.cmdline, resolver },
                run_dir: layout.sandboxes.clone(),
                serial_dir: layout.serial,
                seed: seed.clone(),
            },
            &store,
            former,
            &kept,
        );
        let started = async {
            let (orchestrator, taken_over) = orchestrator.await?;
            if taken_over != Default::default() {
                info!(?taken_over, "found sandboxes of a former server");
            }
            // After those that were taken over have theirs.
            let swept = slots.sweep(&[]).await;
            if swept != Default::default() {
                let removed = swept.removed.len();
                warn!(removed, failed = ?swept.failed, "swept network slots that a former server left");
            }
            let once = Once::load(&store, TaskScope::new("requests with keys"))?;
            let parts = aenv_template::Parts {
                config: config.template_build.clone(),
                dir: layout.templates.clone(),
                importer: Arc::clone(&importer) as Arc<dyn ImportImage>,
                captures: captures.clone(),
                uploads_dir: layout.uploads,
                workshop: Some(Arc::new(NodeWorkshop { orchestrator: orchestrator.clone() })),
                shared: shared.clone(),
            };
            Ok::<_, anyhow::Error>((Templates::start(parts, &store).await?, orchestrator, once))
        };
        let (templates, orchestrator, once) = match started.await {
            Ok(started) => started,
            Err(error) => {
                _ = slots.close().await; // what stays is the next start's to sweep
                return Err(error);
            }
        };

        let beside = TaskScope::new("node");
        beside.spawn("watch the storage daemon", storage.clone().watch(beside.token()));
        if config.image.cache.gc.enabled {
            beside.spawn("collect the image cache", cache.run(beside.token()));
        }
        if let Some(shared) = shared.filter(|_| !config.snapshot.sweep_interval.is_zero()) {
            let every = config.snapshot.sweep_interval;
            let keeping_up = repository::keep_up(shared.repository, templates.clone(), every, beside.token());
            beside.spawn("keep up the repository", keeping_up);
        }

        let routes = NodeRoutes { orchestrator: orchestrator.clone() };
        let of_node = keys.clone();
        let proxy = Arc::new(Proxy::new(Arc::new(routes), Arc::new(move |key| of_node.is_key(key))));
        let audit = match &config.observability.audit_path {
            path if path.as_os_str().is_empty() => Audit::none(),
            path => {
                let (audit, work) = Audit::to(path.clone()).with_context(|| format!("open {}", path.display()))?;
                beside.spawn("write the audit log", work);
                audit
            }
        };
        if let Some(tls) = tls.clone() {
            beside.spawn("watch the certificate", tls.watch(beside.token()));
        }
        let app = App {
            inner: Arc::new(AppParts {
                proxy: Arc::clone(&proxy),
                seed,
                targets: Targets::new(config.sandbox_proxy.domains.clone()),
                config,
                memory,
                keys,
                audit,
                orchestrator: orchestrator.clone(),
                templates: templates.clone(),
                once,
                slots: Arc::clone(&slots),
                blockd: storage.client(),
                sandboxes_dir: layout.sandboxes,
                captures_dir: layout.captures,
                metrics,
                last_ledger: LastLedger::default(),
                cpu: CpuMeter::default(),
            }),
        };
        let runtime_path = layout.slots;
        let stop_serving = CancellationToken::new();
        let serving = tokio::spawn(serve(listener, tls, router(app), stop_serving.clone())); // awaited by `stop`
        info!(%address, "listening");
        Ok(Self {
            address,
            orchestrator,
            templates,
            importer,
            slots,
            captures,
            storage,
            beside,
            proxy,
            stop_serving,
            serving,
            runtime_path,
            _locks: locks,
        })
    }

    /// Where the API listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting, puts every sandbox away as configured, ends every build, gives everything back. Reports what did not end in `patience`.
    pub async fn stop(self, patience: Duration) -> Result<()> {
        self.stop_serving.cancel();
        // Builds first: they end the sandboxes that they work in.
        let builds = self.templates.close(patience).await;
        let sandboxes = self.orchestrator.close(patience).await;
        self.proxy.close().await;
        let imports = self.importer.close(patience).await;
        let captures = self.captures.close(patience).await;
        let slots = self.slots.close().await;
        let beside = self.beside.close(patience).await;
        self.storage.stop().await;
        // Connections end with their sandboxes; a client that is slow to take its answer must not hold up the stop.
        let mut serving = self.serving;
        if tokio::time::timeout(DRAIN, &mut serving).await.is_err() {
            serving.abort();
        }
        sandboxes.context("end sandboxes")?;
        builds.context("end builds")?;
        imports.context("end imports")?;
        captures.context("let go of captures")?;
        beside.context("end what goes on beside")?;
        if let Err(left) = slots {
            let left: Vec<_> = left.iter().map(ToString::to_string).collect();
            bail!("close the network: {}", left.join("; "));
        }
        _ = std::fs::remove_file(self.runtime_path.join(RUNTIME_LOCK));
        // What is not empty is somebody else's, or left for the next start's sweep.
        for dir in ["blockd/devices", "blockd", "sandboxes", "netns", ""].map(|dir| self.runtime_path.join(dir)) {
            _ = std::fs::remove_dir(dir);
        }
        info!("stopped");
        Ok(())
    }
}

/// Fetches the guest kernel and builds the initramfs if they are not there yet.
pub async fn provision_guest(config: &Config) -> Result<GuestKit> {
    provision(config, &Layout::make(config)?).await
}

async fn provision(config: &Config, layout: &Layout) -> Result<GuestKit> {
    let agent = match &config.guest.agent_path {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("aenv-guest"),
    };
    let kit_config = KitConfig {
        dir: layout.guest.clone(),
        kernel_image: config.kernel.image_path.clone(),
        modules_dir: config.kernel.modules_path.clone(),
        agent,
        cache_dir: layout.cache.join("kernel"),
    };
    aenv_guest_kit::provision(&kit_config, &|line| info!("{line}")).await.context("provision the guest kernel")
}

async fn probe_vmm(config: &Config, layout: &Layout, kit: &GuestKit) -> Result<Qemu> {
    let qemu = aenv_vmm_qemu::QemuConfig {
        binary: config.qemu.binary_path.clone(),
        accel: match config.virtualization_mode {
            VirtualizationMode::Auto => AccelChoice::Auto,
            VirtualizationMode::Kvm => AccelChoice::Kvm,
            VirtualizationMode::Tcg => AccelChoice::Tcg,
        },
        ..aenv_vmm_qemu::QemuConfig::new(layout.cache.join("kvm-probe.json"))
    };
    Qemu::probe(qemu, &kit.kernel, &kit.initramfs).await.context("find a VMM")
}

async fn importer(config: &Config, cache: ImageCache, client: BlockdClient) -> Result<Arc<Importer>> {
    let resolver = &config.image.resolver;
    let importer_config = ImporterConfig {
        plain_http_hosts: resolver.plain_http_registries.clone(),
        search_registries: resolver.search_registries.clone(),
        allowed_registries: resolver.allowed_registries.clone(),
        convert_standard_oci: resolver.convert_standard_oci,
        referrers_prefixes: resolver.try_referrers_overlaybd_prefixes.clone(),
        ..ImporterConfig::default()
    };
    let importer = Importer::new(importer_config, cache, client);
    let swept = importer.sweep().await.context("sweep unfinished imports")?;
    if !swept.is_empty() {
        warn!(imports = swept.len(), "ended conversions that a former server left unfinished");
    }
    Ok(Arc::new(importer))
}

fn upper_mode(config: &Config) -> Mode {
    match config.ublk.overlaybd.runtime_upper_mode {
        UpperMode::HybridLogStructured => Mode::Hybrid,
        UpperMode::LogStructured => Mode::Log,
        UpperMode::Sparse => Mode::Sparse,
    }
}

fn make_dir(dir: &Path) -> Result<()> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o755).create(dir);
    made.with_context(|| format!("make directory {}", dir.display()))
}

/// Refuses a second server on one home, and on one runtime directory: they would take each other's storage daemon and
/// machines for their own.
fn lock_dir(dir: &Path, name: &str) -> Result<File> {
    let path = dir.join(name);
    let file = File::create(&path).with_context(|| format!("open {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => bail!("another aenv-server runs on {}", dir.display()),
        Err(std::fs::TryLockError::Error(error)) => Err(error).with_context(|| format!("lock {}", path.display())),
    }
}

/// A short name that tells this node's kernel objects from those of other nodes on the host. Kept in the home, so that
/// it is the same however the home is spelled or wherever it is moved.
fn node_tag(home: &Path) -> Result<String> {
    let path = home.join(TAG_FILE);
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    if (1..=8).contains(&kept.len()) && kept.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(kept);
    }
    let tag = hex::encode(rand::random::<[u8; 3]>());
    aenv_durable::atomic_write(&path, tag.as_bytes(), 0o644).with_context(|| format!("write {}", path.display()))?;
    Ok(tag)
}

/// Each connection is a descriptor, and most of them two: as many as the host allows.
fn raise_file_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised =
        getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        warn!(%error, "could not raise the limit of open files");
    }
}

/// `MemTotal` of `/proc/meminfo`.
fn host_memory() -> Result<Bytes> {
    let text = std::fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).context("/proc/meminfo has no MemTotal")?;
    let kib = line.trim().trim_end_matches(" kB").parse().context("read MemTotal of /proc/meminfo")?;
    Ok(Bytes::kib(kib))
}
