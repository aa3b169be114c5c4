//! The upper becomes a layer, and a fresh one takes its place.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aenv_block_client::{ErrorKind, Lower, RestackedView};
use aenv_block_overlaybd::{RestackError, SealError, UpperFiles, UpperState};
use aenv_durable::StoreError;
use aenv_model::Bytes;
use tracing::{error, warn};
use uuid::Uuid;

use super::recover::{RepairError, finish_restack};
use super::{ChangeError, Device, PROBE, beside, files};
use crate::context::Context;
use crate::error::{Refusal, cause, chain};
use crate::row::Restacking;

/// A device could not be restacked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RestackDeviceError {
    /// It cannot be changed at all.
    #[error(transparent)]
    Device(#[from] ChangeError),
    /// The layer cannot go there.
    #[error("a layer cannot be put at {path}: {problem}", path = path.display())]
    Path { path: PathBuf, problem: String },
    /// Something is there.
    #[error("a layer cannot be put at {path}: there is something already", path = path.display())]
    Exists { path: PathBuf },
    /// It is not in the upper's filesystem, or cannot be written.
    #[error("a file beside the upper cannot be moved to {path}", path = path.display())]
    Move { path: PathBuf, source: io::Error },
    /// It failed, and nothing was changed, or the device refuses writes from now on.
    #[error("restack device {name}")]
    Restack { name: String, source: Box<RestackError> },
    /// It failed half-way, and could not be brought to its end.
    #[error("end the restack of device {name}")]
    Repair { name: String, source: Box<RepairError> },
    /// It cannot be written down.
    #[error("record the restack of device {name}")]
    Record { name: String, source: StoreError },
}

impl Refusal for RestackDeviceError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Device(error) => error.kind(),
            Self::Exists { .. } => ErrorKind::Conflict,
            Self::Path { .. } => ErrorKind::Invalid,
            Self::Restack { source, .. } if matches!(**source, RestackError::TooDeep) => ErrorKind::Invalid,
            Self::Move { .. } => cause(self).unwrap_or(ErrorKind::Invalid),
            Self::Restack { .. } | Self::Repair { .. } | Self::Record { .. } => {
                cause(self).unwrap_or(ErrorKind::Failed)
            }
        }
    }
}

/// A new layer.
pub(super) struct Made {
    pub(super) size: Bytes,
    pub(super) uuid: Uuid,
}

impl Device {
    /// Makes the upper the layer at `layer`.
    pub(crate) fn restack(&mut self, context: &Context, layer: &Path) -> Result<RestackedView, RestackDeviceError> {
        let device = self.writable()?;
        let Some(files) = self.row.config.upper.as_ref().map(files) else {
            return Err(ChangeError::ReadOnly(self.name.clone()).into());
        };
        check_place(layer)?;
        let uuid = device.upper().identity().uuid;
        self.row.restacking = Some(Restacking { layer: layer.to_owned(), uuid });
        if let Err(source) = context.rows.put(&self.name, &self.row) {
            self.row.restacking = None;
            return Err(RestackDeviceError::Record { name: self.name.clone(), source });
        }
        if let Err(error) = probe(&files, layer) {
            self.forget_restack(context);
            return Err(error);
        }
        context.steps.at("restack: intent written");
        let start = Instant::now();
        let (made, pause) = match device.restack(&files, layer) {
            Ok(restacked) => {
                let uuid = restacked.layer.identity().uuid;
                (Made { size: restacked.size, uuid }, restacked.pause)
            }
            Err(source) => (self.after_failure(context, &files, source)?, start.elapsed()),
        };
        context.steps.at("restack: done");
        self.row.add_lower(layer, &made);
        let recorded = context.rows.put(&self.name, &self.row);
        context.steps.at("restack: recorded");
        // If it is not recorded, the intent is, and the next start comes to the same end.
        recorded.map_err(|source| RestackDeviceError::Record { name: self.name.clone(), source })?;
        Ok(view(layer, &made, pause))
    }

