//! Getting blobs here, ahead of whoever needs them.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use aenv_model::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::joined;
use crate::cache::Staging;
use crate::digest::Digest;
use crate::error::ImportError;
use crate::progress::Progress;
use crate::source::registry::Registry;
use crate::source::{Blob, Layer, Slice};
use crate::space::free_space;

/// Layers fetched at once. More connections don't make one registry faster.
const FETCHES: usize = 3;

/// Gets the blobs of one image.
pub(crate) struct Fetcher<'a> {
    pub(crate) image: &'a str,
    /// Where blobs are that are not here.
    pub(crate) registry: Option<&'a Registry>,
    pub(crate) staging: &'a Staging,
    pub(crate) progress: &'a (dyn Fn(Progress) + Send + Sync),
    pub(crate) cancel: &'a CancellationToken,
}

/// Blobs in order, each when it is here.
pub(crate) struct Fetched(mpsc::Receiver<Slice>);

impl Fetched {
    /// The next one; `None` when there are no more, or fetching failed.
    pub(crate) async fn next(&mut self) -> Option<Slice> {
        self.0.recv().await
    }
}

impl Fetcher<'_> {
    /// What fetches the blobs of `layers` from `first` on, and where they come out. There is room for all: were the fetches
    /// to wait for the unpacking, their connections would run into time-outs.
    pub(crate) fn ahead<'f>(
        &'f self,
        first: usize,
        layers: &'f [Layer],
    ) -> Result<(impl Future<Output = Result<(), ImportError>> + 'f, Fetched), ImportError> {
        let wanted = layers.get(first..).unwrap_or_default();
        self.check_space(wanted.iter().map(|layer| &layer.blob))?;
        let (send, receive) = mpsc::channel::<Slice>(wanted.len().max(1));
        // Collected: a lazy map's closure in this future would keep the future from being `Send`.
        let fetches: Vec<_> =
            (first..).zip(wanted).map(|(index, layer)| self.fetch(&layer.blob, index, layers.len())).collect();
        let fetching = async move {
            let mut fetched = stream::iter(fetches).buffered(FETCHES);
            while let Some(slice) = fetched.try_next().await? {
                // The receiver goes only when the work has failed, which is what is reported.
                let _ = send.send(slice).await;
            }
            Ok(()) // without a sender, the work knows that it has all
        };
        Ok((fetching, Fetched(receive)))
    }

    /// Whether there is room for the blobs that are to be fetched.
    pub(crate) fn check_space<'b>(&self, blobs: impl Iterator<Item = &'b Blob>) -> Result<(), ImportError> {
        let dir = self.staging.path();
        let free = free_space(dir).map_err(|source| ImportError::io("look at the space of", dir, source))?;
        let remote = blobs.filter(|blob| matches!(blob, Blob::Remote(_)));
        let compressed: u64 = remote.map(Blob::size).fold(0, u64::saturating_add);
        if compressed > free.get() {
            let doing = format!("fetch the {} of image {}", Bytes(compressed), self.image);
            return Err(ImportError::NoSpace { doing, free: Some(free) });
        }
        Ok(())
    }

    /// Gets a blob here, and verifies it.
    pub(crate) async fn fetch(&self, blob: &Blob, index: usize, total: usize) -> Result<Slice, ImportError> {
        let total_bytes = Bytes(blob.size());
        let tell = |done: u64| {
            (self.progress)(Progress::Layer { index, total, done_bytes: Bytes(done), total_bytes });
        };
        match (blob, self.registry) {
            (Blob::Remote(descriptor), Some(registry)) => {
                let path = self.staging.join(format!("blob-{index}"));
                let throttle = Throttle::default();
                let on_bytes = |done: u64| {
                    if throttle.passes(done, total_bytes.get()) {
                        tell(done);
                    }
                };
                registry.fetch(descriptor, &path, &on_bytes).await?;
                Slice::whole(&path).map_err(|source| ImportError::io("open", &path, source))
            }
            (Blob::Local { slice, digest }, _) => {
                if let Some(expected) = digest.clone() {
                    self.verify(slice.clone(), expected).await?;
                }
                tell(slice.length());
                Ok(slice.clone())
            }
            (Blob::Remote(_), None) => Err(ImportError::Invalid {
                image: self.image.to_owned(),
                problem: "a layer is in no place we can reach".to_owned(),
            }),
        }
    }

    async fn verify(&self, slice: Slice, expected: Digest) -> Result<(), ImportError> {
        let (staging, cancel) = (self.staging.clone(), self.cancel.clone());
        let digesting = tokio::task::spawn_blocking(move || {
            let found = slice.digest(&expected, || pass(&cancel));
            drop(staging); // the slice may be of a file in it
            match found {
                _ if cancel.is_cancelled() => Err(ImportError::Cancelled),
                Ok(found) => Ok((expected, found)),
                Err(source) => Err(ImportError::io("read", slice.path(), source)),
            }
        });
        match joined(digesting.await)?? {
            (expected, found) if expected == found => Ok(()),
            (expected, found) => Err(ImportError::Invalid {
                image: self.image.to_owned(),
                problem: format!("its blob {expected} has the digest {found}"),
            }),
        }
    }
}

/// Lets a report through for each mebibyte, and at both ends.
#[derive(Debug, Default)]
pub(super) struct Throttle(AtomicU64);

impl Throttle {
    pub(super) fn passes(&self, done: u64, total: u64) -> bool {
        let step = done >> 20;
        let last = self.0.swap(step, Ordering::Relaxed);
        step != last || done == 0 || done == total
    }
}

/// An error once cancelled.
pub(crate) fn pass(cancel: &CancellationToken) -> io::Result<()> {
    if cancel.is_cancelled() { Err(io::Error::other("cancelled")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_let_through_at_both_ends_and_each_mebibyte() {
        let throttle = Throttle::default();
        let passed: Vec<u64> = [0, 10, 1 << 19, 1 << 20, (1 << 20) + 1, (3 << 20) + 5, 3_200_000]
            .into_iter()
            .filter(|done| throttle.passes(*done, 3_200_000))
            .collect();
        assert_eq!(passed, [0, 1 << 20, (3 << 20) + 5, 3_200_000]);
    }
}
