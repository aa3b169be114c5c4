//! Looking at the layers of a native image before it is taken.
//!
//! Such an image is not fetched: a device reads its blobs when a guest does. What is wrong with a blob would then be a
//! guest's I/O error, long after whoever chose the image has gone. So every layer is opened once, by ranges: its wrappings,
//! its trailer and its whole index are read and checked against the blob's length, its data is not.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use aenv_block_overlaybd::{Layer, LocalFile, MAX_VIRTUAL_SIZE, OpenLayerError, Source};
use aenv_block_source::{CredentialSource, FetchError, FetchProblem, Network, Registry, RegistryOptions};
use aenv_model::Bytes;
use tokio_util::sync::CancellationToken;

use super::{Blob, Native, NativeLayer, Slice};
use crate::error::{ImportError, ImportErrorKind};

/// Layers that are opened at once. Each is a handful of requests, one after the other.
const AT_ONCE: usize = 4;

/// Opens every layer of a native image and gives the size of the disk that they make.
///
/// Blocks, for as long as a registry that fails is given to come back; `cancel` is looked at between layers.
///
/// Errors: of the lowest layer that can't be opened, with its number and digest.
pub(crate) fn validate(
    image: &str,
    native: &Native,
    credentials: Arc<dyn CredentialSource>,
    patience: Duration,
    cancel: &CancellationToken,
) -> Result<Bytes, ImportError> {
    let registry = match &native.repository {
        Some(repository) => {
            let network =
                Network::start().map_err(|source| ImportError::io("start threads for", Path::new(image), source))?;
            let options = RegistryOptions { patience, ..RegistryOptions::default() };
            let opened = Registry::new(network, &repository.blob_url, credentials, options);
            Some(opened.map_err(|error| super::invalid(image, error.to_string()))?)
        }
        None => None,
    };
    let next = AtomicUsize::new(0);
    let sizes: Vec<OnceLock<Result<Bytes, LayerError>>> = native.layers.iter().map(|_| OnceLock::new()).collect();
    thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(native.layers.len()) {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some((layer, size)) = native.layers.get(number).zip(sizes.get(number)) else { return };
                    if cancel.is_cancelled() {
                        return;
                    }
                    let opened = open(layer, registry.as_ref());
                    if opened.is_err() {
                        // Those below are being opened already; those above don't matter any more.
                        next.store(native.layers.len(), Ordering::Relaxed);
                    }
                    let _ = size.set(opened); // each number is taken once
                }
            });
        }
    });
    let mut size = Bytes(0);
    for (index, (layer, opened)) in native.layers.iter().zip(sizes).enumerate() {
        match opened.into_inner() {
            // The topmost one counts that tells any.
            Some(Ok(Bytes(0))) => {}
            Some(Ok(own)) => size = own,
            Some(Err(source)) => {
                let (image, digest) = (image.to_owned(), layer.digest.clone());
                return Err(ImportError::NativeLayer { image, number: index + 1, digest, source });
            }
            None => return Err(ImportError::Cancelled),
        }
    }
    match size.get() {
        0 => Err(super::invalid(image, "none of its layers tells the size of the disk".to_owned())),
        1..=MAX_VIRTUAL_SIZE => Ok(size),
        _ => Err(super::invalid(
            image,
            format!("it claims a disk of {} bytes, more than {MAX_VIRTUAL_SIZE}", size.get()),
        )),
    }
}

/// Opens one layer and gives the size that it tells, 0 for none.
fn open(layer: &NativeLayer, registry: Option<&Registry>) -> Result<Bytes, LayerError> {
    let source: Arc<dyn Source> = match (&layer.blob, registry) {
        (Blob::Remote(_), Some(registry)) => {
            let blob = registry.blob(&layer.digest.to_string(), layer.size);
            Arc::new(blob.map_err(|error| LayerError::Reach(io::Error::other(error)))?)
        }
        (Blob::Remote(_), None) => return Err(LayerError::Reach(io::ErrorKind::NotFound.into())),
        (Blob::Local { slice, .. }, _) => Arc::new(LocalSlice::open(slice).map_err(LayerError::Reach)?),
    };
    let opened = Layer::open(source).map_err(|error| LayerError::Open(Box::new(error)))?;
    Ok(opened.virtual_size())
}

/// Why a layer of a native image can't be used.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// It is in no place that we can reach.
    #[error("reach it")]
    Reach(#[source] io::Error),
    /// It can't be read, or it is no sound overlaybd blob.
    #[error(transparent)]
    Open(Box<OpenLayerError>),
}

impl LayerError {
    /// Whose fault it is.
    pub(crate) fn kind(&self) -> ImportErrorKind {
        let error = match self {
            Self::Reach(error) => error,
            Self::Open(error) => match &**error {
                OpenLayerError::Format { .. } => return ImportErrorKind::Invalid,
                OpenLayerError::Read { source, .. } => source,
            },
        };
        let fetch = error.get_ref().and_then(|error| error.downcast_ref::<FetchError>());
        match fetch.map(|error| &error.source) {
            Some(FetchProblem::Unauthorized(_) | FetchProblem::Credentials(_) | FetchProblem::Identity(_)) => {
                ImportErrorKind::Unauthorized
            }
            // The manifest names a blob that is not there, or a length that it does not have.
            Some(FetchProblem::Status { status, .. }) if status.as_u16() == 404 => ImportErrorKind::Invalid,
            Some(FetchProblem::WrongSize { .. }) => ImportErrorKind::Invalid,
            Some(FetchProblem::RangeIgnored) => ImportErrorKind::Unsupported,
            Some(_) => ImportErrorKind::Registry,
            // Checksums that are wrong, and lengths that don't fit.
            None if matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof) => {
                ImportErrorKind::Invalid
            }
            None => ImportErrorKind::Io,
        }
    }
}

/// A stretch of a local file as a source.
#[derive(Debug)]
struct LocalSlice {
    file: LocalFile,
    offset: u64,
    length: u64,
}

impl LocalSlice {
    fn open(slice: &Slice) -> io::Result<Self> {
        Ok(Self { file: LocalFile::open(slice.path())?, offset: slice.offset(), length: slice.length() })
    }
}

impl Source for LocalSlice {
    fn name(&self) -> &str {
        self.file.name()
    }

    fn size(&self) -> u64 {
        self.length
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(buf.len() as u64).is_none_or(|end| end > self.length) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.file.read_at(self.offset + offset, buf)
    }

    fn gap(&self) -> u64 {
        self.file.gap()
    }
}
