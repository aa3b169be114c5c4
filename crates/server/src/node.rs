//! One node, built top to bottom: what exists, in which order it starts, and in which order it stops.

use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aenv_block_device::FileDiskStore;
use aenv_durable::Store;
use aenv_guest_kit::{GuestKit, KitConfig};
use aenv_image::{DiskSize, Importer, ImporterConfig};
use aenv_model::Bytes;
use aenv_network::SlotPool;
use aenv_orchestrator::{GuestBoot, Orchestrator, TokenSeed};
use aenv_proxy::{Proxy, Targets};
use aenv_template::Templates;
use aenv_vmm_driver::Vmm as _;
use aenv_vmm_qemu::{AccelChoice, Qemu};
use anyhow::{Context as _, Result, bail};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config::{Config, VirtualizationMode};
use crate::http::{App, AppParts, NodeRoutes, router};
use crate::secrets::{ApiKey, token_seed};
use crate::serve::serve;

/// File of the home that holds the node's tag.
const TAG_FILE: &str = "node-tag";

/// How long requests that are being answered may go on once all sandboxes have ended.
const DRAIN: Duration = Duration::from_secs(2);

/// A running node. Ends with [`Node::stop`].
#[derive(Debug)]
pub struct Node {
    address: SocketAddr,
    orchestrator: Orchestrator,
    templates: Templates,
    slots: Arc<SlotPool>,
    proxy: Arc<Proxy>,
    stop_serving: CancellationToken,
    serving: JoinHandle<()>,
    runtime_path: PathBuf,
    /// Held for the node's life: a second server on the same home is refused.
    _lock: File,
}

/// Directories of a node below its home and runtime paths.
struct Layout {
    secrets: PathBuf,
    guest: PathBuf,
    cache: PathBuf,
    disks: PathBuf,
    templates: PathBuf,
    imports: PathBuf,
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
            templates: home.join("templates"),
            imports: home.join("imports"),
            serial: home.join("logs/serial"),
            sandboxes: runtime.join("sandboxes"),
            slots: runtime.to_owned(),
        };
        for dir in [&layout.guest, &layout.cache, &layout.disks, &layout.templates, &layout.imports] {
            make_dir(dir)?;
        }
        Ok(layout)
    }
}

