//! Brings up the loopback and `eth0`: one address, one route. A handful of ioctls does it, where netlink would bring a
//! library and an executor.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;

use aenv_guest_proto::BootParams;
use nix::libc;
use rustix::ioctl::Opcode;
use rustix::net::{AddressFamily, SocketType};

use crate::sys;

const SIOCSIFADDR: Opcode = libc::SIOCSIFADDR as Opcode;
const SIOCSIFNETMASK: Opcode = libc::SIOCSIFNETMASK as Opcode;
const SIOCSIFFLAGS: Opcode = libc::SIOCSIFFLAGS as Opcode;

/// The guest cannot be reached.
#[derive(Debug, thiserror::Error)]
pub(super) enum NetworkError {
    #[error("open a socket")]
    Socket(#[source] io::Error),
    #[error("{doing} of {interface}")]
    Interface { doing: &'static str, interface: &'static str, source: io::Error },
    #[error("add the default route through {gateway}")]
    Route { gateway: Ipv4Addr, source: io::Error },
}

/// Configures both interfaces.
pub(super) fn bring_up(params: &BootParams) -> Result<(), NetworkError> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)
        .map_err(|error| NetworkError::Socket(error.into()))?;
    configure(&socket, "lo", Ipv4Addr::LOCALHOST, 8)?;
    configure(&socket, "eth0", params.address, params.prefix)?;
    let mut route = sys::empty_route();
    route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = socket_address(params.gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    sys::add_route(&socket, route).map_err(|source| NetworkError::Route { gateway: params.gateway, source })
}

fn configure(socket: &OwnedFd, interface: &'static str, address: Ipv4Addr, prefix: u8) -> Result<(), NetworkError> {
    let failed = |doing| move |source| NetworkError::Interface { doing, interface, source };
    let mask = Ipv4Addr::from(u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0));
    let with_address =
        |address| request(interface, libc::__c_anonymous_ifr_ifru { ifru_addr: socket_address(address) });
    sys::set_interface::<SIOCSIFADDR>(socket, with_address(address)).map_err(failed("set the address"))?;
    sys::set_interface::<SIOCSIFNETMASK>(socket, with_address(mask)).map_err(failed("set the netmask"))?;
    let flags = libc::__c_anonymous_ifr_ifru { ifru_flags: (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short };
    sys::set_interface::<SIOCSIFFLAGS>(socket, request(interface, flags)).map_err(failed("bring up the link"))
}

fn request(interface: &str, value: libc::__c_anonymous_ifr_ifru) -> libc::ifreq {
    let mut name = [0; libc::IFNAMSIZ];
    for (slot, byte) in name.iter_mut().zip(interface.bytes()) {
        *slot = byte.cast_signed();
    }
    libc::ifreq { ifr_name: name, ifr_ifru: value }
}

/// A `sockaddr` that is a `sockaddr_in`: port in the first two bytes, zero here, then the address.
fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0; 14];
    for (slot, byte) in data[2..].iter_mut().zip(address.octets()) {
        *slot = byte.cast_signed();
    }
    libc::sockaddr { sa_family: libc::AF_INET as libc::sa_family_t, sa_data: data }
}
