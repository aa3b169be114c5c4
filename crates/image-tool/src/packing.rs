//! Writing a layer into its wrappings.

use std::io::Write;

use aenv_block_overlaybd::{
    Algorithm, BlockSize, CommitError, Finished, Identity, LocalFile, PORTABLE_ENTRIES, Source, TarWriter, UserTag,
    ZFileOptions, ZFileWriter, digest,
};
use aenv_model::Bytes;
use anyhow::{Context as _, Result};
use serde::Serialize;
use uuid::Uuid;

use crate::output::Output;
use crate::progress::Progress;
use crate::report;

/// How a layer is wrapped, who it is, and how that is told.
#[derive(Debug, clap::Args)]
pub(crate) struct Packing {
    /// Compress it.
    #[arg(long, value_name = "ALGORITHM")]
    zfile: Option<Compressor>,
    /// Bytes compressed at once: a power of two from 1024 to 65536.
    #[arg(long, value_name = "BYTES", requires = "zfile", default_value = "4096", value_parser = block_size)]
    block_size: BlockSize,
    /// Wrap it in a tar, for registries.
    #[arg(long)]
    tar: bool,
    /// Its UUID.
    #[arg(long)]
    pub(crate) uuid: Option<Uuid>,
    /// UUID of the layer below it.
    #[arg(long)]
    pub(crate) parent_uuid: Option<Uuid>,
    /// Its user tag, up to 256 bytes.
    #[arg(long, value_parser = user_tag)]
    pub(crate) tag: Option<UserTag>,
    /// Tell about the result as JSON.
    #[arg(long)]
    json: bool,
}

/// How a ZFile is compressed.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub(crate) enum Compressor {
    Lz4,
    Zstd,
}

impl Compressor {
    /// With check sums, on all cores.
    pub(crate) fn options(self, block_size: BlockSize) -> ZFileOptions {
        let algorithm = match self {
            Self::Lz4 => Algorithm::Lz4,
            Self::Zstd => Algorithm::Zstd,
        };
        ZFileOptions { algorithm, block_size, ..ZFileOptions::default() }
    }
}

/// Parses the size of a ZFile's blocks. Blocks of 512 bytes are read, but not written: readers that keep positions for 64 KiB
/// together have no room for those that do not compress.
pub(crate) fn block_size(text: &str) -> Result<BlockSize, String> {
    let size = text.parse().ok().and_then(BlockSize::new).filter(|size| size.get() >= 1024);
    size.ok_or_else(|| "not a power of two from 1024 to 65536".to_owned())
}

fn user_tag(text: &str) -> Result<UserTag, String> {
    UserTag::new(text.as_bytes()).ok_or_else(|| format!("{} bytes, more than 256", text.len()))
}

/// A layer that was written.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Written {
    file: String,
    size: Bytes,
    digest: String,
    uuid: Uuid,
    parent_uuid: Uuid,
    virtual_size: Bytes,
    /// Size of the LSMT file, without wrappings.
    payload_size: Bytes,
    /// Entries in its index, padding included.
    index_count: u64,
}

impl Packing {
    /// Puts what `write` writes into its wrappings, then in place, and tells about it.
    pub(crate) fn write(
        &self,
        output: Output,
        identity: &Identity,
        virtual_size: Bytes,
        write: impl FnOnce(&mut dyn Write) -> Result<Finished, CommitError>,
    ) -> Result<()> {
        let name = output.path().display().to_string();
        let finished = self.wrap(&output, write).with_context(|| format!("make {name}"))?;
        if finished.entries > PORTABLE_ENTRIES {
            eprintln!("warning: {name} has {} index entries; some readers take {PORTABLE_ENTRIES}", finished.entries);
        }
        let whole = LocalFile::from_file(output.file().try_clone()?, name.clone());
        let written = Written {
            size: Bytes(whole.size()),
            digest: sha256(&whole)?,
            file: name,
            uuid: identity.uuid,
            parent_uuid: identity.parent,
            virtual_size,
            payload_size: finished.size,
            index_count: finished.entries,
        };
        output.publish()?;
        if self.json {
            return report::print_json(&written);
        }
        let Written { file, size, digest, uuid, .. } = written;
        report::print(&format!("{file}: {} bytes, {digest}, uuid {uuid}", size.get()))
    }

    fn wrap(
        &self,
        output: &Output,
        write: impl FnOnce(&mut dyn Write) -> Result<Finished, CommitError>,
    ) -> Result<Finished> {
        let mut file = output.file();
        let options = self.zfile.map(|compressor| compressor.options(self.block_size));
        Ok(match (options, self.tar) {
            (None, false) => write(&mut file)?,
            (None, true) => {
                let mut tar = TarWriter::new(file)?;
                let finished = write(&mut tar)?;
                tar.finish()?;
                finished
            }
            (Some(options), false) => {
                let mut zfile = ZFileWriter::new(file, options)?;
                let finished = write(&mut zfile)?;
                zfile.finish_with_header()?;
                finished
            }
            (Some(options), true) => {
                let mut zfile = ZFileWriter::new(TarWriter::new(file)?, options)?;
                let finished = write(&mut zfile)?;
                zfile.finish()?.0.finish()?;
                finished
            }
        })
    }
}

/// The digest of all of `source`, as registries write it.
pub(crate) fn sha256(source: &dyn Source) -> Result<String> {
    let progress = Progress::new("hashing", source.size());
    let hash = digest(source, &mut progress.follow())?;
    Ok(format!("sha256:{}", hex::encode(hash)))
}
