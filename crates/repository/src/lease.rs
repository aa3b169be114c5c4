//! What a publication needs while it is under way, and whose turn it is to remove garbage.
//!
//! A lease is written before its holder looks at what is there, and the turn is taken before its holder looks at leases: one
//! of them always sees the other (see the crate's page).

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use aenv_model::{CaptureId, TemplateId};
use aenv_objects::{Condition, Key, ObjectErrorKind};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tracing::warn;
use uuid::Uuid;

use crate::digest::Digest;
use crate::error::RepositoryError;
use crate::layout;
use crate::record::millis;
use crate::repository::{Repository, Written, later};

const VERSION: u32 = 1;

/// Pause between two looks at another's turn.
const GLANCE: Duration = Duration::from_millis(100);

/// What is needed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Needs {
    #[serde(default)]
    pub(crate) aliases: BTreeSet<String>,
    #[serde(default)]
    pub(crate) layers: BTreeSet<Digest>,
    #[serde(default)]
    pub(crate) artifacts: BTreeSet<(TemplateId, CaptureId)>,
}

/// What a lease's object says.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct LeaseObject {
    version: u32,
    #[serde(rename = "expires_at_unix_ms", with = "millis")]
    expires_at: Timestamp,
    #[serde(flatten)]
    needs: Needs,
}

/// A lease of ours. If it is not released, it ends by itself.
#[derive(Debug)]
pub(crate) struct Lease {
    key: Key,
    needs: Needs,
    /// Milliseconds since 1970.
    expires_at: AtomicI64,
}

/// A lease as a sweep finds it.
#[derive(Debug)]
pub(crate) enum FoundLease {
    /// It has ended.
    Over,
    /// It counts.
    Holds(Needs),
    /// It may need anything.
    Unknown,
}

impl Repository {
    /// Takes a lease, and waits until nobody removes what it may not have seen.
    pub(crate) async fn lease(&self, needs: Needs) -> Result<Lease, RepositoryError> {
        let key = layout::lease(Uuid::now_v7())?;
        let expires_at = self.after(self.options().lease);
        let lease = Lease { key, needs, expires_at: expires_at.as_millisecond().into() };
        self.write_lease(&lease, expires_at).await?;
        match self.wait_for_sweep().await {
            Ok(()) => Ok(lease),
            Err(error) => {
                self.release(lease).await;
                Err(error)
            }
        }
    }

    async fn write_lease(&self, lease: &Lease, expires_at: Timestamp) -> Result<(), RepositoryError> {
        let object = LeaseObject { version: VERSION, expires_at, needs: lease.needs.clone() };
        // Structs of texts and numbers always become JSON.
        let bytes = serde_json::to_vec(&object).unwrap_or_default();
        self.store().put(&lease.key, bytes.into(), Condition::None).await?;
        Ok(())
    }

    /// Does `work` and says now and then that it goes on.
    pub(crate) async fn under<T>(&self, lease: &Lease, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done,
                () = tokio::time::sleep(self.options().lease / 4) => self.renew(lease).await,
            }
        }
    }

    async fn renew(&self, lease: &Lease) {
        // One that has ended stays so: what it was about may be gone.
        if self.check(lease, "the publication").is_err() {
            return;
        }
        let expires_at = self.after(self.options().lease);
        match self.write_lease(lease, expires_at).await {
            Ok(()) => lease.expires_at.store(expires_at.as_millisecond(), Ordering::Relaxed),
            Err(error) => warn!(lease = %lease.key, %error, "a lease could not be renewed"),
        }
    }

    /// Is all that the lease is about there for sure, and for a while?
    pub(crate) fn check(&self, lease: &Lease, doing: &'static str) -> Result<(), RepositoryError> {
        let left = lease.expires_at.load(Ordering::Relaxed);
        let needed = self.after(self.options().margin).as_millisecond();
        if needed < left { Ok(()) } else { Err(RepositoryError::Late { doing }) }
    }

    /// Ends a lease; if that fails, it ends later.
    pub(crate) async fn release(&self, lease: Lease) {
        if let Err(error) = self.store().delete(&lease.key).await {
            warn!(lease = %lease.key, %error, "a lease is not released before it ends by itself");
        }
    }

    /// Reads a lease. `None`: it is gone.
    pub(crate) async fn look_at_lease(
        &self,
        key: &Key,
        modified: Timestamp,
    ) -> Result<Option<FoundLease>, RepositoryError> {
        let bytes = match self.read_object(key).await {
            Ok(Some((bytes, _))) => bytes,
            Ok(None) => return Ok(None),
            Err(RepositoryError::Corrupt { .. }) => bytes::Bytes::new(),
            Err(error) => return Err(error),
        };
        let margin = self.options().margin;
        Ok(Some(match serde_json::from_slice::<LeaseObject>(&bytes) {
            Ok(lease) if lease.version == VERSION => match self.now() < later(lease.expires_at, margin) {
                true => FoundLease::Holds(lease.needs),
                false => FoundLease::Over,
            },
            // Newer, or cut: whoever wrote it wrote it then.
            _ => match self.now() < later(modified, self.options().lease + margin) {
                true => FoundLease::Unknown,
                false => FoundLease::Over,
            },
        }))
    }
}

