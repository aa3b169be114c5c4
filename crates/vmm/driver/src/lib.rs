//! The VMM seam.
//!
//! A [`Vmm`] turns a [`MachineSpec`] into a running [`Machine`]; nothing above this crate knows which VMM runs.
//! A machine is one VMM process: it lives in the network namespace its spec names, survives the death of the process
//! that started it, and is found again by its [`MachineRecord`], to be adopted ([`Vmm::adopt`]) or ended.
//!
//! Beside the traits, this crate holds what every driver needs to keep those promises: the process supervisor
//! ([`VmmProcess`]), the end of machines nobody owns any more ([`end_orphan`], [`find_by_work_dir`]), the bounded
//! console log ([`BoundedLog`], [`Tail`]) and the search for guest memory ([`GuestMemory::of_image`]).

#![deny(unsafe_code)]

mod clock;
mod identity;
mod launch;
mod log;
mod machine;
mod memory;
mod orphan;
mod process;
mod spec;
mod tail;
#[cfg(feature = "test-support")]
pub mod test_support;

pub use clock::host_tsc_khz;
pub use identity::{Attachment, MachineRecord, find_by_work_dir};
pub use launch::ProcessSpec;
pub use log::BoundedLog;
pub use machine::{Blank, Machine, MachineExit, RunState, Vmm, VmmError, VmmIdentity, VmmKind};
pub use memory::{GuestMemory, MemoryRange};
pub use orphan::{OrphanEnd, end_orphan};
pub use process::{AdoptError, ProcessEnd, VmmProcess};
pub use spec::{BlankSpec, DiskLimit, DiskSpec, Flush, MachineSpec, NicSpec, RateLimit};
pub use tail::Tail;
