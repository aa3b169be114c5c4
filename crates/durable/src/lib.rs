//! Crash-safe files and the node store.
//!
//! `kill -9` may strike between any two instructions: a reader finds either the old content or the new, never a mix, and a
//! row that was acknowledged is there after the restart.

#![forbid(unsafe_code)]

mod crash;
mod file;
mod store;

pub use crash::crash_point;
pub use file::{atomic_write, remove_dir_if_present, remove_file_if_present, sync_dir};
pub use store::{Row, Store, StoreError, Table};
