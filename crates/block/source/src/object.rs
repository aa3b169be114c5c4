//! Blobs that are objects of a store: layers that a node has published, read by ranges like those of a registry.

use std::io;
use std::sync::Arc;

use aenv_block_overlaybd::Source;
use aenv_objects::{Key, ObjectError, ObjectErrorKind, ObjectStore};
use tokio::sync::Semaphore;

use crate::network::Network;

/// Requests for one blob at a time; more would only share its bandwidth.
const MAX_REQUESTS: usize = 32;
/// The longest range of one request, which is held in memory.
const MAX_FETCH: usize = 8 << 20;

/// An object as a source. How long a read is repeated, its store decides.
#[derive(Debug)]
pub struct ObjectBlob {
    network: Arc<Network>,
    fetch: Arc<Fetch>,
    name: String,
    size: u64,
}

#[derive(Debug)]
struct Fetch {
    store: Arc<dyn ObjectStore>,
    key: Key,
    requests: Semaphore,
}

impl ObjectBlob {
    /// An object whose length is known from its descriptor. Nothing is asked yet; one that is shorter fails the reads
    /// behind its end.
    #[must_use]
    pub fn new(network: Arc<Network>, store: Arc<dyn ObjectStore>, key: Key, size: u64) -> Self {
        let name = format!("{}/{key}", store.name());
        let fetch = Arc::new(Fetch { store, key, requests: Semaphore::new(MAX_REQUESTS) });
        Self { network, fetch, name, size }
    }

    /// An object whose length its store is asked for. Blocks for at most the store's patience.
    pub fn find(network: Arc<Network>, store: Arc<dyn ObjectStore>, key: Key) -> io::Result<Self> {
        let mut blob = Self::new(network, store, key, 0);
        let fetch = Arc::clone(&blob.fetch);
        let info = blob.network.wait(async move { fetch.store.head(&fetch.key).await })?;
        blob.size = info.map_err(explain)?.size;
        Ok(blob)
    }
}

impl Source for ObjectBlob {
    fn name(&self) -> &str {
        &self.name
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.size) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut at = offset;
        for part in buf.chunks_mut(MAX_FETCH) {
            let (fetch, range) = (Arc::clone(&self.fetch), at..at + part.len() as u64);
            let read = self.network.wait(async move {
                let _permit = fetch.requests.acquire().await; // never closed
                fetch.store.get(&fetch.key, range).await
            })?;
            // A store gives exactly what was asked for.
            part.copy_from_slice(&read.map_err(explain)?);
            at += part.len() as u64;
        }
        Ok(())
    }
}

fn explain(error: ObjectError) -> io::Error {
    let kind = match error.kind() {
        ObjectErrorKind::NotFound => io::ErrorKind::NotFound,
        ObjectErrorKind::Length => io::ErrorKind::UnexpectedEof,
        ObjectErrorKind::Denied => io::ErrorKind::PermissionDenied,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use aenv_objects::LocalStore;
    use aenv_objects::test_support::{Ask, FaultyStore};

    use super::*;

    const LENGTH: usize = MAX_FETCH + 100_000;

    fn bytes() -> Vec<u8> {
        (0..LENGTH).map(|at| (at % 253) as u8).collect()
    }

    /// A store with one object, which can be made to fail.
    fn store(failing: &Arc<AtomicBool>) -> (tempfile::TempDir, Arc<FaultyStore>, Key) {
        let dir = tempfile::tempdir().unwrap();
        let (local, key) = (LocalStore::open(dir.path()).unwrap(), "layers/sha256:00".parse().unwrap());
        let path = local.path(&key);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes()).unwrap();
        let failing = Arc::clone(failing);
        let store = FaultyStore::new(Arc::new(local), move |ask, _| ask == Ask::Get && failing.load(Ordering::Relaxed));
        (dir, Arc::new(store), key)
    }

    #[test]
    fn an_object_is_read_by_ranges() {
        let (_dir, store, key) = store(&Arc::default());
        let (network, bytes) = (Network::start().unwrap(), bytes());
        let blob = ObjectBlob::find(network, Arc::clone(&store) as _, key.clone()).unwrap();
        assert_eq!(blob.size(), LENGTH as u64);
        assert!(blob.name().ends_with("layers/sha256:00"));
        for (offset, length) in [(0, 10), (1234, 100_000), (LENGTH - 1, 1), (0, 0), (100, LENGTH - 100)] {
            let mut buf = vec![0xEE; length];
            blob.read_at(offset as u64, &mut buf).unwrap();
            assert!(buf == bytes[offset..offset + length], "{length} bytes at {offset}");
        }
        assert_eq!(store.asked(), 1 + 5, "a long range is more than one request");
        let mut buf = [0; 10];
        assert_eq!(blob.read_at(LENGTH as u64 - 5, &mut buf).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(store.asked(), 6, "what can't be there is not asked for");
    }

    #[test]
    fn an_object_that_is_not_as_its_descriptor_says_is_an_error_never_other_bytes() {
        let failing = Arc::new(AtomicBool::new(false));
        let (_dir, store, key) = store(&failing);
        let network = Network::start().unwrap();
        let mut buf = [0; 10];
        let longer = ObjectBlob::new(Arc::clone(&network), Arc::clone(&store) as _, key.clone(), LENGTH as u64 + 5);
        assert_eq!(longer.read_at(LENGTH as u64 - 5, &mut buf).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        let gone: Key = "layers/sha256:11".parse().unwrap();
        let blob = ObjectBlob::new(Arc::clone(&network), Arc::clone(&store) as _, gone.clone(), 100);
        assert_eq!(blob.read_at(0, &mut buf).unwrap_err().kind(), io::ErrorKind::NotFound);
        let error = ObjectBlob::find(Arc::clone(&network), Arc::clone(&store) as _, gone).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        failing.store(true, Ordering::Relaxed);
        let blob = ObjectBlob::new(network, store, key, LENGTH as u64);
        assert!(blob.read_at(0, &mut buf).unwrap_err().downcast::<ObjectError>().is_ok());
        failing.store(false, Ordering::Relaxed);
        blob.read_at(0, &mut buf).unwrap();
        assert_eq!(buf[..], bytes()[..10], "a store that comes back is used at once");
    }
}
