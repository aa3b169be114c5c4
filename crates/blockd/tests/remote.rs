//! Layers that lie in a registry.

mod support;

use std::fs;
use std::path::PathBuf;

use aenv_block_client::{DeviceSpec, ErrorKind, Lower, Uppers};
use aenv_block_overlaybd::{ZFileOptions, ZFileWriter};
use aenv_block_source::Trace;
use aenv_model::Bytes;
use support::registry::{Registry, digest};
use support::{Host, block_on, layer, pattern, read, try_read, until, write};

const SIZE: Bytes = Bytes::mib(8);

#[test]
#[ignore = "run by other tests"]
fn the_daemon_of_a_test() {
    support::be_a_daemon();
}

/// A host whose daemon speaks to `registry`, and is not started yet.
fn host(registry: &Registry) -> Host {
    let mut host = Host::prepare();
    host.config.registry.plain_http = vec![registry.address.to_string()];
    host
}

/// A device of blobs, bottom first.
fn spec(host: &Host, registry: &Registry, name: &str, blobs: &[(&str, Option<u64>)]) -> DeviceSpec {
    let mut spec = host.spec(name, &[], None);
    spec.config.repo_blob_url = Some(registry.url());
    let lower = |(digest, size): &(&str, Option<u64>)| Lower {
        digest: Some((*digest).to_owned()),
        size: *size,
        dir: Some(host.dir.join("layers").join(&digest[7..])),
        ..Lower::default()
    };
    spec.config.lowers = blobs.iter().map(lower).collect();
    spec
}

/// A layer as registries have them: compressed, with checksums.
fn compressed(layer: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut writer = ZFileWriter::new(std::io::Cursor::new(Vec::new()), ZFileOptions::default()).unwrap();
    writer.write_all(layer).unwrap();
    writer.finish().unwrap().0.into_inner()
}

fn remote_layers_are_read_when_needed_and_kept() {
    let registry = Registry::start();
    let mut host = host(&registry);
    host.run();
    let bottom = layer(SIZE, &[(0, pattern(1, 4 << 20))]);
    let length = bottom.len() as u64;
    let (bottom, top) = (registry.push(bottom), registry.push(compressed(&layer(SIZE, &[(4096, pattern(2, 4096))]))));
    let blobs = [(&*bottom, Some(length)), (&*top, None)];
    let view = host.create("a", &spec(&host, &registry, "a", &blobs));
    let opened = registry.served();
    assert!(opened < 12, "headers, trailers and indexes: {opened}");
    assert_eq!(read(&view.path, 0, 4096), pattern(1, 4096));
    assert_eq!(read(&view.path, 4096, 4096), pattern(2, 4096));
    write(&view.path, 0, &pattern(3, 512));
    let fetched = registry.served();
    assert_eq!(read(&view.path, 512, 3584), pattern(1, 4096)[512..]);
    // Another of the same layers opens nothing, and finds blocks where the first left them.
    let second = host.create("b", &spec(&host, &registry, "b", &blobs));
    assert_eq!(read(&second.path, 0, 4096), pattern(1, 4096));
    assert_eq!(registry.served(), fetched);
    // With the registry gone, what was read once is there, also for the next process; a device that needs more says so.
    host.kill();
    registry.set_down(true);
    host.run();
    assert_eq!(host.get("b").problem, None, "{}", host.log());
    assert_eq!(read(&view.path, 0, 512), pattern(3, 512));
    assert_eq!(read(&second.path, 4096, 4096), pattern(2, 4096));
    assert!(try_read(&view.path, 3 << 20, 4096).is_err(), "not read before");
    let stats = host.get("a").stats;
    assert!(stats.read.errors > 0 && stats.last_error.as_ref().is_some_and(|words| words.contains("503")), "{stats:?}");
    registry.set_down(false);
    assert_eq!(read(&view.path, 3 << 20, 4096), pattern(1, 4 << 20)[3 << 20..][..4096], "it is back");
}

