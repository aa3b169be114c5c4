//! Commands that the node itself runs in a guest.

use std::collections::BTreeMap;
use std::time::Duration;

/// A command to be run in a guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Command {
    /// Looked up in the guest's `PATH`.
    pub program: String,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// On top of the sandbox's own environment.
    pub env: BTreeMap<String, String>,
    /// Whose it is, by name or number.
    pub user: String,
    /// Where it begins; `None`: where its user is at home, or the sandbox's default.
    pub directory: Option<String>,
    /// For how long after its end those are still heard to whom it has left its output. `None`: as long as they live.
    pub output_grace: Option<Duration>,
}

/// A piece of what a command wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// To standard output.
    Stdout(Vec<u8>),
    /// To standard error.
    Stderr(Vec<u8>),
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandExit {
    /// It returned 0.
    pub success: bool,
    /// In words: `exit status 1`, `signal: killed`.
    pub status: String,
}
