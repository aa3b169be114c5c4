//! Sparse files, in the four ways GNU tar has written them.
//!
//! Old GNU: member type `S`, the map in the header and continuation blocks. PAX 0.0: repeated `GNU.sparse.offset` and
//! `.numbytes` records. PAX 0.1: one `GNU.sparse.map` record. PAX 1.0: the map as decimal lines before the data.

use std::io;

use tar::{GnuExtSparseHeader, GnuSparseHeader, Header};

use super::pax::Records;
use super::{BLOCK, malformed, number};

/// Longest map that is believed: a terabyte in pieces of a megabyte.
const MAX_EXTENTS: usize = 1 << 20;

/// A stretch of a sparse file that has data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// Where the stored bytes of a sparse file belong.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Map {
    pub(super) size: u64,
    pub(super) extents: Vec<Extent>,
}

impl Map {
    /// The extents must be in order, inside the file, and cover exactly the `stored` bytes.
    pub(super) fn check(&self, stored: u64) -> io::Result<()> {
        let mut end = 0;
        let mut total = 0u64;
        for extent in &self.extents {
            let next = extent.offset.checked_add(extent.length);
            match next {
                Some(next) if extent.offset >= end && next <= self.size => end = next,
                _ => return Err(malformed("a sparse file's map is out of order")),
            }
            total += extent.length; // bounded by `size`, as the extents don't overlap
        }
        if total != stored {
            return Err(malformed("a sparse file's map does not fit its data"));
        }
        Ok(())
    }

    fn push(&mut self, offset: u64, length: u64) -> io::Result<()> {
        if self.extents.len() == MAX_EXTENTS {
            return Err(malformed("a sparse file has too many pieces"));
        }
        self.extents.push(Extent { offset, length });
        Ok(())
    }
}

/// Old GNU. `block` reads the next continuation block.
pub(super) fn from_header(
    header: &Header,
    mut block: impl FnMut() -> io::Result<[u8; BLOCK as usize]>,
) -> io::Result<Map> {
    let gnu = header.as_gnu().ok_or_else(|| malformed("a sparse file without a GNU header"))?;
    let mut map = Map { size: number(&gnu.realsize, "real size")?, extents: Vec::new() };
    let mut add = |pieces: &[GnuSparseHeader]| -> io::Result<()> {
        for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
            map.push(piece.offset()?, piece.length()?)?;
        }
        Ok(())
    };
    add(&gnu.sparse)?;
    let mut more = gnu.is_extended();
    while more {
        let mut extension = GnuExtSparseHeader::new();
        *extension.as_mut_bytes() = block()?;
        add(extension.sparse())?;
        more = extension.is_extended();
    }
    Ok(map)
}

/// PAX 0.0 and 0.1; `None` if the records hold no map.
pub(super) fn from_records(records: &Records) -> io::Result<Option<Map>> {
    let Some(size) = records.number(b"GNU.sparse.size")? else { return Ok(None) };
    let mut map = Map { size, extents: Vec::new() };
    let broken = || malformed("a sparse file's map is malformed");
    if let Some(text) = records.get(b"GNU.sparse.map") {
        let mut numbers = text.split(|byte| *byte == b',').map(|digits| decimal(digits).ok_or_else(broken));
        while let Some(offset) = numbers.next() {
            map.push(offset?, numbers.next().ok_or_else(broken)??)?;
        }
        return Ok(Some(map));
    }
    let mut offset = None;
    for (key, value) in records.iter() {
        match key {
            b"GNU.sparse.offset" => offset = Some(decimal(value).ok_or_else(broken)?),
            b"GNU.sparse.numbytes" => {
                map.push(offset.take().ok_or_else(broken)?, decimal(value).ok_or_else(broken)?)?;
            }
            _ => {}
        }
    }
    Ok(Some(map))
}

/// Whether the records announce PAX 1.0.
pub(super) fn map_is_in_data(records: &Records) -> bool {
    records.get(b"GNU.sparse.major") == Some(b"1") && records.get(b"GNU.sparse.minor").is_none_or(|minor| minor == b"0")
}

/// PAX 1.0. `block` reads the next 512 bytes of the member's data.
pub(super) fn from_data(
    records: &Records,
    mut block: impl FnMut() -> io::Result<[u8; BLOCK as usize]>,
) -> io::Result<Map> {
    let broken = || malformed("a sparse file's map is malformed");
    let size = records.number(b"GNU.sparse.realsize")?.ok_or_else(broken)?;
    let mut map = Map { size, extents: Vec::new() };
    let mut text = Vec::new();
    let mut at = 0;
    let mut next = || -> io::Result<u64> {
        loop {
            if let Some(end) = text[at..].iter().position(|byte| *byte == b'\n') {
                let value = decimal(&text[at..at + end]).ok_or_else(broken);
                at += end + 1;
                return value;
            }
            if text.len() - at > 20 {
                return Err(broken()); // longer than any 64-bit number
            }
            text.drain(..at);
            at = 0;
            text.extend_from_slice(&block()?);
        }
    };
    let count = next()?;
    for _ in 0..count {
        map.push(next()?, next()?)?;
    }
    Ok(map)
}

fn decimal(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}
