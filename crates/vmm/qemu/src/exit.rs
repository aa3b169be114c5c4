//! Why a machine ended, from all that is known about it.

use aenv_vmm_driver::{MachineExit, ProcessEnd};

use crate::commands::ShutdownReason;
use crate::qmp::Notices;

/// What is known once a QEMU process has ended.
#[derive(Debug)]
pub(crate) struct Evidence<'a> {
    /// We sent the kill.
    pub(crate) killed: bool,
    pub(crate) end: ProcessEnd,
    pub(crate) notices: &'a Notices,
    /// A kernel panic on the console, among the newest output.
    pub(crate) panic: Option<String>,
    /// QEMU's own newest output.
    pub(crate) last_words: String,
}

/// A guest that reboots ends, too (`-no-reboot`): a sandbox's machine has one life. A kernel panic looks like a reboot
/// (`panic=-1`) and is told apart by the console.
pub(crate) fn classify(evidence: Evidence<'_>) -> MachineExit {
    let Evidence { killed, end, notices, panic, last_words } = evidence;
    let with_words = |what: String| match last_words.as_str() {
        "" => what,
        words => format!("{what}; its last output: {words}"),
    };
    match notices.shutdown {
        Some(ShutdownReason::GuestPanic | ShutdownReason::GuestReset) if panic.is_some() || notices.panicked => {
            MachineExit::Crashed(panic.unwrap_or_else(|| "the guest's kernel panicked".into()))
        }
        Some(ShutdownReason::GuestShutdown | ShutdownReason::GuestReset | ShutdownReason::HostQmpQuit)
            if end.may_be_success() =>
        {
            MachineExit::Shutdown
        }
        _ if killed => MachineExit::Killed,
        Some(ShutdownReason::HostSignal) => MachineExit::Crashed(with_words("QEMU was ended by a signal".into())),
        _ if end == ProcessEnd::Unknown => MachineExit::Crashed(with_words("QEMU ended for an unknown reason".into())),
        _ => MachineExit::Crashed(with_words(format!("QEMU ended by itself ({end})"))),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    fn exit(reason: Option<ShutdownReason>, killed: bool, status: i32, panic: Option<&str>) -> MachineExit {
        classify(Evidence {
            killed,
            end: ProcessEnd::Status(ExitStatus::from_raw(status)),
            notices: &Notices { shutdown: reason, ..Notices::default() },
            panic: panic.map(str::to_owned),
            last_words: "qemu: oops".into(),
        })
    }

    #[test]
    fn every_way_to_end_has_its_reason() {
        use ShutdownReason::{GuestReset, GuestShutdown, HostSignal};
        assert_eq!(exit(Some(GuestShutdown), false, 0, None), MachineExit::Shutdown);
        assert_eq!(exit(Some(GuestShutdown), false, 0, Some("forged by a user")), MachineExit::Shutdown);
        assert_eq!(exit(Some(GuestReset), false, 0, None), MachineExit::Shutdown);
        assert_eq!(exit(Some(GuestReset), false, 0, Some("panic: x")), MachineExit::Crashed("panic: x".into()));
        assert_eq!(exit(None, true, 9, None), MachineExit::Killed);
        assert_eq!(exit(Some(GuestShutdown), true, 0, None), MachineExit::Shutdown, "it was quicker than the kill");
        for (reason, status) in [(None, 9), (None, 11), (None, 1 << 8), (Some(HostSignal), 0), (None, 0)] {
            let MachineExit::Crashed(why) = exit(reason, false, status, None) else { panic!("{reason:?} {status}") };
            assert!(why.contains("oops"), "{why}");
        }
    }
}
