//! What is asked of a driver, with the place for its answer.

use std::time::Duration;

use aenv_model::Phase;
use aenv_network::EgressPolicy;
use aenv_snapshot::Capture;
use jiff::Timestamp;
use tokio::sync::oneshot;

use crate::admission::Ask;
use crate::sandbox::{AskError, Ended, HowToPause, Taken};

/// Why a driver did not do what it was asked.
#[derive(Debug, Clone)]
pub(crate) enum Refusal {
    /// The sandbox is ending.
    Gone,
    /// Not in this phase.
    Busy(Phase),
    /// It was tried, and failed.
    Failed(AskError),
}

pub(crate) type Reply<T> = oneshot::Sender<Result<T, Refusal>>;

/// Answers a delete: what could not be given back at the first attempt.
pub(crate) type DeleteReply = oneshot::Sender<Result<(), String>>;

/// An ask with the place for its answer.
#[derive(Debug)]
pub(crate) enum Message {
    /// New deadline, counted from now; extend-only if `shorten` is false. Answers the deadline in force.
    Deadline { life: Duration, shorten: bool, reply: Reply<Timestamp> },
    /// Have it run, with a new deadline; extend-only if `connect`. Answers whether it had to be resumed.
    Start { life: Duration, connect: bool, reply: Reply<bool> },
    /// Pause it. Answers false if it was paused already.
    Pause { how: HowToPause, reply: Reply<bool> },
    /// Copy its machine.
    Capture { kind: CaptureKind, reply: Reply<Taken> },
    /// Put the machine of a capture in the place of its own.
    Rollback { capture: Capture, reply: Reply<()> },
    /// Change what it may reach.
    Network { policy: EgressPolicy, reply: Reply<()> },
    /// End it.
    Delete { why: Ended, reply: DeleteReply },
}

/// What a copy is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CaptureKind {
    Snapshot { disk_only: bool },
    Fork,
}

impl CaptureKind {
    /// What there is of it afterwards, for a journal.
    pub(crate) fn done(self) -> &'static str {
        match self {
            Self::Snapshot { disk_only: false } => "snapshot taken",
            Self::Snapshot { disk_only: true } => "snapshot of the disk taken",
            Self::Fork => "forked",
        }
    }

    pub(crate) fn phase(self) -> Phase {
        match self {
            Self::Snapshot { .. } => Phase::Snapshotting,
            Self::Fork => Phase::Forking,
        }
    }
}

impl Message {
    pub(crate) fn ask(&self) -> Ask {
        match self {
            Self::Deadline { .. } => Ask::Deadline,
            Self::Start { connect: true, .. } => Ask::Connect,
            Self::Start { connect: false, .. } => Ask::Resume,
            Self::Pause { .. } => Ask::Pause,
            Self::Capture { kind: CaptureKind::Snapshot { .. }, .. } => Ask::Snapshot,
            Self::Capture { kind: CaptureKind::Fork, .. } => Ask::Fork,
            Self::Rollback { .. } => Ask::Rollback,
            Self::Network { .. } => Ask::Network,
            Self::Delete { .. } => Ask::Delete,
        }
    }

    /// Answers that it is not done. A delete is never refused but by the end of what it asks for.
    pub(crate) fn refuse(self, refusal: Refusal) {
        match self {
            Self::Deadline { reply, .. } => _ = reply.send(Err(refusal)),
            Self::Start { reply, .. } | Self::Pause { reply, .. } => _ = reply.send(Err(refusal)),
            Self::Capture { reply, .. } => _ = reply.send(Err(refusal)),
            Self::Rollback { reply, .. } | Self::Network { reply, .. } => _ = reply.send(Err(refusal)),
            Self::Delete { reply, .. } => _ = reply.send(Ok(())),
        }
    }
}
