//! Files of a FUSE mount, mapped; and where their pages are.

mod support;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::ptr;
use std::sync::Arc;
use std::{slice, thread};

use aenv_block_device::test_support::{Counting, Failing, MemoryDevice, Operation};
use aenv_block_device::{BlockDevice, FileDevice};
use aenv_block_export::test_support::{Opened, within};
use aenv_block_export::{Exporter, FuseOptions};
use aenv_model::Bytes;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
use rustix::process::Signal;
use support::{DIRECT, Mount, SHARED, SHARED_WRITABLE, SOON};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

#[test]
fn a_shared_file_is_read_from_its_device_once_for_all_who_map_or_read_it() {
    let Some(mount) = Mount::new() else { return };
    // The host may drop clean pages whenever it likes, or is told to. It does not do so five times in a row.
    let asked: Vec<_> = (0..5)
        .map(|_| bytes_asked_of_a_shared_device(&mount))
        .inspect(|asked| eprintln!("of 8 MiB, {asked:?} bytes were asked of the device"))
        .take_while(|asked| *asked != (8 << 20, 8 << 20))
        .collect();
    assert!(asked.len() < 5, "{asked:?}");
    mount.close();
}

/// How many bytes six readers at once take from a device of 8 MiB; and with one more, who comes when they have gone.
fn bytes_asked_of_a_shared_device(mount: &Mount) -> (u64, u64) {
    let (device, bytes) = image(8);
    let export = mount.attach("image", device.clone(), &SHARED).expect("attach");
    let read = || {
        let mut all = vec![0; 8 * MIB];
        File::open(export.path()).expect("open").read_exact_at(&mut all, 0).expect("read");
        all
    };
    let map = |flags| Map::new(&File::open(export.path()).expect("open"), 8 * MIB, ProtFlags::READ, flags);
    thread::scope(|scope| {
        for reader in 0..6 {
            let (bytes, map) = (&bytes, &map);
            scope.spawn(move || match reader % 3 {
                0 => assert!(read() == *bytes, "read"),
                1 => assert!(*map(MapFlags::PRIVATE).expect("map privately") == **bytes, "mapped privately"),
                _ => assert!(*map(MapFlags::SHARED).expect("map shared") == **bytes, "mapped shared"),
            });
        }
    });
    let first = device.counts().read_bytes;
    assert!(read() == bytes);
    assert!(*map(MapFlags::SHARED).expect("map") == *bytes);
    let then = device.counts().read_bytes;
    export.close().expect("close");
    (first, then)
}

#[test]
fn disks_on_one_layer_leave_its_pages_on_the_host_once() {
    let Some(mount) = Mount::new() else { return };
    let path = mount.scratch().join("layer");
    let layer = Arc::new(FileDevice::create(&path, Bytes::mib(8)).expect("create"));
    layer.write_at(0, &vec![7; 8 * MIB]).expect("write");
    layer.flush().expect("flush");
    let devices: Vec<_> = (0..4).map(|_| Arc::new(Counting::new(FileDevice::open(&path).expect("open")))).collect();
    let exports: Vec<_> = (0..)
        .zip(&devices)
        .map(|(number, device)| mount.attach(&format!("{number}"), device.clone(), &DIRECT).expect("attach"))
        .collect();
    for (export, device) in exports.iter().zip(&devices) {
        for _ in 0..2 {
            let mut all = vec![0; 8 * MIB];
            File::open(export.path()).expect("open").read_exact_at(&mut all, 0).expect("read");
            assert!(all == vec![7; 8 * MIB]);
        }
        assert_eq!(device.counts().read_bytes, 16 << 20, "no pages of this file: each read is the device's");
    }
    exports.into_iter().for_each(|export| export.close().expect("close"));
    mount.close();
}

