//! Steps of a build: what a client may ask for, understood before anything is started.

use sha2::{Digest as _, Sha256};

/// A step of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// What it does.
    pub(crate) action: Action,
    /// As logs show it.
    pub(crate) line: String,
    /// What a cache has of it does not count.
    pub(crate) force: bool,
    /// Tells it from every other step.
    digest: [u8; 32],
}

/// What a step does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// A command of a login shell.
    Run { command: String, user: Option<String> },
    /// Files of an archive that was uploaded.
    Copy(Copy),
    /// Variables, in their order.
    Env(Vec<(String, String)>),
    /// Where commands begin from now on.
    Workdir(String),
    /// Who runs them.
    User(String),
    /// Told to people only.
    Note,
}

/// Files to be copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Copy {
    /// In the archive, without what is a pattern there.
    pub(crate) source: String,
    /// In the archive, if it was no pattern at all: a name may have its characters, too.
    pub(crate) literal: String,
    pub(crate) target: String,
    /// `None`: the build's user.
    pub(crate) owner: Option<String>,
    /// Octal.
    pub(crate) mode: Option<String>,
    /// The archive's name among uploads.
    pub(crate) files: String,
}

/// A step that no build can do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StepProblem {
    /// Of a kind that there is not.
    #[error("command type {0} is not implemented")]
    Kind(String),
    /// With other arguments than its kind has.
    #[error("{kind} takes {expected}")]
    Arguments { kind: String, expected: &'static str },
    /// An argument that makes no sense.
    #[error("{kind} has {what}: {value:?}")]
    Value { kind: String, what: &'static str, value: String },
}

impl Step {
    /// The step as the API has it: its kind, its arguments, and the name of the files that a `COPY` takes.
    pub fn new(kind: &str, args: &[String], files: Option<&str>, force: bool) -> Result<Self, StepProblem> {
        let kind = kind.to_ascii_uppercase();
        if let Some(value) = args.iter().find(|arg| arg.contains('\0')) {
            return Err(StepProblem::Value { kind, what: "a zero byte in it", value: value.clone() });
        }
        let action = action(&kind, args, files)?;
        let line = match &action {
            Action::Run { command, .. } => format!("RUN {command}"),
            Action::Copy(copy) => format!("{kind} {} {}", args[0], copy.target),
            Action::Env(pairs) => {
                let pairs: Vec<_> = pairs.iter().map(|(name, value)| format!("{name}={value}")).collect();
                format!("{kind} {}", pairs.join(" "))
            }
            Action::Workdir(_) | Action::User(_) | Action::Note => format!("{kind} {}", args.join(" ")),
        };
        let mut hash = Sha256::new();
        for part in [&*kind].into_iter().chain(args.iter().map(String::as_str)).chain(files) {
            // With their lengths: no two steps are the same text.
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Ok(Self { action, line, force, digest: hash.finalize().into() })
    }

    /// What a cache calls the state after this step, where `before` is that before it.
    pub(crate) fn key(&self, before: &str) -> String {
        let mut hash = Sha256::new();
        hash.update(before);
        hash.update(self.digest);
        hex::encode(hash.finalize())
    }

    /// Worth a place in the cache of its own.
    pub(crate) fn is_expensive(&self) -> bool {
        matches!(self.action, Action::Run { .. } | Action::Copy(_))
    }
}

fn action(kind: &str, args: &[String], files: Option<&str>) -> Result<Action, StepProblem> {
    let arguments = |expected| StepProblem::Arguments { kind: kind.to_owned(), expected };
    let bad = |what, value: &str| StepProblem::Value { kind: kind.to_owned(), what, value: value.to_owned() };
    let given = |at: usize| args.get(at).filter(|arg| !arg.is_empty()).cloned();
    let user = |at: usize| match given(at) {
        Some(user) if user.starts_with('-') || user.contains(char::is_whitespace) => Err(bad("no user", &user)),
        user => Ok(user),
    };
    Ok(match kind {
        "RUN" => {
            let command =
                given(0).filter(|_| args.len() <= 2).ok_or_else(|| arguments("a command, and perhaps a user"))?;
            Action::Run { command, user: user(1)? }
        }
        "COPY" | "ADD" => {
            let (Some(source), Some(target), 2..=4) = (given(0), given(1), args.len()) else {
                return Err(arguments("a source and a target, and perhaps an owner and a mode"));
            };
            let mode = given(3);
            if let Some(mode) =
                mode.as_ref().filter(|mode| mode.len() > 5 || !mode.bytes().all(|b| matches!(b, b'0'..=b'7')))
            {
                return Err(bad("no octal mode", mode));
            }
            let files = files.ok_or_else(|| arguments("files that were uploaded (filesHash)"))?;
            if !is_files_hash(files) {
                return Err(bad("no hash of files", files));
            }
            let outside = || bad("a source outside of its files", &source);
            let literal = relative(&source, |_| false).ok_or_else(outside)?;
            let source = relative(&source, |part| part.contains(['*', '?', '[', '{'])).ok_or_else(outside)?;
            Action::Copy(Copy { source, literal, target, owner: user(2)?, mode, files: files.to_owned() })
        }
        "ENV" | "ARG" => {
            let (pairs, []) = args.as_chunks::<2>() else { return Err(arguments("names and values")) };
            if let Some([name, _]) = pairs.iter().find(|[name, _]| name.is_empty() || name.contains('=')) {
                return Err(bad("no name of a variable", name));
            }
            Action::Env(pairs.iter().map(|[name, value]| (name.clone(), value.clone())).collect())
        }
        "WORKDIR" => match given(0) {
            Some(path) if args.len() == 1 => Action::Workdir(path),
            _ => return Err(arguments("a path")),
        },
        "USER" => match user(0)? {
            Some(user) if args.len() == 1 => Action::User(user),
            _ => return Err(arguments("a user")),
        },
        "EXPOSE" | "VOLUME" | "LABEL" => Action::Note,
        _ => return Err(StepProblem::Kind(kind.to_owned())),
    })
}

/// Whether files can have this name: 64 lower-case hexadecimal digits.
#[must_use]
pub fn is_files_hash(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// A source before its first part that is a pattern, relative to the archive. `None` if it leaves that.
fn relative(source: &str, is_pattern: impl Fn(&str) -> bool) -> Option<String> {
    let mut parts = Vec::new();
    for part in source.split('/') {
        match part {
            "" | "." => {}
            ".." => return None,
            part if is_pattern(part) => break,
            part => parts.push(part),
        }
    }
    Some(if parts.is_empty() { ".".to_owned() } else { parts.join("/") })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    fn step(kind: &str, args: &[&str]) -> Result<Step, StepProblem> {
        let args: Vec<_> = args.iter().map(|arg| (*arg).to_owned()).collect();
        Step::new(kind, &args, (kind == "COPY").then_some(FILES), false)
    }

    #[test]
    fn a_source_is_what_comes_before_its_pattern() {
        let source = |source: &str| match step("COPY", &[source, "/x"]).unwrap().action {
            Action::Copy(copy) => copy.source,
            other => panic!("{other:?}"),
        };
        assert_eq!(source("src/*.txt"), "src");
        assert_eq!(source("./a/b.txt"), "a/b.txt");
        assert_eq!(source("**/*.py"), ".");
        assert_eq!(source("."), ".");
        assert!(step("COPY", &["../x", "/x"]).is_err());
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let refusal = |kind: &str, args: &[&str]| step(kind, args).unwrap_err().to_string();
        assert_eq!(refusal("HEALTHCHECK", &["x"]), "command type HEALTHCHECK is not implemented");
        assert_eq!(refusal("ENV", &["A"]), "ENV takes names and values");
        assert_eq!(refusal("ENV", &["A=B", ""]), "ENV has no name of a variable: \"A=B\"");
        assert_eq!(refusal("COPY", &["a", "b", "", "rw"]), "COPY has no octal mode: \"rw\"");
        assert_eq!(refusal("USER", &["-x"]), "USER has no user: \"-x\"");
        assert_eq!(refusal("RUN", &[]), "RUN takes a command, and perhaps a user");
        assert!(Step::new("COPY", &["a".into(), "b".into()], None, false).is_err());
        assert!(Step::new("COPY", &["a".into(), "b".into()], Some("../../etc/passwd"), false).is_err());
    }

    #[test]
    fn keys_tell_steps_and_what_came_before_apart() {
        let keys = [
            step("RUN", &["a b"]).unwrap().key("base"),
            step("RUN", &["a", "b"]).unwrap().key("base"),
            step("RUN", &["a b"]).unwrap().key("other"),
            step("WORKDIR", &["a b"]).unwrap().key("base"),
        ];
        for (at, key) in keys.iter().enumerate() {
            assert!(!keys[..at].contains(key), "{at}");
        }
        assert_eq!(keys[0], step("run", &["a b"]).unwrap().key("base"));
    }
}
