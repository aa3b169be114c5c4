//! The snapshot repository: templates and snapshots that nodes share.
//!
//! ```text
//!   announce ─▶ claim ─▶ publish ─────────────▶ find, list ─▶ fetch ─▶ ArtifactCache ─▶ files on this node
//!   a name      a build    layers, artifacts,                             │
//!                          name, record last     delete ─▶ sweep          └ by digest, pinned while in use
//! ```
//!
//! All state is objects of one [`ObjectStore`](aenv_objects::ObjectStore), a folder or a bucket; `layout.rs` says where what
//! is. Nodes know nothing of each other. What makes that safe, on a store that decides races about single objects only:
//!
//! * **Data first, record last.** A record is one object; the write of it is the moment at which a snapshot is there, and all
//!   of it. What it names was written before, and is removed only after.
//! * **Deleting is one write too**: a tombstone in the record's place, if the record still is what was looked at. From then
//!   on it is not there for anybody. Name, artifacts and tombstone go after it; if they do not, the sweep does it.
//! * **Names and builds are claimed by conditional writes.** A name belongs to the record that it leads to. One that leads
//!   nowhere is free for others once the time between claiming it and writing the record is over for sure.
//! * **Layers are counted by looking.** Records name them by digest and share them, nobody keeps a number. A sweep reads all
//!   leases, then all records, and removes the layers that neither name. If there is a record it does not understand, which
//!   may name any, it removes none.
//! * **A publication takes a lease** on all that it needs before it looks at what is there already. Then it looks whether
//!   somebody is sweeping, and waits for the end of that. A sweep says that it sweeps before it looks at leases. So either
//!   the sweep sees the lease, or the publication sees the sweep: no layer is reused that is about to go.
//! * **Leases and turns end by themselves.** Whoever holds one stops using it [a margin](Options::margin) before it ends, so
//!   that clocks may differ by as much.
//!
//! A crash between any two writes leaves garbage at most, and the sweep takes it. What the repository cannot promise: an
//! end to a write that is still under way when its writer has given up on it, as long as it arrives later than the margin.

#![forbid(unsafe_code)]

mod alias;
mod build;
mod cache;
mod delete;
mod digest;
mod error;
mod fetch;
mod layout;
mod lease;
mod pack;
mod publish;
mod read;
mod record;
mod repository;
mod sweep;

pub use cache::{ArtifactCache, CacheError, Pinned};
pub use digest::{Digest, ParseDigestError};
pub use error::{RepositoryError, RepositoryErrorKind};
pub use fetch::Fetched;
pub use pack::Packing;
pub use publish::{Content, FileKind, NewFile, Publication};
pub use read::{Listing, Problem};
pub use record::{Build, BuildStatus, Committed, Context, ErrorReason, Recipe, Record, Resources, Source, StoredFile};
pub use repository::{Clock, Options, Repository};
pub use sweep::Swept;
