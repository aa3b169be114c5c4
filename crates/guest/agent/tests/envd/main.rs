//! Runs the built agent in envd mode on loopback and talks to it as the SDKs do.

mod files;
mod harness;
mod hostile;
mod processes;
mod watching;
mod wire;
