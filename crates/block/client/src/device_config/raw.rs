//! The JSON as it is written.

use std::path::PathBuf;

use aenv_block_overlaybd::Mode;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as ModeError, StrDeserializer};
use serde::{Deserialize, Deserializer, Serialize};
use uuid::Uuid;

use super::{DeviceConfig, DeviceConfigError, DownloadConfig, Lower, UpperConfig, field};

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
pub(super) struct Raw {
    #[serde(deserialize_with = "text", skip_serializing_if = "Option::is_none")]
    repo_blob_url: Option<String>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    lowers: Vec<RawLower>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "RawUpper::is_empty")]
    upper: RawUpper,
    #[serde(deserialize_with = "text", skip_serializing_if = "Option::is_none")]
    result_file: Option<String>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "is_default")]
    download: DownloadConfig,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "is_default")]
    acceleration_layer: bool,
    #[serde(deserialize_with = "text", skip_serializing_if = "Option::is_none")]
    record_trace_path: Option<String>,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct RawLower {
    #[serde(deserialize_with = "text", skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    #[serde(deserialize_with = "text", skip_serializing_if = "Option::is_none")]
    dir: Option<String>,
    #[serde(deserialize_with = "text", skip_serializing_if = "Option::is_none")]
    digest: Option<String>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Option::is_none")]
    size: Option<u64>,
    #[serde(deserialize_with = "text", skip_serializing_if = "Option::is_none")]
    repo_blob_url: Option<String>,
    #[serde(deserialize_with = "text", skip_serializing_if = "Option::is_none")]
    uuid: Option<String>,
    #[serde(deserialize_with = "text", skip_serializing)]
    target_file: Option<String>,
    #[serde(deserialize_with = "text", skip_serializing)]
    target_digest: Option<String>,
    #[serde(deserialize_with = "text", skip_serializing)]
    gzip_index: Option<String>,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct RawUpper {
    #[serde(deserialize_with = "text", skip_serializing_if = "Option::is_none")]
    mode: Option<String>,
    #[serde(deserialize_with = "text", skip_serializing_if = "Option::is_none")]
    data: Option<String>,
    #[serde(deserialize_with = "text", skip_serializing_if = "Option::is_none")]
    index: Option<String>,
    #[serde(deserialize_with = "text", skip_serializing)]
    target: Option<String>,
    #[serde(deserialize_with = "text", skip_serializing)]
    gzip_index: Option<String>,
}

impl RawUpper {
    fn is_empty(&self) -> bool {
        self.data.is_none() && self.index.is_none()
    }
}

/// An absent value, `null` and an empty one are the same.
fn text<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(Option::<String>::deserialize(from)?.filter(|text| !text.is_empty()))
}

fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Layers that keep their data elsewhere: another format, which would be read wrongly.
const TURBO: &str = "turbo layers are not supported";

impl TryFrom<Raw> for DeviceConfig {
    type Error = DeviceConfigError;

    fn try_from(raw: Raw) -> Result<Self, DeviceConfigError> {
        let lowers = raw.lowers.into_iter().enumerate().map(|(number, lower)| lower.parse(number));
        let config = Self {
            lowers: lowers.collect::<Result<_, _>>()?,
            upper: raw.upper.parse()?,
            repo_blob_url: raw.repo_blob_url,
            result_file: raw.result_file.map(PathBuf::from),
            download: raw.download,
            acceleration_layer: raw.acceleration_layer,
            record_trace_path: raw.record_trace_path.map(PathBuf::from),
        };
        config.check()?;
        Ok(config)
    }
}

impl RawLower {
    fn parse(self, number: usize) -> Result<Lower, DeviceConfigError> {
        for (key, value) in
            [("targetFile", &self.target_file), ("targetDigest", &self.target_digest), ("gzipIndex", &self.gzip_index)]
        {
            if value.is_some() {
                return Err(field(format!("lowers[{number}].{key}"), TURBO));
            }
        }
        let uuid = self.uuid.as_deref().map(Uuid::parse_str).transpose();
        let uuid = uuid.map_err(|error| field(format!("lowers[{number}].uuid"), error.to_string()))?;
        Ok(Lower {
            file: self.file.map(PathBuf::from),
            dir: self.dir.map(PathBuf::from),
            digest: self.digest,
            size: self.size,
            repo_blob_url: self.repo_blob_url,
            uuid: uuid.filter(|uuid| !uuid.is_nil()),
        })
    }
}

impl RawUpper {
    fn parse(self) -> Result<Option<UpperConfig>, DeviceConfigError> {
        for (key, value) in [("upper.target", &self.target), ("upper.gzipIndex", &self.gzip_index)] {
            if value.is_some() {
                return Err(field(key, TURBO));
            }
        }
        let mode = self.mode.as_deref().map_or(Ok(Mode::Log), |mode| {
            let text: StrDeserializer<'_, ModeError> = mode.into_deserializer();
            Mode::deserialize(text).map_err(|error| field("upper.mode", error.to_string()))
        })?;
        let index = self.index.filter(|_| mode != Mode::Sparse); // ignored there
        match (self.data, index) {
            (Some(data), index) => Ok(Some(UpperConfig { mode, data: data.into(), index: index.map(PathBuf::from) })),
            (None, Some(_)) => Err(field("upper.data", "an upper with an index needs it")),
            // A mode alone asks for one.
            (None, None) if self.mode.is_some() => Err(field("upper.data", "an upper needs it")),
            (None, None) => Ok(None),
        }
    }
}

impl From<DeviceConfig> for Raw {
    fn from(config: DeviceConfig) -> Self {
        let path = |path: PathBuf| path.to_string_lossy().into_owned();
        let lower = |lower: Lower| RawLower {
            file: lower.file.map(path),
            dir: lower.dir.map(path),
            digest: lower.digest,
            size: lower.size,
            repo_blob_url: lower.repo_blob_url,
            uuid: lower.uuid.map(|uuid| uuid.to_string()),
            ..RawLower::default()
        };
        let upper = |upper: UpperConfig| RawUpper {
            mode: Some(mode_text(upper.mode).to_owned()),
            data: Some(path(upper.data)),
            index: upper.index.map(path),
            ..RawUpper::default()
        };
        Self {
            repo_blob_url: config.repo_blob_url,
            lowers: config.lowers.into_iter().map(lower).collect(),
            upper: config.upper.map(upper).unwrap_or_default(),
            result_file: config.result_file.map(path),
            download: config.download,
            acceleration_layer: config.acceleration_layer,
            record_trace_path: config.record_trace_path.map(path),
        }
    }
}

fn mode_text(mode: Mode) -> &'static str {
    match mode {
        Mode::Log => "logStructured",
        Mode::Hybrid => "hybridLogStructured",
        Mode::Sparse => "sparse",
    }
}
