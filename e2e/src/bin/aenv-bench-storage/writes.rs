//! Writes to uppers against writes to a plain file.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use aenv_block_device::BlockDevice as _;
use aenv_block_overlaybd::Mode;
use anyhow::Result;

use crate::content::{MIB, PAGE, Random, files, fresh, noise, remove};
use crate::measure::{Bench, Plan, timed};

/// Mebibytes in one round, each flushed.
const FLUSHES: usize = 4;

/// Pages at random, to the layout that disks of sandboxes have.
pub(crate) fn random(bench: &mut Bench) -> Result<()> {
    if !bench.wants(&["rand_write"]) {
        return Ok(());
    }
    let size = 1024 * MIB as u64 / bench.scale;
    let device = fresh(bench.dir(), Mode::Hybrid, "random", size)?;
    let path = bench.path("random.peer");
    let file = File::create(&path)?;
    file.set_len(size)?;
    let page = noise(1, PAGE);
    let run = |round: usize, write: &dyn Fn(u64) -> std::io::Result<()>, flush: &dyn Fn() -> std::io::Result<()>| {
        let mut random = Random::new(round as u64);
        timed(|| {
            for _ in 0..FLUSHES {
                (0..MIB / PAGE).try_for_each(|_| write(random.page_of(size)))?;
                flush()?;
            }
            Ok(())
        })
    };
    let plan = Plan { name: "rand_write", unit: "us", rounds: 31, work: (FLUSHES * MIB / PAGE) as f64, factor: 1e6 };
    bench.compare(
        plan,
        |round| run(round, &|at| device.write_at(at, &page), &|| device.flush()),
        |round| run(round, &|at| file.write_all_at(&page, at), &|| file.sync_data()),
    )?;
    drop(device);
    std::fs::remove_file(path)?;
    remove(&files(bench.dir(), "random"))
}

/// Mebibytes one after the other to a log upper, into the page cache on both sides.
pub(crate) fn sequential(bench: &mut Bench) -> Result<()> {
    if !bench.wants(&["seq_write"]) {
        return Ok(());
    }
    let size = 64 * MIB as u64 / bench.scale;
    let buf = noise(1, MIB);
    let (dir, path) = (bench.dir().to_owned(), bench.path("sequential.peer"));
    let ours = |_| {
        let device = fresh(&dir, Mode::Log, "sequential", size)?;
        let time = timed(|| (0..size).step_by(MIB).try_for_each(|at| Ok(device.write_at(at, &buf)?)))?;
        drop(device);
        remove(&files(&dir, "sequential"))?;
        Ok(time)
    };
    let peer = |_| {
        let file = File::create(&path)?;
        let time = timed(|| (0..size).step_by(MIB).try_for_each(|at| Ok(file.write_all_at(&buf, at)?)))?;
        std::fs::remove_file(&path)?;
        Ok(time)
    };
    let plan = Plan { name: "seq_write", unit: "us/MiB", rounds: 31, work: size as f64 / MIB as f64, factor: 1e6 };
    bench.compare(plan, ours, peer)
}
