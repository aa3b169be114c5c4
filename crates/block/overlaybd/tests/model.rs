//! Random use of a device agrees with a vector of bytes, whatever it is made of and however often it is opened again.

mod support;

use std::path::PathBuf;
use std::sync::Arc;

use aenv_block_device::BlockDevice;
use aenv_block_overlaybd::{
    Identity, Layer, LocalFile, Mode, OverlayDevice, Stack, UpperFiles, UpperOptions, ZFileOptions, ZFileWriter,
};
use aenv_model::Bytes;
use proptest::prelude::*;
use support::*;
use tempfile::TempDir;
use uuid::Uuid;

const SIZE: u64 = 192 << 10;

#[derive(Debug, Clone)]
enum Step {
    Write {
        offset: u64,
        length: u64,
        byte: u8,
    },
    Discard {
        offset: u64,
        length: u64,
    },
    Read {
        offset: u64,
        length: u64,
    },
    Flush,
    Restack,
    Compact,
    /// Close, pack all layers into one, compressed, and open again.
    Flatten,
    Reopen,
    /// The process ends without a flush, the host does not; `noted` says that the end came between the last flush and taking
    /// its entries off the notes.
    Die {
        noted: bool,
    },
    Resize {
        sectors: u64,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let range = || {
        // Aligned half of the time: the unaligned half reads before it writes.
        (0..SIZE, 0..40_000_u64, prop_oneof![Just(1_u64), Just(512), Just(4096)])
            .prop_map(|(offset, length, unit)| (offset / unit * unit, length / unit * unit))
    };
    let step = prop_oneof![
        8 => (range(), 1..=255_u8).prop_map(|((offset, length), byte)| Step::Write { offset, length, byte }),
        3 => range().prop_map(|(offset, length)| Step::Discard { offset, length }),
        4 => range().prop_map(|(offset, length)| Step::Read { offset, length }),
        1 => Just(Step::Flush),
        2 => Just(Step::Restack),
        1 => Just(Step::Compact),
        1 => Just(Step::Flatten),
        2 => Just(Step::Reopen),
        3 => any::<bool>().prop_map(|noted| Step::Die { noted }),
        1 => (100..500_u64).prop_map(|sectors| Step::Resize { sectors }),
    ];
    prop::collection::vec(step, 1..40)
}

struct World {
    dir: TempDir,
    files: UpperFiles,
    device: Option<OverlayDevice>,
    model: Vec<u8>,
    made: usize,
}

impl World {
    fn new(mode: Mode, base: &[u8]) -> Self {
        let dir = TempDir::new().expect("temp dir");
        let files = UpperFiles::in_directory(dir.path(), mode);
        let mut upper =
            files.create(&UpperOptions { mode, ..UpperOptions::new(Bytes(SIZE), Uuid::nil()) }).expect("create");
        upper.take_notes(&dir.path().join("notes")).expect("notes");
        let lowers = Stack::open([memory("base", base.to_vec())]).expect("base");
        let mut model = vec![0; SIZE as usize];
        lowers.read_at(0, &mut model).expect("read");
        let device = Some(OverlayDevice::new(lowers, upper).expect("device"));
        Self { dir, files, device, model, made: 0 }
    }

    fn device(&self) -> &OverlayDevice {
        self.device.as_ref().expect("open")
    }

    fn reopen(&mut self, lowers: Stack) {
        self.device().flush().expect("flush");
        self.reopen_unflushed(lowers);
    }

    fn reopen_unflushed(&mut self, lowers: Stack) {
        self.device = None;
        let mut upper = self.files.open().expect("open upper");
        upper.take_notes(&self.notes()).expect("notes");
        self.device = Some(OverlayDevice::new(lowers, upper).expect("device"));
    }

    fn notes(&self) -> PathBuf {
        self.dir.path().join("notes")
    }

    fn path(&mut self) -> PathBuf {
        self.made += 1;
        self.dir.path().join(format!("layer-{}", self.made))
    }

    fn run(&mut self, step: &Step) {
        let size = self.model.len() as u64;
        let clip = |offset: u64, length: u64| {
            let offset = offset.min(size);
            (offset, length.min(size - offset))
        };
        match *step {
            Step::Write { offset, length, byte } => {
                let (offset, length) = clip(offset, length);
                let bytes: Vec<u8> = (0..length).map(|at| byte ^ (at / 512) as u8).collect();
                self.device().write_at(offset, &bytes).expect("write");
                self.model[offset as usize..(offset + length) as usize].copy_from_slice(&bytes);
            }
            Step::Discard { offset, length } => {
                let (offset, length) = clip(offset, length);
                self.device().discard(offset, length).expect("discard");
                self.model[offset as usize..(offset + length) as usize].fill(0);
            }
            Step::Read { offset, length } => {
                let (offset, length) = clip(offset, length);
                let expected = &self.model[offset as usize..(offset + length) as usize];
                assert!(read(self.device(), offset, length) == expected, "{length} at {offset}");
            }
            Step::Flush => self.device().flush().expect("flush"),
            Step::Restack => {
                let path = self.path();
                self.device().restack(&self.files, &path).expect("restack");
            }
            Step::Compact => {
                let depth = self.device().lowers().layers().len();
                if depth > 2 {
                    let path = self.path();
                    self.device().compact(1..depth, &path, &mut |_| true).expect("compact");
                }
            }
            Step::Flatten => {
                let path = self.path();
                let out = std::fs::File::create(&path).expect("create");
                let options = ZFileOptions { threads: 1, ..ZFileOptions::default() };
                let mut out = ZFileWriter::new(out, options).expect("zfile");
                let flat = Identity::fresh(Uuid::nil());
                self.device().lowers().flatten(&mut out, &flat, &mut |_| true).expect("flatten");
                out.finish_with_header().expect("finish");
                let layer = Layer::open(Arc::new(LocalFile::open(&path).expect("open"))).expect("layer");
                self.reopen(Stack::new(vec![layer]).expect("stack"));
            }
            Step::Reopen => self.reopen(self.device().lowers()),
            Step::Die { noted } => {
                let notes = std::fs::read(self.notes()).ok().filter(|_| noted);
                if let Some(notes) = notes {
                    self.device().flush().expect("flush");
                    std::fs::write(self.notes(), notes).expect("restore the notes");
                }
                self.reopen_unflushed(self.device().lowers());
            }
            Step::Resize { sectors } => {
                self.device().resize(Bytes(sectors * 512)).expect("resize");
                self.model.resize(sectors as usize * 512, 0);
            }
        }
    }

    fn check(&self) {
        let size = self.model.len() as u64;
        assert_eq!(self.device().size(), Bytes(size));
        assert!(read(self.device(), 0, size) == self.model);
    }
}

fn base() -> Vec<u8> {
    std::fs::read(path(vector("lsmt-basic"))).expect("base")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_device_behaves_like_a_vector(
        mode in prop_oneof![Just(Mode::Log), Just(Mode::Hybrid), Just(Mode::Sparse)],
        steps in steps(),
    ) {
        let mut world = World::new(mode, &base());
        for step in &steps {
            world.run(step);
        }
        world.check();
        world.run(&Step::Reopen);
        world.check();
    }
}
