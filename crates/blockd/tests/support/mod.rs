//! A daemon in a process of its own, in a directory of its own, and what it serves.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

pub mod registry;

use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::future::Future;
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use aenv_block_client::{
    BlockdClient, BlockdConfig, Caching, DeviceConfig, DeviceSpec, DeviceView, ExportChoice, Lower, NewUpper,
    UpperConfig,
};
use aenv_block_device::BlockDevice as _;
use aenv_block_export::UblkExporter;
pub use aenv_block_export::test_support::Opened;
use aenv_block_overlaybd::{Identity, Mode, OverlayDevice, Stack, UpperFiles, UpperOptions};
use aenv_blockd::{Daemon, Steps};
use aenv_model::Bytes;
use rustix::process::{Pid, Signal};
use uuid::Uuid;

/// Where the daemon that a test runs finds its configuration, and the step that it is to die at.
const CONFIG: &str = "AENV_TEST_BLOCKD_CONFIG";
const DIE_AT: &str = "AENV_TEST_BLOCKD_DIE_AT";
/// A directory that it removes when it has written down that it will restack a device.
const REMOVE: &str = "AENV_TEST_BLOCKD_REMOVE";

/// How long to wait for what should come soon.
pub const PATIENCE: Duration = Duration::from_secs(30);

thread_local! {
    /// How devices are exported in the test that runs on this thread.
    static EXPORT: Cell<ExportChoice> = const { Cell::new(ExportChoice::Fuse) };
}

/// Runs a test with devices that are exported this way, or says why it cannot.
pub fn on(export: ExportChoice, test: fn()) {
    let missing = match export {
        _ if !rustix::process::geteuid().is_root() => Some("needs root"),
        ExportChoice::Ublk => (!UblkExporter::is_there()).then_some("needs /dev/ublk-control"),
        _ => (!Path::new("/dev/fuse").exists()).then_some("needs /dev/fuse"),
    };
    if let Some(why) = missing {
        return eprintln!("skipped: {why}");
    }
    EXPORT.set(export);
    test();
}

/// Makes functions tests, one of each exporter.
#[macro_export]
macro_rules! on_each_exporter {
    ($($test:ident),* $(,)?) => {
        mod fuse {
            $(#[test]
            fn $test() {
                $crate::support::on(aenv_block_client::ExportChoice::Fuse, super::$test);
            })*
        }

        mod ublk {
            $(#[test]
            fn $test() {
                $crate::support::on(aenv_block_client::ExportChoice::Ublk, super::$test);
            })*
        }
    };
}

/// Waits until `condition` gives something.
#[track_caller]
pub fn until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

/// What `the_daemon_of_a_test` of each test program does: be a daemon, if a test asks for it.
pub fn be_a_daemon() {
    let Some(config) = std::env::var_os(CONFIG) else {
        eprintln!("skipped: only of use to the tests that run it");
        return;
    };
    let _ = tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_env_filter("debug,hyper=info")
        .log_internal_errors(false)
        .try_init();
    let config = aenv_blockd::load(Path::new(&config)).unwrap().config;
    let steps = match std::env::var(DIE_AT) {
        Ok(wanted) => Steps::observed(move |step| {
            if step == wanted {
                let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::KILL);
                std::thread::sleep(PATIENCE); // until the signal comes
            }
        }),
        Err(_) => Steps::observed(|step| {
            if let Some(dir) = std::env::var_os(REMOVE).filter(|_| step == "restack: intent written") {
                let _ = fs::remove_dir(dir);
            }
        }),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let stopped = runtime.block_on(async {
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).unwrap();
        let daemon = Daemon::start(config, steps).await.unwrap();
        let asked = daemon.asked_to_stop();
        tokio::select! {
            _ = terminate.recv() => {}
            () = asked.cancelled() => {}
        }
        daemon.stop().await
    });
    if let Err(error) = stopped {
        eprintln!("{error:#}");
        std::process::exit(9);
    }
}

/// A directory with a daemon's configuration, and the daemon, while it runs.
pub struct Host {
    pub dir: PathBuf,
    pub config: BlockdConfig,
    child: Option<Child>,
    /// Removed last.
    _temp: Option<tempfile::TempDir>,
}

impl Host {
    /// A host with a daemon.
    pub fn start() -> Self {
        let mut host = Self::prepare();
        host.run();
        host
    }

    /// A host without one yet.
    pub fn prepare() -> Self {
        let temp = tempfile::tempdir().unwrap();
        let mut host = Self::at(temp.path());
        host._temp = Some(temp);
        host
    }

