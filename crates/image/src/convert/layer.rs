//! One layer: a device, what is unpacked onto it, and what becomes of its upper.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aenv_block_client::{
    BlockdClient, Caching, DeviceConfig, DeviceSpec, ErrorKind, Lower, NewUpper, UpperConfig, Uppers,
};
use aenv_block_overlaybd::{Identity, LocalFile, Mode, OverlayDevice, Sha256Writer, Stack, UpperFiles};
use aenv_model::Bytes;
use rustix::io::Errno;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::fetch::{Throttle, pass};
use super::mounted::mounted;
use super::{Conversion, ConvertError, Staged, failed, joined};
use crate::cache::{Commit, Staging};
use crate::compression::decompress;
use crate::digest::Digest;
use crate::error::ImportError;
use crate::ext4::make_canonical;
use crate::metered::Metered;
use crate::progress::Progress;
use crate::source::Slice;
use crate::unpack::{Budget, UnpackError, Unpacker};

/// Longest wait for the kernel to let go of a device that is no longer mounted: whoever looks at new block devices may have
/// the loop device open for a moment.
const RELEASE: Duration = Duration::from_secs(30);
/// Pause between two attempts.
const RETRY: Duration = Duration::from_millis(50);
/// Written to a layer's file at once.
const BUFFER: usize = 1 << 20;

/// What is to be done for one layer.
#[derive(Debug)]
pub(super) struct LayerJob {
    pub(super) image: String,
    pub(super) index: usize,
    pub(super) total: usize,
    /// Whether only the empty file system lies below.
    pub(super) lowest: bool,
    pub(super) diff_id: Digest,
    pub(super) slice: Slice,
    pub(super) lowers: Vec<Lower>,
    pub(super) identity: Identity,
    pub(super) budget: Budget,
}

/// What a thread that unpacks tells.
enum Told {
    Unpacked(u64),
    Committing,
}

impl Conversion<'_> {
    /// Makes a layer, and gives what may still be unpacked. If this is dropped, the work stops soon and is cleaned up.
    pub(super) async fn unpack(&self, job: LayerJob) -> Result<(Staged, Budget), ImportError> {
        let (index, total, total_bytes) = (job.index, job.total, Bytes(job.slice.length()));
        let blob = job.slice.path().starts_with(self.staging.path()).then(|| job.slice.path().to_owned());
        // What does not fit is soon outdated anyway.
        let (send, mut receive) = mpsc::channel::<Told>(4);
        let work = Work {
            daemon: self.workshop.daemon.clone(),
            virtual_size: self.workshop.virtual_size,
            staging: self.staging.clone(),
            cancel: self.cancel.clone(),
            send,
        };
        // A device has to be closed whatever happens to whoever waits.
        let task = self.workshop.tasks.spawn(format!("convert layer {} of {}", index + 1, job.image), work.run(job));
        let telling = async {
            while let Some(told) = receive.recv().await {
                (self.progress)(match told {
                    Told::Unpacked(done) => Progress::Unpacking { index, total, done_bytes: Bytes(done), total_bytes },
                    Told::Committing => Progress::Committing { index, total },
                });
            }
        };
        let (result, ()) = tokio::join!(task, telling);
        let made = joined(result)??;
        // An archive that was uncompressed holds other layers as well; blobs that were fetched are one layer's.
        if let Some(path) =
            blob.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("blob-")))
        {
            tokio::fs::remove_file(&path).await.map_err(|source| ImportError::io("remove", &path, source))?;
        }
        Ok(made)
    }
}

/// What the work on a layer needs that may outlive whoever waits for it.
struct Work {
    daemon: BlockdClient,
    virtual_size: Bytes,
    staging: Staging,
    cancel: CancellationToken,
    send: mpsc::Sender<Told>,
}

