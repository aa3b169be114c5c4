//! Devices from their creation to their end.

mod support;

use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use aenv_block_client::{Caching, DeviceConfig, DeviceSpec, ErrorKind, ExportChoice, LayeredDiskStore, Lower, Uppers};
use aenv_block_device::{CreateDiskError, DiskStore as _};
use aenv_block_overlaybd::Mode;
use aenv_model::Bytes;
use support::{
    Host, block_on, layer_file, open, open_direct, pattern, read, size_of, spec_in, try_read, try_write, until, write,
};

const SIZE: Bytes = Bytes::mib(8);

#[test]
#[ignore = "run by other tests"]
fn the_daemon_of_a_test() {
    support::be_a_daemon();
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, aenv_block_client::BlockdError>, kind: ErrorKind, words: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(words), "{error}");
}

fn a_device_is_written_kept_and_opened_again() {
    let host = Host::start();
    let base = layer_file(&host.dir, "base", SIZE, &[(0, pattern(1, 4096)), (1 << 20, pattern(2, 8192))]);
    let spec = host.spec("a", &[base], None);
    let view = host.create("a", &spec);
    assert_eq!((view.name.as_str(), view.size, view.read_only, &view.problem), ("a", SIZE, false, &None));
    assert_eq!(size_of(&view.path), SIZE.get());
    assert_eq!(read(&view.path, 1 << 20, 8192), pattern(2, 8192));
    write(&view.path, 4000, &pattern(3, 10_000));
    assert_eq!(read(&view.path, 0, 4000), pattern(1, 4096)[..4000]);
    assert_eq!(read(&view.path, 4000, 10_000), pattern(3, 10_000));

    let client = host.client();
    assert_eq!(host.create("a", &spec).path, view.path, "an equal spec is the same device");
    let other = DeviceSpec { caching: Caching::Shared, ..spec.clone() };
    refused(block_on(client.create("a", &other)), ErrorKind::Conflict, "there is another device a");
    let listed = block_on(client.list()).unwrap();
    assert_eq!(listed.iter().map(|view| view.name.as_str()).collect::<Vec<_>>(), ["a"]);

    block_on(client.close("a", Uppers::Keep)).unwrap();
    assert!(!view.path.exists());
    assert!(block_on(client.get("a")).unwrap().is_none());
    block_on(client.close("a", Uppers::Keep)).unwrap();
    refused(block_on(client.flush("a")), ErrorKind::NotFound, "there is no device a");

    refused(block_on(client.create("a", &spec)), ErrorKind::Conflict, "is there already");
    let again = DeviceSpec { new_upper: None, ..spec };
    let view = host.create("b", &again);
    assert_eq!(read(&view.path, 4000, 10_000), pattern(3, 10_000));
    block_on(client.close("b", Uppers::Remove)).unwrap();
    assert_eq!(fs::read_dir(host.upper_dir("a")).unwrap().count(), 0, "no upper, no lock");
}

