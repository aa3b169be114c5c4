//! Writing finished layers: all that an index maps, packed in logical order.
//!
//! ```text
//! 0      header
//! 4096   data, in the order of the device
//!        index, padded to 256 entries, then zeros to 4096
//! -4096  trailer
//! ```
//!
//! Output is written from front to back, so it can go into a file, a ZFile, a tar or an upload. The same input gives the
//! same bytes.

use std::io::{self, Write};

use aenv_block_device::BlockDevice;
use aenv_model::Bytes;
use zerocopy::IntoBytes;

use crate::gather::Gather;
use crate::header::{BLOCK, Flags, Header, Identity};
use crate::index::Index;
use crate::layer::Layer;
use crate::mapping::{FIRST_DATA_SECTOR, Joined, MAX_LENGTH, Mapping, RawMapping, SECTOR};
use crate::source::Source;
use crate::stack::Stack;
use crate::upper::Upper;

/// Data read and written at once.
const BATCH: u64 = 1 << 20;

/// The index is padded to a multiple of this.
const INDEX_GROUP: usize = 256;

/// Largest index, padding included, that every reader of the format takes.
pub const PORTABLE_ENTRIES: u64 = 1_000_000;

/// A layer that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// Size of the LSMT file.
    pub size: Bytes,
    /// Entries stored, padding included. Beyond [`PORTABLE_ENTRIES`], some readers refuse the layer.
    pub entries: u64,
}

/// Why a layer could not be written.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// Data could not be read.
    #[error("read sectors {from}..{to} of the device")]
    Read {
        /// First sector.
        from: u64,
        /// The sector behind the last.
        to: u64,
        /// Why.
        source: io::Error,
    },
    /// The output took no more.
    #[error("write the layer")]
    Write(#[source] io::Error),
    /// What was pending in the upper could not be flushed.
    #[error("flush the upper")]
    Flush(#[source] io::Error),
    /// The caller did not want to go on.
    #[error("given up after {0} bytes")]
    GivenUp(u64),
}

impl Layer {
    /// Writes this layer again without what a log or a sparse file leaves between its data.
    pub fn repack(&self, out: &mut dyn Write, identity: &Identity) -> Result<Finished, CommitError> {
        let size = self.virtual_size();
        let clipped;
        let entries = if size == Bytes(0) {
            self.index().entries()
        } else {
            clipped = self.index().clone().clipped(size.get().div_ceil(SECTOR));
            clipped.entries()
        };
        write_layer(
            out,
            entries,
            Joined::with_capacity(entries.len()),
            |_| &**self.payload(),
            size,
            identity,
            &mut |_| true,
        )
    }
}

impl Stack {
    /// Writes the whole stack as one layer. `proceed` is told the bytes written so far; if it says no, the rest is not
    /// written.
    pub fn flatten(
        &self,
        out: &mut dyn Write,
        identity: &Identity,
        proceed: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Finished, CommitError> {
        let index = self.index().clone();
        let index = if self.size() == Bytes(0) { index } else { index.clipped(self.size().get().div_ceil(SECTOR)) };
        let joined = Joined::with_capacity(index.entries().len());
        write_layer(out, index.entries(), joined, |tag| self.file(tag), self.size(), identity, proceed)
    }
}

impl Upper {
    /// Writes what this upper maps as a layer. No write may run meanwhile unless the layout is log.
    pub fn commit(&self, out: &mut dyn Write, identity: &Identity) -> Result<Finished, CommitError> {
        let (entries, pinned) = self.pin();
        let size = self.virtual_size();
        let index = Index::from_sorted(entries);
        let index = if size == Bytes(0) { index } else { index.clipped(size.get() / SECTOR) };
        let finished = write_upper(out, index.entries(), self.source(), size, identity);
        drop(pinned);
        finished
    }
}

/// Writes what an upper maps. How it was written to is not seen in the layer.
pub(crate) fn write_upper(
    out: &mut dyn Write,
    entries: &[Mapping],
    source: &dyn Source,
    virtual_size: Bytes,
    identity: &Identity,
) -> Result<Finished, CommitError> {
    write_layer(out, entries, Joined::cut_at(MAX_LENGTH), |_| source, virtual_size, identity, &mut |_| true)
}

/// Writes the layer that `entries` describe; their tags choose among `file`. Its index is collected in `index`.
pub(crate) fn write_layer<'s>(
    out: &mut dyn Write,
    entries: &[Mapping],
    index: Joined,
    file: impl Fn(u8) -> &'s dyn Source,
    virtual_size: Bytes,
    identity: &Identity,
    proceed: &mut dyn FnMut(u64) -> bool,
) -> Result<Finished, CommitError> {
    let header = sealed_header(virtual_size, identity);
    out.write_all(&header.to_block()).map_err(CommitError::Write)?;
    let (index, end) = write_data(out, entries, index, file, proceed)?;

    let (tail, finished) = tail(header, index, end);
    out.write_all(&tail).map_err(CommitError::Write)?;
    Ok(finished)
}

/// The header of a layer that is complete in its own file. Where its index is, the trailer tells.
pub(crate) fn sealed_header(virtual_size: Bytes, identity: &Identity) -> Header {
    Header {
        flags: Flags::HEADER.with(Flags::DATA).with(Flags::SEALED),
        index_offset: 0,
        index_count: 0,
        virtual_size,
        identity: identity.clone(),
        version: (1, 1),
    }
}

/// Index and trailer of a layer with this `header`, whose data ends at sector `end` of its file.
pub(crate) fn tail(mut header: Header, index: Vec<Mapping>, end: u64) -> (Vec<u8>, Finished) {
    let mut raw: Vec<_> = index.into_iter().map(RawMapping::from).collect();
    raw.resize(raw.len().next_multiple_of(INDEX_GROUP), RawMapping::PADDING);
    header.flags = header.flags.without(Flags::HEADER);
    header.index_offset = end * SECTOR;
    header.index_count = raw.len() as u64;
    let mut tail = raw.as_bytes().to_vec();
    let trailer = (header.index_offset + tail.len() as u64).next_multiple_of(BLOCK);
    tail.resize((trailer - header.index_offset) as usize, 0);
    tail.extend_from_slice(&header.to_block());
    (tail, Finished { size: Bytes(trailer + BLOCK), entries: header.index_count })
}

/// Writes the data, and gives the index for it and the sector where it ends.
fn write_data<'s>(
    out: &mut dyn Write,
    entries: &[Mapping],
    mut index: Joined,
    file: impl Fn(u8) -> &'s dyn Source,
    proceed: &mut dyn FnMut(u64) -> bool,
) -> Result<(Vec<Mapping>, u64), CommitError> {
    let mut end = FIRST_DATA_SECTOR;
    let mut batch = Batch::new();
    for &entry in entries {
        if entry.is_zeroed() {
            index.push(Mapping::zeroed(entry.offset(), entry.length(), end));
            continue;
        }
        index.push(Mapping::data(entry.offset(), entry.length(), end));
        end += entry.length();
        let mut rest = Some(entry);
        while let Some(entry) = rest {
            let room = batch.room();
            let cut = entry.offset() + room.min(entry.length());
            batch.used += cut - entry.offset();
            batch.pieces.push(entry.clip(entry.offset(), cut));
            rest = (cut < entry.end()).then(|| entry.clip(cut, entry.end()));
            if batch.room() == 0 {
                batch.write(out, &file)?;
                let written = (end - rest.map_or(0, |entry| entry.length())) * SECTOR;
                if !proceed(written) {
                    return Err(CommitError::GivenUp(written));
                }
            }
        }
    }
    batch.write(out, &file)?;
    Ok((index.into_vec(), end))
}

