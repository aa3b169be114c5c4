//! A netlink socket with the few requests that slots need.
//!
//! A socket speaks for the netns of the thread that created it, for as long as it lives; the task that serves it may run
//! anywhere.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::{fmt, io};

use futures::TryStreamExt;
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::link::{InfoData, InfoVeth, LinkAttribute};
use rtnetlink::{Handle, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder};
use tokio::task::JoinHandle;

use crate::error::NetlinkError;

/// One netlink socket and the task that serves it, which ends with this value.
pub(crate) struct Netlink {
    handle: Handle,
    task: JoinHandle<()>,
}

impl fmt::Debug for Netlink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Netlink").finish_non_exhaustive()
    }
}

impl Netlink {
    /// Opens a socket in the calling thread's netns, served by `runtime`.
    pub(crate) fn open(runtime: &tokio::runtime::Handle) -> io::Result<Self> {
        let _context = runtime.enter(); // registers the socket with that runtime's reactor
        let (connection, handle, _) = rtnetlink::new_connection()?;
        Ok(Self { handle, task: runtime.spawn(connection) })
    }

    /// Index and name of every link.
    pub(crate) async fn links(&self) -> Result<Vec<(u32, String)>, NetlinkError> {
        let links: Vec<_> = self.handle.link().get().execute().try_collect().await?;
        let named = links.into_iter().filter_map(|link| {
            let name = link.attributes.into_iter().find_map(|attribute| match attribute {
                LinkAttribute::IfName(name) => Some(name),
                _ => None,
            })?;
            Some((link.header.index, name))
        });
        Ok(named.collect())
    }

    /// Every IPv4 address, with the index of its link.
    pub(crate) async fn addresses(&self) -> Result<Vec<(u32, Ipv4Addr)>, NetlinkError> {
        let addresses: Vec<_> = self.handle.address().get().execute().try_collect().await?;
        let ipv4 = addresses.into_iter().filter_map(|message| {
            let address = message.attributes.iter().find_map(|attribute| match attribute {
                AddressAttribute::Local(IpAddr::V4(address)) => Some(*address),
                _ => None,
            })?;
            Some((message.header.index, address))
        });
        Ok(ipv4.collect())
    }

    /// The index of the link `name`.
    pub(crate) async fn index(&self, name: &str) -> Result<u32, NetlinkError> {
        let mut answer = self.handle.link().get().match_name(name).execute();
        match answer.try_next().await? {
            Some(link) => Ok(link.header.index),
            None => Err(NetlinkError::Exchange(format!("no answer about link {name}"))),
        }
    }

    /// Makes a veth pair: `name` in this socket's netns, `peer` in `peer_netns`.
    pub(crate) async fn add_veth(
        &self,
        name: &str,
        peer: &str,
        peer_netns: BorrowedFd<'_>,
    ) -> Result<(), NetlinkError> {
        let mut far = LinkMessageBuilder::<LinkUnspec>::new().name(peer.to_owned()).build();
        far.attributes.push(LinkAttribute::NetNsFd(peer_netns.as_raw_fd()));
        let near = LinkVeth::new(name, peer).set_info_data(InfoData::Veth(InfoVeth::Peer(far))).build();
        Ok(self.handle.link().add(near).execute().await?)
    }

    /// Brings a link up.
    pub(crate) async fn set_up(&self, index: u32) -> Result<(), NetlinkError> {
        let message = LinkUnspec::new_with_index(index).up().build();
        Ok(self.handle.link().set(message).execute().await?)
    }

    /// Gives a link a link-layer address.
    pub(crate) async fn set_mac(&self, index: u32, mac: &[u8; 6]) -> Result<(), NetlinkError> {
        let message = LinkUnspec::new_with_index(index).address(mac.to_vec()).build();
        Ok(self.handle.link().set(message).execute().await?)
    }

    /// Gives a link an address.
    pub(crate) async fn add_address(&self, index: u32, address: Ipv4Addr, prefix: u8) -> Result<(), NetlinkError> {
        Ok(self.handle.address().add(index, address.into(), prefix).execute().await?)
    }

    /// Sends what has no other way by `gateway`, which must be reached by the link.
    pub(crate) async fn add_default_route(&self, index: u32, gateway: Ipv4Addr) -> Result<(), NetlinkError> {
        let route = RouteMessageBuilder::<Ipv4Addr>::new().output_interface(index).gateway(gateway).build();
        Ok(self.handle.route().add(route).execute().await?)
    }

    /// Pins the link-layer address of a neighbour, so that it is never asked for.
    pub(crate) async fn add_neighbour(&self, index: u32, address: Ipv4Addr, mac: &[u8; 6]) -> Result<(), NetlinkError> {
        Ok(self.handle.neighbours().add(index, address.into()).link_layer_address(mac).execute().await?)
    }

    /// Deletes the link `name`. One that does not exist is success: `false`.
    pub(crate) async fn delete(&self, name: &str) -> Result<bool, NetlinkError> {
        let message = LinkUnspec::new_with_name(name).build();
        let request = rtnetlink::LinkDelRequest::new_with_message(self.handle.clone(), message);
        match request.execute().await.map_err(NetlinkError::from) {
            Ok(()) => Ok(true),
            Err(error) if error.is_missing() => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Netlink {
    fn drop(&mut self) {
        self.task.abort();
    }
}
