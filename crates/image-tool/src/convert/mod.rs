//! `convert`: an image of files, from wherever images come from, into layers.
//!
//! The conversion is the node's own (`aenv-image`), with an image cache and a storage daemon that live as long as this
//! command. What is asked for is written beside its place and renamed when all of it is there.

mod daemon;
mod native;
mod oci;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use aenv_block_client::{DeviceConfig, Lower};
use aenv_block_overlaybd::BlockSize;
use aenv_image::{CacheConfig, ImageCache, ImageReference, Imported, Importer, ImporterConfig, Progress};
use aenv_model::Bytes;
use anyhow::{Context as _, Result, anyhow, bail};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::packing::{Compressor, block_size};
use crate::report;

pub(crate) use daemon::{Args as DaemonArgs, be_the_daemon};

/// Who the layers in our cache belong to.
const OWNER: &str = "aenv-image";
/// Longest wait for work that is no longer wanted.
const LAST_WORK: Duration = Duration::from_secs(30);

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// `[HOST[:PORT]/]NAME[:TAG][@DIGEST]`, `oci:FOLDER[:TAG]` or `docker-archive:FILE[:TAG]`. Credentials are Docker's.
    reference: ImageReference,
    /// A folder to make, for the layers as plain files with an image config, `image.json`.
    #[arg(required_unless_present = "native")]
    outdir: Option<PathBuf>,
    /// A folder to make, for an OCI layout of the image as a native one: to be pushed, then loaded lazily.
    #[arg(long, value_name = "DIR")]
    native: Option<PathBuf>,
    /// How the layers of a native image are compressed.
    #[arg(long, value_name = "ALGORITHM", default_value = "lz4", requires = "native")]
    zfile: Compressor,
    /// Bytes compressed at once: a power of two from 1024 to 65536.
    #[arg(long, value_name = "BYTES", default_value = "4096", value_parser = block_size, requires = "native")]
    block_size: BlockSize,
    /// Size of the device, in GiB.
    #[arg(long, value_name = "GIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    size: u64,
    /// A registry that is spoken to without TLS, besides those on this machine.
    #[arg(long, value_name = "HOST[:PORT]")]
    plain_http: Vec<String>,
    /// Tell about the result as JSON.
    #[arg(long)]
    json: bool,
}

/// What was made.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Converted {
    /// Of the image that was converted.
    digest: String,
    /// Of the device.
    virtual_size: Bytes,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    layers: Vec<Made>,
    #[serde(skip_serializing_if = "Option::is_none")]
    native: Option<native::Made>,
}

/// A layer file.
#[derive(Debug, Serialize)]
struct Made {
    file: PathBuf,
    digest: String,
    size: Bytes,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    for folder in args.outdir.iter().chain(&args.native) {
        refuse_existing(folder)?;
    }
    let place = args.outdir.as_ref().or(args.native.as_ref()).context("neither OUTDIR nor --native")?;
    let scratch = scratch_beside(place)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("start the runtime")?;
    let image = runtime.block_on(import(args, scratch.path()))?;
    runtime.shutdown_timeout(LAST_WORK);

