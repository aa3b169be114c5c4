//! Layers whose data is written by their maker: at places of its choosing, by as many threads as it likes.
//!
//! [`Assembly`] knows what surrounds the data. Its maker writes data somewhere behind the header, says afterwards and in
//! the order of the device what is where, and writes the tail.

use aenv_model::Bytes;

use crate::commit::{Finished, sealed_header, tail};
use crate::header::{BLOCK, Header, Identity};
use crate::mapping::{FIRST_DATA_SECTOR, Joined, MAX_LENGTH, MAX_VIRTUAL_SIZE, Mapping, SECTOR};

/// Longest entry written: entries of whole pages are cut at whole pages.
const LONGEST: u64 = MAX_LENGTH & !7;

/// A layer in the making: its header, and the index as far as it is known.
#[derive(Debug)]
pub struct Assembly {
    header: Header,
    index: Joined,
    /// The sector behind the last one of the device that was told.
    told: u64,
    /// The sector of the file behind all data.
    data_end: u64,
}

/// The end of a layer.
#[derive(Debug)]
pub struct LayerTail {
    /// Where in the file it belongs, in bytes.
    pub position: u64,
    /// Index and trailer.
    pub bytes: Vec<u8>,
    /// The layer as a whole.
    pub finished: Finished,
}

/// A range that cannot be in the index.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{length} bytes at byte {offset} of the device: {what}")]
pub struct AssembleError {
    /// Where on the device.
    pub offset: u64,
    /// How many bytes.
    pub length: u64,
    /// What is wrong with it.
    pub what: &'static str,
}

impl Assembly {
    /// First byte of the file that can hold data.
    pub const DATA_START: u64 = BLOCK;

    /// A layer without data of a device of `virtual_size`, in whole sectors.
    #[must_use]
    pub fn new(virtual_size: Bytes, identity: &Identity) -> Self {
        let header = sealed_header(virtual_size, identity);
        Self { header, index: Joined::cut_at(LONGEST), told: 0, data_end: FIRST_DATA_SECTOR }
    }

    /// The first bytes of the file.
    #[must_use]
    pub fn header(&self) -> [u8; BLOCK as usize] {
        self.header.to_block()
    }

    /// `length` bytes at `offset` of the device are at byte `position` of the file; behind all that was told before.
    pub fn data(&mut self, offset: u64, length: u64, position: u64) -> Result<(), AssembleError> {
        let error = |what| AssembleError { offset, length, what };
        if !position.is_multiple_of(SECTOR) || position < Self::DATA_START {
            return Err(error("its place in the file is none for data"));
        }
        let (from, sectors) = self.take(offset, length)?;
        let position = position / SECTOR;
        self.data_end = self.data_end.max(position + sectors);
        for skipped in (0..sectors).step_by(LONGEST as usize) {
            self.index.push(Mapping::data(from + skipped, LONGEST.min(sectors - skipped), position + skipped));
        }
        Ok(())
    }

    /// `length` bytes at `offset` of the device are zeros, whatever lies below; behind all that was told before.
    pub fn zeroed(&mut self, offset: u64, length: u64) -> Result<(), AssembleError> {
        let (from, sectors) = self.take(offset, length)?;
        for skipped in (0..sectors).step_by(LONGEST as usize) {
            self.index.push(Mapping::zeroed(from + skipped, LONGEST.min(sectors - skipped), self.data_end));
        }
        Ok(())
    }

    /// What follows the data.
    #[must_use]
    pub fn finish(self) -> LayerTail {
        let (bytes, finished) = tail(self.header, self.index.into_vec(), self.data_end);
        LayerTail { position: self.data_end * SECTOR, bytes, finished }
    }

