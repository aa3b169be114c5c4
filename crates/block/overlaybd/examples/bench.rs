//! How fast layers, stacks and uppers are, each against what the host can do in the same run.
//!
//! `cargo run --release -p aenv-block-overlaybd --example bench -- [--json] [--dir DIR] [--scale N] [ROW…]`
//!
//! Files are made in a temporary directory in DIR. `--scale 4` divides sizes by four. A ratio is ours to the peer's speed,
//! except for `seal_large`, where it is the time to that of `seal_small`.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aenv_block_device::BlockDevice;
use aenv_block_overlaybd::{
    Algorithm, BlockSize, Identity, Layer, LocalFile, Mode, OverlayDevice, Source, Stack, Storage, Upper, UpperFiles,
    UpperOptions, ZFileOptions, ZFileWriter,
};
use aenv_model::Bytes;
use serde::Serialize;
use uuid::Uuid;

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

fn main() {
    let mut bench = Bench { rows: Vec::new(), only: Vec::new(), dir: std::env::temp_dir(), scale: 1 };
    let mut json = false;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--json" => json = true,
            "--dir" => bench.dir = args.next().expect("--dir DIR").into(),
            "--scale" => bench.scale = args.next().and_then(|n| n.parse().ok()).expect("--scale N"),
            row => bench.only.push(row.to_owned()),
        }
    }
    let temporary = tempfile::tempdir_in(&bench.dir).expect("temporary directory");
    bench.dir = temporary.path().to_owned();
    bench.reads_of_one_layer();
    bench.reads_of_eight_layers();
    bench.open_40();
    bench.rand_write();
    bench.seq_write();
    bench.seals();
    bench.compression();
    let report = Report { bench: "storage", host: host(), rows: bench.rows };
    if json {
        println!("{}", serde_json::to_string_pretty(&report).expect("json"));
    } else {
        report.print();
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
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
}

impl Report {
    fn print(&self) {
        println!("{} on {}", self.bench, self.host);
        println!("{:<14} {:>8} {:>5} {:>11} {:>11} {:>11} {:>7}", "row", "unit", "n", "p50", "p95", "peer", "ratio");
        let optional = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.3}"));
        for row in &self.rows {
            let Row { name, unit, n, p50, p95, peer, ratio } = row;
            let (peer, ratio) = (optional(*peer), optional(*ratio));
            println!("{name:<14} {unit:>8} {n:>5} {p50:>11.3} {p95:>11.3} {peer:>11} {ratio:>7}");
        }
    }
}

fn host() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{} ({cores} cores, Linux {})", read("/proc/sys/kernel/hostname"), read("/proc/sys/kernel/osrelease"))
}

struct Bench {
    rows: Vec<Row>,
    only: Vec<String>,
    dir: PathBuf,
    scale: u64,
}

impl Bench {
    fn wants(&self, names: &[&str]) -> bool {
        self.only.is_empty() || names.iter().any(|name| self.only.iter().any(|only| only == name))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Runs `ours` and `peer` in turn, so that both see the same weather, and compares their median times. Each run does
    /// `work` units; p50 and p95 are seconds a unit, times `factor`.
    fn compare(
        &mut self,
        (name, unit): (&'static str, &'static str),
        (rounds, work, factor): (usize, f64, f64),
        mut ours: impl FnMut(usize) -> Duration,
        mut peer: impl FnMut(usize) -> Duration,
    ) {
        let (mut our_times, mut peer_times) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            our_times.push(ours(round).as_secs_f64() / work * factor);
            peer_times.push(peer(round).as_secs_f64() / work * factor);
        }
        let (p50, p95) = percentiles(&mut our_times);
        let (peer, _) = percentiles(&mut peer_times);
        self.rows.push(Row { name, unit, n: rounds, p50, p95, peer: Some(peer), ratio: Some(peer / p50) });
    }