#[test]
fn a_private_map_of_a_disk_sees_it_and_keeps_what_it_writes() {
    let Some(mount) = Mount::new() else { return };
    for (name, options) in [("direct", DIRECT), ("shared", SHARED), ("writable", SHARED_WRITABLE)] {
        let (device, bytes) = image(4);
        let export = mount.attach(name, device.clone(), &options).expect("attach");
        // As VMMs map guest memory: writable and private, of a file that need not be.
        let file = File::open(export.path()).expect("open");
        let mut map = Map::new(&file, 4 * MIB, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE).expect("map");
        assert!(*map == *bytes, "{name}");
        map[5 * PAGE..7 * PAGE].fill(0xEE);
        assert!(map[..5 * PAGE] == bytes[..5 * PAGE] && map[7 * PAGE..] == bytes[7 * PAGE..], "{name}: around");
        let mut other = vec![0; 4 * MIB];
        file.read_exact_at(&mut other, 0).expect("read");
        assert!(other == bytes, "{name}: others see the file");
        drop(map);
        assert_eq!(device.counts().writes, 0, "{name}");
        export.close().expect("close");
    }
    mount.close();
}

#[test]
fn what_is_written_through_a_shared_map_reaches_the_device_with_msync() {
    let Some(mount) = Mount::new() else { return };
    for (name, options) in [("direct", DIRECT), ("writable", SHARED_WRITABLE)] {
        let (device, _) = image(4);
        let export = mount.attach(name, device.clone(), &options).expect("attach");
        let file = File::options().read(true).write(true).open(export.path()).expect("open");
        let Some(mut map) = map_shared(&file, 4 * MIB, name) else { continue };
        map[3 * PAGE..4 * PAGE].fill(0xAB);
        let flushes = device.counts().flushes;
        map.sync();
        assert!(device.counts().flushes > flushes, "{name}: msync is a flush");
        assert!(on(&*device, 3 * PAGE, PAGE) == [0xAB; PAGE], "{name}");

        // And the other way: a write to the file is seen in the map.
        Opened::new(export.path(), true).expect("open").write(8 * PAGE as u64, &[0xCD; PAGE]).expect("write");
        assert!(map[8 * PAGE..9 * PAGE] == [0xCD; PAGE], "{name}: in the map");
        assert!(on(&*device, 8 * PAGE, PAGE) == [0xCD; PAGE], "{name}: on the device");
        drop(map);
        export.close().expect("close");
    }
    mount.close();
}

#[test]
fn a_close_first_writes_back_what_a_shared_map_has_changed() {
    let Some(mount) = Mount::new() else { return };
    for (name, options) in [("direct", DIRECT), ("writable", SHARED_WRITABLE)] {
        let (device, _) = image(4);
        let export = mount.attach(name, device.clone(), &options).expect("attach");
        let file = File::options().read(true).write(true).open(export.path()).expect("open");
        let Some(mut map) = map_shared(&file, 4 * MIB, name) else { continue };
        for page in 0..1024 {
            map[page * PAGE] = 0x5A;
        }
        within(SOON, "a close with a dirty map", move || export.close().expect("close"));
        assert_eq!(Arc::strong_count(&device), 1, "{name}: the device is no longer used");
        let bytes = on(&*device, 0, 4 * MIB);
        assert!((0..1024).all(|page| bytes[page * PAGE] == 0x5A), "{name}");
        drop(map);
    }
    mount.close();
}

#[test]
fn a_failed_read_of_a_shared_file_is_not_remembered() {
    let Some(mount) = Mount::new() else { return };
    let device = Arc::new(Failing::new(MemoryDevice::new(Bytes::mib(1))));
    let export = mount.attach("image", device.clone(), &SHARED).expect("attach");
    let file = File::open(export.path()).expect("open");
    device.fail(Operation::Read, 0, std::io::ErrorKind::TimedOut);
    let error = file.read_exact_at(&mut [0; PAGE], 0).expect_err("failing");
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()), "{error}");
    device.heal();
    file.read_exact_at(&mut [0; PAGE], 0).expect("healed");
    let map = Map::new(&file, MIB, ProtFlags::READ, MapFlags::SHARED).expect("map");
    assert!(map.iter().all(|byte| *byte == 0));
    drop(map);
    export.close().expect("close");
    mount.close();
}

