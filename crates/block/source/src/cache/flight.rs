//! Blocks on their way: fetched once, handed to everybody who came for them meanwhile.

use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};

/// Bytes that arrived, and where in the blob they belong.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) offset: u64,
    pub(super) bytes: Vec<u8>,
}

impl Loaded {
    /// The part from `offset` on that is here.
    pub(super) fn from(&self, offset: u64) -> &[u8] {
        let start = offset.checked_sub(self.offset).and_then(|start| usize::try_from(start).ok());
        start.and_then(|start| self.bytes.get(start..)).unwrap_or_default()
    }
}

/// One fetch, set once: by its [`Pilot`].
#[derive(Debug, Default)]
pub(super) struct Flight(OnceLock<Result<Loaded, Arc<io::Error>>>);

impl Flight {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Waits for the bytes, for as long as their source has patience.
    pub(super) fn wait(&self) -> io::Result<&Loaded> {
        self.0.wait().as_ref().map_err(|error| io::Error::new(error.kind(), SharedError(Arc::clone(error))))
    }
}

/// Whoever fetches. However it ends, nobody waits forever.
pub(super) struct Pilot(Arc<Flight>);

impl Pilot {
    pub(super) fn new(flight: &Arc<Flight>) -> Self {
        Self(Arc::clone(flight))
    }

    pub(super) fn land(&self, result: io::Result<Loaded>) {
        // Only its pilot lands a flight, and once.
        let _ = self.0.0.set(result.map_err(Arc::new));
    }
}

impl Drop for Pilot {
    fn drop(&mut self) {
        self.0.0.get_or_init(|| Err(Arc::new(io::Error::other("the read that fetched this block panicked"))));
    }
}

/// One failure, told to several readers.
#[derive(Debug)]
struct SharedError(Arc<io::Error>);

impl fmt::Display for SharedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for SharedError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}
