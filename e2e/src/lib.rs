//! The end-to-end harness: real servers on free ports, each with a home of its own, torn down with everything they made.
//!
//! A test reads as sentences: [`Node::start`], do things through [`Node::client`] or [`Node::aenv`], [`Node::finish`].
//! `finish` stops the server and compares the [`Ledger`] with the one before it started: a VMM process, namespace, mount,
//! link, loop device or file too many fails the test. A node that is dropped without `finish` (a failed test) is killed
//! and swept.
//!
//! The programs come from the environment, which `cargo xtask e2e` sets: `AENV_E2E_SERVER`, `AENV_E2E_CLI`,
//! `AENV_E2E_AGENT`, `AENV_E2E_IMAGE` (an OCI layout folder). Without them, or without root, a test prints
//! `skipped: why` and passes.

#![forbid(unsafe_code)]

mod ledger;
mod machine;
mod node;
mod registry;
pub mod slow_link;
mod small_home;
pub mod tiny;
mod wait;

pub use ledger::Ledger;
pub use machine::Machine;
pub use node::{Node, NodeOptions};
pub use registry::Registry;
pub use small_home::SmallHome;
pub use wait::{PATIENCE, eventually};
