//! Bringing back what a process that is no more had.
//!
//! | the row says | found | done |
//! | --- | --- | --- |
//! | creating | anything | a new upper is removed, then the row |
//! | closing | anything | goes on with it |
//! | restacking | the upper with the UUID of the intent | nothing had happened |
//! | | it, sealed | moved to its place, fresh upper |
//! | | no upper, the layer | fresh upper |
//! | | another upper, the layer | all had happened, but for the row |
//! | merging | a file that is no lower | removed |
//! | garbage | files | removed |
//!
//! A device that cannot be opened is exported all the same, so that whoever has it open sees errors rather than silence.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_block_client::ErrorKind;
use aenv_block_overlaybd::{
    CreateUpperError, Identity, Layer, LocalFile, OpenLayerError, OpenUpperError, Source as _, UpperFiles,
    UpperOptions, UpperState,
};
use aenv_durable::{StoreError, remove_file_if_present, sync_dir};
use aenv_model::Bytes;
use tracing::{error, info, warn};
use uuid::Uuid;

use super::create::{broken, undo};
use super::open::{OpenError, open};
use super::restack::Made;
use super::{Device, NEW, NOTES, PROBE, beside, export_options, files, holder, is_read_only};
use crate::background::Attendants;
use crate::context::Context;
use crate::error::{Refusal, cause, chain};
use crate::lock::{Lock, LockError};
use crate::row::{DeviceRow, Restacking, Stage};
use crate::served::{Body, Served};

