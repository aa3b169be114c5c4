//! Block devices: the narrow trait, its wrappers, and writable disks for sandboxes.

#![forbid(unsafe_code)]

mod copy;
mod device;
mod disk;
mod file;
mod file_store;
mod grow;
#[cfg(any(test, feature = "test-support"))]
pub mod test_support;

pub use device::BlockDevice;
pub use disk::{CreateDiskError, Disk, DiskRecord, DiskStore};
pub use file::FileDevice;
pub use file_store::FileDiskStore;
