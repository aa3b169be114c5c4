//! `commit`: what an upper holds, as a layer of its own.

use std::process::ExitCode;

use aenv_block_device::BlockDevice as _;
use aenv_block_overlaybd::{Coverage, Identity, Stack};
use anyhow::{Result, bail};
use uuid::Uuid;

use crate::args::Layers;
use crate::input::Opened;
use crate::packing::Packing;
use crate::progress::Progress;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) layers: Layers,
    #[command(flatten)]
    packing: Packing,
}

/// Without other wishes, the layer has a fresh UUID, the topmost lower for a parent, or else the upper's, and the upper's tag.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let opened = Opened::open(&args.layers)?;
    let Some(upper) = &opened.upper else { bail!("there is no upper to commit: give --upper DATA [INDEX]") };
    let own = upper.identity();
    let below = opened.lowers.last().map_or(own.parent, |top| top.identity().uuid);
    let identity = Identity {
        uuid: args.packing.uuid.unwrap_or_else(Uuid::new_v4),
        parent: args.packing.parent_uuid.unwrap_or(below),
        user_tag: args.packing.tag.clone().unwrap_or(own.user_tag),
    };
    let stack = Stack::new(vec![upper.to_layer()])?;
    let output = args.layers.lesser_output()?;
    let progress = Progress::new("committing", Coverage::of(stack.index().entries().iter().copied()).data.get());
    args.packing.write(output, &identity, stack.size(), |out| stack.flatten(out, &identity, &mut progress.follow()))?;
    Ok(ExitCode::SUCCESS)
}
