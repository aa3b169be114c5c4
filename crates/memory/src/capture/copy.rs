//! What each of the threads does that copy.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use aenv_block_overlaybd::Assembly;
use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use super::CaptureError;
use super::turns::Turns;
use crate::layout::Piece;
use crate::pages::PAGE;

/// Bytes copied at once: they should still be in the core's cache when they are written.
const CHUNK: u64 = 512 << 10;

/// `UIO_MAXIOV` of Linux: pieces in one call, at most.
const MOST_PIECES: usize = 1024;

static ZEROS: [u8; PAGE as usize] = [0; PAGE as usize];

/// A stretch of guest memory, and what became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    Data { guest: u64, length: u64, position: u64 },
    Zeros { guest: u64, length: u64 },
}

impl Extent {
    pub(super) fn guest(&self) -> u64 {
        match *self {
            Self::Data { guest, .. } | Self::Zeros { guest, .. } => guest,
        }
    }
}

/// What the threads share.
pub(super) struct Copying<'c> {
    pid: u32,
    file: &'c File,
    /// What to call the file in errors.
    out: &'c Path,
    chunks: Vec<Vec<Piece>>,
    next: AtomicUsize,
    turns: Turns,
}

impl<'c> Copying<'c> {
    pub(super) fn new(pid: u32, file: &'c File, out: &'c Path, pieces: Vec<Piece>) -> Self {
        let turns = Turns::new(Assembly::DATA_START);
        Self { pid, file, out, chunks: chunks(pieces), next: AtomicUsize::new(0), turns }
    }

