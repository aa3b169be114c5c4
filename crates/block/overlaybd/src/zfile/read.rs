//! Reading a ZFile: a few blocks at a time, by any number of threads.

use std::cell::RefCell;
use std::io::{self, IoSliceMut};
use std::sync::Arc;

use zerocopy::little_endian::U32;
use zerocopy::{FromZeros, IntoBytes};

use super::codec::{CRC, Decompressor, block_crc, raw_crc};
use super::header::{BLOCK, MAGIC, ZFileInfo, ZFileProblem, ZHeader};
use super::jump::JumpTable;
use crate::source::Source;

/// How often a damaged block is read again, in case only a cache below is damaged.
const ATTEMPTS: usize = 3;

/// Compressed bytes fetched by one read, at most; a larger request takes several.
const FETCH: u64 = 1 << 20;

/// Jump table words read at once, so that memory grows with what is really there.
const WORDS_AT_ONCE: u64 = 1 << 16;

/// A compressed file, seen as what was compressed. Reads share nothing but the jump table and overlap freely.
#[derive(Debug)]
pub struct ZFile {
    source: Arc<dyn Source>,
    info: ZFileInfo,
    jump: JumpTable,
}

/// Why a ZFile could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenZFileError {
    /// Its bytes could not be had.
    #[error("read {what} of {file} at byte {offset}")]
    Read {
        /// Which file.
        file: String,
        /// Which part.
        what: &'static str,
        /// Where.
        offset: u64,
        /// Why.
        source: io::Error,
    },
    /// Its bytes are not those of a sound ZFile.
    #[error("{file} is not a usable ZFile")]
    Format {
        /// Which file.
        file: String,
        /// What is wrong, and where.
        source: ZFileProblem,
    },
}

/// A block that is damaged, in an [`io::Error`] of kind `InvalidData`.
#[derive(Debug, thiserror::Error)]
#[error("block {block} of {file} (content byte {content}, file byte {position}, {length} bytes) is damaged: {what}")]
pub struct BlockError {
    /// Which file.
    pub file: String,
    /// Which block.
    pub block: usize,
    /// Where its content begins, uncompressed.
    pub content: u64,
    /// Where it is in the file.
    pub position: u64,
    /// Its length in the file.
    pub length: usize,
    /// How it was noticed.
    pub what: String,
}

/// Memory a reading thread keeps: compressed bytes, one block, the decompressor.
#[derive(Default)]
struct Workspace {
    compressed: Vec<u8>,
    block: Vec<u8>,
    decompressor: Decompressor,
}

thread_local! {
    static WORKSPACE: RefCell<Workspace> = RefCell::default();
}

impl ZFile {
    /// Opens `source`; `None` if it does not begin like a ZFile.
    pub fn open(source: Arc<dyn Source>) -> Result<Option<Self>, OpenZFileError> {
        let file = source.name().to_owned();
        let read_error = |what, offset| {
            let file = file.clone();
            move |source| OpenZFileError::Read { file, what, offset, source }
        };
        let format_error = |source| OpenZFileError::Format { file: file.clone(), source };

        let size = source.size();
        let mut magic = [0; MAGIC.len()];
        if size < magic.len() as u64 {
            return Ok(None);
        }
        source.read_at(0, &mut magic).map_err(read_error("the magic", 0))?;
        if magic != MAGIC {
            return Ok(None);
        }
        if size < 2 * BLOCK {
            return Err(format_error(ZFileProblem::TooShort { size }));
        }
        let mut block = [0; BLOCK as usize];
        source.read_at(0, &mut block).map_err(read_error("the ZFile header", 0))?;
        let Some(header) = ZHeader::parse(&block, 0, "header").map_err(format_error)? else { return Ok(None) };
        let at = size - BLOCK;
        let deciding = if header.is_overwritten() {
            header
        } else {
            source.read_at(at, &mut block).map_err(read_error("the ZFile trailer", at))?;
            ZHeader::parse(&block, at, "trailer")
                .and_then(|trailer| trailer.ok_or(ZFileProblem::TrailerMagic { at }))
                .and_then(|trailer| trailer.require_trailer().map(|()| trailer))
                .map_err(format_error)?
        };
        let info = deciding.info(at).map_err(format_error)?;
        // A second try on fresh bytes: the first may have come from a damaged cache.
        let mut jump = read_jump_table(&*source, &info, deciding.index_crc());
        if matches!(jump, Ok(Err(ZFileProblem::IndexCrc { .. }))) {
            source.forget(info.index_offset, info.block_count * 4);
            jump = read_jump_table(&*source, &info, deciding.index_crc());
        }
        let jump = jump.map_err(read_error("the jump table", info.index_offset))?.map_err(format_error)?;
        Ok(Some(Self { source, info, jump }))
    }

