//! End-to-end harness and suites
