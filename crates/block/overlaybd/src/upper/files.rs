//! The files of an upper in the filesystem.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::create::{CreateUpperError, UpperOptions};
use super::open::{OpenUpperError, trailer_position};
use super::{Mode, Upper};
use crate::header::{BLOCK, Flags, Header};
use crate::source::{LocalFile, Source, Storage};

/// Where an upper is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpperFiles {
    /// The data file.
    pub data: PathBuf,
    /// The index file; none for sparse.
    pub index: Option<PathBuf>,
}

/// What is found at the place of an upper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpperState {
    /// No data file: never made, or moved away by a restack that did not get to make its successor.
    Missing,
    /// An upper that can be opened.
    Open,
    /// A sealed layer: a restack did not get to move it away.
    Sealed,
    /// Something else.
    Unknown,
}

impl UpperFiles {
    /// Makes a fresh upper here. What was here is lost: move it away first. When a new data file appears, everything is
    /// complete.
    pub fn create(&self, options: &UpperOptions) -> Result<Upper, CreateUpperError> {
        let upper = self.prepare(options)?;
        self.publish()?;
        Ok(upper)
    }

    /// Makes a fresh upper under temporary names.
    pub(crate) fn prepare(&self, options: &UpperOptions) -> Result<Upper, CreateUpperError> {
        let make = |path: &Path| -> Result<Arc<dyn Storage>, CreateUpperError> {
            let new = temporary(path);
            let _ = fs::remove_file(&new); // left by a crash; truncating it would take longer
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(&new);
            let file = file.map_err(write_error("create", &new))?;
            Ok(Arc::new(LocalFile::from_file(file, path.display().to_string())))
        };
        Upper::create(make(&self.data)?, self.index.as_deref().map(make).transpose()?, options)
    }

    /// Gives a prepared upper its names, the data file last.
    pub(crate) fn publish(&self) -> Result<(), CreateUpperError> {
        for path in self.index.iter().chain([&self.data]) {
            fs::rename(temporary(path), path).map_err(write_error("rename the new file to", path))?;
        }
        if let Some(index) = self.index.as_ref().filter(|index| index.parent() != self.data.parent()) {
            sync_directory(index).map_err(write_error("sync the directory of", index))?;
        }
        sync_directory(&self.data).map_err(write_error("sync the directory of", &self.data))
    }

    /// Removes what was prepared and not published.
    pub(crate) fn discard_prepared(&self) {
        for path in self.index.iter().chain([&self.data]) {
            let _ = fs::remove_file(temporary(path)); // most likely not there; overwritten next time otherwise
        }
    }

    /// Opens the upper that is here.
    pub fn open(&self) -> Result<Upper, OpenUpperError> {
        let open = |path: &Path| -> Result<Arc<dyn Storage>, OpenUpperError> {
            let file = LocalFile::open_writable(path);
            let error = |source| OpenUpperError::Io { what: "open", file: path.display().to_string(), source };
            Ok(Arc::new(file.map_err(error)?))
        };
        Upper::open(open(&self.data)?, self.index.as_deref().map(open).transpose()?)
    }

    /// Looks what is here, from the data file alone.
    pub fn state(&self) -> io::Result<UpperState> {
        let file = match LocalFile::open_writable(&self.data) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(UpperState::Missing),
            file => file?,
        };
        let length = file.length()?;
        if length < BLOCK {
            return Ok(UpperState::Unknown);
        }
        let mut block = [0; BLOCK as usize];
        file.read_at(0, &mut block)?;
        let Ok(header) = Header::parse(&block, 0) else { return Ok(UpperState::Unknown) };
        if !header.flags.has(Flags::HEADER.with(Flags::DATA)) || header.flags.has(Flags::SEALED) {
            return Ok(UpperState::Unknown);
        }
        let sealed = trailer_position(&file, length, &header)?.is_some();
        Ok(if sealed { UpperState::Sealed } else { UpperState::Open })
    }

    /// Paths in `directory` with the usual names.
    #[must_use]
    pub fn in_directory(directory: &Path, mode: Mode) -> Self {
        let index = (mode != Mode::Sparse).then(|| directory.join("upper.index"));
        Self { data: directory.join("upper.data"), index }
    }
}

fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    PathBuf::from(name)
}

fn write_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CreateUpperError + use<> {
    let file = path.display().to_string();
    move |source| CreateUpperError::Write { what, file, source }
}

/// Makes names in the directory of `path` durable.
pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent)?.sync_all()
}
