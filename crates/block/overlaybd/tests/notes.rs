//! A process ends without a flush, its host goes on: what was written is there. And when it must not count, it does not.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aenv_block_device::BlockDevice;
use aenv_block_overlaybd::{
    LocalFile, Mode, OverlayDevice, Source, Stack, Upper, UpperFiles, UpperOptions, UpperState,
};
use aenv_model::Bytes;
use support::*;
use tempfile::TempDir;
use uuid::Uuid;

const SIZE: Bytes = Bytes::mib(1);
const HEADER: u64 = 64;
const ENTRY: u64 = 16;

struct Rig {
    dir: TempDir,
    files: UpperFiles,
}

impl Rig {
    fn new(mode: Mode) -> Self {
        let dir = TempDir::new().expect("temp dir");
        let files = UpperFiles::in_directory(dir.path(), mode);
        files.create(&UpperOptions { mode, ..UpperOptions::new(SIZE, Uuid::nil()) }).expect("create");
        Self { dir, files }
    }

    fn notes(&self) -> PathBuf {
        self.dir.path().join("notes")
    }

    fn length(&self) -> u64 {
        fs::metadata(self.notes()).expect("the notes").len()
    }

    fn open(&self) -> OverlayDevice {
        let mut upper = self.files.open().expect("open");
        upper.take_notes(&self.notes()).expect("take notes");
        OverlayDevice::new(Stack::new(Vec::new()).expect("stack"), upper).expect("device")
    }
}

#[test]
fn what_was_not_flushed_outlives_the_process() {
    for mode in [Mode::Log, Mode::Hybrid, Mode::Sparse] {
        let rig = Rig::new(mode);
        let device = rig.open();
        device.write_at(0, &[1; 8192]).expect("write");
        device.flush().expect("flush");
        for round in 2..6_u8 {
            device.write_at(4096, &[round; 4096]).expect("rewrite");
            device.write_at(u64::from(round) << 16, &[round; 5000]).expect("write");
        }
        device.discard(0, 4096).expect("discard");
        drop(device); // as by SIGKILL: nothing is flushed then either

        for _ in 0..3 {
            let device = rig.open(); // and ends at once, each time
            assert_eq!(read(&device, 0, 4096), [0; 4096], "{mode:?}");
            assert_eq!(read(&device, 4096, 4096), [5; 4096], "{mode:?}");
            for round in 2..6_u8 {
                assert_eq!(read(&device, u64::from(round) << 16, 5000), [round; 5000], "{mode:?}");
            }
        }
        let device = rig.open();
        device.flush().expect("flush");
        drop(device);
        let _ = fs::remove_file(rig.notes());
        assert_eq!(read(&rig.open(), 4096, 4096), [5; 4096], "{mode:?}, flushed after it was found");
    }
}

#[test]
fn a_flush_empties_the_notes() {
    let rig = Rig::new(Mode::Log);
    let device = rig.open();
    for _ in 0..3 {
        assert_eq!(rig.length(), HEADER);
        (0..10).for_each(|number| device.write_at(number * 8192, &[1; 4096]).expect("write"));
        assert_eq!(rig.length(), HEADER + 10 * ENTRY);
        device.flush().expect("flush");
    }
    assert_eq!(rig.length(), HEADER);
}

#[test]
fn notes_that_were_flushed_already_give_back_nothing_that_is_in_use() {
    let rig = Rig::new(Mode::Log);
    let device = rig.open();
    device.discard(0, 65536).expect("discard");
    device.write_at(0, &[1; 65536]).expect("write");
    let notes = fs::read(rig.notes()).expect("read");
    device.flush().expect("flush");
    drop(device);
    fs::write(rig.notes(), notes).expect("restore"); // as if the end had come just before they were emptied
    let device = rig.open();
    device.flush().expect("flush");
    assert_eq!(read(&device, 0, 65536), [1; 65536]);
}

