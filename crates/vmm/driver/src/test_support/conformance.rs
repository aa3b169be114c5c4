//! What every VMM driver has to do. Each function is one promise of the traits, tried with a real guest; a driver's
//! tests call them all. They panic when the promise is broken.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use aenv_model::{Bytes, MachineShape};

use super::guest::{Rig, TestGuest, counted, read, wait_for, wait_for_exit};
use crate::{DiskSpec, Flush, GuestMemory, Machine, MachineExit, MachineSpec, OrphanEnd, Vmm, VmmError, end_orphan};

/// A guest boots, its console is in the log, and `kill` ends it for good.
pub async fn boots_and_is_killed(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    let spec = rig.spec(guest, "count");
    let machine = vmm.boot(spec.clone()).await.unwrap();
    wait_for(&spec.serial_log, "ready").await;
    assert_eq!(machine.record().work_dir, spec.work_dir);
    assert_eq!(*machine.exit().borrow(), None);
    assert_eq!(machine.kill().await.unwrap(), MachineExit::Killed);
    assert_eq!(*machine.exit().borrow(), Some(MachineExit::Killed));
    assert_eq!(machine.kill().await.unwrap(), MachineExit::Killed, "a second kill tells the same");
    rig.assert_empty();
}

/// All vCPUs are there.
pub async fn runs_several_vcpus(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    let spec = MachineSpec { shape: MachineShape { vcpus: 2, memory: Bytes::mib(256) }, ..rig.spec(guest, "count") };
    let machine = vmm.boot(spec.clone()).await.unwrap();
    assert!(wait_for(&spec.serial_log, "ready").await.contains("cpus 2"));
    machine.kill().await.unwrap();
}

/// Disks come up in their order, and what the guest synced is in the image. Needs a guest with modules.
pub async fn disks_keep_their_order_and_their_writes(vmm: &dyn Vmm, guest: &TestGuest) {
    if !guest.has_modules() {
        return println!("skipped: AENV_TEST_INITRAMFS names no initramfs with modules");
    }
    let rig = Rig::new();
    let mut spec = rig.spec(guest, "write");
    for (index, read_only) in [false, true, false].into_iter().enumerate() {
        let path = rig.path().join(format!("disk, {index}"));
        File::create(&path).unwrap().set_len((index as u64 + 1) << 20).unwrap();
        spec.disks.push(DiskSpec { path, read_only, flush: Flush::Storage });
    }
    let machine = vmm.boot(spec.clone()).await.unwrap();
    let said = wait_for(&spec.serial_log, "written: ").await;
    for disk in ["disk vda 1024", "disk vdb 2048", "disk vdc 3072"] {
        assert!(said.contains(disk), "{said}");
    }
    wait_for(&spec.serial_log, "written: 0").await;
    let image = std::fs::read(&spec.disks[0].path).unwrap();
    assert!(image.starts_with(b"written by the guest\0"));
    machine.kill().await.unwrap();

    let mut spec = rig.spec(guest, "write");
    spec.disks.push(DiskSpec { path: rig.path().join("disk, 1"), read_only: true, flush: Flush::Storage });
    let machine = vmm.boot(spec.clone()).await.unwrap();
    let said = wait_for(&spec.serial_log, "count 1").await;
    assert!(said.contains("written: ") && !said.contains("written: 0"), "wrote to a read-only disk: {said}");
    machine.kill().await.unwrap();
}

/// A paused guest stands still; both directions may be asked for twice.
pub async fn pauses_and_resumes(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    let spec = rig.spec(guest, "count");
    let machine = vmm.boot(spec.clone()).await.unwrap();
    wait_for(&spec.serial_log, "count 3").await;
    machine.pause_vcpus().await.unwrap();
    machine.pause_vcpus().await.unwrap();
    let before = settled_count(&spec.serial_log).await;
    tokio::time::sleep(Duration::from_millis(500)).await; // five counts of a running guest
    assert_eq!(counted(&spec.serial_log), before);
    machine.resume_vcpus().await.unwrap();
    machine.resume_vcpus().await.unwrap();
    wait_for(&spec.serial_log, &format!("count {}", before + 3)).await;
    machine.kill().await.unwrap();
}

/// What was on its way to the log when the vCPUs stopped has arrived once the log rests.
async fn settled_count(log: &Path) -> u64 {
    loop {
        let before = counted(log);
        tokio::time::sleep(Duration::from_millis(200)).await;
        if counted(log) == before {
            return before;
        }
    }
}

