//! Pages of a process become one layer file.
//!
//! ```text
//! 0      header
//! 4096   pages that are not all zeros, packed, in the order of guest memory
//!        index: where each run of pages is, and which are zeros; trailer
//! ```
//!
//! Threads take chunks of pages in order. Each copies its chunk out of the process, looks which pages are zeros, and only then
//! knows how much room the rest takes; it waits for the one before it to know that too, and writes where that one's data
//! ends. So they copy at the same time, and the file is what a single thread would have written.

mod copy;
mod error;
mod turns;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{io, thread};

use aenv_block_overlaybd::{Assembly, Identity};
use aenv_model::Bytes;
use aenv_vmm_driver::GuestMemory;
use uuid::Uuid;

pub use self::error::CaptureError;

use self::copy::{Copying, Extent};
use crate::image::MemoryLayer;
use crate::layout::Layout;
use crate::pages::{PAGE, PageRanges};

/// How to capture.
#[derive(Debug, Clone)]
pub struct CaptureOptions {
    /// Threads that copy, the caller's among them. Two keep one core copying out of the process while another copies into the
    /// file, whose lock the kernel lets but one of them have.
    pub threads: usize,
    /// The topmost layer of the image that the memory is a mapping of. None if that is an empty file: then zeros need not be
    /// recorded, as nothing lies below.
    pub parent: Option<Uuid>,
    /// Make the layer durable before it gets its name. Else call [`Captured::sync`] before relying on it.
    pub sync: bool,
}

impl Default for CaptureOptions {
    fn default() -> Self {
        Self { threads: 2, parent: None, sync: false }
    }
}

/// A layer that was captured. From now on neither the VMM nor its memory is needed.
#[derive(Debug)]
#[must_use = "unless it was asked for, the layer is not durable before `sync`"]
pub struct Captured {
    /// The layer.
    pub layer: MemoryLayer,
    /// Size of the guest's memory.
    pub memory: Bytes,
    /// Pages captured, of [`PAGE`] bytes, zeros included.
    pub pages: u64,
    /// Those of them that are zeros, of which no data is kept.
    pub zero_pages: u64,
    /// How long copying took.
    pub copying: Duration,
    /// How long the rest took: making the file, its index, its name, and syncing if that was asked for.
    pub finishing: Duration,
    file: File,
}

impl Captured {
    /// Makes the layer durable, with its name. Blocking for as long as the disk needs; the guest may run meanwhile, or be
    /// ended.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_all()?;
        aenv_durable::sync_dir(directory(&self.layer.path))
    }
}

/// Copies `pages` of `memory` into a new layer at `out`, over whatever is there. The vCPUs must be stopped.
///
/// The file has its name only once it is complete: until then it is `out` with `.new` behind it, which is removed on failure and
/// replaced by the next attempt. One attempt at a time for one `out`. Blocking.
///
/// Errors: `NoSpace` if the disk is full; `Gone` if the process is.
pub fn capture(
    memory: &GuestMemory,
    pages: &PageRanges,
    out: &Path,
    options: &CaptureOptions,
) -> Result<Captured, CaptureError> {
    let begun = Instant::now();
    let layout = Layout::new(memory)?;
    let pieces = layout.pieces(pages)?;
    let identity = Identity::fresh(options.parent.unwrap_or_default());
    let mut assembly = Assembly::new(layout.size(), &identity);

    let unnamed = Unnamed::create(out)?;
    let write_error = |source| CaptureError::write(out, source);
    unnamed.file.write_all_at(&assembly.header(), 0).map_err(write_error)?;
    let copying = Copying::new(memory.pid, &unnamed.file, out, pieces);
    let copy_begun = Instant::now();
    let mut extents = run(&copying, options.threads)?;
    let copied = copy_begun.elapsed();

    extents.sort_unstable_by_key(Extent::guest);
    let mut zero_pages = 0;
    for extent in extents {
        match extent {
            Extent::Data { guest, length, position } => assembly.data(guest, length, position)?,
            Extent::Zeros { guest, length } => {
                zero_pages += length / PAGE;
                if options.parent.is_some() {
                    assembly.zeroed(guest, length)?;
                }
            }
        }
    }
    let tail = assembly.finish();
    unnamed.file.write_all_at(&tail.bytes, tail.position).map_err(write_error)?;
    if options.sync {
        unnamed.file.sync_all().map_err(write_error)?;
    }
    let file = unnamed.name(out).map_err(write_error)?;
    if options.sync {
        aenv_durable::sync_dir(directory(out)).map_err(write_error)?;
    }
    Ok(Captured {
        layer: MemoryLayer { path: out.to_owned(), uuid: identity.uuid, size: tail.finished.size },
        memory: layout.size(),
        pages: pages.count(),
        zero_pages,
        copying: copied,
        finishing: begun.elapsed().saturating_sub(copied),
        file,
    })
}

/// Copies with up to `threads` threads; fewer if the host gives no more. Of several errors, one that is a cause.
fn run(copying: &Copying<'_>, threads: usize) -> Result<Vec<Extent>, CaptureError> {
    let others = threads.min(copying.chunks()).saturating_sub(1);
    thread::scope(|scope| {
        let copiers: Vec<_> = (0..others)
            .filter_map(|_| thread::Builder::new().name("capture".into()).spawn_scoped(scope, || copying.work()).ok())
            .collect();
        let mut extents = copying.work();
        for copier in copiers {
            let others = match copier.join() {
                Ok(others) => others,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            extents = match (extents, others) {
                (Ok(mut all), Ok(others)) => {
                    all.extend(others);
                    Ok(all)
                }
                (Err(CaptureError::GivenUp), others) => others.and(Err(CaptureError::GivenUp)),
                (Err(error), _) | (Ok(_), Err(error)) => Err(error),
            };
        }
        extents
    })
}

/// The directory that `path` is in.
pub(crate) fn directory(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A file in the making. Removed when dropped, unless it got its name.
#[derive(Debug)]
pub(crate) struct Unnamed {
    pub(crate) file: File,
    path: PathBuf,
    named: bool,
}

impl Unnamed {
    /// What is to become `out`.
    fn create(out: &Path) -> Result<Self, CaptureError> {
        Self::beside(out).map_err(|source| CaptureError::write(out, source))
    }

    pub(crate) fn beside(out: &Path) -> io::Result<Self> {
        let mut path = out.as_os_str().to_owned();
        path.push(".new");
        let path = PathBuf::from(path);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path)?;
        Ok(Self { file, path, named: false })
    }

    /// Gives it its name. Not synced.
    pub(crate) fn name(mut self, out: &Path) -> io::Result<File> {
        let file = self.file.try_clone()?;
        fs::rename(&self.path, out)?;
        self.named = true;
        Ok(file)
    }
}

impl Drop for Unnamed {
    fn drop(&mut self) {
        if !self.named {
            let _ = fs::remove_file(&self.path); // the next attempt replaces it otherwise
        }
    }
}
