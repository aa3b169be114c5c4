//! How long it takes until a deep stack can be read.

use std::sync::Arc;

use aenv_block_device::BlockDevice as _;
use aenv_block_overlaybd::{Source, Stack};
use anyhow::Result;

use crate::content::{PAGE, Random, forget, layer};
use crate::measure::{Bench, Plan, timed};

const LAYERS: u64 = 40;
const EXTENTS: u64 = 2500;

/// Layers opened at a time: they wait for the disk.
const AT_A_TIME: usize = 8;

/// Forty layers of a 10 GB image with 100,000 extents together, whose pages the host's cache does not have.
pub(crate) fn forty_layers(bench: &mut Bench) -> Result<()> {
    if !bench.wants(&["open_40"]) {
        return Ok(());
    }
    let mut random = Random::new(40);
    let size = 10 << 30;
    let name = |number: u64| format!("forty.{number}");
    let sources = (0..LAYERS)
        .map(|number| {
            layer(bench.dir(), &name(number), size, |device| {
                // Little data, for the index is what counts, and never two extents that are one.
                let page = [number as u8; 512];
                (0..EXTENTS).try_for_each(|_| Ok(device.write_at(random.page_of(size / 2) * 2, &page)?))
            })
        })
        .collect::<Result<Vec<Arc<dyn Source>>>>()?;
    let per_100k = (LAYERS * EXTENTS) as f64 / 1e5;
    let plan = Plan { name: "open_40", unit: "ms/100k", rounds: 15, work: per_100k, factor: 1e3 };
    debug_assert!(size.is_multiple_of(PAGE as u64));
    let paths: Vec<_> = (0..LAYERS).map(|number| bench.path(&name(number))).collect();
    bench.alone(plan, |_| {
        paths.iter().try_for_each(|path| forget(path))?;
        timed(|| Ok(Stack::open_parallel(&sources, AT_A_TIME)?))
    })
}