fn a_registry_that_does_not_give_a_layer_is_told_and_asked_again() {
    let registry = Registry::start();
    let mut host = host(&registry);
    host.run();
    let bytes = layer(SIZE, &[(0, pattern(1, 4096))]);
    let name = digest(&bytes);
    let spec = spec(&host, &registry, "a", &[(&name, Some(bytes.len() as u64))]);
    let error = block_on(host.client().create("a", &spec)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Remote, "{error}");
    assert!(error.to_string().contains("404"), "{error}");
    registry.push(bytes);
    registry.set_down(true);
    let error = block_on(host.client().create("a", &spec)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Remote, "{error}");
    registry.set_down(false);
    let view = host.create("a", &spec);
    assert_eq!(read(&view.path, 0, 4096), pattern(1, 4096));

    // One that is down when the daemon starts: the device is kept, and comes back when it is asked for again.
    let other = layer(SIZE, &[(0, pattern(2, 4096))]);
    let other = (registry.push(other.clone()), other.len() as u64);
    let remote = self::spec(&host, &registry, "remote", &[(&other.0, Some(other.1))]);
    let remote_path = host.create("remote", &remote).path;
    let local = host.create("local", &host.spec("local", &[], Some(SIZE))).path;
    write(&local, 0, &pattern(3, 4096));
    host.kill();
    fs::remove_dir_all(host.config.cache_dir()).unwrap();
    registry.set_down(true);
    host.run_at_once();
    assert_eq!(host.get("local").problem, None);
    assert_eq!(read(&local, 0, 4096), pattern(3, 4096), "it waits for nobody");
    let problem = host.get("remote").problem.unwrap();
    assert!(problem.contains("fetch bytes"), "{problem}");
    assert!(try_read(&remote_path, 0, 4096).is_err(), "never zeros");
    registry.set_down(false);
    assert_eq!(host.create("remote", &remote).problem, None);
    assert_eq!(read(&remote_path, 0, 4096), pattern(2, 4096));
}

fn damaged_blobs_are_errors_and_never_zeros() {
    let registry = Registry::start();
    let mut host = host(&registry);
    host.run();
    let plain = layer(SIZE, &[(0, pattern(1, 1 << 20))]);
    let blob = compressed(&plain);
    let name = digest(&blob);
    let spec = spec(&host, &registry, "a", &[(&name, Some(blob.len() as u64))]);
    let mut cut = blob.clone();
    cut.truncate(blob.len() - 1000);
    registry.push_as(&name, cut.clone());
    let error = block_on(host.client().create("a", &spec)).unwrap_err();
    assert!(error.to_string().contains("bytes long"), "{error}");
    let mut no_size = spec.clone();
    no_size.config.lowers[0].size = None;
    block_on(host.client().create("a", &no_size)).unwrap_err();

    let mut bent = blob.clone();
    bent[300_000] ^= 1;
    registry.push_as(&name, bent);
    let view = host.create("a", &spec);
    assert!(try_read(&view.path, 0, 1 << 20).is_err());
    registry.push_as(&name, blob);
    assert_eq!(read(&view.path, 0, 1 << 20), pattern(1, 1 << 20), "nothing damaged was kept");
}

fn a_cache_without_room_costs_speed_alone() {
    let registry = Registry::start();
    let mut host = host(&registry);
    let tiny = support::Tmpfs::mount(&host.dir.join("cache"), 1 << 20);
    host.config.cache.dir = Some(tiny.0.clone());
    host.run();
    let bytes = layer(SIZE, &[(0, pattern(1, 6 << 20))]);
    let length = bytes.len() as u64;
    let name = registry.push(bytes);
    let view = host.create("a", &spec(&host, &registry, "a", &[(&name, Some(length))]));
    for _ in 0..2 {
        assert!(read(&view.path, 0, 6 << 20) == pattern(1, 6 << 20));
    }
    assert_eq!(host.get("a").stats.read.errors, 0);
    host.stop();
}