#[test]
fn an_entry_that_was_cut_was_never_answered() {
    let rig = Rig::new(Mode::Log);
    let device = rig.open();
    device.write_at(0, &[1; 4096]).expect("write");
    device.write_at(0, &[2; 4096]).expect("write");
    drop(device);
    let notes = fs::read(rig.notes()).expect("read");
    fs::write(rig.notes(), &notes[..notes.len() - 3]).expect("cut");
    let device = rig.open();
    assert_eq!(read(&device, 0, 4096), [1; 4096]);
    device.write_at(8192, &[3; 4096]).expect("write");
    drop(device);
    let device = rig.open();
    assert_eq!((read(&device, 0, 4096), read(&device, 8192, 4096)), (vec![1; 4096], vec![3; 4096]));
}

#[test]
fn after_a_start_of_the_host_the_last_flush_counts() {
    // From byte 16 on: which start of the host. From byte 32 on: which upper.
    for (byte, what) in [(16, "another start of the host"), (32, "another upper"), (0, "something else")] {
        let rig = Rig::new(Mode::Log);
        let device = rig.open();
        device.write_at(0, &[1; 4096]).expect("write");
        device.flush().expect("flush");
        device.write_at(0, &[2; 4096]).expect("write");
        drop(device);
        let mut notes = fs::read(rig.notes()).expect("read");
        notes[byte] ^= 1;
        fs::write(rig.notes(), &notes).expect("write");
        let device = rig.open();
        assert_eq!(read(&device, 0, 4096), [1; 4096], "{what}");
        assert_eq!(rig.length(), HEADER, "{what}");
    }
}

#[test]
fn an_entry_that_points_nowhere_is_refused() {
    let rig = Rig::new(Mode::Log);
    let device = rig.open();
    device.write_at(0, &[1; 4096]).expect("write");
    drop(device);
    fs::OpenOptions::new().write(true).open(&rig.files.data).expect("open").set_len(4096).expect("cut");
    let error = rig.files.open().expect("open").take_notes(&rig.notes()).expect_err("its data is gone");
    assert!(error.to_string().contains("take notes at"), "{error}");
}

#[test]
fn a_restack_begins_new_notes() {
    let rig = Rig::new(Mode::Hybrid);
    let device = rig.open();
    device.write_at(0, &[1; 4096]).expect("write");
    let layer = rig.dir.path().join("layer");
    device.restack(&rig.files, &layer).expect("restack");
    assert_eq!(rig.length(), HEADER);
    device.write_at(4096, &[2; 4096]).expect("write");
    drop(device);
    let lowers = Stack::open([Arc::new(LocalFile::open(&layer).expect("open")) as Arc<dyn Source>]).expect("stack");
    let mut upper = rig.files.open().expect("open");
    upper.take_notes(&rig.notes()).expect("take notes");
    let device = OverlayDevice::new(lowers, upper).expect("device");
    assert_eq!(read(&device, 0, 8192), [[1; 4096], [2; 4096]].concat());
    drop(device);
    let files = fs::read_dir(rig.dir.path()).expect("list").count();
    assert_eq!(files, 4, "data, index, layer, notes");
    assert_eq!(rig.files.state().expect("state"), UpperState::Open);
}

#[test]
fn after_a_failed_sync_nothing_that_was_noted_comes_back() {
    let rig = Rig::new(Mode::Log);
    let device = rig.open();
    device.write_at(0, &[1; 4096]).expect("write");
    device.flush().expect("flush");
    drop(device);
    let open = |path: &Path| Arc::new(Troubled::new(LocalFile::open_writable(path).expect("open")));
    let (data, index) = (open(&rig.files.data), rig.files.index.as_deref().map(open));
    let mut upper = Upper::open(data.clone(), index.clone().map(|index| index as _)).expect("open");
    upper.take_notes(&rig.notes()).expect("take notes");
    let device = OverlayDevice::new(Stack::new(Vec::new()).expect("stack"), upper).expect("device");
    device.write_at(0, &[2; 4096]).expect("write");
    index.iter().chain([&data]).for_each(|file| file.broken.store(true, Ordering::SeqCst));
    device.flush().expect_err("the sync fails");
    device.write_at(4096, &[2; 4096]).expect_err("refused from now on");
    drop(device);
    assert_eq!(read(&rig.open(), 0, 8192), [[1; 4096], [0; 4096]].concat());
}
