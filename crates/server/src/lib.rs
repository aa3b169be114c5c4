//! The node server: reads its configuration, builds every part by hand, serves the HTTP API, and drains.
//!
//! This crate alone names concrete drivers. It translates HTTP into calls of the orchestrator, the templates and the
//! proxy, and their errors into statuses in one place (`http::error`).

#![forbid(unsafe_code)]

mod audit;
pub mod config;
mod disks;
mod host;
mod http;
mod keys;
mod metrics;
mod node;
mod repository;
mod secrets;
mod serve;
mod storage;
mod tls;
mod workshop;

pub use node::{Node, provision_guest};