/// Data that is read together and written by one call.
struct Batch {
    buf: Vec<u8>,
    pieces: Vec<Mapping>,
    /// Sectors in `pieces`.
    used: u64,
    /// Sectors that it may hold.
    limit: u64,
}

impl Batch {
    /// The first one ends where one that began with the header would, and so do the others: a page cache that is written at
    /// multiples of a large size gets large pages, which are read faster.
    fn new() -> Self {
        let limit = BATCH / SECTOR - FIRST_DATA_SECTOR;
        Self { buf: vec![0; BATCH as usize], pieces: Vec::new(), used: 0, limit }
    }

    fn room(&self) -> u64 {
        self.limit - self.used
    }

    fn write<'s>(&mut self, out: &mut dyn Write, file: &impl Fn(u8) -> &'s dyn Source) -> Result<(), CommitError> {
        let (Some(first), Some(last)) = (self.pieces.first(), self.pieces.last()) else { return Ok(()) };
        let (from, to) = (first.offset(), last.end());
        let buf = &mut self.buf[..(self.used * SECTOR) as usize];
        let mut gather = Gather::default();
        let mut rest = &mut *buf;
        for piece in self.pieces.drain(..) {
            let (now, later) = rest.split_at_mut((piece.length() * SECTOR) as usize);
            gather.push(u16::from(piece.tag()), file(piece.tag()), piece.position() * SECTOR, now);
            rest = later;
        }
        gather.read().map_err(|source| CommitError::Read { from, to, source })?;
        (self.used, self.limit) = (0, BATCH / SECTOR);
        out.write_all(buf).map_err(CommitError::Write)
    }
}
