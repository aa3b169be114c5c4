//! A layer exported by FUSE against its own file, both read for the first time.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use aenv_block_export::{Caching, ExportOptions, Exporter as _, FuseExporter, FuseOptions};
use aenv_block_overlaybd::Stack;
use anyhow::{Context as _, Result};

use crate::content::{MIB, forget, full_layer};
use crate::measure::{Bench, Plan, timed};

pub(crate) fn sequential(bench: &mut Bench) -> Result<()> {
    if !bench.wants(&["fuse_seq_read"]) {
        return Ok(());
    }
    let size = 256 * MIB as u64 / bench.scale;
    let stack = Stack::open([full_layer(bench.dir(), "exported", size)?])?;
    let backing = bench.path("exported");
    let mount = bench.path("mount");
    std::fs::create_dir(&mount)?;
    let exporter = FuseExporter::mount(&mount, FuseOptions::default()).context("mount FUSE")?;
    let options = ExportOptions { read_only: true, caching: Caching::Direct };
    let export = exporter.attach("device", Arc::new(stack), &options)?;

    let part = (size / 8).max(MIB as u64);
    let read = |path: &Path, round: usize| {
        forget(&backing)?;
        let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
        let mut buf = vec![0; MIB];
        let start = round as u64 % (size / part) * part;
        timed(|| (start..start + part).step_by(MIB).try_for_each(|at| Ok(file.read_exact_at(&mut buf, at)?)))
    };
    let plan = Plan { name: "fuse_seq_read", unit: "us/MiB", rounds: 31, work: part as f64 / MIB as f64, factor: 1e6 };
    let measured = bench.compare(plan, |round| read(export.path(), round), |round| read(&backing, round));
    export.close()?;
    exporter.close()?;
    measured
}
