//! QEMU as a VMM: the `microvm` machine, with KVM where it really works and an emulated CPU where it does not.
//!
//! [`Qemu::probe`] finds the binary and decides on the accelerator; the result is a [`Vmm`](aenv_vmm_driver::Vmm).
//! One machine is one QEMU process with two unix sockets in its work dir: `qmp.sock`, over which it is controlled
//! (`qmp`, `commands`), and `serial.sock`, the guest's console (`console`).

#![forbid(unsafe_code)]

mod arguments;
mod blank;
mod commands;
mod config;
mod console;
mod exit;
mod machine;
mod probe;
mod qmp;
mod socket;
mod start;
mod trial;

pub use config::{AccelChoice, QemuConfig};
pub use start::Qemu;
