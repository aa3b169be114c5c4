//! Restacking after little and after much was written.

use std::fs::OpenOptions;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aenv_block_device::BlockDevice as _;
use aenv_block_overlaybd::{
    CreateUpperError, LocalFile, OverlayDevice, RestackError, Source, Stack, Storage, Upper, UpperOptions,
};
use aenv_model::Bytes;
use anyhow::Result;
use uuid::Uuid;

use crate::content::{MIB, PAGE, Random, noise};
use crate::measure::{Bench, Plan, Row, median, timed};

const ROUNDS: usize = 7;

/// After 1 MB and after 4 GB. What syncs take is the disk's and left out; it is told beside. Either way the writes go to 256
/// places of the disk: how much was written is to make the difference, not how many extents there are.
pub(crate) fn small_and_large(bench: &mut Bench) -> Result<()> {
    const NAMES: [&str; 2] = ["seal_small", "seal_large"];
    if !bench.wants(&NAMES) {
        return Ok(());
    }
    let written = [MIB as u64, (4 << 30) / bench.scale];
    let mut rounds = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        let large = Written::new(bench, "large", written[1])?;
        let small = Written::new(bench, "small", written[0])?;
        // Writing gigabytes leaves nothing in the processor's caches; who comes next is not to pay for that.
        Written::new(bench, "first", PAGE as u64)?.restack()?;
        if round % 2 == 0 {
            rounds[0].push(small.restack()?);
            rounds[1].push(large.restack()?);
        } else {
            rounds[1].push(large.restack()?);
            rounds[0].push(small.restack()?);
        }
    }
    let times = |rounds: &[Taken]| rounds.iter().map(|taken| taken.all - taken.syncs).collect::<Vec<_>>();
    let row = |at: usize| {
        Plan { name: NAMES[at], unit: "ms", rounds: ROUNDS, work: 1.0, factor: 1e3 }.row(&times(&rounds[at]))
    };
    for at in [0, 1] {
        let (row, other) = (row(at), row(1 - at).p50);
        let apart = row.p50.max(other) / row.p50.min(other);
        bench.add(Row { peer: Some(other), ratio: Some(apart), ..row });
        let syncs: Vec<_> = rounds[at].iter().map(|taken| taken.syncs.as_secs_f64() * 1e3).collect();
        eprintln!("  {}: syncs took {:.3} ms beside", NAMES[at], median(&syncs));
    }
    Ok(())
}

/// What a restack took.
struct Taken {
    all: Duration,
    /// The part of it in which the disk was waited for.
    syncs: Duration,
}

/// A device that was written to and flushed.
struct Written<'b> {
    bench: &'b Bench,
    name: &'static str,
    device: OverlayDevice,
    syncs: Arc<AtomicU64>,
}

impl<'b> Written<'b> {
    fn new(bench: &'b Bench, name: &'static str, written: u64) -> Result<Self> {
        let syncs = Arc::default();
        let upper = make(bench, name, &syncs, &UpperOptions::new(Bytes(8 << 30), Uuid::nil()))?;
        let device = OverlayDevice::new(Stack::new(Vec::new())?, upper)?;
        let mut random = Random::new(3);
        let buf = noise(5, if written > 256 * MIB as u64 { MIB } else { PAGE });
        for _ in (0..written).step_by(buf.len()) {
            device.write_at(random.next() % 256 * 2 * MIB as u64, &buf)?;
        }
        device.flush()?;
        Ok(Self { bench, name, device, syncs })
    }

    /// Restacks it, and removes its files.
    fn restack(self) -> Result<Taken> {
        let Self { bench, name, device, syncs } = self;
        let (sealed, fresh) = (format!("{name}.sealed"), format!("{name}.fresh"));
        let file = |name: &str, suffix: &str| bench.path(&format!("{name}.{suffix}"));
        let place = || -> io::Result<Arc<dyn Source>> {
            std::fs::rename(file(name, "data"), bench.path(&sealed))?;
            std::fs::rename(file(&fresh, "data"), file(name, "data"))?;
            std::fs::rename(file(&fresh, "index"), file(name, "index"))?;
            Ok(Arc::new(LocalFile::open(&bench.path(&sealed))?))
        };
        let moved = |source| RestackError::Move { to: bench.path(&sealed), source };
        let retired = device.upper(); // kept, so that deleting its file is not measured
        syncs.store(0, Ordering::SeqCst);
        let all = timed(|| {
            let made =
                device.restack_with(|options| make(bench, &fresh, &syncs, options), || place().map_err(moved))?;
            Ok(made)
        })?;
        let syncs = Duration::from_nanos(syncs.load(Ordering::SeqCst));
        drop(retired);
        for path in [bench.path(&sealed), file(name, "data"), file(name, "index")] {
            std::fs::remove_file(path)?;
        }
        Ok(Taken { all, syncs })
    }
}

/// A fresh upper whose files add up what their syncs take in `syncs`.
fn make(bench: &Bench, name: &str, syncs: &Arc<AtomicU64>, options: &UpperOptions) -> Result<Upper, CreateUpperError> {
    let open = |suffix: &str| -> io::Result<Arc<dyn Storage>> {
        let path = bench.path(&format!("{name}.{suffix}"));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
        let file = LocalFile::from_file(file, path.display().to_string());
        Ok(Arc::new(TimedSync { file, nanos: Arc::clone(syncs) }))
    };
    let error = |source| CreateUpperError::Write { what: "create", file: name.to_owned(), source };
    Upper::create(open("data").map_err(error)?, Some(open("index").map_err(error)?), options)
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

    fn data_ranges(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        self.file.data_ranges(range)
    }
}
