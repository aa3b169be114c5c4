//! Block devices: the narrow trait, its wrappers, and the trait of writable disks for sandboxes.

#![forbid(unsafe_code)]

mod device;
mod disk;
mod file;
#[cfg(any(test, feature = "test-support"))]
pub mod test_support;

pub use device::BlockDevice;
pub use disk::{CreateDiskError, Disk, DiskRecord, DiskStore};
pub use file::FileDevice;
