//! Reads that are scattered over files, brought together into few large ones.
//!
//! A megabyte of a fragmented stack is hundreds of pieces in a handful of files. Within one file, pieces that follow each
//! other closely are read by one vectored read; what lies between them goes to a scratch buffer and is dropped, which
//! costs less than another system call (or, from far away, another request).

use std::cell::RefCell;
use std::io::{self, IoSliceMut};

use crate::source::Source;

/// Dropped bytes in one read, at most.
const SCRATCH: usize = 64 << 10;

thread_local! {
    static SCRATCH_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A part of a request that is in one place of one file.
struct Piece<'s, 'b> {
    /// Pieces of the same file carry the same number.
    file: u16,
    position: u64,
    source: &'s dyn Source,
    buf: &'b mut [u8],
}

/// The pieces of one request. Most have one: that costs no allocation.
#[derive(Default)]
pub(crate) struct Gather<'s, 'b> {
    first: Option<Piece<'s, 'b>>,
    others: Vec<Piece<'s, 'b>>,
}

impl<'s, 'b> Gather<'s, 'b> {
    /// Adds bytes of `source` from `position` on; `file` numbers the source within this request.
    pub(crate) fn push(&mut self, file: u16, source: &'s dyn Source, position: u64, buf: &'b mut [u8]) {
        let piece = Piece { file, position, source, buf };
        if self.first.is_none() {
            self.first = Some(piece);
        } else {
            self.others.push(piece);
        }
    }

    /// Fills every buffer.
    pub(crate) fn read(self) -> io::Result<()> {
        let Self { first, others: mut pieces } = self;
        let Some(first) = first else { return Ok(()) };
        if pieces.is_empty() {
            return first.source.read_at(first.position, first.buf);
        }
        pieces.push(first);
        pieces.sort_unstable_by_key(|piece| (piece.file, piece.position));
        let mut pieces = pieces.into_iter().peekable();
        while let Some(first) = pieces.next() {
            let (source, start) = (first.source, first.position);
            let longest_gap = source.gap();
            let mut run = vec![(0, first.buf)];
            let mut end = start + run[0].1.len() as u64;
            let mut dropped = 0;
            while let Some(next) = pieces.next_if(|next| {
                let gap = next.position.wrapping_sub(end); // huge if they overlap
                next.file == first.file && gap <= longest_gap && dropped + gap as usize <= SCRATCH
            }) {
                let gap = (next.position - end) as usize;
                dropped += gap;
                end = next.position + next.buf.len() as u64;
                run.push((gap, next.buf));
            }
            read_run(source, start, run, dropped)?;
        }
        Ok(())
    }
}

/// Reads buffers that follow each other in the file, each behind a gap.
fn read_run(source: &dyn Source, start: u64, run: Vec<(usize, &mut [u8])>, dropped: usize) -> io::Result<()> {
    if run.len() == 1 {
        return run.into_iter().try_for_each(|(_, buf)| source.read_at(start, buf));
    }
    let mut scratch = SCRATCH_BUFFER.take();
    if scratch.len() < dropped {
        scratch.resize(SCRATCH, 0);
    }
    let mut between = &mut scratch[..];
    let mut slices = Vec::with_capacity(run.len() * 2);
    for (gap, buf) in run {
        if gap > 0 {
            let (drop, rest) = between.split_at_mut(gap);
            slices.push(IoSliceMut::new(drop));
            between = rest;
        }
        slices.push(IoSliceMut::new(buf));
    }
    let result = source.read_vectored_at(start, &mut slices);
    SCRATCH_BUFFER.set(scratch);
    result
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Byte `n` is `n`; counts reads.
    #[derive(Debug, Default)]
    struct Ruler(AtomicUsize);

    impl Source for Ruler {
        fn name(&self) -> &str {
            "ruler"
        }

        fn size(&self) -> u64 {
            u64::MAX
        }

        fn gap(&self) -> u64 {
            MAX_GAP
        }

        fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
            self.read_vectored_at(offset, &mut [IoSliceMut::new(buf)])
        }

        fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            for (at, byte) in (offset..).zip(bufs.iter_mut().flat_map(|buf| buf.iter_mut())) {
                *byte = at as u8;
            }
            Ok(())
        }
    }

    const MAX_GAP: u64 = 4 << 10;

    #[test]
    fn near_neighbours_share_a_read_and_others_do_not() {
        let ruler = Ruler::default();
        let mut bytes = [0; 5];
        let [a, b, c, d, e] = &mut bytes;
        let mut gather = Gather::default();
        gather.push(0, &ruler, 30, std::slice::from_mut(a));
        gather.push(0, &ruler, 20, std::slice::from_mut(b)); // before the first, with a gap
        gather.push(0, &ruler, 31, std::slice::from_mut(c));
        gather.push(0, &ruler, 31 + MAX_GAP + 2, std::slice::from_mut(d)); // too far
        gather.push(1, &ruler, 32, std::slice::from_mut(e)); // another file
        gather.read().expect("read");
        assert_eq!(bytes, [30, 20, 31, (33 + MAX_GAP) as u8, 32]);
        assert_eq!(ruler.0.into_inner(), 3);
    }
}
