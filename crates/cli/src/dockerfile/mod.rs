//! A Dockerfile of one stage as the steps of a template's build.
//!
//! ```text
//! text ─ parse-dockerfile ─▶ instructions ─ Planner ─▶ steps, start and ready command
//!                                              │
//!                              COPY, ADD ─▶ BuildContext ─▶ archives
//! ```
//!
//! What differs from a build by Docker: commands are run by a login bash; variables of `ENV` are the build's, not the
//! sandboxes'; and what the base image says of its user is not known here, so that a build begins as root.

mod context;
mod documents;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use aenv_api::TemplateStep;
use anyhow::{Context as _, bail};
use parse_dockerfile::{Command, Flag, HealthcheckArguments, HereDoc, Instruction, JsonOrStringArray, Source};

pub(crate) use context::Archive;
use context::{BuildContext, Entry, Layout, archive};
use documents::Wrapped;
use words::{expand, joined, pairs, quoted};

/// Whom files belong to that are copied, and who runs commands, unless something else is said.
const ROOT: &str = "root";
/// Where the files of a `COPY` are in its archive.
const DIR: &str = "files";
/// What `ADD` would unpack.
const ARCHIVES: [&str; 9] = [".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst"];

/// What a Dockerfile comes to.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) image: String,
    pub(crate) steps: Vec<TemplateStep>,
    /// Which line each step is from, and how it begins.
    pub(crate) origins: Vec<String>,
    /// What the steps copy.
    pub(crate) archives: Vec<Archive>,
    pub(crate) start: Option<String>,
    pub(crate) ready: Option<String>,
    pub(crate) warnings: Vec<String>,
}

impl Plan {
    /// Reads a Dockerfile's text and the files that it copies from `dir`. Errors: with the line's number.
    pub(crate) fn read(
        text: &str,
        dockerfile: &Path,
        dir: &Path,
        build_args: &BTreeMap<String, String>,
    ) -> anyhow::Result<Self> {
        let name = dockerfile.display();
        let wrapped = Wrapped::of(text);
        let text = &*wrapped.text;
        let parsed = parse_dockerfile::parse(text).map_err(|error| match error.line() {
            0 => anyhow::anyhow!("{name}: {error:#}"),
            line => anyhow::anyhow!("{name}: line {}: {error:#}", wrapped.number_of(line)),
        })?;
        let line_of = |at| wrapped.line_of(at);
        if let Some(second) = parsed.stages().nth(1) {
            let line = line_of(second.from.from.span.start);
            bail!("{name}: line {line}: a second FROM: builds of several stages are not supported");
        }
        let escape = parsed.parser_directives.escape.as_ref().map_or('\\', |directive| directive.value.value);
        let mut planner = Planner {
            plan: Self::default(),
            context: BuildContext::open(dir, dockerfile)?,
            build_args,
            used_args: BTreeSet::new(),
            global: BTreeMap::new(),
            variables: BTreeMap::new(),
            env: BTreeSet::new(),
            entrypoint: None,
            command: None,
            escape,
            line: 0,
            begins: String::new(),
            in_stage: false,
        };
        for instruction in &parsed.instructions {
            let at = start_of(instruction);
            planner.line = line_of(at);
            planner.begins = text[at..].lines().next().unwrap_or_default().trim().chars().take(60).collect();
            planner.take(instruction).with_context(|| format!("{name}: line {}", planner.line))?;
        }
        Ok(planner.finish())
    }
}

/// A command in either form, as a shell's line.
#[derive(Debug, Clone)]
enum Run {
    Exec(Vec<String>),
    Shell(String),
}

impl Run {
    fn line(&self) -> String {
        match self {
            Self::Exec(words) => quoted(words),
            Self::Shell(line) => line.clone(),
        }
    }
}

