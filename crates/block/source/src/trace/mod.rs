//! Access traces: what a start read, in the order of its first touch.

mod file;
mod record;
mod session;

pub use self::file::{ReadTraceError, TraceProblem};
pub use self::record::TraceRecorder;
pub use self::session::{RecordTraceError, TraceRecording, TraceUse};

/// A trace has no more accesses than this: 24 MiB of file. Recording ends there, and longer files are refused.
pub const MAX_ACCESSES: usize = 1 << 20;

/// A range of a layer that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// Number of the layer in the image.
    pub layer: u32,
    /// First byte, in the layer as stored.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Ranges in the order in which they were first read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    accesses: Vec<Access>,
}

impl Trace {
    /// The accesses, first to last.
    #[must_use]
    pub fn accesses(&self) -> &[Access] {
        &self.accesses
    }
}
