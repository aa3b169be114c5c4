//! Conversion: each layer of an image becomes a layer of the cache, once.
//!
//! ```text
//!    base ◀──── layer 1 ◀──── layer 2 ◀──── layer 3          a chain: each is a delta to what lies below
//!   (mke2fs)       │
//!                  │  lowers + fresh upper ──▶ aenv-blockd ──▶ a file ──▶ loop device ──▶ ext4, mounted
//!                  │                                                                         ▲
//!                  │                                            blob ──▶ decompressed ──▶ unpacked
//!                  ▼
//!   upper ──▶ canonical ──▶ committed and hashed ──▶ cache, index
//! ```
//!
//! The daemon serves and we unpack, never one process both: one that waits for a file system which it serves itself can't be
//! killed.
//!
//! A layer's key stands for its chain, down to the base and the way it was made. Whoever has the key's lock converts; others
//! wait, and then find the result. Locks are taken up the chain, the next before the last is given back, so nobody else can
//! come in between. What is finished stays: another attempt begins at the first layer that is missing. Blobs are fetched
//! ahead, and a layer is written to the disk while the next one is being unpacked.

mod error;
mod fetch;
mod layer;
mod loopdev;
mod mounted;

use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aenv_block_client::{BlockdClient, Lower};
use aenv_block_overlaybd::{
    Identity, LocalFile, Mode, OverlayDevice, Stack, Storage, UpperFiles, UpperOptions, UserTag,
};
use aenv_model::Bytes;
use aenv_tasks::TaskScope;
use futures::future::{Either, select};
use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub use self::error::ConvertError;
pub(crate) use self::fetch::{Fetched, Fetcher, pass};
pub use self::layer::DEVICE_PREFIX;
use self::layer::{LayerJob, write_commit};
use crate::cache::{CacheError, Commit, ConversionKey, ImageCache, Operation, Staging, WorkLock};
use crate::digest::Digest;
use crate::error::ImportError;
use crate::ext4::{BLOCK, MKFS, mkfs};
use crate::progress::Progress;
use crate::source::{Blob, Layer};
use crate::space::free_space;
use crate::unpack::Budget;

/// What is done to a layer, told apart from how the base is made. Counted up with every change to it.
const CONVERTER: &str = "aenv-1";
/// Layers of one image that may be converted, so that its devices have room for their own.
const MAX_LAYERS: usize = 200;
/// Pause between two looks whether somebody else's conversion has ended.
const WAIT: Duration = Duration::from_millis(100);

/// How, and with what, layers are converted.
#[derive(Debug, Clone)]
pub(crate) struct Workshop {
    pub(crate) cache: ImageCache,
    pub(crate) daemon: BlockdClient,
    /// Work that has to come to its end even if nobody waits for it any more.
    pub(crate) tasks: TaskScope,
    /// Of the devices.
    pub(crate) virtual_size: Bytes,
    pub(crate) max_unpacked: Bytes,
    pub(crate) max_files: u64,
}

impl Workshop {
    /// The name of the way in which layers are made here.
    pub(crate) fn converter(&self) -> String {
        format!("{CONVERTER}+{MKFS}")
    }

    /// The same, with all that the result depends on besides the layers.
    pub(crate) fn parameters(&self) -> String {
        format!("{} of {} bytes", self.converter(), self.virtual_size.get())
    }
}

/// One image under conversion.
pub(crate) struct Conversion<'a> {
    pub(crate) workshop: &'a Workshop,
    /// As it was asked for.
    pub(crate) image: &'a str,
    pub(crate) staging: &'a Staging,
    /// Keeps what is found and made until there is another lease.
    pub(crate) operation: Arc<Mutex<Operation>>,
    pub(crate) progress: &'a (dyn Fn(Progress) + Send + Sync),
    pub(crate) cancel: &'a CancellationToken,
}

/// What came of looking for a conversion.
enum Claim {
    /// It is there, and kept.
    Found(Commit),
    /// It is ours to make.
    Ours(WorkLock),
}

/// A layer that is complete and not yet in the cache.
struct Staged {
    /// Goes to the cache.
    file: PathBuf,
    /// Stays here under this name, so that devices can be made of it meanwhile.
    link: PathBuf,
    commit: Commit,
}

