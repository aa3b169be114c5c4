//! A server under test, as a process of its own.

use std::fs::{self, File};
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};

use aenv_api::{
    BuildState, BuildStatus, Client, NewSandbox, Sandbox, TemplateBuildStartV2, TemplateCreateV3, TemplateCreated,
};
use aenv_block_export::UblkExporter;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::ledger::{Ledger, link_prefix, processes};
use crate::machine::Machine;
use crate::wait::eventually;

/// The API key of every node under test.
const KEY: &str = "e2b_0123456789abcdef0123456789abcdef0123456789abcdef";

/// What a test wants of its node beyond the usual.
#[derive(Debug, Clone, Default)]
pub struct NodeOptions {
    /// Where the home is; default: a fresh temporary directory.
    pub home: Option<PathBuf>,
    /// More lines of configuration.
    pub config: String,
    /// How many VMMs wait for a machine; default: none, so that each is a sandbox's.
    pub waiting_vmms: usize,
    /// Whether sandboxes may reach anything; default: no, and the machine's network is not changed.
    pub egress: bool,
    /// What becomes of its sandboxes when it is stopped; default: `delete`, so that nothing may stay.
    pub on_stop: Option<&'static str>,
}

/// A running server. Ends with [`Node::finish`].
#[derive(Debug)]
pub struct Node {
    machine: Machine,
    child: Child,
    /// Removed with the node.
    dir: tempfile::TempDir,
    home: PathBuf,
    runtime: PathBuf,
    address: SocketAddr,
    before: Ledger,
    finished: bool,
}

impl Node {
    /// A server with default options. `None`: this machine lacks something, and the reason was printed.
    pub async fn start() -> Option<Self> {
        Self::start_with(NodeOptions::default()).await
    }

    /// A server. `None`: this machine lacks something, and the reason was printed.
    pub async fn start_with(options: NodeOptions) -> Option<Self> {
        let machine = Machine::find()?;
        // Short: socket paths have room for 107 bytes.
        let dir = tempfile::Builder::new().prefix("aenv-e2e-").tempdir().expect("make a directory for the node");
        let home = options.home.unwrap_or_else(|| dir.path().join("home"));
        let runtime = dir.path().join("run");
        let config = format!(
            "home_path = {home:?}\nruntime_path = {runtime:?}\ncache_path = {cache:?}\napi_addr = \"127.0.0.1:0\"\n\
             orchestrator.on_stop = \"{on_stop}\"\npool.vmm.size = {waiting}\n\
             network.egress.enabled = {egress}\n{more}\n[guest]\nagent_path = {agent:?}\nkit_path = {kit:?}\n",
            cache = machine.kept.join("cache"),
            kit = machine.kept.join("guest"),
            agent = machine.agent,
            waiting = options.waiting_vmms,
            egress = options.egress,
            on_stop = options.on_stop.unwrap_or("delete"),
            more = options.config,
        );
        fs::write(dir.path().join("node.toml"), config).expect("write the configuration");
        let before = Ledger::take(&home, &runtime);
        let (child, address) = spawn(&machine, dir.path(), None).await;
        Some(Self { machine, child, dir, home, runtime, address, before, finished: false })
    }

