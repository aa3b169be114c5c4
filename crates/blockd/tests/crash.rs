//! The daemon is killed, and its next start brings everything back.

mod support;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use aenv_block_client::{DeviceSpec, ErrorKind, Lower, Uppers};
use aenv_block_overlaybd::{Identity, Mode, UpperFiles, UpperOptions, UpperState};
use aenv_model::Bytes;
use support::{Host, block_on, layer_file, open_direct, pattern, read, until, write};

const SIZE: Bytes = Bytes::mib(8);

#[test]
#[ignore = "run by other tests"]
fn the_daemon_of_a_test() {
    support::be_a_daemon();
}

fn hybrid(dir: &Path) -> UpperFiles {
    UpperFiles { data: dir.join("data"), index: Some(dir.join("index")) }
}

/// Writes blocks of its own region until the daemon is gone, or was and is back (`waits`); gives for each block the numbers
/// it may have now: that of the last write that was answered, or the one that was not.
fn writer(path: &Path, region: u64, blocks: u64, gone: &AtomicBool, waits: bool) -> Vec<(u32, u32)> {
    const BLOCK: u64 = 4096;
    let file = open_direct(path);
    let mut numbers = vec![(0, 0); blocks as usize];
    for number in 1.. {
        for block in 0..blocks {
            if waits && gone.load(Ordering::SeqCst) {
                return numbers;
            }
            let block = (block * 7 + u64::from(number)) % blocks;
            numbers[block as usize].1 = number;
            let written = file.write((region * blocks + block) * BLOCK, &content(region, block, number));
            if written.is_ok() {
                numbers[block as usize].0 = number;
            }
            // Few are flushed: what was answered is there all the same, as the host goes on.
            let flushed = if (block, region) == (5, 0) { file.flush() } else { Ok(()) };
            if let Err(error) = written.and(flushed) {
                assert!(!waits && gone.load(Ordering::SeqCst), "nothing fails while the daemon lives: {error}");
                return numbers;
            }
        }
    }
    numbers
}

fn content(region: u64, block: u64, number: u32) -> Vec<u8> {
    if number == 0 { vec![0; 4096] } else { pattern(region << 40 | block << 32 | u64::from(number), 4096) }
}

