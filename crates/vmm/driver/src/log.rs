//! A log file with an upper bound.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use aenv_model::Bytes;

/// A file that keeps the newest output and never occupies more than its limit.
///
/// When an append would pass the limit, the newest half of what is there moves to the front of the file, from the
/// start of a line, and the rest is cut off: one copy of half the limit for every other half written. The file stays
/// the same file, so an open reader sees it shrink; `tail -F` copes.
///
/// Blocking. Nothing is synced: it is a log.
#[derive(Debug)]
pub struct BoundedLog {
    file: File,
    size: u64,
    limit: u64,
}

impl BoundedLog {
    /// Opens the log, or creates it (mode 0600); output of an earlier run is kept, as far as the limit allows.
    pub fn open(path: &Path, limit: Bytes) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(path)?;
        let size = file.metadata()?.len();
        let mut log = Self { file, size, limit: limit.get() };
        if log.size > log.limit {
            log.keep_newest(log.limit / 2)?;
        }
        Ok(log)
    }

    /// Appends `output`; of an output larger than the limit, its end.
    pub fn append(&mut self, output: &[u8]) -> io::Result<()> {
        let mut output = output;
        if self.size + output.len() as u64 > self.limit {
            let half = self.limit / 2;
            let newest = usize::try_from(half).map_or(output.len(), |half| half.min(output.len()));
            output = &output[output.len() - newest..];
            self.keep_newest(half - newest as u64)?;
        }
        self.file.write_all_at(output, self.size)?;
        self.size += output.len() as u64;
        Ok(())
    }

    /// Drops all but the newest `length` bytes, and of those an incomplete first line.
    fn keep_newest(&mut self, length: u64) -> io::Result<()> {
        let length = length.min(self.size);
        let mut kept = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut kept, self.size - length)?;
        let first_line = kept.iter().position(|&b| b == b'\n').map_or(0, |newline| newline + 1);
        let kept = if length < self.size { &kept[first_line..] } else { &kept[..] };
        self.file.write_all_at(kept, 0)?;
        self.file.set_len(kept.len() as u64)?;
        self.size = kept.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(range: std::ops::Range<u32>) -> String {
        range.map(|n| format!("line {n:03}\n")).collect()
    }

    #[test]
    fn the_newest_whole_lines_stay_and_the_limit_holds_at_every_instant() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let mut log = BoundedLog::open(&path, Bytes(100)).unwrap();
        for n in 0..50 {
            log.append(lines(n..n + 1).as_bytes()).unwrap();
            assert!(path.metadata().unwrap().len() <= 100);
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let kept = u32::try_from(text.lines().count()).unwrap();
        assert!(kept >= 5, "{text}");
        assert_eq!(text, lines(50 - kept..50));
    }

    #[test]
    fn a_reopened_log_goes_on_and_obeys_a_smaller_limit() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        BoundedLog::open(&path, Bytes(1000)).unwrap().append(lines(0..30).as_bytes()).unwrap();
        let mut log = BoundedLog::open(&path, Bytes(100)).unwrap();
        log.append(b"new\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), lines(25..30) + "new\n");
    }

    #[test]
    fn of_an_output_beyond_the_limit_its_end_stays() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let mut log = BoundedLog::open(&path, Bytes(10)).unwrap();
        log.append(b"old\n").unwrap();
        log.append(b"0123456789abcdefghij").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"fghij");
    }
}