    /// The same in a given directory.
    pub fn at(dir: &Path) -> Self {
        let dir = fs::canonicalize(dir).unwrap();
        let mut config = BlockdConfig::new(dir.join("run/socket"), dir.join("state"), dir.join("run"));
        config.export = EXPORT.get();
        config.registry.patience_secs = 1;
        config.download.delay_secs = 0;
        config.download.delay_extra_secs = 0;
        config.cache.size_mib = 16;
        Self { dir, config, child: None, _temp: None }
    }

    /// Starts the daemon and waits until it answers and every device is back, or known not to be.
    pub fn run(&mut self) {
        self.run_at_once();
        let client = self.client();
        until("every device is settled", || {
            block_on(client.list()).unwrap().iter().all(|view| !view.recovering).then_some(())
        });
    }

    /// Starts the daemon and waits until it answers; devices come back meanwhile.
    pub fn run_at_once(&mut self) {
        self.spawn(None);
        self.wait_until_it_answers();
    }

    /// Starts a daemon that dies at the first time it comes to `step`.
    pub fn run_until(&mut self, step: &str) {
        self.spawn(Some(step));
        self.wait_until_it_answers();
    }

    /// Starts a daemon that removes the empty directory `dir` once it has written down that it will restack a device.
    pub fn run_and_remove(&mut self, dir: &Path) {
        self.spawn_with(Some((REMOVE, dir.as_os_str())));
        self.wait_until_it_answers();
    }

    pub fn spawn(&mut self, die_at: Option<&str>) {
        self.spawn_with(die_at.map(|step| (DIE_AT, step.as_ref())));
    }