    /// How it is made.
    #[must_use]
    pub fn info(&self) -> ZFileInfo {
        self.info
    }

    /// Uncompressed length of `block`: the last may be short.
    fn block_length(&self, block: usize) -> usize {
        let block_size = self.info.block_size.get();
        let left = self.info.original_size.get() - block as u64 * block_size as u64;
        block_size.min(left as usize)
    }

    /// Reads blocks `first..end` in one fetch and hands on their content.
    fn read_blocks(
        &self,
        first: usize,
        end: usize,
        target: &mut Target<'_, '_>,
        workspace: &mut Workspace,
    ) -> io::Result<()> {
        let Workspace { compressed, block: whole, decompressor } = workspace;
        let start = self.jump.position(first);
        let length = (self.jump.position(end) - start) as usize;
        if compressed.len() < length {
            compressed.resize(length, 0);
        }
        let compressed = &mut compressed[..length];
        self.source.read_at(start, compressed)?;
        for block in first..end {
            let from = (self.jump.position(block) - start) as usize;
            let to = (self.jump.position(block + 1) - start) as usize;
            let content = self.block_length(block);
            let encoded = &mut compressed[from..to];
            if let Some(out) = target.front(content) {
                self.decode(block, encoded, decompressor, out)?;
                target.advance(content);
            } else {
                whole.resize(content, 0);
                self.decode(block, encoded, decompressor, whole)?;
                target.put(whole);
            }
        }
        Ok(())
    }

    /// Decodes one block, reading it again if it is damaged.
    fn decode(
        &self,
        block: usize,
        encoded: &mut [u8],
        decompressor: &mut Decompressor,
        out: &mut [u8],
    ) -> io::Result<()> {
        let position = self.jump.position(block);
        let mut attempt = 1;
        loop {
            let Err(what) = self.try_decode(encoded, decompressor, out) else { return Ok(()) };
            if attempt == ATTEMPTS {
                let error = BlockError {
                    file: self.source.name().to_owned(),
                    block,
                    content: (block * self.info.block_size.get()) as u64,
                    position,
                    length: encoded.len(),
                    what,
                };
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
            attempt += 1;
            self.source.forget(position, encoded.len() as u64);
            self.source.read_at(position, encoded)?;
        }
    }

    fn try_decode(&self, encoded: &[u8], decompressor: &mut Decompressor, out: &mut [u8]) -> Result<(), String> {
        let compressed = if self.info.verify {
            // The jump table has no blocks too short for their check sum.
            let (compressed, stored) = encoded.split_at(encoded.len() - CRC);
            let crc = block_crc(compressed);
            if stored != crc.to_le_bytes() {
                return Err(format!("its check sum is {crc:#010x}, not the stored one"));
            }
            compressed
        } else {
            encoded
        };
        decompressor.decompress(self.info.algorithm, compressed, out).map_err(|error| error.to_string())
    }
}

impl Source for ZFile {
    fn name(&self) -> &str {
        self.source.name()
    }

