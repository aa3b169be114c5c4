//! Sandbox life cycle: one driver task a sandbox, admission table, staged start