/// A device could not be brought to a state that its row tells of.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RepairError {
    /// Its upper is in use.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A file cannot be looked at, moved or removed.
    #[error("{what} {path}", path = path.display())]
    File { what: &'static str, path: PathBuf, source: io::Error },
    /// The upper's files are gone.
    #[error("there is no upper at {path}, and no layer that it became", path = path.display())]
    NothingThere { path: PathBuf },
    /// It is something else.
    #[error("{path} is not the upper that was there", path = path.display())]
    Foreign { path: PathBuf },
    /// The layer that a restack made is not what it was to be.
    #[error("{path} has the UUID {found}, and not {expected}", path = path.display())]
    OtherLayer { path: PathBuf, found: Uuid, expected: Uuid },
    /// A sealed upper cannot be read.
    #[error("open the sealed upper")]
    Layer(#[from] OpenLayerError),
    /// The upper cannot be opened.
    #[error("open the upper")]
    Upper(#[from] OpenUpperError),
    /// The next upper cannot be made.
    #[error("make a fresh upper")]
    Create(#[from] CreateUpperError),
    /// The device cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Nothing can be done about it.
    #[error("{problem}")]
    Still { problem: String },
    /// What was found cannot be written down.
    #[error("record what was found")]
    Record(#[source] StoreError),
}

impl Refusal for RepairError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Open(error) => error.kind(),
            Self::Lock(LockError::Held { .. }) => ErrorKind::Conflict,
            _ => cause(self).unwrap_or(ErrorKind::Failed),
        }
    }
}

/// Brings back, undoes or ends what `row` tells of. `None` if nothing is left of it.
pub(crate) fn recover(context: &Context, name: &str, mut row: DeviceRow) -> Option<Device> {
    match row.stage {
        Stage::Creating => match undo_creating(context, name, &row) {
            Ok(()) => {
                info!(device = name, "undid a creation that had not ended");
                None
            }
            Err(problem) => Some(export_broken(context, name, row, problem)),
        },
        Stage::Ready => {
            let opened = lock_upper(name, &row).and_then(|lock| Ok((lock, prepare(context, name, &mut row)?)));
            Some(match opened {
                Ok((lock, (body, attendants))) => bring_back(context, name, row, lock, body, attendants),
                Err(failed) => export_broken(context, name, row, chain(&failed)),
            })
        }
        Stage::Closing(uppers) => {
            let device = export_broken(context, name, row, "it was being closed".to_owned());
            match device.close(context, uppers) {
                Ok(_) => None,
                Err((device, failed)) => {
                    error!(device = name, error = chain(&failed), "closing cannot be ended");
                    device.map(|device| *device)
                }
            }
        }
    }
}

fn undo_creating(context: &Context, name: &str, row: &DeviceRow) -> Result<(), String> {
    let upper = row.spec.config.upper.as_ref();
    let _lock = match upper.map(|upper| Lock::upper(&upper.data, &holder(name))).transpose() {
        Ok(lock) => lock,
        // The directory is gone, and with it the files.
        Err(LockError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
        Err(failed) => return Err(chain(&failed)),
    };
    undo(context, name, &row.spec).map_err(|failed| chain(&failed))
}

fn lock_upper(name: &str, row: &DeviceRow) -> Result<Option<Lock>, RepairError> {
    let upper = row.config.upper.as_ref();
    Ok(upper.map(|upper| Lock::upper(&upper.data, &holder(name))).transpose()?)
}

/// Repairs and opens. Whoever calls holds the upper's lock.
fn prepare(context: &Context, name: &str, row: &mut DeviceRow) -> Result<(Body, Attendants), RepairError> {
    let before = row.clone();
    if let Some(upper) = &row.config.upper {
        remove_beginnings(&files(upper))?;
    }
    if let Some(Restacking { layer, .. }) = row.restacking.clone() {
        remove(&beside(&layer, PROBE))?;
        match finish_restack(row)? {
            Some(made) => row.add_lower(&layer, &made),
            None => row.restacking = None,
        }
    }
    sweep(row)?;
    if *row != before {
        context.rows.put(name, row).map_err(RepairError::Record)?;
    }
    Ok(open(context, name, row)?)
}

/// Opens again a device whose restack was just ended on disk.
pub(super) fn reopen(context: &Context, name: &str, row: &DeviceRow) -> Result<(Body, Attendants), RepairError> {
    // The layer counts, although the row says so only when the caller writes it.
    let mut now = row.clone();
    if let Some(Restacking { layer, .. }) = &row.restacking {
        now.config.lowers.push(aenv_block_client::Lower { file: Some(layer.clone()), ..Default::default() });
    }
    Ok(open(context, name, &mut now)?)
}

/// Removes files that were to become an upper.
fn remove_beginnings(files: &UpperFiles) -> Result<(), RepairError> {
    let notes = beside(&files.data, NOTES);
    for path in [Some(&files.data), files.index.as_ref(), Some(&notes)].into_iter().flatten() {
        for ending in [NEW, PROBE] {
            remove(&beside(path, ending))?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> Result<(), RepairError> {
    remove_file_if_present(path).map_err(|source| RepairError::File { what: "remove", path: path.to_owned(), source })
}

/// Removes files that a merge left: begun, or replaced. Never one that is a lower.
fn sweep(row: &mut DeviceRow) -> Result<(), RepairError> {
    let merging = row.merging.take();
    let begun = merging.iter().map(|path| beside(path, NEW));
    let begun: Vec<PathBuf> = begun.chain(merging.clone()).collect();
    let garbage = std::mem::take(&mut row.garbage);
    for path in begun.iter().chain(&garbage) {
        if row.config.lowers.iter().all(|lower| lower.file.as_ref() != Some(path)) {
            remove(path)?;
            row.made.retain(|made| made != path);
        }
    }
    Ok(())
}

/// Ends a restack on disk, if it had begun to change anything: `None` if the upper is still the one that was to be sealed.
pub(super) fn finish_restack(row: &mut DeviceRow) -> Result<Option<Made>, RepairError> {
    let (Some(Restacking { layer, uuid }), Some(upper)) = (&row.restacking, &row.config.upper) else {
        return Ok(None);
    };
    let files = files(upper);
    let file = |what, path: &Path| {
        let path = path.to_owned();
        move |source| RepairError::File { what, path, source }
    };
    let state = files.state().map_err(file("look at", &files.data))?;
    match state {
        UpperState::Open => {
            if files.open()?.identity().uuid == *uuid {
                return Ok(None);
            }
            return check_layer(layer, *uuid).map(|(made, _)| Some(made));
        }
        UpperState::Sealed => {
            check_layer(&files.data, *uuid)?;
            fs::rename(&files.data, layer).map_err(file("move the sealed upper to", layer))?;
            for path in [layer, &files.data] {
                let directory = path.parent().unwrap_or(Path::new("/"));
                sync_dir(directory).map_err(file("sync", directory))?;
            }
        }
        UpperState::Missing if layer.exists() => {}
        UpperState::Missing => return Err(RepairError::NothingThere { path: files.data }),
        UpperState::Unknown => return Err(RepairError::Foreign { path: files.data }),
    }
    let (made, sealed) = check_layer(layer, *uuid)?;
    let identity = Identity::fresh(*uuid);
    // Dropped at once: it is opened like any other.
    files.create(&UpperOptions { mode: upper.mode, virtual_size: sealed.virtual_size(), identity })?;
    Ok(Some(made))
}

/// The layer that a restack made, seen to be that one.
fn check_layer(path: &Path, expected: Uuid) -> Result<(Made, Layer), RepairError> {
    let file =
        LocalFile::open(path).map_err(|source| RepairError::File { what: "open", path: path.to_owned(), source })?;
    let size = Bytes(file.size());
    let layer = Layer::open(Arc::new(file))?;
    let found = layer.identity().uuid;
    if found != expected {
        return Err(RepairError::OtherLayer { path: path.to_owned(), found, expected });
    }
    Ok((Made { size, uuid: found }, layer))
}

fn bring_back(
    context: &Context,
    name: &str,
    row: DeviceRow,
    lock: Option<Lock>,
    body: Body,
    attendants: Attendants,
) -> Device {
    let served = Served::new(name, is_read_only(&row.spec), body);
    let mut device = Device {
        name: name.to_owned(),
        row,
        served,
        export: None,
        lock,
        problem: None,
        merging: Arc::default(),
        attendants,
    };
    device.export_again(context);
    if device.problem.is_none() {
        info!(device = name, "device is back");
    }
    device
}

/// A device that cannot be opened, and is seen all the same.
fn export_broken(context: &Context, name: &str, row: DeviceRow, problem: String) -> Device {
    if row.stage == Stage::Ready {
        error!(device = name, problem, "device cannot be brought back; it answers with errors");
    }
    let served = Served::new(name, is_read_only(&row.spec), broken(&row));
    let mut device = Device {
        name: name.to_owned(),
        row,
        served,
        export: None,
        lock: None,
        problem: None,
        merging: Arc::default(),
        attendants: Attendants::default(),
    };
    device.export_again(context);
    device.problem = Some(problem);
    device
}

impl Device {
    /// Makes it seen where it was. What was never exported, or is of no length, is not.
    fn export_again(&mut self, context: &Context) {
        let Some(record) = self.row.export.clone() else { return };
        let options = export_options(&self.row.spec);
        let result = if record.kind == context.exporter.kind() {
            context.exporter.recover(&self.name, &record, self.served.clone(), &options)
        } else {
            // The daemon was told to export another way: who had it open before sees nothing of this one.
            warn!(device = self.name, was = ?record.kind, is = ?context.exporter.kind(), "device moves to another exporter");
            context.exporter.attach(&self.name, self.served.clone(), &options)
        };
        match result {
            Ok(export) => {
                let record = Some(export.record());
                if record != self.row.export {
                    self.row.export = record;
                    if let Err(error) = context.rows.put(&self.name, &self.row) {
                        warn!(device = self.name, error = chain(&error), "its new place is not recorded");
                    }
                }
                self.export = Some(export);
            }
            Err(failed) => {
                error!(device = self.name, error = chain(&failed), "device cannot be made visible again");
                self.problem = Some(chain(&failed));
            }
        }
    }

    /// Tries once more to open a device that does not work. Tells what still does not.
    pub(crate) fn try_again(&mut self, context: &Context) -> Result<(), RepairError> {
        if matches!(self.served.body(), Body::Broken(_)) || self.row.restacking.is_some() {
            if self.lock.is_none() {
                self.lock = lock_upper(&self.name, &self.row)?;
            }
            let (body, attendants) = prepare(context, &self.name, &mut self.row)?;
            self.served.replace(body);
            (self.attendants, self.problem) = (attendants, None);
            info!(device = self.name, "device is back");
            if let Some(Err(error)) = self.export.as_ref().map(|export| export.resized()) {
                warn!(device = self.name, %error, "the kernel was not told of its size");
            }
        }
        if self.export.is_none() {
            self.problem = None;
            self.export_again(context);
        }
        match &self.problem {
            Some(problem) => Err(RepairError::Still { problem: problem.clone() }),
            None => Ok(()),
        }
    }
}
