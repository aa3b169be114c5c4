//! For the tests of whoever implements [`Exporter`](crate::Exporter): the suite that a well-behaved one passes, devices
//! that can be held and watched, and open files as a VMM opens them.

pub mod conformance;
mod devices;
mod opened;

pub use devices::{Growing, Held, Recording, Step};
pub use opened::{Opened, within};
