//! The end of a device.

use std::io;
use std::path::PathBuf;

use aenv_block_client::{DeviceConfig, ErrorKind, Uppers};
use aenv_block_overlaybd::OpenUpperError;
use aenv_durable::{StoreError, remove_file_if_present};
use tracing::warn;

use super::create::remove_upper;
use super::{ChangeError, Device, NOTES, beside, files, holder};
use crate::context::Context;
use crate::error::{Refusal, cause, chain};
use crate::lock::{Lock, LockError};
use crate::row::Stage;
use crate::served::Body;

/// A device could not be closed, or not without loss.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CloseError {
    /// It is closed, and its upper may lack what was written last.
    #[error("device is closed, but what was written last may be lost")]
    Lost(#[source] ChangeError),
    /// The kernel would not let go.
    #[error("take device {name} away")]
    Export { name: String, source: io::Error },
    /// Its upper is in use by another, and stays.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A file cannot be removed.
    #[error("remove {path}", path = path.display())]
    File { path: PathBuf, source: io::Error },
    /// It cannot be written down.
    #[error("record the end of device {name}")]
    Record { name: String, source: StoreError },
}

impl Refusal for CloseError {
    fn kind(&self) -> ErrorKind {
        cause(self).unwrap_or(ErrorKind::Failed)
    }
}

impl Device {
    /// Takes it away, and gives what it was made of. If that fails, what is left of it is given back, to be tried again; if all is gone and something was
    /// lost, `None`.
    pub(crate) fn close(
        mut self,
        context: &Context,
        uppers: Uppers,
    ) -> Result<DeviceConfig, (Option<Box<Self>>, CloseError)> {
        let config = self.row.config.clone();
        match self.try_close(context, uppers) {
            Ok(None) => Ok(config),
            Ok(Some(lost)) => Err((None, CloseError::Lost(lost))),
            Err(error) => {
                self.problem.get_or_insert_with(|| format!("closing it failed: {}", chain(&error)));
                Err((Some(Box::new(self)), error))
            }
        }
    }

    fn try_close(&mut self, context: &Context, uppers: Uppers) -> Result<Option<ChangeError>, CloseError> {
        let record = |name: &str| {
            let name = name.to_owned();
            move |source| CloseError::Record { name, source }
        };
        self.stop_merging();
        self.row.stage = Stage::Closing(uppers);
        if let Err(error) = context.rows.put(&self.name, &self.row) {
            // On a full disk, this is what makes room. A crash from here on leaves a device that does not come back.
            warn!(device = self.name, error = chain(&error), "closing a device without having it written down");
        }
        context.steps.at("close: intent written");
        self.attendants.end();
        if let Some(export) = self.export.take() {
            export.close().map_err(|source| CloseError::Export { name: self.name.clone(), source })?;
        }
        context.steps.at("close: export taken away");
        // Now nobody writes any more.
        let works = !matches!(self.served.body(), Body::Broken(_));
        let lost = if works && uppers == Uppers::Keep { self.flush().err() } else { None };
        self.served.replace(super::create::broken(&self.row));
        if self.lock.is_none() {
            self.lock = self.lock_again()?;
        }
        match uppers {
            Uppers::Keep if lost.is_none() => self.remove_notes(works)?,
            _ => {}
        }
        self.remove_files(uppers)?;
        context.steps.at("close: files removed");
        context.rows.remove(&self.name).map_err(record(&self.name))?;
        context.steps.at("close: record removed");
        self.lock = None;
        Ok(lost)
    }

    /// The lock of a device that did not work.
    fn lock_again(&self) -> Result<Option<Lock>, CloseError> {
        let Some(upper) = &self.row.config.upper else { return Ok(None) };
        match Lock::upper(&upper.data, &holder(&self.name)) {
            Ok(lock) => Ok(Some(lock)),
            // Its directory is gone, and with it everything there was to lock.
            Err(LockError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Notes are of no use to whoever gets the upper: with what they tell of in its index. `flushed` says that it is.
    fn remove_notes(&self, flushed: bool) -> Result<(), CloseError> {
        let Some(upper) = &self.row.config.upper else { return Ok(()) };
        let notes = beside(&upper.data, NOTES);
        if !flushed && notes.exists() {
            // The close was cut, or the device did not work.
            let flush = || -> Result<(), OpenUpperError> {
                let mut open = files(upper).open()?;
                open.take_notes(&notes)?;
                let failed =
                    |source| OpenUpperError::Io { what: "flush", file: upper.data.display().to_string(), source };
                open.flush().map_err(failed)
            };
            if let Err(error) = flush() {
                // They stay, for whoever opens the upper next.
                warn!(device = self.name, error = chain(&error), "what was written last is not flushed");
                return Ok(());
            }
        }
        remove_file_if_present(&notes).map_err(|source| CloseError::File { path: notes, source })
    }

    fn remove_files(&self, uppers: Uppers) -> Result<(), CloseError> {
        let remove = |path: &PathBuf| {
            remove_file_if_present(path).map_err(|source| CloseError::File { path: path.clone(), source })
        };
        // What a merge has written is nobody's: the layers that it was made of are still those of the device.
        let is_lower = |path: &PathBuf| self.row.config.lowers.iter().any(|lower| lower.file.as_ref() == Some(path));
        for path in self.row.merging.iter().chain(&self.row.garbage).filter(|path| !is_lower(path)) {
            remove(path)?;
        }
        let (Uppers::Remove, Some(upper)) = (uppers, &self.row.config.upper) else { return Ok(()) };
        remove_upper(&upper.data, upper.index.as_deref())
            .map_err(|(path, source)| CloseError::File { path, source })?;
        for path in &self.row.made {
            if self.row.owns(path) {
                remove(path)?;
            }
        }
        if let Some(unfinished) = &self.row.restacking {
            // A restack that was cut: its layer is the device's as much as one that ended.
            if unfinished.layer.parent() == upper.data.parent() {
                remove(&unfinished.layer)?;
            } else if unfinished.layer.exists() {
                warn!(device = self.name, layer = %unfinished.layer.display(), "a layer outside the upper's directory stays");
            }
        }
        Ok(())
    }
}
