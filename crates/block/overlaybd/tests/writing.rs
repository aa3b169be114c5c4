//! What is written: layers, ZFiles and tars, against the golden files and against our own readers.

mod support;

use std::io::{Cursor, Write};
use std::sync::Arc;

use aenv_block_device::BlockDevice;
use aenv_block_overlaybd::{
    Algorithm, BlockSize, Identity, Layer, Source, Stack, TarWriter, ZFile, ZFileOptions, ZFileWriter,
};
use support::*;

#[test]
fn packing_a_golden_layer_again_gives_the_same_bytes() {
    let mut same = 0;
    for vector in vectors("layer") {
        let layer = Layer::open(open(vector)).expect("open");
        let mut bytes = Vec::new();
        let finished = layer.repack(&mut bytes, layer.identity()).expect("repack");
        assert_eq!(finished.size.get(), bytes.len() as u64, "{}", id(vector));
        let again = Layer::open(memory("again", bytes.clone())).expect("open again");
        assert_eq!(again.identity(), layer.identity(), "{}", id(vector));
        check_device(id(vector), &Stack::new(vec![again]).expect("stack"), &vector["expect"]);

        let params = &vector["params"];
        let compact = params["finish"] == "commit" && params["written_by"] == "peer";
        if compact {
            let mut golden = vec![0; layer.payload().size() as usize];
            layer.payload().read_at(0, &mut golden).expect("read");
            assert!(bytes == golden, "{}", id(vector));
            same += 1;
        }
    }
    assert!(same >= 15, "{same}");
}

#[test]
fn flattening_a_stack_maps_what_the_golden_one_maps() {
    let lowers = vector("stack-3")["lowers_bottom_to_top"].as_array().expect("lowers");
    let stack = Stack::open(lowers.iter().map(|lower| open(vector(text(lower))))).expect("stack");
    let golden = Layer::open(open(vector("st-flat"))).expect("golden");
    let mut bytes = Vec::new();
    stack.flatten(&mut bytes, golden.identity(), &mut |_| true).expect("flatten");
    let flat = Layer::open(memory("flat", bytes)).expect("open");
    assert!(sectors_of(flat.index().entries()) == sectors_of(golden.index().entries()));
    check_device("st-flat", &Stack::new(vec![flat]).expect("stack"), &vector("st-flat")["expect"]);
}

#[test]
fn flattening_stops_when_told() {
    let stack = Stack::open([open(vector("st-base"))]).expect("stack");
    let mut big = Vec::new();
    // The fixtures are small: a megabyte is a batch, so make one.
    let device = MemoryLayer::of(3 << 20);
    let large = Stack::new(vec![device]).expect("stack");
    large.flatten(&mut big, &Identity::default(), &mut |_| false).expect_err("given up");
    assert!(big.len() < 2 << 20);
    stack.flatten(&mut Vec::new(), &Identity::default(), &mut |_| true).expect("goes on");
}

/// A layer of one run of data.
struct MemoryLayer;

impl MemoryLayer {
    fn of(size: u64) -> Layer {
        use aenv_block_overlaybd::{Mode, OverlayDevice, UpperFiles, UpperOptions};
        let dir = tempfile::tempdir().expect("temp dir");
        let files = UpperFiles::in_directory(dir.path(), Mode::Log);
        let options = UpperOptions::new(aenv_model::Bytes(size), uuid::Uuid::nil());
        let options = UpperOptions { mode: Mode::Log, ..options };
        let upper = files.create(&options).expect("create");
        let device = OverlayDevice::new(Stack::new(Vec::new()).expect("empty"), upper).expect("device");
        device.write_at(0, &vec![5; size as usize]).expect("write");
        let mut bytes = Vec::new();
        device.export_upper(&mut bytes, &Identity::default()).expect("export");
        Layer::open(memory("large", bytes)).expect("open")
    }
}

#[test]
fn golden_zfiles_written_again_decompress_to_the_same() {
    for vector in vectors("zfile") {
        let golden = ZFile::open(open(vector)).expect("open").expect("a ZFile");
        let info = golden.info();
        let mut content = vec![0; golden.size() as usize];
        golden.read_at(0, &mut content).expect("read");
        for threads in [1, 3] {
            let options =
                ZFileOptions { algorithm: info.algorithm, block_size: info.block_size, verify: info.verify, threads };
            let mut writer = ZFileWriter::new(Cursor::new(Vec::new()), options).expect("new");
            let (by_bytes, by_source) = content.split_at(content.len() / 3);
            by_bytes.chunks(1000).for_each(|part| writer.write_all(part).expect("write"));
            writer.write_source(&memory("content", by_source.to_vec()), &mut |_| true).expect("write");
            let (out, summary) =
                if info.header_overwritten { writer.finish_with_header() } else { writer.finish() }.expect("finish");
            let bytes = out.into_inner();
            assert_eq!(summary.size.get(), bytes.len() as u64, "{}", id(vector));
            if info.algorithm == Algorithm::Zstd {
                let golden = std::fs::read(path(vector)).expect("golden");
                assert!(bytes == golden, "{}: zstd leaves no choice", id(vector));
            }
            let again = ZFile::open(memory("again", bytes)).expect("open").expect("a ZFile");
            let same_but_size = aenv_block_overlaybd::ZFileInfo { index_offset: 0, digest: true, ..again.info() };
            assert_eq!(same_but_size, aenv_block_overlaybd::ZFileInfo { index_offset: 0, digest: true, ..info });
            let mut back = vec![0; content.len()];
            again.read_at(0, &mut back).expect("read");
            assert!(back == content, "{}", id(vector));
        }
    }
}

