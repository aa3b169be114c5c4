//! Which process is which machine: how one is recognised after a restart of ours.
//!
//! Two variables in the environment of a VMM process carry the machine's name and work dir. They are read back from
//! `/proc/PID/environ`, exactly and for any VMM, whatever the syntax of its options; with the start time they rule
//! out a reused pid. They also find a machine whose record was never written because the server died in between.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use aenv_model::Bytes;
use serde::{Deserialize, Serialize};

use crate::VmmIdentity;

/// Environment variable with the machine's name.
pub(crate) const NAME_MARK: &str = "AENV_MACHINE_NAME";
/// Environment variable with the machine's work dir.
pub(crate) const WORK_DIR_MARK: &str = "AENV_MACHINE_WORK_DIR";

/// Identity of a VMM process that outlives ours: a pid alone may have been reused, so its start time, name and work
/// dir are checked too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineRecord {
    /// The machine's name, as in its environment and command line.
    pub name: String,
    /// Process id in our pid namespace.
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`: clock ticks after boot.
    pub start_time: u64,
    /// The machine's private directory, as in its environment.
    pub work_dir: PathBuf,
    /// What [`Vmm::adopt`](crate::Vmm::adopt) needs beyond the process. `None` for a process that was merely found: its
    /// environment is the VMM's own to change, and a VMM that its guest took over must not name files to us.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attachment: Option<Attachment>,
}

/// What surrounds a machine's process, as its spec said when it was started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The VMM that runs; one that is started today may be another.
    pub vmm: VmmIdentity,
    /// The serial console's log.
    pub serial_log: PathBuf,
    /// Most bytes the serial log may occupy.
    pub serial_log_limit: Bytes,
    /// The image guest memory is a private mapping of.
    pub memory_image: PathBuf,
}

impl MachineRecord {
    /// Whether both mean the same process of the same machine, whatever else they tell.
    #[must_use]
    pub fn is_same_process(&self, other: &Self) -> bool {
        let identity = |record: &Self| (record.pid, record.start_time);
        identity(self) == identity(other) && self.name == other.name && self.work_dir == other.work_dir
    }
}

/// What a pid turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Sighting {
    /// No process, or one that ended and only waits to be reaped.
    Gone,
    /// A live process that is no machine of ours.
    Stranger,
    /// A live machine.
    Machine(MachineRecord),
}

/// Looks at a pid. To rule out that it is reused between this look and an action, hold a pidfd opened before.
pub(crate) fn look_at(pid: u32) -> io::Result<Sighting> {
    let Some(stat) = read(pid, "stat")? else { return Ok(Sighting::Gone) };
    let Some(stat) = Stat::parse(&stat) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "/proc/PID/stat has an unknown form"));
    };
    if stat.ended {
        return Ok(Sighting::Gone);
    }
    let Some(environ) = read(pid, "environ")? else { return Ok(Sighting::Gone) };
    let (Some(name), Some(work_dir)) = (variable(&environ, NAME_MARK), variable(&environ, WORK_DIR_MARK)) else {
        return Ok(Sighting::Stranger);
    };
    Ok(Sighting::Machine(MachineRecord {
        name: String::from_utf8_lossy(name).into_owned(),
        pid,
        start_time: stat.start_time,
        work_dir: PathBuf::from(OsStr::from_bytes(work_dir)),
        attachment: None,
    }))
}

/// Start time of a live process, `None` when there is none.
pub(crate) fn start_time(pid: u32) -> io::Result<Option<u64>> {
    Ok(read(pid, "stat")?.as_deref().and_then(Stat::parse).map(|stat| stat.start_time))
}

/// All live machines whose work dir lies under `directory`, recorded or not. Compares paths as text: pass the
/// directory as the machines' specs spelled it.
///
/// Blocking: reads two files of every process (about 10 ms a thousand processes).
/// Errors: `/proc` cannot be listed. A process that vanishes or may not be looked at is skipped.
pub fn find_by_work_dir(directory: &Path) -> io::Result<Vec<MachineRecord>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        match look_at(pid) {
            Ok(Sighting::Machine(record)) if record.work_dir.starts_with(directory) => found.push(record),
            Ok(_) => {}
            // Not readable for us: then it is not ours either, for we start machines under our own user.
            Err(_) => {}
        }
    }
    Ok(found)
}

/// `/proc/PID/<file>`; `None` when the process is gone.
fn read(pid: u32, file: &str) -> io::Result<Option<Vec<u8>>> {
    match std::fs::read(format!("/proc/{pid}/{file}")) {
        Ok(bytes) => Ok(Some(bytes)),
        // A process that ends while it is read answers ESRCH.
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(nix::libc::ESRCH) => Ok(None),
        Err(e) => Err(e),
    }
}

fn variable<'a>(environ: &'a [u8], name: &str) -> Option<&'a [u8]> {
    environ.split(|&b| b == 0).find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
}

struct Stat {
    ended: bool,
    start_time: u64,
}

impl Stat {
    /// The command name, field 2, may hold anything, blanks and `)` included: the fields after its last `)` are safe.
    fn parse(stat: &[u8]) -> Option<Self> {
        let after_name = stat.iter().rposition(|&b| b == b')')? + 1;
        let mut fields = std::str::from_utf8(stat.get(after_name..)?).ok()?.split_ascii_whitespace();
        let state = fields.next()?; // field 3
        let start_time = fields.nth(18)?.parse().ok()?; // field 22
        Some(Self { ended: matches!(state, "Z" | "X" | "x"), start_time })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_name_with_parentheses_does_not_shift_the_fields() {
        let line = b"42 (a) b (c)) Z 1 42 42 0 -1 4194304 1 0 0 0 1 2 3 4 20 0 1 0 777 8 9\n";
        let stat = Stat::parse(line).unwrap();
        assert!(stat.ended);
        assert_eq!(stat.start_time, 777);
    }

    #[test]
    fn a_process_without_marks_is_a_stranger_and_a_free_pid_is_gone() {
        assert_eq!(look_at(std::process::id()).unwrap(), Sighting::Stranger);
        assert_eq!(look_at(u32::MAX >> 1).unwrap(), Sighting::Gone);
    }

    #[test]
    fn a_record_without_attachment_is_the_same_process_as_one_with_it() {
        let found = MachineRecord { name: "a".into(), pid: 7, start_time: 8, work_dir: "/w".into(), attachment: None };
        let attachment = Attachment {
            vmm: VmmIdentity { kind: crate::VmmKind::QemuKvm, version: "1".into() },
            serial_log: "/w/serial.log".into(),
            serial_log_limit: Bytes::mib(1),
            memory_image: "/w/memory".into(),
        };
        let written = MachineRecord { attachment: Some(attachment), ..found.clone() };
        assert!(found.is_same_process(&written));
        assert!(!found.is_same_process(&MachineRecord { start_time: 9, ..written }));
    }

    #[test]
    fn a_variable_is_matched_by_its_whole_name() {
        let environ = b"XAENV_MACHINE_NAME=no\0AENV_MACHINE_NAME=box\0";
        assert_eq!(variable(environ, NAME_MARK), Some(&b"box"[..]));
        assert_eq!(variable(environ, WORK_DIR_MARK), None);
    }
}
