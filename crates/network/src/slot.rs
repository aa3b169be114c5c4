//! One slot: its parts, how they are made, found again and unmade.

use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use tracing::{debug, warn};

use crate::connector::{Door, GuestConnector};
use crate::egress::{EGRESS, EgressPolicy, Family, SLOT_TABLE, policy_rules, slot_tables};
use crate::error::{AdoptSlotError, CloseSlotError, CreateSlotError, NetlinkError, SetPolicyError, SlotProblem};
use crate::host;
use crate::netns::{self, Inside};
use crate::nft::Batch;
use crate::pool::Context;

// Fixed in every slot and part of what a snapshot records: a guest wakes up with them.

/// The guest's address.
pub const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 21);
/// The tap's address: the guest's gateway.
pub const TAP_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 22);
/// The prefix length both share.
pub const PREFIX_LENGTH: u8 = 30;
/// The guest's MAC address: `06:00` and its IPv4 address.
pub const GUEST_MAC: [u8; 6] = [0x06, 0x00, 169, 254, 0, 21];
/// The tap's MAC address, made in the same way: the guest's gateway.
pub const TAP_MAC: [u8; 6] = [0x06, 0x00, 169, 254, 0, 22];
/// The tap's name inside the netns.
pub const TAP_NAME: &str = "tap0";

/// The slot's end of the veth pair.
pub(crate) const VETH_NAME: &str = "veth0";

/// How a later process of the same node finds a slot again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotRecord {
    /// The node's tag when the slot was made.
    pub tag: String,
    /// The slot's number, unique among the node's slots while it exists.
    pub index: u32,
}

/// The number of a slot, and the duty to unmake what exists under it.
pub(crate) struct Lease {
    context: Arc<Context>,
    index: u32,
    /// Whether dropping this leaves something behind.
    armed: bool,
}

impl Lease {
    /// A lease on a number that was just taken or adopted.
    pub(crate) fn new(context: Arc<Context>, index: u32) -> Self {
        Self { context, index, armed: true }
    }

    fn record(&self) -> SlotRecord {
        SlotRecord { tag: self.context.names.tag().to_owned(), index: self.index }
    }

    /// Removes everything under the number and gives the number back. On an error the reaper goes on.
    async fn end(mut self) -> Result<(), CloseSlotError> {
        let end = destroy(&self.context, self.index).await;
        self.armed = false;
        match end {
            Ok(()) => self.context.release(self.index),
            Err(_) => self.context.reap(self.index),
        }
        end
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.armed {
            warn!(slot = self.index, "network slot dropped without close");
            self.context.reap(self.index);
        }
    }
}

/// A netns with a tap for one VM, and the host's way into it. Ends in [`Slot::close`] or [`Slot::disown`].
pub struct Slot {
    // Shut before the lease reaps: fields drop in this order.
    door: Shutter,
    netns: Arc<OwnedFd>,
    netns_path: PathBuf,
    /// Its tables are those that this process makes; an adopted slot's may be an older one's.
    current: AtomicBool,
    lease: Lease,
}

/// Shuts the door when the slot goes, whichever way.
struct Shutter(Arc<Door>);

impl Drop for Shutter {
    fn drop(&mut self) {
        self.0.shut();
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").field("index", &self.lease.index).field("netns", &self.netns_path).finish()
    }
}

impl Slot {
    /// Makes the slot of `lease`. On an error nothing of it is left (or the reaper has it).
    pub(crate) async fn create(lease: Lease) -> Result<Self, CreateSlotError> {
        match build(&lease.context, lease.index).await {
            Ok(inside) => Ok(Self::assemble(lease, inside, true)),
            Err(error) => {
                if let Err(leftover) = lease.end().await {
                    warn!(error = %leftover, "cannot undo a half-made network slot; the reaper goes on");
                }
                Err(error)
            }
        }
    }

    /// Takes over the slot of `lease`, which another process made: whole, or not at all. What is left of one that is not
    /// whole goes to the reaper; one that could not be looked at stays as it is.
    pub(crate) async fn adopt(mut lease: Lease) -> Result<Self, AdoptSlotError> {
        let inspected = Self::inspect(&lease).await;
        if let Err(AdoptSlotError::Inspect { .. }) = inspected {
            lease.armed = false;
        }
        let inside = inspected?;
        debug!(slot = lease.index, "network slot adopted");
        Ok(Self::assemble(lease, inside, false))
    }