struct Planner<'a> {
    plan: Plan,
    context: BuildContext,
    build_args: &'a BTreeMap<String, String>,
    used_args: BTreeSet<String>,
    /// `ARG`s before `FROM`.
    global: BTreeMap<String, String>,
    /// `ARG`s and `ENV`s of the stage, as far as they are known here: not those of the base image.
    variables: BTreeMap<String, String>,
    /// Those of `ENV`, which an `ARG` does not change.
    env: BTreeSet<String>,
    entrypoint: Option<Run>,
    command: Option<Run>,
    escape: char,
    line: usize,
    begins: String,
    in_stage: bool,
}

impl Planner<'_> {
    fn take(&mut self, instruction: &Instruction<'_>) -> anyhow::Result<()> {
        match instruction {
            Instruction::From(from) => {
                for option in &from.options {
                    self.warn(&format!("--{} does not count: images are the node's kind", option.name.value));
                }
                let global = self.global.clone();
                let image = expand(&from.image.value, &|name| global.get(name).cloned());
                if image.is_empty() || image == "scratch" {
                    bail!("{:?} is no image to start from", from.image.value);
                }
                self.plan.image = image;
                self.in_stage = true;
                self.step("USER", vec![ROOT.to_owned()]);
            }
            Instruction::Arg(arg) => self.arg(&arg.arguments.value)?,
            Instruction::Env(env) => self.env(&env.arguments.value)?,
            Instruction::Run(run) => {
                for option in &run.options {
                    self.run_option(option)?;
                }
                let command = self.run(&run.arguments, &run.here_docs)?;
                self.step("RUN", vec![command]);
            }
            Instruction::Workdir(workdir) => self.step("WORKDIR", vec![unquoted(&workdir.arguments.value)]),
            Instruction::User(user) => self.step("USER", vec![unquoted(&user.arguments.value)]),
            Instruction::Copy(copy) => self.copy(&copy.options, &copy.src, &copy.dest.value, false)?,
            Instruction::Add(add) => self.copy(&add.options, &add.src, &add.dest.value, true)?,
            Instruction::Entrypoint(entrypoint) => self.entrypoint = Some(self.form(&entrypoint.arguments)),
            Instruction::Cmd(cmd) => self.command = Some(self.form(&cmd.arguments)),
            Instruction::Healthcheck(check) => {
                self.plan.ready = match &check.arguments {
                    HealthcheckArguments::Cmd { arguments, .. } => Some(self.form(arguments).line()),
                    _ => None,
                };
            }
            Instruction::Onbuild(_) => bail!("ONBUILD is not supported"),
            Instruction::Expose(_) => self.warn("EXPOSE does not count: all ports of a sandbox can be reached"),
            Instruction::Volume(volume) => {
                let count = match &volume.arguments {
                    JsonOrStringArray::Json(paths) => paths.value.len(),
                    JsonOrStringArray::String(paths) => paths.len(),
                };
                self.warn(&format!("VOLUME does not count: {count} paths stay a part of the disk"));
            }
            Instruction::Label(_) => self.warn("LABEL does not count"),
            Instruction::Maintainer(_) => self.warn("MAINTAINER does not count"),
            Instruction::Shell(_) => self.warn("SHELL does not count: commands are run by bash"),
            Instruction::Stopsignal(_) => self.warn("STOPSIGNAL does not count"),
            _ => bail!("this instruction is not supported"),
        }
        Ok(())
    }

    fn warn(&mut self, text: &str) {
        self.plan.warnings.push(format!("line {}: {text}", self.line));
    }

    fn step(&mut self, kind: &str, args: Vec<String>) {
        self.step_with(kind, args, None);
    }

    fn step_with(&mut self, kind: &str, args: Vec<String>, files_hash: Option<String>) {
        self.plan.steps.push(TemplateStep { kind: kind.to_owned(), args, files_hash, ..TemplateStep::default() });
        self.plan.origins.push(format!("line {}: {}", self.line, self.begins));
    }

    fn known(&self, text: &str) -> String {
        expand(text, &|name| self.variables.get(name).cloned())
    }

    fn arg(&mut self, text: &str) -> anyhow::Result<()> {
        for (name, default) in pairs(text).map_err(anyhow::Error::msg)? {
            self.used_args.insert(name.clone());
            let scope = if self.in_stage { &self.variables } else { &self.global };
            let default = default.map(|value| expand(&value, &|name| scope.get(name).cloned()));
            let inherited = || self.global.get(&name).cloned();
            let Some(value) = self.build_args.get(&name).cloned().or(default).or_else(inherited) else { continue };
            if !self.in_stage {
                self.global.insert(name, value);
            } else if !self.env.contains(&name) {
                self.variables.insert(name.clone(), value.clone());
                // The value is final; what looks like a variable in it is none.
                self.step("ARG", vec![name, value.replace('\\', "\\\\").replace('$', "\\$")]);
            }
        }
        Ok(())
    }

    fn env(&mut self, text: &str) -> anyhow::Result<()> {
        let mut read = pairs(text).map_err(anyhow::Error::msg)?;
        if let Some((name, None)) = read.first() {
            // The old form: all that follows the name is its value.
            let name = name.clone();
            let value = text.trim_start().strip_prefix(&*name).unwrap_or_default().trim();
            if value.is_empty() {
                bail!("ENV {name} has no value");
            }
            read = vec![(name, Some(value.to_owned()))];
        }
        // All of one instruction see the values before it.
        let values: Vec<_> = read
            .iter()
            .map(|(name, value)| {
                let value = value.as_ref().with_context(|| format!("{name} has no value"))?;
                if name.is_empty() {
                    bail!("a variable has no name")
                }
                Ok((name.clone(), self.known(value)))
            })
            .collect::<anyhow::Result<_>>()?;
        let args = read.into_iter().flat_map(|(name, value)| [name, value.unwrap_or_default()]).collect();
        self.step("ENV", args);
        for (name, value) in values {
            self.env.insert(name.clone());
            self.variables.insert(name, value);
        }
        Ok(())
    }

    fn run_option(&mut self, option: &Flag<'_>) -> anyhow::Result<()> {
        let value = option.value.as_ref().map(|value| &*value.value).unwrap_or_default();
        let kind = value.split(',').find_map(|part| part.strip_prefix("type="));
        match (&*option.name.value, kind) {
            ("mount", Some("cache" | "tmpfs")) => {
                self.warn("--mount of a cache does not count: it is an ordinary directory");
                Ok(())
            }
            ("mount", Some("secret" | "ssh")) => bail!("secrets (--mount=type=secret) are not supported"),
            (name, _) => bail!("--{name} of RUN is not supported"),
        }
    }

    fn form(&self, command: &Command<'_>) -> Run {
        match command {
            Command::Exec(words) => Run::Exec(words.value.iter().map(|word| word.value.clone().into_owned()).collect()),
            Command::Shell(line) => Run::Shell(joined(line.value, self.escape)),
            _ => Run::Shell(String::new()),
        }
    }

    fn run(&self, command: &Command<'_>, documents: &[HereDoc<'_>]) -> anyhow::Result<String> {
        let line = self.form(command).line();
        let (first, rest) = match documents {
            [] => return Ok(line),
            [first, rest @ ..] => (first, rest),
        };
        // The document is the command.
        if !rest.is_empty() || line.contains(char::is_whitespace) {
            bail!("{line:?}: a document that is the command stands alone");
        }
        let script = first.value.trim_end_matches('\n');
        if !script.starts_with("#!") {
            return Ok(script.to_owned());
        }
        let script = quoted(&[format!("{script}\n")]);
        Ok(format!(
            "f=$(mktemp) && printf %s {script} > \"$f\" && chmod 700 \"$f\" && \"$f\"; s=$?; rm -f \"$f\"; exit $s"
        ))
    }

    fn copy(&mut self, options: &[Flag<'_>], sources: &[Source<'_>], target: &str, add: bool) -> anyhow::Result<()> {
        let kind = if add { "ADD" } else { "COPY" };
        let (mut owner, mut mode) = (ROOT.to_owned(), String::new());
        for option in options {
            let value = option.value.as_ref().map(|value| self.known(&value.value)).unwrap_or_default();
            match &*option.name.value {
                "chown" => owner = value,
                "chmod" if value.len() <= 5 && value.bytes().all(|byte| matches!(byte, b'0'..=b'7')) => mode = value,
                "chmod" => bail!("--chmod={value}: only octal modes are supported"),
                "link" => {}
                "from" => bail!("COPY --from={value}: there is one stage only"),
                name => bail!("--{name} of {kind} is not supported"),
            }
        }
        let target = unquoted(target);
        let mut layout = Layout::new();
        // A single file may take the target's own name.
        let mut single = None;
        let mut found = 0;
        for source in sources {
            match source {
                Source::HereDoc(document) => {
                    let name = target.rsplit('/').next().unwrap_or_default().to_owned();
                    if sources.len() > 1 || name.is_empty() {
                        bail!("a document needs a file's name to be copied to");
                    }
                    let text = if document.expand { self.known(&document.value) } else { document.value.to_string() };
                    layout.insert(format!("{DIR}/file"), Entry::Text(text));
                    single = Some("file".to_owned());
                    found += 1;
                }
                Source::Path(path) => {
                    let path = self.known(&unquoted(&path.value));
                    if path.contains("://") || path.starts_with("git@") {
                        bail!("{path}: what is elsewhere cannot be added; download it with RUN");
                    }
                    for path in self.context.sources(&path)? {
                        if add && ARCHIVES.iter().any(|end| path.ends_with(end)) {
                            bail!("{path}: ADD would unpack it; use COPY and RUN tar");
                        }
                        let before = layout.len();
                        self.context.lay(&path, DIR, &mut layout)?;
                        let is_file = !layout.contains_key(DIR) && layout.len() <= before + 1;
                        single = is_file.then(|| path.rsplit('/').next().unwrap_or(&path).to_owned());
                        found += 1;
                    }
                }
                _ => bail!("a source of this kind is not supported"),
            }
        }
        let (source, target) = match single.filter(|_| found == 1) {
            Some(name) => (format!("{DIR}/{name}"), target),
            None if found > 1 && !target.ends_with('/') && !matches!(&*target, "." | "..") => {
                bail!("several files go into a directory: {target:?} has to end with a slash")
            }
            None => (DIR.to_owned(), target),
        };
        let archive = archive(&layout)?;
        self.step_with(kind, vec![source, target, owner, mode], Some(archive.hash.clone()));
        if self.plan.archives.iter().all(|known| known.hash != archive.hash) {
            self.plan.archives.push(archive);
        }
        Ok(())
    }

    fn finish(mut self) -> Plan {
        self.plan.start = match (&self.entrypoint, &self.command) {
            (Some(Run::Exec(entrypoint)), Some(Run::Exec(command))) => {
                Some(quoted(&[entrypoint.as_slice(), command].concat()))
            }
            (Some(Run::Exec(entrypoint)), Some(Run::Shell(command))) => {
                let shell = ["/bin/sh".to_owned(), "-c".to_owned(), command.clone()];
                Some(quoted(&[entrypoint.as_slice(), &shell].concat()))
            }
            (Some(entrypoint), _) => Some(entrypoint.line()),
            (None, command) => command.as_ref().map(Run::line),
        };
        self.plan.start = self.plan.start.filter(|line| !line.trim().is_empty());
        let unused = self.build_args.keys().filter(|name| !self.used_args.contains(*name));
        self.plan.warnings.extend(unused.map(|name| format!("--build-arg {name}: there is no ARG of this name")));
        self.plan
    }
}

