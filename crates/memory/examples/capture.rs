//! How fast memory is captured, beside plain copies of the same amount to the same place:
//! `cargo run --release -p aenv-memory --example capture -- [DIRECTORY] [MIB]`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::{Duration, Instant};

use aenv_memory::{CaptureOptions, PAGE, PageRanges, capture, dirty_pages, touched_pages};
use aenv_vmm_driver::GuestMemory;
use rustix::mm::{MapFlags, ProtFlags, mmap};

const ROUNDS: usize = 9;

/// A guest of this size, whatever part of it is written.
const GUEST: u64 = 1 << 30;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args_os().skip(1);
    let dir = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let mib: u64 = arguments.next().and_then(|mib| mib.to_str()?.parse().ok()).unwrap_or(256);
    let dir = dir.join(format!("capture-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let measured = measure(&dir, mib << 20);
    std::fs::remove_dir_all(&dir)?;
    measured
}

fn measure(dir: &Path, dirty: u64) -> Result<(), Failure> {
    let plain = vec![7_u8; dirty as usize];
    let mut target = vec![1_u8; dirty as usize];
    let memcpy = best(|| (), || target.copy_from_slice(&plain));
    let path = dir.join("plain");
    let mut failure = None;
    let write = best(
        || drop(std::fs::remove_file(&path)),
        || {
            if let Err(error) = write(&path, &plain) {
                failure = Some(error);
            }
        },
    );
    failure.map_or(Ok(()), Err)?;
    std::fs::remove_file(&path)?;
    drop((plain, target));
    println!("{} MiB to {}", dirty >> 20, dir.display());
    let tell = |what: &str, took: Duration| {
        let speed = dirty as f64 / took.as_secs_f64() / 1e9;
        let ratio = took.as_secs_f64() / write.as_secs_f64();
        println!("{what:38} {:8.1} ms  {speed:5.2} GB/s  {ratio:5.2} x write", took.as_secs_f64() * 1e3);
    };
    tell("memcpy", memcpy);
    tell("write of 1 MiB each", write);

    for (name, stride, zeros) in
        [("all in one run", 1, 0), ("every other page", 2, 0), ("one run, every fourth page zeros", 1, 4)]
    {
        let image = dir.join("image");
        File::create(&image)?.set_len(GUEST)?;
        let guest = map(&image)?;
        for page in (0..dirty / PAGE).map(|n| n * stride) {
            let byte = if zeros > 0 && page % zeros == 0 { 0 } else { page as u8 | 1 };
            // SAFETY: within the mapping, which is writable and nobody else's.
            unsafe { ptr::write_bytes(guest.add((page * PAGE) as usize), byte, PAGE as usize) };
        }
        let memory = GuestMemory::of_image(std::process::id(), &image)?;
        let mut pages = PageRanges::default();
        let found = best(|| (), || pages = dirty_pages(&memory).unwrap_or_default());
        let touched = best(|| (), || drop(touched_pages(&memory)));
        println!("{name}: written pages found in {found:.2?}, touched ones in {touched:.2?}");
        assert_eq!(pages.bytes().get(), dirty);
        for threads in [1, 2, 3] {
            let options = CaptureOptions { threads, ..CaptureOptions::default() };
            let out = dir.join("layer");
            let mut failure = None;
            let took = best(
                || drop(std::fs::remove_file(&out)),
                || {
                    if let Err(error) = capture(&memory, &pages, &out, &options) {
                        failure = Some(error);
                    }
                },
            );
            failure.map_or(Ok(()), Err)?;
            tell(&format!("  capture, {threads} threads"), took);
        }
        // SAFETY: the mapping is ours, and nothing refers to it any more.
        unsafe { rustix::mm::munmap(guest.cast(), GUEST as usize) }?;
    }
    Ok(())
}

fn map(image: &Path) -> Result<*mut u8, Failure> {
    let file = File::open(image)?;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    Ok(unsafe { mmap(ptr::null_mut(), GUEST as usize, protection, MapFlags::PRIVATE, &file, 0) }?.cast())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let file = File::create(path)?;
    for (number, part) in bytes.chunks(1 << 20).enumerate() {
        file.write_all_at(part, (number as u64) << 20)?;
    }
    Ok(())
}

/// The shortest time of a few, each after `prepare`, which is not counted.
fn best(mut prepare: impl FnMut(), mut run: impl FnMut()) -> Duration {
    let time = |()| {
        prepare();
        let begun = Instant::now();
        run();
        begun.elapsed()
    };
    [(); ROUNDS].map(time).into_iter().min().unwrap_or_default()
}
