//! Power fails at every flush point, and any part of what was not flushed survives. What is found afterwards must be, sector
//! by sector, the state of the last flush or something written since.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use aenv_block_device::BlockDevice;
use aenv_block_device::test_support::{Lossy, MemoryDevice, SECTOR};
use aenv_block_overlaybd::{
    Identity, Layer, MemoryFile, Mode, OpenUpperError, OverlayDevice, Source, Stack, Storage, Upper, UpperOptions,
    UpperProblem,
};
use aenv_model::Bytes;
use support::*;
use uuid::Uuid;

const SIZE: u64 = 64 << 10;
const SECTORS: usize = (SIZE / SECTOR) as usize;
const FILE: u64 = 1 << 20;
const BLOCK: u64 = 4096;

/// Fails everything once so many syncs were granted.
#[derive(Debug)]
struct Power(AtomicI64);

impl Power {
    fn check(&self) -> io::Result<()> {
        if self.0.load(Ordering::SeqCst) > 0 { Ok(()) } else { Err(io::Error::other("power failed")) }
    }

    fn sync(&self) -> io::Result<()> {
        self.0.fetch_sub(1, Ordering::SeqCst);
        self.check()
    }
}

/// A growing file on a device that loses what was not flushed.
#[derive(Debug)]
struct LossyFile {
    power: Arc<Power>,
    device: Lossy<MemoryDevice>,
    length: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    durable_length: u64,
    /// Blocks that are no holes, after a flush.
    durable_blocks: BTreeSet<u64>,
    blocks: BTreeSet<u64>,
    /// Where each pending change of the device is.
    pending: Vec<u64>,
}

impl LossyFile {
    fn new(power: &Arc<Power>) -> Arc<Self> {
        let device = Lossy::new(MemoryDevice::new(Bytes(FILE)));
        Arc::new(Self { power: Arc::clone(power), device, length: AtomicU64::new(0), state: Mutex::default() })
    }

    /// What is in the file after the crash. Blocks that were holes arrive whole or not at all: a filesystem records a block
    /// when its data is there.
    fn crash(self: Arc<Self>, name: &str, fate: &mut Fate) -> Arc<CrashedFile> {
        let this = Arc::into_inner(self).expect("the only user");
        let state = this.state.into_inner().expect("lock");
        let mut new_blocks = BTreeMap::new();
        let mut survivors = state.durable_blocks.clone();
        let survives = |number: usize| {
            let block = state.pending[number] / BLOCK;
            let survives = if state.durable_blocks.contains(&block) {
                fate.survives()
            } else {
                *new_blocks.entry(block).or_insert_with(|| fate.survives())
            };
            if survives {
                survivors.insert(block);
            }
            survives
        };
        let device = this.device.crash(survives).expect("crash");
        let (least, most) = (state.durable_length, this.length.into_inner());
        let length = match fate.below(3) {
            0 => least.min(most),
            1 => most,
            _ => least.min(most) + fate.below(least.abs_diff(most) / SECTOR + 1) * SECTOR,
        };
        let mut bytes = vec![0; length as usize];
        device.read_at(0, &mut bytes).expect("read");
        Arc::new(CrashedFile { file: MemoryFile::new(name, bytes), blocks: survivors })
    }

    fn record(&self, offset: u64, length: u64) {
        let mut state = self.state.lock().expect("lock");
        let end = offset + length;
        let mut at = offset;
        while at < end {
            state.pending.push(at);
            state.blocks.insert(at / BLOCK);
            at = (at / SECTOR + 1) * SECTOR;
        }
    }
}

impl Source for LossyFile {
    fn name(&self) -> &str {
        "lossy"
    }

    fn size(&self) -> u64 {
        self.length.load(Ordering::SeqCst)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if offset + buf.len() as u64 > self.size() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.device.read_at(offset, buf)
    }
}

impl Storage for LossyFile {
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.power.check()?;
        self.device.write_at(offset, buf)?;
        self.record(offset, buf.len() as u64);
        self.length.fetch_max(offset + buf.len() as u64, Ordering::SeqCst);
        Ok(())
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.size())
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.power.check()?;
        self.length.store(length, Ordering::SeqCst);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.power.sync()?;
        self.device.flush()?;
        let mut state = self.state.lock().expect("lock");
        state.pending.clear();
        state.durable_length = self.size();
        state.durable_blocks = state.blocks.clone();
        Ok(())
    }

    fn punch_hole(&self, offset: u64, length: u64) -> io::Result<()> {
        self.power.check()?;
        let end = (offset + length).min(FILE);
        self.device.discard(offset, end - offset)?;
        self.record(offset, end - offset);
        Ok(())
    }

    fn data_ranges(&self, _: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        unreachable!("only fresh uppers are made on it")
    }
}