fn unquoted(text: &str) -> String {
    let text = text.trim();
    let inner = |quote: char| text.strip_prefix(quote)?.strip_suffix(quote);
    inner('"').or_else(|| inner('\'')).unwrap_or(text).to_owned()
}

fn start_of(instruction: &Instruction<'_>) -> usize {
    match instruction {
        Instruction::Add(i) => i.add.span.start,
        Instruction::Arg(i) => i.arg.span.start,
        Instruction::Cmd(i) => i.cmd.span.start,
        Instruction::Copy(i) => i.copy.span.start,
        Instruction::Entrypoint(i) => i.entrypoint.span.start,
        Instruction::Env(i) => i.env.span.start,
        Instruction::Expose(i) => i.expose.span.start,
        Instruction::From(i) => i.from.span.start,
        Instruction::Healthcheck(i) => i.healthcheck.span.start,
        Instruction::Label(i) => i.label.span.start,
        Instruction::Maintainer(i) => i.maintainer.span.start,
        Instruction::Onbuild(i) => i.onbuild.span.start,
        Instruction::Run(i) => i.run.span.start,
        Instruction::Shell(i) => i.shell.span.start,
        Instruction::Stopsignal(i) => i.stopsignal.span.start,
        Instruction::User(i) => i.user.span.start,
        Instruction::Volume(i) => i.volume.span.start,
        Instruction::Workdir(i) => i.workdir.span.start,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read_with(text: &str, args: &[(&str, &str)]) -> anyhow::Result<Plan> {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("src/deep")).unwrap();
        for path in ["a.txt", "b.txt", "src/x", "src/deep/y", "z.tar.gz"] {
            fs::write(dir.path().join(path), path).unwrap();
        }
        let args = args.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Plan::read(text, Path::new("Dockerfile"), dir.path(), &args)
    }

    fn steps(text: &str) -> Vec<String> {
        let plan = read_with(&format!("FROM debian\n{text}"), &[]).unwrap();
        plan.steps.iter().skip(1).map(|step| format!("{} {}", step.kind, step.args.join("|"))).collect()
    }

    fn refusal(text: &str) -> String {
        format!("{:#}", read_with(text, &[]).unwrap_err())
    }

    #[test]
    fn an_image_may_be_named_by_arguments_before_it() {
        let text = "ARG TAG=12\nARG IMAGE=debian:$TAG\nFROM ${IMAGE}\nARG TAG\nRUN echo $TAG";
        let plan = read_with(text, &[]).unwrap();
        assert_eq!(plan.image, "debian:12");
        assert_eq!(plan.steps[0].args, ["root"]);
        assert_eq!(
            (plan.steps[1].kind.as_str(), &plan.steps[1].args[..]),
            ("ARG", &["TAG".to_owned(), "12".to_owned()][..])
        );
        assert_eq!(plan.origins[2], "line 5: RUN echo $TAG");
        let plan = read_with(text, &[("TAG", "13"), ("NONE", "x")]).unwrap();
        assert_eq!((plan.image.as_str(), plan.warnings.len()), ("debian:13", 1));
        assert!(plan.warnings[0].contains("NONE"));
    }

    #[test]
    fn instructions_become_steps() {
        let text = "ENV A=1 B=\"two words\"\nENV OLD form $A\nARG A=9\nARG C=$B!\nWORKDIR /srv/$A\nUSER app\nRUN [\"echo\", \"a b\"]";
        assert_eq!(
            steps(text),
            [
                "ENV A|1|B|two words",
                "ENV OLD|form $A",
                "ARG C|two words!",
                "WORKDIR /srv/$A",
                "USER app",
                "RUN echo 'a b'",
            ]
        );
    }

    #[test]
    fn commands_may_have_many_lines() {
        assert_eq!(steps("RUN a && \\\n  # why\n  b"), ["RUN a &&   b"]);
        assert_eq!(steps("RUN <<EOF\nset -e\necho $X\nEOF\nRUN x"), ["RUN set -e\necho $X", "RUN x"]);
        assert_eq!(steps("RUN cat <<'EOF' > /x\n$a\nEOF\nRUN y"), ["RUN  cat <<'EOF' > /x\n$a\nEOF", "RUN y"]);
        let script = &steps("RUN <<EOF\n#!/usr/bin/env python3\nprint('x')\nEOF")[0];
        assert!(script.contains("mktemp") && script.contains("print('\\''x'\\'')"), "{script}");
    }

    #[test]
    fn files_are_copied_as_docker_does() {
        assert_eq!(steps("COPY a.txt /x"), ["COPY files/a.txt|/x|root|"]);
        assert_eq!(steps("COPY --chown=app:app --chmod=755 src /srv"), ["COPY files|/srv|app:app|755"]);
        assert_eq!(steps("COPY *.txt src /srv/"), ["COPY files|/srv/|root|"]);
        assert_eq!(steps("ENV D=src\nADD $D/x ."), ["ENV D|src", "ADD files/x|.|root|"]);
        assert_eq!(steps("COPY <<EOF /etc/conf\nhello\nEOF"), ["COPY files/file|/etc/conf|root|"]);
        assert_eq!(steps("COPY [\"a.txt\", \"/with space\"]"), ["COPY files/a.txt|/with space|root|"]);
        let plan = read_with("FROM x\nCOPY a.txt /1\nCOPY a.txt /2", &[]).unwrap();
        assert_eq!((plan.archives.len(), plan.steps.len()), (1, 3));
        assert!(refusal("FROM x\nCOPY a.txt b.txt /x").contains("line 2: several files"));
    }

    #[test]
    fn what_runs_is_what_the_image_would_run() {
        let start = |text: &str| read_with(&format!("FROM x\n{text}"), &[]).unwrap().start;
        assert_eq!(start("CMD [\"python3\", \"-m\", \"http.server\"]").unwrap(), "python3 -m http.server");
        assert_eq!(start("ENTRYPOINT [\"a\"]\nCMD [\"b c\"]").unwrap(), "a 'b c'");
        assert_eq!(start("CMD x\nENTRYPOINT run $ME").unwrap(), "run $ME");
        assert_eq!(start("RUN x"), None);
        let plan =
            read_with("FROM x\nHEALTHCHECK --interval=5s CMD curl -f localhost\nEXPOSE 80\nLABEL a=b", &[]).unwrap();
        assert_eq!((plan.ready.as_deref(), plan.warnings.len()), (Some("curl -f localhost"), 2));
        assert!(plan.warnings[0].starts_with("line 3: EXPOSE"));
    }

    #[test]
    fn what_is_not_supported_is_told_with_its_line() {
        for (text, why) in [
            ("FROM a\nRUN x\nFROM b", "line 3: a second FROM"),
            ("FROM scratch", "line 1: \"scratch\" is no image"),
            ("FROM a\n\nADD https://example.com/x /x", "line 3: https://example.com/x: what is elsewhere"),
            ("FROM a\nADD z.tar.gz /x", "line 2: z.tar.gz: ADD would unpack it"),
            ("FROM a\nONBUILD RUN x", "line 2: ONBUILD"),
            ("FROM a\nRUN --mount=type=secret,id=x cat", "line 2: secrets"),
            ("FROM a\nCOPY --from=b /x /y", "line 2: COPY --from=b"),
            ("FROM a\nCOPY none /y", "line 2: there is no none"),
            ("FROM a\nCOPY ../x /y", "line 2: ../x leads out"),
            ("# nothing", "Dockerfile: expected at least one FROM"),
            ("FROM a\nENV X", "line 2: ENV X has no value"),
            ("FROM a\nRUN cat <<E\nx\nE\nWHAT x", "line 5: unknown"),
        ] {
            let refusal = refusal(text);
            assert!(refusal.contains(why), "{text:?}: {refusal}");
        }
    }
}
