//! The only place where a *sandbox* exists.
//!
//! ```text
//!   API ──ask──▶ Orchestrator ──queue──▶ driver task (one a sandbox) ──owns──▶ Resources
//!                    │                        │   phase ◀── admission table      ├ slot   (network)
//!                    │◀──── watch(phase) ─────┘                                  ├ disk   (block)
//!                    │                                                           └ machine (VMM)
//!                    └─ node store: a row a sandbox, written before anything is made, removed after all is gone
//! ```
//!
//! * One task per sandbox owns its phase and its resources; everybody else asks and reads.
//! * [`admission::admit`] is the whole policy: pure, enumerable.
//! * An operation goes on when its client hangs up: the work is the driver's, the client only waits for a reply.
//! * `kill -9` at any moment: the next start reads the rows, takes over what runs, finds what is paused, and ends what was
//!   half made ([`Former`]).

#![forbid(unsafe_code)]

mod activity;
pub mod admission;
mod blanks;
mod command;
mod config;
mod driver;
mod former;
mod guest;
mod inbox;
mod journal;
mod lease;
mod message;
mod orchestrator;
mod resources;
mod sandbox;
mod seams;
mod stages;
mod standby;
mod start;
mod token;
mod vitals;

pub use activity::InUse;
pub use blanks::BlanksConfig;
pub use command::CommandError;
pub use config::{EnvdConfig, OnStop, OrchestratorConfig};
pub use former::{Former, TakenOver};
pub use journal::{JournalEntry, Level};
pub use lease::LeaseInfo;
pub use orchestrator::{Creates, Orchestrator, Parts};
pub use sandbox::{
    AskError, CreateError, DeleteError, Ended, Forked, GuestDefaults, HowToPause, Image, Keep, NewSandbox, OnExpiry,
    Owned, Route, SandboxInfo, SandboxSpec, Source, StartOrchestratorError, StartTimes, Taken,
};
pub use seams::{GuestAddress, GuestBoot, GuestDialer, SlotLease, Slots};
pub use stages::{BUCKETS, OperationStage, Stages};
pub use standby::StandbyConfig;
pub use token::TokenSeed;
pub use vitals::{Sample, Usage};