impl Work {
    async fn run(self, job: LayerJob) -> Result<(Staged, Budget), ImportError> {
        let (image, index) = (job.image.clone(), job.index);
        let failed = |error: ConvertError| failed(error, &image, Some(index), &self.staging);
        let dir = self.staging.join(format!("upper-{index}"));
        let files = UpperFiles::in_directory(&dir, Mode::Log);
        let at = self.staging.join("mounted");
        for dir in [&dir, &at] {
            fs::create_dir_all(dir).map_err(|source| ImportError::io("create", dir, source))?;
        }
        // The directory is locked for as long as the device may live: that is how a device without an owner is known.
        let name = device_name(&self.staging, index);
        let (identity, lowers) = (job.identity.clone(), job.lowers.clone());
        let device = self.daemon.create(&name, &self.spec(&lowers, &files)).await;
        let unpacked = match device {
            Ok(device) => self.unpack(job, device.path, at).await,
            Err(error) => Err(failed(error.into())),
        };
        let uppers = if unpacked.is_ok() { Uppers::Keep } else { Uppers::Remove };
        let closed = close(&self.daemon, &name, uppers).await;
        let budget = unpacked?;
        closed.map_err(|error| failed(error.into()))?;
        let _ = self.send.send(Told::Committing).await;
        let (staging, cancel) = (self.staging.clone(), self.cancel.clone());
        let committing = tokio::task::spawn_blocking(move || {
            let made = commit(&lowers, &files, &identity, &staging, index, &cancel);
            let _ = fs::remove_dir_all(&dir); // it goes with the directory above at last
            made
        });
        let staged = joined(committing.await)?;
        if self.cancel.is_cancelled() {
            return Err(ImportError::Cancelled);
        }
        Ok((staged.map_err(failed)?, budget))
    }

    fn spec(&self, lowers: &[Lower], files: &UpperFiles) -> DeviceSpec {
        let upper = UpperConfig { mode: Mode::Log, data: files.data.clone(), index: files.index.clone() };
        DeviceSpec {
            config: DeviceConfig { lowers: lowers.to_vec(), upper: Some(upper), ..DeviceConfig::default() },
            new_upper: Some(NewUpper { mode: Mode::Log, size: Some(self.virtual_size) }),
            // The kernel has the pages of the mounted file system itself.
            caching: Caching::Direct,
            read_only: false,
        }
    }

    /// Unpacks onto a device that is there.
    async fn unpack(&self, job: LayerJob, device: PathBuf, at: PathBuf) -> Result<Budget, ImportError> {
        let (image, index, staging) = (job.image.clone(), job.index, self.staging.clone());
        let (cancel, send) = (self.cancel.clone(), self.send.clone());
        let virtual_size = self.virtual_size;
        let work = move |root: &Path| apply(job, root, virtual_size, &cancel, &send);
        match mounted(device, at, work).await {
            // What failed first explains what failed then.
            Ok(Err(error)) => Err(layer_error(error, &image, index, &staging)),
            Ok(Ok(budget)) => Ok(budget),
            Err(error) => Err(failed(error.into(), &image, Some(index), &staging)),
        }
    }
}

/// Closes a device, as soon as the kernel has let go of it.
pub(super) async fn close(
    daemon: &BlockdClient,
    name: &str,
    uppers: Uppers,
) -> Result<(), aenv_block_client::BlockdError> {
    let deadline = Instant::now() + RELEASE;
    loop {
        match daemon.close(name, uppers).await {
            Err(error) if error.kind() == ErrorKind::Conflict && Instant::now() < deadline => {
                tokio::time::sleep(RETRY).await;
            }
            result => return result.map(drop),
        }
    }
}

/// How the names of devices begin that layers are converted on.
pub const DEVICE_PREFIX: &str = "convert-";

/// The name of a device in `staging`, which tells whose it is.
pub(super) fn device_name(staging: &Staging, index: usize) -> String {
    format!("{DEVICE_PREFIX}{}-{index}", staging.name())
}