fn a_whole_layer_is_fetched_in_the_background() {
    let registry = Registry::start();
    let mut host = host(&registry);
    host.run();
    let bytes = layer(SIZE, &[(0, pattern(1, 6 << 20))]);
    let length = bytes.len() as u64;
    let name = registry.push(bytes);
    for device in ["a", "b"] {
        let mut spec = spec(&host, &registry, device, &[(&name, Some(length))]);
        spec.config.download.enable = Some(true);
        host.create(device, &spec);
    }
    until("it is fetched", || host.log().contains("blob downloaded").then_some(()));
    registry.set_down(true);
    let path = host.get("b").path;
    assert!(read(&path, 0, 6 << 20) == pattern(1, 6 << 20));
}

fn a_start_is_recorded_and_replayed() {
    let registry = Registry::start();
    let mut host = host(&registry);
    host.run();
    let bytes = layer(SIZE, &[(0, pattern(1, 6 << 20))]);
    let length = bytes.len() as u64;
    let name = registry.push(bytes);
    let blobs = [(&*name, Some(length))];
    // By its configuration, until the device is closed.
    let trace = host.dir.join("recorded");
    let beside = |ending: &str| PathBuf::from(format!("{}{ending}", trace.display()));
    let mut recording = spec(&host, &registry, "a", &blobs);
    recording.config.record_trace_path = Some(trace.clone());
    let view = host.create("a", &recording);
    assert!(beside(".lock").exists() && !trace.exists());
    read(&view.path, 5 << 20, 4096);
    block_on(host.client().close("a", Uppers::Remove)).unwrap();
    assert!(beside(".ok").exists() && !beside(".lock").exists());
    let recorded = Trace::read(&trace).unwrap();
    assert!(recorded.accesses().iter().any(|access| access.offset / (1 << 20) == 5), "{recorded:?}");

    // Or by an empty file beside the last lower, until somebody removes the lock.
    let plain = spec(&host, &registry, "b", &blobs);
    let dir = plain.config.lowers[0].dir.clone().unwrap();
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("trace"), "").unwrap();
    let view = host.create("b", &plain);
    read(&view.path, 3 << 20, 4096);
    fs::remove_file(dir.join("trace.lock")).unwrap();
    until("the trace is written", || dir.join("trace.ok").exists().then_some(()));
    assert!(!Trace::read(&dir.join("trace")).unwrap().accesses().is_empty());
    block_on(host.client().close("b", Uppers::Remove)).unwrap();
    fs::copy(&trace, dir.join("trace")).unwrap();

    // A host without anything in its cache fetches by the trace what nobody has read yet.
    host.stop();
    fs::remove_dir_all(host.config.cache_dir()).unwrap();
    host.run();
    let mut accelerated = spec(&host, &registry, "c", &blobs);
    accelerated.config.lowers[0].dir = None;
    accelerated.config.lowers.push(Lower { dir: Some(dir), ..Lower::default() });
    accelerated.config.acceleration_layer = true;
    let view = host.create("c", &accelerated);
    assert_eq!(view.config.lowers.len(), 1);
    until("the trace is replayed", || host.log().contains("trace replayed").then_some(()));
    registry.set_down(true);
    assert_eq!(read(&view.path, 5 << 20, 4096), pattern(1, 6 << 20)[5 << 20..][..4096]);
    registry.set_down(false);
    block_on(host.client().restack("c", &host.dir.join("layer"))).unwrap();
    assert_eq!(host.get("c").config.lowers.len(), 2);
}

on_each_exporter! {
    remote_layers_are_read_when_needed_and_kept,
    a_registry_that_does_not_give_a_layer_is_told_and_asked_again,
    damaged_blobs_are_errors_and_never_zeros,
    a_cache_without_room_costs_speed_alone,
    a_whole_layer_is_fetched_in_the_background,
    a_start_is_recorded_and_replayed,
}
