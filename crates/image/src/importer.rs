//! The import, from reference to root file system.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aenv_model::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use oci_client::Reference;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::compression::decompress;
use crate::credentials::{Credentials, docker_config_path, from_docker};
use crate::error::{ImportError, ImportErrorKind};
use crate::ext4::{self, DiskSize};
use crate::image_config::ImageConfig;
use crate::metered::Metered;
use crate::progress::Progress;
use crate::reference::{ImageReference, RegistryImage, RegistryPrefix};
use crate::source::registry::Registry;
use crate::source::{Blob, Folder, Layer, Resolved, Slice, resolve_archive, resolve_layout};
use crate::unpack::{Budget, Tally, UnpackError, Unpacker};
use crate::workspace::{self, Workspace};

/// Layers fetched at once. More connections don't make one registry faster.
const FETCHES: usize = 3;

/// How images are imported. Registries are as `[image.resolver]` of the node's configuration says.
#[derive(Debug, Clone)]
pub struct ImporterConfig {
    /// Where layers are kept and unpacked meanwhile. On the same file system as every import's target.
    pub work_dir: PathBuf,
    /// Hosts (with their ports) that are spoken to without TLS. Loopback addresses always are.
    pub plain_http_hosts: Vec<String>,
    /// Docker's `config.json` or its folder, for credentials; else `$DOCKER_CONFIG`, else `~/.docker`.
    pub docker_config: Option<PathBuf>,
    /// Where short names are looked for, in this order.
    pub search_registries: Vec<RegistryPrefix>,
    /// The only hosts (with their ports) that may be pulled from; `None` allows all.
    pub allowed_registries: Option<Vec<String>>,
    /// How large root file systems are made.
    pub disk: DiskSize,
    /// The most that an image may unpack to.
    pub max_unpacked: Bytes,
    /// The most files that an image's layers may hold, all together.
    pub max_files: u64,
    /// How long a registry's failing request is repeated.
    pub patience: Duration,
}