fn a_restack_makes_a_layer_and_the_device_goes_on() {
    let host = Host::start();
    let view = host.create("a", &host.spec("a", &[], Some(SIZE)));
    let client = host.client();
    let file = open(&view.path);
    let write = |bytes: &[u8], offset| file.write_all_at(bytes, offset).and_then(|()| file.sync_data()).unwrap();
    write(&pattern(1, 65536), 0);
    let inside = host.upper_dir("a").join("first.commit");
    let restacked = block_on(client.restack("a", &inside)).unwrap();
    assert_eq!((&restacked.file, restacked.size.get()), (&inside, fs::metadata(&inside).unwrap().len()));
    write(&pattern(2, 4096), 4096);
    let outside = host.dir.join("second.commit");
    block_on(client.restack("a", &outside)).unwrap();
    write(&pattern(3, 4096), 8192);
    for (offset, expected) in [(0, &pattern(1, 65536)[..4096]), (4096, &pattern(2, 4096)), (8192, &pattern(3, 4096))] {
        assert_eq!(read(&view.path, offset, 4096), expected);
    }
    let lowers = host.get("a").config.lowers;
    assert_eq!(lowers.iter().map(|lower| lower.file.as_ref().unwrap()).collect::<Vec<_>>(), [&inside, &outside]);
    assert_eq!(lowers[0].uuid, Some(restacked.uuid));

    // A layer alone is a device, too.
    let config = DeviceConfig { lowers: vec![lowers[0].clone()], ..DeviceConfig::default() };
    let spec = DeviceSpec { config, new_upper: None, caching: Caching::Shared, read_only: false };
    let snapshot = host.create("snapshot", &spec);
    assert!(snapshot.read_only);
    assert_eq!(read(&snapshot.path, 0, 65536), pattern(1, 65536));
    let error = fs::OpenOptions::new().write(true).open(&snapshot.path).and_then(|file| file.write_at(&[1], 0));
    assert!(error.is_err());

    refused(block_on(client.restack("a", &inside)), ErrorKind::Conflict, "there is something already");
    refused(block_on(client.restack("a", Path::new("x"))), ErrorKind::Invalid, "absolute");
    refused(block_on(client.restack("a", &host.dir.join("nowhere/x"))), ErrorKind::Invalid, "nowhere/x");
    refused(block_on(client.restack("a", Path::new("/dev/shm/aenv-test-x"))), ErrorKind::Invalid, "cannot be moved");
    refused(block_on(client.restack("snapshot", &host.dir.join("x"))), ErrorKind::Invalid, "read-only");
    assert_eq!(read(&view.path, 8192, 4096), pattern(3, 4096), "a refusal changes nothing");
    drop(file);
    block_on(client.close("a", Uppers::Remove)).unwrap();
    assert!(outside.exists(), "what is elsewhere is the caller's");
    assert_eq!(fs::read_dir(host.upper_dir("a")).unwrap().count(), 0);
    assert_eq!(read(&snapshot.path, 0, 65536), pattern(1, 65536), "whoever has a layer open keeps it");
}

fn every_layout_can_be_written_restacked_and_resized() {
    let host = Host::start();
    let client = host.client();
    for (name, mode) in [("log", Mode::Log), ("hybrid", Mode::Hybrid), ("sparse", Mode::Sparse)] {
        let mut spec = host.spec(name, &[], Some(SIZE));
        let upper = spec.config.upper.as_mut().unwrap();
        upper.mode = mode;
        upper.index = upper.index.take().filter(|_| mode != Mode::Sparse);
        spec.new_upper.as_mut().unwrap().mode = mode;
        let view = host.create(name, &spec);
        write(&view.path, 0, &pattern(1, 8192));
        block_on(client.restack(name, &host.dir.join(format!("{name}.commit")))).unwrap();
        write(&view.path, 4096, &pattern(2, 4096));
        let mut size = SIZE;
        if let Some(larger) = host.resize(name, Bytes::mib(12)) {
            size = larger.size;
            assert_eq!((size, size_of(&view.path)), (Bytes::mib(12), Bytes::mib(12).get()));
            write(&view.path, Bytes::mib(12).get() - 4096, &pattern(3, 4096));
            refused(block_on(client.resize(name, Bytes(1000))), ErrorKind::Invalid, "cannot have 1000 bytes");
        }
        block_on(client.flush(name)).unwrap();
        assert_eq!(read(&view.path, 0, 4096), pattern(1, 8192)[..4096]);
        assert_eq!(read(&view.path, 4096, 4096), pattern(2, 4096));
        assert_eq!((host.get(name).size, size_of(&view.path)), (size, size.get()));
    }
}

/// Disks for sandboxes, and an image for them.
fn disks_over_an_image(host: &Host) -> (LayeredDiskStore, std::path::PathBuf) {
    let base = layer_file(&host.dir, "base", SIZE, &[(0, pattern(1, 4096))]);
    let lowers = vec![Lower { file: Some(base), ..Lower::default() }];
    let image = host.dir.join("image.json");
    DeviceConfig { lowers, ..DeviceConfig::default() }.save(&image, 0o600).unwrap();
    (LayeredDiskStore::new(host.client(), host.upper_dir("disks"), Mode::Hybrid), image)
}

