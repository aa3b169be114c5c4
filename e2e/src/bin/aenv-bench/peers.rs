//! The same image and the same work in containers of this host, started, checkpointed and restored by runc and gVisor's
//! runsc: what our figures are to be compared with.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::report::Row;

/// Writes 16 MiB of memory, and then says so again and again.
const WORK: &str = "yes | head -c 16777216 > /dev/shm/dirty; while :; do echo tick; sleep 0.005; done";

/// Containers of a bundle that is ours.
struct Containers {
    dir: TempDir,
}

/// A container, deleted when dropped.
struct Container<'a> {
    runtime: Runtime,
    of: &'a Containers,
    id: &'static str,
    child: Child,
    /// Open for as long as it runs: what it says must go somewhere.
    output: BufReader<ChildStdout>,
}

#[derive(Debug, Clone, Copy)]
enum Runtime {
    Runc,
    Runsc,
}

impl Runtime {
    fn name(self) -> &'static str {
        match self {
            Self::Runc => "runc",
            Self::Runsc => "runsc",
        }
    }

    /// Whether it is here; if not, it says how to get it.
    fn is_here(self) -> bool {
        let name = self.name();
        let here = Command::new(name).arg("--version").output().is_ok_and(|said| said.status.success());
        if !here {
            eprintln!("skipped: {name} is not installed (apt-get install {name}; runsc is newer in backports)");
        }
        here
    }

    fn command(self, of: &Containers) -> Command {
        let mut command = Command::new(self.name());
        command.arg("--root").arg(of.path("state")).current_dir(of.dir.path());
        if matches!(self, Self::Runsc) {
            command.arg("--network=none");
        }
        command
    }
}

/// Rows of the peers, and of ours in times of theirs. `layout` is an image as an OCI layout folder.
pub(crate) fn rows(layout: &Path, samples: usize, ours: &[Row]) -> Result<Vec<Row>> {
    let of = |name: &str| ours.iter().find(|row| row.name() == name).map(Row::median);
    let mut rows = Vec::new();
    let mut compare = |name: &'static str, ours: Option<f64>, theirs: Row| {
        let mut ratio = Row::new(name, "×");
        if let Some(ours) = ours {
            ratio.add(ours / theirs.median());
        }
        rows.extend([theirs, ratio]);
    };
    let containers = Containers::new(layout)?;
    if Runtime::Runc.is_here() {
        let mut creates = Row::new("runc_create", "ms");
        containers.configure(&["echo", "hi"])?;
        for _ in 0..samples {
            creates.add(containers.run(Runtime::Runc)?.1);
        }
        compare("vs_runc_create", of("create_first_output"), creates);
    }
    if Runtime::Runsc.is_here() {
        let (mut checkpoints, mut restores) = (Row::new("runsc_checkpoint", "ms"), Row::new("runsc_restore", "ms"));
        containers.configure(&["/bin/sh", "-c", WORK])?;
        for _ in 0..samples {
            let (container, _) = containers.run(Runtime::Runsc)?;
            checkpoints.add(containers.checkpoint(container)?);
            restores.add(containers.restore()?.1);
        }
        compare("vs_runsc_checkpoint", of("pause_16"), checkpoints);
        compare("vs_runsc_restore", of("resume"), restores);
    }
    Ok(rows)
}

impl Containers {
    /// Unpacks the image, which has no layer that takes files away.
    fn new(layout: &Path) -> Result<Self> {
        let containers = Self { dir: tempfile::tempdir()? };
        let rootfs = containers.path("rootfs");
        fs::create_dir(&rootfs)?;
        let blob = |descriptor: &Value| -> Result<PathBuf> {
            let digest = descriptor["digest"].as_str().context("a descriptor without a digest")?;
            Ok(layout.join("blobs").join(digest.replace(':', "/")))
        };
        let read = |path: PathBuf| -> Result<Value> {
            Ok(serde_json::from_slice(&fs::read(&path).with_context(|| format!("read {}", path.display()))?)?)
        };
        let manifest = read(blob(&read(layout.join("index.json"))?["manifests"][0])?)?;
        for layer in manifest["layers"].as_array().context("a manifest without layers")? {
            let mut tar = Command::new("tar");
            tar.arg("--extract").arg("--file").arg(blob(layer)?).arg("--directory").arg(&rootfs);
            succeed(tar.arg("--exclude=dev/*"))?;
        }
        succeed(Command::new("runc").arg("spec").current_dir(containers.dir.path()))
            .or_else(|_| succeed(Command::new("runsc").arg("spec").current_dir(containers.dir.path())))?;
        Ok(containers)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What the next containers run.
    fn configure(&self, arguments: &[&str]) -> Result<()> {
        let path = self.path("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path)?)?;
        config["process"]["terminal"] = json!(false);
        config["process"]["args"] = json!(arguments);
        config["root"] = json!({"path": "rootfs", "readonly": true});
        Ok(fs::write(&path, config.to_string())?)
    }

    /// Runs a container; gives it, and the milliseconds until its first line.
    fn run(&self, runtime: Runtime) -> Result<(Container<'_>, f64)> {
        let mut command = runtime.command(self);
        command.args(["run", "first"]);
        self.until_a_line(runtime, "first", command)
    }

    /// The milliseconds until the container is a file.
    fn checkpoint(&self, container: Container<'_>) -> Result<f64> {
        let image = self.path("image");
        if image.exists() {
            fs::remove_dir_all(&image)?;
        }
        let mut command = container.runtime.command(self);
        let begun = Instant::now();
        succeed(command.arg("checkpoint").arg("--image-path").arg(&image).arg(container.id))?;
        Ok(begun.elapsed().as_secs_f64() * 1e3)
    }

    /// Another container goes on from that file.
    fn restore(&self) -> Result<(Container<'_>, f64)> {
        let mut command = Runtime::Runsc.command(self);
        command.arg("restore").arg("--image-path").arg(self.path("image")).arg("second");
        self.until_a_line(Runtime::Runsc, "second", command)
    }

    fn until_a_line(&self, runtime: Runtime, id: &'static str, mut command: Command) -> Result<(Container<'_>, f64)> {
        let begun = Instant::now();
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = child.with_context(|| format!("start {}", runtime.name()))?;
        let output = BufReader::new(child.stdout.take().context("its output")?);
        let mut container = Container { runtime, of: self, id, child, output };
        let mut line = String::new();
        container.output.read_line(&mut line)?;
        let took = begun.elapsed().as_secs_f64() * 1e3;
        match line.trim() {
            "hi" | "tick" => Ok((container, took)),
            other => bail!("{} said {other:?}", runtime.name()),
        }
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        // One that has ended by itself is gone already.
        _ = self.runtime.command(self.of).args(["delete", "--force", self.id]).stderr(Stdio::null()).status();
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

fn succeed(command: &mut Command) -> Result<()> {
    let said = command.output().with_context(|| format!("start {command:?}"))?;
    match said.status.success() {
        true => Ok(()),
        false => bail!("{command:?}: {}", String::from_utf8_lossy(&said.stderr).trim()),
    }
}
