//! Recording what is read.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, IoSliceMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aenv_block_overlaybd::Source;

use super::{Access, MAX_ACCESSES, Trace};

/// What is told apart: a page that was read once is not recorded again.
const PAGE: u64 = 4096;

/// Records the reads of an image's layers. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub struct TraceRecorder(Arc<Mutex<Recording>>);

#[derive(Default)]
struct Recording {
    accesses: Vec<Access>,
    /// Pages that were read, a bit each, by layer.
    touched: HashMap<u32, Vec<u64>>,
    finished: bool,
}

impl TraceRecorder {
    /// An empty recording.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same source, with its reads recorded as those of layer number `layer`. Reads that fail are not.
    #[must_use]
    pub fn wrap(&self, layer: u32, source: Arc<dyn Source>) -> Arc<dyn Source> {
        Arc::new(Recorded { recorder: self.clone(), layer, source })
    }

    /// Ends the recording and gives it. Wrapped sources go on without; a second call gives an empty trace.
    #[must_use]
    pub fn finish(&self) -> Trace {
        let mut recording = self.lock();
        recording.finished = true;
        recording.touched = HashMap::new();
        Trace { accesses: std::mem::take(&mut recording.accesses) }
    }

    /// A recording is a list at any moment.
    fn lock(&self) -> MutexGuard<'_, Recording> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recording {
    /// Adds the pages of a read that are new, in a layer of `size` bytes.
    fn add(&mut self, layer: u32, size: u64, offset: u64, length: u64) {
        if self.finished || length == 0 {
            return;
        }
        let touched = self.touched.entry(layer).or_default();
        for page in offset / PAGE..(offset + length).div_ceil(PAGE) {
            let (word, bit) = ((page / 64) as usize, 1 << (page % 64));
            if touched.len() <= word {
                touched.resize(word + 1, 0);
            }
            if touched[word] & bit != 0 {
                continue;
            }
            touched[word] |= bit;
            let (start, end) = (page * PAGE, ((page + 1) * PAGE).min(size));
            let full = self.accesses.len() == MAX_ACCESSES;
            match self.accesses.last_mut() {
                Some(last) if last.layer == layer && last.offset + last.length == start => {
                    last.length = end - last.offset
                }
                _ if full => self.finished = true,
                _ => self.accesses.push(Access { layer, offset: start, length: end - start }),
            }
        }
    }
}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recording").field("accesses", &self.accesses.len()).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Recorded {
    recorder: TraceRecorder,
    layer: u32,
    source: Arc<dyn Source>,
}

impl Recorded {
    fn record(&self, offset: u64, length: u64) {
        self.recorder.lock().add(self.layer, self.source.size(), offset, length);
    }
}

impl Source for Recorded {
    fn name(&self) -> &str {
        self.source.name()
    }

    fn size(&self) -> u64 {
        self.source.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.source.read_at(offset, buf)?;
        self.record(offset, buf.len() as u64);
        Ok(())
    }

    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        self.source.read_vectored_at(offset, bufs)?;
        self.record(offset, bufs.iter().map(|buf| buf.len() as u64).sum());
        Ok(())
    }

    fn gap(&self) -> u64 {
        self.source.gap()
    }

    fn forget(&self, offset: u64, length: u64) {
        self.source.forget(offset, length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_holds_first_touches_in_order() {
        let mut recording = Recording::default();
        for (layer, offset, length) in
            [(0, 10_000, 10), (0, 12_288, 5000), (1, 0, 1), (0, 8192, 100), (0, 0, 30_000), (0, 0, 0)]
        {
            recording.add(layer, 21_000, offset, length.min(21_000 - offset));
        }
        let access = |layer, offset, length| Access { layer, offset, length };
        assert_eq!(
            recording.accesses,
            [access(0, 8192, 12_288), access(1, 0, 4096), access(0, 0, 8192), access(0, 20_480, 520)]
        );
    }

    #[test]
    fn a_finished_recording_stays_as_it_is() {
        let recorder = TraceRecorder::new();
        recorder.lock().add(0, 4096, 0, 1);
        assert_eq!(recorder.finish().accesses().len(), 1);
        recorder.lock().add(1, 4096, 0, 1);
        assert_eq!(recorder.finish().accesses().len(), 0);
    }
}
