//! One device, from its intent to its end. Everything here blocks, and is called by one thread at a time.
//!
//! ```text
//!  create:  lock the upper ▶ intent row ▶ open layers ▶ make or open the upper ▶ export ▶ row
//!  restack: intent in the row ▶ seal, rename, fresh upper ▶ row with one lower more
//!  merge:   file in the row ▶ write it, use it ▶ row with its lower and the garbage ▶ delete ▶ row
//!  close:   row ▶ flush ▶ take away the export ▶ delete what is to be deleted ▶ no row
//! ```
//!
//! What a crash leaves of any of these is told in `recover.rs`, which undoes the first and ends the others.

mod close;
mod create;
mod merge;
mod open;
mod recover;
mod restack;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_block_client::{Caching, DeviceSpec, DeviceStats, DeviceView, ErrorKind, UpperConfig};
use aenv_block_device::BlockDevice as _;
use aenv_block_export::{Export, ExportOptions};
use aenv_block_overlaybd::{OverlayDevice, ResizeError, UpperFiles};
use aenv_durable::StoreError;
use aenv_model::Bytes;

pub(crate) use self::create::{CreateError, create};
pub(crate) use self::recover::recover;

use self::merge::Merging;
use crate::background::Attendants;
use crate::context::Context;
use crate::error::{Refusal, cause};
use crate::lock::Lock;
use crate::row::{DeviceRow, Stage};
use crate::served::{Body, Served};

/// A device that there is.
#[derive(Debug)]
pub(crate) struct Device {
    name: String,
    row: DeviceRow,
    served: Arc<Served>,
    /// None only if it could not be made visible again.
    export: Option<Box<dyn Export>>,
    /// Held as long as the upper is open.
    lock: Option<Lock>,
    /// Why it does not work.
    problem: Option<String>,
    merging: Arc<Merging>,
    attendants: Attendants,
}

/// What anybody may see of a device at any time.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    view: DeviceView,
    /// None while it is being brought back.
    served: Option<Arc<Served>>,
}

impl Seen {
    /// A device that is being brought back. None if it is not to come back.
    pub(crate) fn recovering(name: &str, row: &DeviceRow) -> Option<Self> {
        let view = view(name, row, row.export.as_ref()?.path.clone(), None);
        (row.stage == Stage::Ready).then_some(Self { view: DeviceView { recovering: true, ..view }, served: None })
    }

    /// Whether it is more than a promise.
    pub(crate) fn is_settled(&self) -> bool {
        self.served.is_some()
    }

    /// With what was counted up to now.
    pub(crate) fn view(&self) -> DeviceView {
        let stats = self.served.as_ref().map(|served| served.meter().stats()).unwrap_or_default();
        DeviceView { stats, ..self.view.clone() }
    }
}

fn view(name: &str, row: &DeviceRow, path: PathBuf, problem: Option<String>) -> DeviceView {
    DeviceView {
        name: name.to_owned(),
        path,
        size: row.size,
        layers_size: Bytes(0),
        config: row.config.clone(),
        read_only: is_read_only(&row.spec),
        problem,
        recovering: false,
        stats: DeviceStats::default(),
    }
}

/// A device could not be resized or flushed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChangeError {
    /// It has no upper, or may not be written.
    #[error("device {0} is read-only")]
    ReadOnly(String),
    /// It could not be brought back.
    #[error("device {name} does not work: {problem}")]
    Broken { name: String, problem: String },
    /// The kernel cannot be told of another size.
    #[error("device {name} cannot be resized here")]
    Fixed { name: String, source: io::Error },
    /// It cannot have that size, or not now.
    #[error("resize device {name}")]
    Resize { name: String, source: ResizeError },
    /// The kernel was not told of the new size.
    #[error("device {name} has another size, and the kernel was not told")]
    Announce { name: String, source: io::Error },
    /// What was written may not be durable.
    #[error("flush device {name}")]
    Flush { name: String, source: io::Error },
    /// The change was made and not written down.
    #[error("record the change of device {name}")]
    Record { name: String, source: StoreError },
}

impl Refusal for ChangeError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::ReadOnly(_) | Self::Fixed { .. } | Self::Resize { source: ResizeError::Size(_), .. } => {
                ErrorKind::Invalid
            }
            _ => cause(self).unwrap_or(ErrorKind::Failed),
        }
    }
}

impl Device {
    /// What was asked for.
    pub(crate) fn spec(&self) -> &DeviceSpec {
        &self.row.spec
    }

