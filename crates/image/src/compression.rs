//! What a layer is compressed with, by its first bytes: media types are often wrong about it.

use std::io::{self, BufRead, Read};

use flate2::bufread::MultiGzDecoder;

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
/// Zstandard frames that carry no data; a seekable or lazily readable layer may begin with one.
const ZSTD_SKIPPABLE: std::ops::RangeInclusive<u32> = 0x184d_2a50..=0x184d_2a5f;
const REFUSED: &[(&[u8], &str)] = &[(b"BZh", "bzip2"), (b"\xfd7zXZ", "xz"), (b"\x04\x22\x4d\x18", "lz4")];

/// The uncompressed bytes of `input`: gzip (of any number of members), Zstandard (of any number of frames) or as is.
///
/// Errors: `Unsupported` for another compression, naming it.
pub(crate) fn decompress<'a>(mut input: impl BufRead + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let start = input.fill_buf()?;
    if start.starts_with(GZIP) {
        return Ok(Box::new(MultiGzDecoder::new(input)));
    }
    let skippable = start.first_chunk().is_some_and(|magic| ZSTD_SKIPPABLE.contains(&u32::from_le_bytes(*magic)));
    if start.starts_with(ZSTD) || skippable {
        return Ok(Box::new(zstd::stream::read::Decoder::with_buffer(input)?));
    }
    if let Some((_, name)) = REFUSED.iter().find(|(magic, _)| start.starts_with(magic)) {
        return Err(io::Error::new(io::ErrorKind::Unsupported, format!("{name} compression is not used by images")));
    }
    Ok(Box::new(input))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn read(data: &[u8]) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        decompress(data)?.read_to_end(&mut all)?;
        Ok(all)
    }

    fn gzip(data: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(data).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn the_first_bytes_tell_the_compression() {
        assert_eq!(read(b"plain").unwrap(), b"plain");
        assert_eq!(read(b"").unwrap(), b"");
        assert_eq!(read(&gzip(b"zipped")).unwrap(), b"zipped");
        assert_eq!(read(&zstd::encode_all(&b"standard"[..], 1).unwrap()).unwrap(), b"standard");
    }

    #[test]
    fn all_members_and_frames_are_read() {
        assert_eq!(read(&[gzip(b"one "), gzip(b"two")].concat()).unwrap(), b"one two");
        let skippable = [&0x184d_2a50u32.to_le_bytes()[..], &3u32.to_le_bytes(), b"xyz"].concat();
        let frames = [skippable, zstd::encode_all(&b"one "[..], 1).unwrap(), zstd::encode_all(&b"two"[..], 1).unwrap()];
        assert_eq!(read(&frames.concat()).unwrap(), b"one two");
    }

    #[test]
    fn a_cut_or_foreign_stream_is_an_error() {
        let whole = gzip(&[7; 1000]);
        assert!(read(&whole[..whole.len() - 4]).is_err());
        assert!(read(b"BZh91AY").unwrap_err().to_string().contains("bzip2"));
    }
}
