//! The admission table: what a driver does with an ask, by the phase its sandbox is in.

use aenv_model::Phase;

/// What can be asked of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// Set or extend the deadline.
    Deadline,
    /// End it: by the user, by its deadline, by the end of its VMM, or by the node's shutdown.
    Delete,
}

/// The driver's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Do it now; for a delete the phase becomes `Deleting`.
    Begin,
    /// Hold the ask until the start has succeeded or failed, then admit it again.
    Wait,
    /// The same is under way: this asker gets that outcome.
    Join,
    /// There is no such sandbox any more.
    Gone,
}

/// All of the policy: pure, synchronous, no locks, no clock.
#[must_use]
pub fn admit(phase: Phase, ask: Ask) -> Verdict {
    match (phase, ask) {
        (Phase::Creating, Ask::Deadline) => Verdict::Wait,
        (Phase::Running, Ask::Deadline) => Verdict::Begin,
        (Phase::Creating | Phase::Running, Ask::Delete) => Verdict::Begin,
        (Phase::Deleting, Ask::Delete) => Verdict::Join,
        (Phase::Deleting, Ask::Deadline) | (Phase::Gone, Ask::Deadline | Ask::Delete) => Verdict::Gone,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PHASES: [Phase; 4] = [Phase::Creating, Phase::Running, Phase::Deleting, Phase::Gone];

    #[test]
    fn delete_is_possible_in_every_phase_that_holds_resources() {
        for phase in PHASES {
            let verdict = admit(phase, Ask::Delete);
            match phase {
                Phase::Gone => assert_eq!(verdict, Verdict::Gone),
                Phase::Creating | Phase::Running | Phase::Deleting => {
                    assert!(matches!(verdict, Verdict::Begin | Verdict::Join), "{phase:?}");
                }
            }
        }
    }

    #[test]
    fn a_deadline_never_revives_what_is_ending() {
        for phase in [Phase::Deleting, Phase::Gone] {
            assert_eq!(admit(phase, Ask::Deadline), Verdict::Gone);
        }
    }
}
