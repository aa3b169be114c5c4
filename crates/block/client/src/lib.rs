//! What `aenv-blockd` and its users say to each other.
//!
//! * [`DeviceConfig`] is what a device is made of: overlaybd's image config, `image.json`.
//! * [`BlockdConfig`] is what a daemon reads when it starts.
//! * [`BlockdClient`] speaks HTTP/1.1 and JSON with a daemon on its unix socket; [`wire`] are the messages. Each call has a
//!   deadline, and each error a [kind](ErrorKind) to act on.
//! * [`Daemon`] starts one where none answers.
//! * [`LayeredDiskStore`] gives sandboxes disks that are devices of a daemon.

#![forbid(unsafe_code)]

mod client;
mod daemon;
mod device_config;
mod disks;
mod settings;
pub mod wire;

pub use client::{BlockdClient, BlockdError, ErrorKind};
pub use daemon::{Daemon, DaemonConfig, EXIT_IN_USE, StartDaemonError};
pub use device_config::{DeviceConfig, DeviceConfigError, DownloadConfig, Lower, UpperConfig};
pub use disks::LayeredDiskStore;
pub use settings::{
    BlockdConfig, CacheSettings, CompactionSettings, DownloadSettings, ExportChoice, ObjectAddressing,
    ObjectStoreSettings, PrefetchSettings, RegistrySettings, Secret,
};
pub use wire::{
    Caching, DeviceSpec, DeviceStats, DeviceView, Info, LatencyStats, NewUpper, OperationStats, PROTOCOL,
    RestackedView, Uppers,
};
