//! The VMM seam.
//!
//! A [`Vmm`] turns a [`MachineSpec`] into a running [`Machine`]; nothing above this crate knows which VMM runs.
//! A machine is one VMM process: it lives in the network namespace its spec names, survives the death of the process
//! that started it, and can be found again by its [`MachineRecord`].

mod machine;
mod memory;
mod process;
mod spec;

pub use machine::{Machine, MachineExit, Vmm, VmmError, VmmIdentity, VmmKind};
pub use memory::{GuestMemory, MemoryRange};
pub use process::MachineRecord;
pub use spec::{DiskSpec, MachineSpec, NicSpec};
