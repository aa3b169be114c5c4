//! The command line's grammar.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use aenv_api::LogLevel;
use aenv_model::{BuildId, SandboxId};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use jiff::{SignedDuration, Span, SpanRelativeTo, Timestamp};

use crate::complete;

/// Run AI agents in microVM sandboxes.
///
/// Server and API key come from `aenv auth`, or from AENV_SERVER and AENV_API_KEY; several servers have profiles.
#[derive(Debug, Parser)]
#[command(name = "aenv", version, propagate_version = true, max_term_width = 100)]
pub(crate) struct Arguments {
    /// Server and key of this name, see `aenv profile` [default: AENV_PROFILE, else the one in use]
    #[arg(long, global = true, value_name = "NAME", display_order = 900, add = complete::profiles())]
    pub(crate) profile: Option<String>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Arguments {
    /// Reads the process's command line. What is wrong with it is told, and the process ends with 2.
    pub(crate) fn read() -> Self {
        let arguments = Self::parse();
        if let Command::Exec(exec) = &arguments.command
            && let Err(error) = exec.target()
        {
            error.exit();
        }
        arguments
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Store the server's URL and the API key
    Auth,
    /// List, choose and delete profiles: several servers, each stored by `aenv auth --profile NAME`
    #[command(subcommand)]
    Profile(Profile),
    /// Make a template from an OCI image
    Pull(Pull),
    /// Make a template from a Dockerfile of one stage
    ///
    /// FROM, ARG, ENV, RUN, WORKDIR, USER, COPY and ADD of local files, ENTRYPOINT, CMD and HEALTHCHECK are carried
    /// out; EXPOSE, VOLUME, LABEL, MAINTAINER, SHELL and STOPSIGNAL do not count; several stages, ADD of URLs, ONBUILD
    /// and secrets are refused. Commands are run by bash, as root until USER says otherwise, whatever the image's own
    /// user. Where neither image nor WORKDIR names a directory, relative paths begin in the home of the user. The
    /// variables are the build's: sandboxes have those of the image. An interruption leaves the build running.
    Build(Build),
    /// Create a sandbox and attach to it
    Start(Start),
    /// Run one command in a sandbox, with its output and exit code
    ///
    /// Options stand before the sandbox; all that follows it belongs to the command.
    ///
    /// The exit code is the command's; 128 and the signal's number if a signal ended it; 124 if --timeout did.
    Exec(Exec),
    /// Copy a file or a directory into a sandbox
    ///
    /// Contents only: no owners, modes, times or links. What is there is replaced, file by file; an upload that was
    /// interrupted leaves a part of the file that it was at.
    Upload(Upload),
    /// Copy a file or a directory out of a sandbox
    ///
    /// Contents only: no owners, modes, times or links. A file takes its place when it is there whole.
    Download(Download),
    /// Attach a shell to a sandbox, resuming it if it is paused
    #[command(visible_alias = "cn")]
    Connect(Target),
    /// Set the time that a sandbox still has
    Timeout(Timeout),
    /// Stop a sandbox and keep it, with its memory and processes
    Pause(Pause),
    /// Let a paused sandbox go on
    Resume(Resume),
    /// Put a running sandbox back to one of its snapshots
    Rollback(Rollback),
    /// Make children of a running sandbox, each with a copy of its memory and files
    Fork(Fork),
    /// List sandboxes
    #[command(visible_alias = "ls")]
    List(SandboxListing),
    /// Print what a sandbox went through, and what its guest says on its console
    Logs(Logs),
    /// Print what a sandbox uses of its CPUs, memory and disk
    Metrics(Metrics),
    /// Have ports of a sandbox here
    ///
    /// Carries HTTP: plain requests and answers, streams of events, WebSockets and other upgrades; no other protocols.
    /// The guest's service has to listen on all addresses, not on its loopback alone. A paused sandbox is resumed.
    PortForward(PortForward),
    /// End a sandbox
    #[command(visible_alias = "rm")]
    Delete(Target),
    /// List, inspect, watch and delete templates
    #[command(subcommand, visible_alias = "templates")]
    Template(Template),
    /// Take, list and delete snapshots of sandboxes
    #[command(subcommand, visible_alias = "snap")]
    Snapshot(Snapshot),
    /// Make, list and revoke API keys
    #[command(subcommand, visible_alias = "keys")]
    Key(Key),
    /// Print a shell's completion script
    #[command(hide = true)]
    Completion {
        /// The shell
        shell: CompletionShell,
    },
    /// Write manual pages
    #[command(hide = true)]
    Man {
        /// Directory to write them to
        dir: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Pull {
    /// Image: REGISTRY/NAME:TAG, or on the server's file system oci:PATH:TAG or docker-archive:FILE:TAG (TAG optional)
    pub(crate) image: String,
    /// Name of the template [default: last part of IMAGE, without tag]
    #[arg(long)]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) size: MachineSize,
    /// Command that runs in every sandbox from the start
    #[arg(long, value_name = "CMD")]
    pub(crate) start_cmd: Option<String>,
    /// Command that succeeds once the start command is up
    #[arg(long, value_name = "CMD")]
    pub(crate) ready_cmd: Option<String>,
    /// The start command is up once 127.0.0.1:PORT accepts connections (needs bash in the image)
    #[arg(long, value_name = "PORT", conflicts_with = "ready_cmd", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) probe: Option<u16>,
    /// Return once the build has begun
    #[arg(short, long)]
    pub(crate) detach: bool,
    /// Give up waiting after this many seconds; the build goes on
    #[arg(long, value_name = "SECS", conflicts_with = "detach")]
    pub(crate) timeout: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct Build {
    /// Directory that files are copied from
    pub(crate) context: PathBuf,
    /// Dockerfile [default: CONTEXT/Dockerfile]
    #[arg(short, long, value_name = "PATH")]
    pub(crate) file: Option<PathBuf>,
    /// Name of the template
    #[arg(long)]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) size: MachineSize,
    /// Command that runs in every sandbox from the start; none if empty [default: ENTRYPOINT and CMD of the Dockerfile]
    #[arg(long, value_name = "CMD")]
    pub(crate) start_cmd: Option<String>,
    /// Command that succeeds once the start command is up [default: HEALTHCHECK of the Dockerfile, else 20 s]
    #[arg(long, value_name = "CMD")]
    pub(crate) ready_cmd: Option<String>,
    /// Value of an ARG, or ours of that name; may be repeated
    #[arg(long, value_name = "NAME[=VALUE]", value_parser = variable)]
    pub(crate) build_arg: Vec<(String, String)>,
    /// Do every step again
    #[arg(long)]
    pub(crate) no_cache: bool,
    /// Give up waiting after this many seconds; the build goes on
    #[arg(long, value_name = "SECS", default_value_t = 3600, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub(crate) timeout: u64,
    /// Return once the build has begun
    #[arg(short, long, conflicts_with = "timeout")]
    pub(crate) detach: bool,
    /// How to print the result [default: sentences]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) output: Option<Format>,
}

#[derive(Debug, Args)]
pub(crate) struct MachineSize {
    /// Virtual CPUs [default: the server's]
    #[arg(long, value_name = "COUNT", alias = "cpu-count", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) cpu: Option<u32>,
    /// Memory in MiB [default: the server's]
    #[arg(long, value_name = "MIB", aliases = ["memory-mb", "mem"], value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) memory: Option<u32>,
}

#[derive(Debug, Args)]
pub(crate) struct Start {
    /// Template or snapshot, by id or name; with --cold an OCI image
    #[arg(add = complete::templates())]
    pub(crate) target: String,
    /// Boot from an OCI image, without a template
    #[arg(long)]
    pub(crate) cold: bool,
    /// Seconds until it is paused
    #[arg(long, value_name = "SECS", default_value_t = 300)]
    pub(crate) timeout: u32,
    /// Virtual CPUs, with --cold [default: the server's]
    #[arg(long, value_name = "COUNT", alias = "cpu-count", requires = "cold",
        value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) cpu: Option<u32>,
    /// Memory in MiB, with --cold [default: the server's]
    #[arg(long, value_name = "MIB", aliases = ["memory-mb", "mem"], requires = "cold",
        value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) memory: Option<u32>,
    /// Root disk in MiB, a multiple of 1024, with --cold [default: the image's size]
    #[arg(long, value_name = "MIB", alias = "disk-mb", requires = "cold", value_parser = disk_size)]
    pub(crate) disk_size_mb: Option<u32>,
    /// Print only the sandbox's id and return
    #[arg(short, long)]
    pub(crate) detach: bool,
    /// How to print, with --detach [default: its id]
    #[arg(long, value_name = "FORMAT", requires = "detach")]
    pub(crate) output: Option<Format>,
}

#[derive(Debug, Args)]
pub(crate) struct Exec {
    /// Give it our standard input, to its end [default: none]
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// Give it a terminal, the size of this one; with -i implied where standard input is a terminal
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// Set a variable, or hand on ours of that name; may be repeated
    #[arg(short, long, value_name = "NAME[=VALUE]", value_parser = variable)]
    pub(crate) env: Vec<(String, String)>,
    /// Run it in this directory [default: the sandbox's]
    #[arg(short, long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// Run it as this user [default: the sandbox's]
    #[arg(short, long)]
    pub(crate) user: Option<String>,
    /// Kill it after this many seconds [default: never]
    #[arg(long, value_name = "SECS", value_parser = clap::value_parser!(u64).range(1..=9_999_999))]
    pub(crate) timeout: Option<u64>,
    /// The sandbox; the command and its arguments, run without a shell
    // One argument, for the grammar's sake: behind the sandbox, nothing is an option of ours.
    #[arg(required = true, trailing_var_arg = true, value_names = ["SANDBOX_ID", "COMMAND"], num_args = 2..,
        add = complete::running())]
    words: Vec<String>,
}

impl Exec {
    /// The sandbox, and the command with its arguments. Errors: as the command line's other arguments have them.
    pub(crate) fn target(&self) -> Result<(SandboxId, &[String]), clap::Error> {
        let refuse = |kind, text: String| exec_command().error(kind, text);
        let Some((sandbox, command)) = self.words.split_first() else {
            return Err(refuse(ErrorKind::MissingRequiredArgument, "no sandbox given".to_owned()));
        };
        let sandbox: SandboxId = sandbox
            .parse()
            .map_err(|error| refuse(ErrorKind::ValueValidation, format!("invalid value '{sandbox}': {error}")))?;
        // As after any other positional, `--` may stand before the command.
        let command = command.strip_prefix(&["--".to_owned()]).unwrap_or(command);
        if command.is_empty() {
            return Err(refuse(ErrorKind::MissingRequiredArgument, "no command given".to_owned()));
        }
        Ok((sandbox, command))
    }
}

/// The grammar of `aenv exec` alone, for messages.
fn exec_command() -> clap::Command {
    let mut all = Arguments::command();
    all.build();
    all.find_subcommand("exec").cloned().unwrap_or(all)
}

fn variable(text: &str) -> Result<(String, String), String> {
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, value.to_owned()),
        None => (text, std::env::var(text).map_err(|_| format!("there is no variable {text} here to hand on"))?),
    };
    if name.is_empty() {
        return Err("a variable has a name".to_owned());
    }
    Ok((name.to_owned(), value))
}

