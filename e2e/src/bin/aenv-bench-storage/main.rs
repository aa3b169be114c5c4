//! Measures layers, stacks, uppers and exports in this process, each against what the host can do in the same run, and the
//! first command in an image that is loaded as it is used.
//! `cargo xtask bench storage` builds it, runs it and judges its rows.
//!
//! Ours and the peer's work are done in turn, in short rounds, so that both see the same weather. Figures are medians of
//! rounds; a ratio is the median of the rounds' ratios.

#![forbid(unsafe_code)]

mod compress;
mod content;
mod fuse;
#[path = "../aenv-bench/host.rs"]
mod host;
mod lazy;
mod measure;
mod opens;
mod reads;
mod seals;
mod writes;

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Parser;

use measure::Bench;

#[derive(Debug, Parser)]
#[command(about = "Measure layered storage; rows go to standard output as one JSON object")]
struct Args {
    /// Only these rows; all if there are none.
    rows: Vec<String>,
    /// Where files are made, in a directory of their own.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Divides sizes, for a quick look.
    #[arg(long, default_value_t = 1)]
    scale: u64,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let parent = args.dir.unwrap_or_else(std::env::temp_dir);
    let directory =
        tempfile::tempdir_in(&parent).with_context(|| format!("make a directory in {}", parent.display()))?;
    let mut bench = Bench::new(args.rows, directory.path(), args.scale.max(1));
    reads::one_layer(&mut bench)?;
    reads::eight_layers(&mut bench)?;
    opens::forty_layers(&mut bench)?;
    writes::random(&mut bench)?;
    writes::sequential(&mut bench)?;
    seals::small_and_large(&mut bench)?;
    compress::both(&mut bench)?;
    fuse::sequential(&mut bench)?;
    lazy::first_command(&mut bench)?;
    bench.print()
}
