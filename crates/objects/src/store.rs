//! What every store can do.

use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;
use std::time::SystemTime;

use async_trait::async_trait;
use bytes::Bytes;

use crate::error::ObjectError;
use crate::key::Key;

/// Keeps objects.
///
/// Cancel safety of all: a read that is dropped has no effect; a write may be done or not, but never by halves.
#[async_trait]
pub trait ObjectStore: Debug + Send + Sync {
    /// What to call it in a message: a path or a URL.
    fn name(&self) -> &str;

    /// What is known about an object without its bytes.
    async fn head(&self, key: &Key) -> Result<ObjectInfo, ObjectError>;

    /// Exactly the bytes of `range`, which is an error if the object ends before.
    async fn get(&self, key: &Key, range: Range<u64>) -> Result<Bytes, ObjectError>;

    /// All bytes of an object of at most `limit`, and which version of it they are.
    async fn read(&self, key: &Key, limit: u64) -> Result<(Bytes, Version), ObjectError>;

    /// Writes a small object, if `condition` holds. Of several who write at once under conditions, one succeeds.
    ///
    /// After [`Failed`](ObjectError::Failed) it may have been written or not: read it.
    async fn put(&self, key: &Key, bytes: Bytes, condition: Condition) -> Result<Version, ObjectError>;

    /// Writes an object of any length from a file, which must not change meanwhile.
    async fn put_file(&self, key: &Key, file: &Path) -> Result<(), ObjectError>;

    /// Removes an object. One that is not there is a success.
    async fn delete(&self, key: &Key) -> Result<(), ObjectError>;

    /// All objects in a folder and the folders in it, in the order of their keys; all there are without a folder.
    ///
    /// Held in memory: some hundred bytes for each.
    async fn list(&self, folder: Option<&Key>) -> Result<Vec<ObjectInfo>, ObjectError>;
}

/// What a store knows about an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Its key.
    pub key: Key,
    /// Its length in bytes.
    pub size: u64,
    /// When it was written, by the store's clock.
    pub modified: SystemTime,
}

/// Which content an object has, as its store says it; means nothing to another store.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Version(pub(crate) String);

/// What a write depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// Nothing.
    None,
    /// There is no such object.
    Absent,
    /// The object still is of this version.
    Is(Version),
}
