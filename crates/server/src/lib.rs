//! Node server: HTTP API, wiring, configuration
