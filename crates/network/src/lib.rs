//! Network slots: the private network a sandbox lives in, and the way into it.
//!
//! ```text
//!  host netns                      │ netns aenv-<tag>-<n>  (bind-mounted at <run_dir>/netns/aenv-<tag>-<n>)
//!                                  │
//!  av<tag>-<n>  ═══════════ veth ══╪══ veth0          lo
//!  (even address of the /31)       │ (odd address)
//!                                  │
//!  node server ── socket(2) made ──╪─▶ tap0 169.254.0.22/30 ── VMM ── guest 169.254.0.21, 06:00:a9:fe:00:15
//!                 inside the netns │
//! ```
//!
//! The addresses inside are the same in every slot, because a guest restored from a snapshot wakes up with the ones it
//! went to sleep with. They never meet: each pair lives in its own netns. The host reaches a guest neither by NAT nor by
//! a route, but by *creating* the socket inside the netns ([`GuestConnector`]); a socket stays in the netns it was born
//! in.
//!
//! A guest reaches nothing until its slot has a policy ([`Slot::set_policy`]): forwarding is off inside. Then
//!
//! ```text
//!  guest ─▶ tap0  only frames of the guest's own addresses     ┐
//!           chain egress: the policy                           │ tables aenv in the netns
//!           veth0: leaves with the slot's address              ┘
//!        ─▶ av<tag>-<n>  the node's denials, no host, no neighbour   ┐ table aenv-<tag> on the host
//!           leaves with the host's address                           ┘
//! ```
//!
//! Who cleans up: a [`Slot`] ends in `close` (everything gone), `disown` (left running; the record finds it again) or,
//! as the seat belt, `Drop`, which hands it to the pool's reaper. Names carry the node's tag; what a killed process left
//! under that tag is found when the next [`SlotPool`] starts, and either adopted or swept. Nothing with another tag, or
//! without one, is ever touched.

#![deny(unsafe_code)]

mod config;
mod connector;
mod conntrack;
mod egress;
mod error;
mod host;
mod name;
mod netlink;
mod netns;
mod nft;
mod pool;
mod slot;
mod tap;
#[cfg(test)]
mod tests;

pub use config::{EgressConfig, GUEST_LINK, Ipv4Block, NetworkConfig, ParseIpv4BlockError, host_resolver, resolver_of};
pub use connector::GuestConnector;
pub use egress::{Destination, EgressPolicy, PolicyError, PolicyProblem};
pub use error::{
    AdoptSlotError, CloseSlotError, CreateSlotError, NetlinkError, SetPolicyError, SlotProblem, StartPoolError,
};
pub use ipnet::Ipv4Net;
pub use pool::{SlotPool, Swept};
pub use slot::{GUEST_ADDRESS, GUEST_MAC, PREFIX_LENGTH, Slot, SlotRecord, TAP_ADDRESS, TAP_MAC, TAP_NAME};
