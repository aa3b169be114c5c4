//! Block devices, made visible to the host's kernel.
//!
//! ```text
//!   BlockDevice ──attach──▶ Exporter ──▶ Export: a path that a VMM opens
//!                            ├─ FUSE     a file below one mount point; any kernel
//!                            └─ ublk     /dev/ublkbN; survives its server's death, by user recovery
//! ```

#![deny(unsafe_code)]

mod buffers;
mod errno;
mod exporter;
mod fuse;
mod gate;
mod lane;
mod name;
#[cfg(any(test, feature = "test-support"))]
pub mod test_support;
mod ublk;

pub use exporter::{AttachError, Caching, Export, ExportKind, ExportOptions, ExportRecord, Exporter};
pub use fuse::{FuseExporter, FuseOptions, MountError};
pub use ublk::{OpenUblkError, UblkExporter};
