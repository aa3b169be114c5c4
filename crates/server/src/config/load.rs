//! Reading the configuration: file, environment, placeholders, checks.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use aenv_network::GUEST_LINK;
use serde::Deserialize as _;
use toml::{Table, Value};

use super::{BackendKind, Config, InternalNetworkConfig, NetworkConfig};

/// File read when nobody names one; it may be absent.
const DEFAULT_FILE: &str = "config/default.toml";

/// Stands for the resolved `home_path` in path values. Not read from the shell's environment.
const HOME_PLACEHOLDER: &str = "$AENV_HOME";

/// Stands for the resolved `runtime_path`, in the path of the storage daemon's socket.
const RUNTIME_PLACEHOLDER: &str = "$AENV_RUNTIME";

/// Environment variables that override a key, with the kind of value they carry.
const OVERRIDES: &[(&str, &str, Kind)] = &[
    ("API_ADDR", "api_addr", Kind::Text),
    ("AENV_HOME_PATH", "home_path", Kind::Text),
    ("AENV_RUNTIME_PATH", "runtime_path", Kind::Text),
    ("AENV_VIRTUALIZATION_MODE", "virtualization_mode", Kind::Text),
    ("AENV_QEMU_BINARY_PATH", "qemu.binary_path", Kind::Text),
    ("AENV_KERNEL_IMAGE_PATH", "kernel.image_path", Kind::Text),
    ("AENV_GUEST_AGENT_PATH", "guest.agent_path", Kind::Text),
    ("AENV_SANDBOX_ACCESS_TOKEN_HASH_SEED", "sandbox.access_token_hash_seed", Kind::Text),
    ("AENV_SANDBOX_PROXY_DOMAINS", "sandbox_proxy.domains", Kind::List),
    ("AENV_UBLK_DAEMON_BINARY_PATH", "ublk.daemon_binary_path", Kind::Text),
    ("AENV_SNAPSHOT_LOCAL_CACHE_PATH", "snapshot.local_cache_path", Kind::Text),
    ("AENV_SNAPSHOT_STORE", "backend.posix_fs.snapshot_store", Kind::Text),
    ("AENV_NODE_ID", "node_identity.node_id", Kind::Text),
    ("AENV_CLUSTER_ID", "node_identity.cluster_id", Kind::Text),
    ("AENV_SERVICE_INSTANCE_ID", "node_identity.service_instance_id", Kind::Text),
    ("AENV_UBLK_DAEMON_METRICS_LISTEN_ADDR", "ublk.daemon_metrics_listen_addr", Kind::Text),
];

