//! The golden files and what their manifest says of them.

#![allow(dead_code)] // each test binary uses its part

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use aenv_block_device::BlockDevice;
use aenv_block_overlaybd::{LocalFile, Mapping, MemoryFile, Source, Storage};
use serde_json::Value;
use sha2::{Digest, Sha256};

pub(crate) static MANIFEST: LazyLock<Value> = LazyLock::new(|| {
    let text = std::fs::read(fixture("manifest.json")).expect("manifest");
    serde_json::from_slice(&text).expect("json")
});

pub(crate) fn fixture(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}

pub(crate) fn vectors(kind: &str) -> impl Iterator<Item = &'static Value> {
    let all = MANIFEST["vectors"].as_array().expect("vectors");
    all.iter().filter(move |vector| vector["kind"] == kind)
}

pub(crate) fn vector(id: &str) -> &'static Value {
    let all = MANIFEST["vectors"].as_array().expect("vectors");
    all.iter().find(|vector| vector["id"] == id).unwrap_or_else(|| panic!("no vector {id}"))
}

pub(crate) fn id(vector: &Value) -> &str {
    text(&vector["id"])
}

pub(crate) fn text(value: &Value) -> &str {
    value.as_str().expect("text")
}

pub(crate) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("not a number: {value}"))
}

/// The vector's first file.
pub(crate) fn path(vector: &Value) -> PathBuf {
    fixture(text(&vector["files"][0]["path"]))
}

pub(crate) fn open(vector: &Value) -> Arc<dyn Source> {
    Arc::new(LocalFile::open(&path(vector)).expect("open fixture"))
}

pub(crate) fn memory(name: &str, bytes: Vec<u8>) -> Arc<dyn Source> {
    Arc::new(MemoryFile::new(name, bytes))
}

