//! The files of a mount: one directory, one file a device.

use std::collections::btree_map::{BTreeMap, Entry};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aenv_block_device::BlockDevice;

use crate::exporter::ExportOptions;
use crate::gate::Gate;
use crate::lane::{Crew, Lane};

/// The directory's inode; files count up from the next.
pub(super) const ROOT: u64 = fuser::INodeNo::ROOT.0;

/// A device as the kernel sees it.
pub(super) struct File {
    pub(super) name: String,
    /// Never given to a second device: the kernel's pages of the first one may still be about.
    pub(super) ino: u64,
    pub(super) options: ExportOptions,
    pub(super) gate: Arc<Gate>,
    pub(super) lane: Arc<Lane>,
    /// Failed requests so far.
    pub(super) failures: AtomicU64,
}

/// All files.
pub(super) struct Files {
    crew: Arc<Crew>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    names: BTreeMap<String, u64>,
    /// Also those whose name is gone already, while the kernel writes back what it had cached of them.
    files: BTreeMap<u64, Arc<File>>,
    last: u64,
}

impl Files {
    pub(super) fn new(crew: Arc<Crew>) -> Self {
        Self { crew, state: Mutex::new(State { last: ROOT, ..State::default() }) }
    }

    /// None if there is a file of this name.
    pub(super) fn add(&self, name: &str, device: Arc<dyn BlockDevice>, options: &ExportOptions) -> Option<Arc<File>> {
        let mut state = self.lock();
        let ino = state.last + 1;
        match state.names.entry(name.to_owned()) {
            Entry::Occupied(_) => return None,
            Entry::Vacant(entry) => entry.insert(ino),
        };
        let file = Arc::new(File {
            name: name.to_owned(),
            ino,
            options: *options,
            gate: Gate::new(device),
            lane: Lane::new(Arc::clone(&self.crew)),
            failures: AtomicU64::new(0),
        });
        state.last = ino;
        state.files.insert(ino, Arc::clone(&file));
        Some(file)
    }

    /// From now on the name is not found, and free. False if it was so before.
    pub(super) fn unname(&self, file: &File) -> bool {
        let mut state = self.lock();
        let ours = state.names.get(&file.name) == Some(&file.ino);
        if ours {
            state.names.remove(&file.name);
        }
        ours
    }

    /// Forgets the file itself.
    pub(super) fn remove(&self, file: &File) {
        self.lock().files.remove(&file.ino);
    }

    pub(super) fn by_name(&self, name: &str) -> Option<Arc<File>> {
        let state = self.lock();
        state.files.get(state.names.get(name)?).cloned()
    }

    pub(super) fn by_ino(&self, ino: u64) -> Option<Arc<File>> {
        self.lock().files.get(&ino).cloned()
    }

    /// The named file with the lowest inode above `ino`.
    pub(super) fn after(&self, ino: u64) -> Option<Arc<File>> {
        let state = self.lock();
        let mut later = state.files.range(ino + 1..).map(|(_, file)| file);
        later.find(|file| state.names.get(&file.name) == Some(&file.ino)).cloned()
    }

    pub(super) fn all(&self) -> Vec<Arc<File>> {
        self.lock().files.values().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl File {
    /// Counts a failure; true for those that are worth a line in the log: the first, and ever fewer of the later ones.
    pub(super) fn failed(&self) -> Option<u64> {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        failures.is_power_of_two().then_some(failures)
    }
}
