//! What the orchestrator needs from below, as it sees it. Implementations are handed to [`crate::Orchestrator::start`].

use std::fmt::Debug;
use std::io;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;

use aenv_network::{AdoptSlotError, EgressPolicy, GuestConnector, Slot, SlotPool, SlotRecord};
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
    /// The resolver that guests are told.
    pub resolver: Option<Ipv4Addr>,
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

    /// Takes over a slot that a former server left, with whatever runs in it.
    ///
    /// Errors: `NotFound` if it, or part of it, is gone, and then all of it goes; `ResourceBusy` if it is not ours to take;
    /// `Unsupported` where slots do not outlive their server; another if it may be tried again.
    async fn adopt(&self, _record: &SlotRecord) -> io::Result<Box<dyn SlotLease>> {
        Err(io::ErrorKind::Unsupported.into())
    }
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
    /// Lets the guest reach what `policy` allows, and nothing else; before the first call it reaches nothing. Not to be called
    /// twice at a time. After an error what was before holds.
    async fn set_policy(&self, policy: &EgressPolicy) -> io::Result<()>;
    /// How [`Slots::adopt`] finds the slot again; `None` if it does not outlive the server, or was released.
    fn record(&self) -> Option<SlotRecord> {
        None
    }
    /// Leaves the slot, with whatever runs in it, to a successor; the dialer makes no more connections.
    ///
    /// Errors: `Unsupported` where slots do not outlive their server, `NotFound` if there is none any more.
    fn disown(&mut self) -> io::Result<SlotRecord> {
        Err(io::ErrorKind::Unsupported.into())
    }
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
        Ok(Box::new(LeasedSlot::from(slot)))
    }

    async fn adopt(&self, record: &SlotRecord) -> io::Result<Box<dyn SlotLease>> {
        let slot = SlotPool::adopt(self, record).await.map_err(|error| {
            let kind = match &error {
                AdoptSlotError::Gone { .. } => io::ErrorKind::NotFound,
                AdoptSlotError::NotOurs { .. } => io::ErrorKind::ResourceBusy,
                AdoptSlotError::Inspect { .. } => io::ErrorKind::Other,
            };
            io::Error::new(kind, error)
        })?;
        Ok(Box::new(LeasedSlot::from(slot)))
    }
}

/// A pool's slot while a sandbox has it.
#[derive(Debug)]
struct LeasedSlot {
    slot: Option<Slot>,
    connector: Arc<GuestConnector>,
    address: GuestAddress,
}

impl From<Slot> for LeasedSlot {
    fn from(slot: Slot) -> Self {
        let address = GuestAddress { address: slot.guest_address(), prefix: slot.prefix(), gateway: slot.gateway() };
        Self { connector: Arc::new(slot.connector()), address, slot: Some(slot) }
    }
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

    async fn set_policy(&self, policy: &EgressPolicy) -> io::Result<()> {
        match &self.slot {
            Some(slot) => slot.set_policy(policy).await.map_err(io::Error::other),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn record(&self) -> Option<SlotRecord> {
        self.slot.as_ref().map(Slot::record)
    }

    fn disown(&mut self) -> io::Result<SlotRecord> {
        self.slot.take().map(Slot::disown).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    async fn release(&mut self) -> io::Result<()> {
        match self.slot.take() {
            Some(slot) => slot.close().await.map_err(io::Error::other),
            None => Ok(()),
        }
    }
}