    let mut converted =
        Converted { digest: image.imported.digest.clone(), virtual_size: image.imported.size, ..Converted::default() };
    if let Some(folder) = &args.native {
        let staging = scratch_beside(folder)?;
        converted.native = Some(native::write(&image, args.zfile.options(args.block_size), staging.path())?);
        publish(staging, folder)?;
    }
    if let Some(folder) = &args.outdir {
        let staging = scratch_beside(folder)?;
        converted.layers = write_layers(&image, staging.path(), folder)?;
        publish(staging, folder)?;
    }
    if args.json {
        report::print_json(&converted)?;
    } else {
        for layer in &converted.layers {
            report::print(&format!("{}: {} bytes, {}", layer.file.display(), layer.size.get(), layer.digest))?;
        }
        if let (Some(folder), Some(native)) = (&args.native, &converted.native) {
            report::print(&format!("{}: {} layers, {}", folder.display(), native.layers.len(), native.digest))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// An image that was converted, with its layers in our cache.
struct Image {
    imported: Imported,
    device: DeviceConfig,
}

impl Image {
    /// Where each layer is, with its digest; the lowest first.
    fn layers(&self) -> Result<Vec<(&Path, &str)>> {
        fn layer(lower: &Lower) -> Option<(&Path, &str)> {
            Some((lower.file.as_deref()?, lower.digest.as_deref()?))
        }
        let layers = self.device.lowers.iter().map(layer).collect::<Option<_>>();
        layers
            .context("there is nothing to convert: the image is made of overlaybd blobs, which stay in their registry")
    }
}

/// Converts the image into a cache in `scratch`.
async fn import(args: &Args, scratch: &Path) -> Result<Image> {
    let cancel = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("handle SIGINT")?;
    let stop = cancel.clone();
    let watch = tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.cancel();
    });
    let mut daemon = daemon::OwnDaemon::start(&scratch.join("daemon")).await?;
    let result = import_with(args, scratch, &daemon, cancel).await;
    let ended = daemon.stop().await;
    watch.abort();
    let image = result?;
    ended?;
    Ok(image)
}

async fn import_with(
    args: &Args,
    scratch: &Path,
    daemon: &daemon::OwnDaemon,
    cancel: CancellationToken,
) -> Result<Image> {
    let cache = ImageCache::open(&scratch.join("cache"), OWNER, CacheConfig::default())?;
    let config = ImporterConfig {
        plain_http_hosts: args.plain_http.clone(),
        virtual_size: Bytes::gib(args.size),
        ..ImporterConfig::default()
    };
    let importer = Importer::new(config, cache, daemon.client().clone());
    let target = scratch.join("image.json");
    let line = Line::new();
    let tell = |step: Progress| line.tell(&step);
    let imported = importer.import(&args.reference, None, &target, OWNER, &tell, cancel).await;
    let closed = importer.close(LAST_WORK).await;
    let imported = imported?;
    closed.map_err(|running| anyhow!("wait for the conversion's last work: {running}"))?;
    Ok(Image { imported, device: DeviceConfig::load(&target)? })
}

/// Moves the layers to `folder` with an image config that names them; they will be found in `published`.
fn write_layers(image: &Image, folder: &Path, published: &Path) -> Result<Vec<Made>> {
    let mut made = Vec::new();
    let mut device = image.device.clone();
    for (number, (lower, (path, digest))) in device.lowers.iter_mut().zip(image.layers()?).enumerate() {
        let name = PathBuf::from(format!("{number}.commit"));
        let to = folder.join(&name);
        // Made for us alone, and on the same filesystem but for odd mounts.
        if fs::rename(path, &to).is_err() {
            fs::copy(path, &to).with_context(|| format!("copy {} to {}", path.display(), to.display()))?;
        }
        let size = Bytes(to.metadata().with_context(|| format!("look at {}", to.display()))?.len());
        made.push(Made { file: published.join(&name), digest: digest.to_owned(), size });
        lower.file = Some(name); // from the directory of the config
    }
    device.save(&folder.join("image.json"), 0o644)?;
    let config = serde_json::to_vec_pretty(&oci::configuration(&image.imported.config, Vec::new()))?;
    let path = folder.join("config.json");
    fs::write(&path, config).with_context(|| format!("write {}", path.display()))?;
    Ok(made)
}

fn refuse_existing(folder: &Path) -> Result<()> {
    let empty = match fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => true,
        Err(error) => return Err(error).with_context(|| format!("look into {}", folder.display())),
    };
    if !empty {
        bail!("{} exists and is not empty", folder.display());
    }
    if folder.file_name().is_none() {
        bail!("{} is not the name of a folder to make", folder.display());
    }
    Ok(())
}

/// A directory beside `place`, that goes with this process unless it is published.
fn scratch_beside(place: &Path) -> Result<tempfile::TempDir> {
    let parent = place.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let parent = parent.canonicalize().with_context(|| format!("look at {}", parent.display()))?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".aenv-image-");
    builder.tempdir_in(&parent).with_context(|| format!("make a directory in {}", parent.display()))
}

fn publish(staging: tempfile::TempDir, folder: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let publish = || -> std::io::Result<()> {
        fs::set_permissions(staging.path(), fs::Permissions::from_mode(0o755))?;
        for entry in fs::read_dir(staging.path())? {
            fs::File::open(entry?.path())?.sync_all()?;
        }
        fs::rename(staging.path(), folder) // an empty directory may be there
    };
    publish().with_context(|| format!("put {} in place", folder.display()))?;
    let _ = staging.keep(); // it has another name now
    Ok(())
}

/// What a conversion is at, on a terminal only.
struct Line(ProgressBar);

impl Line {
    fn new() -> Self {
        let bar = ProgressBar::new_spinner(); // on standard error, hidden if that is no terminal
        if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg} {elapsed:>4}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        Self(bar)
    }

    fn tell(&self, step: &Progress) {
        let of = |index: &usize, total: &usize| format!("layer {} of {total}", index + 1);
        let text = match step {
            Progress::Resolving => "looking the image up".to_owned(),
            Progress::Building => "making the empty file system".to_owned(),
            Progress::Layer { index, total, done_bytes, total_bytes } => {
                format!("fetching {}: {done_bytes} of {total_bytes}", of(index, total))
            }
            Progress::Unpacking { index, total, done_bytes, total_bytes } => {
                format!("unpacking {}: {done_bytes} of {total_bytes}", of(index, total))
            }
            Progress::Committing { index, total } => format!("writing {}", of(index, total)),
            _ => return, // nobody shares our cache
        };
        self.0.set_message(text);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
