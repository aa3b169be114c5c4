//! The node's configuration. Each part's settings live beside their reader; this only nests them.
//!
//! Precedence per key: environment variable, then file, then built-in default. Read once, handed on as values.

mod load;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use aenv_image::{ImporterConfig, RegistryPrefix};
use aenv_model::{Bytes, MachineShape};
use aenv_network::Ipv4Block;
use aenv_orchestrator::{EnvdConfig, OrchestratorConfig};
use aenv_template::TemplateConfig;
use serde::Deserialize;

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
    /// Template builds.
    pub template_build: TemplateConfig,
    /// Sandboxes' tokens.
    pub sandbox: SandboxConfig,
    /// Host names of sandboxes.
    pub sandbox_proxy: SandboxProxyConfig,
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
            template_build: TemplateConfig::default(),
            sandbox: SandboxConfig::default(),
            sandbox_proxy: SandboxProxyConfig::default(),
        }
    }
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
}

impl Default for MachineConfig {
    fn default() -> Self {
        Self { vcpu_count: 2, mem_size_mib: 1024 }
    }
}

impl MachineConfig {
    /// The default machine.
    #[must_use]
    pub fn shape(&self) -> MachineShape {
        MachineShape { vcpus: self.vcpu_count, memory: Bytes::mib(self.mem_size_mib) }
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
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self { low_watermark: 2, high_watermark: 64 }
    }
}

/// `[network]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NetworkConfig {
    /// Addresses of ours on the host.
    pub internal: InternalNetworkConfig,
}

/// `[network.internal]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct InternalNetworkConfig {
    /// Where the two addresses of each slot's veth pair come from (`10.12.0.0/16`).
    #[serde(deserialize_with = "parsed")]
    pub veth_cidr: Ipv4Block,
}

impl Default for InternalNetworkConfig {
    fn default() -> Self {
        Self { veth_cidr: Ipv4Block::DEFAULT_VETH }
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
    /// Registries spoken to without TLS, as `HOST[:PORT]`. Loopback addresses need not be named.
    pub plain_http_registries: Vec<String>,
}

impl Default for ResolverConfig {
    fn default() -> Self {
        Self {
            default_image: "ubuntu:24.04".to_owned(),
            search_registries: ImporterConfig::new("").search_registries,
            allowed_registries: None,
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
