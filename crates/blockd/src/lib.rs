//! `aenv-blockd`: layered images as block devices, for as long as the host runs.
//!
//! ```text
//!   aenv-server ──HTTP on a unix socket──▶ http ──▶ devices ──▶ device: one operation at a time
//!                                                                 │
//!   VMM ──▶ /run/…/devices/NAME ──▶ exporter ──▶ served ──▶ OverlayDevice ──▶ upper (flock)
//!                                    FUSE, ublk  counted          └─────────▶ layers, shared ──▶ files
//!                                                                                           └──▶ cache ──▶ registries
//! ```
//!
//! It outlives the server that asks it. What there is stands in a store: after a crash between any two steps, the next start
//! brings back what was there and undoes what was not yet. It never decides to end a device.

#![forbid(unsafe_code)]

mod background;
mod config;
mod context;
mod daemon;
mod device;
mod devices;
mod error;
mod exporter;
mod http;
mod layers;
mod lock;
mod meter;
mod metrics;
mod origins;
mod row;
mod rows;
mod served;

pub use config::{LoadConfigError, Loaded, load};
pub use context::Steps;
pub use daemon::{Daemon, InUse};
