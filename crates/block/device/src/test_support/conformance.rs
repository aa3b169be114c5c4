//! What every [`BlockDevice`] must do. Each function panics with what it saw; [`suite`] runs them all.
//!
//! The device must be at least [`SMALLEST`] bytes; its content is overwritten.

use std::io;
use std::thread;

use crate::device::BlockDevice;

/// Smallest device the suite can work on.
pub const SMALLEST: u64 = 1 << 20;

/// Runs every check.
pub fn suite(device: &dyn BlockDevice) {
    assert!(device.size().get() >= SMALLEST, "the suite needs a device of {SMALLEST} bytes at least");
    reads_what_was_written(device);
    the_last_byte_is_there(device);
    refuses_what_lies_beyond_the_end(device);
    discarded_ranges_read_as_zeros(device);
    empty_requests_do_nothing(device);
    writers_of_different_ranges_do_not_disturb_each_other(device);
    behaves_like_a_vector_of_bytes(device);
}

/// Bytes come back from where they were put, at any alignment, before and after a flush.
pub fn reads_what_was_written(device: &dyn BlockDevice) {
    for (offset, length) in [(0, 512), (4096, 4096), (1, 1), (511, 2), (4095, 8194), (65536, 65536)] {
        let bytes = pattern(offset, length);
        device.write_at(offset, &bytes).expect("write");
        assert!(read(device, offset, length) == bytes, "{length} bytes at {offset} before a flush");
        device.flush().expect("flush");
        assert!(read(device, offset, length) == bytes, "{length} bytes at {offset} after a flush");
    }
}

/// The end is the end, not one sector before.
pub fn the_last_byte_is_there(device: &dyn BlockDevice) {
    let last = device.size().get() - 1;
    device.write_at(last, &[0xA5]).expect("write the last byte");
    assert_eq!(read(device, last, 1), [0xA5]);
}

/// Nothing beyond the end is read, written or discarded, not even in part.
pub fn refuses_what_lies_beyond_the_end(device: &dyn BlockDevice) {
    let size = device.size().get();
    device.write_at(size - 8, &[7; 8]).expect("write");
    for (offset, length) in [(size - 4, 8), (size, 1), (size + 4096, 16), (u64::MAX - 3, 8), (u64::MAX, 1)] {
        let refused = |what: &str, result: io::Result<()>| {
            let error = result.expect_err(what);
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{what} of {length} at {offset}: {error}");
        };
        refused("read", device.read_at(offset, &mut vec![0; length as usize]));
        refused("write", device.write_at(offset, &vec![9; length as usize]));
        refused("discard", device.discard(offset, length));
    }
    assert_eq!(read(device, size - 8, 8), [7; 8], "a refused access changed something");
}

/// Discard zeroes exactly its range.
pub fn discarded_ranges_read_as_zeros(device: &dyn BlockDevice) {
    for (offset, length) in [(8192, 4096), (4096, 65536), (513, 7), (1000, 9000)] {
        device.write_at(0, &[0xFF; 128 << 10]).expect("write");
        device.discard(offset, length).expect("discard");
        let bytes = read(device, 0, 128 << 10);
        for (at, byte) in (0..).zip(bytes) {
            let expected = if (offset..offset + length).contains(&at) { 0 } else { 0xFF };
            assert_eq!(byte, expected, "byte {at} after a discard of {length} at {offset}");
        }
    }
}

/// A request for nothing succeeds, also at the very end.
pub fn empty_requests_do_nothing(device: &dyn BlockDevice) {
    for offset in [0, device.size().get()] {
        device.read_at(offset, &mut []).expect("read nothing");
        device.write_at(offset, &[]).expect("write nothing");
        device.discard(offset, 0).expect("discard nothing");
    }
}

/// Concurrent writes to neighbouring ranges all arrive.
pub fn writers_of_different_ranges_do_not_disturb_each_other(device: &dyn BlockDevice) {
    const RANGE: u64 = 1000; // shares sectors with its neighbours on purpose
    thread::scope(|scope| {
        for writer in 0..4_u64 {
            scope.spawn(move || {
                for round in 0..50 {
                    let offset = (round * 4 + writer) * RANGE;
                    device.write_at(offset, &[writer as u8 + 1; RANGE as usize]).expect("write");
                }
            });
        }
    });
    for range in 0..200 {
        let expected = [(range % 4) as u8 + 1; RANGE as usize];
        assert!(read(device, range * RANGE, RANGE as usize) == expected, "range {range}");
    }
}

/// A long walk of mixed requests agrees with a vector at every step.
pub fn behaves_like_a_vector_of_bytes(device: &dyn BlockDevice) {
    let mut model = vec![0; SMALLEST as usize];
    device.discard(0, SMALLEST).expect("discard");
    let mut random = Xorshift(0x9E37_79B9_7F4A_7C15);
    for step in 0..500 {
        let offset = random.below(SMALLEST);
        let length = random.below(SMALLEST - offset).min(20_000);
        let range = offset as usize..(offset + length) as usize;
        match random.below(8) {
            0..3 => {
                let bytes = pattern(random.0, length as usize);
                device.write_at(offset, &bytes).expect("write");
                model[range].copy_from_slice(&bytes);
            }
            3 => {
                device.discard(offset, length).expect("discard");
                model[range].fill(0);
            }
            4 => device.flush().expect("flush"),
            _ => assert!(read(device, offset, length as usize) == model[range], "step {step}: {length} at {offset}"),
        }
    }
    assert!(read(device, 0, SMALLEST as usize) == model, "after the walk");
}

fn read(device: &dyn BlockDevice, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; length];
    device.read_at(offset, &mut bytes).expect("read");
    bytes
}

/// Bytes that differ with the seed and along the way.
fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Xorshift(seed | 1);
    (0..length).map(|_| random.next() as u8).collect()
}

/// Marsaglia's xorshift64: repeatable, and no dependency.
struct Xorshift(u64);

impl Xorshift {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Below `bound`; 0 if that is 0.
    fn below(&mut self, bound: u64) -> u64 {
        self.next().checked_rem(bound).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use aenv_model::Bytes;

    use super::*;
    use crate::test_support::{Counting, Failing, Lossy, MemoryDevice, Operation, Slow};

    #[test]
    fn every_wrapper_that_is_not_told_to_misbehave_passes() {
        suite(&MemoryDevice::new(Bytes::mib(2)));
        suite(&Lossy::new(MemoryDevice::new(Bytes::mib(2))));
        suite(&Failing::new(MemoryDevice::new(Bytes::mib(2))));
        suite(&Counting::new(Slow::new(MemoryDevice::new(Bytes::mib(2)), Duration::ZERO)));
    }

    #[test]
    fn a_failing_device_fails_from_when_it_is_told_until_it_heals() {
        let device = Failing::new(Counting::new(MemoryDevice::new(Bytes::mib(1))));
        device.fail(Operation::Write, 1, io::ErrorKind::StorageFull);
        device.write_at(0, &[1]).expect("one is granted");
        for _ in 0..2 {
            assert_eq!(device.write_at(0, &[2]).expect_err("told to").kind(), io::ErrorKind::StorageFull);
        }
        device.flush().expect("only writes fail");
        device.heal();
        device.write_at(0, &[3]).expect("healed");
        let counts = device.into_inner().counts();
        assert_eq!((counts.writes, counts.written_bytes, counts.flushes), (2, 2, 1));
    }
}
