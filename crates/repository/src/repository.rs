//! The repository itself, and what all of its operations use.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use aenv_model::TemplateId;
use aenv_objects::{Condition, Key, ObjectErrorKind, ObjectStore, Version};
use bytes::Bytes;
use jiff::{SignedDuration, Timestamp};

use crate::digest::KnownDigests;
use crate::error::RepositoryError;
use crate::layout;
use crate::pack::Packing;
use crate::record::{Found, Record, decode, to_millis};

/// Bytes of the longest record, name or lease. A record with a thousand layers has some hundred thousand.
pub(crate) const MOST_BYTES: u64 = 4 << 20;
/// How often a change is tried again that others were quicker with.
pub(crate) const ATTEMPTS: u32 = 16;

/// Tells the time. Times of different nodes should differ by less than [`Options::margin`].
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl Clock {
    /// The host's.
    #[must_use]
    pub fn system() -> Self {
        Self::new(Timestamp::now)
    }

    /// Another.
    pub fn new(now: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

/// How long what lasts, in which all nodes of a repository should agree, and what is done at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// A publication that says nothing for so long is dead. One that goes on says so four times as often.
    pub lease: Duration,
    /// A name whose record is not there after so long is free.
    pub claim: Duration,
    /// A sweep that says nothing for so long is dead.
    pub turn: Duration,
    /// How far clocks may differ, and how long a write may take that was begun in time: more than the store's patience.
    pub margin: Duration,
    /// Longest wait for another's sweep.
    pub patience: Duration,
    /// Records read at a time.
    pub reads_at_once: usize,
    /// Files written at a time; each of them may have several parts on their way.
    pub writes_at_once: usize,
    /// How this node compresses layers when it publishes them, if it does.
    pub packing: Option<Packing>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(3600),
            claim: Duration::from_secs(180),
            turn: Duration::from_secs(600),
            margin: Duration::from_secs(60),
            patience: Duration::from_secs(120),
            reads_at_once: 16,
            writes_at_once: 4,
            packing: None,
        }
    }
}

/// Templates and snapshots that nodes share. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Repository {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) options: Options,
    pub(crate) digests: KnownDigests,
    clock: Clock,
}

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Written {
    /// It is done.
    Done,
    /// Somebody else was first.
    Conflict,
}

impl Repository {
    /// Nothing is asked of the store yet.
    pub fn new(store: Arc<dyn ObjectStore>, options: Options, clock: Clock) -> Self {
        Self { inner: Arc::new(Inner { store, options, digests: KnownDigests::default(), clock }) }
    }

    /// What to call it in a message: a path or a URL.
    #[must_use]
    pub fn name(&self) -> &str {
        self.inner.store.name()
    }

    pub(crate) fn store(&self) -> &dyn ObjectStore {
        &*self.inner.store
    }

    pub(crate) fn options(&self) -> &Options {
        &self.inner.options
    }

    pub(crate) fn now(&self) -> Timestamp {
        to_millis((self.inner.clock.0)())
    }

    /// An instant so much later than now.
    pub(crate) fn after(&self, time: Duration) -> Timestamp {
        later(self.now(), time)
    }

    /// The record of `id` with its version. `None`: there never was one, or nothing is left of it.
    pub(crate) async fn look(&self, id: TemplateId) -> Result<Option<(Found, Version)>, RepositoryError> {
        let found = self.read_object(&layout::record(id)?).await?;
        Ok(found.map(|(bytes, version)| (decode(&bytes, id), version)))
    }

    /// All of a small object.
    pub(crate) async fn read_object(&self, key: &Key) -> Result<Option<(Bytes, Version)>, RepositoryError> {
        match self.store().read(key, MOST_BYTES).await {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.kind() == ObjectErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == ObjectErrorKind::Length => {
                Err(RepositoryError::Corrupt { what: key.to_string(), problem: error.to_string() })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Writes a record, if the condition holds. After an error it may have been written or not, or may yet be.
    pub(crate) async fn write(&self, record: &Record, condition: Condition) -> Result<Written, RepositoryError> {
        self.write_object(&layout::record(record.id)?, record.encode(), condition).await
    }

    /// Writes a small object, if the condition holds. If the answer is lost, what is there tells.
    pub(crate) async fn write_object(
        &self,
        key: &Key,
        bytes: Bytes,
        condition: Condition,
    ) -> Result<Written, RepositoryError> {
        let Err(error) = self.store().put(key, bytes.clone(), condition).await else { return Ok(Written::Done) };
        match (self.read_object(key).await, error.kind()) {
            // A store repeats writes whose answers it loses, and then finds its own.
            (Ok(Some((found, _))), _) if found == bytes => Ok(Written::Done),
            (_, ObjectErrorKind::Condition) => Ok(Written::Conflict),
            _ => Err(error.into()),
        }
    }
}

pub(crate) fn later(than: Timestamp, by: Duration) -> Timestamp {
    than.saturating_add(SignedDuration::try_from(by).unwrap_or(SignedDuration::MAX)).unwrap_or(Timestamp::MAX)
}
