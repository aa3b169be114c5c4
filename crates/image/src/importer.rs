//! The import, from reference to the layers of a device.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aenv_block_client::{BlockdClient, DeviceConfig, Lower, Uppers};
use aenv_block_source::DockerConfig;
use aenv_model::Bytes;
use aenv_tasks::{StillRunning, TaskScope};
use futures::{StreamExt, TryStreamExt, stream};
use tokio_util::sync::CancellationToken;

use crate::cache::{Abandoned, CacheError, CachedImage, Commit, ImageCache, ImageKey, LeaseKind, Operation, Staging};
use crate::convert::{Conversion, Fetcher, Workshop, joined, pass};
use crate::credentials::{Credentials, docker_config};
use crate::digest::Digest;
use crate::error::ImportError;
use crate::image_config::ImageConfig;
use crate::progress::Progress;
use crate::reference::{ImageReference, RegistryPrefix};
use crate::source::registry::Registry;
use crate::source::{
    Blob, Content, Folder, Layer, Native, NativeLayer, Resolver, Slice, resolve_archive, resolve_layout,
    validate_native,
};

/// Native layers fetched at once, where they are fetched at all.
const FETCHES: usize = 3;
/// How images of overlaybd blobs are known that stay in their registry, and those that were fetched.
const NATIVE: &str = "native";
const NATIVE_FETCHED: &str = "native, fetched";

/// How images are imported. Registries are as `[image.resolver]` of the node's configuration says.
#[derive(Debug, Clone)]
pub struct ImporterConfig {
    /// Hosts (with their ports) that are spoken to without TLS. Loopback addresses always are.
    pub plain_http_hosts: Vec<String>,
    /// Docker's `config.json` or its folder, for credentials; else `$DOCKER_CONFIG`, else `~/.docker`.
    pub docker_config: Option<PathBuf>,
    /// Where short names are looked for, in this order.
    pub search_registries: Vec<RegistryPrefix>,
    /// The only hosts (with their ports) that may be pulled from; `None` allows all.
    pub allowed_registries: Option<Vec<String>>,
    /// Whether images of files are taken, which have to be converted, or only those that are made of overlaybd blobs.
    pub convert_standard_oci: bool,
    /// What the full names of images begin with for which an overlaybd image is looked for that refers to them.
    pub referrers_prefixes: Vec<String>,
    /// Of the devices of images that are converted.
    pub virtual_size: Bytes,
    /// The most that an image may unpack to.
    pub max_unpacked: Bytes,
    /// The most files that an image's layers may hold, all together.
    pub max_files: u64,
    /// How long a registry's failing request is repeated.
    pub patience: Duration,
}

impl Default for ImporterConfig {
    fn default() -> Self {
        let search = ["docker.io", "ghcr.io"];
        Self {
            plain_http_hosts: Vec::new(),
            docker_config: None,
            search_registries: search.iter().filter_map(|prefix| prefix.parse().ok()).collect(),
            allowed_registries: None,
            convert_standard_oci: true,
            referrers_prefixes: Vec::new(),
            virtual_size: Bytes::gib(64),
            max_unpacked: Bytes::gib(64),
            max_files: 4_000_000,
            patience: Duration::from_secs(60),
        }
    }
}

/// What an import made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// Of the manifest for this machine's platform; of the configuration for an archive, which has no manifest.
    pub digest: String,
    /// What the image says about running it.
    pub config: ImageConfig,
    /// Of the devices that can be made of it.
    pub size: Bytes,
}

/// Imports images.
#[derive(Debug)]
pub struct Importer {
    config: ImporterConfig,
    docker_config: Option<Arc<DockerConfig>>,
    workshop: Workshop,
}

impl Importer {
    /// Looks at nothing yet but the environment, for Docker's configuration. Layers go to `cache`; `daemon` serves the
    /// devices that they are made on.
    #[must_use]
    pub fn new(config: ImporterConfig, cache: ImageCache, daemon: BlockdClient) -> Self {
        let docker_config = docker_config(config.docker_config.as_deref());
        let workshop = Workshop {
            cache,
            daemon,
            tasks: TaskScope::new("imports"),
            virtual_size: config.virtual_size,
            max_unpacked: config.max_unpacked,
            max_files: config.max_files,
        };
        Self { config, docker_config, workshop }
    }

