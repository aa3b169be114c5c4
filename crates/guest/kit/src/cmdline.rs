//! The kernel arguments that a distribution's kernel wants as a guest, whatever the VMM.
//!
//! What depends on the machine (console, clock, reboot method, PCI) is the VMM driver's to add. What each of these saves
//! is in `docs/adr/0003-guest-kernel.md`; what neither saves time nor keeps a guest up is not here.

/// In the order in which they are given, each with its reason.
const ARGUMENTS: &[(&str, &str)] = &[
    ("quiet", "each line costs port I/O, an exit of the guest"),
    ("loglevel=3", "errors still reach the serial log"),
    ("mitigations=off", "the VM is the boundary; inside it everything belongs to one sandbox"),
    ("cryptomgr.notests", "self-tests of ciphers that nobody asked for"),
    ("nowatchdog", "a vCPU that the host does not schedule looks like a lockup"),
    ("no_timer_check", "the IO-APIC timer test fails on a busy host, and with it the boot"),
    ("random.trust_cpu=on", "entropy at once; the node adds its own at every start and restore"),
];

/// The arguments as one line.
pub(crate) fn line() -> String {
    ARGUMENTS.iter().map(|(argument, _)| *argument).collect::<Vec<_>>().join(" ")
}
