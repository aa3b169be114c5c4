//! A whole blob into the cache, while readers go first.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aenv_block_overlaybd::Source;
use sha2::{Digest, Sha256};

use super::pace::Pace;
use super::{Done, Job, JobError, Stop};
use crate::cache::{CachedBlob, Purpose};

/// Bytes of one read: a reader that comes meanwhile shares the line with that much.
const PIECE: usize = 1 << 20;
/// How long readers that wait without a break hold up the next piece.
const LONGEST_YIELD: Duration = Duration::from_secs(1);

/// When and how fast to download.
#[derive(Debug, Clone)]
pub struct DownloadOptions {
    /// Wait before the first byte, so that what is being started has the line for itself.
    pub delay: Duration,
    /// Up to this much longer, at random, so that nodes that start together don't download together.
    pub delay_extra: Duration,
    /// Bytes a second at most; 0 for no bound.
    pub rate: u64,
    /// How often it is begun. What came stays in the cache.
    pub attempts: u32,
    /// Pause between attempts.
    pub pause: Duration,
}

impl Default for DownloadOptions {
    fn default() -> Self {
        Self {
            delay: Duration::from_secs(300),
            delay_extra: Duration::from_secs(30),
            rate: 100 << 20,
            attempts: 5,
            pause: Duration::from_secs(5),
        }
    }
}

/// Fetches what the cache has not of `blob`, in order, and compares all of it with the digest, if that is what the blob is
/// known by. A blob that turns out to be something else is refused to readers from then on.
///
/// Errors: no thread could be started.
pub fn download(blob: Arc<CachedBlob>, options: DownloadOptions) -> io::Result<Job> {
    Job::spawn("block-download", move |stop| {
        let name = || blob.key().to_owned();
        let (size, capacity) = (blob.size(), blob.cache.capacity());
        if size > capacity {
            return Err(JobError::TooLarge { blob: name(), size, capacity });
        }
        stop.sleep(options.delay + options.delay_extra.mul_f64(rand::random()))?;
        let mut fetched = 0;
        let mut left = options.attempts;
        loop {
            let error = match once(&blob, &options, stop, &mut fetched) {
                Ok(verified) => {
                    tracing::info!(blob = blob.key(), fetched, verified, "blob downloaded");
                    return Ok(Done { fetched, verified, failed: 0 });
                }
                Err(JobError::Cancelled) => return Err(JobError::Cancelled),
                Err(error) => error,
            };
            left = left.saturating_sub(1);
            tracing::warn!(blob = blob.key(), error = &error as &dyn std::error::Error, left, "download failed");
            if left == 0 {
                return Err(error);
            }
            stop.sleep(options.pause)?;
        }
    })
}

/// Reads all of it through the cache; tells whether there was a digest to compare with.
fn once(blob: &CachedBlob, options: &DownloadOptions, stop: &Stop, fetched: &mut u64) -> Result<bool, JobError> {
    let expected = sha256_of(blob.key());
    let mut hash = Sha256::new();
    let mut pace = Pace::new(options.rate, Instant::now());
    let mut buf = vec![0; PIECE];
    let mut offset = 0;
    while offset < blob.size() {
        blob.cache.quiet.wait(LONGEST_YIELD);
        let piece = &mut buf[..(blob.size() - offset).min(PIECE as u64) as usize];
        let now = blob
            .read_for(Purpose::Background, offset, piece)
            .map_err(|source| JobError::Read { blob: blob.key().to_owned(), source })?;
        *fetched += now;
        if expected.is_some() {
            hash.update(&*piece);
        }
        offset += piece.len() as u64;
        stop.sleep(pace.take(now, Instant::now()))?;
    }
    let Some(expected) = expected else { return Ok(false) };
    let found = hex::encode(hash.finalize());
    if found != expected {
        blob.condemn();
        return Err(JobError::WrongDigest { blob: blob.key().to_owned(), found: format!("sha256:{found}") });
    }
    blob.absolve();
    Ok(true)
}

/// The hexadecimal digits of a SHA-256 digest.
fn sha256_of(name: &str) -> Option<&str> {
    let hex = name.strip_prefix("sha256:")?;
    (hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))).then_some(hex)
}
