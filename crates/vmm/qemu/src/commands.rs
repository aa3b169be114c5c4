//! The QMP commands and events we use, as types. Reference: QEMU's "QMP Reference Manual".

use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A QMP command: its name, its arguments (the value itself) and its answer.
pub(crate) trait Command: Serialize + Sync {
    const NAME: &'static str;
    type Reply: DeserializeOwned;
}

/// An answer without content: `{}`.
#[derive(Debug, Deserialize)]
pub(crate) struct Done {}

macro_rules! command {
    ($(#[$doc:meta])* $name:ident $(<$life:lifetime>)? = $text:literal { $($field:ident: $type:ty),* } -> $reply:ty) => {
        $(#[$doc])*
        #[derive(Debug, Serialize)]
        #[serde(rename_all = "kebab-case")]
        pub(crate) struct $name $(<$life>)? { $(pub(crate) $field: $type),* }

        impl $(<$life>)? Command for $name $(<$life>)? {
            const NAME: &'static str = $text;
            type Reply = $reply;
        }
    };
}

command!(
    /// Ends the negotiation; must be the first command.
    QmpCapabilities = "qmp_capabilities" {} -> Done
);
command!(
    /// Stops the vCPUs; answers after block I/O has drained and disks are flushed.
    Stop = "stop" {} -> Done
);
command!(
    /// Lets the vCPUs run.
    Cont = "cont" {} -> Done
);
command!(
    /// What the vCPUs do.
    QueryStatus = "query-status" {} -> Status
);
command!(
    /// Presses the ACPI power button.
    SystemPowerdown = "system_powerdown" {} -> Done
);
command!(
    /// Sends a break to a serial port.
    ChardevSendBreak<'a> = "chardev-send-break" { id: &'a str } -> Done
);
command!(
    /// Writes the device state, without memory and disks. The name is history: it needs no Xen.
    XenSaveDevicesState<'a> = "xen-save-devices-state" { filename: &'a Path, live: bool } -> Done
);
command!(
    /// Names the descriptor sent along with the command.
    Getfd<'a> = "getfd" { fdname: &'a str } -> Done
);
command!(
    /// Switches migration features.
    MigrateSetCapabilities<'a> = "migrate-set-capabilities" { capabilities: &'a [MigrationCapability] } -> Done
);
command!(
    /// Starts to read the device state from `fd:NAME`; its end is told by [`Event::Migration`].
    MigrateIncoming<'a> = "migrate-incoming" { uri: &'a str } -> Done
);
command!(
    /// Sets a property of an object.
    QomSet<'a> = "qom-set" { path: &'a str, property: &'a str, value: &'a str } -> Done
);
command!(
    /// Makes the machine that was waited with.
    ExitPreconfig = "x-exit-preconfig" {} -> Done
);

/// Adds an object.
#[derive(Debug, Serialize)]
pub(crate) struct ObjectAdd(pub(crate) Value);

impl Command for ObjectAdd {
    const NAME: &'static str = "object-add";
    type Reply = Done;
}

/// Adds what is behind a disk.
#[derive(Debug, Serialize)]
pub(crate) struct BlockdevAdd(pub(crate) Value);

impl Command for BlockdevAdd {
    const NAME: &'static str = "blockdev-add";
    type Reply = Done;
}

command!(
    /// How the migration stands, with the reason if it failed.
    QueryMigrate = "query-migrate" {} -> MigrationInfo
);

/// QEMU's run state; `running` is true in one of them only.
#[derive(Debug, Deserialize)]
pub(crate) struct Status {
    pub(crate) running: bool,
    /// The state's name: `paused`, `prelaunch`, `inmigrate`, `internal-error`, …
    pub(crate) status: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct MigrationCapability {
    pub(crate) capability: &'static str,
    pub(crate) state: bool,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct MigrationInfo {
    pub(crate) error_desc: Option<String>,
}

/// What QEMU says by itself, as far as we listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// The machine is going down; with `-no-reboot` a reset is one way to.
    Shutdown(ShutdownReason),
    /// The guest's kernel told that it panicked.
    GuestPanicked,
    /// A migration (for us: a restore) got on.
    Migration(MigrationStatus),
    /// Reading or writing a disk image failed; the guest got an I/O error.
    BlockIoError(BlockIoError),
}

impl Event {
    /// `None`: not one we listen to, or of an unknown form.
    pub(crate) fn parse(name: &str, data: Value) -> Option<Self> {
        #[derive(Deserialize)]
        struct Shutdown {
            reason: ShutdownReason,
        }
        #[derive(Deserialize)]
        struct Migration {
            status: MigrationStatus,
        }
        match name {
            "SHUTDOWN" => Shutdown::deserialize(data).ok().map(|event| Self::Shutdown(event.reason)),
            "GUEST_PANICKED" => Some(Self::GuestPanicked),
            "MIGRATION" => Migration::deserialize(data).ok().map(|event| Self::Migration(event.status)),
            "BLOCK_IO_ERROR" => BlockIoError::deserialize(data).ok().map(Self::BlockIoError),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ShutdownReason {
    /// The guest powered off.
    GuestShutdown,
    /// The guest rebooted, or its kernel panicked and then rebooted.
    GuestReset,
    /// The guest's kernel told that it panicked.
    GuestPanic,
    /// The command `quit`.
    HostQmpQuit,
    /// A signal to the process.
    HostSignal,
    /// Something else, or new.
    #[serde(other)]
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MigrationStatus {
    Completed,
    Failed,
    /// Under way.
    #[serde(other)]
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct BlockIoError {
    #[serde(default)]
    pub(crate) node_name: String,
    pub(crate) operation: String,
    #[serde(default)]
    pub(crate) nospace: bool,
    #[serde(default)]
    pub(crate) reason: String,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn commands_have_the_arguments_qemu_expects() {
        let command = XenSaveDevicesState { filename: Path::new("/w/state"), live: false };
        assert_eq!(serde_json::to_value(command).unwrap(), json!({"filename": "/w/state", "live": false}));
        assert_eq!(serde_json::to_value(Stop {}).unwrap(), json!({}));
    }

    #[test]
    fn events_are_understood_with_more_fields_and_values_than_we_know() {
        let shutdown = |reason: &str| Event::parse("SHUTDOWN", json!({"guest": true, "reason": reason}));
        assert_eq!(shutdown("guest-reset"), Some(Event::Shutdown(ShutdownReason::GuestReset)));
        assert_eq!(shutdown("subsystem-reset"), Some(Event::Shutdown(ShutdownReason::Other)));
        assert_eq!(
            Event::parse("MIGRATION", json!({"status": "completed"})),
            Some(Event::Migration(MigrationStatus::Completed))
        );
        let error = json!({"device": "", "node-name": "disk0", "operation": "write", "action": "report",
                           "nospace": true, "reason": "No space left on device"});
        assert!(matches!(Event::parse("BLOCK_IO_ERROR", error), Some(Event::BlockIoError(e)) if e.nospace));
        assert_eq!(Event::parse("RTC_CHANGE", json!({"offset": 1})), None);
    }
}
