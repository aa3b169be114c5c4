//! Copies of disk images that cost what the data costs, not what the size says.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use aenv_model::Bytes;
use rustix::fs::{SeekFrom, copy_file_range, ioctl_ficlone, seek};
use rustix::io::Errno;

/// Longest single `copy_file_range`, so that an interrupted copy is noticed soon.
const STEP: u64 = 64 << 20;

/// How a copy came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    /// Shared extents: no data was read or written.
    Reflink,
    /// Data copied, holes kept.
    Sparse,
}

/// What `base` occupies: an upper bound of what its sparse copy will.
pub(crate) fn occupied(base: &File) -> io::Result<Bytes> {
    Ok(Bytes(base.metadata()?.blocks() * 512))
}

/// Makes the empty file `copy` share the extents of `base`; `false` where the filesystem cannot.
pub(crate) fn reflink(base: &File, copy: &File) -> io::Result<bool> {
    match ioctl_ficlone(copy, base) {
        Ok(()) => Ok(true),
        // Other filesystem; no reflinks; not for such files.
        Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL | Errno::NOSYS | Errno::PERM) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Copies the data of `base` into the empty file `copy`, leaving its holes out. On an error `copy` holds a part.
pub(crate) fn sparse(base: &File, copy: &File) -> io::Result<()> {
    let size = base.metadata()?.len();
    copy.set_len(size)?;
    let mut at = 0;
    while at < size {
        let data = match seek(base, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => break, // only a hole is left
            // A filesystem that does not know its holes: all of it is data.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => at,
            Err(errno) => return Err(errno.into()),
        };
        let end = match seek(base, SeekFrom::Hole(data)) {
            Ok(end) => end.min(size),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => size,
            Err(errno) => return Err(errno.into()),
        };
        range(base, copy, data, end)?;
        at = end;
    }
    Ok(())
}

/// Copies the bytes `from..to`, in the kernel if it can.
fn range(base: &File, copy: &File, mut from: u64, to: u64) -> io::Result<()> {
    while from < to {
        let (mut source, mut target) = (from, from);
        let step = (to - from).min(STEP) as usize; // STEP fits
        match copy_file_range(base, Some(&mut source), copy, Some(&mut target), step) {
            // The base was cut short by someone; a copy of it would lie.
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(copied) => from += copied as u64,
            Err(Errno::INTR) => {}
            Err(Errno::XDEV | Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP | Errno::PERM) => {
                return range_by_hand(base, copy, from, to);
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

fn range_by_hand(base: &File, copy: &File, mut from: u64, to: u64) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 20];
    while from < to {
        let step = (to - from).min(buffer.len() as u64) as usize; // the buffer's length fits
        base.read_exact_at(&mut buffer[..step], from)?;
        copy.write_all_at(&buffer[..step], from)?;
        from += step as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tempfile::tempfile;

    fn content(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; file.metadata().expect("stat").len() as usize];
        file.read_exact_at(&mut bytes, 0).expect("read");
        bytes
    }

    #[test]
    fn a_sparse_copy_keeps_the_holes() {
        let (base, copy) = (tempfile().expect("base"), tempfile().expect("copy"));
        base.set_len(8 << 30).expect("size");
        base.write_all_at(b"early", 0).expect("write");
        base.write_all_at(b"late", 5 << 30).expect("write");
        sparse(&base, &copy).expect("copy");
        let mut late = [0; 4];
        copy.read_exact_at(&mut late, 5 << 30).expect("read");
        assert_eq!((&late, copy.metadata().expect("stat").len()), (b"late", 8 << 30));
        assert!(occupied(&copy).expect("stat") <= Bytes::mib(1), "{}", occupied(&copy).expect("stat"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn both_ways_of_copying_give_the_same_bytes(
            size in 1_usize..600_000,
            writes in prop::collection::vec((0_usize..600_000, 1_usize..5000, any::<u8>()), 0..6),
        ) {
            let base = tempfile().expect("base");
            base.set_len(size as u64).expect("size");
            for (at, length, byte) in writes {
                let at = at % size;
                base.write_all_at(&vec![byte; length.min(size - at)], at as u64).expect("write");
            }
            let (quick, slow) = (tempfile().expect("copy"), tempfile().expect("copy"));
            sparse(&base, &quick).expect("copy");
            range_by_hand(&base, &slow, 0, size as u64).expect("copy");
            prop_assert!(content(&base) == content(&quick));
            prop_assert!(content(&base) == content(&slow));
        }
    }
}