impl Conversion<'_> {
    /// Converts what is missing of `layers`, lowest first, and gives all layers of the cache that make the image.
    pub(crate) async fn convert(&self, layers: &[Layer], fetcher: &Fetcher<'_>) -> Result<Vec<Commit>, ImportError> {
        let total = layers.len();
        if total > MAX_LAYERS {
            let problem = format!("it has {total} layers, more than {MAX_LAYERS}");
            return Err(ImportError::Unsupported { image: self.image.to_owned(), problem });
        }
        let (mut chain, base) = self.base().await?;
        let mut commits = vec![base];
        for (index, layer) in layers.iter().enumerate() {
            let source = source_of(layer);
            let key = self.key(&chain, &source);
            let parent = commits.last().map(|commit| commit.digest.clone());
            let waiting = || (self.progress)(Progress::Waiting { index, total });
            match self.claim(&key, parent.as_ref(), &waiting).await? {
                Claim::Found(commit) => {
                    (self.progress)(Progress::Cached { index, total });
                    commits.push(commit);
                    chain = key.chain;
                }
                Claim::Ours(lock) => {
                    self.convert_from(index, lock, layers, chain, &mut commits, fetcher).await?;
                    break;
                }
            }
        }
        Ok(commits)
    }

    /// Converts the layers from `first` on, whose lock is ours.
    async fn convert_from(
        &self,
        first: usize,
        lock: WorkLock,
        layers: &[Layer],
        chain: Digest,
        commits: &mut Vec<Commit>,
        fetcher: &Fetcher<'_>,
    ) -> Result<(), ImportError> {
        let (fetching, fetched) = fetcher.ahead(first, layers)?;
        let work = self.convert_fetched(first, lock, layers, chain, commits, fetched);
        let (fetching, work) = (std::pin::pin!(fetching), std::pin::pin!(work));
        match select(fetching, work).await {
            Either::Left((Ok(()), work)) => work.await,
            Either::Left((Err(error), work)) => {
                // What is here already is not fetched again by the next attempt.
                let _ = work.await; // the first error is the one to tell
                Err(error)
            }
            Either::Right((result, _)) => result,
        }
    }

    /// Converts what is fetched, from layer `first` on, as long as there is more.
    async fn convert_fetched(
        &self,
        first: usize,
        lock: WorkLock,
        layers: &[Layer],
        mut chain: Digest,
        commits: &mut Vec<Commit>,
        mut fetched: Fetched,
    ) -> Result<(), ImportError> {
        let total = layers.len();
        let mut lock = Some(lock);
        let mut lowers: Vec<Lower> = commits.iter().map(|commit| self.cached(commit)).collect();
        let mut budget = Budget::new(self.workshop.max_unpacked, Bytes(0), self.workshop.max_files);
        // What is on its way into the cache. The layer above names it as its parent, so one at a time.
        let mut publishing: Option<JoinHandle<Result<(), ImportError>>> = None;
        for (index, layer) in layers.iter().enumerate().skip(first) {
            let Some(slice) = fetched.next().await else { break };
            let source = source_of(layer);
            let key = self.key(&chain, &source);
            let lock = match lock.take() {
                Some(lock) => lock,
                None => self.lock(&key, &|| (self.progress)(Progress::Waiting { index, total })).await?,
            };
            let below = index.checked_sub(1).map_or_else(|| self.base_source(), |below| source_of(&layers[below]));
            let job = LayerJob {
                image: self.image.to_owned(),
                index,
                total,
                lowest: index == 0,
                diff_id: layer.diff_id.clone(),
                slice,
                lowers: lowers.clone(),
                identity: identity(&source, Some(&below)),
                budget: budget.with_free(self.room()?),
            };
            let (staged, rest) = self.unpack(job).await?;
            budget = rest;
            if let Some(task) = publishing.take() {
                joined(task.await)??;
            }
            let parent = commits.last().map(|commit| commit.digest.clone());
            lowers.push(Lower { file: Some(staged.link.clone()), ..Lower::default() });
            commits.push(staged.commit.clone());
            chain = key.chain.clone();
            publishing = Some(self.publish(staged, key, parent, lock));
        }
        match publishing {
            Some(task) => joined(task.await)?,
            None => Ok(()),
        }
    }

    /// The empty file system that all images lie on, and the beginning of all chains.
    async fn base(&self) -> Result<(Digest, Commit), ImportError> {
        let source = self.base_source();
        let key = ConversionKey { mkfs: true, ..self.key(&source, &source) };
        let waiting = || (self.progress)(Progress::Building);
        let lock = match self.claim(&key, None, &waiting).await? {
            Claim::Found(commit) => return Ok((key.chain, commit)),
            Claim::Ours(lock) => lock,
        };
        (self.progress)(Progress::Building);
        let image = self.staging.join("base.ext4");
        mkfs(&image, self.workshop.virtual_size, self.cancel).await.map_err(|error| self.failed(error.into(), None))?;
        let (staging, size) = (self.staging.clone(), self.workshop.virtual_size);
        let identity = identity(&source, None);
        let staged = self.blocking(move |cancel| {
            let from = LocalFile::open_writable(&image).map_err(|source| ImportError::io("open", &image, source))?;
            let files = UpperFiles::in_directory(staging.path(), Mode::Log);
            let options = UpperOptions { mode: Mode::Log, virtual_size: size, identity: identity.clone() };
            let made = copy_sparse(&from, &files, &options)
                .and_then(|device| write_commit(&device, &identity, &staging, "base", &cancel));
            let _ = (std::fs::remove_file(&image), std::fs::remove_file(&files.data)); // they go with the directory at last
            Ok(made)
        });
        let staged = staged.await?.map_err(|error| self.failed(error, None))?;
        let commit = staged.commit.clone();
        let chain = key.chain.clone();
        joined(self.publish(staged, key, None, lock).await)??;
        Ok((chain, commit))
    }

    /// What one layer becomes on the chain below it.
    fn key(&self, below: &Digest, source: &Digest) -> ConversionKey {
        ConversionKey {
            chain: Digest::of(format!("{} on {below}: {source}", self.workshop.parameters()).as_bytes()),
            source: source.clone(),
            converter: self.workshop.converter(),
            virtual_size: self.workshop.virtual_size,
            mkfs: false,
        }
    }

    /// What stands for the source of the base.
    fn base_source(&self) -> Digest {
        Digest::of(self.workshop.parameters().as_bytes())
    }

    fn cached(&self, commit: &Commit) -> Lower {
        Lower {
            file: Some(self.workshop.cache.commit_path(&commit.digest)),
            digest: Some(commit.digest.to_string()),
            size: Some(commit.size.get()),
            ..Lower::default()
        }
    }

    /// Finds what `key` became on `parent`, or gets its lock. `waiting` is called once if somebody else has that.
    async fn claim(
        &self,
        key: &ConversionKey,
        parent: Option<&Digest>,
        waiting: &(dyn Fn() + Send + Sync),
    ) -> Result<Claim, ImportError> {
        if let Some(commit) = self.find(key, parent).await? {
            return Ok(Claim::Found(commit));
        }
        let lock = self.lock(key, waiting).await?;
        // Whoever had it may have finished.
        Ok(match self.find(key, parent).await? {
            Some(commit) => Claim::Found(commit),
            None => Claim::Ours(lock),
        })
    }

    /// What `key` became on `parent`, kept from now on.
    async fn find(&self, key: &ConversionKey, parent: Option<&Digest>) -> Result<Option<Commit>, ImportError> {
        let (cache, operation) = (self.workshop.cache.clone(), Arc::clone(&self.operation));
        let (key, parent) = (key.clone(), parent.cloned());
        self.blocking(move |_| {
            let Some(commit) = cache.find(&key, parent.as_ref()) else { return Ok(None) };
            let mut operation = operation.lock().unwrap_or_else(PoisonError::into_inner);
            let kept = operation.keep(&commit.digest, commit.size)?;
            Ok(kept.then_some(commit))
        })
        .await
    }

    async fn lock(&self, key: &ConversionKey, waiting: &(dyn Fn() + Send + Sync)) -> Result<WorkLock, ImportError> {
        let mut told = false;
        loop {
            if let Some(lock) = self.workshop.cache.try_lock(&key.chain)? {
                return Ok(lock);
            }
            if !std::mem::replace(&mut told, true) {
                waiting();
            }
            tokio::time::sleep(WAIT).await;
        }
    }

    /// Puts a layer into the cache and gives back its lock, whether or not anybody waits for it.
    fn publish(
        &self,
        staged: Staged,
        key: ConversionKey,
        parent: Option<Digest>,
        lock: WorkLock,
    ) -> JoinHandle<Result<(), ImportError>> {
        let (cache, staging, operation) =
            (self.workshop.cache.clone(), self.staging.clone(), Arc::clone(&self.operation));
        tokio::task::spawn_blocking(move || {
            let Staged { file, commit, .. } = staged;
            File::open(&file)
                .and_then(|file| file.sync_all())
                .map_err(|source| ImportError::io("write out", &file, source))?;
            {
                let mut operation = operation.lock().unwrap_or_else(PoisonError::into_inner);
                cache.publish(&file, &commit, &staging, &mut operation)?;
            }
            cache.record_conversion(&key, parent.as_ref(), &commit)?;
            drop(lock);
            Ok(())
        })
    }

    /// What may still be unpacked here: it is there twice for a while, and the rest of the node lives on this disk as well.
    fn room(&self) -> Result<Bytes, ImportError> {
        let dir = self.staging.path();
        let free = free_space(dir).map_err(|source| ImportError::io("look at the space of", dir, source))?;
        Ok(Bytes((free.get() - free.get() / 16) / 2))
    }

    /// A failure that is not the layer's own.
    fn failed(&self, error: ConvertError, layer: Option<usize>) -> ImportError {
        failed(error, self.image, layer, self.staging)
    }

    /// Runs blocking work, which keeps the staging directory until its end.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(CancellationToken) -> Result<T, ImportError> + Send + 'static,
    ) -> Result<T, ImportError> {
        let (staging, cancel) = (self.staging.clone(), self.cancel.clone());
        let done = tokio::task::spawn_blocking(move || {
            let result = work(cancel);
            drop(staging);
            result
        });
        joined(done.await)?
    }
}

