//! Uppers made by the reference tools open right, and ours are the same byte for byte where the format leaves no choice.

mod support;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use aenv_block_device::BlockDevice;
use aenv_block_overlaybd::{
    Header, Layer, LocalFile, Mode, OpenDeviceError, OpenUpperError, OverlayDevice, Stack, UpperFiles, UpperOptions,
    UpperProblem, UpperState,
};
use aenv_model::Bytes;
use serde_json::Value;
use support::*;
use tempfile::TempDir;

/// Copies a golden upper into `dir`, with its holes.
fn install(vector: &Value, dir: &Path) -> UpperFiles {
    let sparse = vector["layout"] == "sparse";
    let files = UpperFiles { data: dir.join("data"), index: (!sparse).then(|| dir.join("index")) };
    if sparse {
        let packed = std::fs::read(path(vector)).expect("packed");
        let file = std::fs::File::create(&files.data).expect("create");
        file.set_len(number(&vector["sparse_file"]["size"])).expect("set length");
        let mut rest = &packed[..];
        for segment in vector["sparse_file"]["segments"].as_array().expect("segments") {
            let (now, later) = rest.split_at(number(&segment[1]) as usize);
            file.write_all_at(now, number(&segment[0])).expect("write");
            rest = later;
        }
    } else {
        for (file, to) in
            vector["files"].as_array().expect("files").iter().zip([&files.data].into_iter().chain(&files.index))
        {
            std::fs::copy(fixture(text(&file["path"])), to).expect("copy");
        }
    }
    files
}

fn stack(id: &str) -> Stack {
    let lowers = vector(id)["lowers_bottom_to_top"].as_array().expect("lowers");
    Stack::open(lowers.iter().map(|lower| open(vector(text(lower))))).expect("stack")
}

fn no_lowers() -> Stack {
    Stack::new(Vec::new()).expect("empty stack")
}

#[test]
fn every_upper_opens_alone_and_on_its_stack() {
    let mut seen = 0;
    for vector in vectors("upper") {
        let dir = TempDir::new().expect("temp dir");
        let files = install(vector, dir.path());
        assert_eq!(files.state().expect("state"), UpperState::Open);
        let upper = files.open().unwrap_or_else(|error| panic!("{}: {error:?}", id(vector)));
        if number(&vector["expect"]["virtual_size"]) == 0 {
            let error = OverlayDevice::new(no_lowers(), upper).expect_err("no size");
            assert!(matches!(error, OpenDeviceError::NoSize), "{error:?}");
        } else {
            let device = OverlayDevice::new(no_lowers(), upper).expect("device");
            check_device(id(vector), &device, &vector["expect"]);
        }
        let stacked = &vector["stacked"];
        if stacked.is_object() {
            let upper = files.open().expect("open again");
            let device = OverlayDevice::new(stack(text(&stacked["lower_stack"])), upper).expect("device");
            check_device(id(vector), &device, stacked);
        }
        seen += 1;
    }
    assert_eq!(seen, 6);
}

#[test]
fn an_upper_without_a_size_takes_that_of_its_stack_and_keeps_it() {
    let dir = TempDir::new().expect("temp dir");
    let files = install(vector("upper-empty"), dir.path());
    let device = OverlayDevice::new(stack("stack-2"), files.open().expect("open")).expect("device");
    let size = device.size();
    assert_ne!(size, Bytes(0));
    drop(device);
    assert_eq!(files.open().expect("open").virtual_size(), size);
    let index = std::fs::read(files.index.expect("index")).expect("read");
    assert_eq!(Header::parse(&index, 0).expect("header").virtual_size, size);
}

#[test]
fn every_golden_upper_can_be_continued_and_sealed() {
    for vector in vectors("upper").filter(|vector| id(vector) != "upper-empty") {
        let dir = TempDir::new().expect("temp dir");
        let files = install(vector, dir.path());
        let lowers = stack("stack-2");
        let device = OverlayDevice::new(lowers.clone(), files.open().expect("open")).expect("device");
        device.write_at(20_000, &[0xAB; 10_000]).expect("write");
        device.discard(70_000, 5000).expect("discard");
        let expected = read(&device, 0, device.size().get());
        let layer = dir.path().join("layer");
        device.restack(&files, &layer).expect("restack");
        assert!(read(&device, 0, device.size().get()) == expected, "{}: restacked", id(vector));
        device.write_at(0, b"after").expect("the fresh upper takes writes");
        let mut layers = lowers.layers().to_vec();
        layers.push(Layer::open(Arc::new(LocalFile::open(&layer).expect("open"))).expect("layer"));
        let reopened = Stack::new(layers).expect("stack");
        assert!(read(&reopened, 0, device.size().get()) == expected, "{}: reopened", id(vector));
    }
}