impl ImporterConfig {
    /// The defaults, with `work_dir`.
    #[must_use]
    pub fn new(work_dir: impl Into<PathBuf>) -> Self {
        let search = ["docker.io", "ghcr.io"];
        Self {
            work_dir: work_dir.into(),
            plain_http_hosts: Vec::new(),
            docker_config: None,
            search_registries: search.iter().filter_map(|prefix| prefix.parse().ok()).collect(),
            allowed_registries: None,
            disk: DiskSize::default(),
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
    /// Of the root file system, holes included.
    pub size: Bytes,
}

/// Imports images.
#[derive(Debug)]
pub struct Importer {
    config: ImporterConfig,
    docker_config: Option<PathBuf>,
}

impl Importer {
    /// Looks at nothing yet but the environment, for Docker's configuration.
    #[must_use]
    pub fn new(config: ImporterConfig) -> Self {
        let docker_config = docker_config_path(config.docker_config.as_deref());
        Self { config, docker_config }
    }

    /// Removes what imports of a process that was killed left behind, and gives their paths. To be called at start,
    /// before any import of this work directory runs. Blocking.
    pub fn sweep(&self) -> io::Result<Vec<PathBuf>> {
        workspace::sweep(&self.config.work_dir)
    }

    /// Makes the ext4 root file system `target` of an image, and replaces what was there.
    ///
    /// `credentials` go before Docker's configuration. On an error, `target` is as it was and nothing else is left.
    ///
    /// Errors: see [`ImportError::kind`]; `NotPermitted` at once for anyone but root.
    /// Cancel safety: dropping it is as good as cancelling; work that can't be dropped stops soon and cleans up.
    pub async fn import(
        &self,
        reference: &ImageReference,
        credentials: Option<Credentials>,
        target: &Path,
        progress: &(dyn Fn(Progress) + Send + Sync),
        cancel: CancellationToken,
    ) -> Result<Imported, ImportError> {
        if !rustix::process::geteuid().is_root() {
            return Err(ImportError::NotRoot);
        }
        let workspace = Workspace::create(&self.config.work_dir)?;
        self.check_target(target)?;
        // Blocking work outlives a dropped future, so dropping has to cancel it.
        let cancel = cancel.child_token();
        let _guard = cancel.clone().drop_guard();
        let work =
            Import { importer: self, image: reference.to_string(), workspace: &workspace, progress, cancel: &cancel };
        let result = match cancel.run_until_cancelled(work.run(reference, credentials, target)).await {
            Some(result) => result,
            None => Err(ImportError::Cancelled),
        };
        cancel.cancel();
        // An unpacked image takes a while to remove.
        if let Err(error) = tokio::task::spawn_blocking(move || workspace.close()).await {
            tracing::warn!(%error, "removing an import's directory failed");
        }
        result
    }

    /// The target's folder must be there, and on the file system of the work directory: the image is moved there.
    fn check_target(&self, target: &Path) -> Result<(), ImportError> {
        use std::os::unix::fs::MetadataExt;
        let folder = folder_of(target);
        let device = |path: &Path| {
            std::fs::metadata(path).map(|meta| meta.dev()).map_err(|source| ImportError::io("look at", path, source))
        };
        if device(folder)? != device(&self.config.work_dir)? {
            let source = io::Error::from(io::ErrorKind::CrossesDevices);
            return Err(ImportError::io("put the image beside the work directory's file system, into", folder, source));
        }
        Ok(())
    }
}

fn folder_of(target: &Path) -> &Path {
    match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// One import under way.
struct Import<'a> {
    importer: &'a Importer,
    image: String,
    workspace: &'a Workspace,
    progress: &'a (dyn Fn(Progress) + Send + Sync),
    cancel: &'a CancellationToken,
}

impl Import<'_> {
    async fn run(
        &self,
        reference: &ImageReference,
        credentials: Option<Credentials>,
        target: &Path,
    ) -> Result<Imported, ImportError> {
        (self.progress)(Progress::Resolving);
        let (resolved, registry) = match reference {
            ImageReference::Registry(image) => {
                let (resolved, registry) = self.find(image, credentials).await?;
                (resolved, Some(registry))
            }
            ImageReference::OciLayout { path, tag } => {
                let (folder, tag, image) = (Folder(path.clone()), tag.clone(), self.image.clone());
                (self.blocking(move |_| resolve_layout(&folder, &image, tag.as_deref())).await?, None)
            }
            ImageReference::DockerArchive { path, tag } => {
                let (path, tag, image) = (path.clone(), tag.clone(), self.image.clone());
                let scratch = self.workspace.join("archive.tar");
                let resolve = move |cancel: &CancellationToken| {
                    resolve_archive(&path, &scratch, &image, tag.as_deref(), &mut || pass(cancel))
                };
                (self.blocking(resolve).await?, None)
            }
        };
        let root = self.workspace.join("root");
        make_root(&root)?;
        let tally = self.unpack_all(&resolved.layers, registry.as_ref(), &root).await?;
        (self.progress)(Progress::Building);
        let image = self.workspace.join("rootfs.ext4");
        let size = ext4::build(&root, &image, tally, self.importer.config.disk, self.cancel).await?;
        let target = target.to_owned();
        self.blocking(move |_| publish(&image, &target)).await?;
        Ok(Imported { digest: resolved.digest.to_string(), config: resolved.file.into_config(), size })
    }

    /// Looks an image up in the registries it may be in. The next one is asked only if the one before does not have
    /// it: an image of the same name elsewhere is no substitute for one that can't be reached just now.
    async fn find(
        &self,
        image: &RegistryImage,
        credentials: Option<Credentials>,
    ) -> Result<(Resolved, Registry), ImportError> {
        let config = &self.importer.config;
        let mut failures: Vec<ImportError> = Vec::new();
        let mut candidates = image.candidates(&config.search_registries);
        if credentials.is_some() {
            // They are for one registry, and no other shall see them.
            candidates.truncate(1);
        }
        for candidate in candidates {
            match self.look_up(candidate, credentials.clone()).await {
                Ok(found) => return Ok(found),
                Err(error) => match error.kind() {
                    ImportErrorKind::NotFound | ImportErrorKind::Unauthorized | ImportErrorKind::NotAllowed => {
                        failures.push(error);
                    }
                    _ => return Err(error),
                },
            }
        }
        let all_forbidden = failures.iter().all(|error| error.kind() == ImportErrorKind::NotAllowed);
        let words = match failures.as_slice() {
            [] => "it names no registry, and no search registries are configured".to_owned(),
            several => several.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
        };
        match failures.pop() {
            Some(only) if failures.is_empty() || all_forbidden => Err(only),
            _ => Err(ImportError::NotFound { image: self.image.clone(), words }),
        }
    }

    async fn look_up(
        &self,
        reference: Reference,
        credentials: Option<Credentials>,
    ) -> Result<(Resolved, Registry), ImportError> {
        let config = &self.importer.config;
        let host = reference.registry();
        if let Some(allowed) = &config.allowed_registries
            && !allowed.iter().any(|known| known == host)
        {
            let allowed = if allowed.is_empty() { "none".to_owned() } else { allowed.join(", ") };
            return Err(ImportError::NotAllowed { registry: host.to_owned(), allowed });
        }
        let found = match credentials {
            Some(credentials) => credentials.into(),
            None => from_docker(self.importer.docker_config.as_deref(), host).await,
        };
        let registry = Registry::new(reference, found, &config.plain_http_hosts, config.patience)?;
        Ok((registry.resolve().await?, registry))
    }

    /// Fetches ahead and unpacks in order. A fetched layer is removed once it is unpacked.
    async fn unpack_all(
        &self,
        layers: &[Layer],
        registry: Option<&Registry>,
        root: &Path,
    ) -> Result<Tally, ImportError> {
        let free = workspace::free_space(self.workspace.path())
            .map_err(|source| ImportError::io("look at the space of", self.workspace.path(), source))?;
        let remote = layers.iter().filter(|layer| matches!(layer.blob, Blob::Remote(_)));
        let compressed: u64 = remote.map(|layer| layer.blob.size()).fold(0, u64::saturating_add);
        if compressed > free.get() {
            let doing = format!("fetch the {} of image {}", Bytes(compressed), self.image);
            return Err(ImportError::NoSpace { doing, free: Some(free) });
        }
        let config = &self.importer.config;
        // The rest of the node lives on this disk as well.
        let usable = Bytes(free.get() - free.get() / 16);
        let budget = Budget::new(config.max_unpacked, usable, config.max_files);
        let unpacker = Unpacker::new(root, budget, self.cancel.clone());
        let mut unpacker = unpacker.map_err(|source| self.layer_error(0, source))?;
        let total = layers.len();
        // Room for all: were the fetches to wait for the unpacking, their connections would run into time-outs.
        let (send, mut receive) = mpsc::channel::<(usize, Slice)>(total.max(1));
        let fetching = async {
            // Collected: a lazy map's closure in this future would keep the future from being `Send`.
            let fetches = layers.iter().enumerate().map(|(index, layer)| self.fetch(registry, layer, index, total));
            let fetches: Vec<_> = fetches.collect();
            let mut fetched = stream::iter(fetches).buffered(FETCHES);
            while let Some(layer) = fetched.try_next().await? {
                // The receiver goes only when unpacking has failed, which is what is reported.
                let _ = send.send(layer).await;
            }
            // Without a sender, unpacking knows that it has all.
            drop(send);
            Ok(())
        };
        let unpacking = async {
            while let Some((index, slice)) = receive.recv().await {
                unpacker = self.unpack(unpacker, &layers[index], slice, index, total).await?;
            }
            let finished = self.blocking(move |_| Ok(unpacker.finish())).await?;
            finished.map_err(|source| self.layer_error(total.saturating_sub(1), source))
        };
        let ((), tally) = tokio::try_join!(fetching, unpacking)?;
        Ok(tally)
    }

    /// Gets a layer's blob here, and verifies it.
    async fn fetch(
        &self,
        registry: Option<&Registry>,
        layer: &Layer,
        index: usize,
        total: usize,
    ) -> Result<(usize, Slice), ImportError> {
        let total_bytes = Bytes(layer.blob.size());
        let tell = |done: u64| {
            (self.progress)(Progress::Layer { index, total, done_bytes: Bytes(done), total_bytes });
        };
        match (&layer.blob, registry) {
            (Blob::Remote(descriptor), Some(registry)) => {
                let path = self.workspace.join(format!("layer-{index}"));
                let throttle = Throttle::default();
                let on_bytes = |done: u64| {
                    if throttle.passes(done, total_bytes.get()) {
                        tell(done);
                    }
                };
                registry.fetch(descriptor, &path, &on_bytes).await?;
                let slice = Slice::whole(&path).map_err(|source| ImportError::io("open", &path, source))?;
                Ok((index, slice))
            }
            (Blob::Local { slice, digest }, _) => {
                if let Some(expected) = digest.clone() {
                    let checked = slice.clone();
                    let digesting = move |cancel: &CancellationToken| {
                        checked
                            .digest(&expected, || pass(cancel))
                            .map(|found| (found == expected).then_some(()).ok_or((expected, found)))
                            .map_err(|source| ImportError::io("read", checked.path(), source))
                    };
                    self.blocking(digesting).await?.map_err(|(expected, found)| ImportError::Invalid {
                        image: self.image.clone(),
                        problem: format!("its blob {expected} has the digest {found}"),
                    })?;
                }
                tell(slice.length());
                Ok((index, slice.clone()))
            }
            (Blob::Remote(_), None) => Err(ImportError::Invalid {
                image: self.image.clone(),
                problem: "a layer is in no place we can reach".to_owned(),
            }),
        }
    }

    async fn unpack(
        &self,
        mut unpacker: Unpacker,
        layer: &Layer,
        slice: Slice,
        index: usize,
        total: usize,
    ) -> Result<Unpacker, ImportError> {
        let total_bytes = Bytes(slice.length());
        let remove = matches!(layer.blob, Blob::Remote(_)).then(|| slice.path().to_owned());
        let diff_id = layer.diff_id.clone();
        // Progress crosses from the blocking thread by a channel; what does not fit is soon outdated anyway.
        let (send, mut receive) = mpsc::channel::<u64>(4);
        let work = self.blocking(move |cancel| {
            let cancel = cancel.clone();
            // All but the lowest layer are read twice, which is one progress to whoever watches.
            let passes = if index == 0 { 1 } else { 2 };
            let mut before = 0;
            let open = || {
                let send = send.clone();
                let throttle = Throttle::default();
                let begin = before;
                before += total_bytes.get() / passes;
                let input = Metered::new(slice.open()?, cancel.clone(), move |done| {
                    if throttle.passes(done, total_bytes.get()) {
                        let _ = send.try_send((begin + done.div_ceil(passes)).min(total_bytes.get()));
                    }
                });
                decompress(input)
            };
            Ok(unpacker.apply(&diff_id, open).map(|()| unpacker))
        });
        let telling = async {
            while let Some(done) = receive.recv().await {
                (self.progress)(Progress::Unpacking { index, total, done_bytes: Bytes(done), total_bytes });
            }
        };
        let (result, ()) = tokio::join!(work, telling);
        let unpacker = result?.map_err(|source| self.layer_error(index, source))?;
        if let Some(path) = remove {
            tokio::fs::remove_file(&path).await.map_err(|source| ImportError::io("remove", &path, source))?;
        }
        Ok(unpacker)
    }

    fn layer_error(&self, index: usize, source: UnpackError) -> ImportError {
        match source {
            UnpackError::Cancelled => ImportError::Cancelled,
            source => ImportError::Layer { image: self.image.clone(), number: index + 1, source },
        }
    }

    /// Runs blocking work, which keeps the workspace until its end.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&CancellationToken) -> Result<T, ImportError> + Send + 'static,
    ) -> Result<T, ImportError> {
        let (workspace, cancel) = (self.workspace.clone(), self.cancel.clone());
        let done = tokio::task::spawn_blocking(move || {
            let result = work(&cancel);
            drop(workspace);
            if cancel.is_cancelled() { Err(ImportError::Cancelled) } else { result }
        });
        match done.await {
            Ok(result) => result,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(ImportError::Cancelled), // the runtime is going down
        }
    }
}