    async fn inspect(lease: &Lease) -> Result<Inside, AdoptSlotError> {
        let index = lease.index;
        let gone = |what: String| AdoptSlotError::Gone { index, what };
        let inspect = |source| AdoptSlotError::Inspect { index, source };
        let missing = |link: &str, error: NetlinkError| {
            if error.is_missing() {
                gone(format!("link {link}"))
            } else {
                inspect(CreateSlotError::Link { link: link.to_owned(), source: error })
            }
        };

        let link = lease.context.names.link(index);
        let path = lease.context.names.netns_path(index);
        let inside = netns::open(path.clone()).await.map_err(inspect)?;
        let inside = inside.ok_or_else(|| gone(format!("namespace {}", path.display())))?;
        for inner in [TAP_NAME, VETH_NAME] {
            inside.netlink.index(inner).await.map_err(|error| missing(inner, error))?;
        }
        lease.context.host.index(&link).await.map_err(|error| missing(&link, error))?;
        Ok(inside)
    }

    fn assemble(lease: Lease, inside: Inside, current: bool) -> Self {
        let door = Arc::new(Door::new(Arc::clone(&inside.netns), lease.context.sockets.clone()));
        let netns_path = lease.context.names.netns_path(lease.index);
        Self { door: Shutter(door), netns: inside.netns, netns_path, current: AtomicBool::new(current), lease }
    }