fn disks_of_sandboxes_have_their_size_from_the_start() {
    let host = Host::start();
    let (store, image) = disks_over_an_image(&host);
    for (name, asked, size) in
        [("as-is", None, SIZE), ("same", Some(SIZE), SIZE), ("more", Some(Bytes::mib(12)), Bytes::mib(12))]
    {
        let disk = block_on(store.create(name, &image, asked)).unwrap();
        assert_eq!((disk.size, size_of(&disk.path)), (size, size.get()), "{name}");
        assert_eq!(read(&disk.path, 0, 4096), pattern(1, 4096));
        write(&disk.path, size.get() - 4096, &pattern(2, 4096));
        block_on(store.remove(&disk.record)).unwrap();
    }
    match block_on(store.create("less", &image, Some(Bytes::mib(4)))) {
        Err(CreateDiskError::TooSmall { asked, base }) => assert_eq!((asked, base), (Bytes::mib(4), SIZE)),
        other => panic!("{other:?}"),
    }
    assert_eq!(block_on(host.client().list()).unwrap(), []);
    assert_eq!(fs::read_dir(host.upper_dir("disks")).unwrap().count(), 0);
}

fn what_a_vmm_wrote_is_in_the_layer_though_the_hosts_kernel_kept_it() {
    let host = Host::start();
    let (store, image) = disks_over_an_image(&host);
    let disk = block_on(store.create("a", &image, None)).unwrap();
    let file = open(&disk.path); // as some VMMs do: without O_DIRECT
    file.write_all_at(&pattern(2, 100_000), 8192).unwrap();
    let config = block_on(store.seal(&disk.record)).unwrap();
    let spec = DeviceSpec { config, new_upper: None, caching: Caching::Shared, read_only: true };
    let sealed = host.create("sealed", &spec).path;
    assert_eq!(read(&sealed, 8192, 100_000), pattern(2, 100_000));
}

fn an_upper_has_one_writer_whatever_it_is_called() {
    let host = Host::start();
    let other = Host::start();
    let spec = host.spec("a", &[], Some(SIZE));
    host.create("a", &spec);
    let open = DeviceSpec { new_upper: None, ..spec };
    refused(block_on(host.client().create("b", &open)), ErrorKind::Conflict, "in use by device a of aenv-blockd");
    refused(block_on(other.client().create("c", &open)), ErrorKind::Conflict, &format!("process {}", host.pid()));
    block_on(host.client().restack("a", &host.dir.join("layer"))).unwrap();
    refused(block_on(other.client().create("c", &open)), ErrorKind::Conflict, "in use by device a");
    block_on(host.client().close("a", Uppers::Keep)).unwrap();
    other.create("c", &open);
    refused(block_on(host.client().create("a", &open)), ErrorKind::Conflict, "in use by device c");
}

fn a_creation_that_fails_leaves_nothing_and_says_what_is_wrong() {
    let host = Host::start();
    let client = host.client();
    let good = host.spec("a", &[], Some(SIZE));
    let with = |change: &dyn Fn(&mut DeviceSpec)| {
        let mut spec = good.clone();
        change(&mut spec);
        spec
    };
    let junk = host.dir.join("junk");
    fs::write(&junk, vec![7; 20_000]).unwrap();
    let lower = |path: &Path| Lower { file: Some(path.to_owned()), ..Default::default() };
    let cases = [
        (with(&|spec| spec.new_upper.as_mut().unwrap().size = None), ErrorKind::Invalid, "size"),
        (with(&|spec| spec.new_upper.as_mut().unwrap().mode = Mode::Log), ErrorKind::Invalid, "new_upper.mode"),
        (with(&|spec| spec.config.upper.as_mut().unwrap().data = "x".into()), ErrorKind::Invalid, "config.upper.data"),
        (with(&|spec| spec.config.lowers = vec![lower(&host.dir.join("nowhere"))]), ErrorKind::Invalid, "layer 0"),
        (with(&|spec| spec.config.lowers = vec![lower(&junk)]), ErrorKind::Failed, "layer 0"),
        (with(&|spec| spec.new_upper = None), ErrorKind::Failed, "data"),
        (
            with(&|spec| spec.config.upper.as_mut().unwrap().data = host.dir.join("no/such/data")),
            ErrorKind::Invalid,
            "no/such/data",
        ),
    ];
    for (spec, kind, words) in &cases {
        refused(block_on(client.create("a", spec)), *kind, words);
    }
    for name in ["", ".", "..", ".a", "a/b", "a b", "ü", &"x".repeat(201)] {
        assert!(block_on(client.create(name, &good)).is_err(), "{name}");
    }
    assert_eq!(fs::read_dir(host.upper_dir("a")).unwrap().count(), 0);
    assert_eq!(block_on(client.list()).unwrap(), []);
    if !host.requests_wait() {
        assert_eq!(fs::read_dir(host.config.mount_point()).unwrap().count(), 0);
    }
    host.create("a", &good);
}