    /// The range in sectors, if it may come next.
    fn take(&mut self, offset: u64, length: u64) -> Result<(u64, u64), AssembleError> {
        let error = |what| Err(AssembleError { offset, length, what });
        let (from, sectors) = (offset / SECTOR, length / SECTOR);
        if length == 0 || !offset.is_multiple_of(SECTOR) || !length.is_multiple_of(SECTOR) {
            return error("not some whole sectors");
        }
        if from < self.told {
            return error("not behind the range before");
        }
        if offset.checked_add(length).is_none_or(|end| end > self.header.virtual_size.get().min(MAX_VIRTUAL_SIZE)) {
            return error("beyond the end of the device");
        }
        self.told = from + sectors;
        Ok((from, sectors))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use aenv_block_device::BlockDevice;
    use uuid::Uuid;

    use super::*;
    use crate::layer::Layer;
    use crate::source::MemoryFile;
    use crate::stack::Stack;

    fn identity() -> Identity {
        Identity { uuid: Uuid::from_u128(1), ..Identity::default() }
    }

    /// The file, with `data` behind its header.
    fn file(assembly: Assembly, data: &[u8]) -> Vec<u8> {
        let mut file = assembly.header().to_vec();
        file.extend_from_slice(data);
        let tail = assembly.finish();
        assert_eq!(tail.position, file.len() as u64);
        file.extend_from_slice(&tail.bytes);
        assert_eq!(tail.finished.size, Bytes(file.len() as u64));
        file
    }

    #[test]
    fn data_in_any_order_of_the_file_is_read_in_that_of_the_device() {
        let mut assembly = Assembly::new(Bytes::mib(32), &identity());
        let mut data = vec![2; 4096];
        data.resize(4096 + (20 << 20), 1);
        assembly.data(0, 20 << 20, 8192).unwrap();
        assembly.zeroed(21 << 20, 10 << 20).unwrap();
        assembly.data(31 << 20, 4096, 4096).unwrap();
        let layer = Layer::open(Arc::new(MemoryFile::new("assembled", file(assembly, &data)))).unwrap();
        assert_eq!(layer.identity(), &identity());
        let lengths: Vec<_> = layer.index().entries().iter().map(|entry| entry.length()).collect();
        assert_eq!(lengths, [16376, 16376, 8208, 16376, 4104, 8], "cut at whole pages");
        let below = Stack::new(vec![layer.clone()]).unwrap();
        let mut read = vec![9; 32 << 20];
        below.read_at(0, &mut read).unwrap();
        let mut expected = vec![1; 20 << 20];
        expected.resize(31 << 20, 0);
        expected.resize((31 << 20) + 4096, 2);
        expected.resize(32 << 20, 0);
        assert!(read == expected);
    }

    #[test]
    fn an_assembled_layer_in_order_is_the_one_that_a_commit_writes() {
        let mut assembly = Assembly::new(Bytes::mib(1), &identity());
        assembly.data(4096, 8192, 4096).unwrap();
        assembly.zeroed(16384, 4096).unwrap();
        assembly.data(65536, 4096, 12288).unwrap();
        let data: Vec<u8> = (0..12288_u32).map(|n| (n / 512) as u8).collect();
        let assembled = file(assembly, &data);
        let layer = Layer::open(Arc::new(MemoryFile::new("assembled", assembled.clone()))).unwrap();
        let mut packed = Vec::new();
        layer.repack(&mut packed, &identity()).unwrap();
        assert!(packed == assembled);
    }

    #[test]
    fn what_an_index_cannot_hold_is_refused() {
        let mut assembly = Assembly::new(Bytes::mib(1), &identity());
        for (offset, length, position) in
            [(0, 0, 4096), (1, 512, 4096), (0, 511, 4096), (0, 512, 0), (0, 512, 4097), (1 << 20, 512, 4096)]
        {
            assembly.data(offset, length, position).unwrap_err();
        }
        assembly.zeroed(u64::MAX - 511, 512).unwrap_err();
        assembly.data(4096, 512, 4096).unwrap();
        assembly.zeroed(0, 512).unwrap_err();
        assembly.zeroed(4608, 512).unwrap();
    }
}
