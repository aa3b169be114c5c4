//! overlaybd layers: finished ones, stacks of them, and writable uppers on top.
//!
//! ```text
//!                 OverlayDevice                 reads, writes, discards, flushes; any byte, any thread
//!                /             \
//!           Upper               Stack           the newest layer that has a sector wins
//!      log, hybrid, sparse     /  |  \
//!       data (+ index)      Layer Layer Layer   immutable; LSMT, maybe in a ZFile, maybe in a tar
//!             |                |    |    |
//!          Storage           Source  ...        files, or whatever else implements the trait
//! ```
//!
//! * An LSMT file maps ranges of a device to places in itself: header, data, a sorted index, trailer. A [`Layer`] is one that
//!   is finished; its index is checked whole when it is opened.
//! * An [`Upper`] is one that is written. Sealing appends index and trailer to its data file, and it is a layer.
//! * [`OverlayDevice::restack`] seals the upper of a running device and goes on with a fresh one: a disk snapshot.
//! * [`OverlayDevice::compact`] merges layers while the device runs, [`Stack::flatten`] all of them, [`Layer::repack`] one. An
//!   [`Assembly`] is a layer whose maker writes the data.
//! * [`ZFile`] reads compressed files block by block, [`ZFileWriter`] makes them on all cores, [`TarWriter`] wraps either.
//!
//! Everything blocks. There is no async runtime here, no socket, no global; a thread-local buffer is the only state outside
//! of values. Layouts are described where they are parsed: `header.rs`, `mapping.rs`, `zfile/header.rs`, `tarwrap.rs`.

#![forbid(unsafe_code)]

mod assemble;
mod commit;
mod copy;
mod device;
mod export;
mod gather;
mod header;
mod index;
mod inspect;
mod layer;
mod mapping;
mod merge;
mod seal;
mod source;
mod stack;
mod tarwrap;
mod upper;
mod zfile;

pub use assemble::{AssembleError, Assembly, LayerTail};
pub use commit::{CommitError, Finished, PORTABLE_ENTRIES};
pub use copy::{CopyError, Sha256Writer, VerifyError, copy, digest, verify};
pub use device::{CompactError, CompactionPolicy, OpenDeviceError, OverlayDevice, RestackError, Restacked};
pub use export::{ExportError, Mapped, export};
pub use header::{Flags, Header, HeaderProblem, Identity, USER_TAG_LENGTH, UserTag};
pub use index::Index;
pub use inspect::{Coverage, HeaderFacts, InspectError, Inspected, Inspection, inspect};
pub use layer::{Layer, LayerProblem, MAX_ENTRIES, OpenLayerError, Origin, Packaging, unwrap};
pub use mapping::{MAX_LENGTH, MAX_VIRTUAL_SIZE, Mapping, SECTOR};
pub use seal::{SealError, SealedUpper};
pub use source::{LocalFile, MemoryFile, Source, Storage};
pub use stack::{MAX_LAYERS, Stack, StackError};
pub use tarwrap::{Member, TarProblem, TarWriter};
pub use upper::{
    CreateUpperError, Mode, OpenUpperError, ResizeError, Upper, UpperFiles, UpperOptions, UpperProblem, UpperState,
};
pub use zfile::{
    Algorithm, BlockError, BlockSize, OpenZFileError, ZFile, ZFileInfo, ZFileOptions, ZFileProblem, ZFileSummary,
    ZFileWriter,
};
