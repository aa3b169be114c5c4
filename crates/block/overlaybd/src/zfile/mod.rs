//! ZFile: a file compressed in blocks, readable at any place.
//!
//! ```text
//! 0             header, 512 bytes
//! 512           blocks, one after the other, each with its CRC
//! index offset  jump table: the encoded length of every block, 4 bytes each
//! size - 512    trailer, like the header but with the final values
//! ```
//!
//! A writer that can seek may put the final values into the header as well; then the trailer is not read.

mod codec;
mod header;
mod jump;
mod read;
mod workers;
mod write;

pub use codec::{Algorithm, BlockSize};
pub use header::{ZFileInfo, ZFileProblem};
pub use read::{BlockError, OpenZFileError, ZFile};
pub use write::{ZFileOptions, ZFileSummary, ZFileWriter};