    /// Where it is in its life.
    pub(crate) fn stage(&self) -> Stage {
        self.row.stage
    }

    /// What the store has of it.
    pub(crate) fn into_row(self) -> DeviceRow {
        self.row
    }

    /// Why it does not work.
    pub(crate) fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// It as it is now.
    pub(crate) fn seen(&self) -> Seen {
        let path = match (&self.export, &self.row.export) {
            (Some(export), _) => export.path().to_owned(),
            (None, Some(record)) => record.path.clone(),
            (None, None) => PathBuf::new(),
        };
        let layers_size = match self.served.body() {
            Body::Writable { device, .. } => device.lowers().size(),
            Body::Layers(opened) => opened.stack.size(),
            Body::Broken(_) => Bytes(0),
        };
        let view = DeviceView { layers_size, ..view(&self.name, &self.row, path, self.problem.clone()) };
        Seen { view, served: Some(Arc::clone(&self.served)) }
    }

    /// Changes its size.
    pub(crate) fn resize(&mut self, context: &Context, size: Bytes) -> Result<(), ChangeError> {
        let name = || self.name.clone();
        let device = self.writable()?;
        if size.get() == device.size().get() {
            return Ok(());
        }
        let resizable = self.export.as_ref().map_or(Ok(()), |export| export.resizable());
        resizable.map_err(|source| ChangeError::Fixed { name: name(), source })?;
        device.resize(size).map_err(|source| ChangeError::Resize { name: name(), source })?;
        self.row.size = device.size();
        context.rows.put(&self.name, &self.row).map_err(|source| ChangeError::Record { name: name(), source })?;
        let told = self.export.as_ref().map_or(Ok(()), |export| export.resized());
        told.map_err(|source| ChangeError::Announce { name: name(), source })
    }

    /// Makes durable what was written.
    pub(crate) fn flush(&self) -> Result<(), ChangeError> {
        match self.served.body() {
            Body::Writable { device, .. } => {
                device.flush().map_err(|source| ChangeError::Flush { name: self.name.clone(), source })
            }
            Body::Layers(_) => Ok(()),
            Body::Broken(_) => Err(self.broken()),
        }
    }

    /// Leaves it for the next process, durable. Its row stays.
    pub(crate) fn rest(mut self) -> Result<(), String> {
        self.stop_merging();
        let mut problems = Vec::new();
        self.attendants.end();
        if let Some(export) = self.export.take() {
            problems.extend(export.disown().err().map(|error| format!("leave device {}: {error}", self.name)));
        }
        // Now nobody writes any more.
        if !matches!(self.served.body(), Body::Broken(_)) {
            problems.extend(self.flush().err().map(|error| crate::error::chain(&error)));
        }
        if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
    }

    fn writable(&self) -> Result<Arc<OverlayDevice>, ChangeError> {
        match self.served.body() {
            _ if self.row.spec.read_only => Err(ChangeError::ReadOnly(self.name.clone())),
            Body::Writable { device, .. } => Ok(device),
            Body::Layers(_) => Err(ChangeError::ReadOnly(self.name.clone())),
            Body::Broken(_) => Err(self.broken()),
        }
    }

    /// Whether its upper is sound and no layer.
    fn takes_writes(&self) -> bool {
        self.writable().is_ok_and(|device| device.upper().takes_writes())
    }

    fn broken(&self) -> ChangeError {
        ChangeError::Broken { name: self.name.clone(), problem: self.problem.clone().unwrap_or_default() }
    }
}

fn is_read_only(spec: &DeviceSpec) -> bool {
    spec.read_only || spec.config.upper.is_none()
}

fn export_options(spec: &DeviceSpec) -> ExportOptions {
    let caching = match spec.caching {
        Caching::Direct => aenv_block_export::Caching::Direct,
        Caching::Shared => aenv_block_export::Caching::Shared,
    };
    ExportOptions { read_only: is_read_only(spec), caching }
}

/// The files of an upper. Which there are, its layout says.
fn files(upper: &UpperConfig) -> UpperFiles {
    UpperFiles { data: upper.data.clone(), index: upper.index.clone() }
}

/// What the names of files that are to become others end with.
const NEW: &str = ".new";
/// What the name of the file ends with where an upper notes what was not flushed.
const NOTES: &str = ".unflushed";
/// What the names of files end with that only tell whether a file can be moved.
const PROBE: &str = ".probe";

/// `path` with `ending`.
fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}

/// What the lock of a device's upper says.
fn holder(name: &str) -> String {
    format!("device {name} of aenv-blockd, process {}", std::process::id())
}