/// What a crash left.
#[derive(Debug)]
struct CrashedFile {
    file: MemoryFile,
    blocks: BTreeSet<u64>,
}

impl Source for CrashedFile {
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

impl Storage for CrashedFile {
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
        Ok(())
    }

    fn punch_hole(&self, offset: u64, length: u64) -> io::Result<()> {
        self.file.punch_hole(offset, length)
    }

    fn data_ranges(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let blocks =
            self.blocks.iter().map(|block| (block * BLOCK).max(range.start)..((block + 1) * BLOCK).min(range.end));
        Ok(blocks.filter(|block| block.start < block.end).collect())
    }
}

/// Decides what survives.
struct Fate {
    kind: u64,
    random: u64,
}

impl Fate {
    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn below(&mut self, bound: u64) -> u64 {
        match self.kind {
            0 => 0,
            1 => 1.min(bound - 1),
            _ => self.next() % bound,
        }
    }

    fn survives(&mut self) -> bool {
        match self.kind {
            0 => false,
            1 => true,
            _ => self.next() & 1 == 1,
        }
    }
}

/// What each sector may hold: the number of the write that filled it, 0 for zeros.
struct Expected {
    durable: Vec<u32>,
    current: Vec<u32>,
    since: Vec<BTreeSet<u32>>,
}

impl Expected {
    fn change(&mut self, sectors: Range<usize>, to: u32, done: bool) {
        for sector in sectors {
            self.since[sector].insert(to);
            if done {
                self.current[sector] = to;
            }
        }
    }

    fn flushed(&mut self) {
        self.durable.clone_from(&self.current);
        self.since.iter_mut().for_each(BTreeSet::clear);
    }
}

fn sectors_filled_with(number: u32, sectors: usize) -> Vec<u8> {
    number.to_le_bytes().repeat(sectors * SECTOR as usize / 4)
}

fn number_in(sector: &[u8]) -> u32 {
    let first = u32::from_le_bytes(sector[..4].try_into().expect("four bytes"));
    assert!(sector == sectors_filled_with(first, 1), "a torn sector");
    first
}

/// A base layer: every other 8 sectors hold number 1.
fn base() -> (Stack, Vec<u32>) {
    let files = [(); 2].map(|()| Arc::new(MemoryFile::new("base", Vec::new())) as Arc<dyn Storage>);
    let [data, index] = files;
    let options = UpperOptions { mode: Mode::Log, ..UpperOptions::new(Bytes(SIZE), Uuid::nil()) };
    let upper = Upper::create(data, Some(index), &options).expect("create");
    let device = OverlayDevice::new(Stack::new(Vec::new()).expect("empty"), upper).expect("device");
    let mut numbers = vec![0; SECTORS];
    for at in (0..SECTORS).step_by(16) {
        device.write_at(at as u64 * SECTOR, &sectors_filled_with(1, 8)).expect("write");
        numbers[at..at + 8].fill(1);
    }
    let mut bytes = Vec::new();
    device.export_upper(&mut bytes, &Identity::fresh(Uuid::nil())).expect("export");
    (Stack::open([memory("base", bytes)]).expect("stack"), numbers)
}

/// The files of the device, as they change hands.
#[derive(Default)]
struct Files {
    sealed: Vec<Arc<LossyFile>>,
    data: Option<Arc<LossyFile>>,
    index: Option<Arc<LossyFile>>,
}

fn make(power: &Arc<Power>, options: &UpperOptions) -> Result<(Upper, Files), aenv_block_overlaybd::CreateUpperError> {
    let data = LossyFile::new(power);
    let index = (options.mode != Mode::Sparse).then(|| LossyFile::new(power));
    let storage = index.clone().map(|index| index as Arc<dyn Storage>);
    let upper = Upper::create(Arc::clone(&data) as _, storage, options)?;
    Ok((upper, Files { sealed: Vec::new(), data: Some(data), index }))
}

