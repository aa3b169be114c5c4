//! Starts a program: in its own session, as its user, with nothing inherited but what is said here.
//!
//! There is no `/bin/sh -c` in between, since the image may have no shell. Everything that can fail after the fork
//! without being the caller's mistake is done in the child with plain system calls on memory prepared before; an
//! unknown command therefore is a process that says so on its standard error and exits with 127, as under a shell.

#![allow(unsafe_code, reason = "pre_exec and execve; each block says why it is sound")]

use std::ffi::{CString, NulError, c_char};
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use nix::libc;
use rustix::process::{Gid, Uid};
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::oneshot;

use super::output::{Output, Source};
use super::reaper::{Exit, Reaper};
use crate::envd::User;

/// What to run.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) command: String,
    pub(crate) arguments: Vec<String>,
    /// The whole environment.
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) directory: PathBuf,
    pub(crate) user: User,
    pub(crate) channel: Channel,
}

/// How the process talks to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channel {
    /// Pipes for standard output and error, and for standard input unless it is `/dev/null`.
    Pipes { stdin: bool },
    /// A terminal of this size, the controlling one of the new session.
    Terminal(TerminalSize),
}

/// Size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TerminalSize {
    pub(crate) columns: u16,
    pub(crate) rows: u16,
}

impl From<TerminalSize> for Winsize {
    fn from(size: TerminalSize) -> Self {
        Self { ws_col: size.columns, ws_row: size.rows, ws_xpixel: 0, ws_ypixel: 0 }
    }
}