impl Node {
    /// Starts every part and serves. Whatever a former server left is ended first, and told.
    pub async fn start(config: Config) -> Result<Self> {
        let layout = Layout::make(&config)?;
        let lock = lock_home(&config.home_path)?;
        make_dir(&layout.slots)?;
        raise_file_limit();
        // Before anything is made that a failure would leave behind; clients wait in the kernel's queue meanwhile.
        let listener = TcpListener::bind(config.api_addr)
            .await
            .with_context(|| format!("listen on {} (API_ADDR)", config.api_addr))?;
        let address = listener.local_addr()?;
        let key = ApiKey::find(&layout.secrets).context("find the API key")?;
        let seed = match &config.sandbox.access_token_hash_seed {
            Some(seed) => seed.clone(),
            None => token_seed(&layout.secrets).context("find the token seed")?,
        };
        let seed = TokenSeed::new(&seed).context("sandbox.access_token_hash_seed must not be blank")?;
        let store = Store::open(&config.home_path.join("node.redb"))?;

        let disks = FileDiskStore::open(layout.disks.clone());
        let disks = Arc::new(disks.with_context(|| format!("open {}", layout.disks.display()))?);
        let leftovers = aenv_orchestrator::end_leftovers(&store, disks.as_ref()).await?;
        if leftovers != Default::default() {
            let (ended, kept, unknown) = (leftovers.ended, leftovers.kept, leftovers.unknown);
            warn!(ended, kept, unknown, "found sandboxes that a former server left");
        }

        let memory = host_memory()?;
        let kit = provision(&config, &layout).await?;
        let vmm = probe_vmm(&config, &layout, &kit).await?;
        info!(vmm = ?vmm.identity().kind, version = vmm.identity().version, kernel = kit.kernel_version, "machines");

        let importer = importer(&config, &layout)?;
        let templates = Templates::start(
            aenv_template::Parts {
                config: config.template_build.clone(),
                dir: layout.templates.clone(),
                importer: Arc::new(importer),
            },
            &store,
        )?;

        let slots = SlotPool::start(aenv_network::NetworkConfig {
            run_dir: layout.slots.clone(),
            tag: node_tag(&config.home_path)?,
            veth_cidr: config.network.internal.veth_cidr,
            low_watermark: config.pool.low_watermark,
            high_watermark: config.pool.high_watermark,
        });
        let slots = Arc::new(slots.await.context("start the network")?);
        let swept = slots.sweep(&[]).await;
        if swept != Default::default() {
            warn!(removed = swept.removed.len(), failed = ?swept.failed, "swept network slots that a former server left");
        }

        let orchestrator = Orchestrator::start(
            aenv_orchestrator::Parts {
                config: config.orchestrator.clone(),
                envd: config.envd.clone(),
                vmm: Arc::new(vmm),
                slots: Arc::clone(&slots) as Arc<dyn aenv_orchestrator::Slots>,
                disks,
                boot: GuestBoot { kernel: kit.kernel, initramfs: kit.initramfs, cmdline: kit.cmdline },
                run_dir: layout.sandboxes,
                serial_dir: layout.serial,
                seed,
            },
            &store,
        );
        let orchestrator = match orchestrator {
            Ok(orchestrator) => orchestrator,
            Err(error) => {
                _ = slots.close().await; // what stays is the next start's to sweep
                return Err(error.into());
            }
        };

        let routes = NodeRoutes { orchestrator: orchestrator.clone() };
        let proxy = Arc::new(Proxy::new(Arc::new(routes), Some(key.text().to_owned())));
        let app = App {
            inner: Arc::new(AppParts {
                proxy: Arc::clone(&proxy),
                targets: Targets::new(config.sandbox_proxy.domains.clone()),
                config,
                memory,
                key,
                orchestrator: orchestrator.clone(),
                templates: templates.clone(),
            }),
        };
        let runtime_path = layout.slots;
        let stop_serving = CancellationToken::new();
        let serving = tokio::spawn(serve(listener, router(app), stop_serving.clone())); // awaited by `stop`
        info!(%address, "listening");
        Ok(Self { address, orchestrator, templates, slots, proxy, stop_serving, serving, runtime_path, _lock: lock })
    }

    /// Where the API listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting, ends every sandbox and build, gives everything back. Reports what did not end in `patience`.
    pub async fn stop(self, patience: Duration) -> Result<()> {
        self.stop_serving.cancel();
        let sandboxes = self.orchestrator.close(patience).await;
        self.proxy.close().await;
        let builds = self.templates.close(patience).await;
        let slots = self.slots.close().await;
        // Connections end with their sandboxes; a client that is slow to take its answer must not hold up the stop.
        let mut serving = self.serving;
        if tokio::time::timeout(DRAIN, &mut serving).await.is_err() {
            serving.abort();
        }
        sandboxes.context("end sandboxes")?;
        builds.context("end builds")?;
        if let Err(left) = slots {
            let left: Vec<_> = left.iter().map(ToString::to_string).collect();
            bail!("close the network: {}", left.join("; "));
        }
        // What is not empty is somebody else's, or left for the next start's sweep.
        for dir in [self.runtime_path.join("sandboxes"), self.runtime_path.join("netns"), self.runtime_path] {
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

fn importer(config: &Config, layout: &Layout) -> Result<Importer> {
    let resolver = &config.image.resolver;
    let importer = Importer::new(ImporterConfig {
        plain_http_hosts: resolver.plain_http_registries.clone(),
        search_registries: resolver.search_registries.clone(),
        allowed_registries: resolver.allowed_registries.clone(),
        disk: DiskSize { slack: Bytes::mib(config.template_build.min_free_disk_mib), ..DiskSize::default() },
        ..ImporterConfig::new(&layout.imports)
    });
    let swept = importer.sweep().context("sweep unfinished imports")?;
    if !swept.is_empty() {
        warn!(imports = swept.len(), "removed imports that a former server left unfinished");
    }
    Ok(importer)
}

fn make_dir(dir: &Path) -> Result<()> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o755).create(dir);
    made.with_context(|| format!("make directory {}", dir.display()))
}

/// Refuses a second server on one home.
fn lock_home(home: &Path) -> Result<File> {
    let path = home.join("node.lock");
    let file = File::create(&path).with_context(|| format!("open {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => bail!("another aenv-server runs on {}", home.display()),
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
