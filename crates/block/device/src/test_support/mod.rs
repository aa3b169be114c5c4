//! For the tests of whoever uses or implements [`BlockDevice`](crate::BlockDevice): devices that misbehave on purpose,
//! and the suite that a well-behaved one passes.

pub mod conformance;
mod counting;
mod failing;
mod lossy;
mod memory;
mod slow;

pub use counting::{Counting, Counts};
pub use failing::{Failing, Operation};
pub use lossy::{Lossy, SECTOR};
pub use memory::MemoryDevice;
pub use slow::Slow;
