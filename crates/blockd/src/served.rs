//! What an exporter sees of a device: counted, and exchangeable while it is seen.

use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use aenv_block_device::BlockDevice;
use aenv_block_overlaybd::OverlayDevice;
use aenv_model::Bytes;

use crate::layers::Opened;
use crate::meter::{Meter, Operation};

/// A device as an exporter has it.
#[derive(Debug)]
pub(crate) struct Served {
    name: String,
    read_only: bool,
    /// Changes when a device is opened again after something went wrong. Requests under way go on with what they began with.
    body: RwLock<Body>,
    meter: Meter,
}

/// What is behind it.
#[derive(Debug, Clone)]
pub(crate) enum Body {
    /// An upper on layers. Those it began with stay open, to be shared with others that begin with them.
    Writable { device: Arc<OverlayDevice>, _shared: Arc<Opened> },
    /// Layers alone.
    Layers(Arc<Opened>),
    /// Nothing: it could not be brought back. Whoever has it open sees errors, rather than waiting for somebody to answer.
    Broken(Broken),
}

impl Served {
    pub(crate) fn new(name: &str, read_only: bool, body: Body) -> Arc<Self> {
        Arc::new(Self { name: name.to_owned(), read_only, body: RwLock::new(body), meter: Meter::default() })
    }

    pub(crate) fn meter(&self) -> &Meter {
        &self.meter
    }

    /// What is behind it now.
    pub(crate) fn body(&self) -> Body {
        self.body.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Goes on with another.
    pub(crate) fn replace(&self, body: Body) {
        *self.body.write().unwrap_or_else(PoisonError::into_inner) = body;
    }

    fn refuse_writes(&self) -> io::Result<()> {
        if self.read_only {
            return Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "the device is read-only"));
        }
        Ok(())
    }
}

impl Body {
    fn device(&self) -> &dyn BlockDevice {
        match self {
            Self::Writable { device, .. } => &**device,
            Self::Layers(opened) => &opened.stack,
            Self::Broken(broken) => broken,
        }
    }
}

/// A device of that length of which nothing can be had.
#[derive(Debug, Clone)]
pub(crate) struct Broken(pub(crate) Bytes);

impl Broken {
    fn refuse<T>() -> io::Result<T> {
        Err(io::Error::other("the device could not be opened again"))
    }
}

impl BlockDevice for Broken {
    fn size(&self) -> Bytes {
        self.0
    }

    fn read_at(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
        Self::refuse()
    }

    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Self::refuse()
    }

    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Self::refuse()
    }

    fn flush(&self) -> io::Result<()> {
        Self::refuse()
    }
}

impl BlockDevice for Served {
    /// Changes when the device is resized.
    fn size(&self) -> Bytes {
        self.body().device().size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let at = (offset, buf.len() as u64);
        self.meter.count(&self.name, Operation::Read, at, || self.body().device().read_at(offset, buf))
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let write = || {
            self.refuse_writes()?;
            self.body().device().write_at(offset, buf)
        };
        self.meter.count(&self.name, Operation::Write, (offset, buf.len() as u64), write)
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let discard = || {
            self.refuse_writes()?;
            self.body().device().discard(offset, length)
        };
        self.meter.count(&self.name, Operation::Discard, (offset, length), discard)
    }

    fn flush(&self) -> io::Result<()> {
        self.meter.count(&self.name, Operation::Flush, (0, 0), || self.body().device().flush())
    }
}
