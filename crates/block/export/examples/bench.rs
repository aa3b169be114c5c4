//! How fast a device is through a FUSE file and as a ublk device, against reads of the file it stands on, in the same run.
//!
//! `cargo run --release -p aenv-block-export --example bench -- [--json] [--dir DIR] [--scale N] [--threads N] [--rounds N] [ROW…]`
//!
//! The device is a writable disk on one layer of 256 MiB, divided by N; the peer reads that layer's file. Before each run
//! of a `seq` row, the layer's pages are dropped. A ratio is ours to the peer's speed. Needs root and /dev/fuse; without
//! /dev/ublk-control, there are no rows of ublk.

#![forbid(unsafe_code)]

use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aenv_block_device::BlockDevice;
use aenv_block_export::{Caching, Export, ExportOptions, Exporter, FuseExporter, FuseOptions, UblkExporter};
use aenv_block_overlaybd::{Identity, LocalFile, Mode, OverlayDevice, Stack, UpperFiles, UpperOptions};
use aenv_model::Bytes;
use rustix::fs::{Advice, OFlags, fadvise};
use serde::Serialize;
use uuid::Uuid;

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

fn main() {
    let (mut only, mut dir, mut scale, mut rounds, mut json) = (Vec::new(), std::env::temp_dir(), 1, 15, false);
    let mut options = FuseOptions::default();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--json" => json = true,
            "--dir" => dir = args.next().expect("--dir DIR").into(),
            "--threads" => options.threads = args.next().and_then(|n| n.parse().ok()).expect("--threads N"),
            "--scale" => scale = args.next().and_then(|n| n.parse().ok()).expect("--scale N"),
            "--rounds" => rounds = args.next().and_then(|n| n.parse().ok()).expect("--rounds N"),
            row => only.push(row.to_owned()),
        }
    }
    let temporary = tempfile::tempdir_in(dir).expect("temporary directory");
    let wants = |name: &str| only.is_empty() || only.iter().any(|only| only == name);
    let size = 256 * MIB as u64 / scale;
    let layer = temporary.path().join("layer");
    make_layer(temporary.path(), &layer, size);
    let mut rows = Vec::new();
    let fuse = FuseExporter::mount(&temporary.path().join("mnt"), options).expect("mount");
    let names = ["fuse_seq_read", "fuse_seq_read_4", "fuse_seq_read_shared", "fuse_rand_read", "fuse_rand_read_16"];
    measure(&Bench::new(&fuse, temporary.path(), &layer, (size, rounds)), names, &wants, &mut rows);
    fuse.close().expect("unmount");
    if UblkExporter::is_there() {
        let tag = NonZeroU64::new(Uuid::new_v4().as_u64_pair().0 | 1).expect("odd");
        let ublk = UblkExporter::open(tag).expect("open the ublk driver");
        let names = ["ublk_seq_read", "ublk_seq_read_4", "ublk_seq_read_shared", "ublk_rand_read", "ublk_rand_read_16"];
        measure(&Bench::new(&ublk, temporary.path(), &layer, (size, rounds)), names, &wants, &mut rows);
    }
    let report = Report { bench: "export", host: host(), rows };
    if json {
        println!("{}", serde_json::to_string_pretty(&report).expect("json"));
    } else {
        report.print();
    }
}