#[test]
fn large_input_is_compressed_in_order_and_its_errors_come_through() {
    let mut content = vec![0; 5_000_001];
    fill(&serde_json::json!({"fill": "text", "seed": 3}), 0, &mut content);
    let options = ZFileOptions { threads: 3, ..ZFileOptions::default() };
    let mut writer = ZFileWriter::new(Vec::new(), options).expect("new");
    writer.write_all(&content[..1]).expect("write");
    writer.write_source(&memory("content", content[1..3_000_000].to_vec()), &mut |_| true).expect("write");
    writer.write_shared(bytes::Bytes::copy_from_slice(&content[3_000_000..])).expect("write");
    let (bytes, _) = writer.finish().expect("finish");
    let zfile = ZFile::open(memory("zfile", bytes)).expect("open").expect("a ZFile");
    let mut back = vec![0; content.len()];
    zfile.read_at(0, &mut back).expect("read");
    assert!(back == content);

    // A layer of which a block is damaged.
    let mut damaged = std::fs::read(path(vector("z-lz4-4k-crc"))).expect("golden");
    damaged[700] ^= 1;
    let source: Arc<dyn Source> = Arc::new(ZFile::open(memory("damaged", damaged)).expect("open").expect("a ZFile"));
    let mut writer = ZFileWriter::new(Vec::new(), options).expect("new");
    let error = writer.write_source(&source, &mut |_| true).and_then(|()| writer.finish()).expect_err("damaged");
    assert!(error.to_string().contains("damaged"), "{error}");
}

#[test]
fn an_empty_zfile_opens_with_size_0() {
    let writer = ZFileWriter::new(Vec::new(), ZFileOptions::default()).expect("new");
    let (bytes, _) = writer.finish().expect("finish");
    let zfile = ZFile::open(memory("empty", bytes)).expect("open").expect("a ZFile");
    assert_eq!(zfile.size(), 0);
    zfile.read_at(0, &mut []).expect("read nothing");
    zfile.read_at(0, &mut [0]).expect_err("there is nothing");
}

#[test]
fn a_golden_layer_wrapped_again_gives_the_golden_tar() {
    let golden = std::fs::read(path(vector("tar-pax-lsmt"))).expect("golden");
    let mut tar = TarWriter::new(Cursor::new(Vec::new())).expect("new");
    tar.write_all(&std::fs::read(path(vector("lsmt-basic"))).expect("layer")).expect("write");
    let bytes = tar.finish().expect("finish").into_inner();
    assert!(bytes == golden);
}

#[test]
fn a_layer_written_through_every_wrapping_reads_back() {
    let layer = Layer::open(open(vector("lsmt-basic"))).expect("open");
    let options = ZFileOptions { block_size: BlockSize::new(16 << 10).expect("valid"), ..ZFileOptions::default() };
    let tar = TarWriter::new(Cursor::new(Vec::new())).expect("tar");
    let mut zfile = ZFileWriter::new(tar, options).expect("zfile");
    layer.repack(&mut zfile, layer.identity()).expect("repack");
    let (tar, _) = zfile.finish().expect("finish zfile");
    let bytes = tar.finish().expect("finish tar").into_inner();
    let back = Layer::open(memory("wrapped", bytes)).expect("open");
    assert!(back.packaging().tar.is_some() && back.packaging().zfile.is_some());
    check_device("wrapped", &Stack::new(vec![back]).expect("stack"), &vector("lsmt-basic")["expect"]);
}

#[test]
fn a_damaged_cache_below_a_zfile_is_read_again() {
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Damaged until it is told to forget.
    #[derive(Debug)]
    struct Cache(Arc<dyn Source>, AtomicBool);

    impl Source for Cache {
        fn name(&self) -> &str {
            self.0.name()
        }

        fn size(&self) -> u64 {
            self.0.size()
        }

        fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
            self.0.read_at(offset, buf)?;
            let damaged = 600_u64.checked_sub(offset).and_then(|at| buf.get_mut(at as usize));
            if let Some(byte) = damaged.filter(|_| self.1.load(Ordering::SeqCst)) {
                *byte ^= 1;
            }
            Ok(())
        }

        fn forget(&self, offset: u64, length: u64) {
            if (offset..offset + length).contains(&600) {
                self.1.store(false, Ordering::SeqCst);
            }
        }
    }

    let source = Arc::new(Cache(open(vector("z-lz4-4k-crc")), AtomicBool::new(true)));
    let zfile = ZFile::open(source).expect("open").expect("a ZFile");
    let mut bytes = vec![0; 8192];
    zfile.read_at(0, &mut bytes).expect("read");
    assert!(bytes == expected(&vector("z-lz4-4k-crc")["expect"]["extents"], 0, 8192));
}