    /// Nothing has happened.
    fn forget_restack(&mut self, context: &Context) {
        self.row.restacking = None;
        if let Err(error) = context.rows.put(&self.name, &self.row) {
            warn!(device = self.name, error = chain(&error), "the intent of a failed restack stays recorded");
        }
    }

    /// After a failure: either nothing was changed, or the upper is sealed and the rest can be done by opening the device
    /// again, or nobody knows and it stays as it is, refusing writes.
    fn after_failure(
        &mut self,
        context: &Context,
        files: &UpperFiles,
        failure: RestackError,
    ) -> Result<Made, RestackDeviceError> {
        let sealed = match files.state() {
            Ok(UpperState::Sealed | UpperState::Missing) => true,
            // The old one, untouched or half sealed; or, if only the very last sync failed, the new one.
            Ok(UpperState::Open) => {
                let layer = self.row.restacking.as_ref().is_some_and(|intent| intent.layer.exists());
                layer && !matches!(failure, RestackError::TooDeep | RestackError::Flush(_))
            }
            Ok(UpperState::Unknown) | Err(_) => false,
        };
        if !sealed {
            if let RestackError::Seal(SealError::Io { .. }) = failure
                && !self.takes_writes()
            {
                self.problem = Some(format!("its upper is half sealed and takes no writes: {}", chain(&failure)));
            }
            self.forget_restack(context);
            return Err(RestackDeviceError::Restack { name: self.name.clone(), source: Box::new(failure) });
        }
        warn!(device = self.name, error = chain(&failure), "restack failed half-way, going on from its files");
        let repair =
            |source: RepairError| RestackDeviceError::Repair { name: self.name.clone(), source: Box::new(source) };
        let mut row = self.row.clone();
        let result = finish_restack(&mut row).and_then(|made| {
            let made = made.ok_or(RepairError::NothingThere { path: files.data.clone() })?;
            let body = super::recover::reopen(context, &self.name, &row)?;
            Ok((made, body))
        });
        match result {
            Ok((made, (body, attendants))) => {
                self.served.replace(body);
                (self.attendants, self.problem) = (attendants, None);
                Ok(made)
            }
            Err(source) => {
                let failed = repair(source);
                error!(device = self.name, error = chain(&failed), "device takes no writes");
                self.problem = Some(chain(&failed));
                Err(failed)
            }
        }
    }
}

impl crate::row::DeviceRow {
    /// The restack has ended: its layer is the topmost lower.
    pub(super) fn add_lower(&mut self, layer: &Path, made: &Made) {
        let (file, size, uuid) = (Some(layer.to_owned()), Some(made.size.get()), Some(made.uuid));
        self.config.lowers.push(Lower { file, size, uuid, ..Lower::default() });
        self.made.push(layer.to_owned());
        self.restacking = None;
    }
}

fn view(layer: &Path, made: &Made, pause: Duration) -> RestackedView {
    RestackedView { file: layer.to_owned(), size: made.size, uuid: made.uuid, pause_micros: pause.as_micros() as u64 }
}

/// Whether a layer may be put at `layer`.
fn check_place(layer: &Path) -> Result<(), RestackDeviceError> {
    let path = || layer.to_owned();
    if layer.is_relative() || layer.file_name().is_none() {
        return Err(RestackDeviceError::Path { path: path(), problem: "not the absolute path of a file".to_owned() });
    }
    match layer.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(RestackDeviceError::Move { path: path(), source }),
        Ok(_) => Err(RestackDeviceError::Exists { path: path() }),
    }
}

/// Whether the upper's data file can become `layer`: tried with another file, as there is no way back once it is sealed.
fn probe(files: &UpperFiles, layer: &Path) -> Result<(), RestackDeviceError> {
    let (from, to) = (beside(&files.data, PROBE), beside(layer, PROBE));
    let moved = OpenOptions::new().write(true).create(true).truncate(true).open(&from).and_then(|file| {
        drop(file);
        fs::rename(&from, &to)
    });
    let _ = fs::remove_file(if moved.is_ok() { &to } else { &from }); // empty, and found by the next start
    moved.map_err(|source| RestackDeviceError::Move { path: layer.to_owned(), source })
}