/// Every key, for suggestions; a test keeps it in step with the types.
const KEYS: &[&str] = &[
    "api_addr",
    "backend.oss.access_key_id",
    "backend.oss.access_key_secret",
    "backend.oss.addressing_style",
    "backend.oss.bucket",
    "backend.oss.cache_max_size_gb",
    "backend.oss.credential_process",
    "backend.oss.endpoint",
    "backend.oss.prefix",
    "backend.oss.region",
    "backend.oss.security_token",
    "backend.posix_fs.snapshot_store",
    "cache_path",
    "envd.init_timeout_secs",
    "envd.poll_ms",
    "envd.version",
    "guest.agent_path",
    "guest.kit_path",
    "home_path",
    "image.cache.capacity_gb",
    "image.cache.gc.enabled",
    "image.cache.gc.high_watermark_ratio",
    "image.cache.gc.interval_secs",
    "image.cache.gc.low_watermark_ratio",
    "image.cache.gc.min_age_secs",
    "image.cache.remote_blocks.max_size_gb",
    "image.cache.root_dir",
    "image.resolver.allowed_registries",
    "image.resolver.convert_standard_oci",
    "image.resolver.default_image",
    "image.resolver.plain_http_registries",
    "image.resolver.search_registries",
    "image.resolver.try_referrers_overlaybd_prefixes",
    "kernel.image_path",
    "kernel.modules_path",
    "machine.disk_rate_limit.bandwidth_burst_bytes",
    "machine.disk_rate_limit.bandwidth_bytes_per_sec",
    "machine.disk_rate_limit.enabled",
    "machine.disk_rate_limit.iops",
    "machine.disk_rate_limit.iops_burst",
    "machine.mem_size_mib",
    "machine.vcpu_count",
    "network.egress.always_denied_cidrs",
    "network.egress.enabled",
    "network.egress.resolver",
    "network.egress.set_ip_forward",
    "network.internal.host_interaction_cidr",
    "network.internal.veth_cidr",
    "node_identity.cluster_id",
    "node_identity.node_id",
    "node_identity.service_instance_id",
    "observability.audit_path",
    "observability.enabled",
    "orchestrator.auto_resume_min_sandbox_timeout_secs",
    "orchestrator.default_sandbox_timeout_secs",
    "orchestrator.max_concurrent_expiries",
    "orchestrator.max_concurrent_starts",
    "orchestrator.max_queued_starts",
    "orchestrator.on_stop",
    "orchestrator.resource_timeout_secs",
    "orchestrator.sample_interval_secs",
    "pool.high_watermark",
    "pool.low_watermark",
    "pool.sandbox.idle_secs",
    "pool.sandbox.size",
    "pool.sandbox.templates",
    "pool.vmm.size",
    "qemu.binary_path",
    "runtime_path",
    "sandbox.access_token_hash_seed",
    "sandbox_proxy.domains",
    "snapshot.local_cache_path",
    "snapshot.publish_compression.algorithm",
    "snapshot.publish_compression.enabled",
    "snapshot.publish_compression.workers",
    "snapshot.repository_backend",
    "snapshot.sweep_interval_secs",
    "template_build.max_cached_steps",
    "template_build.max_concurrent_builds",
    "template_build.max_upload_mb",
    "template_build.max_uploads_mb",
    "template_build.timeout_secs",
    "tls.certificate_path",
    "tls.key_path",
    "ublk.daemon_binary_path",
    "ublk.daemon_log_path",
    "ublk.daemon_metrics_listen_addr",
    "ublk.daemon_socket_path",
    "ublk.daemon_state_path",
    "ublk.export",
    "ublk.overlaybd.download_enable",
    "ublk.overlaybd.runtime_upper_mode",
    "virtualization_mode",
];

#[derive(Debug, Clone, Copy)]
enum Kind {
    Text,
    List,
}

/// A configuration with what should be told about it.
#[derive(Debug)]
pub struct Loaded {
    /// The configuration.
    pub config: Config,
    /// Unknown keys with the nearest known one.
    pub warnings: Vec<String>,
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum LoadConfigError {
    /// The named file cannot be read.
    #[error("read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    /// It is not TOML.
    #[error("{path} is not valid TOML")]
    Syntax { path: PathBuf, source: Box<toml::de::Error> },
    /// A value is not what its key takes.
    #[error("{origin}: {key} = {value}: {problem}")]
    Value { origin: String, key: String, value: String, problem: String },
}

/// Reads the file that `named` or `AENV_CONFIG_PATH` names, else `config/default.toml` if there is one, and applies
/// the environment.
pub fn load(named: Option<&Path>) -> Result<Loaded, LoadConfigError> {
    let named = named.map(Path::to_owned).or_else(|| std::env::var_os("AENV_CONFIG_PATH").map(PathBuf::from));
    let path = named.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_FILE));
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if named.is_none() && error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(source) => return Err(LoadConfigError::Read { path, source }),
    };
    parse(&text, &path, |name| std::env::var_os(name))
}

/// The configuration that `text` (of the file `path`) and `environment` give.
pub fn parse(
    text: &str,
    path: &Path,
    environment: impl Fn(&str) -> Option<OsString>,
) -> Result<Loaded, LoadConfigError> {
    let mut table: Table =
        text.parse().map_err(|source| LoadConfigError::Syntax { path: path.to_owned(), source: Box::new(source) })?;
    let mut origins = Vec::new();
    for (variable, key, kind) in OVERRIDES {
        let Some(value) = environment(variable).and_then(|value| value.into_string().ok()) else { continue };
        let value = value.trim();
        if value.is_empty() {
            continue; // blank keeps the file's value
        }
        let value = match kind {
            Kind::Text => Value::String(value.to_owned()),
            Kind::List => {
                let items = value.split(',').map(str::trim).filter(|item| !item.is_empty());
                Value::Array(items.map(|item| Value::String(item.to_owned())).collect())
            }
        };
        set(&mut table, key, value);
        origins.push((*key, *variable));
    }
    let mut unknown = Vec::new();
    let root = Value::Table(table);
    let mut note = |key: serde_ignored::Path<'_>| unknown.push(key.to_string());
    let deserializer = serde_ignored::Deserializer::new(root.clone(), &mut note);
    let mut track = serde_path_to_error::Track::new();
    let config = Config::deserialize(serde_path_to_error::Deserializer::new(deserializer, &mut track));
    let refuse = |key: &str, problem: String| {
        let origin = origins.iter().find(|(overridden, _)| *overridden == key);
        LoadConfigError::Value {
            origin: origin.map_or_else(|| path.display().to_string(), |(_, variable)| (*variable).to_owned()),
            key: key.to_owned(),
            value: lookup(&root, key).map_or_else(|| "(absent)".to_owned(), Value::to_string),
            problem,
        }
    };
    let mut config =
        config.map_err(|error| refuse(&track.path().to_string(), error.to_string().trim_end().to_owned()))?;
    check(&mut config).map_err(|(key, problem)| refuse(key, problem))?;
    resolve_paths(&mut config, path);
    Ok(Loaded { config, warnings: unknown.iter().map(|key| unknown_key(path, key)).collect() })
}

