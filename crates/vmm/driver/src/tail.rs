//! The last words of a process or a console.

use std::collections::VecDeque;

/// Keeps the newest bytes of a stream, in memory.
#[derive(Debug)]
pub struct Tail {
    bytes: VecDeque<u8>,
    limit: usize,
}

impl Tail {
    /// Keeps at most `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { bytes: VecDeque::new(), limit }
    }

    /// Adds to the stream; the oldest bytes beyond the limit are forgotten.
    pub fn push(&mut self, new: &[u8]) {
        let new = &new[new.len().saturating_sub(self.limit)..];
        let excess = (self.bytes.len() + new.len()).saturating_sub(self.limit);
        self.bytes.drain(..excess);
        self.bytes.extend(new);
    }

    /// As text, without surrounding white space.
    #[must_use]
    pub fn text(&self) -> String {
        let (front, back) = self.bytes.as_slices();
        String::from_utf8_lossy(&[front, back].concat()).trim().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_newest_bytes_are_kept() {
        let mut tail = Tail::new(4);
        for piece in [&b"abc"[..], b"def", b"", b"0123456789\n"] {
            tail.push(piece);
        }
        assert_eq!(tail.text(), "789");
    }
}
