//! Compressing layers against the same crates on the same buffers, with nothing around them.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use aenv_block_overlaybd::{Algorithm, BlockSize, ZFileOptions, ZFileWriter};
use anyhow::{Context as _, Result, anyhow};
use bytes::Bytes;

use crate::content::{MIB, block};
use crate::measure::{Bench, Plan, timed};

/// Blocks a thread of the peer takes at once.
const AT_ONCE: usize = 64;

pub(crate) fn both(bench: &mut Bench) -> Result<()> {
    let size = 64 * MIB as u64 / bench.scale;
    for (name, algorithm) in [("zstd", Algorithm::Zstd), ("lz4", Algorithm::Lz4)] {
        if !bench.wants(&[name]) {
            continue;
        }
        let input = Bytes::from((0..size).step_by(MIB).flat_map(block).collect::<Vec<_>>());
        let options = ZFileOptions { algorithm, ..ZFileOptions::default() };
        let ours = |_| {
            timed(|| {
                let mut writer = ZFileWriter::new(io::sink(), options)?;
                writer.write_shared(input.clone())?;
                writer.finish()?;
                Ok(())
            })
        };
        let peer = |_| timed(|| on_all_cores(algorithm, &input, BlockSize::DEFAULT.get()));
        let plan = Plan { name, unit: "us/MiB", rounds: 25, work: size as f64 / MIB as f64, factor: 1e6 };
        bench.compare(plan, ours, peer)?;
    }
    Ok(())
}

fn on_all_cores(algorithm: Algorithm, input: &[u8], block_size: usize) -> Result<()> {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        let mut zstd = zstd::bulk::Compressor::new(3).context("zstd")?;
        let mut out = vec![0; 2 * block_size + 1024];
        loop {
            let at = next.fetch_add(AT_ONCE * block_size, Ordering::Relaxed);
            let part = &input[at.min(input.len())..(at + AT_ONCE * block_size).min(input.len())];
            if part.is_empty() {
                return Ok(());
            }
            for block in part.chunks(block_size) {
                match algorithm {
                    Algorithm::Lz4 => lz4_flex::block::compress_into(block, &mut out)?,
                    Algorithm::Zstd => zstd.compress_to_buffer(block, &mut out)?,
                };
            }
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?)
    })
}
