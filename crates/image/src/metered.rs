//! A reader that tells how far it is, and stops when told to.

use std::io::{self, BufRead, Read};

use tokio_util::sync::CancellationToken;

/// Counts what is consumed of `input`. Once cancelled, every read fails.
pub(crate) struct Metered<R, F> {
    input: R,
    cancel: CancellationToken,
    done: u64,
    tell: F,
}

impl<R, F: Fn(u64)> Metered<R, F> {
    pub(crate) fn new(input: R, cancel: CancellationToken, tell: F) -> Self {
        Self { input, cancel, done: 0, tell }
    }
}

impl<R: BufRead, F: Fn(u64)> Read for Metered<R, F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.fill_buf()?.read(buffer)?;
        self.consume(n);
        Ok(n)
    }
}

impl<R: BufRead, F: Fn(u64)> BufRead for Metered<R, F> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.cancel.is_cancelled() {
            return Err(io::Error::other("cancelled"));
        }
        self.input.fill_buf()
    }

    fn consume(&mut self, n: usize) {
        self.input.consume(n);
        self.done += n as u64;
        if n > 0 {
            (self.tell)(self.done);
        }
    }
}