fn the_result_file_says_how_it_went() {
    let host = Host::start();
    let result = host.dir.join("result");
    let mut spec = host.spec("a", &[host.dir.join("nowhere")], Some(SIZE));
    spec.config.result_file = Some(result.clone());
    block_on(host.client().create("a", &spec)).unwrap_err();
    let said = fs::read_to_string(&result).unwrap();
    assert!(said.starts_with("failed:layer 0 is neither at /") && said.contains("nowhere"), "{said}");
    spec.config.lowers.clear();
    host.create("a", &spec);
    assert_eq!(fs::read_to_string(&result).unwrap(), "success");
}

fn an_orderly_stop_keeps_devices_for_the_next_start() {
    let mut host = Host::start();
    let view = host.create("a", &host.spec("a", &[], Some(SIZE)));
    open(&view.path).write_all_at(&pattern(1, 100_000), 5).unwrap(); // not flushed
    refused(block_on(host.client().shutdown()), ErrorKind::Conflict, "there are 1 devices");
    assert_eq!(host.stop().code(), Some(0), "{}", host.log());
    assert!(!host.config.socket.exists());
    let waiting = host.requests_wait().then(|| {
        let path = view.path.clone();
        std::thread::spawn(move || read(&path, 5, 1000))
    });
    if waiting.is_none() {
        assert!(!view.path.exists());
        assert!(rustix::fs::statfs(host.config.mount_point()).unwrap().f_type != 0x6573_5546, "unmounted");
    }

    host.run();
    assert!(waiting.is_none_or(|reader| reader.join().unwrap() == pattern(1, 100_000)[..1000]));
    assert_eq!(host.get("a").path, view.path);
    assert_eq!(read(&view.path, 5, 100_000), pattern(1, 100_000));
    block_on(host.client().shutdown_with_devices()).unwrap();
    assert_eq!(host.wait().code(), Some(0), "{}", host.log());
    host.run();
    block_on(host.client().close("a", Uppers::Remove)).unwrap();
    block_on(host.client().shutdown()).unwrap();
    assert_eq!(host.wait().code(), Some(0), "{}", host.log());
}

#[test]
fn devices_move_to_another_exporter_and_whoever_had_them_open_is_told() {
    support::on(ExportChoice::Ublk, || {
        let mut host = Host::start();
        let node = host.create("a", &host.spec("a", &[], Some(SIZE))).path;
        write(&node, 0, &pattern(1, 8192));
        let opened = open_direct(&node);
        opened.write(4096, &pattern(2, 4096)).unwrap();
        host.kill();
        host.config.export = ExportChoice::Fuse;
        host.run();
        opened.read(0, 4096).unwrap_err();
        drop(opened);
        let file = host.get("a").path;
        assert!(!node.exists() && file.starts_with(&host.config.run_dir));
        assert_eq!(read(&file, 0, 8192), [&pattern(1, 8192)[..4096], &pattern(2, 4096)].concat());
        host.stop();
        host.config.export = ExportChoice::Auto;
        host.run();
        let node = host.get("a").path;
        assert!(node.starts_with("/dev"), "{}", node.display());
        assert_eq!(read(&node, 4096, 4096), pattern(2, 4096));
        block_on(host.client().close("a", Uppers::Remove)).unwrap();
        assert!(!node.exists());
        assert_eq!(host.sweep(&[]), 0);
    });
}