    fn reads_of_one_layer(&mut self) {
        if !self.wants(&["seq_read", "rand_read_1"]) {
            return;
        }
        let size = 256 * MIB as u64 / self.scale;
        let flat = self.path("flat");
        let device = self.upper(Mode::Log, "one", size);
        let out = File::create(&flat).expect("create");
        for (at, buf) in blocks(size, MIB) {
            device.write_at(at, &buf).expect("write");
            out.write_all_at(&buf, at).expect("write");
        }
        let stack = Stack::new(vec![self.export(&device, "one.layer")]).expect("stack");
        self.compare_reads("seq_read", "rand_read_1", &stack, &flat);
    }

    /// Base and seven deltas of 8192 random blocks each.
    fn reads_of_eight_layers(&mut self) {
        if !self.wants(&["seq_read_8", "rand_read_8", "open_8"]) {
            return;
        }
        let size = 256 * MIB as u64 / self.scale; // small enough that deltas cover half of it
        let device = self.upper(Mode::Log, "eight", size);
        for (at, buf) in blocks(size, MIB) {
            device.write_at(at, &buf).expect("write");
        }
        let mut paths = vec![self.export_path(&device, "eight.0")];
        let mut random = Random(7);
        for delta in 1..8 {
            let device = self.upper(Mode::Log, &format!("delta.{delta}"), size);
            for _ in 0..8192 / self.scale {
                let page = random.below(size / PAGE as u64);
                device.write_at(page * PAGE as u64, &noise(random.next(), PAGE)).expect("write");
            }
            paths.push(self.export_path(&device, &format!("eight.{delta}")));
        }
        let open = || Stack::open(paths.iter().map(|path| source(path))).expect("stack");
        let stack = open();
        let flat = self.path("flat8");
        let out = File::create(&flat).expect("create");
        let mut buf = vec![0; MIB];
        for at in (0..size).step_by(MIB) {
            stack.read_at(at, &mut buf).expect("read");
            out.write_all_at(&buf, at).expect("write");
        }
        self.compare_reads("seq_read_8", "rand_read_8", &stack, &flat);
        self.plain("open_8", "ms", 30, 1e3, |_| timed(|| drop(open())));
        eprintln!("# open_8: {} extents", stack.index().entries().len());
    }

    fn compare_reads(&mut self, sequential: &'static str, random: &'static str, stack: &Stack, flat: &Path) {
        let size = stack.size().get();
        let file = File::open(flat).expect("open");
        let mut buf = vec![0; MIB];
        let mut run =
            |read: &dyn Fn(u64, &mut [u8])| timed(|| (0..size).step_by(MIB).for_each(|at| read(at, &mut buf)));
        let ours = |at: u64, buf: &mut [u8]| stack.read_at(at, buf).expect("read");
        let peer = |at: u64, buf: &mut [u8]| file.read_exact_at(buf, at).expect("read");
        run(&ours); // warm
        run(&peer);
        let mut run2 = {
            let mut buf = vec![0; MIB];
            move |read: &dyn Fn(u64, &mut [u8])| timed(|| (0..size).step_by(MIB).for_each(|at| read(at, &mut buf)))
        };
        let work = size as f64 / MIB as f64;
        self.compare((sequential, "us/MiB"), (15, work, 1e6), |_| run(&ours), |_| run2(&peer));

        let batch = 20_000;
        let random_reads = |seed: usize, read: &dyn Fn(u64, &mut [u8])| {
            let mut random = Random(seed as u64 + 1);
            let mut page = vec![0; PAGE];
            timed(|| (0..batch).for_each(|_| read(random.below(size / PAGE as u64) * PAGE as u64, &mut page)))
        };
        self.compare(
            (random, "us"),
            (15, f64::from(batch), 1e6),
            |round| random_reads(round, &ours),
            |round| random_reads(round, &peer),
        );
    }