    fn spawn_with(&mut self, hook: Option<(&str, &OsStr)>) {
        let file = self.dir.join("config.toml");
        fs::write(&file, self.config.to_toml().unwrap()).unwrap();
        let mut command = match hook {
            None => {
                let mut command = Command::new(env!("CARGO_BIN_EXE_aenv-blockd"));
                command.arg("--config").arg(&file).env("RUST_LOG", "debug,hyper=info");
                command
            }
            Some((name, value)) => {
                let mut command = Command::new(std::env::current_exe().unwrap());
                command.args(["--exact", "the_daemon_of_a_test", "--ignored", "--nocapture"]).env(CONFIG, &file);
                command.env(name, value);
                command
            }
        };
        let log = OpenOptions::new().create(true).append(true).open(self.dir.join("log")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.child = Some(command.spawn().unwrap());
    }

    fn wait_until_it_answers(&mut self) {
        let client = self.client();
        until("the daemon answers", || {
            if let Some(status) = self.child.as_mut().unwrap().try_wait().unwrap() {
                panic!("the daemon ended: {status}\n{}", self.log());
            }
            block_on(client.info()).ok()
        });
    }

    pub fn client(&self) -> BlockdClient {
        BlockdClient::new(&self.config.socket)
    }

    /// Whether requests wait for the next daemon when one dies, rather than fail.
    pub fn requests_wait(&self) -> bool {
        self.config.export == ExportChoice::Ublk
    }

    /// Deletes the ublk devices of all daemons here but those in `keep`; gives how many there were.
    pub fn sweep(&self, keep: &[u32]) -> usize {
        let tag = fs::read_to_string(self.config.state_dir.join("ublk-tag")).ok();
        tag.map_or(0, |tag| UblkExporter::open(tag.parse().unwrap()).unwrap().sweep(keep).unwrap())
    }

    /// Resizes a device, where the kernel can be told: None, said on stderr, where it cannot.
    #[track_caller]
    pub fn resize(&self, name: &str, size: Bytes) -> Option<DeviceView> {
        match block_on(self.client().resize(name, size)) {
            Err(error) if error.to_string().contains("UBLK_F_UPDATE_SIZE") => {
                eprintln!("skipped: {error}");
                None
            }
            resized => Some(resized.unwrap()),
        }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Waits until a daemon that is to die at a step has.
    #[track_caller]
    pub fn wait_for_death(&mut self) {
        let status = self.wait();
        assert_eq!(status.signal(), Some(9), "{}", self.log());
    }

    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let mut child = self.child.take().unwrap();
        until("the daemon ends", || child.try_wait().unwrap())
    }

    /// Asks it to end, and waits.
    #[track_caller]
    pub fn stop(&mut self) -> ExitStatus {
        let pid = Pid::from_raw(self.pid() as i32).unwrap();
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        self.wait()
    }

    /// A directory for a device's upper.
    pub fn upper_dir(&self, name: &str) -> PathBuf {
        let dir = self.dir.join("uppers").join(name);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// A device of `lowers` with a new hybrid upper in a directory of its own.
    pub fn spec(&self, name: &str, lowers: &[PathBuf], size: Option<Bytes>) -> DeviceSpec {
        spec_in(&self.upper_dir(name), lowers, size)
    }

    #[track_caller]
    pub fn create(&self, name: &str, spec: &DeviceSpec) -> DeviceView {
        block_on(self.client().create(name, spec)).unwrap_or_else(|error| panic!("{error}\n{}", self.log()))
    }

    #[track_caller]
    pub fn get(&self, name: &str) -> DeviceView {
        block_on(self.client().get(name)).unwrap().unwrap_or_else(|| panic!("there is no {name}\n{}", self.log()))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("---- log of the daemon\n{}\n----", self.log());
        }
        if let Some(mut child) = self.child.take() {
            let pid = Pid::from_raw(child.id() as i32).unwrap();
            let _ = rustix::process::kill_process(pid, Signal::TERM);
            let deadline = Instant::now() + Duration::from_secs(10);
            while child.try_wait().unwrap().is_none() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = rustix::mount::unmount(self.config.mount_point(), rustix::mount::UnmountFlags::DETACH);
        // A daemon leaves ublk devices to its successor. There is none.
        self.sweep(&[]);
    }
}

/// A device of `lowers` with a new hybrid upper in `dir`.
pub fn spec_in(dir: &Path, lowers: &[PathBuf], size: Option<Bytes>) -> DeviceSpec {
    let mode = Mode::Hybrid;
    let upper = UpperConfig { mode, data: dir.join("data"), index: Some(dir.join("index")) };
    let lowers = lowers.iter().map(|path| Lower { file: Some(path.clone()), ..Lower::default() }).collect();
    DeviceSpec {
        config: DeviceConfig { lowers, upper: Some(upper), ..DeviceConfig::default() },
        new_upper: Some(NewUpper { mode, size }),
        caching: Caching::Direct,
        read_only: false,
    }
}

/// A file or device, open for reading and writing.
#[track_caller]
pub fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

#[track_caller]
pub fn read(path: &Path, offset: u64, length: usize) -> Vec<u8> {
    try_read(path, offset, length).unwrap()
}

pub fn try_read(path: &Path, offset: u64, length: usize) -> io::Result<Vec<u8>> {
    let mut buf = vec![0xEE; length];
    File::open(path)?.read_exact_at(&mut buf, offset).map(|()| buf)
}

/// Writes and makes it durable.
#[track_caller]
pub fn write(path: &Path, offset: u64, bytes: &[u8]) {
    try_write(path, offset, bytes).unwrap();
}

pub fn try_write(path: &Path, offset: u64, bytes: &[u8]) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    file.write_all_at(bytes, offset)?;
    file.sync_data()
}

/// For direct I/O: each request is one of the daemon's.
#[track_caller]
pub fn open_direct(path: &Path) -> Opened {
    Opened::new(path, true).unwrap()
}

/// Length of a file or block device.
#[track_caller]
pub fn size_of(path: &Path) -> u64 {
    File::open(path).unwrap().seek(SeekFrom::End(0)).unwrap()
}

/// Bytes like chance, always the same for a seed.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// A layer of a device of `size` that has `pieces`, as the bytes of a file.
pub fn layer(size: Bytes, pieces: &[(u64, Vec<u8>)]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let files = UpperFiles::in_directory(dir.path(), Mode::Hybrid);
    let upper = files.create(&UpperOptions::new(size, Uuid::nil())).unwrap();
    let device = OverlayDevice::new(Stack::new(vec![]).unwrap(), upper).unwrap();
    for (offset, bytes) in pieces {
        device.write_at(*offset, bytes).unwrap();
    }
    let mut out = Vec::new();
    device.export_upper(&mut out, &Identity::fresh(Uuid::nil())).unwrap();
    out
}

/// The same in a file of `dir`.
pub fn layer_file(dir: &Path, name: &str, size: Bytes, pieces: &[(u64, Vec<u8>)]) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, layer(size, pieces)).unwrap();
    path
}

/// A small filesystem in memory, unmounted when dropped.
pub struct Tmpfs(pub PathBuf);

impl Tmpfs {
    pub fn mount(dir: &Path, bytes: u64) -> Self {
        fs::create_dir_all(dir).unwrap();
        let options = std::ffi::CString::new(format!("size={bytes}")).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", dir, "tmpfs", flags, Some(options.as_c_str())).unwrap();
        Self(dir.to_owned())
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}
