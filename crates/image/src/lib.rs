//! Images become root file systems: references, registries, layouts and archives, unpacking, ext4.
//!
//! ```text
//!   ImageReference ──resolve──▶ manifest, config, layer blobs        source/{registry,layout,docker_archive}
//!                                   │ fetch (three ahead), verify     digest of every blob
//!                                   ▼
//!   layer 1 … n, lowest first ──unpack──▶ a directory                 unpack/, archive/, compression
//!                                   │
//!                                   ▼
//!   mkfs.ext4 -d ──▶ rootfs.ext4, renamed to its target last          ext4
//! ```
//!
//! All that an import makes lies in one directory of `work_dir` until the finished image is renamed to its target. It
//! is removed at the end of every import, however that comes; what a killed process left, [`Importer::sweep`] finds.
//! Registries, archives and layers are strangers: sizes are bounded, digests verified, and no path leads out of the
//! tree that is unpacked.

#![deny(unsafe_code)]

mod archive;
mod cache;
mod compression;
mod convert;
mod credentials;
mod digest;
mod error;
mod ext4;
mod image_config;
mod importer;
mod inspect;
mod metered;
mod progress;
mod reference;
mod source;
mod space;
mod unpack;

pub use cache::{CacheConfig, CacheError, Collected, GcConfig, ImageCache, LeaseKind, Usage, WatermarkError};
pub use convert::{ConvertError, DEVICE_PREFIX};
pub use credentials::Credentials;
pub use digest::{Digest, ParseDigestError};
pub use error::{ImportError, ImportErrorKind};
pub use ext4::LABEL;
pub use image_config::ImageConfig;
pub use importer::{Imported, Importer, ImporterConfig};
pub use inspect::{ImageInfo, LayerInfo, NativeInfo};
pub use progress::Progress;
pub use reference::{ImageReference, ParsePrefixError, ParseReferenceError, RegistryImage, RegistryPrefix};
pub use source::LayerError;
pub use unpack::UnpackError;
