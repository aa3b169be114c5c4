//! The node server: reads its configuration, builds every part by hand, serves the HTTP API, and drains.
//!
//! This crate alone names concrete drivers. It translates HTTP into calls of the orchestrator, the templates and the
//! proxy, and their errors into statuses in one place (`http::error`).

#![forbid(unsafe_code)]

pub mod config;
mod disks;
mod host;
mod http;
mod metrics;
mod node;
mod repository;
mod secrets;
mod serve;
mod storage;
mod workshop;

pub use node::{Node, provision_guest};
