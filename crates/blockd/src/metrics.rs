//! Metrics, as Prometheus reads them. Counted elsewhere; gathered here when somebody asks.

use std::fmt;
use std::sync::Arc;

use aenv_block_source::CacheStats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _, MetricEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use aenv_block_client::{DeviceStats, OperationStats};

use crate::meter::Operation;

/// What all metrics of ours begin with.
const PREFIX: &str = "aenv_blockd";
/// What the answer to a scrape says it is.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What there is to tell.
#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    /// Counts of devices by name.
    pub(crate) devices: Vec<(String, DeviceStats)>,
    /// Devices that do not work.
    pub(crate) broken: u64,
    /// Of the block cache.
    pub(crate) cache: CacheStats,
    /// Bytes that it keeps, and may keep.
    pub(crate) cache_bytes: (u64, u64),
}

/// Where that comes from.
pub(crate) trait Observed: Send + Sync + 'static {
    fn snapshot(&self) -> Snapshot;
}

/// Everything that is observed, as text.
pub(crate) fn render(observed: Arc<dyn Observed>) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(Gathered(observed)));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

struct Gathered(Arc<dyn Observed>);

impl fmt::Debug for Gathered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gathered")
    }
}

impl Collector for Gathered {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Snapshot { devices, broken, cache, cache_bytes: (kept, capacity) } = self.0.snapshot();
        let mut gauge = |name: &str, help: &str, unit: Option<&Unit>, value: u64| {
            let metric = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
            ConstGauge::new(value).encode(metric)
        };
        gauge("devices", "Devices that there are", None, devices.len() as u64)?;
        gauge("broken_devices", "Devices that could not be brought back", None, broken)?;
        gauge("cache_kept", "Blocks of remote layers on disk", Some(&Unit::Bytes), kept)?;
        gauge("cache_capacity", "Blocks of remote layers that may be on disk", Some(&Unit::Bytes), capacity)?;
        let mut counter = |name: &str, help: &str, unit: Option<&Unit>, value: u64| {
            let metric = encoder.encode_descriptor(name, help, unit, MetricType::Counter)?;
            ConstCounter::new(value).encode(metric)
        };
        counter("cache_hits", "Blocks found on disk", None, cache.hits)?;
        counter("cache_fetches", "Fetches from registries", None, cache.fetches)?;
        counter("cache_fetched", "Bytes that came from registries", Some(&Unit::Bytes), cache.fetched_bytes)?;
        counter("cache_evictions", "Blocks that gave way to others", None, cache.evicted)?;
        counter("cache_corrupt", "Blocks that did not match their checksum", None, cache.corrupt)?;
        counter("cache_bypassed", "Blocks not kept, as the disk had no space or failed", None, cache.bypassed)?;

        let each = |mut metric: MetricEncoder<'_>,
                    encode: &dyn Fn(MetricEncoder<'_>, &OperationStats) -> fmt::Result| {
            for (device, stats) in &devices {
                for operation in Operation::ALL {
                    let labels = [("device", device.as_str()), ("operation", operation.name())];
                    encode(metric.encode_family(&labels)?, of(stats, operation))?;
                }
            }
            Ok(())
        };
        let mut family = |name: &str, help: &str, unit: Option<&Unit>, value: fn(&OperationStats) -> u64| {
            let metric = encoder.encode_descriptor(name, help, unit, MetricType::Counter)?;
            each(metric, &|metric, stats| ConstCounter::new(value(stats)).encode(metric))
        };
        family("device_operations", "Requests answered", None, |stats| stats.operations)?;
        family("device_transferred", "Bytes of requests that succeeded", Some(&Unit::Bytes), |stats| stats.bytes)?;
        family("device_errors", "Requests that failed", None, |stats| stats.errors)?;
        let help = "Time from a request to its answer";
        let metric = encoder.encode_descriptor("device_latency", help, Some(&Unit::Seconds), MetricType::Histogram)?;
        each(metric, &|mut metric, stats| {
            let seconds = |bound: &Option<u64>| bound.map_or(f64::INFINITY, |micros| micros as f64 / 1e6);
            let buckets: Vec<(f64, u64)> =
                stats.latency.buckets.iter().map(|(bound, count)| (seconds(bound), *count)).collect();
            let sum = stats.latency.total_micros as f64 / 1e6;
            metric.encode_histogram::<[(&str, &str); 0]>(sum, stats.operations, &buckets, None)
        })
    }
}

fn of(stats: &DeviceStats, operation: Operation) -> &OperationStats {
    match operation {
        Operation::Read => &stats.read,
        Operation::Write => &stats.write,
        Operation::Discard => &stats.discard,
        Operation::Flush => &stats.flush,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meter::Meter;

    struct One;

    impl Observed for One {
        fn snapshot(&self) -> Snapshot {
            let meter = Meter::default();
            meter.count("d", Operation::Write, (0, 4096), || Ok(())).unwrap();
            let cache = CacheStats { hits: 7, ..CacheStats::default() };
            Snapshot { devices: vec![("d".into(), meter.stats())], broken: 0, cache, cache_bytes: (1, 2) }
        }
    }

    #[test]
    fn all_is_told_with_units_and_labels() {
        let text = render(Arc::new(One)).unwrap();
        for line in [
            "aenv_blockd_devices 1",
            "aenv_blockd_cache_kept_bytes 1",
            "aenv_blockd_cache_hits_total 7",
            "aenv_blockd_device_operations_total{device=\"d\",operation=\"write\"} 1",
            "aenv_blockd_device_transferred_bytes_total{device=\"d\",operation=\"write\"} 4096",
            "aenv_blockd_device_errors_total{device=\"d\",operation=\"read\"} 0",
            "aenv_blockd_device_latency_seconds_count{device=\"d\",operation=\"write\"} 1",
            "aenv_blockd_device_latency_seconds_bucket{le=\"+Inf\",device=\"d\",operation=\"write\"} 1",
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
    }
}
