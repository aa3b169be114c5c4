//! How long the stages of operations on sandboxes take, for whoever scrapes the node.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tokio::time::Instant;

/// Upper bounds of the buckets of every duration, in seconds: from a look-up to the import of a large image.
pub const BUCKETS: [f64; 21] = [
    0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    900.0, 1200.0, 1800.0,
];

/// An operation, and a stage of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OperationStage {
    /// `create_cold`, `create_warm`, `fork`, `pause`, `resume`, `rollback` or `snapshot`.
    pub operation: &'static str,
    /// Of an operation with one stage, its name again.
    pub stage: &'static str,
}

impl OperationStage {
    /// A template's image is looked up, or imported.
    pub const RESOLVE_ROOTFS: Self = Self { operation: "create_cold", stage: "resolve_rootfs" };
    /// A sandbox is booted.
    pub const BOOT: Self = Self { operation: "create_cold", stage: "create_sandbox" };
    /// A template or snapshot is looked up, and brought to this node.
    pub const LOAD_SNAPSHOT: Self = Self { operation: "create_warm", stage: "load_snapshot" };
    /// A sandbox goes on from a capture.
    pub const RESTORE: Self = Self { operation: "create_warm", stage: "create_sandbox" };
    /// A sandbox is copied, and its children are started.
    pub const FORK: Self = Self { operation: "fork", stage: "fork" };
    /// A sandbox is copied and its machine ended.
    pub const PAUSE: Self = Self { operation: "pause", stage: "pause" };
    /// A paused sandbox goes on.
    pub const RESUME: Self = Self { operation: "resume", stage: "resume" };
    /// A machine of an earlier instant takes the place of another.
    pub const ROLLBACK: Self = Self { operation: "rollback", stage: "rollback" };
    /// A sandbox is copied, and goes on.
    pub const CAPTURE: Self = Self { operation: "snapshot", stage: "capture" };
    /// A copy is recorded, and given to all nodes.
    pub const PUBLISH: Self = Self { operation: "snapshot", stage: "publish" };
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    operation: &'static str,
    stage: &'static str,
    status: &'static str,
}

/// Counts of all stages. Cloning shares them.
#[derive(Debug, Clone)]
pub struct Stages {
    durations: Family<Outcome, Histogram, fn() -> Histogram>,
    inflight: Family<OperationStage, Gauge>,
}

impl Default for Stages {
    fn default() -> Self {
        Self { durations: Family::new_with_constructor(|| Histogram::new(BUCKETS)), inflight: Family::default() }
    }
}

impl Stages {
    /// Has them shown with `registry`.
    pub fn register(&self, registry: &mut Registry) {
        let (name, help) = ("sandbox_stage_duration", "How long stages of operations on sandboxes took");
        registry.register_with_unit(name, help, Unit::Seconds, self.durations.clone());
        let (name, help) = ("sandbox_stage_inflight", "Stages of operations on sandboxes that are under way");
        registry.register(name, help, self.inflight.clone());
    }

    /// Does `work`, which is `stage`, and counts it.
    ///
    /// Cancel safety: as that of `work`, which is not counted then.
    pub async fn time<T, E>(&self, stage: OperationStage, work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let begun = Instant::now();
        let under_way = UnderWay::new(self.inflight.get_or_create(&stage).clone());
        let result = work.await;
        drop(under_way);
        let OperationStage { operation, stage } = stage;
        let status = if result.is_ok() { "ok" } else { "error" };
        self.durations.get_or_create(&Outcome { operation, stage, status }).observe(begun.elapsed().as_secs_f64());
        result
    }
}

struct UnderWay(Gauge);

impl UnderWay {
    fn new(gauge: Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::prometheus_text::encode;

    use super::*;

    #[tokio::test]
    async fn stages_are_counted_by_their_outcome_and_while_they_last() {
        let stages = Stages::default();
        let mut registry = Registry::with_prefix("agentenv");
        stages.register(&mut registry);
        stages.time(OperationStage::PAUSE, async { Ok::<_, ()>(()) }).await.unwrap();
        stages.time(OperationStage::PAUSE, async { Err::<(), _>(()) }).await.unwrap_err();
        let text = || {
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            text
        };
        let inside = stages.time(OperationStage::RESUME, async { Ok::<_, ()>(text()) }).await.unwrap();
        assert!(
            inside.contains("agentenv_sandbox_stage_inflight{operation=\"resume\",stage=\"resume\"} 1\n"),
            "{inside}"
        );
        let after = text();
        for line in [
            "agentenv_sandbox_stage_duration_seconds_count{operation=\"pause\",stage=\"pause\",status=\"ok\"} 1",
            "agentenv_sandbox_stage_duration_seconds_count{operation=\"pause\",stage=\"pause\",status=\"error\"} 1",
            "agentenv_sandbox_stage_inflight{operation=\"resume\",stage=\"resume\"} 0",
        ] {
            assert!(after.lines().any(|found| found == line), "{line} in {after}");
        }
    }
}