/// No process came to be.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpawnError {
    #[error("command, argument or environment contains a NUL byte")]
    Nul(#[from] NulError),
    #[error("no command given")]
    NoCommand,
    #[error("open a terminal")]
    Terminal(#[source] io::Error),
    #[error("fork or enter '{directory}'")]
    Fork { directory: PathBuf, source: io::Error },
    #[error("watch the process's pipes")]
    Watch(#[source] io::Error),
}

/// A process that was started, with our ends of its channels.
#[derive(Debug)]
pub(crate) struct Spawned {
    pub(crate) pid: i32,
    pub(crate) exit: oneshot::Receiver<Exit>,
    pub(crate) outputs: Vec<Output>,
    pub(crate) stdin: Option<pipe::Sender>,
    pub(crate) terminal: Option<std::sync::Arc<AsyncFd<OwnedFd>>>,
}

/// Our ends and the child's, before the fork.
enum Ends {
    Pipes { stdin: bool },
    Terminal { master: OwnedFd },
}

/// Forks and executes. Blocks until the child has executed its program (or failed to), which may have to be read from a
/// slow disk: call it on the blocking pool, inside a runtime.
pub(crate) fn spawn(program: &Program, reaper: &Reaper) -> Result<Spawned, SpawnError> {
    let mut image = ExecImage::prepare(program)?;
    // The program is executed by `image`; std only forks, wires the descriptors and reports an early failure.
    let mut command = Command::new("/");
    let ends = match program.channel {
        Channel::Pipes { stdin } => {
            command.stdin(if stdin { Stdio::piped() } else { Stdio::null() });
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            Ends::Pipes { stdin }
        }
        Channel::Terminal(size) => {
            let (master, slave) = open_terminal(size, &program.user).map_err(SpawnError::Terminal)?;
            let copy = || slave.try_clone().map(Stdio::from).map_err(SpawnError::Terminal);
            command.stdin(copy()?).stdout(copy()?).stderr(copy()?);
            Ends::Terminal { master }
        }
    };
    let identity = Identity {
        // Opened before the user changes; the file means whoever writes it.
        user: (Uid::from_raw(program.user.uid), Gid::from_raw(program.user.gid)),
        groups: program.user.groups.iter().copied().map(Gid::from_raw).collect(),
        directory: CString::new(program.directory.as_os_str().as_bytes())?,
        terminal: matches!(ends, Ends::Terminal { .. }),
        privileged: rustix::process::geteuid().is_root(),
    };
    // SAFETY: the closure runs in the forked child, where only this thread exists. It makes system calls on memory
    // allocated before the fork and does not allocate, lock or unwind; `ExecImage::execute` does not return.
    unsafe {
        command.pre_exec(move || {
            identity.assume()?;
            image.execute()
        })
    };
    let expectation = reaper.expect();
    let mut child =
        command.spawn().map_err(|source| SpawnError::Fork { directory: program.directory.clone(), source })?;
    let pid = child.id() as i32;
    let exit = expectation.claim(pid);
    // Closes the parent's copies of the terminal, without which its end would never be seen.
    drop(command);

    let watch = |result: io::Result<pipe::Receiver>| result.map_err(SpawnError::Watch);
    match ends {
        Ends::Pipes { stdin } => {
            let stdin = match child.stdin.take() {
                Some(pipe) if stdin => {
                    Some(pipe::Sender::from_owned_fd(OwnedFd::from(pipe)).map_err(SpawnError::Watch)?)
                }
                _ => None,
            };
            let mut outputs = Vec::with_capacity(2);
            if let Some(pipe) = child.stdout.take() {
                outputs.push(Output::pipe(Source::Stdout, watch(pipe::Receiver::from_owned_fd(OwnedFd::from(pipe)))?));
            }
            if let Some(pipe) = child.stderr.take() {
                outputs.push(Output::pipe(Source::Stderr, watch(pipe::Receiver::from_owned_fd(OwnedFd::from(pipe)))?));
            }
            Ok(Spawned { pid, exit, outputs, stdin, terminal: None })
        }
        Ends::Terminal { master } => {
            let master = std::sync::Arc::new(crate::sys::watch_descriptor(master).map_err(SpawnError::Watch)?);
            let outputs = vec![Output::terminal(std::sync::Arc::clone(&master))];
            Ok(Spawned { pid, exit, outputs, stdin: None, terminal: Some(master) })
        }
    }
}

fn open_terminal(size: TerminalSize, user: &User) -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::fs::{Mode, OFlags};

    let master = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    rustix::pty::unlockpt(&master)?;
    let name = rustix::pty::ptsname(&master, Vec::new())?;
    let slave = rustix::fs::open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::termios::tcsetwinsize(&master, size.into())?;
    // The user owns its terminal, or programs that reopen /dev/tty or the pts by name fail. Best effort: only root may.
    let _ = rustix::fs::fchown(&slave, Some(Uid::from_raw(user.uid)), None);
    let flags = rustix::fs::fcntl_getfl(&master)?;
    rustix::fs::fcntl_setfl(&master, flags | OFlags::NONBLOCK)?;
    Ok((master, slave))
}

/// Who and where the child is to be.
struct Identity {
    user: (Uid, Gid),
    groups: Vec<Gid>,
    directory: CString,
    terminal: bool,
    /// We may change the user; without that (an unprivileged test run) it stays ours.
    privileged: bool,
}

impl Identity {
    /// Called in the child; allocates nothing.
    fn assume(&self) -> io::Result<()> {
        rustix::process::setsid()?;
        if self.terminal {
            rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
        }
        // Before the user changes: afterwards the file belongs to root until the next exec. The sandbox's processes
        // shall be the first to go when memory runs out, never the agent.
        if let Ok(mut file) = File::options().write(true).open("/proc/self/oom_score_adj") {
            let _ = file.write_all(b"100");
        }
        if self.privileged {
            // The child has one thread, so the per-thread calls change the whole process.
            rustix::thread::set_thread_groups(&self.groups)?;
            rustix::thread::set_thread_gid(self.user.1)?;
            rustix::thread::set_thread_uid(self.user.0)?;
        }
        rustix::process::chdir(self.directory.as_c_str())?;
        Ok(())
    }
}

/// Everything `execve` needs, as the C strings and null-terminated arrays it wants.
struct ExecImage {
    /// Where the command may be, in the order of PATH.
    candidates: Vec<CString>,
    argv: Vec<*const c_char>,
    /// `/bin/sh PATH ARGUMENTS`: for a script without a `#!` line.
    shell_argv: Vec<*const c_char>,
    envp: Vec<*const c_char>,
    not_found: Vec<u8>,
    denied: Vec<u8>,
    too_long: Vec<u8>,
    /// What the arrays point into.
    _strings: Vec<CString>,
}

// SAFETY: the pointers point into the heap buffers of `_strings`, which move with the struct and are never written.
unsafe impl Send for ExecImage {}
// SAFETY: as above: shared access only reads.
unsafe impl Sync for ExecImage {}

const SHELL: &std::ffi::CStr = c"/bin/sh";

impl ExecImage {
    fn prepare(program: &Program) -> Result<Self, SpawnError> {
        if program.command.is_empty() {
            return Err(SpawnError::NoCommand);
        }
        let candidates = candidates(&program.command, &program.environment)?;
        let mut strings = vec![CString::new(program.command.as_bytes())?];
        for argument in &program.arguments {
            strings.push(CString::new(argument.as_bytes())?);
        }
        let arguments_end = strings.len();
        for (name, value) in &program.environment {
            strings.push(CString::new(format!("{name}={value}"))?);
        }
        let pointers = |strings: &[CString]| -> Vec<*const c_char> {
            strings.iter().map(|string| string.as_ptr()).chain([std::ptr::null()]).collect()
        };
        let argv = pointers(&strings[..arguments_end]);
        // The second word is the script's path, set when it is known.
        let shell_argv = [SHELL.as_ptr(), std::ptr::null()].into_iter().chain(argv[1..].iter().copied()).collect();
        Ok(Self {
            candidates,
            shell_argv,
            argv,
            envp: pointers(&strings[arguments_end..]),
            not_found: format!("exec: {}: not found\n", program.command).into_bytes(),
            denied: format!("exec: {}: permission denied\n", program.command).into_bytes(),
            too_long: format!("exec: {}: argument list too long\n", program.command).into_bytes(),
            _strings: strings,
        })
    }

    /// Becomes the program, or says why not and exits: 127 when it does not exist, 126 when it cannot be executed.
    /// Called in the child; allocates nothing.
    fn execute(&mut self) -> ! {
        let (mut denied, mut too_long) = (false, false);
        for candidate in &self.candidates {
            // SAFETY: path and arrays are valid, null-terminated, and outlive the call.
            unsafe { libc::execve(candidate.as_ptr(), self.argv.as_ptr(), self.envp.as_ptr()) };
            match nix::errno::Errno::last() {
                nix::errno::Errno::ENOEXEC => {
                    self.shell_argv[1] = candidate.as_ptr();
                    // SAFETY: as above.
                    unsafe { libc::execve(SHELL.as_ptr(), self.shell_argv.as_ptr(), self.envp.as_ptr()) };
                    denied = true;
                }
                nix::errno::Errno::ENOENT | nix::errno::Errno::ENOTDIR => {}
                nix::errno::Errno::E2BIG => too_long = true,
                _ => denied = true,
            }
        }
        let (words, status) = match (too_long, denied) {
            (true, _) => (&self.too_long, 126),
            (_, true) => (&self.denied, 126),
            _ => (&self.not_found, 127),
        };
        let _ = rustix::io::write(rustix::stdio::stderr().as_fd(), words);
        // SAFETY: ends the forked child without running the parent's exit handlers.
        unsafe { libc::_exit(status) }
    }
}

/// A command with a slash is a path; another is looked up in the PATH of its own environment.
fn candidates(command: &str, environment: &[(String, String)]) -> Result<Vec<CString>, NulError> {
    if command.contains('/') {
        return Ok(vec![CString::new(command)?]);
    }
    let path = environment.iter().rev().find(|(name, _)| name == "PATH").map_or("", |(_, value)| value.as_str());
    path.split(':')
        .map(|directory| CString::new(format!("{}/{command}", if directory.is_empty() { "." } else { directory })))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_looked_up_in_their_own_path() {
        let environment = [("PATH".to_owned(), "/a:/b:".to_owned())];
        let found = |command| candidates(command, &environment).unwrap();
        assert_eq!(found("ls"), [c"/a/ls".into(), c"/b/ls".into(), CString::from(c"./ls")]);
        assert_eq!(found("./ls"), [CString::from(c"./ls")]);
        assert!(candidates("a\0b", &environment).is_err());
    }
}
