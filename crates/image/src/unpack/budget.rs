//! Bounds on what an archive may unpack to: a few kilobytes of it can stand for terabytes.

use aenv_model::Bytes;

use super::UnpackError;

/// What may still be unpacked. Holes of sparse files are free, as they are on disk.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: Bytes,
    free: Bytes,
    used: u64,
    max_entries: u64,
    entries: u64,
}

impl Budget {
    /// The same, where `free` bytes are free now.
    pub(crate) fn with_free(self, free: Bytes) -> Self {
        Self { free: Bytes(self.used.saturating_add(free.get())), ..self }
    }

    /// At most `limit` bytes in `max_entries` members, and no more than the `free` bytes of the file system.
    pub(crate) fn new(limit: Bytes, free: Bytes, max_entries: u64) -> Self {
        Self { limit, free, used: 0, max_entries, entries: 0 }
    }

    pub(super) fn charge_entry(&mut self) -> Result<(), UnpackError> {
        self.entries += 1;
        if self.entries > self.max_entries {
            return Err(UnpackError::TooLarge { limit: format!("{} files", self.max_entries) });
        }
        Ok(())
    }

    pub(super) fn charge(&mut self, bytes: u64) -> Result<(), UnpackError> {
        self.used = self.used.saturating_add(bytes);
        if self.used > self.limit.get() {
            return Err(UnpackError::TooLarge { limit: self.limit.to_string() });
        }
        if self.used > self.free.get() {
            return Err(UnpackError::NoSpace { free: self.free });
        }
        Ok(())
    }
}