    /// 40 layers of 2500 extents each, of a 10 GB image; sparse in content, so that the index is what counts.
    fn open_40(&mut self) {
        if !self.wants(&["open_40"]) {
            return;
        }
        let mut random = Random(40);
        let (size, extents) = (10 << 30, 2500);
        let paths: Vec<_> = (0..40)
            .map(|layer| {
                let device = self.upper(Mode::Log, &format!("forty.{layer}"), size);
                for _ in 0..extents {
                    let page = random.below(size / PAGE as u64);
                    device.write_at(page * PAGE as u64, &[layer; 512]).expect("write");
                }
                self.export_path(&device, &format!("forty.{layer}.layer"))
            })
            .collect();
        let sources: Vec<_> = paths.iter().map(|path| source(path)).collect();
        let mut entries = 0;
        self.plain("open_40", "ms/100k", 20, 1e3, |_| {
            timed(|| entries = Stack::open(sources.iter().cloned()).expect("stack").index().entries().len())
        });
        eprintln!("# open_40: {entries} extents");
    }

    fn rand_write(&mut self) {
        if !self.wants(&["rand_write"]) {
            return;
        }
        let size = 1024 * MIB as u64 / self.scale;
        let upper = self.upper(Mode::Hybrid, "rand_write", size);
        let file = File::create(self.path("rand_write.peer")).expect("create");
        file.set_len(size).expect("set length");
        let page = noise(1, PAGE);
        let run = |seed: usize, write: &dyn Fn(u64), flush: &dyn Fn()| {
            let mut random = Random(seed as u64 + 1);
            timed(|| {
                for _ in 0..8 {
                    (0..MIB / PAGE).for_each(|_| write(random.below(size / PAGE as u64) * PAGE as u64));
                    flush();
                }
            })
        };
        self.compare(
            ("rand_write", "us"),
            (15, (8 * MIB / PAGE) as f64, 1e6),
            |round| run(round, &|at| upper.write_at(at, &page).expect("write"), &|| upper.flush().expect("flush")),
            |round| run(round, &|at| file.write_all_at(&page, at).expect("write"), &|| file.sync_data().expect("sync")),
        );
    }

    fn seq_write(&mut self) {
        if !self.wants(&["seq_write"]) {
            return;
        }
        let size = 256 * MIB as u64 / self.scale;
        let buf = noise(1, MIB);
        let dir = self.dir.clone();
        let ours = |round: usize| {
            let device = make_upper(&dir, Mode::Log, &format!("seq.{round}"), size);
            let time = timed(|| (0..size).step_by(MIB).for_each(|at| device.write_at(at, &buf).expect("write")));
            remove(&dir, &format!("seq.{round}"));
            time
        };
        let peer = |round: usize| {
            let path = dir.join(format!("seq.peer.{round}"));
            let file = File::create(&path).expect("create");
            let time = timed(|| (0..size).step_by(MIB).for_each(|at| file.write_all_at(&buf, at).expect("write")));
            std::fs::remove_file(path).expect("remove");
            time
        };
        self.compare(("seq_write", "us/MiB"), (9, size as f64 / MIB as f64, 1e6), ours, peer);
    }

