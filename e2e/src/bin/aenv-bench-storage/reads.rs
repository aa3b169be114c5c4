//! Reads of warm layers against reads of the same bytes in a plain file.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use aenv_block_device::BlockDevice as _;
use aenv_block_overlaybd::{Source, Stack};
use anyhow::Result;

use crate::content::{MIB, PAGE, Random, full_layer, layer, noise};
use crate::measure::{Bench, Plan, timed};

/// Random blocks in each layer of a fragmented stack, but for the bottom one.
const FRAGMENTS: u64 = 8192;

/// Reads in one round of random ones.
const READS: usize = 20_000;

pub(crate) fn one_layer(bench: &mut Bench) -> Result<()> {
    if !bench.wants(&["seq_read", "rand_read_1"]) {
        return Ok(());
    }
    let stack = Stack::open([full_layer(bench.dir(), "one", 256 * MIB as u64 / bench.scale)?])?;
    compare(bench, "seq_read", "rand_read_1", &stack)
}

/// A base and seven deltas, which together cover a good part of it: small enough for that.
pub(crate) fn eight_layers(bench: &mut Bench) -> Result<()> {
    if !bench.wants(&["seq_read_8", "rand_read_8", "open_8"]) {
        return Ok(());
    }
    let size = 256 * MIB as u64 / bench.scale;
    let mut sources: Vec<Arc<dyn Source>> = vec![full_layer(bench.dir(), "eight.0", size)?];
    let mut random = Random::new(7);
    for delta in 1..8 {
        sources.push(layer(bench.dir(), &format!("eight.{delta}"), size, |device| {
            for _ in 0..FRAGMENTS / bench.scale {
                device.write_at(random.page_of(size), &noise(random.next(), PAGE))?;
            }
            Ok(())
        })?);
    }
    let open = || Stack::open(sources.iter().cloned());
    compare(bench, "seq_read_8", "rand_read_8", &open()?)?;
    let plan = Plan { name: "open_8", unit: "ms", rounds: 31, work: 1.0, factor: 1e3 };
    bench.alone(plan, |_| timed(|| Ok(open()?)))
}

fn compare(bench: &mut Bench, sequential: &'static str, random: &'static str, stack: &Stack) -> Result<()> {
    let size = stack.size().get();
    let path = bench.path("flat");
    let flat = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
    let mut buf = vec![0; MIB];
    for at in (0..size).step_by(MIB) {
        stack.read_at(at, &mut buf)?;
        flat.write_all_at(&buf, at)?;
    }
    flat.sync_all()?; // so that its writing back is not measured
    // Rounds of a sixteenth of the device.
    let part = (size / 16).max(MIB as u64);
    let range = |round: usize| {
        let start = round as u64 % (size / part) * part;
        (start..start + part).step_by(MIB)
    };
    let mut theirs = vec![0; MIB];
    let plan = Plan { name: sequential, unit: "us/MiB", rounds: 64, work: part as f64 / MIB as f64, factor: 1e6 };
    bench.compare(
        plan,
        |round| timed(|| range(round).try_for_each(|at| Ok(stack.read_at(at, &mut buf)?))),
        |round| timed(|| range(round).try_for_each(|at| Ok(flat.read_exact_at(&mut theirs, at)?))),
    )?;

    let reads = |round: usize, read: &mut dyn FnMut(u64, &mut [u8]) -> std::io::Result<()>| {
        let mut random = Random::new(round as u64);
        let mut page = vec![0; PAGE];
        timed(|| (0..READS).try_for_each(|_| Ok(read(random.page_of(size), &mut page)?)))
    };
    let plan = Plan { name: random, unit: "us", rounds: 31, work: READS as f64, factor: 1e6 };
    bench.compare(
        plan,
        |round| reads(round, &mut |at, page| stack.read_at(at, page)),
        |round| reads(round, &mut |at, page| flat.read_exact_at(page, at)),
    )?;
    Ok(std::fs::remove_file(path)?)
}
