//! Tap devices: there is no netlink request that makes one, only an ioctl.

#![allow(unsafe_code, reason = "TUNSETIFF and TUNSETPERSIST have no safe wrapper")]

use std::ffi::{c_char, c_int, c_short};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

use nix::libc;

nix::ioctl_write_ptr_bad!(tun_set_iff, nix::request_code_write!(b'T', 202, size_of::<c_int>()), libc::ifreq);
nix::ioctl_write_int_bad!(tun_set_persist, nix::request_code_write!(b'T', 203, size_of::<c_int>()));
nix::ioctl_write_int_bad!(tun_set_owner, nix::request_code_write!(b'T', 204, size_of::<c_int>()));

/// Opens the tap `name` in the calling thread's netns, making it if it does not exist: one queue, no packet-info
/// header, with virtio-net headers so that a VMM can pass checksum and segmentation work through. This is the shape
/// QEMU and Firecracker ask for; the kernel refuses an open of an existing tap with another one.
pub(crate) fn open(name: &str) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: `ifreq` is plain C data; all zeros is a valid value of it.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero: names are NUL-terminated.
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "interface name too long"));
    }
    for (slot, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *slot = byte as c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as c_short;
    // SAFETY: the descriptor is open and `request` is a live, initialized `ifreq`, which is what TUNSETIFF reads.
    unsafe { tun_set_iff(file.as_raw_fd(), &request) }?;
    Ok(file)
}

/// Makes the tap `name`, which stays when nobody has it open: it goes with its netns. It is our user's: a VMM has no
/// CAP_NET_ADMIN, and while a tap without an owner was anybody's for twenty years, some kernels (6.12 among them) let
/// nobody open one without that capability.
pub(crate) fn create_persistent(name: &str) -> io::Result<()> {
    let file = open(name)?;
    let owner = nix::unistd::geteuid().as_raw() as c_int;
    // SAFETY: the descriptor is open and attached to a tap; both requests take their argument by value.
    unsafe {
        tun_set_owner(file.as_raw_fd(), owner)?;
        tun_set_persist(file.as_raw_fd(), 1)?;
    }
    Ok(())
}
