//! A sandbox's life over a fake VMM, fake slots and a stub of the guest agent: what is promised, and that nothing is left.

mod ahead;
mod captures;
mod lives;
mod network;
mod observed;
mod simulation;
mod starts;
mod support;
mod takeover;
