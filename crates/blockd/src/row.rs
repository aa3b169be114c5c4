//! What the store keeps of a device: enough to bring it back, or to undo it, after a crash between any two steps.

use std::path::PathBuf;

use aenv_block_client::{DeviceConfig, DeviceSpec, Uppers};
use aenv_block_export::ExportRecord;
use aenv_model::Bytes;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The table of devices, and the version of its rows.
pub(crate) const TABLE: (&str, u32) = ("devices", 1);

/// A device's row, by its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeviceRow {
    /// What was asked for.
    pub(crate) spec: DeviceSpec,
    /// Where it is in its life.
    pub(crate) stage: Stage,
    /// What it is made of now.
    pub(crate) config: DeviceConfig,
    /// Its length when it was last known.
    pub(crate) size: Bytes,
    /// Where it is seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) export: Option<ExportRecord>,
    /// A restack has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) restacking: Option<Restacking>,
    /// A merge writes this file. Until it is a lower, it is nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) merging: Option<PathBuf>,
    /// Layers that restacks and merges of this device made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) made: Vec<PathBuf>,
    /// Files that are no longer lowers and are to be deleted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) garbage: Vec<PathBuf>,
}

/// Where a device is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Stage {
    /// It is being made; a crash undoes it.
    Creating,
    /// It is there; a crash brings it back.
    Ready,
    /// It is being closed; a crash goes on with that.
    Closing(Uppers),
}

/// The upper with `uuid` becomes the layer at `layer`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Restacking {
    /// Where the sealed file goes.
    pub(crate) layer: PathBuf,
    /// UUID of the upper that is sealed: the upper that follows has another.
    pub(crate) uuid: Uuid,
}

impl DeviceRow {
    /// The row of a device that is about to be made.
    pub(crate) fn intent(spec: &DeviceSpec) -> Self {
        let mut config = spec.config.clone();
        config.lowers = spec.config.layers().to_vec();
        config.acceleration_layer = false; // it is no layer: those that restacks make would come to lie on it
        Self {
            spec: spec.clone(),
            stage: Stage::Creating,
            config,
            size: Bytes(0),
            export: None,
            restacking: None,
            merging: None,
            made: Vec::new(),
            garbage: Vec::new(),
        }
    }

    /// Layers that are not this device's alone: those it was made with.
    pub(crate) fn base(&self) -> usize {
        self.spec.config.layers().len()
    }

    /// Whether a file is this device's own: made by it, and in the directory of its upper. Files elsewhere are the caller's.
    pub(crate) fn owns(&self, file: &std::path::Path) -> bool {
        let directory = self.spec.config.upper.as_ref().and_then(|upper| upper.data.parent());
        directory.is_some() && file.parent() == directory && self.made.iter().any(|made| made == file)
    }
}
