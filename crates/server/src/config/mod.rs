//! The node's configuration. Each part's settings live beside their reader; this only nests them.
//!
//! Precedence per key: environment variable, then file, then built-in default. Read once, handed on as values.

mod identity;
mod load;
mod repository;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use aenv_block_client::ExportChoice;
use aenv_image::{CacheConfig, GcConfig, ImporterConfig, RegistryPrefix};
use aenv_model::{Bytes, MachineShape};
use aenv_network::{EgressConfig, Ipv4Block, Ipv4Net};
use aenv_orchestrator::{BlanksConfig, EnvdConfig, OrchestratorConfig, StandbyConfig};
use aenv_template::TemplateConfig;
use aenv_vmm_driver::{DiskLimit, RateLimit};
use serde::Deserialize;

pub use identity::{NodeIdentityConfig, ObservabilityConfig};
pub use repository::{
    BackendConfig, BackendKind, CompressionAlgorithm, OssConfig, PosixConfig, PublishCompressionConfig, SnapshotConfig,
};

pub use load::{LoadConfigError, Loaded, load, parse};

/// Everything a node can be told.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Base of all local state.
    pub home_path: PathBuf,
    /// Sockets, private directories of sandboxes, network namespaces: what may vanish with the host's next boot.
    pub runtime_path: PathBuf,
    /// Downloads and probe results: what only costs time when it is lost. Nodes of one host may share it.
    pub cache_path: PathBuf,
    /// How guest code is run.
    pub virtualization_mode: VirtualizationMode,
    /// Where the API listens. Set by `API_ADDR`.
    pub api_addr: SocketAddr,
    /// The QEMU driver.
    pub qemu: QemuConfig,
    /// The guest kernel.
    pub kernel: KernelConfig,
    /// The guest agent.
    pub guest: GuestConfig,
    /// Readiness of the guest agent.
    pub envd: EnvdConfig,
    /// Defaults of machines.
    pub machine: MachineConfig,
    /// Lives of sandboxes.
    pub orchestrator: OrchestratorConfig,
    /// Pools of prepared resources.
    pub pool: PoolConfig,
    /// Addresses on the host.
    pub network: NetworkConfig,
    /// Images and registries.
    pub image: ImageConfig,
    /// The storage daemon.
    pub ublk: StorageConfig,
    /// Template builds.
    pub template_build: TemplateConfig,
    /// Sandboxes' tokens.
    pub sandbox: SandboxConfig,
    /// Host names of sandboxes.
    pub sandbox_proxy: SandboxProxyConfig,
    /// What the node tells of itself.
    pub observability: ObservabilityConfig,
    /// Whether it speaks TLS.
    pub tls: TlsConfig,
    /// Who it is.
    pub node_identity: NodeIdentityConfig,
    /// What nodes share.
    pub snapshot: SnapshotConfig,
    /// Where that is.
    pub backend: BackendConfig,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            home_path: "/var/lib/aenv".into(),
            runtime_path: "/run/aenv".into(),
            cache_path: "$AENV_HOME/cache".into(),
            virtualization_mode: VirtualizationMode::Auto,
            api_addr: SocketAddr::from((Ipv4Addr::LOCALHOST, 8000)),
            qemu: QemuConfig::default(),
            kernel: KernelConfig::default(),
            guest: GuestConfig::default(),
            envd: EnvdConfig::default(),
            machine: MachineConfig::default(),
            orchestrator: OrchestratorConfig::default(),
            pool: PoolConfig::default(),
            network: NetworkConfig::default(),
            image: ImageConfig::default(),
            ublk: StorageConfig::default(),
            template_build: TemplateConfig::default(),
            sandbox: SandboxConfig::default(),
            sandbox_proxy: SandboxProxyConfig::default(),
            observability: ObservabilityConfig::default(),
            tls: TlsConfig::default(),
            node_identity: NodeIdentityConfig::default(),
            snapshot: SnapshotConfig::default(),
            backend: BackendConfig::default(),
        }
    }
}

/// `[tls]`: with both, the API is served by TLS alone. The files are read again when they change.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct TlsConfig {
    /// PEM: the certificate, and what lies between it and its root.
    pub certificate_path: Option<PathBuf>,
    /// PEM: its key.
    pub key_path: Option<PathBuf>,
}

/// How guest code is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VirtualizationMode {
    /// KVM where a probe boots a guest with it, else emulation.
    Auto,
    /// KVM or nothing.
    Kvm,
    /// Emulation, even where KVM works.
    Tcg,
}

/// `[qemu]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct QemuConfig {
    /// The binary; default: `qemu-system-x86_64` in `PATH`.
    pub binary_path: Option<PathBuf>,
}

/// `[kernel]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct KernelConfig {
    /// A kernel image of one's own; default: the distribution's package.
    pub image_path: Option<PathBuf>,
    /// Its modules (like `/lib/modules/RELEASE`); default: where the distribution keeps them.
    pub modules_path: Option<PathBuf>,
}

