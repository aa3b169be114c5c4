//! Making a device.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_block_client::{DeviceConfigError, DeviceSpec, ErrorKind};
use aenv_block_export::AttachError;
use aenv_block_overlaybd::MAX_LAYERS;
use aenv_durable::{StoreError, remove_file_if_present, sync_dir};
use tracing::warn;

use super::open::{OpenError, open};
use super::{Device, NEW, NOTES, beside, export_options, holder, is_read_only};
use crate::background::Attendants;
use crate::context::Context;
use crate::error::{Refusal, cause, chain};
use crate::lock::{Lock, LockError};
use crate::row::{DeviceRow, Stage};
use crate::served::{Body, Served};

/// Longest name: a file's, with room for what exporters add.
const MAX_NAME: usize = 200;

/// A device could not be made. Nothing is left of it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CreateError {
    /// It cannot be called that.
    #[error("a device cannot be called {0:?}: 1 to {MAX_NAME} of A-Z a-z 0-9 . _ -, and no dot at the beginning")]
    Name(String),
    /// Another of that name is there.
    #[error("there is another device {0}, of other layers or another upper")]
    Taken(String),
    /// It makes no sense.
    #[error("{field}: {problem}")]
    Spec { field: String, problem: String },
    /// It makes no sense.
    #[error(transparent)]
    Config(#[from] DeviceConfigError),
    /// Its upper is in use.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// An upper is to be made where there is something.
    #[error("make a new upper: {path} is there already", path = path.display())]
    UpperExists { path: PathBuf },
    /// A path cannot be looked at.
    #[error("look for {path}", path = path.display())]
    Look { path: PathBuf, source: io::Error },
    /// Layers or upper cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The kernel cannot be given it.
    #[error(transparent)]
    Export(#[from] AttachError),
    /// It cannot be written down.
    #[error("record device {name}")]
    Record { name: String, source: StoreError },
}

impl Refusal for CreateError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Name(_) | Self::Spec { .. } | Self::Config(_) => ErrorKind::Invalid,
            Self::Taken(_) | Self::Lock(LockError::Held { .. }) | Self::UpperExists { .. } => ErrorKind::Conflict,
            Self::Lock(LockError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => ErrorKind::Invalid,
            Self::Open(error) => error.kind(),
            Self::Lock(_) | Self::Look { .. } | Self::Export(_) | Self::Record { .. } => {
                cause(self).unwrap_or(ErrorKind::Failed)
            }
        }
    }
}

/// Makes the device `name`, of which there is none.
pub(crate) fn create(context: &Context, name: &str, spec: &DeviceSpec) -> Result<Device, CreateError> {
    let result = check(name, spec).and_then(|()| create_checked(context, name, spec));
    if let Some(file) = &spec.config.result_file {
        let words = match &result {
            Ok(_) => "success".to_owned(),
            Err(error) => format!("failed:{}", chain(error)),
        };
        if let Err(error) = std::fs::write(file, words) {
            warn!(device = name, file = %file.display(), %error, "result file cannot be written");
        }
    }
    result
}

fn create_checked(context: &Context, name: &str, spec: &DeviceSpec) -> Result<Device, CreateError> {
    let mut row = DeviceRow::intent(spec);
    let upper = spec.config.upper.as_ref();
    let lock = upper.map(|upper| Lock::upper(&upper.data, &holder(name))).transpose()?;
    if let Some(upper) = upper {
        for path in [Some(&upper.data), upper.index.as_ref()].into_iter().flatten() {
            match path.symlink_metadata() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(CreateError::Look { path: path.clone(), source }),
                Ok(_) if spec.new_upper.is_some() => return Err(CreateError::UpperExists { path: path.clone() }),
                // A restack would rename the link and leave the file.
                Ok(found) if found.is_symlink() => return Err(invalid("config.upper", "must not be a symbolic link")),
                Ok(_) => {}
            }
        }
    }
    let record = |source| CreateError::Record { name: name.to_owned(), source };
    context.rows.put(name, &row).map_err(record)?;
    context.steps.at("create: intent written");
    match build(context, name, &mut row) {
        Ok((served, export, attendants)) => Ok(Device {
            name: name.to_owned(),
            row,
            served,
            export: Some(export),
            lock,
            problem: None,
            merging: Arc::default(),
            attendants,
        }),
        Err(error) => {
            // What cannot be undone now is tried again at the next start, as the row stays.
            if let Err(left) = undo(context, name, spec) {
                warn!(device = name, error = chain(&left), "a failed creation is not undone yet");
            }
            drop(lock);
            Err(error)
        }
    }
}

type Built = (Arc<Served>, Box<dyn aenv_block_export::Export>, Attendants);

