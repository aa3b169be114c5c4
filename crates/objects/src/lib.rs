//! Objects: bytes under a key, written whole, read by ranges, listed by folder.
//!
//! ```text
//!                 ObjectStore
//!                /           \
//!         LocalStore        S3Store ──▶ any S3-compatible service
//!       a folder, maybe        credentials: static, or from a process
//!      shared by several hosts
//! ```
//!
//! What both promise: an object is there whole or not at all, a finished write outlives the process, readers see the old
//! bytes or the new ones, and a write may be made to depend on what is there ([`Condition`]), which decides races between
//! hosts. What neither promises: anything across two keys. Publish data first and the record that names it last.

#![forbid(unsafe_code)]

mod error;
mod key;
mod local;
mod s3;
mod store;
#[cfg(feature = "test-support")]
pub mod test_support;

pub use error::{ObjectError, ObjectErrorKind};
pub use key::{Key, ParseKeyError};
pub use local::LocalStore;
pub use s3::{Addressing, ObjectUrl, OpenS3Error, ParseObjectUrlError, S3Config, S3Credentials, S3Store};
pub use store::{Condition, ObjectInfo, ObjectStore, Version};