/// Runs the script until power fails at sync `syncs`; `None` if it did not.
fn run(mode: Mode, seed: u64, syncs: i64) -> (bool, Files, Expected) {
    let power = Arc::new(Power(AtomicI64::new(i64::MAX)));
    let options = UpperOptions { mode, ..UpperOptions::new(Bytes(SIZE), Uuid::nil()) };
    let (upper, mut files) = make(&power, &options).expect("create");
    let (lowers, numbers) = base();
    let mut expected = Expected { durable: numbers.clone(), current: numbers, since: vec![BTreeSet::new(); SECTORS] };
    let device = OverlayDevice::new(lowers, upper).expect("device");
    power.0.store(syncs + 1, Ordering::SeqCst);

    let mut random = Fate { kind: 2, random: seed };
    let failed = (2..60_u32).find(|&number| {
        let from = random.below(SECTORS as u64) as usize;
        let count = (random.below(20) as usize + 1).min(SECTORS - from);
        let (offset, sectors) = (from as u64 * SECTOR, from..from + count);
        match random.below(12) {
            0..6 => {
                let done = device.write_at(offset, &sectors_filled_with(number, count)).is_ok();
                expected.change(sectors, number, done);
                !done
            }
            6..9 => {
                let done = device.discard(offset, count as u64 * SECTOR).is_ok();
                expected.change(sectors, 0, done);
                !done
            }
            9..11 => device.flush().map(|()| expected.flushed()).is_err(),
            _ => {
                let mut next = None;
                let fresh = &mut next;
                let result = device.restack_with(
                    |options| {
                        let (upper, files) = make(&power, options)?;
                        *fresh = Some(files);
                        Ok(upper)
                    },
                    || {
                        let sealed = files.data.take().expect("open");
                        files.sealed.push(Arc::clone(&sealed));
                        Ok(sealed)
                    },
                );
                if files.data.is_none() {
                    let next = next.expect("made before");
                    (files.data, files.index) = (next.data, next.index);
                }
                result.map(|_| expected.flushed()).is_err()
            }
        }
    });
    (failed.is_some(), files, expected)
}

/// Opens what the crash left, as one would after a restart.
fn recover(mode: Mode, files: Files, fate: &mut Fate) -> OverlayDevice {
    let (base, _) = base();
    let mut layers = base.layers().to_vec();
    for sealed in files.sealed {
        layers.push(Layer::open(sealed.crash("sealed", fate)).expect("a sealed layer is durable"));
    }
    let data = files.data.expect("data").crash("data", fate);
    let index = files.index.map(|index| index.crash("index", fate) as Arc<dyn Storage>);
    let upper = match Upper::open(Arc::clone(&data) as _, index) {
        Ok(upper) => upper,
        Err(OpenUpperError::Format { source: UpperProblem::Sealed { .. }, .. }) => {
            layers.push(Layer::open(data).expect("a file with a trailer is a layer"));
            let power = Arc::new(Power(AtomicI64::new(i64::MAX)));
            let options = UpperOptions { mode, ..UpperOptions::new(Bytes(SIZE), Uuid::nil()) };
            make(&power, &options).expect("create").0
        }
        Err(error) => panic!("{error:?}"),
    };
    OverlayDevice::new(Stack::new(layers).expect("stack"), upper).expect("device")
}

fn survives_power_failure_at_every_flush(mode: Mode) {
    let mut crashes = 0;
    for seed in 1..=3_u64 {
        for syncs in 0.. {
            let mut powered = false;
            for kind in 0..5 {
                let (failed, files, expected) = run(mode, seed * 0x9E37_79B9, syncs);
                let mut fate = Fate { kind, random: seed * 31 + kind * 7 + syncs as u64 + 1 };
                let device = recover(mode, files, &mut fate);
                let bytes = read(&device, 0, SIZE);
                for (at, sector) in bytes.chunks(SECTOR as usize).enumerate() {
                    let found = number_in(sector);
                    assert!(
                        found == expected.durable[at] || expected.since[at].contains(&found),
                        "{mode:?}, seed {seed}, power failed at sync {syncs}, fate {kind}: sector {at} holds {found}, flushed \
                         was {}, then {:?}",
                        expected.durable[at],
                        expected.since[at],
                    );
                }
                // It is a device like any other again.
                device.write_at(SECTOR, &[9; 700]).expect("write");
                device.flush().expect("flush");
                assert!(read(&device, SECTOR, 700) == [9; 700]);
                crashes += 1;
                powered |= !failed;
            }
            if powered {
                break;
            }
        }
    }
    assert!(crashes > 200, "{crashes}");
}

#[test]
fn a_log_upper_survives_power_failure_at_every_flush() {
    survives_power_failure_at_every_flush(Mode::Log);
}

#[test]
fn a_hybrid_upper_survives_power_failure_at_every_flush() {
    survives_power_failure_at_every_flush(Mode::Hybrid);
}

#[test]
fn a_sparse_upper_survives_power_failure_at_every_flush() {
    survives_power_failure_at_every_flush(Mode::Sparse);
}