/// What the object of turns says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct TurnObject {
    version: u32,
    owner: Uuid,
    /// In the past: it is nobody's turn.
    #[serde(rename = "expires_at_unix_ms", with = "millis")]
    expires_at: Timestamp,
}

/// Our turn to remove garbage. If it is not given up, it ends by itself.
#[derive(Debug)]
pub(crate) struct Turn {
    object: TurnObject,
}

impl Repository {
    /// Until when it is somebody's turn, and what a write over that depends on.
    async fn look_at_turn(&self) -> Result<(Timestamp, Condition), RepositoryError> {
        let key = layout::key(layout::SWEEP.to_owned())?;
        let (bytes, version) = match self.read_object(&key).await? {
            Some(found) => found,
            None => return Ok((Timestamp::MIN, Condition::Absent)),
        };
        let until = match serde_json::from_slice::<TurnObject>(&bytes) {
            Ok(turn) if turn.version == VERSION => turn.expires_at,
            _ => match self.store().head(&key).await {
                Ok(info) => later(Timestamp::try_from(info.modified).unwrap_or(Timestamp::MAX), self.options().turn),
                Err(error) if error.kind() == ObjectErrorKind::NotFound => Timestamp::MIN,
                Err(error) => return Err(error.into()),
            },
        };
        Ok((until, Condition::Is(version)))
    }

    async fn wait_for_sweep(&self) -> Result<(), RepositoryError> {
        let waiting = async {
            loop {
                let (until, _) = self.look_at_turn().await?;
                if until <= self.now() {
                    return Ok(());
                }
                tokio::time::sleep(GLANCE).await;
            }
        };
        tokio::time::timeout(self.options().patience, waiting).await.unwrap_or(Err(RepositoryError::Busy))
    }

    /// Takes the turn. `None`: it is another's.
    pub(crate) async fn take_turn(&self) -> Result<Option<Turn>, RepositoryError> {
        let (until, condition) = self.look_at_turn().await?;
        if self.now() < later(until, self.options().margin) {
            return Ok(None);
        }
        let object =
            TurnObject { version: VERSION, owner: Uuid::now_v7(), expires_at: self.after(self.options().turn) };
        match self.write_turn(&object, condition).await? {
            Written::Done => Ok(Some(Turn { object })),
            Written::Conflict => Ok(None),
        }
    }

    /// Makes sure that it is our turn still, and for a while.
    pub(crate) async fn hold(&self, turn: &mut Turn) -> Result<(), RepositoryError> {
        let late = || RepositoryError::Late { doing: "removing garbage" };
        let left = turn.object.expires_at.duration_since(self.now());
        let (turn_length, margin) = (self.options().turn, self.options().margin);
        if left.unsigned_abs() > turn_length / 2 && left.is_positive() {
            return Ok(());
        }
        if left.is_negative() || left.unsigned_abs() <= margin {
            return Err(late());
        }
        let key = layout::key(layout::SWEEP.to_owned())?;
        let Some((bytes, version)) = self.read_object(&key).await? else { return Err(late()) };
        if serde_json::from_slice::<TurnObject>(&bytes).ok().as_ref() != Some(&turn.object) {
            return Err(late());
        }
        let object = TurnObject { expires_at: self.after(turn_length), ..turn.object.clone() };
        match self.write_turn(&object, Condition::Is(version)).await? {
            Written::Done => turn.object = object,
            Written::Conflict => return Err(late()),
        }
        Ok(())
    }

    /// Gives the turn up; if that fails, it ends later.
    pub(crate) async fn end_turn(&self, turn: Turn) {
        let given_up = async {
            let key = layout::key(layout::SWEEP.to_owned())?;
            let Some((bytes, version)) = self.read_object(&key).await? else { return Ok(()) };
            if serde_json::from_slice::<TurnObject>(&bytes).ok().as_ref() != Some(&turn.object) {
                return Ok(());
            }
            let nobodys = TurnObject { expires_at: Timestamp::UNIX_EPOCH, ..turn.object.clone() };
            self.write_turn(&nobodys, Condition::Is(version)).await.map(drop)
        };
        let given_up: Result<(), RepositoryError> = given_up.await;
        if let Err(error) = given_up {
            warn!(%error, "publications wait until our turn of removing garbage ends by itself");
        }
    }

    async fn write_turn(&self, turn: &TurnObject, condition: Condition) -> Result<Written, RepositoryError> {
        let bytes = serde_json::to_vec(turn).unwrap_or_default();
        self.write_object(&layout::key(layout::SWEEP.to_owned())?, bytes.into(), condition).await
    }
}
