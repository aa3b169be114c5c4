//! Captures: what a machine was at one instant.
//!
//! ```text
//!   CAPTURES/ID/capture.json      what it is; written last
//!              state              device state, as the VMM saved it
//!              memory-000.commit  layers of guest memory, bottom first
//!              disk.json          what its disk is made of: paths are relative to this directory
//!              disk-000.commit    those layers of it that lie on this host
//!              kernel, initramfs  what the machine was booted with
//!   CAPTURES/new-ID               one that is being made
//! ```
//!
//! * A capture never changes. Its files are hard links where they can be: captures that share layers share bytes, and each can
//!   be removed without a look at others. The file system counts.
//! * A crash leaves garbage (a directory that nobody names), which [`CaptureStore::sweep`] removes at the next start.
//! * In use, a capture is a [`Capture`]: a handle that keeps its files. One that was [doomed](Capture::doom) goes with its last
//!   handle; others stay until they are swept.
//! * One can be [taken apart](Capture::files) for another node, and [put together](CaptureStore::adopt) there.
//! * Chains of layers are kept short behind everybody's back.
//! * All machines that go on from one capture map one device of the storage daemon, and share its page cache.

#![forbid(unsafe_code)]

mod adopt;
mod backing;
mod capture;
mod chain;
mod error;
mod files;
mod manifest;
mod store;
mod take;
#[cfg(any(test, feature = "test-support"))]
pub mod test_support;

pub use adopt::{CaptureContent, CaptureFile, CaptureFileKind};
pub use backing::{Backing, HostBacking};
pub use capture::{Capture, STATE_FILE, device_owner};
pub use error::CaptureError;
pub use manifest::{BootFiles, MachineManifest, Manifest, MemoryFile};
pub use store::{CaptureStore, Swept};
pub use take::{Copied, Stopped};
