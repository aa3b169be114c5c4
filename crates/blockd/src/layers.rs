//! Opening the layers of a device, wherever they are.
//!
//! Devices of the same layers share them, and the index merged of them: the hundredth sandbox of a template opens nothing
//! but its own upper.

use std::collections::HashMap;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread;

use aenv_block_client::{DeviceConfig, ErrorKind, Lower};
use aenv_block_overlaybd::{Layer, LocalFile, OpenLayerError, Source, Stack, StackError};
use aenv_block_source::{BlockCache, CachedBlob, TraceRecorder};

use crate::error::{Refusal, cause};
use crate::origins::{OriginError, Origins};

/// Opens layers.
#[derive(Debug)]
pub(crate) struct Layers {
    origins: Origins,
    cache: BlockCache,
    /// Layers of one device opened at a time.
    threads: usize,
    /// What is open, for as long as somebody uses it.
    open: Mutex<HashMap<Vec<Place>, Weak<Opened>>>,
}

/// The layers of a device, open.
#[derive(Debug)]
pub(crate) struct Opened {
    /// All of them.
    pub(crate) stack: Stack,
    /// Those that are remote, by number.
    pub(crate) blobs: Vec<Option<Arc<CachedBlob>>>,
}

/// Where a layer's bytes are. Equal places have equal bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Place {
    File {
        path: PathBuf,
        /// Device, inode, length, time of change (s, ns): not just the same name.
        identity: (u64, u64, u64, i64, i64),
    },
    Blob {
        url: String,
        digest: String,
    },
}

/// Layers could not be opened. They are numbered from the bottom.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenLayersError {
    /// It is not where it could be.
    #[error("layer {number} is neither at {tried} nor anywhere else")]
    Missing {
        number: usize,
        /// Where it was looked for.
        tried: String,
    },
    /// It cannot be looked at.
    #[error("open layer {number} at {path}", path = path.display())]
    File { number: usize, path: PathBuf, source: io::Error },
    /// It was cut, or is another.
    #[error("layer {number} at {path} is {found} bytes long, not {expected}", path = path.display())]
    Length { number: usize, path: PathBuf, found: u64, expected: u64 },
    /// It cannot be where it is said to be.
    #[error("layer {number}")]
    Origin { number: usize, source: OriginError },
    /// It is not a layer, or cannot be read.
    #[error("open layer {number}")]
    Open { number: usize, remote: bool, source: OpenLayerError },
    /// They do not make a stack.
    #[error("stack the layers")]
    Stack(#[source] StackError),
}

impl Refusal for OpenLayersError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Missing { .. } | Self::Length { .. } => ErrorKind::Invalid,
            Self::Origin { source, .. } => source.kind(),
            Self::Open { remote: true, source: OpenLayerError::Read { .. }, .. } => ErrorKind::Remote,
            Self::File { .. } | Self::Open { .. } | Self::Stack(_) => cause(self).unwrap_or(ErrorKind::Failed),
        }
    }
}

impl Layers {
    pub(crate) fn new(origins: Origins, cache: BlockCache, threads: usize) -> Self {
        Self { origins, cache, threads: threads.max(1), open: Mutex::default() }
    }

    /// The cache of remote ones.
    pub(crate) fn cache(&self) -> &BlockCache {
        &self.cache
    }

    /// Opens the layers of `config`, or shares them with who has them open. With a `recorder`, they are this device's alone,
    /// and what is read of them is recorded.
    pub(crate) fn open(
        &self,
        config: &DeviceConfig,
        recorder: Option<&TraceRecorder>,
    ) -> Result<Arc<Opened>, OpenLayersError> {
        let lowers = config.layers().iter().enumerate();
        let places: Vec<Place> =
            lowers.map(|(number, lower)| place(config, number, lower)).collect::<Result<_, _>>()?;
        if recorder.is_some() {
            return self.open_all(config, &places, recorder).map(Arc::new);
        }
        if let Some(opened) = self.open_now().get(&places).and_then(Weak::upgrade) {
            return Ok(opened);
        }
        // Two may do this at once; the cache of blocks fetches for both.
        let opened = Arc::new(self.open_all(config, &places, None)?);
        let mut open = self.open_now();
        open.retain(|_, opened| opened.strong_count() > 0);
        open.insert(places, Arc::downgrade(&opened));
        Ok(opened)
    }

