//! Block devices: the narrow trait, its wrappers, and writable disks for sandboxes.

#![forbid(unsafe_code)]

mod device;
mod disk;

pub use device::BlockDevice;
pub use disk::{CreateDiskError, Disk, DiskRecord, DiskStore};
