//! `aenv completion`: commands, flags and their values, for a shell to source.

use clap::CommandFactory as _;
use clap_complete::{Shell, generate};

use crate::args::{Arguments, CompletionShell};
use crate::output;

pub(crate) fn run(shell: CompletionShell) -> anyhow::Result<()> {
    let shell = match shell {
        CompletionShell::Bash => Shell::Bash,
        CompletionShell::Zsh => Shell::Zsh,
        CompletionShell::Fish => Shell::Fish,
    };
    let mut script = Vec::new();
    generate(shell, &mut Arguments::command(), "aenv", &mut script);
    Ok(output::line(String::from_utf8_lossy(&script).trim_end())?)
}