    fn open_now(&self) -> std::sync::MutexGuard<'_, HashMap<Vec<Place>, Weak<Opened>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_all(
        &self,
        config: &DeviceConfig,
        places: &[Place],
        recorder: Option<&TraceRecorder>,
    ) -> Result<Opened, OpenLayersError> {
        let size = |number: usize| config.lowers.get(number).and_then(|lower| lower.size);
        let next = AtomicUsize::new(0);
        let slots: Vec<OnceLock<_>> = places.iter().map(|_| OnceLock::new()).collect();
        let work = || {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some((place, slot)) = places.get(number).zip(slots.get(number)) else { return };
                let _ = slot.set(self.open_one(number, place, size(number), recorder)); // each number is taken once
            }
        };
        // Threads are for waiting: files of this host do not let us wait.
        let remote = places.iter().filter(|place| matches!(place, Place::Blob { .. })).count();
        thread::scope(|scope| {
            for _ in 1..self.threads.min(remote) {
                // With fewer threads than wished for, it takes longer.
                let _ = thread::Builder::new().name("open-layers".to_owned()).spawn_scoped(scope, work);
            }
            work();
        });
        let opened: Vec<_> = slots.into_iter().filter_map(OnceLock::into_inner).collect::<Result<_, _>>()?;
        let (layers, blobs) = opened.into_iter().unzip();
        Ok(Opened { stack: Stack::new(layers).map_err(OpenLayersError::Stack)?, blobs })
    }

    fn open_one(
        &self,
        number: usize,
        place: &Place,
        size: Option<u64>,
        recorder: Option<&TraceRecorder>,
    ) -> Result<(Layer, Option<Arc<CachedBlob>>), OpenLayersError> {
        let (source, blob): (Arc<dyn Source>, _) = match place {
            Place::File { path, .. } => {
                let file = LocalFile::open(path);
                let file = file.map_err(|source| OpenLayersError::File { number, path: path.clone(), source })?;
                (Arc::new(file), None)
            }
            Place::Blob { url, digest } => {
                let origin = self.origins.blob(url, digest, size);
                let origin = origin.map_err(|source| OpenLayersError::Origin { number, source })?;
                let blob = Arc::new(self.cache.blob(digest, origin));
                (blob.clone(), Some(blob))
            }
        };
        let source = match recorder {
            Some(recorder) => recorder.wrap(number as u32, source), // 255 at most
            None => source,
        };
        let layer =
            Layer::open(source).map_err(|source| OpenLayersError::Open { number, remote: blob.is_some(), source })?;
        Ok((layer, blob))
    }
}

/// Finds a lower: its file, a file in its directory, or its blob.
fn place(config: &DeviceConfig, number: usize, lower: &Lower) -> Result<Place, OpenLayersError> {
    let in_directory = ["overlaybd.commit", "overlaybd.sealed"];
    let in_directory = lower.dir.iter().flat_map(|dir| in_directory.map(|name| dir.join(name)));
    let mut tried = Vec::new();
    for path in lower.file.clone().into_iter().chain(in_directory) {
        let error = |source| OpenLayersError::File { number, path: path.clone(), source };
        match std::fs::metadata(&path) {
            Ok(metadata) if metadata.is_file() => {
                // A blob's length is also that of the file it was loaded into.
                if let Some(expected) = lower.size.filter(|size| *size != metadata.len() && !is_sealed(&path)) {
                    return Err(OpenLayersError::Length { number, path, found: metadata.len(), expected });
                }
                return Ok(Place::File { identity: identity(&metadata), path });
            }
            Ok(_) => return Err(error(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))),
            Err(source) if source.kind() == io::ErrorKind::NotFound => tried.push(path.display().to_string()),
            Err(source) => return Err(error(source)),
        }
    }
    match (config.blob_url(lower), &lower.digest) {
        (Some(url), Some(digest)) => Ok(Place::Blob { url: url.to_owned(), digest: digest.clone() }),
        _ => Err(OpenLayersError::Missing { number, tried: tried.join(", ") }),
    }
}

/// A layer in a directory that was sealed in place is not the blob that it may become.
fn is_sealed(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == "overlaybd.sealed")
}

fn identity(metadata: &Metadata) -> (u64, u64, u64, i64, i64) {
    (metadata.dev(), metadata.ino(), metadata.len(), metadata.mtime(), metadata.mtime_nsec())
}