fn build(context: &Context, name: &str, row: &mut DeviceRow) -> Result<Built, CreateError> {
    let (body, attendants) = open(context, name, row)?;
    context.steps.at("create: opened");
    let served = Served::new(name, is_read_only(&row.spec), body);
    let export = context.exporter.attach(name, served.clone(), &export_options(&row.spec))?;
    context.steps.at("create: exported");
    row.export = Some(export.record());
    row.stage = Stage::Ready;
    if let Err(source) = context.rows.put(name, row) {
        if let Err(error) = export.close() {
            warn!(device = name, %error, "a device that is not recorded cannot be taken away");
        }
        return Err(CreateError::Record { name: name.to_owned(), source });
    }
    context.steps.at("create: recorded");
    Ok((served, export, attendants))
}

/// A creation could not be undone.
#[derive(Debug, thiserror::Error)]
pub(super) enum UndoError {
    #[error("remove {path}", path = path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("remove the record")]
    Record(#[source] StoreError),
}

/// Removes what the creation of `spec` made. Nothing was at the place of a new upper before, and it is locked.
pub(super) fn undo(context: &Context, name: &str, spec: &DeviceSpec) -> Result<(), UndoError> {
    if let (Some(upper), Some(_)) = (&spec.config.upper, &spec.new_upper) {
        remove_upper(&upper.data, upper.index.as_deref()).map_err(|(path, source)| UndoError::File { path, source })?;
    }
    context.rows.remove(name).map_err(UndoError::Record)
}

/// Removes the files of an upper, and those that were to become them.
pub(super) fn remove_upper(data: &Path, index: Option<&Path>) -> Result<(), (PathBuf, io::Error)> {
    let notes = beside(data, NOTES);
    for path in [Some(data), index, Some(&notes)].into_iter().flatten() {
        for path in [path, &beside(path, NEW)] {
            remove_file_if_present(path).map_err(|source| (path.to_owned(), source))?;
        }
    }
    for directory in [data.parent(), index.and_then(Path::parent)].into_iter().flatten() {
        match sync_dir(directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err((directory.to_owned(), error)),
            _ => {}
        }
    }
    Ok(())
}

fn check(name: &str, spec: &DeviceSpec) -> Result<(), CreateError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if name.is_empty() || name.len() > MAX_NAME || name.starts_with('.') || !name.bytes().all(plain) {
        return Err(CreateError::Name(name.to_owned()));
    }
    let config = &spec.config;
    config.check()?;
    if config.layers().is_empty() && config.upper.is_none() {
        return Err(invalid("config.lowers", "an acceleration layer alone makes no device"));
    }
    if config.layers().len() > MAX_LAYERS {
        return Err(invalid("config.lowers", format!("more than {MAX_LAYERS} layers")));
    }
    let mut paths: Vec<(String, &Path)> = Vec::new();
    for (number, lower) in config.lowers.iter().enumerate() {
        paths.extend(lower.file.iter().map(|path| (format!("config.lowers[{number}].file"), &**path)));
        paths.extend(lower.dir.iter().map(|path| (format!("config.lowers[{number}].dir"), &**path)));
    }
    if let Some(upper) = &config.upper {
        paths.push(("config.upper.data".to_owned(), &upper.data));
        paths.extend(upper.index.iter().map(|path| ("config.upper.index".to_owned(), &**path)));
        if upper.index.as_ref() == Some(&upper.data) {
            return Err(invalid("config.upper.index", "is the data file"));
        }
    }
    paths.extend(config.result_file.iter().map(|path| ("config.resultFile".to_owned(), &**path)));
    paths.extend(config.record_trace_path.iter().map(|path| ("config.recordTracePath".to_owned(), &**path)));
    if let Some((field, path)) = paths.into_iter().find(|(_, path)| path.is_relative()) {
        return Err(invalid(field, format!("{} is not an absolute path", path.display())));
    }
    match (&spec.new_upper, &config.upper) {
        (Some(_), None) => Err(invalid("new_upper", "config.upper must say where")),
        (Some(new), Some(upper)) if new.mode != upper.mode => {
            Err(invalid("new_upper.mode", format!("is {:?}, config.upper.mode {:?}", new.mode, upper.mode)))
        }
        (Some(new), _) if new.size.is_some_and(|size| size.get() == 0 || !size.get().is_multiple_of(512)) => {
            Err(invalid("new_upper.size", "must be a multiple of 512"))
        }
        _ => Ok(()),
    }
}

fn invalid(field: impl Into<String>, problem: impl Into<String>) -> CreateError {
    CreateError::Spec { field: field.into(), problem: problem.into() }
}

/// A body that is exported in place of one that could not be opened.
pub(super) fn broken(row: &DeviceRow) -> Body {
    Body::Broken(crate::served::Broken(row.size))
}
