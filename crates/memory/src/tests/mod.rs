//! Mappings of this process and of others, scanned and captured for real.

mod captures;
mod faults;
mod prefetches;
mod processes;
mod scans;
mod support;
