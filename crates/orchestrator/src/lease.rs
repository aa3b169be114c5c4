//! Leases: groups of sandboxes that end together when their client stops renewing.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aenv_durable::{Row, Store, StoreError, Table};
use aenv_model::LeaseId;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tracing::{info, warn};

use crate::driver::{after, until};
use crate::orchestrator::Orchestrator;
use crate::resources::chain;
use crate::sandbox::Ended;

/// Version of the rows.
const ROW_VERSION: u32 = 1;

/// A lease as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseInfo {
    /// Its id.
    pub id: LeaseId,
    /// When it ends unless it is renewed.
    pub end_at: Timestamp,
}

/// The row of a lease: removed after all its sandboxes are gone.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct LeaseRow {
    /// What a renewal gives it.
    life: Duration,
    end_at: Timestamp,
}

/// All leases of this node.
#[derive(Debug)]
pub(crate) struct Leases {
    rows: Table<LeaseRow>,
    live: Mutex<HashMap<LeaseId, LeaseRow>>,
    changed: Notify,
}

impl Leases {
    /// Those of a former server, each with a whole life: while there was no server, nobody could renew one. Blocking.
    pub(crate) fn load(store: &Store) -> Result<Self, StoreError> {
        let rows = store.table("leases", ROW_VERSION);
        let mut live = HashMap::new();
        for (key, row) in rows.list_blocking()? {
            match (key.parse(), row) {
                (Ok(id), Row::Known(LeaseRow { life, end_at })) => {
                    _ = live.insert(id, LeaseRow { life, end_at: end_at.max(after(life)) });
                }
                (_, Row::Unknown(why)) => {
                    warn!(lease = key, why, "kept the record of a lease that this version does not understand");
                }
                (Err(problem), _) => {
                    warn!(lease = key, %problem, "kept the record of a lease whose name makes no sense")
                }
            }
        }
        Ok(Self { rows, live: Mutex::new(live), changed: Notify::new() })
    }

    // Each section is one map operation or a walk: valid after any panic.
    fn live(&self) -> MutexGuard<'_, HashMap<LeaseId, LeaseRow>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn contains(&self, id: LeaseId) -> bool {
        self.live().contains_key(&id)
    }

    async fn put(&self, id: LeaseId, row: LeaseRow) -> Result<LeaseInfo, StoreError> {
        self.rows.put(id.to_string(), row).await?;
        self.live().insert(id, row);
        self.changed.notify_one();
        Ok(LeaseInfo { id, end_at: row.end_at })
    }

    /// The one that ends first.
    fn next(&self) -> Option<(LeaseId, Timestamp)> {
        self.live().iter().map(|(id, row)| (*id, row.end_at)).min_by_key(|(_, end_at)| *end_at)
    }
}

impl Orchestrator {
    /// A new lease of `life`, without sandboxes.
    pub async fn grant_lease(&self, life: Duration) -> Result<LeaseInfo, StoreError> {
        self.inner.leases.put(LeaseId::new(), LeaseRow { life, end_at: after(life) }).await
    }

    /// Has a lease end later: its own life, or `life`, from now. `None`: there is no such lease any more.
    pub async fn renew_lease(&self, id: LeaseId, life: Option<Duration>) -> Result<Option<LeaseInfo>, StoreError> {
        let Some(row) = self.inner.leases.live().get(&id).copied() else { return Ok(None) };
        let life = life.unwrap_or(row.life);
        self.inner.leases.put(id, LeaseRow { life, end_at: after(life) }).await.map(Some)
    }

    /// Ends a lease with all its sandboxes. False: there is no such lease any more.
    ///
    /// Cancel safety: if dropped, it ends all the same.
    pub async fn end_lease(&self, id: LeaseId) -> Result<bool, StoreError> {
        // From here on, nobody renews it, and no sandbox is made under it.
        if self.inner.leases.live().remove(&id).is_none() {
            return Ok(false);
        }
        let orchestrator = self.clone();
        let end = async move {
            let under = orchestrator.under_lease(id);
            let ends = under.iter().map(|sandbox| orchestrator.end(*sandbox, Ended::LeaseEnded));
            for error in futures::future::join_all(ends).await.into_iter().filter_map(Result::err) {
                warn!(lease = %id, error = chain(&error), "a sandbox of a lease that ended is not gone yet");
            }
            info!(lease = %id, sandboxes = under.len(), "lease ended");
            orchestrator.inner.leases.rows.remove(id.to_string()).await
        };
        match self.inner.scope.spawn(format!("end of lease {id}"), end).await {
            Ok(removed) => removed.map(|()| true),
            Err(_) => Err(StoreError::Closed),
        }
    }

    /// Ends leases as their time comes, until the server is stopped.
    pub(crate) async fn keep_leases(self) {
        let (leases, shutdown) = (&self.inner.leases, self.inner.scope.token());
        loop {
            let next = leases.next();
            let due = async {
                match next {
                    Some((_, end_at)) => tokio::time::sleep(until(end_at)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => {}
                () = leases.changed.notified() => continue,
                () = shutdown.cancelled() => return,
            }
            if let Some((id, _)) = next.filter(|(_, end_at)| until(*end_at).is_zero())
                && let Err(error) = self.end_lease(id).await
            {
                warn!(lease = %id, error = chain(&error), "could not forget a lease that ended");
            }
        }
    }
}