/// The writes that made the golden uppers, read off the index log of the log-structured one.
fn replay(device: &OverlayDevice, bytes_of: &[u8]) {
    for entry in vector("upper-log")["index_log"].as_array().expect("log") {
        let field = |at: usize| number(&entry[at]) * 512;
        let (offset, length, position, zeroed) = (field(0), field(1), field(2), field(3) != 0);
        if zeroed {
            device.discard(offset, length).expect("discard");
        } else {
            let data = &bytes_of[position as usize..(position + length) as usize];
            device.write_at(offset, data).expect("write");
        }
    }
    device.flush().expect("flush");
}

#[test]
fn the_same_writes_give_the_same_files() {
    let golden_data = std::fs::read(fixture("upper/upper-log.data")).expect("golden");
    for (mode, golden, sealed) in
        [(Mode::Log, "upper-log", "rs-sealed-log"), (Mode::Hybrid, "upper-hybrid", "rs-sealed-hybrid")]
    {
        let dir = TempDir::new().expect("temp dir");
        let files = UpperFiles::in_directory(dir.path(), mode);
        let file = |n: usize| std::fs::read(fixture(text(&vector(golden)["files"][n]["path"]))).expect("golden");
        let header = Header::parse(&file(0), 0).expect("header");
        let options = UpperOptions { mode, virtual_size: header.virtual_size, identity: header.identity };
        let device = OverlayDevice::new(no_lowers(), files.create(&options).expect("create")).expect("device");
        replay(&device, &golden_data);
        assert!(std::fs::read(&files.data).expect("read") == file(0), "{golden}: data");
        assert!(std::fs::read(files.index.as_ref().expect("index")).expect("read") == file(1), "{golden}: index");

        let sealed = vector(sealed);
        let identity = Layer::open(open(sealed)).expect("golden layer").identity().clone();
        let options = UpperOptions { identity, ..options };
        let device = OverlayDevice::new(no_lowers(), files.create(&options).expect("create")).expect("device");
        replay(&device, &golden_data);
        let layer = dir.path().join("layer");
        let restacked = device.restack(&files, &layer).expect("restack");
        let bytes = std::fs::read(&layer).expect("read");
        assert_eq!(restacked.size.get(), bytes.len() as u64);
        assert!(bytes == std::fs::read(path(sealed)).expect("golden"), "{golden}: sealed");
        assert_eq!(device.upper().identity().parent, restacked.layer.identity().uuid);
    }
}

#[test]
fn exporting_an_upper_gives_the_golden_layer_but_for_tags() {
    let dir = TempDir::new().expect("temp dir");
    let files = install(vector("upper-log"), dir.path());
    let device = OverlayDevice::new(stack("stack-2"), files.open().expect("open")).expect("device");
    let golden = Layer::open(open(vector("rs-export"))).expect("golden");
    let mut bytes = Vec::new();
    let finished = device.export_upper(&mut bytes, golden.identity()).expect("export");
    assert_eq!(finished.size.get(), bytes.len() as u64);
    assert_eq!(golden.identity().parent, device.lowers().layers().last().expect("top").identity().uuid);
    let mut expected = std::fs::read(path(vector("rs-export"))).expect("golden");
    clear_tags(&mut expected, golden.trailer());
    assert!(bytes == expected);
    let mut committed = Vec::new();
    device.upper().commit(&mut committed, golden.identity()).expect("commit");
    assert!(committed == expected);
}

/// Tags on disk are leftovers of the tool that wrote them.
fn clear_tags(layer: &mut [u8], trailer: &Header) {
    for entry in 0..trailer.index_count {
        layer[(trailer.index_offset + entry * 16 + 15) as usize] = 0;
    }
}

