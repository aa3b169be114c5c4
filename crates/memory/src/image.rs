//! What a memory image is made of.

use std::path::PathBuf;

use aenv_block_client::{Caching, DeviceConfig, DeviceSpec, Lower};
use aenv_model::Bytes;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A guest's memory at one moment: layers, each over those before it. What none of them has is zeros.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryImage {
    /// Size of the guest's memory.
    pub size: Bytes,
    /// Layers, bottom first. None: memory of a guest that was not started yet.
    pub layers: Vec<MemoryLayer>,
}

/// One layer of a memory image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryLayer {
    /// The file.
    pub path: PathBuf,
    /// Who it is.
    pub uuid: Uuid,
    /// Length of the file.
    pub size: Bytes,
}

/// Merged layers cannot take the place of their sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the layers that were merged are not next to each other in the image")]
pub struct ReplaceError;

impl MemoryImage {
    /// Memory of `size` in which all is zeros.
    #[must_use]
    pub fn empty(size: Bytes) -> Self {
        Self { size, layers: Vec::new() }
    }

    /// This image with what was captured from a mapping of it.
    #[must_use]
    pub fn with_top(&self, layer: MemoryLayer) -> Self {
        let mut image = self.clone();
        image.layers.push(layer);
        image
    }

    /// How many layers a read may have to look through.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.layers.len()
    }

    /// The topmost layer: what [`CaptureOptions::parent`](crate::CaptureOptions::parent) has to be for a guest that runs on
    /// this image.
    #[must_use]
    pub fn top(&self) -> Option<Uuid> {
        self.layers.last().map(|layer| layer.uuid)
    }

    /// Puts `merged` in the place of the layers it was made of, wherever they are by now. Their files are to be deleted once
    /// this is recorded, and nobody else needs them.
    pub fn replace(&mut self, sources: &[MemoryLayer], merged: MemoryLayer) -> Result<(), ReplaceError> {
        let first = sources.first().ok_or(ReplaceError)?;
        let from = self.layers.iter().position(|layer| layer.uuid == first.uuid).ok_or(ReplaceError)?;
        let range = from..from + sources.len();
        if self.layers.get(range.clone()) != Some(sources) {
            return Err(ReplaceError);
        }
        self.layers.splice(range, [merged]);
        Ok(())
    }

    /// The layers as the storage daemon wants them; an image without any is no device. Paths must be absolute.
    #[must_use]
    pub fn to_device_config(&self) -> DeviceConfig {
        let lower =
            |layer: &MemoryLayer| Lower { file: Some(layer.path.clone()), uuid: Some(layer.uuid), ..Lower::default() };
        DeviceConfig { lowers: self.layers.iter().map(lower).collect(), ..DeviceConfig::default() }
    }

    /// A device to be mapped by VMMs: nobody writes, and the host keeps one copy of its pages for all who map it.
    #[must_use]
    pub fn to_device_spec(&self) -> DeviceSpec {
        DeviceSpec { config: self.to_device_config(), new_upper: None, caching: Caching::Shared, read_only: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(n: u128) -> MemoryLayer {
        MemoryLayer { path: format!("/m/{n}").into(), uuid: Uuid::from_u128(n), size: Bytes(8192) }
    }

    fn image(layers: impl IntoIterator<Item = u128>) -> MemoryImage {
        MemoryImage { size: Bytes::mib(64), layers: layers.into_iter().map(layer).collect() }
    }

    #[test]
    fn an_image_is_a_read_only_device_whose_pages_are_shared() {
        let image = MemoryImage::empty(Bytes::mib(64)).with_top(layer(1)).with_top(layer(2));
        assert_eq!((image.depth(), image.top()), (2, Some(Uuid::from_u128(2))));
        let spec = image.to_device_spec();
        spec.config.check().unwrap();
        let files: Vec<_> = spec.config.lowers.iter().filter_map(|lower| lower.file.clone()).collect();
        assert_eq!(files, [PathBuf::from("/m/1"), PathBuf::from("/m/2")], "bottom first");
        assert!(spec.read_only && spec.new_upper.is_none() && spec.caching == Caching::Shared);
        let json = serde_json::to_string(&image).unwrap();
        assert_eq!(serde_json::from_str::<MemoryImage>(&json).unwrap(), image);
    }

    #[test]
    fn merged_layers_take_the_place_of_their_sources_below_newer_ones() {
        let mut now = image([1, 2, 3, 4]);
        now.replace(&[layer(2), layer(3)], layer(9)).unwrap();
        assert_eq!(now, image([1, 9, 4]));
        for sources in [vec![], vec![layer(7)], vec![layer(1), layer(4)], vec![layer(4), layer(5)]] {
            assert_eq!(now.replace(&sources, layer(8)), Err(ReplaceError));
        }
        assert_eq!(now, image([1, 9, 4]));
    }
}
