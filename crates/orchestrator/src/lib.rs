//! The only place where a *sandbox* exists.
//!
//! ```text
//!   API ──ask──▶ Orchestrator ──queue──▶ driver task (one a sandbox) ──owns──▶ Resources
//!                    │                        │   phase ◀── admission table      ├ slot   (network)
//!                    │◀──── watch(phase) ─────┘                                  ├ disk   (block)
//!                    │                                                           └ machine (VMM)
//!                    └─ node store: intent row written before anything is made, removed after all is gone
//! ```
//!
//! * One task per sandbox owns its phase and its resources; everybody else asks and reads.
//! * [`admission::admit`] is the whole policy: pure, enumerable.
//! * An operation goes on when its client hangs up: the work is the driver's, the client only waits for a reply.
//! * `kill -9` at any moment: the next start reads the intent rows and ends what they name ([`end_leftovers`]).

#![forbid(unsafe_code)]

pub mod admission;
mod config;
mod driver;
mod guest;
mod leftovers;
mod orchestrator;
mod resources;
mod sandbox;
mod seams;
mod start;
mod token;

pub use config::{EnvdConfig, OrchestratorConfig};
pub use leftovers::{Leftovers, end_leftovers};
pub use orchestrator::{Orchestrator, Parts};
pub use sandbox::{
    AskError, CreateError, DeleteError, Ended, GuestDefaults, Keep, NewSandbox, Route, SandboxInfo,
    StartOrchestratorError,
};
pub use seams::{GuestAddress, GuestBoot, GuestDialer, SlotLease, Slots};
pub use token::TokenSeed;
