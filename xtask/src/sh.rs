//! Running other programs: what is run is printed first, so that it can be repeated by hand.

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::paths;

/// Prints a line of progress, set apart from the output of the programs that are run.
pub(crate) fn say(line: impl fmt::Display) {
    eprintln!("==> {line}");
}

/// A program and its arguments, started in the workspace root unless told otherwise.
#[derive(Debug)]
pub(crate) struct Run {
    command: Command,
    quiet: bool,
}

impl Run {
    pub(crate) fn new(program: impl AsRef<OsStr>) -> Self {
        let mut command = Command::new(program);
        command.current_dir(paths::root());
        Self { command, quiet: false }
    }

    /// The cargo that runs us, so that a `+toolchain` choice is kept.
    pub(crate) fn cargo() -> Self {
        Self::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
    }

    /// As root: directly when we are, otherwise through `sudo -n`, which never asks and so never hangs.
    pub(crate) fn as_root(program: impl AsRef<OsStr>) -> Self {
        if is_root() { Self::new(program) } else { Self::new("sudo").arg("-n").arg(program) }
    }

    /// As root, with the variables `names` of our environment kept (sudo drops them otherwise).
    pub(crate) fn as_root_keeping(names: &[&str], program: impl AsRef<OsStr>) -> Self {
        if is_root() {
            return Self::new(program);
        }
        Self::new("sudo").arg("-n").arg(format!("--preserve-env={}", names.join(","))).arg(program)
    }

    pub(crate) fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    pub(crate) fn args<I, S>(mut self, args: I) -> Self
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        self.command.args(args);
        self
    }

    pub(crate) fn env(mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.command.env(key, value);
        self
    }

    pub(crate) fn dir(mut self, dir: impl AsRef<Path>) -> Self {
        self.command.current_dir(dir);
        self
    }

    /// Does not print the command line.
    pub(crate) fn quiet(mut self) -> Self {
        self.quiet = true;
        self
    }

    /// Runs to the end with our own output streams; anything but success is an error that names the command line.
    pub(crate) fn run(mut self) -> Result<()> {
        self.echo();
        let status = self.command.stdin(Stdio::null()).status().with_context(|| format!("start `{self}`"))?;
        if !status.success() {
            bail!("`{self}` ended with {status}");
        }
        Ok(())
    }

    /// Like [`Run::run`] for programs that talk too much: what they say is shown only if they fail.
    pub(crate) fn run_hushed(mut self) -> Result<()> {
        self.echo();
        let output = self.command.stdin(Stdio::null()).output().with_context(|| format!("start `{self}`"))?;
        if !output.status.success() {
            eprint!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            bail!("`{self}` ended with {}", output.status);
        }
        Ok(())
    }

    /// Whether it runs to success; output goes to ours.
    pub(crate) fn succeeds(mut self) -> bool {
        self.echo();
        self.command.stdin(Stdio::null()).status().is_ok_and(|status| status.success())
    }

    /// Whether it runs to success; output is thrown away.
    pub(crate) fn probe(mut self) -> bool {
        self.command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    }

    /// Standard output as text; the standard error stream goes to ours.
    pub(crate) fn read(mut self) -> Result<String> {
        if !self.quiet {
            self.echo();
        }
        let output = self
            .command
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("start `{self}`"))?;
        if !output.status.success() {
            bail!("`{self}` ended with {}", output.status);
        }
        String::from_utf8(output.stdout).with_context(|| format!("output of `{self}` is not UTF-8"))
    }

    /// The prepared command, for callers that drive the streams themselves; its line is printed.
    pub(crate) fn into_command(self) -> Command {
        self.echo();
        self.command
    }

    fn echo(&self) {
        if !self.quiet {
            eprintln!("  $ {self}");
        }
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.command.get_program().to_string_lossy())?;
        for arg in self.command.get_args() {
            let arg = arg.to_string_lossy();
            if arg.is_empty() || arg.contains(|c: char| c.is_whitespace() || "\"'$*;&|<>()".contains(c)) {
                write!(f, " '{}'", arg.replace('\'', r"'\''"))?;
            } else {
                write!(f, " {arg}")?;
            }
        }
        Ok(())
    }
}

/// Whether we run as root.
pub(crate) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Whether `sudo` works without asking for a password.
pub(crate) fn can_sudo() -> bool {
    paths::which("sudo").is_some() && Run::new("sudo").args(["-n", "true"]).probe()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printed_command_line_can_be_pasted_into_a_shell() {
        let run = Run::new("echo").args(["plain", "two words", "it's", ""]);
        assert_eq!(run.to_string(), r"echo plain 'two words' 'it'\''s' ''");
    }
}
