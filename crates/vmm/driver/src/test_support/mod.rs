//! For tests: a VMM without a guest, and the suite that every real driver runs.

#[expect(clippy::missing_panics_doc, reason = "to panic is how the suite reports")]
pub mod conformance;
mod fake;
mod guest;

pub use fake::{FakePlan, FakeVmm};
pub use guest::{Rig, TestGuest};