/// Rules that the types do not carry.
fn check(config: &mut Config) -> Result<(), (&'static str, String)> {
    if config.machine.vcpu_count == 0 {
        return Err(("machine.vcpu_count", "expected at least 1".to_owned()));
    }
    if config.machine.mem_size_mib < 128 {
        return Err(("machine.mem_size_mib", "expected at least 128 (MiB)".to_owned()));
    }
    if config.template_build.timeout.is_zero() {
        return Err(("template_build.timeout_secs", "expected at least 1".to_owned()));
    }
    if config.pool.low_watermark > config.pool.high_watermark {
        return Err((
            "pool.low_watermark",
            format!("expected at most high_watermark ({})", config.pool.high_watermark),
        ));
    }
    check_network(&config.network)?;
    let limit = &config.machine.disk_rate_limit;
    if limit.enabled {
        let buckets = [
            ("bandwidth_bytes_per_sec", limit.bandwidth_bytes_per_sec, limit.bandwidth_burst_bytes),
            ("iops", limit.iops, limit.iops_burst),
        ];
        for (name, sustained, burst) in buckets {
            if burst > 0 && sustained == 0 {
                let key = match name {
                    "iops" => "machine.disk_rate_limit.iops_burst",
                    _ => "machine.disk_rate_limit.bandwidth_burst_bytes",
                };
                return Err((key, format!("expected {name} above 0 beside it")));
            }
        }
    }
    match (&config.tls.certificate_path, &config.tls.key_path) {
        (Some(_), None) => return Err(("tls.key_path", "expected beside tls.certificate_path".to_owned())),
        (None, Some(_)) => return Err(("tls.certificate_path", "expected beside tls.key_path".to_owned())),
        _ => {}
    }
    if let Err(error) = config.image.cache.gc.check() {
        return Err(("image.cache.gc.low_watermark_ratio", error.to_string()));
    }
    if config.snapshot.repository_backend == Some(BackendKind::Oss)
        && let Some(key) = config.backend.oss.missing()
    {
        return Err((key, "expected a value, with snapshot.repository_backend = \"oss\"".to_owned()));
    }
    let metrics = config.ublk.daemon_metrics_listen_addr.trim();
    if !metrics.is_empty() && metrics.parse::<SocketAddr>().is_err() {
        return Err(("ublk.daemon_metrics_listen_addr", "expected an address with a port, or nothing".to_owned()));
    }
    let mut domains = Vec::new();
    for domain in &config.sandbox_proxy.domains {
        let name = domain.to_ascii_lowercase();
        let name = name.strip_suffix('.').unwrap_or(&name).to_owned();
        if !is_dns_name(&name) {
            return Err(("sandbox_proxy.domains", format!("{domain:?} is not a DNS name")));
        }
        if !domains.contains(&name) {
            domains.push(name);
        }
    }
    config.sandbox_proxy.domains = domains;
    Ok(())
}