    pub(crate) fn resolver(&self) -> Resolver<'_> {
        Resolver { config: &self.config, docker_config: self.docker_config.as_ref() }
    }

    /// The cache that layers go to.
    #[must_use]
    pub fn cache(&self) -> &ImageCache {
        &self.workshop.cache
    }

    /// Closes the devices of conversions that nobody works on any more, removes what processes that are gone were working
    /// on, and gives the names of the devices. To be called at start, and again when the daemon is back.
    ///
    /// Cancel safety: if dropped, some of it may have happened.
    pub async fn sweep(&self) -> Result<Vec<String>, ImportError> {
        let cache = self.workshop.cache.clone();
        let abandoned = joined(tokio::task::spawn_blocking(move || cache.abandoned()).await)??;
        let mut closed = Vec::new();
        for device in self.workshop.daemon.list().await.map_err(daemon)? {
            let Some(upper) = &device.config.upper else { continue };
            let Some(staging) = self.workshop.cache.staging_of(&upper.data) else { continue };
            // One whose directory is gone could not be closed by those who removed it.
            if !staging.exists() || abandoned.iter().any(|dir| dir.path() == staging) {
                self.workshop.daemon.close(&device.name, Uppers::Remove).await.map_err(daemon)?;
                closed.push(device.name);
            }
        }
        let remove = move || abandoned.into_iter().map(Abandoned::remove).for_each(drop);
        joined(tokio::task::spawn_blocking(remove).await)?;
        Ok(closed)
    }

    /// Waits for work of imports that nobody waits for any more: it was cancelled with them and cleans up.
    pub async fn close(&self, patience: Duration) -> Result<(), StillRunning> {
        self.workshop.tasks.close(patience).await
    }

    /// Imports an image: writes to `target` what its devices are made of, and replaces what was there. The layers are kept
    /// in the cache by the lease `template/OWNER`, which is there when this returns.
    ///
    /// `credentials` go before Docker's configuration. On an error, `target` is as it was, `owner` has no lease, and nothing
    /// is left but layers that are finished, for another attempt.
    ///
    /// Errors: see [`ImportError::kind`]; `NotPermitted` at once for anyone but root.
    /// Cancel safety: dropping it is as good as cancelling; work that can't be dropped stops soon and cleans up.
    pub async fn import(
        &self,
        reference: &ImageReference,
        credentials: Option<Credentials>,
        target: &Path,
        owner: &str,
        progress: &(dyn Fn(Progress) + Send + Sync),
        cancel: CancellationToken,
    ) -> Result<Imported, ImportError> {
        if !rustix::process::geteuid().is_root() {
            return Err(ImportError::NotRoot);
        }
        // Blocking work outlives a dropped future, so dropping has to cancel it.
        let cancel = cancel.child_token();
        let _guard = cancel.clone().drop_guard();
        let cache = self.workshop.cache.clone();
        let beginning = tokio::task::spawn_blocking(move || {
            let staging = cache.staging("import-")?;
            let operation = cache.operation(&staging.name())?;
            Ok::<_, CacheError>((staging, operation))
        });
        let (staging, operation) = joined(beginning.await)??;
        let work = Import {
            importer: self,
            image: reference.to_string(),
            fetch_native: credentials.is_some(),
            staging: staging.clone(),
            operation: Arc::new(Mutex::new(operation)),
            progress,
            cancel: &cancel,
        };
        let result = match cancel.run_until_cancelled(work.run(reference, credentials, target, owner)).await {
            Some(result) => result,
            None => Err(ImportError::Cancelled),
        };
        cancel.cancel();
        drop(work);
        // Removing what was worked on takes a moment.
        if let Err(error) = tokio::task::spawn_blocking(move || drop(staging)).await {
            tracing::warn!(%error, "removing an import's directory failed");
        }
        result
    }
}

fn daemon(error: aenv_block_client::BlockdError) -> ImportError {
    ImportError::Daemon { source: error }
}

/// One import under way.
struct Import<'a> {
    importer: &'a Importer,
    image: String,
    /// Whether overlaybd blobs are fetched: the daemon that would read them has no credentials but Docker's.
    fetch_native: bool,
    staging: Staging,
    operation: Arc<Mutex<Operation>>,
    progress: &'a (dyn Fn(Progress) + Send + Sync),
    cancel: &'a CancellationToken,
}