#[test]
fn every_damaged_upper_is_refused_or_read_without_the_damage() {
    let mut seen = 0;
    for vector in vectors("corrupt").filter(|vector| id(vector).starts_with("bad-u-")) {
        let dir = TempDir::new().expect("temp dir");
        let files = UpperFiles { data: dir.path().join("data"), index: Some(dir.path().join("index")) };
        let index = files.index.as_ref().expect("index");
        if let Some(pair) = vector["pair_data"].as_str() {
            std::fs::copy(fixture(pair), &files.data).expect("copy");
            std::fs::write(index, damaged(vector)).expect("write");
        } else {
            std::fs::copy(fixture(text(&vector["pair_index"])), index).expect("copy");
            std::fs::write(&files.data, damaged(vector)).expect("write");
        }
        match (id(vector), files.open()) {
            ("bad-u-index-odd", Ok(upper)) => {
                let device = OverlayDevice::new(no_lowers(), upper).expect("device");
                check_device(id(vector), &device, &support::vector("upper-log")["expect"]);
                device.write_at(4096, &[3; 512]).expect("write");
                device.flush().expect("flush");
                let length = index.metadata().expect("stat").len();
                assert!(length.is_multiple_of(16), "the torn entry is overwritten");
            }
            ("bad-u-sealed-as-rw", Err(OpenUpperError::Format { source: UpperProblem::Sealed { .. }, .. })) => {
                assert_eq!(files.state().expect("state"), UpperState::Sealed);
            }
            ("bad-u-both-flags", Err(OpenUpperError::Format { source: UpperProblem::Header(_), .. })) => {}
            (id, result) => panic!("{id}: {result:?}"),
        }
        seen += 1;
    }
    assert_eq!(seen, 3);
}

#[test]
fn a_foreign_trailer_at_the_end_of_the_data_does_not_seal_an_upper() {
    let dir = TempDir::new().expect("temp dir");
    let files = UpperFiles::in_directory(dir.path(), Mode::Log);
    let options = UpperOptions { mode: Mode::Log, ..UpperOptions::new(Bytes::mib(1), uuid::Uuid::nil()) };
    let device = OverlayDevice::new(no_lowers(), files.create(&options).expect("create")).expect("device");
    let layer = std::fs::read(path(vector("lsmt-basic"))).expect("layer");
    device.write_at(0, &layer).expect("a guest copies a layer");
    device.flush().expect("flush");
    drop(device);
    let device = OverlayDevice::new(no_lowers(), files.open().expect("still an upper")).expect("device");
    assert!(read(&device, 0, layer.len() as u64) == layer);
}

#[test]
fn data_and_index_of_different_uppers_do_not_open() {
    let dir = TempDir::new().expect("temp dir");
    let files = install(vector("upper-log"), dir.path());
    std::fs::copy(fixture("upper/upper-log-batched.index"), files.index.as_ref().expect("index")).expect("copy");
    let error = files.open().expect_err("mixed");
    assert!(matches!(error, OpenUpperError::Format { source: UpperProblem::OtherUpper { .. }, .. }), "{error:?}");
}

#[test]
fn an_entry_past_the_data_is_ignored() {
    let dir = TempDir::new().expect("temp dir");
    let files = install(vector("upper-log"), dir.path());
    let index = std::fs::OpenOptions::new().append(true).open(files.index.as_ref().expect("index")).expect("open");
    let mut entry = (8_u64 << 50).to_le_bytes().to_vec();
    entry.extend_from_slice(&1000_u64.to_le_bytes());
    std::io::Write::write_all(&mut &index, &entry).expect("append");
    let device = OverlayDevice::new(no_lowers(), files.open().expect("open")).expect("device");
    check_device("upper-log", &device, &vector("upper-log")["expect"]);
}

#[test]
fn a_writer_of_a_sealed_upper_is_refused_and_its_reader_is_not() {
    let dir = TempDir::new().expect("temp dir");
    let files = UpperFiles::in_directory(dir.path(), Mode::Hybrid);
    let upper = files.create(&UpperOptions::new(Bytes::mib(1), uuid::Uuid::nil())).expect("create");
    let device = OverlayDevice::new(no_lowers(), upper).expect("device");
    device.write_at(0, b"kept").expect("write");
    device.upper().seal().expect("seal");
    assert_eq!(device.write_at(0, b"lost").expect_err("sealed").kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    device.discard(0, 512).expect_err("sealed");
    device.flush().expect("everything is durable");
    assert_eq!(read(&device, 0, 4), b"kept");
    assert!(device.upper().seal().is_err(), "only once");
    assert!(matches!(files.open(), Err(OpenUpperError::Format { source: UpperProblem::Sealed { .. }, .. })));
}
