//! The admission table: what a driver does with an ask, by the phase its sandbox is in.
//!
//! ```text
//!               Deadline  Connect  Resume  Pause  Snapshot  Fork   Rollback  Network  Delete
//! Creating      wait      wait     busy    busy   busy      busy   busy      busy     begin
//! Running       begin     begin    begin   begin  begin     begin  begin     begin    begin
//! Snapshotting  wait      wait     wait    busy   busy      busy   busy      busy     wait
//! Forking       wait      wait     wait    busy   busy      busy   busy      busy     wait
//! RollingBack   wait      wait     wait    busy   busy      busy   busy      busy     begin
//! Pausing       busy      wait     busy    join   busy      busy   busy      busy     wait
//! Paused        busy      begin    begin   done   busy      busy   busy      busy     begin
//! Resuming      wait      join     join    busy   busy      busy   busy      busy     begin
//! Deleting      gone      gone     gone    gone   gone      gone   gone      gone     join
//! Gone          gone      gone     gone    gone   gone      gone   gone      gone     gone
//! ```

use aenv_model::Phase;

/// What can be asked of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// Set or extend the deadline.
    Deadline,
    /// Resume it if it is paused, and extend its deadline.
    Connect,
    /// Resume it, and set its deadline.
    Resume,
    /// Copy its machine and end it.
    Pause,
    /// Copy its machine, which goes on, to keep the copy.
    Snapshot,
    /// Copy its machine, which goes on, for children.
    Fork,
    /// Put a machine of an earlier instant in the place of its own.
    Rollback,
    /// Change what it may reach.
    Network,
    /// End it: by the user, by its deadline, by the end of its VMM, or by the node's shutdown.
    Delete,
}

impl Ask {
    /// Every ask.
    pub const ALL: [Self; 9] = [
        Self::Deadline,
        Self::Connect,
        Self::Resume,
        Self::Pause,
        Self::Snapshot,
        Self::Fork,
        Self::Rollback,
        Self::Network,
        Self::Delete,
    ];
}

/// The driver's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Do it now. Where something is under way (a start), that is ended first.
    Begin,
    /// Hold the ask until what is under way has succeeded or failed, then admit it again.
    Wait,
    /// The same is under way: this asker gets that outcome.
    Join,
    /// It is so already.
    Done,
    /// Not now: the asker may come again.
    Busy,
    /// There is no such sandbox any more.
    Gone,
}

/// All of the policy: pure, synchronous, no locks, no clock.
#[must_use]
pub fn admit(phase: Phase, ask: Ask) -> Verdict {
    use Ask::{Connect, Deadline, Delete, Fork, Network, Pause, Resume, Rollback, Snapshot};
    match (phase, ask) {
        (Phase::Running, _) => Verdict::Begin,

        (Phase::Creating, Deadline | Connect) => Verdict::Wait,
        (Phase::Creating, Resume | Pause) => Verdict::Busy,
        (Phase::Creating | Phase::Resuming | Phase::RollingBack | Phase::Paused, Delete) => Verdict::Begin,

        (Phase::Snapshotting | Phase::Forking, Delete) => Verdict::Wait,
        (Phase::Snapshotting | Phase::Forking | Phase::RollingBack, Deadline | Connect | Resume) => Verdict::Wait,
        (Phase::Snapshotting | Phase::Forking | Phase::RollingBack, Pause) => Verdict::Busy,

        (Phase::Pausing, Connect | Delete) => Verdict::Wait,
        (Phase::Pausing, Pause) => Verdict::Join,
        (Phase::Pausing, Deadline | Resume) => Verdict::Busy,

        (Phase::Paused, Connect | Resume) => Verdict::Begin,
        (Phase::Paused, Pause) => Verdict::Done,
        (Phase::Paused, Deadline) => Verdict::Busy,

        (Phase::Resuming, Connect | Resume) => Verdict::Join,
        (Phase::Resuming, Deadline) => Verdict::Wait,
        (Phase::Resuming, Pause) => Verdict::Busy,

        (Phase::Deleting, Delete) => Verdict::Join,
        (Phase::Deleting | Phase::Gone, _) => Verdict::Gone,

        // What needs a machine of its own begins with one that does nothing else.
        (_, Snapshot | Fork | Rollback | Network) => Verdict::Busy,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delete_is_possible_in_every_phase_that_holds_anything() {
        for phase in Phase::ALL {
            let verdict = admit(phase, Ask::Delete);
            match phase {
                Phase::Gone => assert_eq!(verdict, Verdict::Gone),
                _ => assert!(matches!(verdict, Verdict::Begin | Verdict::Join | Verdict::Wait), "{phase:?}"),
            }
        }
    }

    #[test]
    fn nothing_revives_what_is_ending() {
        for ask in Ask::ALL.into_iter().filter(|ask| *ask != Ask::Delete) {
            for phase in [Phase::Deleting, Phase::Gone] {
                assert_eq!(admit(phase, ask), Verdict::Gone, "{ask:?}");
            }
        }
    }

    #[test]
    fn only_a_resting_sandbox_begins_anything_but_a_delete() {
        for phase in Phase::ALL {
            for ask in Ask::ALL.into_iter().filter(|ask| *ask != Ask::Delete) {
                let begins = admit(phase, ask) == Verdict::Begin;
                assert!(!begins || matches!(phase, Phase::Running | Phase::Paused), "{phase:?} {ask:?}");
            }
        }
    }

    #[test]
    fn who_waits_waits_for_something_that_ends() {
        for phase in [Phase::Running, Phase::Paused, Phase::Deleting, Phase::Gone] {
            assert!(Ask::ALL.into_iter().all(|ask| admit(phase, ask) != Verdict::Wait), "{phase:?}");
        }
    }

    #[test]
    fn the_table_above_is_the_function() {
        let text = include_str!("admission.rs");
        let rows =
            text.lines().filter_map(|line| line.strip_prefix("//! ")).skip_while(|line| !line.contains("Deadline"));
        let rows: Vec<Vec<&str>> =
            rows.take(1 + Phase::ALL.len()).map(|row| row.split_whitespace().collect()).collect();
        for (row, phase) in rows[1..].iter().zip(Phase::ALL) {
            assert_eq!(row[0], format!("{phase:?}"));
            for (told, ask) in row[1..].iter().zip(Ask::ALL) {
                assert_eq!(*told, format!("{:?}", admit(phase, ask)).to_lowercase(), "{phase:?} {ask:?}");
            }
        }
    }
}