impl Import<'_> {
    async fn run(
        &self,
        reference: &ImageReference,
        credentials: Option<Credentials>,
        target: &Path,
        owner: &str,
    ) -> Result<Imported, ImportError> {
        (self.progress)(Progress::Resolving);
        let (resolved, registry) = match reference {
            ImageReference::Registry(image) => {
                let (resolved, registry) = self.importer.resolver().find(image, credentials).await?;
                (resolved, Some(registry))
            }
            ImageReference::OciLayout { path, tag } => {
                let (folder, tag, image) = (Folder(path.clone()), tag.clone(), self.image.clone());
                (self.blocking(move |_| resolve_layout(&folder, &image, tag.as_deref())).await?, None)
            }
            ImageReference::DockerArchive { path, tag } => {
                let (path, tag, image) = (path.clone(), tag.clone(), self.image.clone());
                let scratch = self.staging.join("archive.tar");
                let resolve = move |cancel: &CancellationToken| {
                    resolve_archive(&path, &scratch, &image, tag.as_deref(), &mut || pass(cancel))
                };
                (self.blocking(resolve).await?, None)
            }
        };
        self.importer.resolver().admit(&self.image, &resolved)?;
        let (digest, config) = (resolved.digest, resolved.file.into_config());
        let image = match &resolved.content {
            Content::Standard(layers) => self.standard(&digest, &config, layers, registry.as_ref()).await?,
            Content::Native(native) => self.native(&digest, &config, native, registry.as_ref()).await?,
        };
        let size = image.size;
        let (cache, target, owner) = (self.cache().clone(), target.to_owned(), owner.to_owned());
        // Nothing names the layers before they are kept.
        let finish = move |_: &CancellationToken| {
            cache.lease_device_blocking(LeaseKind::Template, &owner, &image.device)?;
            image.device.save(&target, 0o644).map_err(|source| {
                let _ = cache.release_blocking(LeaseKind::Template, &owner); // one lease too many costs space only
                ImportError::target(source)
            })
        };
        self.blocking(finish).await?;
        Ok(Imported { digest: digest.to_string(), config, size })
    }

    /// Layers of files: converted, where they were not before.
    async fn standard(
        &self,
        digest: &Digest,
        config: &ImageConfig,
        layers: &[Layer],
        registry: Option<&Registry>,
    ) -> Result<CachedImage, ImportError> {
        let workshop = &self.importer.workshop;
        let key = ImageKey { digest: digest.clone(), repository: None, converter: workshop.parameters() };
        if let Some(image) = self.resolved_before(&key).await? {
            let total = layers.len();
            (0..total).for_each(|index| (self.progress)(Progress::Cached { index, total }));
            return Ok(image);
        }
        let conversion = Conversion {
            workshop,
            image: &self.image,
            staging: &self.staging,
            operation: Arc::clone(&self.operation),
            progress: self.progress,
            cancel: self.cancel,
        };
        let commits = conversion.convert(layers, &self.fetcher(registry)).await?;
        let lowers = commits.iter().map(|commit| self.local(commit)).collect();
        let device = DeviceConfig { lowers, ..DeviceConfig::default() };
        self.record(key, CachedImage { device, config: config.clone(), size: workshop.virtual_size }).await
    }

    /// overlaybd blobs: opened where they are, or fetched where that is not possible later.
    async fn native(
        &self,
        digest: &Digest,
        config: &ImageConfig,
        native: &Native,
        registry: Option<&Registry>,
    ) -> Result<CachedImage, ImportError> {
        let stays = native.repository.as_ref().filter(|_| !self.fetch_native);
        let key = ImageKey {
            digest: digest.clone(),
            repository: native.repository.as_ref().map(|repository| repository.name.clone()),
            converter: if stays.is_some() { NATIVE } else { NATIVE_FETCHED }.to_owned(),
        };
        if let Some(image) = self.resolved_before(&key).await? {
            return Ok(image);
        }
        let Some(repository) = stays else {
            let (native, commits) = self.fetch(native, registry).await?;
            let size = self.validate(native, registry).await?;
            let lowers = commits.iter().map(|commit| self.local(commit)).collect();
            let device = DeviceConfig { lowers, ..DeviceConfig::default() };
            return self.record(key, CachedImage { device, config: config.clone(), size }).await;
        };
        let size = self.validate(native.clone(), registry).await?;
        let lower = |layer: &NativeLayer| Lower {
            // Should it ever be fetched, it is found there.
            dir: Some(self.cache().commit_dir(&layer.digest)),
            digest: Some(layer.digest.to_string()),
            size: Some(layer.size),
            ..Lower::default()
        };
        let device = DeviceConfig {
            lowers: native.layers.iter().map(lower).collect(),
            repo_blob_url: Some(repository.blob_url.clone()),
            ..DeviceConfig::default()
        };
        self.record(key, CachedImage { device, config: config.clone(), size }).await
    }

    /// Opens every layer of a native image and gives the size of its disk.
    async fn validate(&self, native: Native, registry: Option<&Registry>) -> Result<Bytes, ImportError> {
        let keys = registry.map_or(aenv_block_source::Credentials::Anonymous, Registry::credentials);
        let (image, patience) = (self.image.clone(), self.importer.config.patience);
        self.blocking(move |cancel| validate_native(&image, &native, Arc::new(keys), patience, cancel)).await
    }

    /// Puts the blobs of a native image into the cache, and gives the image with all of them there.
    async fn fetch(&self, native: &Native, registry: Option<&Registry>) -> Result<(Native, Vec<Commit>), ImportError> {
        let (fetcher, total) = (self.fetcher(registry), native.layers.len());
        fetcher.check_space(native.layers.iter().map(|layer| &layer.blob))?;
        let layers = native.layers.iter().enumerate();
        let fetches: Vec<_> = layers.map(|(index, layer)| self.fetch_layer(&fetcher, index, total, layer)).collect();
        let commits: Vec<Commit> = stream::iter(fetches).buffered(FETCHES).try_collect().await?;
        let layer = |(commit, layer): (&Commit, &NativeLayer)| {
            let path = self.cache().commit_path(&commit.digest);
            let slice = Slice::whole(&path).map_err(|source| ImportError::io("open", &path, source))?;
            Ok(NativeLayer { blob: Blob::Local { slice, digest: None }, ..layer.clone() })
        };
        let layers = commits.iter().zip(&native.layers).map(layer).collect::<Result<_, ImportError>>()?;
        Ok((Native { repository: None, layers }, commits))
    }

    async fn fetch_layer(
        &self,
        fetcher: &Fetcher<'_>,
        index: usize,
        total: usize,
        layer: &NativeLayer,
    ) -> Result<Commit, ImportError> {
        let commit = Commit { digest: layer.digest.clone(), size: Bytes(layer.size) };
        if self.keep(vec![commit.clone()]).await? {
            (self.progress)(Progress::Cached { index, total });
            return Ok(commit);
        }
        let slice = fetcher.fetch(&layer.blob, index, total).await?;
        let (cache, staging, operation) = (self.cache().clone(), self.staging.clone(), Arc::clone(&self.operation));
        let file = self.staging.join(format!("native-{index}"));
        let published = commit.clone();
        self.blocking(move |cancel| {
            let write = || -> std::io::Result<()> {
                if slice.path().starts_with(staging.path()) && slice.is_whole()? {
                    std::fs::rename(slice.path(), &file)?;
                } else {
                    slice.copy(&mut std::fs::File::create(&file)?, || pass(cancel))?;
                }
                std::fs::File::open(&file)?.sync_all()
            };
            write().map_err(|source| ImportError::io("write", &file, source))?;
            let mut operation = operation.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(cache.publish(&file, &published, &staging, &mut operation)?)
        })
        .await?;
        Ok(commit)
    }

    /// What an earlier import made of the same, all of it kept from now on.
    async fn resolved_before(&self, key: &ImageKey) -> Result<Option<CachedImage>, ImportError> {
        let (cache, key) = (self.cache().clone(), key.clone());
        let Some(image) = self.blocking(move |_| Ok(cache.image(&key))).await? else { return Ok(None) };
        let commit = |lower: &Lower| {
            let digest = lower.digest.as_deref()?.parse().ok()?;
            Some(Commit { digest, size: Bytes(lower.size?) })
        };
        let local = image.device.lowers.iter().filter(|lower| lower.file.is_some());
        let Some(commits) = local.map(commit).collect::<Option<Vec<_>>>() else { return Ok(None) };
        Ok(self.keep(commits).await?.then_some(image))
    }

    /// Keeps layers of the cache; `false` if one of them is not there.
    async fn keep(&self, commits: Vec<Commit>) -> Result<bool, ImportError> {
        let operation = Arc::clone(&self.operation);
        self.blocking(move |_| {
            let mut operation = operation.lock().unwrap_or_else(PoisonError::into_inner);
            for commit in commits {
                if !operation.keep(&commit.digest, commit.size)? {
                    return Ok(false);
                }
            }
            Ok(true)
        })
        .await
    }

    /// Remembers an image for the next import of it.
    async fn record(&self, key: ImageKey, image: CachedImage) -> Result<CachedImage, ImportError> {
        let cache = self.cache().clone();
        self.blocking(move |_| {
            cache.record_image(&key, &image)?;
            Ok(image)
        })
        .await
    }

    fn cache(&self) -> &ImageCache {
        &self.importer.workshop.cache
    }

    fn fetcher<'f>(&'f self, registry: Option<&'f Registry>) -> Fetcher<'f> {
        let Self { image, staging, progress, cancel, .. } = self;
        Fetcher { image, registry, staging, progress: *progress, cancel }
    }

    fn local(&self, commit: &Commit) -> Lower {
        Lower {
            file: Some(self.cache().commit_path(&commit.digest)),
            digest: Some(commit.digest.to_string()),
            size: Some(commit.size.get()),
            ..Lower::default()
        }
    }

    /// Runs blocking work, which keeps the staging directory until its end.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&CancellationToken) -> Result<T, ImportError> + Send + 'static,
    ) -> Result<T, ImportError> {
        let (staging, cancel) = (self.staging.clone(), self.cancel.clone());
        let done = tokio::task::spawn_blocking(move || {
            let result = work(&cancel);
            drop(staging);
            if cancel.is_cancelled() { Err(ImportError::Cancelled) } else { result }
        });
        joined(done.await)?
    }
}
