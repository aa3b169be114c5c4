//! QEMU keeps the promises of a VMM. Each test boots real guests: it needs `qemu-system-x86_64`, a C compiler and
//! `AENV_TEST_KERNEL` (and `AENV_TEST_INITRAMFS` for disks), and says "skipped" without.

use std::time::Duration;

use aenv_vmm_driver::test_support::{TestGuest, conformance};
use aenv_vmm_qemu::{AccelChoice, Qemu, QemuConfig};

const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// The accelerator to test: `kvm` if `AENV_TEST_ACCEL` says so, else the emulated CPU, which works everywhere.
async fn qemu_and_guest() -> Option<(Qemu, TestGuest)> {
    let guest = match TestGuest::from_environment() {
        Ok(guest) => guest,
        Err(why) => {
            println!("skipped: {why}");
            return None;
        }
    };
    let accel = match std::env::var("AENV_TEST_ACCEL").as_deref() {
        Ok("kvm") => AccelChoice::Kvm,
        _ => AccelChoice::Tcg,
    };
    let cache = std::env::temp_dir().join("aenv-test-kvm.json");
    let config = QemuConfig { accel, call_timeout: CALL_TIMEOUT, ..QemuConfig::new(cache) };
    match Qemu::probe(config, guest.kernel(), guest.initramfs()).await {
        Ok(qemu) => Some((qemu, guest)),
        Err(why) => {
            println!("skipped: {why}");
            None
        }
    }
}

macro_rules! promise {
    ($($name:ident $(($argument:expr))?),* $(,)?) => {
        $(
            #[tokio::test]
            async fn $name() {
                let Some((qemu, guest)) = qemu_and_guest().await else { return };
                conformance::$name(&qemu, &guest $(, $argument)?).await;
            }
        )*
    };
}

promise!(
    boots_and_is_killed,
    runs_several_vcpus,
    disks_keep_their_order_and_their_writes,
    pauses_and_resumes,
    restores_where_it_stood,
    what_waits_for_a_machine_leaves_nothing,
    refuses_foreign_device_state,
    tells_how_a_guest_ended,
    notices_a_crash_at_once,
    a_hanging_vmm_meets_deadlines(CALL_TIMEOUT + Duration::from_secs(2)),
    shuts_down_with_grace,
    the_serial_log_is_bounded,
    a_failed_boot_leaves_nothing,
    an_abandoned_boot_leaves_nothing,
    a_forgotten_machine_is_ended_by_its_record,
    server_that_dies,
    is_adopted_after_its_handle_is_gone,
    is_adopted_with_paused_vcpus,
    is_adopted_after_its_server_was_killed("server_that_dies"),
    an_adopted_machine_tells_its_end,
    does_not_adopt_what_is_gone_or_not_ours,
    an_adoption_without_answer_meets_its_deadline(CALL_TIMEOUT + Duration::from_secs(2)),
);
