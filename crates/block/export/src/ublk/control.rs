//! The control device: adds, starts and ends ublk devices. Everything here waits for the kernel.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use super::wire::{ControlCommand, DeviceInfo, Parameters, SECTOR, control};

/// Where the driver takes commands about devices.
pub(super) const PATH: &str = "/dev/ublk-control";
/// Where it tells which devices there are.
const LISTED: &str = "/sys/class/ublk-char";

/// The driver.
#[derive(Debug)]
pub(super) struct Control(File);

impl Control {
    pub(super) fn open() -> io::Result<Self> {
        File::options().read(true).write(true).open(Path::new(PATH)).map(Self)
    }

    /// What it can do. Linux 6.5 and later tell.
    pub(super) fn features(&self) -> io::Result<u64> {
        let mut features = 0_u64;
        self.run(control::GET_FEATURES, ControlCommand::default(), features.as_mut_bytes())?;
        Ok(features)
    }

    /// Adds a device with the number in `info`; gives what became of that. `AlreadyExists` if the number is taken.
    pub(super) fn add(&self, mut info: DeviceInfo) -> io::Result<DeviceInfo> {
        self.run(control::ADD_DEV, about(info.dev_id), info.as_mut_bytes())?;
        Ok(info)
    }

    /// A device, or none of that number.
    pub(super) fn info(&self, id: u32) -> io::Result<Option<DeviceInfo>> {
        let mut bytes = [0; size_of::<DeviceInfo>()];
        match self.run(control::GET_DEV_INFO, about(id), &mut bytes) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NODEV) => Ok(None),
            Err(error) => Err(error),
            Ok(()) => Ok(DeviceInfo::read_from_bytes(&bytes).ok()), // always: it is as long
        }
    }

    /// Says what a device is like; before it is started.
    pub(super) fn set_parameters(&self, id: u32, mut parameters: Parameters) -> io::Result<()> {
        parameters.len = size_of::<Parameters>() as u32;
        let mut bytes = [0; size_of::<Parameters>()];
        bytes.copy_from_slice(parameters.as_bytes());
        self.run(control::SET_PARAMS, about(id), &mut bytes)
    }

    /// Makes it a disk. Waits until its queue is served, which this process does.
    pub(super) fn start(&self, id: u32) -> io::Result<()> {
        self.run(control::START_DEV, ControlCommand { data: std::process::id().into(), ..about(id) }, &mut [])
    }

    /// Takes the disk away. Waits until what is under way has been answered; what comes later fails.
    pub(super) fn stop(&self, id: u32) -> io::Result<()> {
        self.run(control::STOP_DEV, about(id), &mut [])
    }

    /// Forgets a device that was stopped, or not started, once nobody has it open.
    pub(super) fn delete(&self, id: u32) -> io::Result<()> {
        match self.run(control::DEL_DEV_ASYNC, about(id), &mut []) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::OPNOTSUPP) => self.delete_aside(id),
            result => result,
        }
    }

    /// Before Linux 6.9, deleting waits for whoever has it open. They may take their time, on a thread that nobody joins: it
    /// has nothing but a descriptor.
    fn delete_aside(&self, id: u32) -> io::Result<()> {
        let control = Self(self.0.try_clone()?);
        let delete = move || {
            if let Err(error) = control.run(control::DEL_DEV, about(id), &mut []) {
                tracing::warn!(id, %error, "a ublk device that is closed cannot be deleted");
            }
        };
        std::thread::Builder::new().name("aenv-ublk-end".to_owned()).spawn(delete).map(drop)
    }

    /// Begins to take over a device whose server is gone. `ResourceBusy` while it is not quite.
    pub(super) fn start_recovery(&self, id: u32) -> io::Result<()> {
        self.run(control::START_USER_RECOVERY, about(id), &mut [])
    }

    /// Ends that: requests come again. Waits until its queue is served, which this process does.
    pub(super) fn end_recovery(&self, id: u32) -> io::Result<()> {
        self.run(control::END_USER_RECOVERY, ControlCommand { data: std::process::id().into(), ..about(id) }, &mut [])
    }

    /// Tells a new size, in bytes.
    pub(super) fn update_size(&self, id: u32, size: u64) -> io::Result<()> {
        self.run(control::UPDATE_SIZE, ControlCommand { data: size / SECTOR, ..about(id) }, &mut [])
    }

    /// The numbers of all devices, of whichever program.
    pub(super) fn list() -> io::Result<Vec<u32>> {
        let mut ids = Vec::new();
        for entry in fs::read_dir(LISTED)? {
            let name = entry?.file_name();
            ids.extend(name.to_str().and_then(|name| name.strip_prefix("ublkc")?.parse::<u32>().ok()));
        }
        Ok(ids)
    }

    /// Gives one command and waits for its end. The driver reads or fills `buffer`.
    #[expect(unsafe_code, reason = "io_uring commands with an address")]
    fn run(&self, operation: u32, command: ControlCommand, buffer: &mut [u8]) -> io::Result<()> {
        // A ring for each: commands are rare, some wait for long, and none may wait for another's end.
        let mut ring = IoUring::<squeue::Entry128, cqueue::Entry>::builder().build(1)?;
        let mut memory: Box<[u8]> = buffer.into();
        let addr = if memory.is_empty() { 0 } else { memory.as_mut_ptr() as u64 };
        let command = ControlCommand { addr, len: memory.len() as u16, ..command };
        let mut bytes = [0; 80];
        bytes[..size_of::<ControlCommand>()].copy_from_slice(command.as_bytes());
        let entry = opcode::UringCmd80::new(types::Fd(self.0.as_raw_fd()), operation).cmd(bytes).build();
        // SAFETY: the descriptor is open and `memory` stays where it is until the command has ended, or for ever: below.
        unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
        let result = loop {
            if let Some(ended) = ring.completion().next() {
                break ended.result();
            }
            match ring.submit_and_wait(1) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    // Whether the driver has the command is not known: it may still write there.
                    std::mem::forget((ring, memory));
                    return Err(error);
                }
                _ => {}
            }
        };
        if result < 0 {
            return Err(io::Error::from_raw_os_error(-result));
        }
        buffer.copy_from_slice(&memory);
        Ok(())
    }
}

/// A command about one device.
fn about(id: u32) -> ControlCommand {
    ControlCommand { dev_id: id, queue_id: u16::MAX, ..ControlCommand::default() }
}
