//! A terminal with somebody at it.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};
use tokio::process::{Child, Command};

use super::{PATIENCE, eventually};

/// A pseudo-terminal, what has been shown on it, and the program that runs in it.
pub(crate) struct Pty {
    master: File,
    slave: File,
    shown: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
    child: Child,
}

impl Pty {
    /// Runs `command` in a terminal of this size.
    pub(crate) fn run(mut command: Command, columns: u16, rows: u16) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        use std::os::unix::fs::OpenOptionsExt as _;
        let noctty = i32::try_from(rustix::fs::OFlags::NOCTTY.bits()).unwrap();
        let slave = OpenOptions::new().read(true).write(true).custom_flags(noctty).open(name).unwrap();
        let set = Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&master, set).unwrap();
        let stdio = || Stdio::from(OwnedFd::from(slave.try_clone().unwrap()));
        let child = command.stdin(stdio()).stdout(stdio()).stderr(stdio()).spawn().unwrap();
        drop(command);
        let shown = Arc::new(Mutex::new(Vec::new()));
        let (mut screen, seen) = (File::from(master.try_clone().unwrap()), Arc::clone(&shown));
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // An error says that the last user of the slave side has gone.
            while let Ok(n @ 1..) = screen.read(&mut buffer) {
                seen.lock().unwrap().extend_from_slice(&buffer[..n]);
            }
        });
        Self { master: File::from(master), slave, shown, reader: Some(reader), child }
    }

    pub(crate) fn type_in(&mut self, text: &str) {
        self.master.write_all(text.as_bytes()).unwrap();
    }

    pub(crate) fn resize(&self, columns: u16, rows: u16) {
        tcsetwinsize(&self.master, Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    }

    /// All that has been shown so far.
    pub(crate) fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }

    /// Waits until `text` has been shown.
    pub(crate) async fn sees(&self, text: &str) {
        let deadline = std::time::Instant::now() + PATIENCE;
        while !self.shown().contains(text) {
            assert!(std::time::Instant::now() < deadline, "not shown: {text:?}; shown: {:?}", self.shown());
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }

    /// Forgets what has been shown so far.
    pub(crate) fn clear(&self) {
        self.shown.lock().unwrap().clear();
    }

    pub(crate) fn pid(&self) -> rustix::process::Pid {
        let pid = i32::try_from(self.child.id().unwrap()).unwrap();
        rustix::process::Pid::from_raw(pid).unwrap()
    }

    /// The terminal's mode, in comparable form.
    pub(crate) fn mode(&self) -> String {
        let mode: Termios = tcgetattr(&self.slave).unwrap();
        format!("{:?} {:?} {:?} {:?}", mode.input_modes, mode.output_modes, mode.control_modes, mode.local_modes)
    }

    /// Waits until keys come one by one and unechoed.
    pub(crate) async fn is_raw(&self) {
        let raw = || !tcgetattr(&self.slave).unwrap().local_modes.contains(rustix::termios::LocalModes::ICANON);
        eventually("the terminal is in raw mode", raw).await;
    }

    /// Waits for the program's end; gives its exit code.
    pub(crate) async fn exit_code(&mut self) -> Option<i32> {
        let waiting = tokio::time::timeout(PATIENCE, self.child.wait()).await;
        match waiting {
            Ok(status) => status.unwrap().code(),
            Err(_) => panic!("aenv ends in time; shown: {:?}", self.shown()),
        }
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        let _ = self.child.start_kill();
        // The reader ends with the last user of the slave side; ours is closed after this, so it is left to itself.
        drop(self.reader.take());
    }
}