    /// Seal and restack after 1 MB and after 4 GB; what syncs take is measured apart and left out. Either way the writes go
    /// to 256 places, so that the index is as large.
    fn seals(&mut self) {
        if !self.wants(&["seal_small", "seal_large"]) {
            return;
        }
        let large = (4 << 30) / self.scale;
        let (mut times, mut syncs) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2]);
        for _ in 0..7 {
            for (at, written) in [MIB as u64, large].into_iter().enumerate() {
                let (time, sync) = self.seal(written);
                times[at].push((time - sync).as_secs_f64() * 1e3);
                syncs[at].push(sync.as_secs_f64() * 1e3);
            }
        }
        let small = percentiles(&mut times[0]).0;
        for (at, name) in ["seal_small", "seal_large"].into_iter().enumerate() {
            let (p50, p95) = percentiles(&mut times[at]);
            let ratio = (at == 1).then_some(p50 / small);
            self.rows.push(Row { name, unit: "ms", n: times[at].len(), p50, p95, peer: None, ratio });
            eprintln!("# {name}: syncs took {:.3} ms", percentiles(&mut syncs[at]).0);
        }
    }

    fn seal(&self, written: u64) -> (Duration, Duration) {
        let syncs = Arc::new(AtomicU64::new(0));
        let make = |name: &str, options: &UpperOptions| {
            let open = |suffix: &str| -> Arc<dyn Storage> {
                let path = self.path(&format!("{name}.{suffix}"));
                let _ = std::fs::remove_file(&path); // truncating it would wait for its journal
                let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
                let file = LocalFile::from_file(file.expect("create"), path.display().to_string());
                Arc::new(TimedSync { file, nanos: Arc::clone(&syncs) })
            };
            Upper::create(open("data"), Some(open("index")), options).expect("create")
        };
        let size = Bytes(8 << 30);
        let upper = make("seal", &UpperOptions::new(size, Uuid::nil()));
        let lowers = Stack::new(Vec::new()).expect("empty");
        let device = OverlayDevice::new(lowers, upper).expect("device");
        let mut random = Random(3);
        let buf = noise(5, if written > 256 * MIB as u64 { MIB } else { PAGE });
        for _ in (0..written).step_by(buf.len()) {
            device.write_at(random.below(256) * 2 * MIB as u64, &buf).expect("write");
        }
        device.flush().expect("flush");
        syncs.store(0, Ordering::SeqCst);
        let retired = device.upper(); // kept, so that deleting its file is not measured
        let time = timed(|| {
            let restacked = device.restack_with(
                |options| Ok(make("fresh", options)),
                || {
                    let (from, to) = (self.path("seal.data"), self.path("sealed"));
                    std::fs::rename(from, &to).expect("rename");
                    for suffix in ["data", "index"] {
                        let name = |name: &str| self.path(&format!("{name}.{suffix}"));
                        std::fs::rename(name("fresh"), name("seal")).expect("rename");
                    }
                    Ok(Arc::new(LocalFile::open(&to).expect("open")))
                },
            );
            restacked.expect("restack");
        });
        drop(retired);
        std::fs::remove_file(self.path("sealed")).expect("remove");
        (time, Duration::from_nanos(syncs.load(Ordering::SeqCst)))
    }

    fn compression(&mut self) {
        if !self.wants(&["zstd", "lz4"]) {
            return;
        }
        let input: Vec<u8> = blocks(128 * MIB as u64 / self.scale, MIB).flat_map(|(_, block)| block).collect();
        let work = input.len() as f64 / MIB as f64;
        let shared = bytes::Bytes::from(input.clone());
        let block_size = BlockSize::DEFAULT;
        for (name, algorithm) in [("zstd", Algorithm::Zstd), ("lz4", Algorithm::Lz4)] {
            if !self.wants(&[name]) {
                continue;
            }
            let options = ZFileOptions { algorithm, block_size, ..ZFileOptions::default() };
            let ours = |_| {
                timed(|| {
                    let mut writer = ZFileWriter::new(io::sink(), options).expect("new");
                    writer.write_shared(shared.clone()).expect("write");
                    writer.finish().expect("finish");
                })
            };
            let peer = |_| timed(|| compress_on_all_cores(algorithm, &input, block_size.get()));
            self.compare((name, "us/MiB"), (9, work, 1e6), ours, peer);
        }
    }

    fn plain(
        &mut self,
        name: &'static str,
        unit: &'static str,
        rounds: usize,
        factor: f64,
        mut run: impl FnMut(usize) -> Duration,
    ) {
        let mut times: Vec<_> = (0..rounds).map(|round| run(round).as_secs_f64() * factor).collect();
        let (p50, p95) = percentiles(&mut times);
        self.rows.push(Row { name, unit, n: rounds, p50, p95, peer: None, ratio: None });
    }

    fn upper(&self, mode: Mode, name: &str, size: u64) -> OverlayDevice {
        make_upper(&self.dir, mode, name, size)
    }

    /// The upper's content as a compacted layer; the upper's own files are removed.
    fn export_path(&self, device: &OverlayDevice, name: &str) -> PathBuf {
        let path = self.path(name);
        let mut out = File::create(&path).expect("create");
        device.export_upper(&mut out, &Identity::fresh(Uuid::nil())).expect("export");
        path
    }

    fn export(&self, device: &OverlayDevice, name: &str) -> Layer {
        Layer::open(source(&self.export_path(device, name))).expect("layer")
    }
}

