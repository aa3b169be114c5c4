//! Ids, units and phases: the nouns every other crate shares.
//!
//! Text, JSON and disk bytes become these types once, at the edge; inside, signatures need no comments.

#![forbid(unsafe_code)]

mod command;
mod id;
mod machine;
mod units;

pub use command::{Command, CommandExit, Output};
pub use id::{BuildId, CaptureId, KeyId, LeaseId, ParseIdError, SandboxId, TemplateId};
pub use machine::{MachineShape, Phase};
pub use units::Bytes;
