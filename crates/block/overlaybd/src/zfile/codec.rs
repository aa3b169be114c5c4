//! The two compressors, and the check sum around them.

use std::io;

use serde::Serialize;

/// How blocks are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    /// Raw lz4 blocks.
    Lz4,
    /// One zstd frame a block, level 3.
    Zstd,
}

impl Algorithm {
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Lz4),
            2 => Some(Self::Zstd),
            _ => None,
        }
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Lz4 => 1,
            Self::Zstd => 2,
        }
    }
}

const ZSTD_LEVEL: i32 = 3;

/// Uncompressed bytes of a block: a power of two from 512 B to 64 KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct BlockSize(u32);

impl BlockSize {
    /// The usual one, 4 KiB.
    pub const DEFAULT: Self = Self(4096);

    /// Takes `bytes`, or nothing if they are no valid size.
    #[must_use]
    pub fn new(bytes: u32) -> Option<Self> {
        (bytes.is_power_of_two() && (512..=65536).contains(&bytes)).then_some(Self(bytes))
    }

    /// In bytes.
    #[must_use]
    pub fn get(self) -> usize {
        self.0 as usize
    }

    /// No compressed block of this size is longer, whatever is in it.
    pub(crate) fn bound(self) -> usize {
        self.get() + 512
    }

    /// Room that a compressor wants for a block, more than it will use.
    pub(crate) fn room(self) -> usize {
        lz4_flex::block::get_maximum_output_size(self.get()).max(zstd::zstd_safe::compress_bound(self.get()))
    }
}

/// Bytes of the check sum behind a block.
pub(crate) const CRC: usize = 4;

/// CRC-32C without inversion at either end, as the format has it: state in, state out.
pub(crate) fn raw_crc(state: u32, bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!state, bytes)
}

/// The check sum of a block's compressed bytes.
pub(crate) fn block_crc(compressed: &[u8]) -> u32 {
    const START: u32 = 100_007;
    raw_crc(START, compressed)
}

/// A compressor with its working memory.
pub(crate) enum Compressor {
    Lz4(lz4_flex::block::CompressTable),
    Zstd(zstd::bulk::Compressor<'static>),
}

impl Compressor {
    pub(crate) fn new(algorithm: Algorithm) -> io::Result<Self> {
        Ok(match algorithm {
            Algorithm::Lz4 => Self::Lz4(lz4_flex::block::CompressTable::default()),
            Algorithm::Zstd => Self::Zstd(zstd::bulk::Compressor::new(ZSTD_LEVEL)?),
        })
    }

    /// Compresses one block into `out`, which is large enough; the length is returned.
    pub(crate) fn compress(&mut self, block: &[u8], out: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Lz4(table) => lz4_flex::block::compress_into_with_table(block, out, table).map_err(io::Error::other),
            Self::Zstd(compressor) => compressor.compress_to_buffer(block, out),
        }
    }
}

/// A decompressor with its working memory.
#[derive(Default)]
pub(crate) struct Decompressor {
    zstd: Option<zstd::bulk::Decompressor<'static>>,
}

impl Decompressor {
    /// Restores one block; fails unless it fills `out` exactly.
    pub(crate) fn decompress(&mut self, algorithm: Algorithm, compressed: &[u8], out: &mut [u8]) -> io::Result<()> {
        let expected = out.len();
        let length = match algorithm {
            Algorithm::Lz4 => lz4_flex::block::decompress_into(compressed, out)
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?,
            Algorithm::Zstd => {
                let zstd = match &mut self.zstd {
                    Some(zstd) => zstd,
                    none => none.insert(zstd::bulk::Decompressor::new()?),
                };
                zstd.decompress_to_buffer(compressed, out)?
            }
        };
        if length == expected {
            Ok(())
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidData, format!("{length} bytes came out instead of {expected}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_compressed_comes_back_and_damage_does_not_panic() {
        for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
            let mut state = 1_u32;
            let noise = |_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            };
            for block in [vec![0; 65536], (0..65536).map(noise).collect::<Vec<_>>(), vec![1]] {
                let size = BlockSize::new(65536).expect("valid");
                let mut out = vec![0; size.room()];
                let length = Compressor::new(algorithm).expect("new").compress(&block, &mut out).expect("compress");
                assert!(length <= size.bound());
                let mut back = vec![0; block.len()];
                let mut decompressor = Decompressor::default();
                decompressor.decompress(algorithm, &out[..length], &mut back).expect("decompress");
                assert!(back == block);
                for at in 0..length.min(300) {
                    let mut damaged = out[..length].to_vec();
                    damaged[at] ^= 0x55;
                    let _ = decompressor.decompress(algorithm, &damaged, &mut back);
                }
            }
        }
    }
}
