//! Layers that lie in an S3-compatible store.

#[path = "../../../objects/tests/support/mod.rs"]
mod s3;
mod support;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aenv_block_device::BlockDevice;
use aenv_block_overlaybd::{LocalFile, Stack};
use aenv_block_source::{BlockCache, CacheOptions, DownloadOptions, Network, ObjectBlob, Source, download};
use aenv_objects::{Key, ObjectError, ObjectStore, S3Config, S3Credentials, S3Store};
use s3::Server;
use support::{digest, read};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../overlaybd/tests/fixtures").join(name)
}

/// The server's threads: its readers block theirs.
fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

#[test]
fn a_stack_of_published_layers_reads_like_a_local_one() {
    let runtime = runtime();
    let server = runtime.block_on(Server::start());
    let config = S3Config { prefix: "managed-layers".into(), ..server.config() };
    let store: Arc<dyn ObjectStore> = Arc::new(S3Store::open(&config).unwrap());
    let (network, dir) = (Network::start().unwrap(), tempfile::tempdir().unwrap());
    let cache = BlockCache::open(&CacheOptions::new(dir.path(), 8 << 20)).unwrap();
    let mut remote: Vec<Arc<dyn Source>> = Vec::new();
    let mut local: Vec<Arc<dyn Source>> = Vec::new();
    for name in ["stack/st-base.commit", "zlsmt/zl-tar-lz4-4k.commit", "stack/st-top.commit"] {
        let path = golden(name);
        let key: Key = digest(&std::fs::read(&path).unwrap()).parse().unwrap();
        runtime.block_on(store.put_file(&key, &path)).unwrap();
        let blob = ObjectBlob::find(Arc::clone(&network), Arc::clone(&store), key.clone()).unwrap();
        assert_eq!(blob.name(), format!("s3://our-bucket/managed-layers/{key}"));
        let blob = Arc::new(cache.blob(key.as_str(), Arc::new(blob)));
        let options =
            DownloadOptions { delay: Duration::ZERO, delay_extra: Duration::ZERO, ..DownloadOptions::default() };
        assert!(download(Arc::clone(&blob), options).unwrap().wait().unwrap().verified);
        remote.push(blob);
        local.push(Arc::new(LocalFile::open(&path).unwrap()));
    }
    let (remote, local) = (Stack::open_parallel(&remote, 3).unwrap(), Stack::open(local).unwrap());
    let read = |stack: &Stack| {
        let mut bytes = vec![0; 2 << 20];
        stack.read_at(0, &mut bytes).unwrap();
        bytes
    };
    assert!(read(&remote) == read(&local));
}

#[test]
fn a_store_that_refuses_or_has_not_is_an_error_of_that_kind() {
    let runtime = runtime();
    let server = runtime.block_on(Server::start());
    let network = Network::start().unwrap();
    let key: Key = digest(b"x").parse().unwrap();
    for (credentials, kind) in [
        (server.config().credentials, io::ErrorKind::NotFound),
        (S3Credentials::Anonymous, io::ErrorKind::PermissionDenied),
    ] {
        let store = Arc::new(S3Store::open(&S3Config { credentials, ..server.config() }).unwrap());
        let error = read(&ObjectBlob::new(Arc::clone(&network), store, key.clone(), 100), 0, 10).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.downcast::<ObjectError>().unwrap().to_string().contains(key.as_str()));
    }
}