/// Lets a report through for each mebibyte, and at both ends.
#[derive(Debug, Default)]
struct Throttle(std::sync::atomic::AtomicU64);

impl Throttle {
    fn passes(&self, done: u64, total: u64) -> bool {
        use std::sync::atomic::Ordering::Relaxed;
        let step = done >> 20;
        let last = self.0.swap(step, Relaxed);
        step != last || done == 0 || done == total
    }
}

fn pass(cancel: &CancellationToken) -> io::Result<()> {
    if cancel.is_cancelled() { Err(io::Error::other("cancelled")) } else { Ok(()) }
}

fn make_root(root: &Path) -> Result<(), ImportError> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir(root)
        .and_then(|()| std::fs::set_permissions(root, std::fs::Permissions::from_mode(0o755)))
        .map_err(|source| ImportError::io("create", root, source))
}

/// Puts a finished image in its place: first all its bytes, then its name.
fn publish(image: &Path, target: &Path) -> Result<(), ImportError> {
    let sync = |path: &Path| File::open(path).and_then(|file| file.sync_all());
    sync(image).map_err(|source| ImportError::io("write out", image, source))?;
    std::fs::rename(image, target).map_err(|source| ImportError::io("put the image to", target, source))?;
    let folder = folder_of(target);
    sync(folder).map_err(|source| ImportError::io("write out", folder, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_import_may_run_in_a_task_of_its_own() {
        let importer = Importer::new(ImporterConfig::new("/nowhere/to/work"));
        let import = async move {
            let reference: ImageReference = "oci:/no/such/folder".parse().unwrap();
            importer.import(&reference, None, Path::new("/nowhere/x"), &|_| {}, CancellationToken::new()).await
        };
        tokio::spawn(import).await.unwrap().unwrap_err();
    }

    #[test]
    fn reports_are_let_through_at_both_ends_and_each_mebibyte() {
        let throttle = Throttle::default();
        let passed: Vec<u64> = [0, 10, 1 << 19, 1 << 20, (1 << 20) + 1, (3 << 20) + 5, 3_200_000]
            .into_iter()
            .filter(|done| throttle.passes(*done, 3_200_000))
            .collect();
        assert_eq!(passed, [0, 1 << 20, (3 << 20) + 5, 3_200_000]);
    }
}
