//! PID 1: from the kernel's first user process to a machine that serves envd, and back down.
//!
//! ```text
//! kernel ─> /init in the initramfs
//!   pseudo file systems · modules of the root ┬ root device ─> /newroot · switch root
//!                                             └ beside it: modules of the network · network · other modules
//!   ─> envd (one thread) ─> SIGTERM, SIGINT (ctrl-alt-del) or the power button
//!   ─> processes end · file systems synced and read-only · power off
//! ```
//!
//! PID 1 must not end: the kernel would panic and the node would see a machine that neither lives nor dies. Every way
//! out of this module, a failed boot and a panic included, says its reason on the console and powers the machine off.

pub(crate) mod identity;
mod modules;
mod mounts;
mod network;
mod power;
mod root;

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use aenv_guest_proto::{BootParams, ENVD_PORT, ParseBootParamsError};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::console::{Chain, say};
use crate::envd::{self, Place, ServeError};
use crate::process::Reaper;

/// Why the machine did not come up.
#[derive(Debug, thiserror::Error)]
enum BootError {
    #[error(transparent)]
    Mount(#[from] mounts::MountError),
    #[error("read /proc/cmdline")]
    ReadParams(#[source] std::io::Error),
    #[error(transparent)]
    Params(#[from] ParseBootParamsError),
    #[error(transparent)]
    Root(#[from] root::RootError),
    #[error(transparent)]
    Network(#[from] network::NetworkError),
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error("start a thread")]
    Beside(#[source] std::io::Error),
    #[error("wait for a reason to stop")]
    Power(#[source] std::io::Error),
}

/// Boots, serves and powers off.
pub(crate) fn run() -> ! {
    // A panic in one request ends that request; one that gets here ends the machine.
    std::panic::set_hook(Box::new(|panic| say!("panic: {panic}")));
    crate::sys::keep_heap_small();
    match std::panic::catch_unwind(boot) {
        Ok(Ok(never)) => match never {},
        Ok(Err(error)) => say!("boot failed: {}", Chain(&error)),
        Err(_) => say!("boot failed: it panicked"),
    }
    power::off()
}

fn boot() -> Result<Infallible, BootError> {
    let mut timings = Timings::start();
    mounts::early()?;
    let cmdline = std::fs::read_to_string("/proc/cmdline").map_err(BootError::ReadParams)?;
    let params = BootParams::parse(&cmdline)?;
    timings.mark("mounts");
    let rest = modules::load_for_root(&params.root);
    timings.mark("modules");
    let beside = Beside::start(rest, &params)?;
    root::mount(&params.root)?;
    timings.mark("root");
    mounts::move_into_root()?;
    root::switch()?;
    mounts::late();
    timings.mark("switch");
    identity::set_up(&params);
    raise_limits();
    timings.mark("identity");

    let reaper = Reaper::start().map_err(ServeError::Reaper)?;
    let runtime = envd::runtime()?;
    runtime.block_on(serve(reaper, params.gateway, beside, timings))?;
    drop(runtime);
    say!("powering off");
    power::end_everything();
    power::off()
}

/// What goes on beside the way to envd: the network comes up, then the modules that nothing waits for are loaded.
struct Beside {
    network: oneshot::Receiver<Result<(), network::NetworkError>>,
    all_loaded: oneshot::Receiver<()>,
}

impl Beside {
    /// On a thread of its own, which ends by itself. It yields to the way to envd where there is but one CPU.
    fn start(mut rest: modules::Deferred, params: &BootParams) -> Result<Self, BootError> {
        let (up, network) = oneshot::channel();
        let (loaded, all_loaded) = oneshot::channel();
        let params = params.clone();
        let work = move || {
            // Linux counts niceness by thread. Best effort: without it the order is the scheduler's.
            let _ = rustix::process::setpriority_process(None, 19);
            rest.load_for_network();
            // The receivers are there as long as the machine serves.
            let _ = up.send(network::bring_up(&params));
            rest.load_all();
            let _ = loaded.send(());
        };
        std::thread::Builder::new().name("beside".into()).spawn(work).map_err(BootError::Beside)?;
        Ok(Self { network, all_loaded })
    }
}

/// Serves envd until the machine is asked to stop.
async fn serve(reaper: Reaper, node: Ipv4Addr, beside: Beside, mut timings: Timings) -> Result<(), BootError> {
    let stop = CancellationToken::new();
    let asked = power::asked_to_stop(beside.all_loaded).map_err(BootError::Power)?;
    let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, ENVD_PORT));
    let place = Place::Guest { node: IpAddr::V4(node) };
    let ready = |_| {
        timings.mark("listen");
        timings.say();
    };
    let serve = envd::serve(address, place, reaper, stop.clone(), ready);
    // A machine that cannot be reached is none: its end tells the node why at once.
    let unreachable = async {
        match beside.network.await {
            Ok(Err(error)) => error,
            Ok(Ok(())) => {
                say!("network up {} ms after the kernel's start", since_kernel_start().as_millis());
                std::future::pending().await
            }
            Err(_) => std::future::pending().await, // it panicked, and said so
        }
    };
    tokio::pin!(serve);
    tokio::select! {
        result = &mut serve => return Ok(result?),
        reason = asked => say!("stopping: {reason}"),
        error = unreachable => return Err(error.into()),
    }
    stop.cancel();
    Ok(serve.await?)
}

/// Watches that one user may have open; Linux's default is 128, of which development servers alone take many.
const WATCHES: (&str, &str) = ("/proc/sys/fs/inotify/max_user_instances", "8192");

/// Processes may open many files, as in any container; the soft limit stays where old programs expect it. And they may
/// watch many.
fn raise_limits() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = Rlimit { current: Some(65_536), maximum: Some(1_048_576) };
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        say!("raise the limit of open files: {error}");
    }
    let (path, number) = WATCHES;
    if let Err(error) = std::fs::write(path, number) {
        say!("raise the limit of watches: {error}");
    }
}

/// How long each stage took, by the guest's clock, which starts with the kernel.
struct Timings {
    start: Duration,
    last: Duration,
    stages: Vec<(&'static str, Duration)>,
}

impl Timings {
    fn start() -> Self {
        let now = since_kernel_start();
        Self { start: now, last: now, stages: Vec::with_capacity(8) }
    }

    fn mark(&mut self, stage: &'static str) {
        let now = since_kernel_start();
        self.stages.push((stage, now - self.last));
        self.last = now;
    }

    /// The line that the boot benchmark reads: `ready in N ms (kernel K ms; stage N ms, …)`.
    fn say(&self) {
        let stages: Vec<String> =
            self.stages.iter().map(|(name, took)| format!("{name} {}", took.as_millis())).collect();
        let (took, kernel) = ((self.last - self.start).as_millis(), self.start.as_millis());
        say!("ready in {took} ms (kernel {kernel} ms; {})", stages.join(", "));
    }
}

fn since_kernel_start() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}