#[derive(Debug, Args)]
pub(crate) struct Upload {
    /// The sandbox
    #[arg(add = complete::running())]
    pub(crate) sandbox_id: SandboxId,
    /// File or directory here; no symlinks or devices, nor in it
    pub(crate) local: PathBuf,
    /// Path there; with a slash at its end, or if it is a directory, what is copied keeps its name in it
    pub(crate) remote: String,
    /// Who owns the file, and in whose home REMOTE begins unless it is absolute; files only
    #[arg(long)]
    pub(crate) user: Option<String>,
    /// Leave out files that are there with the same size, and were written there later than they last changed here, by
    /// the two clocks. Contents are not compared
    #[arg(long)]
    pub(crate) skip_same: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Download {
    /// The sandbox
    #[arg(add = complete::running())]
    pub(crate) sandbox_id: SandboxId,
    /// File or directory there; no symlinks or devices, nor in it
    pub(crate) remote: String,
    /// Path here [default: REMOTE's last part]; with a slash at its end, or if it is a directory, what is copied keeps
    /// its name in it
    pub(crate) local: Option<PathBuf>,
    /// In whose home REMOTE begins unless it is absolute; files only
    #[arg(long)]
    pub(crate) user: Option<String>,
    /// Replace files that are here already
    #[arg(long)]
    pub(crate) force: bool,
    /// Keep what is there of a file (.aenv-download-*) if it is interrupted, and go on from there if that was done
    /// before. Only what is missing is asked for, if size and time of change of the file are still the same
    #[arg(long)]
    pub(crate) resume: bool,
    /// Leave out files that are here with the same size, and were written here later than they last changed there, by
    /// the two clocks. Contents are not compared
    #[arg(long)]
    pub(crate) skip_same: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Target {
    /// The sandbox
    #[arg(add = complete::sandboxes())]
    pub(crate) sandbox_id: SandboxId,
}

#[derive(Debug, Args)]
pub(crate) struct Timeout {
    /// The sandbox
    #[arg(add = complete::running())]
    pub(crate) sandbox_id: SandboxId,
    /// Seconds from now; replaces what it had
    pub(crate) seconds: u32,
}

#[derive(Debug, Args)]
pub(crate) struct Pause {
    /// The sandbox
    #[arg(add = complete::running())]
    pub(crate) sandbox_id: SandboxId,
    /// Keep its files only: it boots when it is resumed
    #[arg(long)]
    pub(crate) disk_only: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Resume {
    /// The sandbox
    #[arg(add = complete::paused())]
    pub(crate) sandbox_id: SandboxId,
    /// Seconds to live from now
    #[arg(long, value_name = "SECS", default_value_t = 300)]
    pub(crate) timeout: u32,
    /// Boot it from its files, without the memory that was kept
    #[arg(long)]
    pub(crate) boot: bool,
    /// How to print [default: a sentence]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) output: Option<Format>,
}

#[derive(Debug, Args)]
pub(crate) struct Rollback {
    /// The sandbox
    #[arg(add = complete::running())]
    pub(crate) sandbox_id: SandboxId,
    /// Id or name of a snapshot of it
    pub(crate) snapshot: String,
    /// How to print [default: a sentence]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) output: Option<Format>,
}

#[derive(Debug, Args)]
pub(crate) struct Fork {
    /// The sandbox
    #[arg(add = complete::running())]
    pub(crate) sandbox_id: SandboxId,
    /// How many children
    #[arg(short = 'n', long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) count: u32,
    /// Seconds that they live [default: as many as their source was given]
    #[arg(long, value_name = "SECS")]
    pub(crate) timeout: Option<u32>,
    /// How to print [default: their ids, one a line]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) output: Option<Format>,
}

#[derive(Debug, Args)]
pub(crate) struct Listing {
    /// How to print [default: table on a terminal, json otherwise]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) output: Option<Format>,
}

#[derive(Debug, Args)]
pub(crate) struct SandboxListing {
    #[command(flatten)]
    pub(crate) listing: Listing,
    /// Look again every two seconds, until interrupted: a terminal is drawn over; elsewhere each change of a sandbox is
    /// a line, as JSON unless --output table is given, and one that is gone has the state "gone"
    #[arg(short, long)]
    pub(crate) watch: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// The sandbox, which may have ended not long ago
    #[arg(add = complete::sandboxes())]
    pub(crate) sandbox_id: SandboxId,
    /// Go on with what comes, until the sandbox's end
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Only from then on: a time (2026-01-31T12:00:00Z), or how long ago (90s, 10m, 2h, 1d)
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<Since>,
    /// Only the newest so many, of what is there
    #[arg(short = 'n', long, value_name = "COUNT")]
    pub(crate) tail: Option<usize>,
    /// Only what matters as much at least
    #[arg(long)]
    pub(crate) level: Option<Level>,
    /// Print entries as JSON, one a line
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Level {
    Debug,
    Info,
    Warn,
    Error,
}

impl From<Level> for LogLevel {
    fn from(level: Level) -> Self {
        match level {
            Level::Debug => Self::Debug,
            Level::Info => Self::Info,
            Level::Warn => Self::Warn,
            Level::Error => Self::Error,
        }
    }
}

/// An instant, or how long ago it was.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Since {
    At(Timestamp),
    Ago(SignedDuration),
}

impl Since {
    /// The instant, seen from `now`. Errors: before all time.
    pub(crate) fn timestamp(self, now: Timestamp) -> Result<Timestamp, jiff::Error> {
        match self {
            Self::At(time) => Ok(time),
            Self::Ago(age) => now.checked_sub(age),
        }
    }
}

impl FromStr for Since {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(time) = text.parse() {
            return Ok(Self::At(time));
        }
        let age = text.parse::<Span>().and_then(|span| span.to_duration(SpanRelativeTo::days_are_24_hours())).ok();
        let age = age.filter(|age| !age.is_negative());
        age.map(Self::Ago)
            .ok_or_else(|| format!("{text:?} is neither a time like 2026-01-31T12:00:00Z nor one like 10m"))
    }
}

#[derive(Debug, Args)]
pub(crate) struct Metrics {
    /// The sandbox
    #[arg(add = complete::sandboxes())]
    pub(crate) sandbox_id: SandboxId,
    /// All from then on, not the newest alone: a time (2026-01-31T12:00:00Z), or how long ago (90s, 10m, 1h)
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<Since>,
    #[command(flatten)]
    pub(crate) listing: Listing,
}

#[derive(Debug, Args)]
pub(crate) struct PortForward {
    /// The sandbox
    #[arg(add = complete::sandboxes())]
    pub(crate) sandbox_id: SandboxId,
    /// Port there, with the one here before it if they differ; nothing before the colon: any that is free
    #[arg(required = true, value_name = "[LOCAL:]REMOTE")]
    pub(crate) ports: Vec<PortPair>,
    /// Address to listen on here
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) address: IpAddr,
}

/// A port here, 0 for any, and one there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PortPair {
    pub(crate) local: u16,
    pub(crate) remote: u16,
}