/// The bytes of a damaged vector.
pub(crate) fn damaged(vector: &Value) -> Vec<u8> {
    let patch = &vector["patch"];
    let mut bytes = std::fs::read(fixture(text(&patch["base"]))).expect("base");
    bytes.resize(number(&patch["length"]) as usize, 0);
    for edit in patch["edits"].as_array().expect("edits") {
        let (at, new) = (number(&edit[0]) as usize, hex::decode(text(&edit[1])).expect("hex"));
        bytes[at..at + new.len()].copy_from_slice(&new);
    }
    assert_eq!(sha256(&bytes), text(&vector["files"][0]["sha256"]), "{}: the patch is wrong", id(vector));
    bytes
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

pub(crate) fn read(device: &dyn BlockDevice, offset: u64, length: u64) -> Vec<u8> {
    let mut bytes = vec![0xEE; length as usize];
    device.read_at(offset, &mut bytes).unwrap_or_else(|error| panic!("read {length} at {offset}: {error}"));
    bytes
}

/// What `range` of a device must hold that is described by `extents`.
pub(crate) fn expected(extents: &Value, offset: u64, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    for extent in extents.as_array().expect("extents") {
        let (start, size) = (number(&extent["offset"]), number(&extent["length"]));
        let (from, to) = (start.max(offset), (start + size).min(offset + length));
        if from < to {
            fill(extent, from, &mut bytes[(from - offset) as usize..(to - offset) as usize]);
        }
    }
    bytes
}

/// Bytes of a fill pattern from `offset` on.
pub(crate) fn fill(pattern: &Value, offset: u64, out: &mut [u8]) {
    match pattern["fill"].as_str() {
        None | Some("zero") => out.fill(0),
        Some("byte") => out.fill(number(&pattern["value"]) as u8),
        Some("words") => {
            let seed = number(&pattern["seed"]);
            for (at, byte) in (offset..).zip(out) {
                let mut x = seed.wrapping_add((at / 8).wrapping_mul(0x9E37_79B9_7F4A_7C15));
                x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
                x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
                x ^= x >> 31;
                *byte = x.to_le_bytes()[(at % 8) as usize];
            }
        }
        Some("text") => {
            let seed = number(&pattern["seed"]) as u32;
            for (at, byte) in (offset..).zip(out) {
                let line = format!("[{seed:08x}:{:012}]", at / 512);
                *byte = line.as_bytes()[(at % 512) as usize % line.len()];
            }
        }
        Some(other) => panic!("unknown fill {other}"),
    }
}

/// Checks a whole device against `expect`.
pub(crate) fn check_device(name: &str, device: &dyn BlockDevice, expect: &Value) {
    let size = number(&expect["virtual_size"]);
    assert_eq!(device.size().get(), size, "{name}: size");
    if let Some(digest) = expect["device_sha256"].as_str() {
        let bytes = read(device, 0, size);
        assert!(bytes == expected(&expect["extents"], 0, size), "{name}: content");
        assert_eq!(sha256(&bytes), digest, "{name}: digest");
        for (offset, length) in [(1, 1000), (511, 2), (4095, 4098), (size / 2 - 3, 70_000)] {
            let (offset, length) = (offset.min(size), length.min(size.saturating_sub(offset)));
            let range = offset as usize..(offset + length) as usize;
            assert!(read(device, offset, length) == bytes[range], "{name}: {length} at {offset}");
        }
    }
    for range in expect["ranges"].as_array().into_iter().flatten() {
        let (offset, length) = (number(&range["offset"]), number(&range["length"]));
        assert_eq!(sha256(&read(device, offset, length)), text(&range["sha256"]), "{name}: {length} at {offset}");
    }
}

/// An index as `[offset, length, position, zeroed, tag]` lists of the manifest, sector by sector.
pub(crate) fn sectors_of_json(index: &Value) -> Vec<(u64, Option<(u64, u64)>)> {
    let field = |entry: &Value, at: usize| number(&entry[at]);
    let entries = index.as_array().expect("index").iter();
    sectors(entries.map(|entry| {
        (field(entry, 0), field(entry, 1), (field(entry, 3) == 0).then(|| (field(entry, 2), field(entry, 4))))
    }))
}

pub(crate) fn sectors_of(entries: &[Mapping]) -> Vec<(u64, Option<(u64, u64)>)> {
    sectors(entries.iter().map(|entry| {
        let data = (!entry.is_zeroed()).then(|| (entry.position(), u64::from(entry.tag())));
        (entry.offset(), entry.length(), data)
    }))
}

fn sectors(entries: impl Iterator<Item = (u64, u64, Option<(u64, u64)>)>) -> Vec<(u64, Option<(u64, u64)>)> {
    entries
        .flat_map(|(offset, length, data)| {
            (0..length).map(move |n| (offset + n, data.map(|(position, tag)| (position + n, tag))))
        })
        .collect()
}

/// A file on a disk that is full beyond `room` bytes, and whose syncs fail when told.
#[derive(Debug)]
pub(crate) struct Troubled<F> {
    file: F,
    pub(crate) room: AtomicU64,
    pub(crate) broken: AtomicBool,
}

impl<F> Troubled<F> {
    pub(crate) fn new(file: F) -> Self {
        Self { file, room: AtomicU64::new(u64::MAX), broken: AtomicBool::new(false) }
    }
}

impl<F: Storage> Source for Troubled<F> {
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

impl<F: Storage> Storage for Troubled<F> {
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        if offset + buf.len() as u64 > self.room.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.file.write_at(offset, buf)
    }

    fn length(&self) -> io::Result<u64> {
        self.file.length()
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.file.set_length(length)
    }

    fn sync(&self) -> io::Result<()> {
        if self.broken.load(Ordering::SeqCst) { Err(io::Error::other("broken")) } else { self.file.sync() }
    }

    fn punch_hole(&self, offset: u64, length: u64) -> io::Result<()> {
        self.file.punch_hole(offset, length)
    }

    fn data_ranges(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        self.file.data_ranges(range)
    }
}
