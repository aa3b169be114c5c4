//! How a session can end, what its user is told, and the exit code.

use std::io::{self, IsTerminal as _};

use aenv_model::SandboxId;

/// Why a session is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The shell exited; the code is as a shell reports it.
    Shell(u8),
    /// The agent closed the stream in order, without an exit code.
    Closed,
    /// The sandbox was paused.
    Paused,
    /// The sandbox was ended.
    Deleted,
    /// Nothing was heard for too long.
    Lost,
    /// We were told to end by a signal; the code is as a shell reports it.
    Interrupted(u8),
    /// Its time was over, and it was killed.
    Overdue,
}

/// Exit code for a program that took too long, as timeout(1) has it.
pub(crate) const OVERDUE: u8 = 124;

impl Ending {
    /// The exit code of `aenv`.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Shell(code) | Self::Interrupted(code) => code,
            Self::Closed => 0,
            Self::Paused | Self::Deleted | Self::Lost => 130,
            Self::Overdue => OVERDUE,
        }
    }

    fn notice(self, sandbox: SandboxId) -> Option<String> {
        Some(match self {
            Self::Shell(code) => {
                format!("Shell exited ({code}). Sandbox {sandbox} is still there: aenv connect {sandbox}")
            }
            Self::Closed => format!("Session closed. Reconnect with: aenv connect {sandbox}"),
            Self::Paused => format!("Sandbox {sandbox} was paused. Resume it with: aenv connect {sandbox}"),
            Self::Deleted => format!("Sandbox {sandbox} was deleted."),
            Self::Lost => format!("Contact with sandbox {sandbox} was lost. Reconnect with: aenv connect {sandbox}"),
            Self::Overdue => "The program took too long and was killed.".to_owned(),
            Self::Interrupted(_) => return None,
        })
    }

    /// Tells the user, in one line on standard error. The terminal must be out of raw mode.
    pub(crate) fn tell(self, sandbox: SandboxId) {
        let Some(notice) = self.notice(sandbox) else { return };
        // Whatever the shell left on the line makes room.
        let clear = if io::stderr().is_terminal() { "\r\x1b[2K" } else { "" };
        eprintln!("{clear}{notice}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_ending_has_its_exit_code() {
        let table = [
            (Ending::Shell(0), 0),
            (Ending::Shell(137), 137),
            (Ending::Closed, 0),
            (Ending::Paused, 130),
            (Ending::Deleted, 130),
            (Ending::Lost, 130),
            (Ending::Interrupted(143), 143),
            (Ending::Overdue, 124),
        ];
        for (ending, code) in table {
            assert_eq!(ending.code(), code, "{ending:?}");
        }
    }

    #[test]
    fn the_way_back_is_named_while_there_is_one() {
        let id = SandboxId::new();
        for ending in [Ending::Shell(1), Ending::Paused, Ending::Lost] {
            assert!(ending.notice(id).unwrap().contains(&format!("aenv connect {id}")), "{ending:?}");
        }
        assert!(!Ending::Deleted.notice(id).unwrap().contains("aenv connect"));
    }
}