/// A failure of a conversion, as one of its image. A full disk is its own case.
fn failed(error: ConvertError, image: &str, layer: Option<usize>, staging: &Staging) -> ImportError {
    let image = image.to_owned();
    if error.disk_was_full(staging.path()) {
        let what = layer.map_or_else(|| "the base file system".to_owned(), |index| format!("layer {}", index + 1));
        let free = free_space(staging.path()).ok();
        return ImportError::NoSpace { doing: format!("convert {what} of image {image}"), free };
    }
    match layer {
        Some(index) => ImportError::Convert { image, number: index + 1, source: error },
        None => ImportError::Base { image, source: error },
    }
}

/// The result of work in a task of its own.
pub(crate) fn joined<T>(result: Result<T, JoinError>) -> Result<T, ImportError> {
    match result {
        Ok(value) => Ok(value),
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => Err(ImportError::Cancelled), // the runtime is going down
    }
}

impl From<CacheError> for ImportError {
    fn from(error: CacheError) -> Self {
        match error {
            CacheError::Io { doing, path, source } => Self::io(doing, &path, source),
            CacheError::Closed => Self::Cancelled,
            error => Self::Cache { source: error },
        }
    }
}

/// What a layer is known by: its blob, or its content where the blob has no digest.
fn source_of(layer: &Layer) -> Digest {
    let blob = match &layer.blob {
        Blob::Remote(descriptor) => descriptor.digest.parse().ok(),
        Blob::Local { digest, .. } => digest.clone(),
    };
    blob.unwrap_or_else(|| layer.diff_id.clone())
}

