//! Layers and an upper, put together.

use std::sync::Arc;

use aenv_block_client::{ErrorKind, NewUpper};
use aenv_block_device::BlockDevice as _;
use aenv_block_overlaybd::{
    CreateUpperError, Identity, OpenDeviceError, OpenUpperError, OverlayDevice, ResizeError, Stack, Upper, UpperFiles,
    UpperOptions,
};
use aenv_block_source::Source as _;
use aenv_model::Bytes;
use uuid::Uuid;

use super::{NOTES, beside, files};
use crate::background::{Attendants, TracePlan};
use crate::context::Context;
use crate::error::{Refusal, cause};
use crate::layers::OpenLayersError;
use crate::row::{DeviceRow, Stage};
use crate::served::Body;

/// A device could not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    /// Its layers.
    #[error(transparent)]
    Layers(#[from] OpenLayersError),
    /// Its upper.
    #[error("open the upper")]
    Upper(#[from] OpenUpperError),
    /// A fresh upper.
    #[error("make the upper")]
    Create(#[from] CreateUpperError),
    /// Both together.
    #[error("put the upper on the layers")]
    Device(#[from] OpenDeviceError),
    /// Nothing has a size.
    #[error("no layer has a size")]
    NoSize,
}

impl Refusal for OpenError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Layers(error) => error.kind(),
            Self::Create(CreateUpperError::Size(_) | CreateUpperError::Files { .. })
            | Self::Device(OpenDeviceError::NoSize | OpenDeviceError::Size(ResizeError::Size(_)))
            | Self::NoSize => ErrorKind::Invalid,
            Self::Upper(_) | Self::Create(_) | Self::Device(_) => cause(self).unwrap_or(ErrorKind::Failed),
        }
    }
}

/// Opens what `row` says, with a fresh upper if it is being made and asks for one. Whoever calls holds the upper's lock. The
/// row gets to know size and layout.
pub(super) fn open(context: &Context, name: &str, row: &mut DeviceRow) -> Result<(Body, Attendants), OpenError> {
    let creating = row.stage == Stage::Creating;
    // A start is what traces are about: a device that is brought back starts nothing.
    let traces = if creating { TracePlan::of(name, &row.spec.config) } else { TracePlan::Nothing };
    let opened = context.layers.open(&row.config, traces.recorder())?;
    let new = row.spec.new_upper.as_ref().filter(|_| creating);
    for (lower, blob) in row.config.lowers.iter_mut().zip(&opened.blobs) {
        // Known from now on: a registry need not be there to open what the cache has.
        lower.size = lower.size.or(blob.as_ref().map(|blob| blob.size()));
    }
    let body = match &mut row.config.upper {
        None => Body::Layers(Arc::clone(&opened)),
        Some(config) => {
            let mut upper = match new {
                Some(new) => make_upper(&files(config), &opened.stack, new)?,
                None => files(config).open()?,
            };
            upper.take_notes(&beside(&config.data, NOTES))?;
            config.mode = upper.mode(); // the file knows better than the configuration
            let device = Arc::new(OverlayDevice::new(opened.stack.clone(), upper)?);
            Body::Writable { device, _shared: Arc::clone(&opened) }
        }
    };
    row.size = match &body {
        Body::Writable { device, .. } => device.size(),
        _ => opened.stack.size(),
    };
    if row.size == Bytes(0) {
        return Err(OpenError::NoSize);
    }
    let attendants = Attendants::start(context, name, &row.spec.config, &opened, traces);
    Ok((body, attendants))
}

fn make_upper(files: &UpperFiles, lowers: &Stack, new: &NewUpper) -> Result<Upper, CreateUpperError> {
    let parent = lowers.layers().last().map_or(Uuid::nil(), |top| top.identity().uuid);
    let virtual_size = new.size.unwrap_or(lowers.size());
    files.create(&UpperOptions { mode: new.mode, virtual_size, identity: Identity::fresh(parent) })
}