    /// The API's base URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The API key.
    #[must_use]
    pub fn key(&self) -> &'static str {
        KEY
    }

    /// The programs under test.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The node's home.
    #[must_use]
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// Where its sockets, mounts and private directories are.
    #[must_use]
    pub fn runtime(&self) -> &Path {
        &self.runtime
    }

    /// A directory that goes with the node.
    #[must_use]
    pub fn scratch(&self) -> &Path {
        self.dir.path()
    }

    /// A client with the right key.
    #[must_use]
    pub fn client(&self) -> Client {
        Client::new(&self.url(), KEY).expect("a client for a URL of ours")
    }

    /// Runs `aenv` against this node.
    #[must_use]
    pub fn aenv(&self, args: &[&str]) -> Output {
        Command::new(&self.machine.cli)
            .args(args)
            .env("AENV_SERVER", self.url())
            .env("AENV_API_KEY", KEY)
            .stdin(Stdio::null())
            .output()
            .expect("run aenv")
    }

    /// Like [`Node::aenv`]; what it printed, if it went well.
    #[must_use]
    pub fn aenv_ok(&self, args: &[&str]) -> String {
        let output = self.aenv(args);
        let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "aenv {args:?}: {}\n{stdout}\n{stderr}\n{}", output.status, self.log_tail());
        stdout.into_owned()
    }

    /// Announces a template, and a build of it.
    pub async fn announce(&self, name: &str) -> TemplateCreated {
        let request = TemplateCreateV3 {
            name: Some(name.to_owned()),
            cpu_count: Some(1),
            memory_mb: Some(256),
            ..TemplateCreateV3::default()
        };
        self.client().create_template(&request).await.expect("announce a template")
    }

    /// Starts a build that was announced, here or to a node that shares its templates.
    pub async fn begin_build(&self, announced: &TemplateCreated, image: &str) {
        let start = TemplateBuildStartV2 { from_image: Some(image.to_owned()), ..TemplateBuildStartV2::default() };
        let client = self.client();
        client.start_build(announced.template_id, announced.build_id, &start).await.expect("start a build");
    }

    /// Announces a template of `image` and starts its build.
    pub async fn start_build(&self, name: &str, image: &str) -> TemplateCreated {
        let created = self.announce(name).await;
        self.begin_build(&created, image).await;
        created
    }

    /// Announces and builds a template of `image`; the status it ended with.
    pub async fn build(&self, name: &str, image: &str) -> BuildStatus {
        let client = self.client();
        let created = self.start_build(name, image).await;
        let (template, build) = (created.template_id, created.build_id);
        eventually("the build ends", async || {
            let status = client.build_status(template, build, &Default::default()).await.expect("ask for the build");
            status.status.is_terminal().then_some(status)
        })
        .await
    }

    /// A ready template `name` of the small Debian.
    pub async fn debian(&self, name: &str) {
        let image = format!("oci:{}", self.machine.image.display());
        self.ready(name, &image).await;
    }

    /// A ready template `name` of a busybox that takes a moment to import. `None`: there is no busybox here.
    pub async fn tiny(&self, name: &str) -> Option<()> {
        let image = crate::tiny::layout(&self.dir.path().join("tiny"))?;
        self.ready(name, &format!("oci:{}", image.display())).await;
        Some(())
    }

    async fn ready(&self, name: &str, image: &str) {
        let status = self.build(name, image).await;
        assert_eq!(status.status, BuildState::Ready, "{status:?}\n{}", self.log_tail());
    }

    /// A sandbox of `template`, secured like the SDKs have it.
    pub async fn sandbox(&self, template: &str) -> Sandbox {
        let request = NewSandbox { template_id: template.to_owned(), ..NewSandbox::default() };
        match self.client().create_sandbox(&request).await {
            Ok(sandbox) => sandbox,
            Err(error) => panic!("create a sandbox: {error}\n{}", self.log_tail()),
        }
    }

    /// Pids of the VMM processes of this node.
    #[must_use]
    pub fn vmm_pids(&self) -> Vec<i32> {
        self.pids("qemu-system", &self.runtime)
    }

    /// Pid of this node's storage daemon, if it runs: there is one at most.
    #[must_use]
    pub fn blockd_pid(&self) -> Option<i32> {
        self.pids("aenv-blockd", &self.home).first().copied()
    }

    fn pids(&self, program: &str, path: &Path) -> Vec<i32> {
        let path = path.to_string_lossy().into_owned();
        let ours =
            |(pid, command): (i32, String)| (command.contains(program) && command.contains(&path)).then_some(pid);
        processes().into_iter().filter_map(ours).collect()
    }

    /// What of this node is on the host beyond what was there before it.
    #[must_use]
    pub fn held(&self) -> Vec<String> {
        let now = Ledger::take(&self.home, &self.runtime);
        now.beyond(&self.before).into_iter().map(str::to_owned).collect()
    }

    /// Everything the servers of this node logged.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(log_path(self.dir.path())).unwrap_or_default()
    }

    fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        format!("--- server log ---\n{}", lines[lines.len().saturating_sub(40)..].join("\n"))
    }

    /// `kill -9`; sandboxes and everything else stay as they are.
    pub fn kill9(&mut self) {
        self.child.kill().expect("kill the server");
        self.child.wait().expect("wait for the server");
    }

    /// Stops the server in order; what it puts away stays.
    pub async fn stop(&mut self) {
        let status = self.terminate().await;
        assert!(status.success(), "the server ended with {status}\n{}", self.log_tail());
    }

    /// Starts a server again on the same home, after [`Node::kill9`] or [`Node::stop`].
    pub async fn restart(&mut self) {
        (self.child, self.address) = spawn(&self.machine, self.dir.path(), None).await;
    }

    /// The same; the server ends at once when it comes to `place`, see `aenv_durable::crash_point`.
    pub async fn restart_to_crash_at(&mut self, place: &str) {
        (self.child, self.address) = spawn(&self.machine, self.dir.path(), Some(place)).await;
    }

    /// Whether the server has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("look at the server").is_some()
    }

    /// Stops the server in order and checks the ledger.
    pub async fn finish(mut self) {
        let status = self.terminate().await;
        assert!(status.success(), "the server ended with {status}\n{}", self.log_tail());
        let held = self.held();
        assert!(held.is_empty(), "left behind:\n{}\n{}", held.join("\n"), self.log_tail());
        let errors: Vec<_> = self.log().lines().filter(|line| line.contains(" ERROR ")).map(str::to_owned).collect();
        self.finished = true;
        assert!(errors.is_empty(), "the server logged errors:\n{}", errors.join("\n"));
    }

    /// Like [`Node::finish`], for tests that make the server log errors.
    pub async fn finish_with_errors(mut self) {
        let status = self.terminate().await;
        assert!(status.success(), "the server ended with {status}\n{}", self.log_tail());
        let held = self.held();
        self.finished = true;
        assert!(held.is_empty(), "left behind:\n{}\n{}", held.join("\n"), self.log_tail());
    }

    async fn terminate(&mut self) -> ExitStatus {
        let pid = Pid::from_raw(self.child.id().try_into().expect("a pid"));
        kill(pid, Signal::SIGTERM).expect("signal the server");
        let child = &mut self.child;
        eventually("the server stops", async || child.try_wait().expect("wait for the server")).await
    }
}

