//! The node store: typed tables of versioned rows in one redb file.
//!
//! Each row is JSON wrapped as `{"v": version, "row": …}`. A row written by a newer program is kept and reported as
//! [`Row::Unknown`], never dropped and never guessed at. Every call that changes something returns after its commit is
//! durable; calls block for an fsync, so async code goes through [`Table`]'s async methods, which use the blocking pool.

use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What can go wrong with the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file could not be opened: damaged, locked by another process, no permission.
    #[error("open node store {path}")]
    Open { path: PathBuf, source: Box<redb::Error> },
    /// A transaction failed; nothing of it is visible.
    #[error("{operation} in table {table} of the node store")]
    Transaction { operation: &'static str, table: &'static str, source: Box<redb::Error> },
    /// A value does not become JSON.
    #[error("encode a row of table {table}")]
    Encode { table: &'static str, source: serde_json::Error },
    /// The blocking pool is shutting down.
    #[error("node store is closed")]
    Closed,
}

/// One open store file. Cloning shares it.
#[derive(Clone)]
pub struct Store {
    database: Arc<Database>,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Store")
    }
}

impl Store {
    /// Opens or creates the store at `path`. A second process that opens it is refused.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let database = Database::create(path)
            .map_err(|error| StoreError::Open { path: path.to_owned(), source: Box::new(error.into()) })?;
        Ok(Self { database: Arc::new(database) })
    }

    /// The table `name`, whose rows are `T`s of record version `version`.
    #[must_use]
    pub fn table<T>(&self, name: &'static str, version: u32) -> Table<T> {
        Table { store: self.clone(), name, version, row: PhantomData }
    }
}

/// A table of rows of type `T`, keyed by text.
#[derive(Debug)]
pub struct Table<T> {
    store: Store,
    name: &'static str,
    version: u32,
    row: PhantomData<fn() -> T>,
}

impl<T> Clone for Table<T> {
    fn clone(&self) -> Self {
        Self { store: self.store.clone(), name: self.name, version: self.version, row: PhantomData }
    }
}

/// A row as found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Row<T> {
    /// Of our version.
    Known(T),
    /// Of another version, or not what its version promises; the text says which.
    Unknown(String),
}

#[derive(Serialize, Deserialize)]
struct Envelope<R> {
    v: u32,
    row: R,
}

impl<T: Serialize + DeserializeOwned + Send + 'static> Table<T> {
    fn definition(&self) -> TableDefinition<'static, &'static str, &'static [u8]> {
        TableDefinition::new(self.name)
    }

    fn failed<E: Into<redb::Error>>(&self, operation: &'static str) -> impl Fn(E) -> StoreError + use<E, T> {
        let table = self.name;
        move |error| StoreError::Transaction { operation, table, source: Box::new(error.into()) }
    }

    /// Writes a row, replacing the former one. Blocks for the commit.
    pub fn put_blocking(&self, key: &str, row: &T) -> Result<(), StoreError> {
        let bytes = serde_json::to_vec(&Envelope { v: self.version, row })
            .map_err(|source| StoreError::Encode { table: self.name, source })?;
        let write = self.store.database.begin_write().map_err(self.failed("begin write"))?;
        {
            let mut table = write.open_table(self.definition()).map_err(self.failed("open table"))?;
            table.insert(key, bytes.as_slice()).map_err(self.failed("insert"))?;
        }
        write.commit().map_err(self.failed("commit"))
    }

    /// Removes a row; one that is not there is success. Blocks for the commit.
    pub fn remove_blocking(&self, key: &str) -> Result<(), StoreError> {
        let write = self.store.database.begin_write().map_err(self.failed("begin write"))?;
        {
            let mut table = write.open_table(self.definition()).map_err(self.failed("open table"))?;
            table.remove(key).map_err(self.failed("remove"))?;
        }
        write.commit().map_err(self.failed("commit"))
    }

    /// Every row, in key order.
    pub fn list_blocking(&self) -> Result<Vec<(String, Row<T>)>, StoreError> {
        let read = self.store.database.begin_read().map_err(self.failed("begin read"))?;
        let table = match read.open_table(self.definition()) {
            Ok(table) => table,
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
            Err(error) => return Err(self.failed("open table")(error)),
        };
        let mut rows = Vec::new();
        for entry in table.iter().map_err(self.failed("iterate"))? {
            let (key, value) = entry.map_err(self.failed("iterate"))?;
            rows.push((key.value().to_owned(), self.decode(value.value())));
        }
        Ok(rows)
    }

    fn decode(&self, bytes: &[u8]) -> Row<T> {
        match serde_json::from_slice::<Envelope<serde_json::Value>>(bytes) {
            Ok(envelope) if envelope.v == self.version => match serde_json::from_value(envelope.row) {
                Ok(row) => Row::Known(row),
                Err(error) => Row::Unknown(format!("unreadable: {error}")),
            },
            Ok(envelope) => Row::Unknown(format!("record version {}, we know {}", envelope.v, self.version)),
            Err(error) => Row::Unknown(format!("unreadable: {error}")),
        }
    }

    /// [`Table::put_blocking`] on the blocking pool. Cancel safety: if dropped, the row may or may not be written.
    pub async fn put(&self, key: impl Into<String>, row: T) -> Result<(), StoreError> {
        let (table, key) = (self.clone(), key.into());
        run(move || table.put_blocking(&key, &row)).await
    }

    /// [`Table::remove_blocking`] on the blocking pool. Cancel safety: if dropped, the row may or may not be gone.
    pub async fn remove(&self, key: impl Into<String>) -> Result<(), StoreError> {
        let (table, key) = (self.clone(), key.into());
        run(move || table.remove_blocking(&key)).await
    }
}

async fn run<R: Send + 'static>(
    work: impl FnOnce() -> Result<R, StoreError> + Send + 'static,
) -> Result<R, StoreError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| StoreError::Closed)?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("node.redb")).unwrap();
        (dir, store)
    }

    #[test]
    fn rows_survive_a_reopen() {
        let (dir, store) = store();
        store.table::<u32>("things", 1).put_blocking("a", &7).unwrap();
        drop(store);
        let store = Store::open(&dir.path().join("node.redb")).unwrap();
        assert_eq!(store.table::<u32>("things", 1).list_blocking().unwrap(), [("a".into(), Row::Known(7))]);
    }

    #[test]
    fn a_row_of_another_version_is_reported_and_kept() {
        let (_dir, store) = store();
        store.table::<u32>("things", 2).put_blocking("a", &7).unwrap();
        let old = store.table::<u32>("things", 1);
        assert!(matches!(&old.list_blocking().unwrap()[0].1, Row::Unknown(why) if why.contains("version 2")));
        assert_eq!(store.table::<u32>("things", 2).list_blocking().unwrap().len(), 1);
    }

    #[test]
    fn an_absent_table_is_empty_and_an_absent_row_is_removed() {
        let (_dir, store) = store();
        let table = store.table::<u32>("nothing", 1);
        assert!(table.list_blocking().unwrap().is_empty());
        table.remove_blocking("a").unwrap();
    }
}