/// Addresses of ours are enough, and nobody has two meanings.
fn check_network(network: &NetworkConfig) -> Result<(), (&'static str, String)> {
    const HOST_INTERACTION: &str = "network.internal.host_interaction_cidr";
    const VETH: &str = "network.internal.veth_cidr";
    let InternalNetworkConfig { host_interaction_cidr, veth_cidr } = network.internal;
    for (key, block, least) in [(HOST_INTERACTION, host_interaction_cidr, 32_768), (VETH, veth_cidr, 65_536)] {
        if block.size() < least {
            return Err((key, format!("{} addresses, expected at least {least}", block.size())));
        }
        if block.net().contains(&GUEST_LINK) || GUEST_LINK.contains(&block.net()) {
            return Err((key, format!("overlaps {GUEST_LINK}, the link of every guest")));
        }
    }
    if veth_cidr.net().contains(&host_interaction_cidr.net()) || host_interaction_cidr.net().contains(&veth_cidr.net())
    {
        return Err((VETH, format!("overlaps host_interaction_cidr ({host_interaction_cidr})")));
    }
    let resolver = network.egress.resolver.filter(|address| address.is_loopback() || address.is_unspecified());
    if let Some(address) = resolver {
        return Err(("network.egress.resolver", format!("{address} means another host to each guest")));
    }
    Ok(())
}

fn is_dns_name(name: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(label)
}

/// Replaces the placeholder and makes relative paths relative to the file's directory.
fn resolve_paths(config: &mut Config, file: &Path) {
    let base = std::path::absolute(file).ok().and_then(|file| file.parent().map(Path::to_owned)).unwrap_or_default();
    config.home_path = base.join(&config.home_path);
    let home = config.home_path.clone();
    let resolve = |path: &mut PathBuf| {
        *path = match path.strip_prefix(HOME_PLACEHOLDER) {
            Ok(rest) => home.join(rest),
            Err(_) => base.join(&*path),
        };
    };
    let storage = &mut config.ublk;
    let paths = [
        &mut config.runtime_path,
        &mut config.cache_path,
        &mut config.guest.kit_path,
        &mut config.image.cache.root_dir,
        &mut config.snapshot.local_cache_path,
        &mut config.backend.posix_fs.snapshot_store,
        &mut storage.daemon_state_path,
        &mut storage.daemon_log_path,
    ];
    paths.into_iter().for_each(resolve);
    if !config.observability.audit_path.as_os_str().is_empty() {
        resolve(&mut config.observability.audit_path);
    }
    match storage.daemon_socket_path.strip_prefix(RUNTIME_PLACEHOLDER) {
        Ok(rest) => storage.daemon_socket_path = config.runtime_path.join(rest),
        Err(_) => resolve(&mut storage.daemon_socket_path),
    }
    let optional = [
        &mut storage.daemon_binary_path,
        &mut config.qemu.binary_path,
        &mut config.kernel.image_path,
        &mut config.kernel.modules_path,
        &mut config.guest.agent_path,
        &mut config.tls.certificate_path,
        &mut config.tls.key_path,
    ];
    optional.into_iter().flatten().for_each(resolve);
}

fn unknown_key(path: &Path, key: &str) -> String {
    let nearest = KEYS.iter().min_by_key(|known| strsim::damerau_levenshtein(known, key));
    let hint = nearest.map(|known| format!("; did you mean {known}?")).unwrap_or_default();
    format!("{}: unknown key {key} is ignored{hint}", path.display())
}

fn set(table: &mut Table, key: &str, value: Value) {
    match key.split_once('.') {
        None => _ = table.insert(key.to_owned(), value),
        Some((section, rest)) => {
            let entry = table.entry(section.to_owned()).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(inner) = entry {
                set(inner, rest, value);
            }
        }
    }
}

