//! `aenv completion`: what a shell sources to have command lines completed; and `aenv man`.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::Context as _;
use clap::CommandFactory as _;
use clap_complete::env::Shells;

use crate::args::{Arguments, CompletionShell};
use crate::output;

/// The variable by which the shell asks us for candidates.
pub(crate) const VARIABLE: &str = "COMPLETE";

/// Prints a script that asks `aenv` itself, with the shell's name in `COMPLETE`.
pub(crate) fn run(shell: CompletionShell) -> anyhow::Result<()> {
    let shell = match shell {
        CompletionShell::Bash => "bash",
        CompletionShell::Zsh => "zsh",
        CompletionShell::Fish => "fish",
    };
    let shells = Shells::builtins();
    let shell = shells.completer(shell).with_context(|| format!("no completion for {shell}"))?;
    let mut script = Vec::new();
    shell.write_registration(VARIABLE, "aenv", "aenv", "aenv", &mut script).context("write the script")?;
    Ok(output::line(String::from_utf8_lossy(&script).trim_end())?)
}

/// Writes a manual page for each command into a directory, which is made if absent.
pub(crate) fn man(dir: &Path) -> anyhow::Result<()> {
    let write = || -> io::Result<()> {
        fs::create_dir_all(dir)?;
        clap_mangen::generate_to(Arguments::command(), dir)
    };
    write().with_context(|| format!("write manual pages to {}", dir.display()))
}
