//! Bytes of layers that are not on this host yet: blobs read by ranges, and what makes that bearable.
//!
//! ```text
//!  overlaybd reader ──▶ Recorded ──▶ CachedBlob ──miss──▶ RegistryBlob ──▶ Network ──HTTP──▶ registry, its storage
//!                          │             │ ▲               (retry, tokens, redirects)
//!                        trace           │ │              ObjectBlob ──▶ Network ──▶ object store
//!                                  cache files ◀── Job (download, prefetch): yields to readers
//! ```
//!
//! Every box on the left is a [`Source`]: blocking, for many threads, and stackable. A read returns the bytes that were
//! asked for or an error, which a block device reports as EIO; never zeros, never another's bytes.

#![forbid(unsafe_code)]

mod background;
mod cache;
mod credentials;
mod network;
mod object;
mod registry;
mod trace;

pub use aenv_block_overlaybd::{LocalFile, Source};
pub use background::{Done, DownloadOptions, Job, JobError, download, prefetch};
pub use cache::{BlockCache, CacheOptions, CacheStats, CachedBlob, OpenCacheError};
pub use credentials::{CredentialFile, CredentialSource, Credentials, DockerConfig};
pub use network::Network;
pub use object::ObjectBlob;
pub use registry::{
    ExchangeError, FetchError, FetchProblem, FindBlobError, Registry, RegistryBlob, RegistryOptions, RegistryUrlError,
    exchange_identity,
};
pub use trace::{
    Access, MAX_ACCESSES, ReadTraceError, RecordTraceError, Trace, TraceProblem, TraceRecorder, TraceRecording,
    TraceUse,
};
