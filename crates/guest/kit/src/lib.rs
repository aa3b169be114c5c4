//! Guest kits: what a microVM boots. A kit is a stock kernel of the host's distribution and an initramfs that holds the
//! modules a guest needs, in load order, and the guest agent as PID 1.
//!
//! [`provision()`] makes one, or finds it made: the kernel package is fetched by apt from the distribution's archive into a
//! directory of ours, checked against its signatures, and never installed. Kits lie side by side under the hash of their
//! contents, so that a snapshot can name the one it was taken with.

#![forbid(unsafe_code)]

mod apt;
mod apt_sources;
mod choice;
mod cmdline;
mod deb;
mod deb822;
mod digest;
mod distribution;
mod error;
mod initramfs;
mod kernel;
mod kernel_image;
mod module;
mod module_set;
mod provision;
mod store;
#[cfg(test)]
mod testing;

pub use error::KitError;
pub use kernel::{Origin, OriginPackage};
pub use provision::{KitConfig, Say, provision, refresh};
pub use store::{GuestKit, list, open, remove};
