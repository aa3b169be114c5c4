//! overlaybd layers: finished ones, stacks of them, and writable uppers on top.

#![forbid(unsafe_code)]

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

pub use commit::{CommitError, Finished, PORTABLE_ENTRIES};
pub use copy::{CopyError, Sha256Writer, VerifyError, copy, digest, verify};
pub use device::{CompactError, CompactionPolicy, OpenDeviceError, OverlayDevice, RestackError, Restacked};
pub use export::{ExportError, Mapped, export};
pub use header::{Flags, Header, HeaderProblem, Identity, USER_TAG_LENGTH, UserTag};
pub use index::Index;
pub use inspect::{HeaderFacts, Inspected, Inspection, inspect};
pub use layer::{Layer, LayerProblem, MAX_ENTRIES, OpenLayerError, Packaging};
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
