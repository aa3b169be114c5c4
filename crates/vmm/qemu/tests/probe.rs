//! The decision between KVM and the emulated CPU, on whatever host this is.

use std::time::{Duration, Instant};

use aenv_vmm_driver::test_support::TestGuest;
use aenv_vmm_driver::{Vmm, VmmKind, find_by_work_dir};
use aenv_vmm_qemu::{AccelChoice, Qemu, QemuConfig};

#[tokio::test]
async fn kvm_is_used_only_where_a_guest_boots_with_it_and_the_trial_is_made_once() {
    let guest = match TestGuest::from_environment() {
        Ok(guest) => guest,
        Err(why) => return println!("skipped: {why}"),
    };
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("kvm.json");
    let config = QemuConfig { probe_timeout: Duration::from_secs(3), ..QemuConfig::new(cache.clone()) };
    let probe = |accel| Qemu::probe(QemuConfig { accel, ..config.clone() }, guest.kernel(), guest.initramfs());
    if let Err(why) = probe(AccelChoice::Tcg).await {
        return println!("skipped: {why}");
    }

    let first = probe(AccelChoice::Auto).await.unwrap();
    println!("{:?}, emulated because: {:?}", first.identity(), first.why_emulated());
    assert_eq!(first.why_emulated().is_none(), first.identity().kind == VmmKind::QemuKvm);
    let asked = Instant::now();
    let second = probe(AccelChoice::Auto).await.unwrap();
    assert_eq!((second.identity(), second.why_emulated()), (first.identity(), first.why_emulated()));
    assert!(asked.elapsed() < Duration::from_secs(2), "tried again");

    match probe(AccelChoice::Kvm).await {
        Ok(qemu) => assert_eq!(qemu.identity().kind, VmmKind::QemuKvm),
        Err(error) => {
            assert_eq!(first.identity().kind, VmmKind::QemuTcg);
            let text = error.to_string();
            assert!(text.contains("KVM is demanded") && text.contains(first.why_emulated().unwrap()), "{text}");
        }
    }
    assert_eq!(find_by_work_dir(dir.path()).unwrap(), []);
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name == "kvm.json"), "{left:?}");
}