fn there_is_one_daemon_for_a_directory() {
    let host = Host::start();
    let mut second = Host::at(&host.dir);
    second.config.socket = host.dir.join("other-socket");
    second.spawn(None);
    assert_ne!(second.wait().code(), Some(0));
    let words = format!("state is in use by aenv-blockd, process {}", host.pid());
    assert!(host.log().contains(&words), "{}", host.log());
    let mut third = Host::prepare();
    third.config.socket = host.config.socket.clone();
    third.spawn(None);
    assert_ne!(third.wait().code(), Some(0));
    assert!(third.log().contains("somebody listens"), "{}", third.log());
    block_on(host.client().info()).unwrap();
}

fn what_is_done_is_counted() {
    let mut host = Host::prepare();
    host.config.metrics_addr = Some("127.0.0.1:0".parse().unwrap());
    host.run();
    let view = host.create("a", &host.spec("a", &[], Some(SIZE)));
    let opened = open_direct(&view.path);
    opened.write(0, &pattern(1, 12_288)).unwrap();
    opened.flush().unwrap();
    opened.read(0, 12_288).unwrap();
    let stats = host.get("a").stats;
    assert_eq!((stats.write.bytes, stats.write.errors), (12_288, 0));
    assert!(stats.read.bytes >= 12_288, "{stats:?}"); // more if the host looks what is on its disks
    assert!(stats.flush.operations >= 1 && stats.write.latency.total_micros > 0, "{stats:?}");
    let counted: u64 = stats.write.latency.buckets.iter().map(|(_, count)| count).sum();
    assert_eq!(counted, stats.write.operations);
    let text = until("metrics are told", || scrape(&host.config.socket).ok());
    for line in [
        "aenv_blockd_devices 1",
        "aenv_blockd_broken_devices 0",
        "aenv_blockd_device_transferred_bytes_total{device=\"a\",operation=\"write\"} 12288",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
}

/// `GET /metrics`, as any HTTP client does.
fn scrape(socket: &Path) -> io::Result<String> {
    use std::io::{Read, Write};
    let mut stream = std::os::unix::net::UnixStream::connect(socket)?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

fn a_deep_stack_is_merged_and_shared_layers_are_not() {
    let mut host = Host::prepare();
    host.config.compaction.max_depth = 6;
    host.run();
    let base: Vec<_> = (0..2)
        .map(|number| layer_file(&host.dir, &format!("base{number}"), SIZE, &[(number << 16, pattern(number, 4096))]))
        .collect();
    let view = host.create("a", &host.spec("a", &base, None));
    let client = host.client();
    let file = open(&view.path);
    let mut expected = vec![0; SIZE.get() as usize];
    for number in 0..2 {
        expected[number << 16..][..4096].copy_from_slice(&pattern(number as u64, 4096));
    }
    for number in 0..40_u64 {
        let (offset, bytes) = ((number * 7919 * 512) % (SIZE.get() - 65536), pattern(100 + number, 20_000));
        file.write_all_at(&bytes, offset).and_then(|()| file.sync_data()).unwrap();
        expected[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
        let dir = if number % 4 == 0 { host.dir.clone() } else { host.upper_dir("a") };
        block_on(client.restack("a", &dir.join(format!("layer{number}.commit")))).unwrap();
    }
    until("the layers are merged", || (host.get("a").config.lowers.len() <= 6).then_some(()));
    let lowers = host.get("a").config.lowers;
    let files: Vec<_> = lowers.iter().map(|lower| lower.file.clone().unwrap()).collect();
    assert_eq!(files[..2], base);
    assert!(files.iter().all(|file| file.exists()));
    assert_eq!(read(&view.path, 0, expected.len()), expected);
    assert!((0..40).step_by(4).all(|number| host.dir.join(format!("layer{number}.commit")).exists()));
    until("replaced layers are deleted", || {
        let left = fs::read_dir(host.upper_dir("a")).unwrap().map(|entry| entry.unwrap().path());
        let layers: Vec<_> = left.filter(|path| path.extension().is_some_and(|ending| ending == "commit")).collect();
        layers.iter().all(|path| files.contains(path)).then_some(())
    });
    drop(file);
    host.kill();
    host.run();
    assert_eq!(read(&view.path, 0, expected.len()), expected);
    block_on(host.client().close("a", Uppers::Remove)).unwrap();
    assert_eq!(fs::read_dir(host.upper_dir("a")).unwrap().count(), 0);
}

fn a_chain_of_forty_layers_is_one_disk() {
    let host = Host::start();
    let mut expected = vec![0; SIZE.get() as usize];
    let layers: Vec<_> = (0..40_u64)
        .map(|number| {
            let (offset, bytes) = (number * 100 * 512, pattern(number, 100_000));
            expected[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
            layer_file(&host.dir, &format!("layer{number}"), SIZE, &[(offset, bytes)])
        })
        .collect();
    std::thread::scope(|scope| {
        for number in 0..4 {
            let (host, layers, expected) = (&host, &layers, &expected);
            scope.spawn(move || {
                let name = format!("device{number}");
                let view = host.create(&name, &host.spec(&name, layers, None));
                assert!(read(&view.path, 0, expected.len()) == *expected);
                write(&view.path, number << 20, &[number as u8; 4096]);
                assert_eq!(read(&view.path, number << 20, 4096), [number as u8; 4096]);
                block_on(host.client().close(&name, Uppers::Remove)).unwrap();
            });
        }
    });
}

fn a_cut_layer_is_refused() {
    let host = Host::start();
    let bytes = support::layer(SIZE, &[(0, pattern(1, 300_000))]);
    let path = host.dir.join("layer");
    for length in [0, 4096, 100_000, bytes.len() - 4096, bytes.len() - 1] {
        fs::write(&path, &bytes[..length]).unwrap();
        let spec = host.spec("a", std::slice::from_ref(&path), None);
        refused(block_on(host.client().create("a", &spec)), ErrorKind::Failed, "layer 0");
    }
    fs::write(&path, &bytes).unwrap();
    let mut spec = host.spec("a", &[path], None);
    spec.config.lowers[0].size = Some(bytes.len() as u64 + 1);
    refused(block_on(host.client().create("a", &spec)), ErrorKind::Invalid, "bytes long, not");
    spec.config.lowers[0].size = Some(bytes.len() as u64);
    let view = host.create("a", &spec);
    assert_eq!(read(&view.path, 0, 300_000), pattern(1, 300_000));
}

fn a_full_disk_is_told_to_the_writer_alone() {
    let mut host = Host::prepare();
    let tiny = support::Tmpfs::mount(&host.dir.join("tiny"), 4 << 20);
    host.run();
    let client = host.client();
    let (full, fine) = (host.create("full", &spec_in(&tiny.0, &[], Some(SIZE))), {
        let spec = host.spec("fine", &[], Some(SIZE));
        host.create("fine", &spec)
    });
    let file = open_direct(&full.path);
    let error = (0..8).find_map(|number| file.write(number << 20, &pattern(number, 1 << 20)).err()).unwrap();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
    write(&fine.path, 0, &pattern(1, 1 << 20));
    assert_eq!(read(&fine.path, 0, 1 << 20), pattern(1, 1 << 20));
    let view = host.get("full");
    assert!(view.stats.write.errors > 0 && view.stats.last_error.is_some(), "{view:?}");
    let error = block_on(client.restack("full", &tiny.0.join("layer"))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    assert!(try_read(&full.path, 0, 4096).is_ok(), "what is there can be read");
    let error = block_on(client.create("more", &spec_in(&tiny.0.join("."), &[], Some(SIZE)))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    drop(file);
    block_on(client.close("full", Uppers::Remove)).unwrap();
    assert_eq!(fs::read_dir(&tiny.0).unwrap().count(), 0);
    let again = host.create("again", &spec_in(&tiny.0, &[], Some(SIZE)));
    write(&again.path, 0, &pattern(2, 1 << 20));
    block_on(client.close("again", Uppers::Remove)).unwrap();
}

fn a_restack_that_fails_half_way_is_told_and_can_be_ended() {
    let mut host = Host::prepare();
    let place = host.dir.join("place");
    fs::create_dir(&place).unwrap();
    host.run_and_remove(&place);
    let client = host.client();
    let view = host.create("a", &host.spec("a", &[], Some(SIZE)));
    write(&view.path, 0, &pattern(1, 65536));
    // The directory is there when it is looked at, and gone when the sealed upper is to be moved.
    block_on(client.restack("a", &place.join("layer"))).unwrap_err();
    assert!(host.get("a").problem.is_some_and(|why| why.contains("move the sealed upper")), "{}", host.log());
    assert_eq!(read(&view.path, 0, 65536), pattern(1, 65536), "it can be read");
    assert!(try_write(&view.path, 0, &[1; 512]).is_err(), "what cannot be kept is not taken");
    let layer = host.dir.join("layer");
    block_on(client.restack("a", &layer)).unwrap();
    let now = host.get("a");
    assert_eq!((now.problem, now.config.lowers.len()), (None, 1));
    write(&view.path, 4096, &pattern(2, 4096));
    for _ in 0..2 {
        assert_eq!(read(&view.path, 0, 4096), pattern(1, 65536)[..4096]);
        assert_eq!(read(&view.path, 4096, 4096), pattern(2, 4096));
        host.kill();
        host.run();
    }
}

fn a_full_host_lets_devices_go_and_then_works_again() {
    let outer = Host::prepare();
    let tiny = support::Tmpfs::mount(&outer.dir.join("tiny"), 12 << 20);
    let mut host = Host::at(&tiny.0);
    host.config.cache.size_mib = 1;
    host.run();
    let client = host.client();
    let small = host.create("small", &host.spec("small", &[], Some(SIZE))).path;
    write(&small, 0, &pattern(1, 65536));
    let big = host.create("big", &host.spec("big", &[], Some(Bytes::mib(64))));
    let file = open_direct(&big.path);
    let mut at = 0;
    // To the last page.
    for piece in [1 << 20, 4096] {
        while file.write(at, &pattern(at, piece as usize)).is_ok() {
            at += piece;
        }
    }
    drop(file);
    let mut filler = fs::File::create(tiny.0.join("filler")).unwrap();
    while io::Write::write_all(&mut filler, &[0; 4096]).is_ok() {}
    for number in 0..20 {
        let error = block_on(client.create("more", &host.spec(&format!("more{number}"), &[], Some(SIZE)))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
        let error = block_on(client.restack("small", &host.upper_dir("small").join("layer"))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    }
    assert_eq!(read(&small, 0, 65536), pattern(1, 65536));
    block_on(client.close("big", Uppers::Remove)).unwrap();
    assert_eq!(block_on(client.list()).unwrap().len(), 1);
    block_on(client.restack("small", &host.upper_dir("small").join("layer"))).unwrap();
    host.create("more", &host.spec("more", &[], Some(SIZE)));
    host.kill();
    host.run();
    assert_eq!(block_on(client.list()).unwrap().len(), 2);
    assert_eq!(read(&small, 0, 65536), pattern(1, 65536));
    host.stop();
}

on_each_exporter! {
    a_device_is_written_kept_and_opened_again,
    a_restack_makes_a_layer_and_the_device_goes_on,
    every_layout_can_be_written_restacked_and_resized,
    disks_of_sandboxes_have_their_size_from_the_start,
    what_a_vmm_wrote_is_in_the_layer_though_the_hosts_kernel_kept_it,
    an_upper_has_one_writer_whatever_it_is_called,
    a_creation_that_fails_leaves_nothing_and_says_what_is_wrong,
    the_result_file_says_how_it_went,
    an_orderly_stop_keeps_devices_for_the_next_start,
    there_is_one_daemon_for_a_directory,
    what_is_done_is_counted,
    a_deep_stack_is_merged_and_shared_layers_are_not,
    a_chain_of_forty_layers_is_one_disk,
    a_cut_layer_is_refused,
    a_full_disk_is_told_to_the_writer_alone,
    a_restack_that_fails_half_way_is_told_and_can_be_ended,
    a_full_host_lets_devices_go_and_then_works_again,
}