fn what_was_answered_survives_kill_9_under_load() {
    let mut host = Host::start();
    let mode = [Mode::Hybrid, Mode::Log];
    for round in 0..4 {
        let name = format!("device{round}");
        let mut spec = host.spec(&name, &[], Some(SIZE));
        spec.new_upper.as_mut().unwrap().mode = mode[round % 2];
        spec.config.upper.as_mut().unwrap().mode = mode[round % 2];
        let view = host.create(&name, &spec);
        let idle = host.spec("idle", &[], Some(SIZE));
        let idle_path = host.create("idle", &idle).path;
        write(&idle_path, 0, &pattern(9, 5000));
        let (gone, waits) = (AtomicBool::new(false), host.requests_wait());
        let numbers: Vec<_> = thread::scope(|scope| {
            let writers: Vec<_> = (0..4)
                .map(|region| {
                    let (path, gone) = (&view.path, &gone);
                    scope.spawn(move || writer(path, region, 64, gone, waits))
                })
                .collect();
            // Some rounds end while layers change.
            if round >= 2 {
                for number in 0..3 {
                    block_on(host.client().restack(&name, &host.dir.join(format!("{name}-{number}")))).unwrap();
                }
            }
            let written = |host: &Host| host.get(&name).stats.flush.operations;
            let before = written(&host);
            until("much is written", || (written(&host) > before + 5).then_some(()));
            if waits {
                // Twice, and they never notice.
                for _ in 0..2 {
                    host.kill();
                    host.run();
                    let before = written(&host);
                    until("it goes on", || (written(&host) > before + 5).then_some(()));
                }
            }
            gone.store(true, Ordering::SeqCst);
            host.kill();
            if waits {
                host.run();
            }
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        if waits {
            host.kill(); // nothing of it was flushed since
        }
        host.run(); // over the mount that the dead process left
        assert_eq!(host.get(&name).path, view.path);
        assert_eq!(host.get(&name).problem, None, "{}", host.log());
        for (region, numbers) in numbers.iter().enumerate() {
            for (block, (answered, written)) in numbers.iter().enumerate() {
                let (region, block) = (region as u64, block as u64);
                let found = read(&view.path, (region * 64 + block) * 4096, 4096);
                // Each sector is that of a write that may have happened: none before the last that was answered.
                for (at, sector) in found.chunks(512).enumerate() {
                    let fits = |number: u32| content(region, block, number)[at * 512..][..512] == *sector;
                    assert!(
                        (*answered..=*written).any(fits),
                        "round {round}, region {region}, block {block}: neither of writes {answered} to {written}"
                    );
                }
            }
        }
        assert_eq!(read(&idle_path, 0, 5000), pattern(9, 5000));
        block_on(host.client().close("idle", Uppers::Remove)).unwrap();
        block_on(host.client().close(&name, Uppers::Remove)).unwrap();
    }
}

/// A VMM's disk, which no guest ever flushed: it has it open all the while.
fn what_was_answered_and_not_flushed_is_there_after_kill_9() {
    let mut host = Host::start();
    for mode in [Mode::Log, Mode::Hybrid, Mode::Sparse] {
        let name = format!("{mode:?}").to_lowercase();
        let base = layer_file(&host.dir, &format!("base-{name}"), SIZE, &[(0, pattern(1, 65536))]);
        let mut spec = host.spec(&name, &[base], None);
        let upper = spec.config.upper.as_mut().unwrap();
        (upper.mode, upper.index) = (mode, upper.index.take().filter(|_| mode != Mode::Sparse));
        spec.new_upper.as_mut().unwrap().mode = mode;
        let path = host.create(&name, &spec).path;
        let mut opened = open_direct(&path);
        let mut expected = pattern(1, 65536);
        for round in 0..3_usize {
            for number in 0..4 {
                let at = (round + number) * 4096; // over what the round before wrote
                let bytes = pattern((10 * round + number) as u64 + 2, 4096);
                opened.write(at as u64, &bytes).unwrap();
                expected[at..at + 4096].copy_from_slice(&bytes);
            }
            opened.punch(32768 + round as u64 * 8192, 4096).unwrap();
            expected[32768 + round * 8192..][..4096].fill(0);
            if round == 1 {
                block_on(host.client().restack(&name, &host.dir.join(format!("{name}.commit")))).unwrap();
                opened.write(61440, &pattern(99, 4096)).unwrap();
                expected[61440..].copy_from_slice(&pattern(99, 4096));
            }
            host.kill();
            host.run();
            if !host.requests_wait() {
                opened = open_direct(&path); // what was open before is dead
            }
            assert!(opened.read(0, 65536).unwrap() == expected, "{name}, round {round}");
        }
        // Ended before it was flushed at all, and handed to its owner: whole.
        host.kill();
        host.run();
        drop(opened);
        block_on(host.client().close(&name, Uppers::Keep)).unwrap();
        assert!(!host.upper_dir(&name).join("data.unflushed").exists());
        let mut again = DeviceSpec { new_upper: None, ..spec };
        again.config.lowers.push(Lower { file: Some(host.dir.join(format!("{name}.commit"))), ..Lower::default() });
        let path = host.create(&name, &again).path;
        assert!(open_direct(&path).read(0, 65536).unwrap() == expected, "{name}, opened again");
        block_on(host.client().close(&name, Uppers::Remove)).unwrap();
    }
}

fn a_creation_that_was_cut_is_undone_or_done() {
    let mut host = Host::prepare();
    let base = layer_file(&host.dir, "base", SIZE, &[(0, pattern(1, 4096))]);
    let spec = host.spec("a", &[base], None);
    for step in ["create: intent written", "create: opened", "create: exported"] {
        host.run_until(step);
        block_on(host.client().create("a", &spec)).unwrap_err();
        host.wait_for_death();
        host.run();
        until("it is undone", || block_on(host.client().list()).unwrap().is_empty().then_some(()));
        until("its files are gone", || (files_in(&host.upper_dir("a")) == 0).then_some(()));
        assert_eq!(host.sweep(&[]), 0, "no device that nobody knows of");
        let view = host.create("a", &spec);
        assert_eq!(read(&view.path, 0, 4096), pattern(1, 4096));
        block_on(host.client().close("a", Uppers::Remove)).unwrap();
        host.stop();
    }
    host.run_until("create: recorded");
    block_on(host.client().create("a", &spec)).unwrap_err();
    host.wait_for_death();
    host.run();
    let view = host.create("a", &spec); // by a caller who does not know
    assert_eq!((view.problem, read(&view.path, 0, 4096)), (None, pattern(1, 4096)));
}

fn files_in(dir: &Path) -> usize {
    fs::read_dir(dir).unwrap().count()
}

/// A device that was killed when a restack had just been written down, with what `meanwhile` did to its files; then it is
/// brought back and must be whole, with or without the layer.
fn restack_cut(step: &str, restacked: bool, meanwhile: impl Fn(&Path, &Path)) {
    let mut host = Host::prepare();
    host.run_until(step);
    let base = layer_file(&host.dir, "base", SIZE, &[(0, pattern(1, 4096)), (8192, pattern(2, 4096))]);
    let view = host.create("a", &host.spec("a", &[base], None));
    write(&view.path, 4096, &pattern(3, 8192));
    let layer = host.dir.join("layer.commit");
    block_on(host.client().restack("a", &layer)).unwrap_err();
    host.wait_for_death();
    meanwhile(&host.upper_dir("a"), &layer);
    // Beginnings that nobody needs any more.
    fs::write(host.upper_dir("a").join("data.new"), "x").unwrap();
    for start in 0..2 {
        host.run();
        let now = host.get("a");
        assert_eq!(now.problem, None, "{}", host.log());
        assert_eq!(now.config.lowers.len(), 1 + usize::from(restacked), "{:?}", now.config);
        assert_eq!(read(&view.path, 0, 4096), pattern(1, 4096));
        assert_eq!(read(&view.path, 4096, 8192), pattern(3, 8192));
        assert!(!host.upper_dir("a").join("data.new").exists());
        if start == 0 {
            write(&view.path, 20_000, &pattern(4, 1000));
        }
        assert_eq!(read(&view.path, 20_000, 1000), pattern(4, 1000));
        host.kill();
    }
    host.run();
    let again = host.dir.join("another.commit");
    block_on(host.client().restack("a", if restacked { &again } else { &layer })).unwrap();
    assert_eq!(read(&view.path, 4096, 8192), pattern(3, 8192));
    block_on(host.client().close("a", Uppers::Remove)).unwrap();
    assert_eq!((files_in(&host.upper_dir("a")), layer.exists()), (0, true));
}

fn a_restack_cut_before_it_changed_anything_has_not_happened() {
    restack_cut("restack: intent written", false, |_, _| {});
}

fn a_restack_cut_when_the_upper_was_sealed_is_ended() {
    restack_cut("restack: intent written", true, |dir, _| {
        hybrid(dir).open().unwrap().seal().unwrap();
        assert_eq!(hybrid(dir).state().unwrap(), UpperState::Sealed);
    });
}

fn a_restack_cut_when_the_layer_was_moved_is_ended() {
    restack_cut("restack: intent written", true, |dir, layer| {
        hybrid(dir).open().unwrap().seal().unwrap();
        fs::rename(dir.join("data"), layer).unwrap();
    });
}

fn a_restack_cut_between_the_files_of_the_fresh_upper_is_ended() {
    restack_cut("restack: intent written", true, |dir, layer| {
        let upper = hybrid(dir).open().unwrap();
        upper.seal().unwrap();
        fs::rename(dir.join("data"), layer).unwrap();
        let options =
            UpperOptions { mode: Mode::Hybrid, virtual_size: SIZE, identity: Identity::fresh(upper.identity().uuid) };
        hybrid(dir).create(&options).unwrap();
        fs::remove_file(dir.join("data")).unwrap(); // it comes last
    });
}

fn a_restack_cut_before_it_was_recorded_is_recorded() {
    restack_cut("restack: done", true, |_, _| {});
}

fn a_restack_cut_after_it_was_recorded_has_happened() {
    restack_cut("restack: recorded", true, |_, _| {});
}

fn a_layer_that_is_not_the_one_of_the_restack_is_not_taken() {
    let mut host = Host::prepare();
    host.run_until("restack: intent written");
    let spec = host.spec("a", &[], Some(SIZE));
    let view = host.create("a", &spec);
    write(&view.path, 0, &pattern(1, 4096));
    let layer = host.dir.join("layer.commit");
    block_on(host.client().restack("a", &layer)).unwrap_err();
    host.wait_for_death();
    let kept = host.dir.join("kept");
    hybrid(&host.upper_dir("a")).open().unwrap().seal().unwrap();
    fs::rename(host.upper_dir("a").join("data"), &kept).unwrap();
    layer_file(&host.dir, "layer.commit", SIZE, &[(0, pattern(2, 4096))]);
    host.run();
    let broken = host.get("a");
    assert!(broken.problem.as_ref().is_some_and(|why| why.contains("has the UUID")), "{broken:?}");
    assert!(support::try_read(&view.path, 0, 4096).is_err(), "never zeros");
    // Put right by hand, it is the device again, without another start.
    fs::rename(&kept, &layer).unwrap();
    assert_eq!(host.create("a", &spec).problem, None);
    assert_eq!(read(&view.path, 0, 4096), pattern(1, 4096));
}

fn a_merge_that_was_cut_is_forgotten_or_done() {
    for step in ["merge: intent written", "merge: done", "merge: recorded", "merge: files removed"] {
        let mut host = Host::prepare();
        host.config.compaction.max_depth = 3;
        host.run_until(step);
        let base = layer_file(&host.dir, "base", SIZE, &[(0, pattern(9, 4096))]);
        let view = host.create("a", &host.spec("a", &[base], None));
        let client = host.client();
        let mut expected = pattern(9, 4096);
        for number in 0..3_u64 {
            write(&view.path, 4096 + number * 4096, &pattern(number, 4096));
            expected.extend(pattern(number, 4096));
            // The last may be answered before the daemon dies, or not.
            let _ = block_on(client.restack("a", &host.upper_dir("a").join(format!("layer{number}.commit"))));
        }
        host.wait_for_death();
        host.config.compaction.max_depth = 100;
        host.run();
        let now = host.get("a");
        assert_eq!(now.problem, None, "{step}: {}", host.log());
        let merged = ["merge: recorded", "merge: files removed"].contains(&step);
        assert_eq!(now.config.lowers.len(), if merged { 2 } else { 4 }, "{step}");
        assert_eq!(read(&view.path, 0, expected.len()), expected, "{step}");
        // Upper, index, notes, lock, layers: nothing of the merge that is not in use.
        let layers = now.config.lowers.len() - 1;
        assert_eq!(files_in(&host.upper_dir("a")), 4 + layers, "{step}");
        block_on(host.client().close("a", Uppers::Remove)).unwrap();
        assert_eq!(files_in(&host.upper_dir("a")), 0, "{step}");
    }
}

fn a_close_that_was_cut_is_ended() {
    for step in ["close: intent written", "close: export taken away", "close: files removed"] {
        for uppers in [Uppers::Keep, Uppers::Remove] {
            let mut host = Host::prepare();
            host.run_until(step);
            let spec = host.spec("a", &[], Some(SIZE));
            let view = host.create("a", &spec);
            write(&view.path, 0, &pattern(1, 4096));
            block_on(host.client().restack("a", &host.upper_dir("a").join("layer"))).unwrap();
            open_direct(&view.path).write(4096, &pattern(2, 4096)).unwrap(); // not flushed
            block_on(host.client().close("a", uppers)).unwrap_err();
            host.wait_for_death();
            host.run();
            until("it is closed", || block_on(host.client().get("a")).unwrap().is_none().then_some(()));
            assert!(!view.path.exists());
            let left = if uppers == Uppers::Keep { 3 } else { 0 };
            assert_eq!(files_in(&host.upper_dir("a")), left, "{step} {uppers:?}");
            if uppers == Uppers::Keep {
                let mut again = DeviceSpec { new_upper: None, ..spec };
                let layer = Lower { file: Some(host.upper_dir("a").join("layer")), ..Lower::default() };
                again.config.lowers.push(layer);
                let path = host.create("a", &again).path;
                assert_eq!(read(&path, 0, 8192), [pattern(1, 4096), pattern(2, 4096)].concat(), "{step}");
            }
        }
    }
}

fn one_device_that_cannot_come_back_does_not_keep_the_others() {
    let mut host = Host::start();
    let base = layer_file(&host.dir, "base", SIZE, &[(0, pattern(1, 4096))]);
    let names: Vec<String> = (0..5).map(|number| format!("device{number}")).collect();
    let specs: Vec<DeviceSpec> = names.iter().map(|name| host.spec(name, std::slice::from_ref(&base), None)).collect();
    let paths: Vec<PathBuf> = names.iter().zip(&specs).map(|(name, spec)| host.create(name, spec).path).collect();
    for (number, path) in paths.iter().enumerate() {
        write(path, 8192, &pattern(number as u64, 4096));
    }
    let held = File::open(&paths[0]).unwrap();
    host.kill();
    let mut reader = Some(thread::spawn(move || held.read_at(&mut [0; 512], 0)));
    if !host.requests_wait() {
        let read = reader.take().unwrap().join().unwrap();
        assert!(read.is_err(), "whoever had it open sees an error");
    }
    let (data, away) = (host.upper_dir("device2").join("data"), host.dir.join("away"));
    fs::rename(&data, &away).unwrap();
    host.run();
    if let Some(reader) = reader {
        assert_eq!(reader.join().unwrap().unwrap(), 512, "whoever had it open waited");
    }
    for (number, path) in paths.iter().enumerate() {
        let view = host.get(&names[number]);
        if number == 2 {
            assert!(view.problem.as_ref().is_some_and(|why| why.contains("data")), "{view:?}");
            assert!(support::try_read(path, 0, 4096).is_err());
            let error = block_on(host.client().restack("device2", &host.dir.join("x"))).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Failed, "{error}");
            continue;
        }
        assert_eq!(view.problem, None);
        assert_eq!(read(path, 0, 4096), pattern(1, 4096));
        assert_eq!(read(path, 8192, 4096), pattern(number as u64, 4096));
    }
    fs::rename(&away, &data).unwrap();
    host.kill();
    host.run();
    assert_eq!(host.get("device2").problem, None);
    assert_eq!(read(&paths[2], 8192, 4096), pattern(2, 4096));
    // One that does not work can be closed, too.
    host.kill();
    fs::remove_file(&data).unwrap();
    host.run();
    assert!(host.get("device2").problem.is_some());
    block_on(host.client().close("device2", Uppers::Remove)).unwrap();
    assert_eq!(files_in(&host.upper_dir("device2")), 0);
    assert_eq!(block_on(host.client().list()).unwrap().len(), 4);
}

on_each_exporter! {
    what_was_answered_survives_kill_9_under_load,
    what_was_answered_and_not_flushed_is_there_after_kill_9,
    a_creation_that_was_cut_is_undone_or_done,
    a_restack_cut_before_it_changed_anything_has_not_happened,
    a_restack_cut_when_the_upper_was_sealed_is_ended,
    a_restack_cut_when_the_layer_was_moved_is_ended,
    a_restack_cut_between_the_files_of_the_fresh_upper_is_ended,
    a_restack_cut_before_it_was_recorded_is_recorded,
    a_restack_cut_after_it_was_recorded_has_happened,
    a_layer_that_is_not_the_one_of_the_restack_is_not_taken,
    a_merge_that_was_cut_is_forgotten_or_done,
    a_close_that_was_cut_is_ended,
    one_device_that_cannot_come_back_does_not_keep_the_others,
}