/// Adds the rows of one exporter.
fn measure(bench: &Bench, names: [&'static str; 5], wants: &dyn Fn(&str) -> bool, rows: &mut Vec<Row>) {
    let [seq, seq_4, seq_shared, rand, rand_16] = names;
    let (direct, shared) = (bench.open(0), bench.open(1));
    if wants(seq) {
        rows.push(bench.cold(seq, &direct, 1));
    }
    if wants(seq_4) {
        rows.push(bench.cold(seq_4, &direct, 4));
    }
    if wants(seq_shared) {
        rows.push(bench.cold(seq_shared, &shared, 1));
    }
    if wants(rand) {
        rows.push(bench.random(rand, &direct, 1));
    }
    if wants(rand_16) {
        rows.push(bench.random(rand_16, &direct, 16));
    }
}

#[derive(Serialize)]
struct Report {
    bench: &'static str,
    host: String,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    unit: &'static str,
    n: usize,
    p50: f64,
    p95: f64,
    peer: f64,
    ratio: f64,
}

impl Report {
    fn print(&self) {
        println!("{} on {}", self.bench, self.host);
        println!("{:<22} {:>7} {:>3} {:>9} {:>9} {:>9} {:>6}", "row", "unit", "n", "p50", "p95", "peer", "ratio");
        for Row { name, unit, n, p50, p95, peer, ratio } in &self.rows {
            println!("{name:<22} {unit:>7} {n:>3} {p50:>9.1} {p95:>9.1} {peer:>9.1} {ratio:>6.3}");
        }
    }
}

/// Two devices of one exporter: one as guests have it, one as many share it.
struct Bench {
    exports: Vec<Box<dyn Export>>,
    /// The layer's own file.
    layer: PathBuf,
    size: u64,
    /// Runs of each row.
    rounds: u64,
}

/// Makes a layer full of noise.
fn make_layer(dir: &Path, layer: &Path, size: u64) {
    let below = device(dir, "below", size, Stack::new(Vec::new()).expect("no layers"));
    for at in (0..size).step_by(MIB) {
        below.write_at(at, &noise(at, MIB)).expect("write");
    }
    let mut out = File::create(layer).expect("create");
    below.export_upper(&mut out, &Identity::fresh(Uuid::nil())).expect("export");
    out.sync_all().expect("sync"); // only clean pages can be dropped
    drop(below);
    std::fs::remove_file(dir.join("below.data")).expect("remove");
}

impl Bench {
    fn new(exporter: &dyn Exporter, dir: &Path, layer: &Path, (size, rounds): (u64, u64)) -> Self {
        let open = |name| {
            let source = Arc::new(LocalFile::open(layer).expect("open"));
            device(dir, name, size, Stack::open([source as Arc<_>]).expect("stack"))
        };
        let exports = [("direct", Caching::Direct), ("shared", Caching::Shared)]
            .map(|(name, caching)| {
                let options = ExportOptions { read_only: caching == Caching::Shared, caching };
                exporter.attach(name, Arc::new(open(name)), &options).expect("attach")
            })
            .into();
        Self { exports, layer: layer.to_owned(), size, rounds }
    }

    /// The first for direct I/O, as VMMs open a disk.
    fn open(&self, number: usize) -> File {
        let direct = if number == 0 { OFlags::DIRECT } else { OFlags::empty() };
        let path = self.exports[number].path();
        File::options().read(true).custom_flags(direct.bits().cast_signed()).open(path).expect("open")
    }

    /// Whole reads in requests of a mebibyte, by `readers` at once, with nothing cached.
    fn cold(&self, name: &'static str, file: &File, readers: u64) -> Row {
        let peer = File::open(&self.layer).expect("open");
        let part = self.size / readers;
        let run = |file: &File| {
            for forgotten in [file, &peer] {
                fadvise(forgotten, 0, None, Advice::DontNeed).expect("drop cached pages");
            }
            let start = Instant::now();
            std::thread::scope(|scope| {
                for reader in 0..readers {
                    scope.spawn(move || {
                        // Aligned, as a guest's memory is: else each mebibyte spans 257 pages, which are two requests.
                        let mut buffer = vec![0; MIB + PAGE];
                        let aligned = buffer.as_ptr().align_offset(PAGE);
                        let buffer = &mut buffer[aligned..aligned + MIB];
                        for at in (reader * part..(reader + 1) * part).step_by(MIB) {
                            file.read_exact_at(buffer, at).expect("read");
                        }
                    });
                }
            });
            start.elapsed()
        };
        let speed = |time: Duration| self.size as f64 / 1e6 / time.as_secs_f64();
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            ours.push(speed(run(file)));
            theirs.push(speed(run(&peer)));
        }
        Row::new(name, "MB/s", &mut ours, &mut theirs, |ours, theirs| ours / theirs)
    }

    /// One page at a time, by `readers` at once, of what the host has cached: what a request costs.
    fn random(&self, name: &'static str, file: &File, readers: u64) -> Row {
        const READS: u64 = 9_600;
        let peer = File::open(&self.layer).expect("open");
        let run = |file: &File, seed: u64| {
            let start = Instant::now();
            std::thread::scope(|scope| {
                for reader in 0..readers {
                    scope.spawn(move || {
                        let mut random = Random(seed + (reader << 32));
                        let mut buffer = [0; 2 * PAGE];
                        let aligned = buffer.as_ptr().align_offset(PAGE);
                        let page = &mut buffer[aligned..aligned + PAGE];
                        for _ in 0..READS / readers {
                            let at = random.next() % (self.size / PAGE as u64) * PAGE as u64;
                            file.read_exact_at(page, at).expect("read");
                        }
                    });
                }
            });
            start.elapsed().as_secs_f64() * 1e6 / READS as f64
        };
        let mut warm = vec![0; MIB];
        (0..self.size).step_by(MIB).for_each(|at| peer.read_exact_at(&mut warm, at).expect("read"));
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 1..=self.rounds {
            ours.push(run(file, round));
            theirs.push(run(&peer, round));
        }
        Row::new(name, "us", &mut ours, &mut theirs, |ours, theirs| theirs / ours)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.exports.drain(..).for_each(|export| export.close().expect("close"));
    }
}

impl Row {
    fn new(
        name: &'static str,
        unit: &'static str,
        ours: &mut [f64],
        theirs: &mut [f64],
        ratio: fn(f64, f64) -> f64,
    ) -> Self {
        let (p50, p95) = percentiles(ours);
        let (peer, _) = percentiles(theirs);
        Self { name, unit, n: ours.len(), p50, p95, peer, ratio: ratio(p50, peer) }
    }
}

/// A disk with a fresh upper.
fn device(dir: &Path, name: &str, size: u64, lowers: Stack) -> OverlayDevice {
    let files = UpperFiles { data: dir.join(format!("{name}.data")), index: Some(dir.join(format!("{name}.index"))) };
    let options = UpperOptions { mode: Mode::Log, ..UpperOptions::new(Bytes(size), Uuid::nil()) };
    OverlayDevice::new(lowers, files.create(&options).expect("create")).expect("device")
}

fn percentiles(values: &mut [f64]) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |part: f64| values[((values.len() - 1) as f64 * part).round() as usize];
    (at(0.5), at(0.95))
}

fn host() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{} ({cores} cores, Linux {})", read("/proc/sys/kernel/hostname"), read("/proc/sys/kernel/osrelease"))
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random(seed | 1);
    (0..length / 8).flat_map(|_| random.next().to_le_bytes()).collect()
}

/// Marsaglia's xorshift64: repeatable.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
