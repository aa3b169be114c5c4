//! Sparse: every sector has its place in the file, and a hole means that the layer below shows through.
//!
//! So a discard that punches a hole is forgotten when the file is opened again. It is harmless where nothing lies below;
//! where something does, zeros are written instead.

use std::io;

use rustix::io::Errno;

use super::Upper;
use super::log::parts;
use crate::header::BLOCK;
use crate::mapping::{FIRST_DATA_SECTOR, Mapping, SECTOR};
use crate::source::Storage;

/// Zeros written at once.
const ZEROS: usize = 256 << 10;

impl Upper {
    pub(super) fn write_sparse(&self, sector: u64, buf: &[u8]) -> io::Result<()> {
        self.data.write_at(BLOCK + sector * SECTOR, buf)?;
        self.map_sparse(sector, buf.len() as u64 / SECTOR, Mapping::data);
        Ok(())
    }

    /// The gate is closed: a write that came between the hole and the entry would come back at the next opening.
    pub(super) fn discard_sparse(&self, from: u64, to: u64, hide: bool) -> io::Result<()> {
        let (offset, length) = (BLOCK + from * SECTOR, (to - from) * SECTOR);
        if hide {
            write_zeros(&*self.data, offset, length)?;
            self.map_sparse(from, to - from, Mapping::data);
            return Ok(());
        }
        match self.data.punch_hole(offset, length) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::OPNOTSUPP) => {
                write_zeros(&*self.data, offset, length)?;
            }
            result => result?,
        }
        self.map_sparse(from, to - from, Mapping::zeroed);
        Ok(())
    }

    fn map_sparse(&self, sector: u64, length: u64, make: fn(u64, u64, u64) -> Mapping) {
        let mut table = self.table_mut();
        for (skipped, part) in parts(length) {
            let offset = sector + skipped;
            table.live.insert(make(offset, part, offset + FIRST_DATA_SECTOR), |_| {});
        }
    }
}

fn write_zeros(file: &dyn Storage, mut offset: u64, mut length: u64) -> io::Result<()> {
    let zeros = vec![0; ZEROS.min(length as usize)];
    while length > 0 {
        let now = length.min(zeros.len() as u64);
        file.write_at(offset, &zeros[..now as usize])?;
        offset += now;
        length -= now;
    }
    Ok(())
}