    pub(super) fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Copies chunks as long as there are any.
    pub(super) fn work(&self) -> Result<Vec<Extent>, CaptureError> {
        let stop = StopOnDrop(&self.turns);
        let mut buf = vec![0; CHUNK as usize];
        let mut extents = Vec::new();
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(pieces) = self.chunks.get(number) else { break };
            self.copy(number, pieces, &mut buf, &mut extents)?;
        }
        std::mem::forget(stop);
        Ok(extents)
    }

    fn copy(
        &self,
        number: usize,
        pieces: &[Piece],
        buf: &mut [u8],
        extents: &mut Vec<Extent>,
    ) -> Result<(), CaptureError> {
        let length: u64 = pieces.iter().map(|piece| piece.length).sum();
        let buf = &mut buf[..length as usize];
        self.read(pieces, buf)?;

        let first = extents.len();
        let mut packed = 0; // positions count from the chunk's own until that is known
        let mut kept: Vec<Range<usize>> = Vec::new();
        let mut at = 0;
        for piece in pieces {
            let end = at + piece.length as usize;
            for (guest, zeros, length) in runs(piece.guest, &buf[at..end]) {
                if zeros {
                    extents.push(Extent::Zeros { guest, length });
                } else {
                    extents.push(Extent::Data { guest, length, position: packed });
                    packed += length;
                    match kept.last_mut() {
                        Some(last) if last.end == at => last.end += length as usize,
                        _ => kept.push(at..at + length as usize),
                    }
                }
                at += length as usize;
            }
        }
        let begin = self.turns.place(number, packed).ok_or(CaptureError::GivenUp)?;
        for extent in &mut extents[first..] {
            if let Extent::Data { position, .. } = extent {
                *position += begin;
            }
        }
        let mut slices: Vec<_> = kept.into_iter().map(|part| IoSlice::new(&buf[part])).collect();
        self.write(&mut slices, begin).map_err(|source| CaptureError::write(self.out, source))
    }

    /// Fills `buf` with the bytes of `pieces`.
    fn read(&self, pieces: &[Piece], buf: &mut [u8]) -> Result<(), CaptureError> {
        let pid = Pid::from_raw(self.pid.cast_signed());
        let mut filled = 0;
        while filled < buf.len() {
            let rest = rest_of(pieces, filled as u64);
            let remote: Vec<_> =
                rest.map(|piece| RemoteIoVec { base: piece.host as usize, len: piece.length as usize }).collect();
            let address = remote.first().map_or(0, |first| first.base as u64);
            match process_vm_readv(pid, &mut [IoSliceMut::new(&mut buf[filled..])], &remote) {
                Ok(0) => {
                    let source = io::ErrorKind::UnexpectedEof.into();
                    return Err(CaptureError::Read { pid: self.pid, address, source });
                }
                Ok(read) => filled += read,
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(CaptureError::read(self.pid, address, errno)),
            }
        }
        Ok(())
    }

    /// Writes `slices` one after the other from byte `position` on.
    fn write(&self, mut slices: &mut [IoSlice<'_>], mut position: u64) -> io::Result<()> {
        while !slices.is_empty() {
            let now = slices.len().min(MOST_PIECES);
            match rustix::io::pwritev(self.file, &slices[..now], position) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    position += written as u64;
                    IoSlice::advance_slices(&mut slices, written);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

/// Whoever ends before its work is done must not leave others waiting.
struct StopOnDrop<'t>(&'t Turns);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Pieces in order, cut into portions that are copied at once.
fn chunks(pieces: Vec<Piece>) -> Vec<Vec<Piece>> {
    let mut chunks = Vec::new();
    let mut chunk = Vec::new();
    // The header comes first: so writes of pages without zeros among them begin at multiples of their size, for which
    // filesystems take large pages.
    let mut room = CHUNK - Assembly::DATA_START;
    for mut piece in pieces {
        while piece.length > 0 {
            let part = Piece { length: piece.length.min(room), ..piece };
            chunk.push(part);
            room -= part.length;
            if room == 0 || chunk.len() == MOST_PIECES {
                chunks.push(std::mem::take(&mut chunk));
                room = CHUNK;
            }
            piece.guest += part.length;
            piece.host += part.length;
            piece.length -= part.length;
        }
    }
    if !chunk.is_empty() {
        chunks.push(chunk);
    }
    chunks
}

/// `pieces` without their first `skip` bytes.
fn rest_of(pieces: &[Piece], mut skip: u64) -> impl Iterator<Item = Piece> + '_ {
    pieces.iter().filter_map(move |piece| {
        let now = skip.min(piece.length);
        skip -= now;
        let rest = Piece { guest: piece.guest + now, host: piece.host + now, length: piece.length - now };
        (rest.length > 0).then_some(rest)
    })
}

/// `bytes`, which are at `guest`, as runs of pages that are all zeros and of others: where, which of both, how long.
fn runs(mut guest: u64, bytes: &[u8]) -> impl Iterator<Item = (u64, bool, u64)> {
    let mut pages =
        bytes.chunks(PAGE as usize).map(|page| (*page == ZEROS[..page.len()], page.len() as u64)).peekable();
    std::iter::from_fn(move || {
        let (zeros, mut length) = pages.next()?;
        while let Some((_, more)) = pages.next_if(|&(others, _)| others == zeros) {
            length += more;
        }
        let at = guest;
        guest += length;
        Some((at, zeros, length))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_of_one_size_and_lose_nothing() {
        let pieces: Vec<_> = (0..3000)
            .map(|n| Piece { guest: n * 0x3000, host: n * 0x5000, length: 0x1000 + (n % 2) * 0x1000 })
            .collect();
        let large = Piece { guest: 1 << 40, host: 1 << 41, length: 3 << 20 };
        let all: Vec<_> = pieces.iter().copied().chain([large]).collect();
        let chunks = chunks(all.clone());
        let size = |chunk: &Vec<Piece>| chunk.iter().map(|piece| piece.length).sum::<u64>();
        assert_eq!(size(&chunks[0]), CHUNK - 4096);
        assert!(chunks.iter().all(|chunk| chunk.len() <= MOST_PIECES && size(chunk) <= CHUNK));
        let mut joined: Vec<Piece> = Vec::new();
        for piece in chunks.into_iter().flatten() {
            match joined.last_mut() {
                Some(last) if last.guest + last.length == piece.guest => {
                    assert_eq!(last.host + last.length, piece.host);
                    last.length += piece.length;
                }
                _ => joined.push(piece),
            }
        }
        assert_eq!(joined, all);
    }

    #[test]
    fn what_is_left_of_pieces_begins_where_a_read_ended() {
        let piece = |guest, host, length| Piece { guest, host, length };
        let pieces = [piece(0, 100, 10), piece(50, 200, 10)];
        let rest = |skip| rest_of(&pieces, skip).collect::<Vec<_>>();
        assert_eq!(rest(0), pieces);
        assert_eq!(rest(4), [piece(4, 104, 6), piece(50, 200, 10)]);
        assert_eq!(rest(10), [piece(50, 200, 10)]);
        assert_eq!(rest(13), [piece(53, 203, 7)]);
        assert_eq!(rest(20), []);
    }

    #[test]
    fn pages_of_zeros_are_runs_of_their_own() {
        let mut bytes = vec![0; 5 * PAGE as usize];
        bytes[PAGE as usize * 2 - 1] = 1;
        bytes[PAGE as usize * 2] = 1;
        let found: Vec<_> = runs(1 << 20, &bytes).map(|(at, zeros, length)| (at - (1 << 20), zeros, length)).collect();
        assert_eq!(found, [(0, true, 4096), (4096, false, 8192), (12288, true, 8192)]);
    }
}
