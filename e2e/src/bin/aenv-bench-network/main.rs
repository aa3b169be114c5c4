//! Measures network slots and their policies, in a network namespace of its own: the machine's network is not touched.
//! `cargo xtask bench network` builds it, runs it and judges its rows.

#![forbid(unsafe_code)]

#[path = "../aenv-bench/host.rs"]
mod host;
#[path = "../aenv-bench-storage/measure.rs"]
#[expect(dead_code, reason = "the storage bench compares with peers")]
mod measure;

use std::path::Path;
use std::time::{Duration, Instant};

use aenv_network::{EgressPolicy, NetworkConfig, Slot, SlotPool};
use anyhow::{Context as _, Result, bail};
use clap::Parser;
use nix::sched::{CloneFlags, unshare};

use measure::{Bench, Plan};

/// Slots that are there while policies are replaced.
const SLOTS: usize = 200;

#[derive(Debug, Parser)]
#[command(about = "Measure network slots; rows go to standard output as one JSON object")]
struct Args {
    /// Only these rows; all if there are none.
    rows: Vec<String>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    unshare(CloneFlags::CLONE_NEWNET).context("make a network namespace (needs root)")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?; // its threads are in there too
    let directory = tempfile::tempdir().context("make a directory")?;
    let mut bench = Bench::new(args.rows, directory.path(), 1);
    runtime.block_on(measure(&mut bench, directory.path()))?;
    bench.print()
}

async fn measure(bench: &mut Bench, dir: &Path) -> Result<()> {
    let row =
        |name, rounds: &[Duration]| Plan { name, unit: "ms", rounds: rounds.len(), work: 1.0, factor: 1e3 }.row(rounds);
    if bench.wants(&["slot_pool"]) {
        let pool = start(dir, 4).await?;
        let mut times = Vec::new();
        for _ in 0..100 {
            while pool.waiting() < 4 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let began = Instant::now();
            let slot = pool.acquire().await?;
            times.push(began.elapsed());
            slot.close().await?;
        }
        bench.add(row("slot_pool", &times));
        close(pool).await?;
    }
    if bench.wants(&["slot_new"]) {
        let pool = start(dir, 0).await?;
        let mut times = Vec::new();
        for _ in 0..100 {
            let began = Instant::now();
            let slot = pool.acquire().await?;
            slot.set_policy(&EgressPolicy::default()).await?;
            times.push(began.elapsed());
            slot.close().await?;
        }
        bench.add(row("slot_new", &times));
        close(pool).await?;
    }
    if bench.wants(&["policy_replace"]) {
        let pool = start(dir, 0).await?;
        let mut slots: Vec<Slot> = Vec::new();
        for _ in 0..SLOTS {
            slots.push(pool.acquire().await?);
        }
        let policies = [fifty(0)?, fifty(1)?];
        let mut times = Vec::new();
        for policy in &policies {
            for slot in &slots {
                let began = Instant::now();
                slot.set_policy(policy).await?;
                times.push(began.elapsed());
            }
        }
        bench.add(row("policy_replace", &times));
        for slot in slots {
            slot.close().await?;
        }
        close(pool).await?;
    }
    Ok(())
}

/// A policy of fifty networks, none of which is beside another.
fn fifty(odd: usize) -> Result<EgressPolicy> {
    let net = |n: usize| format!("198.{}.{}.0/24", 18 + odd, 2 * n);
    let (allow, deny): (Vec<_>, Vec<_>) = (0..25).map(|n| (net(n), net(n + 50))).unzip();
    Ok(EgressPolicy::new(&allow, &deny, None)?)
}

async fn start(dir: &Path, low_watermark: usize) -> Result<SlotPool> {
    let config = NetworkConfig { low_watermark, ..NetworkConfig::new(dir.to_owned(), "bench".to_owned()) };
    Ok(SlotPool::start(config).await?)
}

async fn close(pool: SlotPool) -> Result<()> {
    match pool.close().await {
        Ok(()) => Ok(()),
        Err(left) => bail!("left behind: {left:?}"),
    }
}
