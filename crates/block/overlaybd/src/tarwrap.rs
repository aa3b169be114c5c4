//! The tar member around a layer, for registries that want to see a tar.
//!
//! ```text
//! 0     pax header `x`, overlaybd.pax
//! 512   its body: one record, the payload's size
//! 1024  file header `0`, overlaybd.commit, with size 0
//! 1536  payload, zeros to 512, two zero blocks
//! ```
//!
//! Read back, any POSIX archive with a valid first header counts, and its first member is the payload.

mod write;

use std::io;

use crate::source::Source;
pub use write::TarWriter;

const BLOCK: u64 = 512;

/// Headers that describe the next one rather than a file, in one chain. Real chains have one or two.
const MAX_CHAIN: usize = 16;

/// Longest pax body that is looked at.
const MAX_PAX: u64 = 64 << 10;

/// Where the payload lies within the archive, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Member {
    /// First byte.
    pub offset: u64,
    /// Length.
    pub size: u64,
}

/// What is wrong with a tar header chain.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TarProblem {
    /// A header after the first is none.
    #[error("the tar header chain breaks at byte {at}")]
    Chain {
        /// Where a header was expected.
        at: u64,
    },
    /// A pax header's body is too large to be one of ours.
    #[error("the pax header at byte {at} claims {size} bytes")]
    PaxTooLarge {
        /// Where the header is.
        at: u64,
        /// The size it gives.
        size: u64,
    },
    /// The member is longer than the file.
    #[error("the tar member at byte {offset} claims {size} bytes of a file of {file}")]
    Truncated {
        /// Where the payload begins.
        offset: u64,
        /// The size it should have.
        size: u64,
        /// The size of the archive.
        file: u64,
    },
}

/// Finds the payload if `source` begins like a POSIX archive; `Ok(Ok(None))` if it does not.
pub(crate) fn detect(source: &dyn Source) -> io::Result<Result<Option<Member>, TarProblem>> {
    let file = source.size();
    let mut header = [0; BLOCK as usize];
    let mut at = 0;
    let mut pax_size = None;
    for link in 0..MAX_CHAIN {
        let valid = file.saturating_sub(at) >= BLOCK && {
            source.read_at(at, &mut header)?;
            is_header(&header)
        };
        if !valid {
            return Ok(if link == 0 { Ok(None) } else { Err(TarProblem::Chain { at }) });
        }
        let size = octal(&header[124..136]).unwrap_or(0);
        let body = at + BLOCK;
        match header[156] {
            kind @ (b'x' | b'g' | b'L' | b'K') => {
                if size > MAX_PAX {
                    return Ok(Err(TarProblem::PaxTooLarge { at, size }));
                }
                if body + size > file {
                    return Ok(Err(TarProblem::Truncated { offset: body, size, file }));
                }
                if kind == b'x' {
                    let mut records = vec![0; size as usize];
                    source.read_at(body, &mut records)?;
                    pax_size = pax_record_size(&records).or(pax_size);
                }
                at = body + size.next_multiple_of(BLOCK);
            }
            _ => {
                let size = pax_size.filter(|&size| size > 0).unwrap_or(size);
                let fits = body.checked_add(size).is_some_and(|end| end <= file);
                return Ok(if fits {
                    Ok(Some(Member { offset: body, size }))
                } else {
                    Err(TarProblem::Truncated { offset: body, size, file })
                });
            }
        }
    }
    Ok(Err(TarProblem::Chain { at }))
}

/// POSIX magic and a sum that is right, as signed or as unsigned bytes. GNU's magic is another.
fn is_header(header: &[u8; BLOCK as usize]) -> bool {
    let sum_field = 148..156;
    let bytes = || header.iter().enumerate().map(|(at, &byte)| if sum_field.contains(&at) { b' ' } else { byte });
    let unsigned: u64 = bytes().map(u64::from).sum();
    let signed: i64 = bytes().map(|byte| i64::from(byte as i8)).sum();
    let stored = octal(&header[sum_field.clone()]);
    &header[257..262] == b"ustar"
        && &header[263..265] == b"00"
        && stored.is_some_and(|stored| stored == unsigned || i64::try_from(stored) == Ok(signed))
}

/// An octal number between blanks and NULs.
fn octal(field: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(field).ok()?.trim_matches(|c| c == ' ' || c == '\0');
    u64::from_str_radix(text, 8).ok()
}

/// The value of `size` among `<length> <key>=<value>\n` records.
fn pax_record_size(mut records: &[u8]) -> Option<u64> {
    let mut size = None;
    while let Some(blank) = records.iter().position(|&byte| byte == b' ') {
        let length: usize = std::str::from_utf8(&records[..blank]).ok()?.parse().ok()?;
        let record = records.get(blank + 1..length)?;
        if let Some(value) = record.strip_prefix(b"size=") {
            size = std::str::from_utf8(value).ok()?.trim_end().parse().ok();
        }
        records = &records[length..];
    }
    size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_size_record_counts() {
        assert_eq!(pax_record_size(b"14 size=45056\n"), Some(45056));
        assert_eq!(pax_record_size(b"11 path=ab\n9 size=7\n"), Some(7));
        assert_eq!(pax_record_size(b"0 \n"), None);
        assert_eq!(pax_record_size(b"99 size=1\n"), None);
        assert_eq!(pax_record_size(b""), None);
    }
}
