//! What the orchestrator needs from below, as it sees it. Implementations are handed to [`crate::Orchestrator::start`].

use std::fmt::Debug;
use std::io;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;

use aenv_network::{GuestConnector, Slot, SlotPool};
use aenv_vmm_driver::NicSpec;
use async_trait::async_trait;
use tokio::net::TcpStream;

/// The kernel side of every cold boot.
#[derive(Debug, Clone)]
pub struct GuestBoot {
    /// Guest kernel.
    pub kernel: PathBuf,
    /// Initial file system with modules and agent.
    pub initramfs: PathBuf,
    /// Arguments this kernel wants on any VMM.
    pub cmdline: String,
}

/// Addresses of a guest's network device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestAddress {
    /// The guest's own.
    pub address: Ipv4Addr,
    /// Prefix length of its network.
    pub prefix: u8,
    /// Its way out.
    pub gateway: Ipv4Addr,
}

/// Opens connections into a guest.
#[async_trait]
pub trait GuestDialer: Send + Sync + Debug + 'static {
    /// A TCP connection to `port` of the guest. Refused and unreachable are told apart by their `ErrorKind`.
    async fn dial(&self, port: u16) -> io::Result<TcpStream>;
}

/// Gives network slots.
#[async_trait]
pub trait Slots: Send + Sync + Debug + 'static {
    /// A slot nobody else has.
    async fn acquire(&self) -> io::Result<Box<dyn SlotLease>>;
}

/// One sandbox's network slot, until released.
#[async_trait]
pub trait SlotLease: Send + Sync + Debug + 'static {
    /// Namespace that the VMM runs in.
    fn netns(&self) -> Option<PathBuf>;
    /// The guest's network device, if the slot has one.
    fn nic(&self) -> Option<NicSpec>;
    /// The guest's addresses.
    fn address(&self) -> GuestAddress;
    /// How the host reaches the guest.
    fn dialer(&self) -> Arc<dyn GuestDialer>;
    /// Gives the slot back; the kernel has let go of everything on return. After an error it may be tried again.
    async fn release(&mut self) -> io::Result<()>;
}

#[async_trait]
impl GuestDialer for GuestConnector {
    async fn dial(&self, port: u16) -> io::Result<TcpStream> {
        self.connect(port).await
    }
}

#[async_trait]
impl Slots for SlotPool {
    async fn acquire(&self) -> io::Result<Box<dyn SlotLease>> {
        let slot = SlotPool::acquire(self).await.map_err(io::Error::other)?;
        let address = GuestAddress { address: slot.guest_address(), prefix: slot.prefix(), gateway: slot.gateway() };
        Ok(Box::new(LeasedSlot { connector: Arc::new(slot.connector()), address, slot: Some(slot) }))
    }
}

/// A pool's slot while a sandbox has it.
#[derive(Debug)]
struct LeasedSlot {
    slot: Option<Slot>,
    connector: Arc<GuestConnector>,
    address: GuestAddress,
}

#[async_trait]
impl SlotLease for LeasedSlot {
    fn netns(&self) -> Option<PathBuf> {
        self.slot.as_ref().map(|slot| slot.netns_path().to_owned())
    }

    fn nic(&self) -> Option<NicSpec> {
        self.slot.as_ref().map(|slot| NicSpec { tap: slot.tap().to_owned(), mac: slot.guest_mac() })
    }

    fn address(&self) -> GuestAddress {
        self.address
    }

    fn dialer(&self) -> Arc<dyn GuestDialer> {
        Arc::clone(&self.connector) as Arc<dyn GuestDialer>
    }

    async fn release(&mut self) -> io::Result<()> {
        match self.slot.take() {
            Some(slot) => slot.close().await.map_err(io::Error::other),
            None => Ok(()),
        }
    }
}
