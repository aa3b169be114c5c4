//! The command line's grammar.

use std::path::PathBuf;

use aenv_model::SandboxId;
use clap::error::ErrorKind;
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};

/// Run AI agents in microVM sandboxes.
///
/// Server and API key come from `aenv auth`, or from AENV_SERVER and AENV_API_KEY.
#[derive(Debug, Parser)]
#[command(name = "aenv", version, propagate_version = true, max_term_width = 100)]
pub(crate) struct Arguments {
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
    /// Make a template from an OCI image
    Pull(Pull),
    /// Create a sandbox and attach to it
    Start(Start),
    /// Run one command in a sandbox, with its output and exit code
    Exec(Exec),
    /// Copy a file or a directory into a sandbox
    Upload(Upload),
    /// Copy a file or a directory out of a sandbox
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
    List(Listing),
    /// End a sandbox
    #[command(visible_alias = "rm")]
    Delete(Target),
    /// List, watch and delete templates
    #[command(subcommand, visible_alias = "templates")]
    Template(Template),
    /// Take, list and delete snapshots of sandboxes
    #[command(subcommand, visible_alias = "snap")]
    Snapshot(Snapshot),
    /// Print a shell's completion script
    #[command(hide = true)]
    Completion {
        /// The shell
        shell: CompletionShell,
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
}

/// Options stand before the sandbox; all that follows it belongs to the command.
///
/// The exit code is the command's; 128 and the signal's number if a signal ended it; 124 if --timeout did.
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
    #[arg(required = true, trailing_var_arg = true, value_names = ["SANDBOX_ID", "COMMAND"], num_args = 2..)]
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

/// Contents only: no owners, modes, times or links. What is there is replaced, file by file; an upload that was interrupted
/// leaves a part of the file that it was at.
#[derive(Debug, Args)]
pub(crate) struct Upload {
    /// The sandbox
    pub(crate) sandbox_id: SandboxId,
    /// File or directory here; no symlinks or devices, nor in it
    pub(crate) local: PathBuf,
    /// Path there; with a slash at its end, or if it is a directory, what is copied keeps its name in it
    pub(crate) remote: String,
    /// Who owns the file, and in whose home REMOTE begins unless it is absolute; files only
    #[arg(long)]
    pub(crate) user: Option<String>,
    /// Leave out files that are there with the same size, and were written there later than they last changed here, by the
    /// two clocks. Contents are not compared
    #[arg(long)]
    pub(crate) skip_same: bool,
}

/// Contents only: no owners, modes, times or links. A file takes its place when it is there whole.
#[derive(Debug, Args)]
pub(crate) struct Download {
    /// The sandbox
    pub(crate) sandbox_id: SandboxId,
    /// File or directory there; no symlinks or devices, nor in it
    pub(crate) remote: String,
    /// Path here [default: REMOTE's last part]; with a slash at its end, or if it is a directory, what is copied keeps its
    /// name in it
    pub(crate) local: Option<PathBuf>,
    /// In whose home REMOTE begins unless it is absolute; files only
    #[arg(long)]
    pub(crate) user: Option<String>,
    /// Replace files that are here already
    #[arg(long)]
    pub(crate) force: bool,
    /// Keep what is there of a file (.aenv-download-*) if it is interrupted, and go on from there if that was done before.
    /// Only what is missing is asked for, if size and time of change of the file are still the same
    #[arg(long)]
    pub(crate) resume: bool,
    /// Leave out files that are here with the same size, and were written here later than they last changed there, by the
    /// two clocks. Contents are not compared
    #[arg(long)]
    pub(crate) skip_same: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Target {
    /// The sandbox
    pub(crate) sandbox_id: SandboxId,
}

#[derive(Debug, Args)]
pub(crate) struct Timeout {
    /// The sandbox
    pub(crate) sandbox_id: SandboxId,
    /// Seconds from now; replaces what it had
    pub(crate) seconds: u32,
}

#[derive(Debug, Args)]
pub(crate) struct Pause {
    /// The sandbox
    pub(crate) sandbox_id: SandboxId,
    /// Keep its files only: it boots when it is resumed
    #[arg(long)]
    pub(crate) disk_only: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Resume {
    /// The sandbox
    pub(crate) sandbox_id: SandboxId,
    /// Seconds to live from now
    #[arg(long, value_name = "SECS", default_value_t = 300)]
    pub(crate) timeout: u32,
    /// Boot it from its files, without the memory that was kept
    #[arg(long)]
    pub(crate) boot: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Rollback {
    /// The sandbox
    pub(crate) sandbox_id: SandboxId,
    /// Id or name of a snapshot of it
    pub(crate) snapshot: String,
}

#[derive(Debug, Args)]
pub(crate) struct Fork {
    /// The sandbox
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
    /// Wait for a template's build
    Watch(TemplateTarget),
    /// Delete a template
    #[command(visible_alias = "rm")]
    Delete(TemplateTarget),
}

#[derive(Debug, Args)]
pub(crate) struct TemplateTarget {
    /// Template id or name
    #[arg(value_name = "ID_OR_NAME")]
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
    pub(crate) sandbox_id: SandboxId,
    /// A name for it
    #[arg(long)]
    pub(crate) name: Option<String>,
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