/// `[guest]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct GuestConfig {
    /// The static guest agent; default: `aenv-guest` beside the server's own binary.
    pub agent_path: Option<PathBuf>,
    /// Kernels with their initial file systems, by content. Nodes of one host may share it.
    pub kit_path: PathBuf,
}

impl Default for GuestConfig {
    fn default() -> Self {
        Self { agent_path: None, kit_path: "$AENV_HOME/guest".into() }
    }
}

/// `[machine]`: machines whose maker says nothing.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct MachineConfig {
    /// vCPUs, at least 1.
    pub vcpu_count: u32,
    /// Memory in MiB, at least 128.
    pub mem_size_mib: u64,
    /// How fast a sandbox may use its disk.
    pub disk_rate_limit: DiskRateLimitConfig,
}

impl Default for MachineConfig {
    fn default() -> Self {
        Self { vcpu_count: 2, mem_size_mib: 1024, disk_rate_limit: DiskRateLimitConfig::default() }
    }
}

impl MachineConfig {
    /// The default machine.
    #[must_use]
    pub fn shape(&self) -> MachineShape {
        MachineShape { vcpus: self.vcpu_count, memory: Bytes::mib(self.mem_size_mib) }
    }
}

/// `[machine.disk_rate_limit]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct DiskRateLimitConfig {
    /// Whether there are any limits.
    pub enabled: bool,
    /// Bytes per second, reads and writes together; 0: no limit.
    pub bandwidth_bytes_per_sec: u64,
    /// Bytes that may be moved at once beyond that.
    pub bandwidth_burst_bytes: u64,
    /// Requests per second; 0: no limit.
    pub iops: u64,
    /// Requests that may be made at once beyond that.
    pub iops_burst: u64,
}

impl DiskRateLimitConfig {
    /// The limits in force.
    #[must_use]
    pub fn limit(&self) -> DiskLimit {
        if !self.enabled {
            return DiskLimit::default();
        }
        DiskLimit {
            bandwidth: RateLimit { per_second: self.bandwidth_bytes_per_sec, burst: self.bandwidth_burst_bytes },
            operations: RateLimit { per_second: self.iops, burst: self.iops_burst },
        }
    }
}

/// `[pool]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct PoolConfig {
    /// Slots kept ready.
    pub low_watermark: usize,
    /// Most slots kept ready under pressure.
    pub high_watermark: usize,
    /// Machines kept ready.
    pub sandbox: StandbyConfig,
    /// VMMs kept ready.
    pub vmm: BlanksConfig,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self { low_watermark: 2, high_watermark: 64, sandbox: StandbyConfig::default(), vmm: BlanksConfig::default() }
    }
}

/// `[network]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NetworkConfig {
    /// Addresses of ours on the host.
    pub internal: InternalNetworkConfig,
    /// What may leave sandboxes.
    pub egress: EgressNetworkConfig,
}

/// `[network.egress]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct EgressNetworkConfig {
    /// Whether anything may leave. If not, nothing of the host is changed for it, and sandboxes reach nothing.
    pub enabled: bool,
    /// Whether the host's `net.ipv4.ip_forward` is switched on if it is off.
    pub set_ip_forward: bool,
    /// Networks that no sandbox reaches, whatever its policy.
    pub always_denied_cidrs: Vec<Ipv4Net>,
    /// The sandboxes' resolver; default: the host's first that is not on loopback, else 8.8.8.8.
    pub resolver: Option<Ipv4Addr>,
}

impl Default for EgressNetworkConfig {
    fn default() -> Self {
        let EgressConfig { enabled, set_ip_forward, always_denied, resolver, internal: _ } = EgressConfig::default();
        Self { enabled, set_ip_forward, always_denied_cidrs: always_denied, resolver }
    }
}

impl NetworkConfig {
    /// What the network itself is told.
    #[must_use]
    pub fn egress(&self) -> EgressConfig {
        let EgressNetworkConfig { enabled, set_ip_forward, always_denied_cidrs, resolver } = self.egress.clone();
        EgressConfig {
            enabled,
            set_ip_forward,
            always_denied: always_denied_cidrs,
            internal: vec![self.internal.host_interaction_cidr.net()],
            resolver: Some(resolver.unwrap_or_else(aenv_network::host_resolver)),
        }
    }
}

/// `[network.internal]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct InternalNetworkConfig {
    /// Addresses of sandboxes for others on the host; no sandbox reaches them (`10.11.0.0/16`).
    #[serde(deserialize_with = "parsed")]
    pub host_interaction_cidr: Ipv4Block,
    /// Where the two addresses of each slot's veth pair come from (`10.12.0.0/16`).
    #[serde(deserialize_with = "parsed")]
    pub veth_cidr: Ipv4Block,
}

impl Default for InternalNetworkConfig {
    fn default() -> Self {
        Self { host_interaction_cidr: Ipv4Block::DEFAULT_HOST_INTERACTION, veth_cidr: Ipv4Block::DEFAULT_VETH }
    }
}

fn parsed<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

