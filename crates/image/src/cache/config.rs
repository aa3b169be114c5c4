//! Settings of the cache.

use std::path::PathBuf;
use std::time::Duration;

use aenv_model::Bytes;
use serde::{Deserialize, Deserializer};

/// `[image.cache]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct CacheConfig {
    /// Where the cache is; where nothing is said, a place in the node's home.
    pub root_dir: Option<PathBuf>,
    /// What converted layers may take, as far as collecting can help it. Nothing is refused for it. `None`: anything.
    #[serde(rename = "capacity_gb", deserialize_with = "gib")]
    pub capacity: Option<Bytes>,
    /// When and what is collected.
    pub gc: GcConfig,
}

/// `[image.cache.gc]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct GcConfig {
    /// Whether the server collects by itself.
    pub enabled: bool,
    /// Pause between two passes.
    #[serde(rename = "interval_secs", deserialize_with = "interval")]
    pub interval: Duration,
    /// What was used in this time stays, whether or not anything refers to it: an import that was interrupted finds the
    /// layers that it had finished.
    #[serde(rename = "min_age_secs", deserialize_with = "secs")]
    pub min_age: Duration,
    /// Beyond this part of the capacity, images go that nobody used lately.
    #[serde(rename = "high_watermark_ratio")]
    pub high_watermark: f64,
    /// Until it is down to this one.
    #[serde(rename = "low_watermark_ratio")]
    pub low_watermark: f64,
}

impl Default for GcConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            interval: DEFAULT_INTERVAL,
            min_age: Duration::from_secs(600),
            high_watermark: 0.95,
            low_watermark: 0.70,
        }
    }
}

const DEFAULT_INTERVAL: Duration = Duration::from_secs(1800);

/// Watermarks that make no sense.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("image.cache.gc: 0 < low_watermark_ratio ({low}) <= high_watermark_ratio ({high}) <= 1 must hold")]
pub struct WatermarkError {
    low: f64,
    high: f64,
}

impl GcConfig {
    /// Whether the watermarks make sense.
    pub fn check(&self) -> Result<(), WatermarkError> {
        let (low, high) = (self.low_watermark, self.high_watermark);
        if 0.0 < low && low <= high && high <= 1.0 { Ok(()) } else { Err(WatermarkError { low, high }) }
    }
}

fn gib<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Bytes>, D::Error> {
    Ok(Option::<u64>::deserialize(deserializer)?.map(|n| Bytes(n.saturating_mul(1 << 30))))
}

fn secs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    Ok(Duration::from_secs(u64::deserialize(deserializer)?))
}

/// Nothing and less stand for the default.
fn interval<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let seconds = u64::try_from(i64::deserialize(deserializer)?).unwrap_or(0);
    Ok(if seconds == 0 { DEFAULT_INTERVAL } else { Duration::from_secs(seconds) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: serde_json::Value) -> CacheConfig {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn keys_are_those_of_the_configuration_file() {
        let config = read(serde_json::json!({"root_dir": "/c", "capacity_gb": 100, "gc": {"interval_secs": -1,
            "min_age_secs": 0, "high_watermark_ratio": 0.5, "low_watermark_ratio": 0.5}}));
        assert_eq!((config.root_dir, config.capacity), (Some("/c".into()), Some(Bytes::gib(100))));
        assert_eq!((config.gc.interval, config.gc.min_age), (DEFAULT_INTERVAL, Duration::ZERO));
        config.gc.check().unwrap();
        assert_eq!(read(serde_json::json!({})), CacheConfig::default());
    }

    #[test]
    fn watermarks_are_in_order() {
        GcConfig::default().check().unwrap();
        for (low, high) in [(0.0, 0.5), (0.6, 0.5), (0.5, 1.1), (f64::NAN, 0.5), (0.5, f64::NAN)] {
            let config = GcConfig { low_watermark: low, high_watermark: high, ..GcConfig::default() };
            config.check().unwrap_err();
        }
    }
}