    /// Lets the guest reach what `policy` allows, and nothing else. Until the first call it reaches nothing (an adopted slot:
    /// what it reached before). New connections meet the old policy or the new one; those that were accepted go on.
    ///
    /// Not to be called twice at a time. If the pool has no egress, nothing leaves, whatever the policy. After an error the
    /// former policy is in force. Cancel safety: if dropped, it is done all the same.
    pub async fn set_policy(&self, policy: &EgressPolicy) -> Result<(), SetPolicyError> {
        let netns = Arc::clone(&self.netns);
        let current = self.current.load(Ordering::Relaxed);
        let done = match &self.lease.context.egress {
            Some(egress) => {
                let rules = policy_rules(policy, egress.config());
                let batch = Batch::new();
                let batch = match current {
                    true => batch.replace_rules(Family::Ipv4, SLOT_TABLE, EGRESS, rules),
                    false => batch.replace_tables(slot_tables(rules)),
                };
                netns::change_rules(netns, batch).await
            }
            None if current => Ok(()),
            None => netns::stop_forwarding(netns).await,
        };
        done.map_err(|source| SetPolicyError { index: self.lease.index, source })?;
        self.current.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// What to keep to find the slot again.
    #[must_use]
    pub fn record(&self) -> SlotRecord {
        self.lease.record()
    }

    /// The bind-mounted namespace, for `setns(2)` by whoever starts the VMM.
    #[must_use]
    pub fn netns_path(&self) -> &Path {
        &self.netns_path
    }

    /// The tap's name inside the netns: persistent, one queue, with virtio-net headers.
    #[must_use]
    pub fn tap(&self) -> &str {
        TAP_NAME
    }

    /// The MAC address the guest's interface must have; the host never asks for it.
    #[must_use]
    pub fn guest_mac(&self) -> [u8; 6] {
        GUEST_MAC
    }

    /// The address the guest must take.
    #[must_use]
    pub fn guest_address(&self) -> Ipv4Addr {
        GUEST_ADDRESS
    }

    /// The guest's gateway.
    #[must_use]
    pub fn gateway(&self) -> Ipv4Addr {
        TAP_ADDRESS
    }

    /// The guest's prefix length.
    #[must_use]
    pub fn prefix(&self) -> u8 {
        PREFIX_LENGTH
    }

    /// The way to the guest.
    #[must_use]
    pub fn connector(&self) -> GuestConnector {
        GuestConnector::new(Arc::clone(&self.door.0))
    }

    /// Removes the slot. The VMM should have ended: a process that still lives in the netns keeps it, nameless.
    ///
    /// Tries every part even if one fails; then the error names all, and the pool's reaper keeps trying. Cancel safety:
    /// if dropped, the reaper finishes it.
    pub async fn close(self) -> Result<(), CloseSlotError> {
        self.door.0.shut();
        self.lease.end().await
    }

    /// Leaves the slot running for a successor; its number stays taken here. Connectors stop making connections.
    #[must_use = "only the record finds the slot again"]
    pub fn disown(mut self) -> SlotRecord {
        self.lease.armed = false;
        self.record()
    }
}

/// Makes all parts of slot `index`; on an error, some are left.
async fn build(context: &Context, index: u32) -> Result<Inside, CreateSlotError> {
    let inside = netns::create(context.names.netns_path(index), context.egress.is_some()).await?;
    let link = context.names.link(index);
    let (host_address, inner_address) = context.veth.pair(index);

    let failed = |link: &str| {
        let link = link.to_owned();
        move |source| CreateSlotError::Link { link, source }
    };
    let inner = &inside.netlink;
    let lo = async {
        let lo = inner.index("lo").await?;
        inner.set_up(lo).await
    };
    lo.await.map_err(failed("lo"))?;
    let tap = async {
        let tap = inner.index(TAP_NAME).await?;
        // The same everywhere: a guest that goes on in another slot knows its gateway by it.
        inner.set_mac(tap, &TAP_MAC).await?;
        inner.set_up(tap).await?;
        inner.add_address(tap, TAP_ADDRESS, PREFIX_LENGTH).await?;
        // Pinned, so that the first connection to a guest that has just come up, or back, needs no ARP exchange. That
        // would be retried only once a second.
        inner.add_neighbour(tap, GUEST_ADDRESS, &GUEST_MAC).await
    };
    tap.await.map_err(failed(TAP_NAME))?;
    let host = async {
        context.host.add_veth(&link, VETH_NAME, inside.netns.as_fd()).await?;
        let host = context.host.index(&link).await?;
        Ok(host)
    };
    let host = host.await.map_err(failed(&link))?;
    if context.egress.is_some() {
        let kernel = |source| CreateSlotError::Kernel { doing: "set up", object: link.clone(), source };
        host::set_up_link(&link).map_err(kernel)?;
    }
    let host = async {
        context.host.set_up(host).await?;
        context.host.add_address(host, host_address, 31).await
    };
    host.await.map_err(failed(&link))?;
    let veth = async {
        let veth = inner.index(VETH_NAME).await?;
        inner.set_up(veth).await?;
        inner.add_address(veth, inner_address, 31).await?;
        if context.egress.is_some() {
            inner.add_default_route(veth, host_address).await?;
        }
        Ok(())
    };
    veth.await.map_err(failed(VETH_NAME))?;
    Ok(inside)
}

/// Removes whatever exists of slot `index`, going on past failures. What does not exist is success.
pub(crate) async fn destroy(context: &Context, index: u32) -> Result<(), CloseSlotError> {
    let mut problems = Vec::new();
    // The link first and by itself: the kernel takes a namespace apart at leisure, and the host's end with it.
    let link = context.names.link(index);
    if let Err(source) = context.host.delete(&link).await {
        problems.push(SlotProblem::Link { link, source });
    }
    let path = context.names.netns_path(index);
    let egress = context.egress.clone();
    let (_, address) = context.veth.pair(index);
    let rest = move || {
        let removed = netns::remove(&path).err();
        let noted = egress.and_then(|egress| egress.forget(address).err());
        let noted = noted.map(|source| SlotProblem::Connections { address, source });
        (removed, noted)
    };
    match tokio::task::spawn_blocking(rest).await {
        Ok((removed, noted)) => problems.extend(removed.into_iter().chain(noted)),
        Err(_) => problems.push(SlotProblem::Netns {
            doing: "remove",
            path: context.names.netns_path(index),
            source: std::io::Error::other("the runtime is shutting down"),
        }),
    }
    if problems.is_empty() {
        debug!(slot = index, "network slot removed");
        return Ok(());
    }
    Err(CloseSlotError { record: SlotRecord { tag: context.names.tag().to_owned(), index }, problems })
}