#[test]
fn pages_of_a_closed_file_are_not_its_successors() {
    let Some(mount) = Mount::with(FuseOptions { threads: 2 }) else { return };
    for round in 0..10 {
        let device = Arc::new(MemoryDevice::new(Bytes::mib(1)));
        device.write_at(0, &[round; MIB]).expect("write to the device");
        let export = mount.attach("image", device, &SHARED).expect("attach");
        let file = File::open(export.path()).expect("open");
        let map = Map::new(&file, MIB, ProtFlags::READ, MapFlags::SHARED).expect("map");
        assert!(map.iter().all(|byte| *byte == round), "round {round}");
        export.close().expect("close");
        file.read_exact_at(&mut [0; PAGE], 0).expect_err("its pages are gone");
        drop(map);
    }
    mount.close();
}

/// What the helper maps; it does nothing when run as a test among others.
const MAPS: &str = "AENV_TEST_FUSE_MAPS";

#[test]
fn reader_that_maps() {
    let Some(path) = std::env::var_os(MAPS) else { return };
    let map = Map::new(&File::open(path).expect("open"), MIB, ProtFlags::READ, MapFlags::SHARED).expect("map");
    println!("\nmapped {}", map[0]);
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a word from the test");
    println!("\nsaw {}", map[PAGE]);
}

#[test]
fn who_touches_a_map_of_a_closed_file_dies_of_it_and_does_not_hang() {
    let Some(mount) = Mount::new() else { return };
    let device = Arc::new(MemoryDevice::new(Bytes::mib(1)));
    let export = mount.attach("image", device, &SHARED).expect("attach");
    let mut reader = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "reader_that_maps", "--nocapture"])
        .env(MAPS, export.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("spawn");
    let mut lines = BufReader::new(reader.stdout.take().expect("piped")).lines();
    assert!(lines.any(|line| line.expect("a line") == "mapped 0"));
    export.close().expect("close");
    reader.stdin.take().expect("piped").write_all(b"now\n").expect("tell");
    let status = within(SOON, "a reader of a closed file", move || reader.wait().expect("wait"));
    assert_eq!(status.signal(), Some(Signal::BUS.as_raw()), "{status}");
    mount.close();
}

/// A device of random bytes that counts.
fn image(mib: usize) -> (Arc<Counting<MemoryDevice>>, Vec<u8>) {
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let bytes: Vec<u8> = (0..mib * MIB / 8).flat_map(|_| next()).collect();
    let memory = MemoryDevice::new(Bytes::mib(mib as u64));
    memory.write_at(0, &bytes).expect("write to the device");
    (Arc::new(Counting::new(memory)), bytes)
}

fn on(device: &dyn BlockDevice, offset: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    device.read_at(offset as u64, &mut bytes).expect("read the device");
    bytes
}

/// None, said on stderr, where the kernel does not let files with direct I/O be mapped shared.
fn map_shared(file: &File, length: usize, name: &str) -> Option<Map> {
    match Map::new(file, length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED) {
        Ok(map) => Some(map),
        Err(rustix::io::Errno::NODEV) if name == "direct" => {
            eprintln!("skipped: this kernel has no shared maps of files with direct I/O (Linux 6.6)");
            None
        }
        Err(error) => panic!("map {name}: {error}"),
    }
}

/// A mapped file. Whoever changes the file meanwhile is this test itself, while it does not look.
struct Map {
    at: *mut std::ffi::c_void,
    length: usize,
}

impl Map {
    fn new(file: &File, length: usize, protection: ProtFlags, flags: MapFlags) -> rustix::io::Result<Self> {
        // SAFETY: a new mapping, at a place that the kernel chooses.
        let at = unsafe { mmap(ptr::null_mut(), length, protection, flags, file, 0)? };
        Ok(Self { at, length })
    }

    fn sync(&self) {
        // SAFETY: our mapping, whole.
        unsafe { msync(self.at, self.length, MsyncFlags::SYNC).expect("msync") }
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: our mapping, whole, of bytes.
        unsafe { slice::from_raw_parts(self.at.cast(), self.length) }
    }
}

impl DerefMut for Map {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; only tests that mapped for writing write.
        unsafe { slice::from_raw_parts_mut(self.at.cast(), self.length) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: our mapping, whole, and nobody has a slice of it any more.
        unsafe { munmap(self.at, self.length).expect("munmap") }
    }
}