    fn size(&self) -> u64 {
        self.info.original_size.get()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_vectored_at(offset, &mut [IoSliceMut::new(buf)])
    }

    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        let length: u64 = bufs.iter().map(|buf| buf.len() as u64).sum();
        let end = offset.checked_add(length).filter(|&end| end <= self.size());
        let Some(end) = end else { return Err(io::ErrorKind::UnexpectedEof.into()) };
        if length == 0 {
            return Ok(());
        }
        let block_size = self.info.block_size.get() as u64;
        let (mut block, last) = ((offset / block_size) as usize, end.div_ceil(block_size) as usize);
        let mut target = Target { bufs, skip: (offset % block_size) as usize };
        let mut workspace = WORKSPACE.take();
        while block < last {
            // As many blocks as one fetch may hold, at least one.
            let limit = self.jump.position(block) + FETCH;
            let mut next = block + 1;
            while next < last && self.jump.position(next + 1) <= limit {
                next += 1;
            }
            self.read_blocks(block, next, &mut target, &mut workspace)?;
            block = next;
        }
        WORKSPACE.set(workspace);
        Ok(())
    }

    /// A block is decompressed as a whole.
    fn gap(&self) -> u64 {
        self.info.block_size.get() as u64
    }

    fn forget(&self, offset: u64, length: u64) {
        let block_size = self.info.block_size.get() as u64;
        let blocks = self.info.block_count;
        let start = self.jump.position((offset / block_size).min(blocks) as usize);
        let end = self.jump.position(offset.saturating_add(length).div_ceil(block_size).min(blocks) as usize);
        self.source.forget(start, end.saturating_sub(start));
    }
}

/// Reads and checks the jump table of the file that `info` describes.
fn read_jump_table(
    source: &dyn Source,
    info: &ZFileInfo,
    crc: Option<u32>,
) -> io::Result<Result<JumpTable, ZFileProblem>> {
    let mut jump = JumpTable::new(info);
    let mut words = vec![U32::ZERO; info.block_count.min(WORDS_AT_ONCE) as usize];
    let mut seen_crc = 0;
    let mut problem = None;
    let mut done = 0;
    while done < info.block_count {
        let now = (info.block_count - done).min(WORDS_AT_ONCE);
        let part = &mut words[..now as usize];
        part.zero();
        let from = info.index_offset + done * 4;
        source.read_at(from, part.as_mut_bytes())?;
        seen_crc = raw_crc(seen_crc, part.as_bytes());
        for (word, at) in part.iter().zip((from..).step_by(4)) {
            // The check sum of the whole table is the better message, so go on until it is known.
            problem = problem.or_else(|| jump.push(word.get(), at).err());
        }
        done += now;
    }
    if crc.is_some_and(|crc| crc != seen_crc) {
        return Ok(Err(ZFileProblem::IndexCrc { at: info.index_offset }));
    }
    Ok(match problem {
        Some(problem) => Err(problem),
        None => jump.finish(info.index_offset),
    })
}

/// The buffers of a request, filled from front to back.
struct Target<'t, 'b> {
    bufs: &'t mut [IoSliceMut<'b>],
    /// Bytes of the first block that lie before the request.
    skip: usize,
}

impl Target<'_, '_> {
    /// The next `length` bytes, if they lie in one buffer; to be followed by [`advance`](Self::advance).
    fn front(&mut self, length: usize) -> Option<&mut [u8]> {
        IoSliceMut::advance_slices(&mut self.bufs, 0); // drops empty ones
        if self.skip > 0 {
            return None;
        }
        self.bufs.first_mut()?.get_mut(..length)
    }

    fn advance(&mut self, length: usize) {
        IoSliceMut::advance_slices(&mut self.bufs, length);
    }

    /// Hands out a block's content; what is not asked for is dropped.
    fn put(&mut self, content: &[u8]) {
        let mut content = &content[std::mem::take(&mut self.skip)..];
        while let [first, ..] = &mut *self.bufs
            && !content.is_empty()
        {
            let now = content.len().min(first.len());
            first[..now].copy_from_slice(&content[..now]);
            content = &content[now..];
            IoSliceMut::advance_slices(&mut self.bufs, now);
        }
    }
}
