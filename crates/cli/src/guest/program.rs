//! What to start in a sandbox.

use std::time::Duration;

use aenv_guest_proto::wire::process::{PTY, ProcessConfig, StartRequest, pty};

/// A program.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    /// Looked up in the guest's `PATH`.
    pub(crate) command: String,
    pub(crate) arguments: Vec<String>,
    /// On top of the sandbox's own environment.
    pub(crate) environment: Vec<(String, String)>,
    /// Where it begins; `None`: the agent's default.
    pub(crate) directory: Option<String>,
    /// Who runs it; `None`: the agent's default.
    pub(crate) user: Option<String>,
    /// How long it may take. The agent kills it somewhat later, in case that we are gone by then.
    pub(crate) limit: Option<Duration>,
    pub(crate) channel: Channel,
}

/// How the program talks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channel {
    /// Standard output and error apart; standard input empty, or what is sent.
    Pipes { input: bool },
    /// A terminal of this size.
    Terminal(TerminalSize),
}

/// Size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TerminalSize {
    pub(crate) columns: u16,
    pub(crate) rows: u16,
}

impl From<TerminalSize> for PTY {
    fn from(size: TerminalSize) -> Self {
        let size = pty::Size { cols: size.columns.into(), rows: size.rows.into(), ..Default::default() };
        Self { size: size.into(), ..Default::default() }
    }
}

impl From<Program> for StartRequest {
    fn from(program: Program) -> Self {
        let process = ProcessConfig {
            cmd: program.command,
            args: program.arguments,
            envs: program.environment.into_iter().collect(),
            cwd: program.directory,
            ..Default::default()
        };
        let (pty, stdin) = match program.channel {
            Channel::Pipes { input } => (None, input),
            Channel::Terminal(size) => (Some(PTY::from(size)), true),
        };
        Self { process: process.into(), pty: pty.into(), stdin: Some(stdin), ..Default::default() }
    }
}