/// Device state and memory make a second machine that goes on where the first one stood, with its vCPUs paused at
/// first, and neither writes to the image its memory comes from.
pub async fn restores_where_it_stood(vmm: &dyn Vmm, guest: &TestGuest) {
    for vcpus in [1, 2] {
        let rig = Rig::new();
        let shape = MachineShape { vcpus, memory: Bytes::mib(256) };
        let spec = MachineSpec { shape, ..rig.spec(guest, "count") };
        let machine = vmm.boot(spec.clone()).await.unwrap();
        wait_for(&spec.serial_log, "count 3").await;
        machine.pause_vcpus().await.unwrap();
        let (state, image) = (rig.path().join("state"), rig.path().join("image"));
        machine.save_device_state(&state).await.unwrap();
        let memory = machine.guest_memory().await.unwrap();
        assert_eq!(memory.ranges.iter().map(|range| range.length).sum::<u64>(), shape.memory.get());
        copy_memory(&memory, &image, shape.memory);
        let stood = settled_count(&spec.serial_log).await;
        machine.kill().await.unwrap();

        let pristine = checksum(&image);
        for _ in 0..2 {
            let again = MachineSpec { shape, memory_image: Some(image.clone()), ..rig.spec(guest, "count") };
            let machine = vmm.restore(again.clone(), &state).await.unwrap();
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert_eq!(counted(&again.serial_log), 0, "the vCPUs run before they were resumed");
            machine.resume_vcpus().await.unwrap();
            let said = wait_for(&again.serial_log, &format!("count {}", stood + 3)).await;
            assert!(!said.contains("count 1\r") && said.contains(&format!("count {}\r", stood + 1)), "{said}");
            assert_eq!(machine.guest_memory().await.unwrap().ranges.len(), memory.ranges.len());
            machine.kill().await.unwrap();
        }
        assert_eq!(checksum(&image), pristine, "a machine wrote to its memory image");
        rig.assert_empty();
    }
}

/// State that is none, or of a machine of another shape, is refused and leaves nothing behind.
pub async fn refuses_foreign_device_state(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    let state = rig.path().join("state");
    std::fs::write(&state, b"this is no device state").unwrap();
    for state in [state, rig.path().join("missing")] {
        let error = vmm.restore(rig.spec(guest, "count"), &state).await.err().expect("restored from nonsense");
        assert!(matches!(error, VmmError::Refused { .. } | VmmError::Ended { .. } | VmmError::Io { .. }), "{error}");
        rig.assert_empty();
    }
}

fn copy_memory(memory: &GuestMemory, image: &Path, size: Bytes) {
    let source = File::open(format!("/proc/{}/mem", memory.pid)).unwrap();
    let image = File::create(image).unwrap();
    image.set_len(size.get()).unwrap();
    let mut piece = vec![0; 1 << 20];
    for range in &memory.ranges {
        for at in (0..range.length).step_by(piece.len()) {
            let length = piece.len().min((range.length - at) as usize);
            source.read_exact_at(&mut piece[..length], range.host_address + at).unwrap();
            if piece[..length].iter().any(|&b| b != 0) {
                image.write_all_at(&piece[..length], range.image_offset + at).unwrap();
            }
        }
    }
}

fn checksum(file: &Path) -> u64 {
    use std::hash::Hasher;
    let mut hasher = std::hash::DefaultHasher::new();
    hasher.write(&std::fs::read(file).unwrap());
    hasher.finish()
}

/// However a guest ends, the exit tells it.
pub async fn tells_how_a_guest_ended(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    let end = async |todo: &str| {
        let machine = vmm.boot(rig.spec(guest, todo)).await.unwrap();
        wait_for_exit(&*machine).await
    };
    assert_eq!(end("poweroff").await, MachineExit::Shutdown);
    assert_eq!(end("reboot").await, MachineExit::Shutdown);
    let panicked = end("panic").await;
    assert!(matches!(&panicked, MachineExit::Crashed(why) if why.contains("Attempted to kill init")), "{panicked:?}");
    rig.assert_empty();
}

/// A VMM that dies is noticed at once, and calls end at once with an error that says so.
pub async fn notices_a_crash_at_once(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    let machine = vmm.boot(rig.spec(guest, "count")).await.unwrap();
    let pid = rustix::process::Pid::from_raw(machine.record().pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::SEGV).unwrap();
    let died = Instant::now();
    let exit = wait_for_exit(&*machine).await;
    assert!(matches!(exit, MachineExit::Crashed(_)), "{exit:?}");
    let error = machine.pause_vcpus().await.unwrap_err();
    assert!(matches!(error, VmmError::Ended { .. }), "{error}");
    assert_eq!(machine.kill().await.unwrap(), exit, "a late kill tells what happened");
    assert!(died.elapsed() < Duration::from_secs(5), "noticed after {:?}", died.elapsed());
}

