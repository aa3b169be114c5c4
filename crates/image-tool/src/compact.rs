//! `compact`: many layers into one, or one into a tidier, compressed or wrapped one.

use std::process::ExitCode;

use aenv_block_device::BlockDevice as _;
use aenv_block_overlaybd::{Coverage, Identity};
use anyhow::Result;
use uuid::Uuid;

use crate::args::Layers;
use crate::input::Opened;
use crate::output::Output;
use crate::packing::Packing;
use crate::progress::Progress;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) layers: Layers,
    #[command(flatten)]
    packing: Packing,
}

/// Without other wishes, a single layer stays who it is; several make a layer with a fresh UUID and the parent of the lowest.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let stack = Opened::open(&args.layers)?.stack()?;
    let own = match stack.layers() {
        [only] => only.identity().clone(),
        [bottom, ..] => Identity::fresh(bottom.identity().parent),
        [] => Identity::fresh(Uuid::nil()),
    };
    let identity = Identity {
        uuid: args.packing.uuid.unwrap_or(own.uuid),
        parent: args.packing.parent_uuid.unwrap_or(own.parent),
        user_tag: args.packing.tag.clone().unwrap_or(own.user_tag),
    };
    let output = Output::create(args.layers.out(), args.layers.force)?;
    let progress = Progress::new("compacting", Coverage::of(stack.index().entries().iter().copied()).data.get());
    args.packing.write(output, &identity, stack.size(), |out| stack.flatten(out, &identity, &mut progress.follow()))?;
    Ok(ExitCode::SUCCESS)
}
