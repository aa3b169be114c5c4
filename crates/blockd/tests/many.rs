//! Many devices at once, by callers who know nothing of one another.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aenv_block_client::{BlockdClient, DeviceSpec, ErrorKind, Uppers};
use aenv_model::Bytes;
use support::{Host, block_on, layer_file, open, pattern, read};

const SIZE: u64 = 4 << 20;
const BLOCK: u64 = 4096;
const TIME: Duration = Duration::from_secs(5);

#[test]
#[ignore = "run by other tests"]
fn the_daemon_of_a_test() {
    support::be_a_daemon();
}

/// Chance, the same for a seed.
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// What a caller knows of its device.
struct Known {
    path: PathBuf,
    size: u64,
    content: Vec<u8>,
    /// It was closed and made again: what its restacks made before is the caller's.
    reopened: bool,
}

/// One caller: whatever comes to its mind, with the devices `name-0` and `name-1`.
fn caller(host: &Host, number: u64, base: &[PathBuf], fresh: &[u8]) -> BTreeMap<String, Known> {
    let client = host.client();
    let mut chance = Chance(number);
    let mut known: BTreeMap<String, Known> = BTreeMap::new();
    let end = Instant::now() + TIME;
    let mut layers = 0;
    while Instant::now() < end {
        let name = format!("device{number}-{}", chance.below(2));
        let Some(device) = known.get_mut(&name) else {
            let spec = host.spec(&name, base, None);
            let view = block_on(client.create(&name, &spec)).unwrap();
            known.insert(name, Known { path: view.path, size: SIZE, content: fresh.to_vec(), reopened: false });
            continue;
        };
        match chance.below(12) {
            0..5 => {
                let (offset, bytes) =
                    (chance.below(device.size / BLOCK - 4) * BLOCK, pattern(chance.0, 3 * BLOCK as usize));
                open(&device.path).write_all_at(&bytes, offset).unwrap();
                device.content[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
            5..8 => assert!(read(&device.path, 0, device.size as usize) == device.content, "{name}"),
            8..10 => {
                layers += 1;
                let layer = host.upper_dir(&name).join(format!("layer{layers}.commit"));
                block_on(client.restack(&name, &layer)).unwrap();
            }
            10 => {
                if let Some(resized) = host.resize(&name, Bytes(device.size + 16 * BLOCK)) {
                    device.size = resized.size.get();
                    device.content.resize(device.size as usize, 0);
                }
            }
            _ => {
                let uppers = if chance.below(3) == 0 { Uppers::Keep } else { Uppers::Remove };
                let closed = block_on(client.close(&name, uppers)).unwrap().expect("it was there");
                if uppers == Uppers::Keep {
                    let mut spec = DeviceSpec { new_upper: None, ..host.spec(&name, &[], None) };
                    spec.config.lowers = closed.lowers;
                    device.path = block_on(client.create(&name, &spec)).unwrap().path;
                    device.reopened = true;
                } else {
                    fs::remove_dir_all(host.upper_dir(&name)).unwrap();
                    known.remove(&name);
                }
            }
        }
    }
    known
}

/// Somebody who looks at everything all the time, and asks for what is not theirs.
fn onlooker(client: &BlockdClient, over: &AtomicBool) {
    while !over.load(Ordering::SeqCst) {
        for view in block_on(client.list()).unwrap() {
            assert_eq!(view.problem, None);
            let seen = block_on(client.get(&view.name)).unwrap();
            assert!(seen.is_none_or(|seen| seen.name == view.name));
            match block_on(client.flush(&view.name)) {
                Ok(()) => {}
                Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "{error}"),
            }
        }
    }
}

fn whatever_many_callers_do_at_once_each_finds_its_own_device() {
    let mut host = Host::prepare();
    host.config.compaction.max_depth = 5;
    host.run();
    let fresh = pattern(7, SIZE as usize);
    let base = [layer_file(&host.dir, "base", Bytes(SIZE), &[(0, fresh.clone())])];
    let over = AtomicBool::new(false);
    let known: Vec<_> = thread::scope(|scope| {
        let callers: Vec<_> = (1..6)
            .map(|number| {
                let (host, base, fresh) = (&host, &base, &fresh);
                scope.spawn(move || caller(host, number, base, fresh))
            })
            .collect();
        let watching = scope.spawn(|| onlooker(&host.client(), &over));
        let known = callers.into_iter().map(|caller| caller.join()).collect::<Vec<_>>();
        over.store(true, Ordering::SeqCst);
        watching.join().unwrap();
        known.into_iter().map(Result::unwrap).collect()
    });
    let names: Vec<&String> = known.iter().flat_map(BTreeMap::keys).collect();
    for name in &names {
        block_on(host.client().flush(name)).unwrap();
    }
    host.kill();
    host.run();
    let listed = block_on(host.client().list()).unwrap();
    assert_eq!(listed.iter().map(|view| &view.name).collect::<Vec<_>>(), names);
    for (name, device) in known.iter().flatten() {
        assert_eq!(host.get(name).problem, None, "{}", host.log());
        assert!(read(&device.path, 0, device.size as usize) == device.content, "{name} after the restart");
        block_on(host.client().close(name, Uppers::Remove)).unwrap();
        let left = fs::read_dir(host.upper_dir(name)).unwrap().map(|entry| entry.unwrap().path());
        let theirs = |path: &PathBuf| device.reopened && path.extension().is_some_and(|ending| ending == "commit");
        assert_eq!(left.filter(|path| !theirs(path)).count(), 0, "{name}");
    }
    assert!(!host.log().contains(" ERROR "), "nobody needs to look");
}

on_each_exporter! {
    whatever_many_callers_do_at_once_each_finds_its_own_device,
}
