//! Loop devices: a file as a block device, gone when nobody has it open any more.

#![allow(unsafe_code, reason = "LOOP_CTL_GET_FREE and LOOP_CONFIGURE have no safe wrapper")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use rustix::fs::{FileType, Mode, makedev, mknodat};

/// As in `linux/loop.h`.
const LOOP_CTL_GET_FREE: u32 = 0x4c82;
const LOOP_CONFIGURE: u32 = 0x4c0a;
/// Let it go when its last user does.
const LO_FLAGS_AUTOCLEAR: u32 = 4;
/// Read and write the file past the page cache: the device has one of its own.
const LO_FLAGS_DIRECT_IO: u32 = 16;
const MAJOR: u32 = 7;

/// How often another device is taken because somebody was quicker.
const ATTEMPTS: usize = 64;

/// `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopInfo>() == 232 && size_of::<LoopConfig>() == 304);

nix::ioctl_none_bad!(loop_ctl_get_free, LOOP_CTL_GET_FREE);
nix::ioctl_write_ptr_bad!(loop_configure, LOOP_CONFIGURE, LoopConfig);

/// A loop device in use. When this and all else that has it open is closed, it is free again.
#[derive(Debug)]
pub(super) struct LoopDevice {
    path: PathBuf,
    _device: File,
}

impl LoopDevice {
    /// Makes a block device of `file`, in blocks of `block_size` bytes, written past the page cache if the file allows it.
    /// `scratch` is a directory for its node, should `/dev` not have it.
    pub(super) fn attach(file: &File, block_size: u32, scratch: &Path) -> io::Result<Self> {
        let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control")?;
        let config = LoopConfig {
            fd: u32::try_from(file.as_raw_fd()).map_err(io::Error::other)?,
            block_size,
            info: LoopInfo {
                device: 0,
                inode: 0,
                rdevice: 0,
                offset: 0,
                sizelimit: 0,
                number: 0,
                encrypt_type: 0,
                encrypt_key_size: 0,
                flags: LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO,
                file_name: [0; 64],
                crypt_name: [0; 64],
                encrypt_key: [0; 32],
                init: [0; 2],
            },
            reserved: [0; 8],
        };
        for _ in 0..ATTEMPTS {
            // SAFETY: this request takes no argument; the descriptor is open for as long as `control` lives.
            let number = unsafe { loop_ctl_get_free(control.as_raw_fd()) }?;
            let path = node(u32::try_from(number).map_err(io::Error::other)?, scratch)?;
            let device = OpenOptions::new().read(true).write(true).open(&path)?;
            // SAFETY: `config` is laid out as the kernel's structure, whose size is asserted above, and outlives the call,
            // which only reads it; both descriptors are open.
            match unsafe { loop_configure(device.as_raw_fd(), &raw const config) } {
                Ok(_) => return Ok(Self { path, _device: device }),
                Err(Errno::EBUSY) => {} // taken by somebody else meanwhile
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::other("no loop device stays free for long enough"))
    }

    /// Its node.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// The node of device `number`. A container's `/dev` need not have those that were made after it was.
fn node(number: u32, scratch: &Path) -> io::Result<PathBuf> {
    let usual = PathBuf::from(format!("/dev/loop{number}"));
    if usual.exists() {
        return Ok(usual);
    }
    let own = scratch.join(format!("loop{number}"));
    match mknodat(rustix::fs::CWD, &own, FileType::BlockDevice, Mode::from_raw_mode(0o600), makedev(MAJOR, number)) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(own),
        Err(error) => Err(error.into()),
    }
}