/// The same crates on the same buffers, with nothing around them.
fn compress_on_all_cores(algorithm: Algorithm, input: &[u8], block_size: usize) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicU64::new(0);
    let chunk = 64 * block_size;
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut zstd = zstd::bulk::Compressor::new(3).expect("zstd");
                let mut out = vec![0; 2 * block_size + 1024];
                loop {
                    let at = next.fetch_add(chunk as u64, Ordering::Relaxed) as usize;
                    let Some(part) = input.get(at..(at + chunk).min(input.len())).filter(|part| !part.is_empty())
                    else {
                        return;
                    };
                    for block in part.chunks(block_size) {
                        match algorithm {
                            Algorithm::Lz4 => lz4_flex::block::compress_into(block, &mut out).expect("lz4"),
                            Algorithm::Zstd => zstd.compress_to_buffer(block, &mut out).expect("zstd"),
                        };
                    }
                }
            });
        }
    });
}

/// A file that counts the time its syncs take.
#[derive(Debug)]
struct TimedSync {
    file: LocalFile,
    nanos: Arc<AtomicU64>,
}

impl Source for TimedSync {
    fn name(&self) -> &str {
        self.file.name()
    }

    fn size(&self) -> u64 {
        self.file.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_at(offset, buf)
    }
}

impl Storage for TimedSync {
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.file.write_at(offset, buf)
    }

    fn length(&self) -> io::Result<u64> {
        self.file.length()
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.file.set_length(length)
    }

    fn sync(&self) -> io::Result<()> {
        let start = Instant::now();
        let result = self.file.sync();
        self.nanos.fetch_add(start.elapsed().as_nanos() as u64, Ordering::SeqCst);
        result
    }

    fn punch_hole(&self, offset: u64, length: u64) -> io::Result<()> {
        self.file.punch_hole(offset, length)
    }

    fn data_ranges(&self, range: std::ops::Range<u64>) -> io::Result<Vec<std::ops::Range<u64>>> {
        self.file.data_ranges(range)
    }
}

fn make_upper(dir: &Path, mode: Mode, name: &str, size: u64) -> OverlayDevice {
    let files = files(dir, name);
    let upper = files.create(&UpperOptions { mode, ..UpperOptions::new(Bytes(size), Uuid::nil()) }).expect("create");
    OverlayDevice::new(Stack::new(Vec::new()).expect("empty"), upper).expect("device")
}

fn files(dir: &Path, name: &str) -> UpperFiles {
    UpperFiles { data: dir.join(format!("{name}.data")), index: Some(dir.join(format!("{name}.index"))) }
}

fn remove(dir: &Path, name: &str) {
    let files = files(dir, name);
    std::fs::remove_file(files.data).expect("remove");
    std::fs::remove_file(files.index.expect("index")).expect("remove");
}

fn source(path: &Path) -> Arc<dyn Source> {
    Arc::new(LocalFile::open(path).expect("open"))
}

fn timed(run: impl FnOnce()) -> Duration {
    let start = Instant::now();
    run();
    start.elapsed()
}

fn percentiles(times: &mut [f64]) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times[((times.len() - 1) as f64 * part).round() as usize];
    (at(0.5), at(0.95))
}

/// Half noise, half text: compresses about two to one.
fn blocks(size: u64, block: usize) -> impl Iterator<Item = (u64, Vec<u8>)> {
    (0..size).step_by(block).map(move |at| {
        let mut bytes = noise(at + 1, block);
        for page in bytes.chunks_mut(512) {
            let half = page.len() / 2;
            page[..half].iter_mut().zip(b"the quick brown fox ".iter().cycle()).for_each(|(to, from)| *to = *from);
        }
        (at, bytes)
    })
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random(seed | 1);
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes.truncate(length);
    bytes
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

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}