fn lookup<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    key.split('.').try_fold(value, |value, part| value.get(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Loaded, LoadConfigError> {
        parse(text, Path::new("/etc/aenv/node.toml"), |_| None)
    }

    #[test]
    fn an_empty_file_gives_the_defaults() {
        let loaded = read("").unwrap();
        assert_eq!(loaded.config.home_path, Path::new("/var/lib/aenv"));
        assert_eq!(loaded.config.orchestrator.default_timeout.as_secs(), 300);
        assert!(loaded.warnings.is_empty());
    }

    #[test]
    fn an_unknown_key_is_told_with_the_nearest_known_one() {
        let loaded = read("[machine]\nvcpu_cuont = 3\n").unwrap();
        assert_eq!(loaded.warnings.len(), 1);
        assert!(loaded.warnings[0].contains("machine.vcpu_cuont"), "{:?}", loaded.warnings);
        assert!(loaded.warnings[0].contains("did you mean machine.vcpu_count?"), "{:?}", loaded.warnings);
    }

    #[test]
    fn a_wrong_value_is_told_with_key_value_and_what_is_allowed() {
        let error = read("virtualization_mode = \"xen\"").unwrap_err().to_string();
        for part in ["virtualization_mode", "xen", "auto", "kvm", "tcg"] {
            assert!(error.contains(part), "{error} lacks {part}");
        }
        let error = read("[machine]\nmem_size_mib = \"lots\"").unwrap_err().to_string();
        assert!(error.contains("machine.mem_size_mib = \"lots\""), "{error}");
        let error = read("[machine.disk_rate_limit]\nenabled = true\niops_burst = 5").unwrap_err().to_string();
        assert!(error.contains("machine.disk_rate_limit.iops_burst = 5: expected iops above 0"), "{error}");
        let error = read("[orchestrator]\non_stop = \"sleep\"").unwrap_err().to_string();
        for part in ["orchestrator.on_stop = \"sleep\"", "pause", "leave", "delete"] {
            assert!(error.contains(part), "{error} lacks {part}");
        }
        let error = read("[snapshot]\nrepository_backend = \"oss\"\n[backend.oss]\nendpoint = \"http://s\"");
        let error = error.unwrap_err().to_string();
        assert!(error.contains("backend.oss.bucket = (absent): expected a value"), "{error}");
        let error = read("[snapshot]\nrepository_backend = \"tape\"").unwrap_err().to_string();
        assert!(error.contains("posix_fs") && error.contains("oss"), "{error}");
        let error = read("[machine]\nvcpu_count = 0").unwrap_err().to_string();
        assert!(error.contains("machine.vcpu_count = 0: expected at least 1"), "{error}");
    }

    #[test]
    fn networks_that_overlap_or_are_too_small_are_told_which() {
        let internal = |text: &str| read(&format!("[network.internal]\n{text}")).unwrap_err().to_string();
        let error = internal("veth_cidr = \"10.12.0.0/17\"");
        assert!(error.contains("network.internal.veth_cidr = \"10.12.0.0/17\": 32768 addresses"), "{error}");
        let error = internal("veth_cidr = \"10.10.0.0/15\"");
        assert!(
            error.contains("veth_cidr = \"10.10.0.0/15\": overlaps host_interaction_cidr (10.11.0.0/16)"),
            "{error}"
        );
        let error = internal("host_interaction_cidr = \"169.254.0.0/16\"");
        assert!(error.contains("host_interaction_cidr") && error.contains("169.254.0.20/30"), "{error}");
        let error = read("[network.egress]\nresolver = \"127.0.0.1\"").unwrap_err().to_string();
        assert!(error.contains("network.egress.resolver = \"127.0.0.1\""), "{error}");
        let error = read("[network.egress]\nalways_denied_cidrs = [\"10.0.0.0/8\", \"x\"]").unwrap_err().to_string();
        assert!(error.contains("network.egress.always_denied_cidrs"), "{error}");
        let loaded = read("[network.egress]\nalways_denied_cidrs = []\nresolver = \"192.0.2.1\"").unwrap();
        let egress = loaded.config.network.egress();
        assert_eq!((egress.always_denied.len(), egress.internal.len(), egress.enabled), (0, 1, true));
        assert_eq!(read("").unwrap().config.network.egress.always_denied_cidrs.len(), 6);
    }

    #[test]
    fn the_environment_wins_and_is_named_when_wrong() {
        let environment = |name: &str| (name == "API_ADDR").then(|| OsString::from("nowhere"));
        let error = parse("api_addr = \"127.0.0.1:1\"", Path::new("x.toml"), environment).unwrap_err().to_string();
        assert!(error.starts_with("API_ADDR: api_addr = \"nowhere\""), "{error}");
    }

    #[test]
    fn paths_are_relative_to_the_file_and_know_the_home() {
        let config = read("home_path = \"state\"\nruntime_path = \"$AENV_HOME/run\"").unwrap().config;
        assert_eq!(config.home_path, Path::new("/etc/aenv/state"));
        assert_eq!(config.runtime_path, Path::new("/etc/aenv/state/run"));
    }

    #[test]
    fn every_suggested_key_exists() {
        for key in KEYS {
            let mut table = Table::new();
            set(&mut table, key, Value::Array(vec![]));
            // Either the key takes a list, or it is refused as a value: both mean that it is known.
            if let Ok(loaded) = read(&table.to_string()) {
                assert!(loaded.warnings.is_empty(), "{key} is not a key: {:?}", loaded.warnings);
            }
        }
    }
}