impl FromStr for PortPair {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (local, remote) = text.split_once(':').unwrap_or((text, text));
        let port = |text: &str| text.parse::<u16>().ok();
        let local = if local.is_empty() { Some(0) } else { port(local) };
        let pair = local.zip(port(remote).filter(|remote| *remote > 0));
        let pair = pair.map(|(local, remote)| Self { local, remote });
        pair.ok_or_else(|| format!("{text:?} is not REMOTE, LOCAL:REMOTE or :REMOTE, with ports from 1 to 65535"))
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Profile {
    /// List profiles
    #[command(visible_alias = "ls")]
    List(Listing),
    /// Use a profile from now on; `default` is what `aenv auth` stores without --profile
    Use(ProfileTarget),
    /// Forget a profile
    #[command(visible_alias = "rm")]
    Delete(ProfileTarget),
}

#[derive(Debug, Args)]
pub(crate) struct ProfileTarget {
    /// The profile
    #[arg(add = complete::profiles())]
    pub(crate) name: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Columns for people
    Table,
    /// What the server said
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Template {
    /// List templates
    #[command(visible_alias = "ls")]
    List(Listing),
    /// Print what there is to know of a template and its builds
    Inspect(TemplateInspection),
    /// Print what a template's build has said
    Logs(TemplateLogs),
    /// Wait for a template's build
    Watch(TemplateTarget),
    /// Delete a template
    #[command(visible_alias = "rm")]
    Delete(TemplateTarget),
}

#[derive(Debug, Args)]
pub(crate) struct TemplateInspection {
    /// Template id or name
    #[arg(value_name = "ID_OR_NAME", add = complete::templates())]
    pub(crate) template: String,
    #[command(flatten)]
    pub(crate) listing: Listing,
}

#[derive(Debug, Args)]
pub(crate) struct TemplateLogs {
    /// Template id or name
    #[arg(value_name = "ID_OR_NAME", add = complete::templates())]
    pub(crate) template: String,
    /// Which build [default: the newest]
    #[arg(long, value_name = "ID")]
    pub(crate) build: Option<BuildId>,
    /// Go on until the build's end
    #[arg(short, long)]
    pub(crate) follow: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TemplateTarget {
    /// Template id or name
    #[arg(value_name = "ID_OR_NAME", add = complete::templates())]
    pub(crate) template: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Snapshot {
    /// Take a snapshot of a running sandbox, which goes on
    Create(SnapshotCreation),
    /// List snapshots, the newest first
    #[command(visible_alias = "ls")]
    List(SnapshotListing),
    /// Delete a snapshot; what was started from it goes on
    #[command(visible_alias = "rm")]
    Delete(SnapshotTarget),
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotCreation {
    /// The sandbox
    #[arg(add = complete::running())]
    pub(crate) sandbox_id: SandboxId,
    /// A name for it
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// How to print [default: a sentence]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) output: Option<Format>,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotListing {
    /// Only those of this sandbox, which may be gone
    #[arg(long, value_name = "ID")]
    pub(crate) sandbox_id: Option<SandboxId>,
    #[command(flatten)]
    pub(crate) listing: Listing,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotTarget {
    /// Snapshot id or name
    #[arg(value_name = "ID_OR_NAME")]
    pub(crate) snapshot: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Key {
    /// Make a key and print it, this once
    Create(KeyCreation),
    /// List the keys that were made, the oldest first
    #[command(visible_alias = "ls")]
    List(Listing),
    /// Revoke a key: it opens nothing from the next request on
    #[command(visible_alias = "rm")]
    Revoke {
        /// The key's id
        id: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct KeyCreation {
    /// What it is called, so that people know whom to ask
    pub(crate) name: String,
    /// It may look, change nothing, and open no sandbox
    #[arg(long)]
    pub(crate) read: bool,
    /// How to print [default: the key]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) output: Option<Format>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompletionShell {
    Bash,
    Zsh,
    Fish,
}

fn disk_size(text: &str) -> Result<u32, String> {
    let refuse = || format!("{text:?} is not a size in MiB: expected a positive multiple of 1024");
    text.parse().ok().filter(|size| *size > 0 && size % 1024 == 0).ok_or_else(refuse)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0190b3a0-0000-7000-8000-000000000001";

    fn refused(words: &[&str]) -> clap::Error {
        Arguments::try_parse_from([&["aenv"], words].concat()).unwrap_err()
    }

    #[test]
    fn the_grammar_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn everything_after_the_id_belongs_to_the_command() {
        for words in [["exec", ID, "ls", "-la"].as_slice(), &["exec", ID, "--", "ls", "-la"]] {
            let arguments = Arguments::try_parse_from([&["aenv"], words].concat()).unwrap();
            let Command::Exec(exec) = arguments.command else { panic!("{arguments:?}") };
            let (sandbox, command) = exec.target().unwrap();
            assert_eq!((sandbox.to_string().as_str(), command), (ID, &["ls".to_owned(), "-la".to_owned()][..]));
        }
        let arguments = Arguments::try_parse_from(["aenv", "exec", "-i", ID, "x", "-i", "--help", "--", "-t"]).unwrap();
        let Command::Exec(exec) = arguments.command else { panic!("{arguments:?}") };
        assert!(exec.interactive && !exec.tty);
        assert_eq!(exec.target().unwrap().1, ["x", "-i", "--help", "--", "-t"]);
        assert!(refused(&["exec", ID]).use_stderr());
    }

    #[test]
    fn what_is_no_sandbox_is_refused_in_exec_as_elsewhere() {
        let arguments = Arguments::try_parse_from(["aenv", "exec", "box", "ls"]).unwrap();
        let Command::Exec(exec) = arguments.command else { panic!("{arguments:?}") };
        let error = exec.target().unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(text.contains("\"box\" is not a sandbox id") && text.contains("Usage: aenv exec"), "{text}");
    }

    #[test]
    fn variables_have_a_value_or_are_handed_on() {
        assert_eq!(variable("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert_eq!(variable("A="), Ok(("A".into(), String::new())));
        assert!(variable("=b").is_err() && variable("NO_SUCH_VARIABLE_HERE").is_err());
        assert_eq!(variable("PATH").unwrap().1, std::env::var("PATH").unwrap());
    }

    #[test]
    fn a_bad_id_is_refused_with_what_was_expected() {
        let error = refused(&["delete", "box"]).to_string();
        assert!(error.contains("\"box\" is not a sandbox id") && error.contains("UUID"), "{error}");
    }

    #[test]
    fn times_are_instants_or_ages() {
        let now: Timestamp = "2026-01-31T12:00:00Z".parse().unwrap();
        let at = |text: &str| text.parse::<Since>().unwrap().timestamp(now).unwrap().to_string();
        assert_eq!(at("2026-01-30T00:00:00+01:00"), "2026-01-29T23:00:00Z");
        assert_eq!(at("90s"), "2026-01-31T11:58:30Z");
        assert_eq!(at("1d"), "2026-01-30T12:00:00Z");
        for bad in ["", "yesterday", "-5m", "10"] {
            assert!(bad.parse::<Since>().is_err(), "{bad}");
        }
    }

    #[test]
    fn ports_are_pairs() {
        let pair = |text: &str| text.parse::<PortPair>().map(|pair| (pair.local, pair.remote));
        assert_eq!(pair("80"), Ok((80, 80)));
        assert_eq!(pair("8080:80"), Ok((8080, 80)));
        assert_eq!(pair(":80"), Ok((0, 80)));
        for bad in ["", "0", "80:", "a:80", "1:2:3", "65536"] {
            assert!(pair(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_need_cold() {
        for flag in ["--cpu", "--memory", "--disk-size-mb"] {
            assert_eq!(refused(&["start", "base", flag, "1024"]).kind(), ErrorKind::MissingRequiredArgument, "{flag}");
            assert!(Arguments::try_parse_from(["aenv", "start", "--cold", "debian", flag, "1024"]).is_ok(), "{flag}");
        }
        assert!(refused(&["start", "--cold", "debian", "--disk-mb", "1000"]).to_string().contains("multiple of 1024"));
    }

    #[test]
    fn waiting_and_not_waiting_exclude_each_other() {
        assert_eq!(refused(&["pull", "x", "-d", "--timeout", "3"]).kind(), ErrorKind::ArgumentConflict);
        assert_eq!(refused(&["pull", "x", "--probe", "80", "--ready-cmd", "t"]).kind(), ErrorKind::ArgumentConflict);
    }

    #[test]
    fn a_fork_has_a_child_at_least() {
        assert_eq!(refused(&["fork", ID, "--count", "0"]).kind(), ErrorKind::ValueValidation);
        assert!(Arguments::try_parse_from(["aenv", "fork", ID, "-n", "16", "--output", "json"]).is_ok());
    }

    #[test]
    fn short_names_stand_for_commands() {
        let templates = [&["templates", "ls"][..], &["template", "rm", "x"]];
        let snapshots = [&["snap", "ls", "--sandbox-id", ID][..], &["snapshot", "rm", "x"]];
        for words in [&["ls"][..], &["rm", ID], &["cn", ID]].iter().chain(&templates).chain(&snapshots) {
            let words = *words;
            assert!(Arguments::try_parse_from([&["aenv"], words].concat()).is_ok(), "{words:?}");
        }
    }
}
