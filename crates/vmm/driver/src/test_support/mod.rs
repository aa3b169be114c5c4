//! For tests: a VMM without a guest, and the suite that every real driver runs.

mod fake;

pub use fake::{FakePlan, FakeVmm};
