//! What steps do, on the machine of a build.
//!
//! Whatever a client sent is only ever used in the guest: its commands, its archives, and the names in its steps, which are
//! arguments of our scripts and no part of them.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use aenv_model::{Command, CommandExit, Output};
use tokio::time::Instant;

use crate::build::{BuildLog, LogLevel};
use crate::context::Context;
use crate::record::{BuildStage, Recipe};
use crate::seams::Bench;
use crate::step::{Action, Copy, Step};
use crate::uploads::Uploads;

const COMMON: &str = include_str!("scripts/common.sh");
const COPY: &str = include_str!("scripts/copy.sh");
const WORKDIR: &str = include_str!("scripts/workdir.sh");
const USER: &str = include_str!("scripts/user.sh");
const PROVISION: &str = include_str!("scripts/provision.sh");

/// The shell of builds, and of what SDKs run.
const SHELL: &str = "/bin/bash";

/// Longest line of output that is one entry of a log.
const LINE_LIMIT: usize = 4096;

/// For how long those are heard that a step leaves running: it has ended, whoever holds its output.
const GRACE: Duration = Duration::from_secs(1);

/// Lines of a failed script's output that are told with the failure.
const TOLD_LINES: usize = 5;

/// Between two tries of a ready command, and all of them together.
const READY_PAUSE: Duration = Duration::from_secs(2);
const READY_PATIENCE: Duration = Duration::from_secs(600);

/// What a start command gets to come up that has no ready command.
const DEFAULT_READY: &str = "sleep 20";

/// A build at work on a machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work<'a> {
    pub(crate) bench: &'a dyn Bench,
    pub(crate) uploads: &'a Uploads,
    pub(crate) log: &'a BuildLog,
}

