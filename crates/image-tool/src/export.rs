//! `export`: the virtual device as a file that tools can mount or compare.

use std::process::ExitCode;

use aenv_block_overlaybd::{LocalFile, Mapped as _, export};
use anyhow::Result;

use crate::args::Layers;
use crate::input::Opened;
use crate::progress::Progress;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) layers: Layers,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let device = Opened::open(&args.layers)?.stack()?;
    let output = args.layers.lesser_output()?;
    let file = LocalFile::from_file(output.file().try_clone()?, output.path().display().to_string());
    let total = device.data_ranges().iter().map(|range| range.end - range.start).sum();
    let progress = Progress::new("exporting", total);
    export(&device, &file, &mut progress.follow())?;
    drop(progress);
    output.publish()?;
    Ok(ExitCode::SUCCESS)
}