/// Processes in a network namespace.
fn living_in(netns: &Path) -> Vec<i32> {
    let inode = |path: &Path| fs::metadata(path).ok().map(|found| found.ino());
    let Some(wanted) = inode(netns) else { return Vec::new() };
    let lives_there = |pid: &i32| inode(Path::new(&format!("/proc/{pid}/ns/net"))) == Some(wanted);
    processes().into_iter().map(|(pid, _)| pid).filter(lives_there).collect()
}

impl Drop for Node {
    /// The seat belt of a failed test: nothing of the node may stay, and another server run is the sweep.
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        _ = self.child.kill();
        _ = self.child.wait();
        for pid in self.vmm_pids().into_iter().chain(self.blockd_pid()) {
            _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        _ = nix::mount::umount2(&self.runtime.join("blockd/devices"), nix::mount::MntFlags::MNT_DETACH);
        // Devices on ublk wait for another daemon.
        let tag = fs::read_to_string(self.home.join("blockd/ublk-tag")).ok().and_then(|tag| tag.trim().parse().ok());
        if let Some(ublk) = tag.and_then(|tag| UblkExporter::open(tag).ok()) {
            _ = ublk.sweep(&[]);
        }
        let prefix = link_prefix(&self.home);
        let links = fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
        for name in links.map(|entry| entry.file_name().to_string_lossy().into_owned()) {
            if prefix.as_ref().is_some_and(|prefix| name.starts_with(prefix)) {
                _ = Command::new("ip").args(["link", "delete", &name]).status();
            }
        }
        for name in fs::read_dir(self.runtime.join("netns")).into_iter().flatten().flatten() {
            // A VMM that waits for its machine names no path of the node's: it is known by where it lives.
            for pid in living_in(&name.path()) {
                _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            _ = nix::mount::umount2(&name.path(), nix::mount::MntFlags::MNT_DETACH);
        }
        _ = writeln!(std::io::stderr(), "{}", self.log_tail());
    }
}

fn log_path(dir: &Path) -> PathBuf {
    dir.join("server.log")
}

async fn spawn(machine: &Machine, dir: &Path, crash_at: Option<&str>) -> (Child, SocketAddr) {
    let log = File::options().create(true).append(true).open(log_path(dir)).expect("open the log");
    let begin = log.metadata().expect("look at the log").len();
    let mut child = Command::new(&machine.server)
        .arg("--config")
        .arg(dir.join("node.toml"))
        .env("AENV_API_KEY", KEY)
        .env("AENV_LOG_FORMAT", "compact")
        .env("NO_COLOR", "1")
        .envs(crash_at.map(|place| ("AENV_CRASH_AT", place)))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("start the server");
    let address = eventually("the server listens", async || {
        let log = fs::read_to_string(log_path(dir)).expect("read the log");
        let fresh = &log[usize::try_from(begin).expect("a short log")..];
        if let Some(status) = child.try_wait().expect("look at the server") {
            panic!("the server ended at its start with {status} (signal {:?}):\n{fresh}", status.signal());
        }
        let line = fresh.lines().find(|line| line.contains("listening"))?;
        line.split("address=").nth(1)?.split_whitespace().next()?.parse().ok()
    })
    .await;
    (child, address)
}
