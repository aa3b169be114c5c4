//! What a sandbox may reach: its policy, and the rules that make it so.
//!
//! First match decides:
//!
//! 1. connections that were accepted before go on;
//! 2. the guest's resolver, port 53;
//! 3. addresses of the node's slots and the guest's own link are refused;
//! 4. so are networks that the node denies to all;
//! 5. `allow_out` is accepted;
//! 6. `deny_out` is refused;
//! 7. the rest is refused without internet access, and
//! 8. accepted with it.

mod policy;
mod rules;

pub use policy::{Destination, EgressPolicy, PolicyError, PolicyProblem};
pub(crate) use rules::{
    Chain, EGRESS, Family, Hook, Match, Rule, SLOT_TABLE, Table, Verdict, host_tables, policy_rules, slot_tables,
};
