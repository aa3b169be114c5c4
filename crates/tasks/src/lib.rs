//! Task scopes and the reaper
