//! What can go wrong with slots, one enum per operation.

use std::io;
use std::net::Ipv4Addr;
use std::path::PathBuf;

use nix::errno::Errno;

use crate::slot::SlotRecord;

/// The kernel, or the socket to it, refused a netlink request.
#[derive(Debug, Clone, thiserror::Error)]
pub enum NetlinkError {
    /// The kernel answered with an errno.
    #[error("{0}")]
    Refused(Errno),
    /// The request could not be exchanged.
    #[error("{0}")]
    Exchange(String),
}

impl NetlinkError {
    /// Whether the kernel said that there is no such link.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Refused(Errno::ENODEV))
    }
}

impl From<rtnetlink::Error> for NetlinkError {
    fn from(error: rtnetlink::Error) -> Self {
        match error {
            rtnetlink::Error::NetlinkError(message) => match message.code {
                Some(code) => Self::Refused(Errno::from_raw(code.get().saturating_neg())),
                None => Self::Exchange(message.to_string()),
            },
            other => Self::Exchange(other.to_string()),
        }
    }
}

/// Why a slot could not be made. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum CreateSlotError {
    /// The pool is closed or closing.
    #[error("the network pool is closed")]
    Closed,
    /// Every number is in use.
    #[error("all {0} network slots are in use")]
    Exhausted(u32),
    /// Namespaces, mounts and taps need root (CAP_SYS_ADMIN and CAP_NET_ADMIN).
    #[error("{doing} {object}")]
    Kernel {
        /// What was tried.
        doing: &'static str,
        /// On which file or device.
        object: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A link or address was refused.
    #[error("configure link {link}")]
    Link {
        /// The interface.
        link: String,
        /// What the kernel said.
        source: NetlinkError,
    },
}

/// A policy could not be put in force; the former one is.
#[derive(Debug, thiserror::Error)]
#[error("set the egress policy of network slot {index}")]
pub struct SetPolicyError {
    /// Which slot.
    pub index: u32,
    /// What the kernel said.
    pub source: io::Error,
}

/// One thing that did not go away.
#[derive(Debug, thiserror::Error)]
pub enum SlotProblem {
    /// The host's veth end.
    #[error("delete link {link}: {source}")]
    Link {
        /// The interface.
        link: String,
        /// What the kernel said.
        source: NetlinkError,
    },
    /// Connections that the host has noted.
    #[error("forget connections of {address}: {source}")]
    Connections {
        /// The slot's address.
        address: Ipv4Addr,
        /// What the kernel said.
        source: io::Error,
    },
    /// The bind-mounted namespace.
    #[error("{doing} {path}: {source}", path = path.display())]
    Netns {
        /// What was tried.
        doing: &'static str,
        /// The namespace's file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// A slot that is not wholly gone; the pool's reaper keeps trying.
#[derive(Debug, thiserror::Error)]
#[error("close network slot {}: {}", record.index, problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct CloseSlotError {
    /// Which slot.
    pub record: SlotRecord,
    /// Everything that failed; the rest was removed.
    pub problems: Vec<SlotProblem>,
}

/// Why a slot that a record names cannot be taken over.
#[derive(Debug, thiserror::Error)]
pub enum AdoptSlotError {
    /// The record was written by another node, or names a slot already owned here.
    #[error("network slot {index} of {tag} is not free to be adopted here")]
    NotOurs {
        /// The tag in the record.
        tag: String,
        /// The number in the record.
        index: u32,
    },
    /// Part of it, or all, no longer exists. What is left of it is swept.
    #[error("network slot {index}: {what} is gone")]
    Gone {
        /// The number in the record.
        index: u32,
        /// What was missed.
        what: String,
    },
    /// The kernel could not be asked.
    #[error("inspect network slot {index}")]
    Inspect {
        /// The number in the record.
        index: u32,
        /// What was tried and what the kernel said.
        source: CreateSlotError,
    },
}

/// Why a pool did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartPoolError {
    /// The tag would not make valid interface names.
    #[error("network tag {0:?} is not 1 to 8 characters a-z0-9")]
    Tag(String),
    /// The directory for namespaces.
    #[error("prepare {path}", path = path.display())]
    Dir {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The socket to the kernel.
    #[error("open a netlink socket")]
    Socket {
        /// What the system said.
        source: io::Error,
    },
    /// The host's table, by which guests leave and are kept from the host.
    #[error(
        "make nf_tables rules on the host (network.egress.enabled = false does without, and nothing leaves a sandbox)"
    )]
    Rules {
        /// What the kernel said.
        source: io::Error,
    },
    /// The host does not forward.
    #[error("write {path} (network.egress.set_ip_forward = false leaves it alone)", path = path.display())]
    Forwarding {
        /// The setting.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The host's links could not be listed.
    #[error("list the host's network links")]
    Links {
        /// What the kernel said.
        source: NetlinkError,
    },
}