/// `[image]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    /// How short names are completed and which registries are allowed.
    pub resolver: ResolverConfig,
    /// Layers on this host.
    pub cache: ImageCacheConfig,
}

/// `[image.cache]`: layers made from images, and blocks of layers that are read from registries as needed.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct ImageCacheConfig {
    /// Where it is. Nodes of one host may share it.
    pub root_dir: PathBuf,
    /// GiB of converted layers beyond which those that are not in use are removed; absent: no bound.
    pub capacity_gb: Option<u64>,
    /// Blocks of remote layers.
    pub remote_blocks: RemoteBlocksConfig,
    /// Removing what nothing uses.
    pub gc: GcConfig,
}

impl ImageCacheConfig {
    /// What the cache itself is told.
    #[must_use]
    pub fn cache(&self) -> CacheConfig {
        CacheConfig { capacity: self.capacity_gb.map(Bytes::gib), gc: self.gc.clone(), ..CacheConfig::default() }
    }
}

impl Default for ImageCacheConfig {
    fn default() -> Self {
        Self {
            root_dir: "$AENV_HOME/image-cache".into(),
            capacity_gb: Some(100),
            remote_blocks: RemoteBlocksConfig::default(),
            gc: GcConfig::default(),
        }
    }
}

/// `[image.cache.remote_blocks]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct RemoteBlocksConfig {
    /// GiB of blocks kept.
    pub max_size_gb: u64,
}

impl Default for RemoteBlocksConfig {
    fn default() -> Self {
        Self { max_size_gb: 10 }
    }
}

/// `[ublk]`: the storage daemon, `aenv-blockd`.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct StorageConfig {
    /// The binary; default: `aenv-blockd` beside the server's own.
    pub daemon_binary_path: Option<PathBuf>,
    /// Where it listens. Servers of one host may share it, if they share `daemon_state_path` too.
    pub daemon_socket_path: PathBuf,
    /// What it keeps: which devices there are.
    pub daemon_state_path: PathBuf,
    /// Where it logs.
    pub daemon_log_path: PathBuf,
    /// TCP address of its metrics; empty: only on its socket.
    pub daemon_metrics_listen_addr: String,
    /// How devices reach the kernel.
    pub export: ExportChoice,
    /// Layers and uppers.
    pub overlaybd: OverlaybdConfig,
}

impl Default for StorageConfig {
    fn default() -> Self {
        Self {
            daemon_binary_path: None,
            daemon_socket_path: "$AENV_RUNTIME/ublk-daemon.sock".into(),
            daemon_state_path: "$AENV_HOME/blockd".into(),
            daemon_log_path: "$AENV_HOME/logs/ublk-daemon.log".into(),
            daemon_metrics_listen_addr: String::new(),
            export: ExportChoice::default(),
            overlaybd: OverlaybdConfig::default(),
        }
    }
}

/// `[ublk.overlaybd]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct OverlaybdConfig {
    /// Layout of new uppers.
    pub runtime_upper_mode: UpperMode,
    /// Whether layers that are read from registries are fetched whole in the background.
    pub download_enable: bool,
}

impl Default for OverlaybdConfig {
    fn default() -> Self {
        Self { runtime_upper_mode: UpperMode::HybridLogStructured, download_enable: false }
    }
}

/// Layout of a writable upper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum UpperMode {
    /// First writes are appended, rewrites go in place.
    HybridLogStructured,
    /// Every write is appended.
    LogStructured,
    /// Every sector has its place in a sparse file.
    Sparse,
}

/// `[image.resolver]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct ResolverConfig {
    /// Image of a build that names none.
    pub default_image: String,
    /// Registries that short names are looked up in, in order.
    pub search_registries: Vec<RegistryPrefix>,
    /// Registries that may be used; absent: any; empty: none.
    pub allowed_registries: Option<Vec<String>>,
    /// Whether images of ordinary layers may be used; else only those made for lazy loading.
    pub convert_standard_oci: bool,
    /// References that begin with one of these are looked up among their image's referrers for a lazily loaded form.
    pub try_referrers_overlaybd_prefixes: Vec<String>,
    /// Registries spoken to without TLS, as `HOST[:PORT]`. Loopback addresses need not be named.
    pub plain_http_registries: Vec<String>,
}

impl Default for ResolverConfig {
    fn default() -> Self {
        Self {
            default_image: "ubuntu:24.04".to_owned(),
            search_registries: ImporterConfig::default().search_registries,
            allowed_registries: None,
            convert_standard_oci: true,
            try_referrers_overlaybd_prefixes: Vec::new(),
            plain_http_registries: Vec::new(),
        }
    }
}

/// `[sandbox]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct SandboxConfig {
    /// What tokens are derived from; default: a file of the node's own.
    pub access_token_hash_seed: Option<String>,
}

/// `[sandbox_proxy]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct SandboxProxyConfig {
    /// Domains under which `{port}-{sandboxID}.{domain}` reaches a sandbox. The first is told to clients.
    pub domains: Vec<String>,
}
