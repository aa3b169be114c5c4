//! What tools need: copies, digests, exports, inspections.

mod support;

use std::io::Write;
use std::sync::Arc;

use aenv_block_device::BlockDevice;
use aenv_block_overlaybd::{
    CopyError, Inspected, LocalFile, Mapped, MemoryFile, Mode, OverlayDevice, Sha256Writer, Stack, Storage, UpperFiles,
    UpperOptions, VerifyError, copy, digest, export, inspect, verify,
};
use aenv_model::Bytes;
use support::*;
use uuid::Uuid;

fn go_on(_: u64) -> bool {
    true
}

#[test]
fn digests_are_those_of_the_files() {
    for vector in vectors("layer").take(5) {
        let expected = text(&vector["files"][0]["sha256"]);
        assert_eq!(hex::encode(digest(&*open(vector), &mut go_on).expect("digest")), expected);
        let mut out = Sha256Writer::new(Vec::new());
        copy(&*open(vector), &mut out, &mut go_on).expect("copy");
        let (bytes, hash, size) = out.finish();
        assert_eq!((hex::encode(hash).as_str(), size.get()), (expected, bytes.len() as u64));
    }
    let given_up = copy(&*open(vector("lsmt-basic")), &mut std::io::sink(), &mut |_| false).expect_err("told to stop");
    assert!(matches!(given_up, CopyError::GivenUp(45056)), "{given_up:?}");
}

#[test]
fn exports_have_the_content_and_the_holes() {
    for vector in vectors("layer").filter(|vector| vector["expect"]["device_sha256"].is_string()) {
        let stack = Stack::open([open(vector)]).expect("open");
        let out = MemoryFile::new("out", vec![7; 100]);
        export(&stack, &out, &mut go_on).expect("export");
        assert_eq!(sha256(&out.to_vec()), text(&vector["expect"]["device_sha256"]), "{}", id(vector));
    }
    let dir = tempfile::tempdir().expect("temp dir");
    let stack = Stack::open([open(vector("lsmt-highoff"))]).expect("open");
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(dir.path().join("out"));
    let out = LocalFile::from_file(file.expect("create"), "out".to_owned());
    export(&stack, &out, &mut go_on).expect("export");
    assert_eq!(out.length().expect("length"), 64 << 30);
    let written: u64 = out.data_ranges(0..64 << 30).expect("ranges").iter().map(|range| range.end - range.start).sum();
    assert!(written < 1 << 20, "{written} bytes of 64 GiB");
}

#[test]
fn a_device_knows_where_it_has_data() {
    let dir = tempfile::tempdir().expect("temp dir");
    let files = UpperFiles::in_directory(dir.path(), Mode::Hybrid);
    let lowers = Stack::open([open(vector("lsmt-basic"))]).expect("open");
    let upper = files.create(&UpperOptions::new(Bytes::mib(1), Uuid::nil())).expect("create");
    let device = OverlayDevice::new(lowers.clone(), upper).expect("device");
    assert_eq!(device.data_ranges(), lowers.data_ranges());
    device.discard(0, 512).expect("discard");
    device.write_at(500_224, &[1; 1024]).expect("write");
    let ranges = device.data_ranges();
    assert_eq!(ranges[0].start, 512);
    assert!(ranges.contains(&(500_224..501_248)), "{ranges:?}");
    let of_upper = device.upper_ranges();
    assert_eq!((of_upper.len(), &of_upper[0]), (1, &(500_224..501_248)));
    let out = MemoryFile::new("out", Vec::new());
    export(&device, &out, &mut go_on).expect("export");
    assert!(out.to_vec() == read(&device, 0, 1 << 20));
}

#[test]
fn verifying_reads_every_block() {
    for vector in vectors("layer") {
        verify(open(vector), &mut go_on).unwrap_or_else(|error| panic!("{}: {error:?}", id(vector)));
    }
    let mut bytes = std::fs::read(path(vector("zl-lz4-4k"))).expect("layer");
    bytes[700] ^= 1;
    let error = verify(memory("damaged", bytes), &mut go_on).expect_err("a block is damaged");
    let VerifyError::Read(CopyError::Read { source, .. }) = error else { panic!("{error:?}") };
    assert!(source.to_string().contains("block 0 of damaged") || source.to_string().contains("damaged"), "{source}");
}