/// A VMM that hangs does not hang us: calls end at their deadline, and `kill` and `shutdown` still work.
/// `longest_call` is a little more than the driver's deadline for one call.
pub async fn a_hanging_vmm_meets_deadlines(vmm: &dyn Vmm, guest: &TestGuest, longest_call: Duration) {
    let rig = Rig::new();
    let machine = vmm.boot(rig.spec(guest, "count")).await.unwrap();
    let pid = rustix::process::Pid::from_raw(machine.record().pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let asked = Instant::now();
    let error = machine.pause_vcpus().await.unwrap_err();
    assert!(matches!(error, VmmError::Deadline { .. }), "{error}");
    assert!(asked.elapsed() < longest_call, "{:?}", asked.elapsed());
    let asked = Instant::now();
    assert_eq!(machine.shutdown(Duration::from_millis(300)).await.unwrap(), MachineExit::Killed);
    assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
    rig.assert_empty();
}

/// A request to power off reaches a guest that runs or is paused, without any help of its user space; one that does
/// not heed it is killed when its grace is over.
pub async fn shuts_down_with_grace(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    for pause in [false, true] {
        let spec = rig.spec(guest, "count");
        let machine = vmm.boot(spec.clone()).await.unwrap();
        wait_for(&spec.serial_log, "count 1").await;
        if pause {
            machine.pause_vcpus().await.unwrap();
        }
        let exit = machine.shutdown(Duration::from_secs(10)).await.unwrap();
        assert_eq!(exit, MachineExit::Shutdown, "paused: {pause}; {}", read(&spec.serial_log));
    }
    // A guest that has only begun to boot hears nothing yet.
    let machine = vmm.boot(rig.spec(guest, "count")).await.unwrap();
    let asked = Instant::now();
    let exit = machine.shutdown(Duration::from_millis(100)).await.unwrap();
    assert_eq!(exit, MachineExit::Killed);
    assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
    rig.assert_empty();
}

/// A guest that writes to its console without end meets the log's limit, and goes on.
pub async fn the_serial_log_is_bounded(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    let spec = MachineSpec { serial_log_limit: Bytes::kib(64), ..rig.spec(guest, "flood") };
    let machine = vmm.boot(spec.clone()).await.unwrap();
    wait_for(&spec.serial_log, "flood").await;
    let (enough, mut largest, mut shrunk) = (Instant::now() + Duration::from_secs(60), 0, 0);
    while shrunk < 3 {
        let size = std::fs::metadata(&spec.serial_log).unwrap().len();
        shrunk += u32::from(size < largest);
        largest = if size < largest { 0 } else { size };
        assert!(size <= 64 << 10, "{size}");
        assert!(Instant::now() < enough, "the log reached its limit {shrunk} times only");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    machine.kill().await.unwrap();
}

/// A spec that cannot work is an error that says why, and nothing is left.
pub async fn a_failed_boot_leaves_nothing(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    let good = || rig.spec(guest, "count");
    let bad: [(&str, MachineSpec); 3] = [
        ("/nowhere/kernel", MachineSpec { kernel: "/nowhere/kernel".into(), ..good() }),
        ("/nowhere/netns", MachineSpec { netns: Some("/nowhere/netns".into()), ..good() }),
        (
            "/nowhere/disk",
            MachineSpec {
                disks: vec![DiskSpec { path: "/nowhere/disk".into(), read_only: false, flush: Flush::Storage }],
                ..good()
            },
        ),
    ];
    for (named, spec) in bad {
        let error = vmm.boot(spec).await.err().expect("booted from nothing").to_string();
        assert!(error.contains(named), "{error}");
        rig.assert_empty();
    }
}

/// A boot whose caller went away leaves nothing.
pub async fn an_abandoned_boot_leaves_nothing(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    for millis in [0, 5, 20] {
        let _ = tokio::time::timeout(Duration::from_millis(millis), vmm.boot(rig.spec(guest, "count"))).await.map(
            |machine| {
                // Quicker than we thought: then it is a machine like any other.
                let pid = rustix::process::Pid::from_raw(machine.unwrap().record().pid.cast_signed()).unwrap();
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            },
        );
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    while !crate::find_by_work_dir(rig.path()).unwrap().is_empty() {
        assert!(Instant::now() < deadline, "machines are left");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A machine that was forgotten goes on and can be ended by its record.
pub async fn a_forgotten_machine_goes_on_until_it_is_ended(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    let spec = rig.spec(guest, "count");
    let machine = vmm.boot(spec.clone()).await.unwrap();
    let record = machine.record();
    let machine: Box<dyn Machine> = machine;
    drop(machine);
    wait_for(&spec.serial_log, "count 2").await;
    assert_eq!(end_orphan(&record).await.unwrap(), OrphanEnd::Ended);
    assert_eq!(end_orphan(&record).await.unwrap(), OrphanEnd::AlreadyGone);
    rig.assert_empty();
}
