//! The store of rows, opened again after it failed.
//!
//! A store that could not write refuses everything from then on, as it no longer knows what its file holds; what the file
//! holds is found out by opening it. A host's full disk must not last longer than the disk is full.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use aenv_durable::{Row, Store, StoreError, Table};
use tracing::{info, warn};

use crate::error::chain;
use crate::row::{DeviceRow, TABLE};

/// The rows of all devices.
#[derive(Debug)]
pub(crate) struct Rows {
    path: PathBuf,
    /// None while it could not be opened again. Held while a row is written: the store takes one writer at a time.
    table: Mutex<Option<Table<DeviceRow>>>,
}

impl Rows {
    /// Opens or makes the store at `path`.
    pub(crate) fn open(path: &Path) -> Result<Self, StoreError> {
        Ok(Self { path: path.to_owned(), table: Mutex::new(Some(Self::table(path)?)) })
    }

    fn table(path: &Path) -> Result<Table<DeviceRow>, StoreError> {
        Ok(Store::open(path)?.table(TABLE.0, TABLE.1))
    }

    /// Every row, by name.
    pub(crate) fn list(&self) -> Result<Vec<(String, Row<DeviceRow>)>, StoreError> {
        self.with(Table::list_blocking)
    }

    /// Writes a row. Durable on return.
    pub(crate) fn put(&self, name: &str, row: &DeviceRow) -> Result<(), StoreError> {
        self.with(|table| table.put_blocking(name, row))
    }

    /// Removes a row; one that is not there is success.
    pub(crate) fn remove(&self, name: &str) -> Result<(), StoreError> {
        self.with(|table| table.remove_blocking(name))
    }

    /// Does `work`, once more on a store that was opened again if it fails. What it does may be done twice.
    fn with<T>(&self, work: impl Fn(&Table<DeviceRow>) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = &*table {
            match work(open) {
                Err(error @ StoreError::Transaction { .. }) => {
                    warn!(error = chain(&error), "the store failed, opening it again");
                }
                result => return result,
            }
        }
        *table = None; // it holds a lock on its file
        let again = Self::table(&self.path)?;
        let result = work(&again);
        if result.is_ok() {
            info!("the store works again");
        }
        *table = Some(again);
        result
    }
}
