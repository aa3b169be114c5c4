//! What a file is, without a hex dump.

use std::io;
use std::sync::Arc;

use aenv_model::Bytes;
use serde::Serialize;
use uuid::Uuid;

use crate::header::{BLOCK, Flags, Header, MAGIC};
use crate::layer::{Layer, OpenLayerError, Packaging, unwrap};
use crate::mapping::{Mapping, SECTOR};
use crate::source::Source;
use crate::upper::{Log, Mode, OpenUpperError, UpperProblem};
use crate::zfile::ZFileInfo;

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
        /// What its index maps.
        #[serde(flatten)]
        coverage: Coverage,
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
        /// Entries in the log, padding left out.
        log_entries: u64,
        /// Bytes behind the last whole entry: a write that a crash cut off.
        torn: u64,
        /// How long the data file must be for all its entries to count.
        needs: Bytes,
        /// What the entries map, the last one of each sector.
        #[serde(flatten)]
        coverage: Coverage,
    },
    /// A ZFile around something that is not a layer.
    #[serde(rename = "zfile")]
    ZFile {
        /// What it is made of, and the tar around it, if any.
        packaging: Packaging,
        /// How it is made.
        zfile: ZFileInfo,
    },
}

/// How much of a device an index maps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Coverage {
    /// Entries that are no padding.
    pub entries: u64,
    /// Those of them that make zeros.
    pub zeroed_entries: u64,
    /// Bytes of the device that there is data for.
    pub data: Bytes,
    /// Bytes of the device that are made zeros.
    pub zeroed: Bytes,
}

impl Coverage {
    /// Counts `entries`, which are disjoint.
    #[must_use]
    pub fn of(entries: impl IntoIterator<Item = Mapping>) -> Self {
        let (mut coverage, mut data, mut zeroed) = (Self::default(), 0, 0);
        for entry in entries {
            coverage.entries += 1;
            if entry.is_zeroed() {
                coverage.zeroed_entries += 1;
                zeroed += entry.length() * SECTOR;
            } else {
                data += entry.length() * SECTOR;
            }
        }
        Self { data: Bytes(data), zeroed: Bytes(zeroed), ..coverage }
    }
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

/// Why a file could not be told.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// It is no sound layer, nor anything else that is known.
    #[error(transparent)]
    Layer(#[from] OpenLayerError),
    /// It looks like a file of an upper and is none.
    #[error(transparent)]
    Upper(#[from] OpenUpperError),
}

/// Finds out what `source` is. The error is that of opening it as a layer, if it looks like nothing else.
pub fn inspect(source: Arc<dyn Source>) -> Result<Inspection, InspectError> {
    let (file, size) = (source.name().to_owned(), Bytes(source.size()));
    let content = match Layer::open(Arc::clone(&source)) {
        Ok(layer) => layer_facts(&layer).map_err(read_error(&file))?,
        Err(error) => match other(source)? {
            Some(content) => content,
            None => return Err(error.into()),
        },
    };
    Ok(Inspection { file, size, content })
}

fn layer_facts(layer: &Layer) -> io::Result<Inspected> {
    let coverage = Coverage::of(layer.index().entries().iter().copied());
    let mut block = [0; BLOCK as usize];
    layer.payload().read_at(0, &mut block)?;
    let compacted = Header::parse(&block, 0).is_ok_and(|header| header.flags.has(Flags::SEALED));
    Ok(Inspected::Layer {
        packaging: layer.packaging(),
        header: HeaderFacts::of(layer.trailer()),
        sealed_from: (!compacted).then(|| Mode::of(layer.trailer().flags)),
        coverage,
        unused: Bytes(layer.trailer().index_offset.saturating_sub(BLOCK + coverage.data.get())),
    })
}

/// What is no layer.
fn other(source: Arc<dyn Source>) -> Result<Option<Inspected>, InspectError> {
    let file = source.name().to_owned();
    let Ok((payload, packaging)) = unwrap(source) else { return Ok(None) };
    if let Some(zfile) = packaging.zfile {
        // Half a layer in a sound ZFile is a damaged layer.
        let mut magic = [0; MAGIC.len()];
        let is_layer = payload.size() >= magic.len() as u64 && {
            payload.read_at(0, &mut magic).map_err(read_error(&file))?;
            magic == MAGIC
        };
        return Ok((!is_layer).then_some(Inspected::ZFile { packaging, zfile }));
    }
    if payload.size() < BLOCK || packaging.tar.is_some() {
        return Ok(None);
    }
    let mut block = [0; BLOCK as usize];
    payload.read_at(0, &mut block).map_err(read_error(&file))?;
    let Ok(header) = Header::parse(&block, 0) else { return Ok(None) };
    if !header.flags.has(Flags::HEADER) || header.flags.has(Flags::SEALED) {
        return Ok(None);
    }
    let facts = HeaderFacts::of(&header);
    if header.flags.has(Flags::DATA) {
        let mode = Mode::of_upper(&header).map_err(upper_error(&file))?;
        return Ok(Some(Inspected::UpperData { mode, header: facts }));
    }
    let log = Log::read(&*payload, payload.size(), u64::MAX)?;
    Ok(Some(Inspected::UpperIndex {
        header: facts,
        log_entries: log.entries,
        torn: log.torn,
        needs: Bytes(log.data_end.max(BLOCK)),
        coverage: Coverage::of(log.live.entries()),
    }))
}

fn read_error(file: &str) -> impl Fn(io::Error) -> OpenLayerError + use<> {
    let file = file.to_owned();
    move |source| OpenLayerError::Read { file: file.clone(), what: "the header", offset: 0, source }
}

fn upper_error(file: &str) -> impl Fn(UpperProblem) -> OpenUpperError + use<> {
    let file = file.to_owned();
    move |source| OpenUpperError::Format { file: file.clone(), source }
}