impl Work<'_> {
    /// What every template has, on the disk of an image. An image that has not the means for it goes without.
    pub(crate) async fn provision(&self) -> Result<(), String> {
        match self.script(PROVISION, &[]).await {
            Err(Problem::Lost(why)) => Err(why),
            Err(Problem::Failed(why)) if why.contains(&format!("{SHELL}:")) => {
                Err(format!("the image has no {SHELL}, which builds with steps need"))
            }
            Err(Problem::Failed(why)) => {
                let line = format!("The image cannot be prepared as others are: {why}");
                self.log.add(BuildStage::Base, LogLevel::Warn, line);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// One step. `number` of `total`, from 1.
    pub(crate) async fn step(
        &self,
        step: &Step,
        (number, total): (u32, usize),
        context: &mut Context,
    ) -> Result<(), String> {
        match &step.action {
            Action::Run { command, user } => {
                let user = user.as_ref().unwrap_or(&context.user);
                let failed = |why: String| format!("failed to run command '{command}': {why}");
                let lines = Lines::new(self.log, BuildStage::Step(number), format!("[builder {number}/{total}] "));
                let command_of_shell = Command { output_grace: Some(GRACE), ..shell(command, user, context) };
                let exit = self.bench.run(&command_of_shell, &|output| lines.add(output)).await;
                lines.finish();
                match exit.map_err(|why| failed(format!("command failed: {why}")))? {
                    CommandExit { success: true, .. } => Ok(()),
                    CommandExit { status, .. } => Err(failed(status)),
                }
            }
            Action::Copy(copy) => self.copy(copy, context).await,
            Action::Env(pairs) => context.set(pairs),
            Action::Workdir(path) => {
                let failed = |error| format!("failed to make the directory '{}': {error}", start_of(path));
                let path = context.enter(path).map_err(failed)?;
                let made = self.script(WORKDIR, &[&path, &context.user]).await;
                made.map_err(|why| format!("failed to make the directory '{path}': {}", why.text()))
            }
            Action::User(user) => {
                let failed = |error| format!("failed to make the user '{}': {error}", start_of(user));
                let user = context.expanded(user).map_err(failed)?;
                // A number needs no line in /etc/passwd, and a group is only looked up.
                let (name, _) = user.split_once(':').unwrap_or((&user, ""));
                if name.parse::<u32>().is_err() {
                    let made = self.script(USER, &[name]).await;
                    made.map_err(|why| format!("failed to make the user '{name}': {}", why.text()))?;
                }
                context.user = user;
                Ok(())
            }
            Action::Note => Ok(()),
        }
    }

    async fn copy(&self, copy: &Copy, context: &Context) -> Result<(), String> {
        let Copy { source, literal, target, owner, mode, files } = copy;
        let failed = |why: String| format!("failed to copy '{source}' to '{target}': {why}");
        let archive =
            self.uploads.find(files).ok_or_else(|| failed("its files are not here, upload them".to_owned()))?;
        let there = format!("/tmp/aenv-copy-{files}.tar");
        self.bench.put(&there, &archive).await.map_err(failed)?;
        let target = context.expanded(target).map_err(|error| failed(error.to_string()))?;
        let owner = owner.as_ref().unwrap_or(&context.user);
        let (mode, workdir) = (mode.as_deref().unwrap_or(""), context.workdir.as_deref().unwrap_or(""));
        let arguments = [&*there, source, literal, &target, owner, mode, workdir, &context.user];
        self.script(COPY, &arguments).await.map_err(|why| failed(why.text()))
    }

    /// Runs one of our scripts as root.
    async fn script(&self, script: &str, arguments: &[&str]) -> Result<(), Problem> {
        let script = format!("{COMMON}\n{script}");
        let arguments = ["-c", &script, "aenv-build"].into_iter().chain(arguments.iter().copied());
        let command = Command {
            program: SHELL.to_owned(),
            arguments: arguments.map(str::to_owned).collect(),
            user: "root".to_owned(),
            directory: Some("/".to_owned()),
            ..Command::default()
        };
        let said = Mutex::new(Vec::new());
        let hear = |output| {
            let (Output::Stdout(bytes) | Output::Stderr(bytes)) = output;
            let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
            let room = LINE_LIMIT.saturating_sub(said.len());
            said.extend_from_slice(&bytes[..bytes.len().min(room)]);
        };
        let exit = self.bench.run(&command, &hear).await.map_err(Problem::Lost)?;
        if exit.success {
            return Ok(());
        }
        let said = said.into_inner().unwrap_or_else(PoisonError::into_inner);
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<_> = said.lines().map(str::trim).filter(|line| !line.is_empty()).take(TOLD_LINES).collect();
        Err(Problem::Failed(if lines.is_empty() {
            exit.status
        } else {
            format!("{} ({})", exit.status, lines.join("; "))
        }))
    }

    /// Starts what is to run in every sandbox, and waits until it is up. It is left running.
    pub(crate) async fn start(&self, recipe: &Recipe, context: &Context) -> Result<(), String> {
        let ready = match (&recipe.start, &recipe.ready) {
            (None, None) => return Ok(()),
            (_, Some(ready)) => ready,
            (Some(_), None) => DEFAULT_READY,
        };
        let tell = |line: String| self.log.add(BuildStage::Finalize, LogLevel::Info, line);
        let lines = |who| Lines::new(self.log, BuildStage::Finalize, format!("[{who}] "));
        let readiness = async {
            tell(format!("[finalize] Waiting for readiness: {ready}"));
            let deadline = Instant::now() + READY_PATIENCE;
            loop {
                let lines = lines("ready");
                let command = shell(ready, &context.user, context);
                let exit = self.bench.run(&command, &|output| lines.add(output)).await;
                lines.finish();
                match exit.map_err(|why| format!("failed to run the ready command '{ready}': {why}"))? {
                    CommandExit { success: true, .. } => return Ok(()),
                    CommandExit { status, .. } if Instant::now() >= deadline => {
                        let patience = READY_PATIENCE.as_secs();
                        return Err(format!(
                            "the ready command '{ready}' did not succeed within {patience} s: {status}"
                        ));
                    }
                    CommandExit { .. } => tokio::time::sleep(READY_PAUSE).await,
                }
            }
        };
        let Some(start) = &recipe.start else { return readiness.await };
        tell(format!("[finalize] Starting {start}"));
        let (command, lines) = (shell(start, &context.user, context), lines("start"));
        let hear = |output| lines.add(output);
        let started = async {
            match self.bench.run(&command, &hear).await {
                Ok(CommandExit { success: true, .. }) => std::future::pending().await, // it went into the background
                Ok(CommandExit { status, .. }) => format!("the start command '{start}' failed: {status}"),
                Err(why) => format!("failed to run the start command '{start}': {why}"),
            }
        };
        // Dropped once it is up: the command goes on.
        let up = tokio::select! {
            biased; // a command that has failed is no more ready than its ready command says
            why = started => Err(why),
            ready = readiness => ready,
        };
        lines.finish();
        up
    }
}

/// Why a script of ours has not done its work.
enum Problem {
    /// It said so.
    Failed(String),
    /// Nothing is known of it.
    Lost(String),
}

impl Problem {
    fn text(self) -> String {
        match self {
            Self::Failed(text) | Self::Lost(text) => text,
        }
    }
}

/// A command line as builds run it.
fn shell(line: &str, user: &str, context: &Context) -> Command {
    Command {
        program: SHELL.to_owned(),
        arguments: ["-l", "-c", line].map(str::to_owned).into(),
        env: context.env.clone(),
        user: user.to_owned(),
        // Somebody else is not at home where the build's user is.
        directory: context.workdir.clone(),
        output_grace: None,
    }
}

/// Makes lines of a log out of output.
struct Lines<'a> {
    log: &'a BuildLog,
    stage: BuildStage,
    prefix: String,
    /// Unfinished lines of standard output and standard error.
    begun: Mutex<[Vec<u8>; 2]>,
}

impl<'a> Lines<'a> {
    fn new(log: &'a BuildLog, stage: BuildStage, prefix: String) -> Self {
        Self { log, stage, prefix, begun: Mutex::default() }
    }

    fn add(&self, output: Output) {
        let (which, bytes) = match output {
            Output::Stdout(bytes) => (0, bytes),
            Output::Stderr(bytes) => (1, bytes),
        };
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        for byte in bytes {
            // A progress bar comes back to the begin of its line: each state of it is a line.
            if matches!(byte, b'\n' | b'\r') || begun[which].len() >= LINE_LIMIT {
                self.tell(which, &std::mem::take(&mut begun[which]));
            }
            if !matches!(byte, b'\n' | b'\r') {
                begun[which].push(byte);
            }
        }
    }

    /// What ends without an end of line is a line, too.
    fn finish(&self) {
        let begun = std::mem::take(&mut *self.begun.lock().unwrap_or_else(PoisonError::into_inner));
        for (which, line) in begun.iter().enumerate() {
            self.tell(which, line);
        }
    }

    fn tell(&self, which: usize, line: &[u8]) {
        let line = String::from_utf8_lossy(line);
        let line = line.trim_end();
        if !line.is_empty() {
            let (name, level) = [("stdout", LogLevel::Info), ("stderr", LogLevel::Warn)][which];
            self.log.add(self.stage, level, format!("{}[{name}]: {line}", self.prefix));
        }
    }
}

/// Enough of a text to know which it is.
fn start_of(text: &str) -> &str {
    text.char_indices().nth(80).map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_becomes_lines_whatever_its_pieces() {
        let log = BuildLog::default();
        let lines = Lines::new(&log, BuildStage::Step(2), "[x] ".to_owned());
        for piece in ["on", "e\ntw", "o\r\n\nthree"] {
            lines.add(Output::Stdout(piece.as_bytes().to_vec()));
            lines.add(Output::Stderr(b"e".to_vec()));
        }
        lines.finish();
        let told: Vec<_> = log.entries().into_iter().map(|entry| entry.message).collect();
        assert_eq!(told, ["[x] [stdout]: one", "[x] [stdout]: two", "[x] [stdout]: three", "[x] [stderr]: eee"]);
        assert!(log.entries().iter().all(|entry| entry.stage == BuildStage::Step(2)));
    }

    #[test]
    fn a_line_without_end_is_cut() {
        let log = BuildLog::default();
        let lines = Lines::new(&log, BuildStage::Step(1), String::new());
        lines.add(Output::Stdout(vec![b'x'; 2 * LINE_LIMIT + 1]));
        assert_eq!(log.entries().len(), 2);
    }
}