#[test]
fn a_damaged_block_of_data_near_the_index_does_not_keep_a_layer_from_opening() {
    let mut bytes = std::fs::read(path(vector("zl-lz4-4k"))).expect("layer");
    bytes[700] ^= 1; // within the first data, and within the last 64 KiB
    let stack = Stack::open([memory("damaged", bytes)]).expect("open");
    stack.read_at(0, &mut [0; 512]).expect_err("the damaged block");
    let sound = Stack::open([open(vector("zl-lz4-4k"))]).expect("open");
    assert_eq!(read(&stack, 102_400, 4096), read(&sound, 102_400, 4096));
}

#[test]
fn inspection_tells_every_kind() {
    let kind = |path: &str| {
        let source = LocalFile::open(&fixture(path)).expect("open");
        inspect(Arc::new(source)).unwrap_or_else(|error| panic!("{path}: {error:?}")).content
    };
    match kind("zlsmt/zl-tar-lz4-4k.commit") {
        Inspected::Layer { packaging, sealed_from: None, header, .. } => {
            assert!(packaging.tar.is_some() && packaging.zfile.is_some());
            assert_eq!(header.virtual_size, Bytes::mib(1));
        }
        other => panic!("{other:?}"),
    }
    match kind("lsmt/lsmt-sealed-sparse.sealed") {
        Inspected::Layer { sealed_from: Some(Mode::Sparse), unused, .. } => assert!(unused > Bytes(0)),
        other => panic!("{other:?}"),
    }
    assert!(matches!(kind("upper/upper-hybrid.data"), Inspected::UpperData { mode: Mode::Hybrid, .. }));
    assert!(matches!(kind("upper/upper-log.index"), Inspected::UpperIndex { log_entries: 10, .. }));
    assert!(matches!(kind("zfile/z-tiny.zfile"), Inspected::ZFile { .. }));
    inspect(memory("text", b"hello".to_vec())).expect_err("nothing of ours");
    let mut half = std::fs::read(fixture("lsmt/lsmt-basic.commit")).expect("layer");
    half.truncate(30_000);
    inspect(memory("half", half)).expect_err("a sealed header without a trailer is no upper");

    let inspection = inspect(open(vector("lsmt-basic"))).expect("inspect");
    let json = serde_json::to_value(&inspection).expect("json");
    assert_eq!(json["content"]["kind"], "layer");
    assert_eq!(json["content"]["header"]["uuid"], "0bd00051-0000-4000-8000-000000000001");
    assert_eq!(json["content"]["entries"], 9);
    std::io::sink().write_all(json.to_string().as_bytes()).expect("sink");
}

#[test]
fn reads_of_one_zfile_overlap() {
    use std::sync::{Barrier, mpsc};
    use std::time::Duration;

    use aenv_block_overlaybd::{Source, ZFile};

    /// Lets data reads through only in pairs.
    #[derive(Debug)]
    struct Pairs(Arc<dyn Source>, Barrier);

    impl Source for Pairs {
        fn name(&self) -> &str {
            self.0.name()
        }

        fn size(&self) -> u64 {
            self.0.size()
        }

        fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
            if std::thread::current().name() == Some("pair") {
                self.1.wait();
            }
            self.0.read_at(offset, buf)
        }
    }

    let source = Arc::new(Pairs(open(vector("z-lz4-4k-crc")), Barrier::new(2)));
    let zfile = Arc::new(ZFile::open(source).expect("open").expect("a ZFile"));
    let (done, finished) = mpsc::channel();
    for reader in 0..2_u64 {
        let (zfile, done) = (Arc::clone(&zfile), done.clone());
        let read = move || done.send(zfile.read_at(reader * 4096, &mut [0; 4096]).is_ok()).expect("send");
        std::thread::Builder::new().name("pair".to_owned()).spawn(read).expect("spawn");
    }
    for _ in 0..2 {
        assert!(finished.recv_timeout(Duration::from_secs(20)).expect("one read waits for the other to end"));
    }
}
