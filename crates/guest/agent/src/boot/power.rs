//! The way down: who may ask for it, and how nothing is lost on it.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::mount::{MountFlags, mount_remount};
use rustix::system::{RebootCommand, reboot};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use crate::console::say;

/// How long processes that envd did not start (daemons) get to end.
const PATIENCE: Duration = Duration::from_secs(2);

/// Waits until the machine is asked to stop; the answer says by what. The power button is looked for when `drivers` are
/// loaded.
pub(super) fn asked_to_stop(drivers: oneshot::Receiver<()>) -> io::Result<impl Future<Output = &'static str>> {
    // ctrl-alt-del comes to us as SIGINT instead of resetting the machine.
    reboot(RebootCommand::CadOff)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let button = async {
        let _ = drivers.await;
        power_button().await;
    };
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "ctrl-alt-del",
            () = button => "power button",
        }
    })
}

/// Waits for the ACPI power button, where the kernel has one (modules `button` and `evdev`).
async fn power_button() {
    let devices = std::fs::read_dir("/dev/input").into_iter().flatten().flatten();
    let events = devices.map(|entry| entry.path()).filter(|path| path.to_string_lossy().contains("event"));
    let pressed: Vec<_> = events
        .filter_map(|path| {
            use std::os::unix::fs::OpenOptionsExt as _;
            let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
            let file = std::fs::File::options().read(true).custom_flags(nonblocking).open(path).ok()?;
            Some(Box::pin(power_key(crate::sys::watch_descriptor(file.into()).ok()?)))
        })
        .collect();
    if pressed.is_empty() {
        std::future::pending::<()>().await;
    }
    futures::future::select_all(pressed).await;
}

/// Reads one input device until its power key goes down; never ends if the device fails.
async fn power_key(device: tokio::io::unix::AsyncFd<std::os::fd::OwnedFd>) {
    /// `struct input_event` on 64-bit Linux: a timeval, then type, code and value.
    const EVENT_SIZE: usize = 24;
    const EV_KEY: u16 = 1;
    const KEY_POWER: u16 = 116;
    const PRESSED: i32 = 1;

    let mut buffer = [0; EVENT_SIZE * 16];
    loop {
        let read = device.async_io(tokio::io::Interest::READABLE, |fd| Ok(rustix::io::read(fd, &mut buffer)?)).await;
        let Ok(length) = read else { return std::future::pending().await };
        for event in buffer[..length].chunks_exact(EVENT_SIZE) {
            let kind = u16::from_ne_bytes([event[16], event[17]]);
            let code = u16::from_ne_bytes([event[18], event[19]]);
            let value = i32::from_ne_bytes([event[20], event[21], event[22], event[23]]);
            if (kind, code, value) == (EV_KEY, KEY_POWER, PRESSED) {
                return;
            }
        }
    }
}

/// Ends every process of the machine: asks, waits, kills.
pub(super) fn end_everything() {
    // -1 means all but ourselves.
    let everyone = Pid::from_raw(-1);
    let _ = kill(everyone, Signal::SIGTERM);
    let deadline = Instant::now() + PATIENCE;
    while others_live() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
    let _ = kill(everyone, Signal::SIGKILL);
}

/// Some child is left. Orphans are children of ours, and the reaper takes them as they end.
fn others_live() -> bool {
    use nix::sys::wait::{Id, WaitPidFlag, waitid};
    waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT) != Err(Errno::ECHILD)
}

/// Writes everything out and cuts the power.
pub(super) fn off() -> ! {
    rustix::fs::sync();
    if let Err(error) = mount_remount("/", MountFlags::RDONLY, c"") {
        // Open files of killed processes may still hold it; the sync above has what matters.
        say!("make the root read-only: {error}");
        rustix::fs::sync();
    }
    let _ = reboot(RebootCommand::PowerOff);
    // No power to cut: a restart makes a VMM that was told not to reboot exit.
    let _ = reboot(RebootCommand::Restart);
    // PID 1 must not return.
    loop {
        thread::park();
    }
}
