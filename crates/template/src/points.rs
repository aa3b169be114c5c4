//! Points that builds can go on from: disks as they were after a step, kept by what made them.
//!
//! The key of a point is a digest of the base and of every step up to it, files included. A row names the capture, so that
//! it is there after a restart; beyond a number of points, the one that was not used for longest goes.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aenv_durable::{Row, Store, StoreError, Table};
use aenv_model::CaptureId;
use aenv_snapshot::{Capture, CaptureStore};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use crate::context::Context;

/// Version of the rows.
const ROW_VERSION: u32 = 1;

/// What is kept of a point.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct PointRow {
    pub(crate) capture: CaptureId,
    pub(crate) context: Context,
    pub(crate) used_at: Timestamp,
}

/// The rows of points.
pub(crate) fn point_rows(store: &Store) -> Table<PointRow> {
    store.table("build_points", ROW_VERSION)
}

/// All points of a node.
#[derive(Debug)]
pub(crate) struct Points {
    rows: Table<PointRow>,
    limit: usize,
    kept: Mutex<HashMap<String, Kept>>,
}

#[derive(Debug)]
struct Kept {
    row: PointRow,
    capture: Capture,
}

impl Points {
    /// Points of former servers whose captures are there; rows of others go.
    pub(crate) async fn load(store: &Store, captures: &CaptureStore, limit: usize) -> Result<Self, StoreError> {
        let rows = point_rows(store);
        let mut kept = HashMap::new();
        for (key, row) in rows.list_blocking()? {
            match row {
                Row::Known(row) => match captures.find(row.capture).await {
                    Ok(capture) => _ = kept.insert(key, Kept { row, capture }),
                    Err(error) => {
                        warn!(key, %error, "a point that builds went on from is not there any more");
                        rows.remove_blocking(&key)?;
                    }
                },
                Row::Unknown(why) => warn!(key, why, "kept a build point that this version does not understand"),
            }
        }
        let points = Self { rows, limit, kept: Mutex::new(kept) };
        points.shrink().await;
        Ok(points)
    }

    /// The point after a chain of steps.
    pub(crate) async fn find(&self, key: &str) -> Option<(Capture, Context)> {
        let (row, capture) = {
            let mut kept = self.kept();
            let found = kept.get_mut(key)?;
            found.row.used_at = Timestamp::now();
            (found.row.clone(), found.capture.clone())
        };
        if let Err(error) = self.rows.put(key, row.clone()).await {
            warn!(key, %error, "it is not recorded that a build point was used");
        }
        Some((capture, row.context))
    }

    /// Keeps a point, in the place of one with that key. If it cannot be recorded, it goes with its last user.
    pub(crate) async fn keep(&self, key: &str, capture: &Capture, context: &Context) {
        let row = PointRow { capture: capture.id(), context: context.clone(), used_at: Timestamp::now() };
        if self.limit == 0 {
            return capture.doom();
        }
        if let Err(error) = self.rows.put(key, row.clone()).await {
            warn!(key, %error, "a build point is not kept");
            return capture.doom();
        }
        let replaced = self.kept().insert(key.to_owned(), Kept { row, capture: capture.clone() });
        if let Some(replaced) = replaced {
            replaced.capture.doom();
        }
        self.shrink().await;
    }

    async fn shrink(&self) {
        loop {
            let oldest = {
                let mut kept = self.kept();
                if kept.len() <= self.limit {
                    return;
                }
                let oldest = kept.iter().min_by_key(|(_, point)| point.row.used_at).map(|(key, _)| key.clone());
                oldest.and_then(|key| kept.remove_entry(&key))
            };
            let Some((key, point)) = oldest else { return };
            if let Err(error) = self.rows.remove(&*key).await {
                warn!(key, %error, "a build point cannot be forgotten; the next start does");
            }
            info!(key, capture = %point.capture.id(), "forgot a build point that was not used for long");
            point.capture.doom();
        }
    }

    // Map operations only happen under it, so the map is valid after any panic.
    fn kept(&self) -> MutexGuard<'_, HashMap<String, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
