//! The file system that images are unpacked onto: how it is made, and what it looks like in the end.

mod canonical;
mod mkfs;

pub(crate) use self::canonical::{CanonicalError, make_canonical};
pub(crate) use self::mkfs::{MKFS, MkfsError, mkfs};

/// Size of a block.
pub(crate) const BLOCK: u64 = 4096;
/// The volume label of every root file system.
pub const LABEL: &str = "aenv-root";

#[cfg(test)]
mod tests;
