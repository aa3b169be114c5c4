//! Crash-safe files and the node store