/// Who a layer is that was made of `source`, on one that was made of `below`.
fn identity(source: &Digest, below: Option<&Digest>) -> Identity {
    Identity { uuid: uuid_of(source), parent: below.map_or(Uuid::nil(), uuid_of), user_tag: UserTag::default() }
}

/// The UUID of a layer that was made of `source`: 16 bytes of a hash, marked as a UUID of one's own making (version 8).
fn uuid_of(source: &Digest) -> Uuid {
    let hash = Digest::of(source.to_string().as_bytes());
    let mut bytes = [0; 16];
    for (byte, digits) in bytes.iter_mut().zip(hash.hex().as_bytes().chunks_exact(2)) {
        let digits = std::str::from_utf8(digits).unwrap_or_default(); // two ASCII digits
        *byte = u8::from_str_radix(digits, 16).unwrap_or_default();
    }
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

/// Makes a device with the content of `from`, leaving out blocks of zeros.
fn copy_sparse(from: &LocalFile, files: &UpperFiles, options: &UpperOptions) -> Result<OverlayDevice, ConvertError> {
    use aenv_block_device::BlockDevice as _;
    use aenv_block_overlaybd::Source as _;
    let step = |source: std::io::Error| ConvertError::Step(Box::new(source));
    let upper = files.create(options)?;
    let device = OverlayDevice::new(Stack::new(Vec::new())?, upper)?;
    let mut block = vec![0; BLOCK as usize];
    for range in from.data_ranges(0..options.virtual_size.get()).map_err(step)? {
        let mut at = range.start / BLOCK * BLOCK;
        while at < range.end {
            from.read_at(at, &mut block).map_err(step)?;
            if block.iter().any(|byte| *byte != 0) {
                device.write_at(at, &block).map_err(step)?;
            }
            at += BLOCK;
        }
    }
    Ok(device)
}

#[cfg(test)]
mod tests;
