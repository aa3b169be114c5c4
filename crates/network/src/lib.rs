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
//! in. Forwarding is off inside, so a guest reaches the tap's own address and nothing else. No sysctl of the host is
//! touched.
//!
//! Who cleans up: a [`Slot`] ends in `close` (everything gone), `disown` (left running; the record finds it again) or,
//! as the seat belt, `Drop`, which hands it to the pool's reaper. Names carry the node's tag; what a killed process left
//! under that tag is found when the next [`SlotPool`] starts, and either adopted or swept. Nothing with another tag, or
//! without one, is ever touched.

#![deny(unsafe_code)]

mod config;
mod connector;
mod error;
mod name;
mod netlink;
mod netns;
mod pool;
mod slot;
mod tap;
#[cfg(test)]
mod tests;

pub use config::{Ipv4Block, NetworkConfig, ParseIpv4BlockError};
pub use connector::GuestConnector;
pub use error::{AdoptSlotError, CloseSlotError, CreateSlotError, NetlinkError, SlotProblem, StartPoolError};
pub use pool::{SlotPool, Swept};
pub use slot::{GUEST_ADDRESS, GUEST_MAC, PREFIX_LENGTH, Slot, SlotRecord, TAP_ADDRESS, TAP_MAC, TAP_NAME};