/// Unpacks a layer to `root`. Blocking.
fn apply(
    job: LayerJob,
    root: &Path,
    virtual_size: Bytes,
    cancel: &CancellationToken,
    send: &mpsc::Sender<Told>,
) -> Result<Budget, UnpackError> {
    let total = job.slice.length();
    // All but the lowest layer are read twice, which is one progress to whoever watches.
    let passes = if job.lowest { 1 } else { 2 };
    let mut before = 0;
    let slice = job.slice;
    let open = || {
        let (send, throttle, begin) = (send.clone(), Throttle::default(), before);
        before += total / passes;
        let input = Metered::new(slice.open()?, cancel.clone(), move |done| {
            if throttle.passes(done, total) {
                let _ = send.try_send(Told::Unpacked((begin + done.div_ceil(passes)).min(total)));
            }
        });
        decompress(input)
    };
    let mut unpacker = Unpacker::new(root, job.lowest, job.budget, cancel.clone())?;
    let applied = unpacker.apply(&job.diff_id, open);
    // A file system that is full is the image's fault, a disk that is full is not.
    applied.map_err(|error| match error {
        UnpackError::Io { source, .. } if is_no_space(&source) && is_full(root) => {
            UnpackError::TooLarge { limit: virtual_size.to_string() }
        }
        error => error,
    })?;
    unpacker.finish()
}

fn is_no_space(error: &io::Error) -> bool {
    error.raw_os_error().map(Errno::from_raw_os_error) == Some(Errno::NOSPC)
}

/// Whether the file system at `root` has no block or no inode left.
fn is_full(root: &Path) -> bool {
    rustix::fs::statvfs(root).is_ok_and(|stat| stat.f_bavail < 16 || stat.f_favail == 0)
}

/// A failure of unpacking. What fails on the disk below comes up as any I/O error.
fn layer_error(error: UnpackError, image: &str, index: usize, staging: &Staging) -> ImportError {
    match error {
        UnpackError::Cancelled => ImportError::Cancelled,
        UnpackError::Io { source, .. } if super::error::is_scarce(staging.path()) => {
            failed(ConvertError::Step(Box::new(source)), image, Some(index), staging)
        }
        source => ImportError::Layer { image: image.to_owned(), number: index + 1, source },
    }
}

/// Makes a layer of an upper that nobody uses any more. Blocking.
fn commit(
    lowers: &[Lower],
    files: &UpperFiles,
    identity: &Identity,
    staging: &Staging,
    index: usize,
    cancel: &CancellationToken,
) -> Result<Staged, ConvertError> {
    let open = |path: &Path| -> Result<_, ConvertError> {
        let file = LocalFile::open(path).map_err(|source| ConvertError::Step(Box::new(source)))?;
        Ok(std::sync::Arc::new(file) as std::sync::Arc<dyn aenv_block_overlaybd::Source>)
    };
    let sources = lowers.iter().filter_map(|lower| lower.file.as_deref()).map(open).collect::<Result<Vec<_>, _>>()?;
    let device = OverlayDevice::new(Stack::open(sources)?, files.open()?)?;
    make_canonical(&device)?;
    write_commit(&device, identity, staging, &format!("layer-{index}"), cancel)
}

/// Writes the upper of `device` to a file, and gives its digest. Not synced. Blocking.
pub(super) fn write_commit(
    device: &OverlayDevice,
    identity: &Identity,
    staging: &Staging,
    name: &str,
    cancel: &CancellationToken,
) -> Result<Staged, ConvertError> {
    let step = |source: io::Error| ConvertError::Step(Box::new(source));
    let (file, link) = (staging.join(format!("{name}.commit")), staging.join(format!("{name}.link")));
    let out = File::create(&file).map_err(step)?;
    let out = BufWriter::with_capacity(BUFFER, Until { out: Sha256Writer::new(out), cancel });
    let mut out = out;
    device.export_upper(&mut out, identity)?;
    let out = out.into_inner().map_err(|error| step(error.into_error()))?;
    let (_, digest, size) = out.out.finish();
    fs::hard_link(&file, &link).map_err(step)?;
    Ok(Staged { file, link, commit: Commit { digest: Digest::from_sha256(digest), size } })
}

/// A writer that fails once cancelled.
struct Until<'a, W> {
    out: W,
    cancel: &'a CancellationToken,
}

impl<W: Write> Write for Until<'_, W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        pass(self.cancel)?;
        self.out.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
