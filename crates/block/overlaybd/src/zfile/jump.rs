//! Where each block of a ZFile is.
//!
//! Stored are lengths; looked up are positions. Blocks that hold 64 KiB together share one absolute position, and each has
//! its distance from it in 16 bits: 2.5 bytes a block of 4 KiB. Small blocks, which may become longer when they do not
//! compress, come in smaller groups.

use super::codec::CRC;
use super::header::{BLOCK, ZFileInfo, ZFileProblem};

const GROUP_BYTES: usize = 65536;

/// Positions of all blocks.
#[derive(Debug)]
pub(super) struct JumpTable {
    per_group: usize,
    bases: Vec<u64>,
    deltas: Vec<u16>,
    /// Where the last block ends.
    end: u64,
    /// Compressed blocks are no longer than this.
    longest: u32,
    shortest: u32,
}

impl JumpTable {
    /// An empty table for the file that `info` describes.
    pub(super) fn new(info: &ZFileInfo) -> Self {
        let longest = info.block_size.bound() + CRC;
        let mut per_group = GROUP_BYTES / info.block_size.get();
        while (per_group - 1) * longest >= usize::from(u16::MAX) {
            per_group /= 2;
        }
        Self {
            per_group,
            bases: Vec::new(),
            deltas: Vec::new(),
            end: BLOCK,
            longest: longest as u32,
            shortest: if info.verify { CRC as u32 + 1 } else { 1 },
        }
    }

    /// Adds the length of the next block, which is stored at byte `at`.
    pub(super) fn push(&mut self, length: u32, at: u64) -> Result<(), ZFileProblem> {
        let block = self.deltas.len();
        if block.is_multiple_of(self.per_group) {
            self.bases.push(self.end);
        }
        let base = self.bases[block / self.per_group];
        let delta = u16::try_from(self.end - base).ok().filter(|&delta| delta < u16::MAX);
        match delta {
            Some(delta) if (self.shortest..=self.longest).contains(&length) => self.deltas.push(delta),
            _ => return Err(ZFileProblem::BlockLength { block: block as u64, at, length }),
        }
        self.end += u64::from(length);
        Ok(())
    }

    /// Checks that the blocks end where the table begins.
    pub(super) fn finish(mut self, index_offset: u64) -> Result<Self, ZFileProblem> {
        if self.end != index_offset {
            return Err(ZFileProblem::Sum { end: self.end, index_offset });
        }
        self.bases.shrink_to_fit();
        self.deltas.shrink_to_fit();
        Ok(self)
    }

    /// First byte of `block`, or of what follows the last one.
    pub(super) fn position(&self, block: usize) -> u64 {
        match self.deltas.get(block) {
            Some(&delta) => self.bases[block / self.per_group] + u64::from(delta),
            None => self.end,
        }
    }
}
