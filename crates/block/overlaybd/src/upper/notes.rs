//! Notes of entries that are not in the index file yet, for the case that the process dies and its host does not.
//!
//! What was written is in the data file then, if only in the host's page cache, and is as good as ever. But which sectors it
//! is for, only the process knew: entries reach the index file at a flush, when their data is durable, and not before. So
//! each is noted in a file of its own before its write is answered. Nothing syncs that file. It counts only until the host
//! starts anew: a header says which start of the host, and which upper, it speaks of.
//!
//! ```text
//!   header (64 bytes) │ entry │ entry │ …        added to under a lock, in the order of the live index
//! ```
//!
//! Entries of the file may be in the index file as well, if the end came before they were taken off. Replayed on top of it
//! they change nothing then: they are always the newest there are, in order, and without a gap.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use tracing::{debug, warn};
use uuid::Uuid;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::lock;
use crate::mapping::{Mapping, RawMapping};

/// Told by the kernel, another one after each start of the host.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Beyond this many bytes the file is written anew after a flush, though entries came meanwhile.
const LONG: u64 = 2 << 20;

/// The beginning of the file.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct NotesHeader {
    magic: [u8; 16],
    boot: [u8; 16],
    upper: [u8; 16],
    reserved: [u8; 16],
}

const MAGIC: [u8; 16] = *b"aenv unflushed 1";
const HEADER: u64 = size_of::<NotesHeader>() as u64;
const _: () = assert!(HEADER == 64);

/// The notes of one upper.
#[derive(Debug)]
pub(crate) struct Notes {
    path: PathBuf,
    header: [u8; HEADER as usize],
    state: Mutex<State>,
    /// It has its name; before, it has a temporary one.
    published: bool,
}

#[derive(Debug)]
struct State {
    /// None once nothing is to be noted any more.
    file: Option<File>,
    /// Where the next entry goes.
    end: u64,
}

/// Keeps the order of the notes while the live index follows.
pub(super) struct Noted<'a>(#[expect(dead_code, reason = "held")] MutexGuard<'a, State>);

impl Notes {
    /// Empty notes at `path` for the upper with `uuid`, under a temporary name until [`publish`](Self::publish).
    pub(crate) fn prepare(path: &Path, uuid: Uuid) -> io::Result<Self> {
        let boot = fs::read_to_string(BOOT_ID)?;
        let boot = Uuid::try_parse(boot.trim()).map_err(io::Error::other)?;
        let header = NotesHeader { magic: MAGIC, boot: boot.into_bytes(), upper: uuid.into_bytes(), reserved: [0; 16] };
        let header: [u8; HEADER as usize] = zerocopy::transmute!(header);
        let file = write_new(path, &header, &[])?;
        let state = Mutex::new(State { file: Some(file), end: HEADER });
        Ok(Self { path: path.to_owned(), header, state, published: false })
    }

    /// Gives prepared notes their name, in place of those of an earlier upper.
    pub(crate) fn publish(&mut self) -> io::Result<()> {
        fs::rename(temporary(&self.path), &self.path)?;
        self.published = true;
        Ok(())
    }

    /// The notes at `path`, and what they say, if they are of the upper with `uuid` and of this start of the host. Else there
    /// are empty ones now.
    pub(super) fn resume(path: &Path, uuid: Uuid) -> io::Result<(Self, Vec<Mapping>)> {
        let mut notes = Self::prepare(path, uuid)?;
        let found = match fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            found => found?,
        };
        let entries: Vec<Mapping> = match found.strip_prefix(&notes.header) {
            // A record may be cut, if the end came while it was written. Then its write was never answered.
            Some(records) => records
                .chunks_exact(RawMapping::SIZE as usize)
                .filter_map(|record| RawMapping::read_from_bytes(record).ok()?.mapping())
                .collect(),
            None => Vec::new(),
        };
        notes.rewrite(&mut lock(&notes.state), &entries)?;
        notes.published = true;
        Ok((notes, entries))
    }

    /// Notes `entries`, before their writes are answered. What they are about must be in the live index before the result
    /// is dropped.
    pub(super) fn add(&self, entries: &[Mapping]) -> io::Result<Noted<'_>> {
        let mut state = lock(&self.state);
        if let Some(file) = &state.file {
            let records = records(entries);
            file.write_all_at(&records, state.end)?; // in part, perhaps: the next one goes to the same place
            state.end += records.len() as u64;
        }
        Ok(Noted(state))
    }

    /// Entries were flushed; `pending` gives those that were not.
    pub(super) fn settle(&self, pending: impl FnOnce() -> Vec<Mapping>) {
        let mut state = lock(&self.state);
        let Some(file) = &state.file else { return };
        if state.end == HEADER {
            return;
        }
        let pending = pending();
        let done = if pending.is_empty() {
            file.set_len(HEADER).map(|()| state.end = HEADER)
        } else if state.end > LONG {
            self.rewrite(&mut state, &pending)
        } else {
            Ok(())
        };
        if let Err(error) = done {
            debug!(%error, notes = %self.path.display(), "notes stay longer than they need"); // and are right still
        }
    }

    /// The files' content is no longer known: what is noted must not come back.
    pub(super) fn forget(&self) {
        let mut state = lock(&self.state);
        state.file = None;
        if let Err(error) = fs::remove_file(&self.path) {
            warn!(%error, notes = %self.path.display(), "notes of a failed upper stay");
        }
    }

    /// Where they are.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Says `entries`, and nothing else; at every moment, the file says the old or the new.
    fn rewrite(&self, state: &mut State, entries: &[Mapping]) -> io::Result<()> {
        let records = records(entries);
        let file = write_new(&self.path, &self.header, &records)?;
        fs::rename(temporary(&self.path), &self.path)?;
        *state = State { file: Some(file), end: HEADER + records.len() as u64 };
        Ok(())
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        if !self.published {
            let _ = fs::remove_file(temporary(&self.path)); // overwritten next time otherwise
        }
    }
}

fn records(entries: &[Mapping]) -> Vec<u8> {
    entries
        .iter()
        .copied()
        .map(RawMapping::from)
        .flat_map(|record| -> [u8; 16] { zerocopy::transmute!(record) })
        .collect()
}

fn write_new(path: &Path, header: &[u8], records: &[u8]) -> io::Result<File> {
    let new = temporary(path);
    let _ = fs::remove_file(&new); // left by a crash
    let file = File::options().read(true).write(true).create_new(true).open(&new)?;
    let written = file.write_all_at(header, 0).and_then(|()| file.write_all_at(records, header.len() as u64));
    if let Err(error) = written {
        let _ = fs::remove_file(&new); // empty or cut: nothing reads it
        return Err(error);
    }
    Ok(file)
}

fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_that_grew_long_are_written_anew_with_what_is_left() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("notes");
        let uuid = Uuid::new_v4();
        let (notes, found) = Notes::resume(&path, uuid).expect("resume");
        assert_eq!(found, []);
        let entries: Vec<_> =
            (0..=LONG / RawMapping::SIZE).map(|number| Mapping::data(number, 1, 8 + number)).collect();
        drop(notes.add(&entries[..10]).expect("add"));
        notes.settle(|| entries[9..10].to_vec());
        assert_eq!(notes.path().metadata().expect("notes").len(), HEADER + 10 * RawMapping::SIZE, "short enough");
        drop(notes.add(&entries[10..]).expect("add"));
        notes.settle(|| entries[100..102].to_vec());
        drop(notes.add(&entries[..1]).expect("add"));
        let (_, found) = Notes::resume(&path, uuid).expect("resume");
        assert_eq!(found, [entries[100], entries[101], entries[0]]);
    }
}
