//! Wrapping a layer into a tar member while it is written.

use std::io::{self, Seek, SeekFrom, Write};

use super::BLOCK;

/// Where the payload begins.
const PAYLOAD: u64 = 3 * BLOCK;

/// Wraps what is written to it. The size is known only at the end, so the headers are provisional until
/// [`finish`](Self::finish) replaces them: a file that was not finished is not taken for a tar.
#[derive(Debug)]
pub struct TarWriter<W> {
    out: W,
    written: u64,
}

impl<W: Write + Seek> TarWriter<W> {
    /// Begins an archive at the start of `out`.
    pub fn new(mut out: W) -> io::Result<Self> {
        let mut provisional = header("overlaybd.new", b'0', 0);
        provisional[257..262].copy_from_slice(b"xxtar");
        provisional[263..265].copy_from_slice(b"xx");
        out.write_all(&provisional)?;
        out.write_all(&[0; (PAYLOAD - BLOCK) as usize])?;
        Ok(Self { out, written: 0 })
    }

    /// Ends the archive, writes the headers and gives back what it was written to. Not synced.
    pub fn finish(mut self) -> io::Result<W> {
        let padding = self.written.next_multiple_of(BLOCK) - self.written + 2 * BLOCK;
        self.out.write_all(&vec![0; padding as usize])?;
        let end = self.out.stream_position()?;
        self.out.seek(SeekFrom::Start(0))?;
        self.out.write_all(&headers(self.written))?;
        self.out.seek(SeekFrom::Start(end))?;
        self.out.flush()?;
        Ok(self.out)
    }
}

impl<W: Write> Write for TarWriter<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let written = self.out.write(buf)?;
        self.written += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// All that comes before a payload of `size` bytes.
fn headers(size: u64) -> Vec<u8> {
    let record = size_record(size);
    let mut headers = header("overlaybd.pax", b'x', record.len() as u64).to_vec();
    headers.extend_from_slice(record.as_bytes());
    headers.resize(2 * BLOCK as usize, 0);
    headers.extend_from_slice(&header("overlaybd.commit", b'0', 0));
    headers
}

/// A pax record; its length counts itself.
fn size_record(size: u64) -> String {
    let rest = format!(" size={size}\n");
    let mut length = rest.len() + 1;
    while length != rest.len() + length.to_string().len() {
        length += 1;
    }
    format!("{length}{rest}")
}

/// Mode, owner and time stay empty: equal layers shall give equal blobs.
fn header(name: &str, kind: u8, size: u64) -> [u8; BLOCK as usize] {
    let mut header = [0; BLOCK as usize];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[124..136].copy_from_slice(format!("{size:011o} ").as_bytes());
    header[156] = kind;
    header[257..263].copy_from_slice(b"ustar\0");
    header[263..265].copy_from_slice(b"00");
    header[148..156].fill(b' ');
    let sum: u64 = header.iter().copied().map(u64::from).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use crate::source::MemoryFile;
    use crate::tarwrap::{Member, detect};

    #[test]
    fn what_is_written_is_recognised_once_it_is_finished() {
        let mut tar = TarWriter::new(Cursor::new(Vec::new())).expect("new");
        tar.write_all(&[7; 1000]).expect("write");
        let unfinished = MemoryFile::new("half", tar.out.get_ref().clone());
        assert_eq!(detect(&unfinished).expect("read"), Ok(None));
        let bytes = tar.finish().expect("finish").into_inner();
        assert_eq!(bytes.len(), 1536 + 1024 + 1024);
        let finished = MemoryFile::new("whole", bytes);
        assert_eq!(detect(&finished).expect("read"), Ok(Some(Member { offset: 1536, size: 1000 })));
    }

    #[test]
    fn a_record_counts_its_own_length() {
        assert_eq!(size_record(1), "9 size=1\n");
        assert_eq!(size_record(10), "11 size=10\n");
        assert_eq!(size_record(45056), "14 size=45056\n");
    }
}
