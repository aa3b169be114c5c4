//! What the node counts, as Prometheus reads it. All names are in this file and in the orchestrator's `stages`.
//!
//! Labels come from closed sets: no id, no name and no address of anybody is told, as everybody may read it.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_block_client::DeviceConfig;
use aenv_block_device::DiskRecord;
use aenv_objects::{Condition, Key, ObjectError, ObjectErrorKind, ObjectInfo, ObjectStore, Version};
use aenv_orchestrator::{BUCKETS, Stages};
use aenv_snapshot::Backing;
use aenv_vmm_driver::Machine;
use async_trait::async_trait;
use bytes::Bytes;
use prometheus_client::encoding::{EncodeLabelSet, prometheus_text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tokio::time::Instant;
use uuid::Uuid;

/// What all names begin with.
const PREFIX: &str = "agentenv";
/// What the answer to a scrape says it is.
pub(crate) const CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

type Durations<L> = Family<L, Histogram, fn() -> Histogram>;

fn durations<L: Clone + std::hash::Hash + Eq>() -> Durations<L> {
    Family::new_with_constructor(|| Histogram::new(BUCKETS))
}

/// A request, as it is counted.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct HttpLabels {
    pub(crate) method: &'static str,
    pub(crate) route: String,
    pub(crate) route_source: &'static str,
    pub(crate) status: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceLabels {
    operation: &'static str,
    status: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ObjectLabels {
    operation: &'static str,
    artifact: &'static str,
    status: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UploadLabels {
    operation: &'static str,
    artifact: &'static str,
}

/// Everything that is counted as it happens. Cloning shares it.
#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    http: Durations<HttpLabels>,
    devices: Durations<DeviceLabels>,
    objects: Durations<ObjectLabels>,
    uploaded: Family<UploadLabels, Counter>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self { http: durations(), devices: durations(), objects: durations(), uploaded: Family::default() }
    }
}

/// What there is at the moment of a scrape.
#[derive(Debug, Default)]
pub(crate) struct Now {
    /// Sandboxes by phase.
    pub(crate) phases: Vec<(String, i64)>,
    /// Things made ahead, by pool.
    pub(crate) pools: Vec<(&'static str, i64)>,
    /// Owned, live, and of those without an owner, by kind. Empty if that could not be found out.
    pub(crate) ledger: Vec<(&'static str, [i64; 3])>,
    /// Creates since the start of the node, by outcome.
    pub(crate) creates: [(&'static str, u64); 2],
}

impl Metrics {
    /// A request was answered, or its answer begun.
    pub(crate) fn answered(&self, request: &HttpLabels, begun: Instant) {
        self.http.get_or_create(request).observe(begun.elapsed().as_secs_f64());
    }

    /// An operation of the storage daemon.
    pub(crate) async fn device<T, E>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let begun = Instant::now();
        let result = work.await;
        let labels = DeviceLabels { operation, status: status(&result) };
        self.devices.get_or_create(&labels).observe(begun.elapsed().as_secs_f64());
        result
    }

    /// All of it as text.
    pub(crate) fn render(&self, stages: &Stages, now: &Now) -> Result<String, fmt::Error> {
        let mut registry = Registry::with_prefix(PREFIX);
        let help = "Time from a request to the head of its answer";
        registry.register_with_unit("http_request_duration", help, Unit::Seconds, self.http.clone());
        let help = "Calls of the storage daemon";
        registry.register_with_unit("ublk_operation_duration", help, Unit::Seconds, self.devices.clone());
        let help = "Calls of the snapshot repository's store";
        registry.register_with_unit("snapshot_oss_operation_duration", help, Unit::Seconds, self.objects.clone());
        let help = "Bytes written to the snapshot repository's store";
        registry.register_with_unit("snapshot_oss_upload", help, Unit::Bytes, self.uploaded.clone());
        stages.register(&mut registry);
        now.register(&mut registry);
        let mut text = String::new();
        prometheus_text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

impl Now {
    fn register(&self, registry: &mut Registry) {
        let gauges = |values: &mut dyn Iterator<Item = (&'static str, String, i64)>| {
            let family = Family::<Vec<(&'static str, String)>, Gauge>::default();
            for (label, value, count) in values {
                family.get_or_create(&vec![(label, value)]).set(count);
            }
            family
        };
        let mut phases = self.phases.iter().map(|(phase, count)| ("phase", phase.clone(), *count));
        registry.register("sandboxes", "Sandboxes of this node", gauges(&mut phases));
        let mut pools = self.pools.iter().map(|(pool, count)| ("pool", (*pool).to_owned(), *count));
        registry.register("pool_depth", "Things that were made ahead of their use", gauges(&mut pools));
        let names = [
            ("ledger_owned", "What records of this node own"),
            ("ledger_live", "What is on this host of that kind"),
            ("ledger_unowned", "What is on this host without a record that owns it: if it stays, a leak"),
        ];
        for (place, (name, help)) in names.into_iter().enumerate() {
            let mut kinds = self.ledger.iter().map(|(kind, counts)| ("kind", (*kind).to_owned(), counts[place]));
            registry.register(name, help, gauges(&mut kinds));
        }
        let creates = Family::<Vec<(&'static str, &'static str)>, Counter>::default();
        for (status, count) in self.creates {
            creates.get_or_create(&vec![("status", status)]).inc_by(count);
        }
        registry.register("sandbox_creates", "Creates since the start of this node", creates);
    }
}

fn status<T, E>(result: &Result<T, E>) -> &'static str {
    if result.is_ok() { "ok" } else { "error" }
}

/// A backing whose calls of the storage daemon are counted.
#[derive(Debug)]
pub(crate) struct MeteredBacking<B> {
    pub(crate) backing: B,
    pub(crate) metrics: Metrics,
}

#[async_trait]
impl<B: Backing> Backing for MeteredBacking<B> {
    async fn seal(&self, disk: &DiskRecord) -> io::Result<DeviceConfig> {
        self.metrics.device("restack_snapshot", self.backing.seal(disk)).await
    }

    async fn layers(&self, disk: &DiskRecord) -> io::Result<DeviceConfig> {
        self.backing.layers(disk).await
    }

    async fn show(&self, name: &str, config: &DeviceConfig) -> io::Result<PathBuf> {
        self.metrics.device("acquire_shared_memory", self.backing.show(name, config)).await
    }

    async fn hide(&self, name: &str) -> io::Result<()> {
        self.metrics.device("release", self.backing.hide(name)).await
    }

    async fn shown(&self) -> io::Result<Vec<String>> {
        self.backing.shown().await
    }

    async fn copy_memory(&self, machine: &dyn Machine, layer: &Path, parent: Option<Uuid>) -> io::Result<Uuid> {
        self.backing.copy_memory(machine, layer, parent).await
    }
}

/// A store of objects whose calls are counted.
#[derive(Debug)]
pub(crate) struct MeteredStore {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) metrics: Metrics,
}

impl MeteredStore {
    async fn time<T>(
        &self,
        operation: &'static str,
        artifact: &'static str,
        work: impl Future<Output = Result<T, ObjectError>>,
    ) -> Result<T, ObjectError> {
        let begun = Instant::now();
        let result = work.await;
        // To find nothing is an answer.
        let is_answer = result.as_ref().is_err_and(|error| error.kind() == ObjectErrorKind::NotFound);
        let labels = ObjectLabels { operation, artifact, status: if is_answer { "ok" } else { status(&result) } };
        self.metrics.objects.get_or_create(&labels).observe(begun.elapsed().as_secs_f64());
        result
    }

    fn uploaded(&self, operation: &'static str, artifact: &'static str, bytes: u64) {
        self.metrics.uploaded.get_or_create(&UploadLabels { operation, artifact }).inc_by(bytes);
    }
}

#[async_trait]
impl ObjectStore for MeteredStore {
    fn name(&self) -> &str {
        self.store.name()
    }

    async fn head(&self, key: &Key) -> Result<ObjectInfo, ObjectError> {
        self.time("exists", artifact(key), self.store.head(key)).await
    }

    async fn get(&self, key: &Key, range: Range<u64>) -> Result<Bytes, ObjectError> {
        self.time("get_to_file", artifact(key), self.store.get(key, range)).await
    }

    async fn read(&self, key: &Key, limit: u64) -> Result<(Bytes, Version), ObjectError> {
        self.time("get_bytes", artifact(key), self.store.read(key, limit)).await
    }

    async fn put(&self, key: &Key, bytes: Bytes, condition: Condition) -> Result<Version, ObjectError> {
        let (operation, artifact, size) = ("put_bytes", artifact(key), bytes.len() as u64);
        let put = self.time(operation, artifact, self.store.put(key, bytes, condition)).await?;
        self.uploaded(operation, artifact, size);
        Ok(put)
    }

    async fn put_file(&self, key: &Key, file: &Path) -> Result<(), ObjectError> {
        let (operation, artifact) = ("put_file", artifact(key));
        self.time(operation, artifact, self.store.put_file(key, file)).await?;
        self.uploaded(operation, artifact, tokio::fs::metadata(file).await.map_or(0, |file| file.len()));
        Ok(())
    }

    async fn delete(&self, key: &Key) -> Result<(), ObjectError> {
        self.store.delete(key).await
    }

    async fn list(&self, folder: Option<&Key>) -> Result<Vec<ObjectInfo>, ObjectError> {
        self.store.list(folder).await
    }
}

/// What an object of the repository is, by its key. A layer does not say whether it is of a disk or of memory.
fn artifact(key: &Key) -> &'static str {
    let key = key.as_str();
    match (key.split('/').next(), key.rsplit('/').next()) {
        (Some("managed-layers"), _) => "layer",
        (Some("artifacts"), Some("state")) => "vm_state",
        (Some("artifacts"), Some("capture.json" | "disk.json")) => "manifest",
        (Some("artifacts"), _) => "file",
        (Some("leases"), _) => "lease",
        _ if key.starts_with("catalog/records/") => "record",
        _ if key.starts_with("catalog/aliases/") => "alias",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_is_told_under_its_name() {
        let metrics = Metrics::default();
        let route = "/sandboxes/{sandbox_id}".to_owned();
        let request = HttpLabels { method: "GET", route, route_source: "control_plane", status: "2xx" };
        metrics.answered(&request, Instant::now());
        metrics.device("delete", async { Err::<(), _>(()) }).await.unwrap_err();
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(aenv_objects::LocalStore::open(dir.path()).unwrap());
        let store = MeteredStore { store, metrics: metrics.clone() };
        let key: Key = "catalog/aliases/base".parse().unwrap();
        store.read(&key, 10).await.unwrap_err();
        store.put(&key, Bytes::from_static(b"1234"), Condition::None).await.unwrap();
        let now = Now {
            phases: vec![("running".into(), 3)],
            pools: vec![("vmms", 2)],
            ledger: vec![("disks", [3, 4, 1])],
            creates: [("ok", 3), ("error", 1)],
        };
        let text = metrics.render(&Stages::default(), &now).unwrap();
        for line in [
            "agentenv_http_request_duration_seconds_count{method=\"GET\",route=\"/sandboxes/{sandbox_id}\",\
             route_source=\"control_plane\",status=\"2xx\"} 1",
            "agentenv_ublk_operation_duration_seconds_count{operation=\"delete\",status=\"error\"} 1",
            "agentenv_snapshot_oss_operation_duration_seconds_count{operation=\"get_bytes\",artifact=\"alias\",status=\"ok\"} 1",
            "agentenv_snapshot_oss_upload_bytes_total{operation=\"put_bytes\",artifact=\"alias\"} 4",
            "agentenv_sandboxes{phase=\"running\"} 3",
            "agentenv_pool_depth{pool=\"vmms\"} 2",
            "agentenv_ledger_owned{kind=\"disks\"} 3",
            "agentenv_ledger_live{kind=\"disks\"} 4",
            "agentenv_ledger_unowned{kind=\"disks\"} 1",
            "agentenv_sandbox_creates_total{status=\"error\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
    }
}
