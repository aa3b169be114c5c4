//! What a file is, without a hex dump.

use std::io;
use std::sync::Arc;

use aenv_model::Bytes;
use serde::Serialize;
use uuid::Uuid;

use crate::header::{BLOCK, Flags, Header, MAGIC};
use crate::layer::{Layer, OpenLayerError, Packaging};
use crate::mapping::SECTOR;
use crate::source::Source;
use crate::upper::Mode;
use crate::zfile::{OpenZFileError, ZFile, ZFileInfo};

/// What a file is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Inspection {
    /// Its name.
    pub file: String,
    /// Its size in bytes.
    pub size: Bytes,
    /// What is in it.
    pub content: Inspected,
}

/// What is in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Inspected {
    /// A finished layer.
    Layer {
        /// What it is wrapped in.
        packaging: Packaging,
        /// What its trailer says.
        header: HeaderFacts,
        /// Layout of the upper it was sealed from; none for a compacted layer.
        sealed_from: Option<Mode>,
        /// Entries that are no padding.
        entries: usize,
        /// Bytes of the device that it has data for.
        data: Bytes,
        /// Bytes of the device that it makes zeros.
        zeroed: Bytes,
        /// Bytes of its data area that nothing maps: overwritten, or holes.
        unused: Bytes,
    },
    /// The data file of an upper.
    UpperData {
        /// Its layout.
        mode: Mode,
        /// What its header says.
        header: HeaderFacts,
    },
    /// The index file of an upper.
    UpperIndex {
        /// What its header says.
        header: HeaderFacts,
        /// Entries in the log.
        entries: u64,
    },
    /// A ZFile around something that is not a layer.
    ZFile {
        /// How it is made.
        zfile: ZFileInfo,
    },
}

/// A header or trailer, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HeaderFacts {
    /// The flag word.
    pub flags: u32,
    /// This layer's UUID; nil for none.
    pub uuid: Uuid,
    /// That of the layer below it.
    pub parent_uuid: Uuid,
    /// The user tag, as far as it is text.
    pub user_tag: String,
    /// Size of the device; 0 to inherit it.
    pub virtual_size: Bytes,
    /// Where the index begins, in bytes.
    pub index_offset: u64,
    /// Entries stored, padding included.
    pub index_count: u64,
    /// Version and sub-version.
    pub version: (u8, u8),
}

impl HeaderFacts {
    fn of(header: &Header) -> Self {
        Self {
            flags: header.flags.0,
            uuid: header.identity.uuid,
            parent_uuid: header.identity.parent,
            user_tag: String::from_utf8_lossy(header.identity.user_tag.as_bytes()).into_owned(),
            virtual_size: header.virtual_size,
            index_offset: header.index_offset,
            index_count: header.index_count,
            version: header.version,
        }
    }
}

/// Finds out what `source` is. The error is that of opening it as a layer, if it is nothing else.
pub fn inspect(source: Arc<dyn Source>) -> Result<Inspection, OpenLayerError> {
    let (file, size) = (source.name().to_owned(), Bytes(source.size()));
    let content = match Layer::open(Arc::clone(&source)) {
        Ok(layer) => layer_facts(&layer).map_err(read_error(&file))?,
        Err(error) => match other(&source).map_err(read_error(&file))? {
            Some(content) => content,
            None => return Err(error),
        },
    };
    Ok(Inspection { file, size, content })
}

fn layer_facts(layer: &Layer) -> io::Result<Inspected> {
    let (mut data, mut zeroed) = (0, 0);
    for entry in layer.index().entries() {
        *(if entry.is_zeroed() { &mut zeroed } else { &mut data }) += entry.length() * SECTOR;
    }
    let mut block = [0; BLOCK as usize];
    layer.payload().read_at(0, &mut block)?;
    let compacted = Header::parse(&block, 0).is_ok_and(|header| header.flags.has(Flags::SEALED));
    Ok(Inspected::Layer {
        packaging: layer.packaging(),
        header: HeaderFacts::of(layer.trailer()),
        sealed_from: (!compacted).then(|| Mode::of(layer.trailer().flags)),
        entries: layer.index().entries().len(),
        data: Bytes(data),
        zeroed: Bytes(zeroed),
        unused: Bytes(layer.trailer().index_offset.saturating_sub(BLOCK + data)),
    })
}

/// What is no layer.
fn other(source: &Arc<dyn Source>) -> io::Result<Option<Inspected>> {
    match ZFile::open(Arc::clone(source)) {
        Ok(Some(zfile)) => {
            // Half a layer in a sound ZFile is a damaged layer.
            let mut magic = [0; MAGIC.len()];
            let is_layer = zfile.size() >= magic.len() as u64 && {
                zfile.read_at(0, &mut magic)?;
                magic == MAGIC
            };
            return Ok((!is_layer).then(|| Inspected::ZFile { zfile: zfile.info() }));
        }
        Ok(None) => {}
        Err(OpenZFileError::Read { source, .. }) => return Err(source),
        Err(OpenZFileError::Format { .. }) => return Ok(None),
    }
    let size = source.size();
    if size < BLOCK {
        return Ok(None);
    }
    let mut block = [0; BLOCK as usize];
    source.read_at(0, &mut block)?;
    let Ok(header) = Header::parse(&block, 0) else { return Ok(None) };
    let flags = header.flags;
    if !flags.has(Flags::HEADER) || flags.has(Flags::SEALED) || flags.has(Flags::SPARSE.with(Flags::HYBRID)) {
        return Ok(None);
    }
    let facts = HeaderFacts::of(&header);
    Ok(Some(if flags.has(Flags::DATA) {
        Inspected::UpperData { mode: Mode::of(flags), header: facts }
    } else {
        Inspected::UpperIndex { header: facts, entries: (size - BLOCK) / 16 }
    }))
}

fn read_error(file: &str) -> impl Fn(io::Error) -> OpenLayerError + use<> {
    let file = file.to_owned();
    move |source| OpenLayerError::Read { file: file.clone(), what: "the header", offset: 0, source }
}
