//! What every VMM driver has to do. Each function is one promise of the traits, tried with a real guest; a driver's
//! tests call them all. They panic when the promise is broken.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use aenv_model::{Bytes, MachineShape};

use super::guest::{Rig, TestGuest, counted, read, wait_for, wait_for_count, wait_for_exit};
use crate::{
    AdoptError, BlankSpec, DiskLimit, DiskSpec, Flush, GuestMemory, Machine, MachineExit, MachineRecord, MachineSpec,
    OrphanEnd, RunState, Vmm, VmmError, end_orphan,
};

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
        spec.disks.push(DiskSpec { path, read_only, flush: Flush::Storage, limit: DiskLimit::default() });
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
    spec.disks.push(DiskSpec {
        path: rig.path().join("disk, 1"),
        read_only: true,
        flush: Flush::Storage,
        limit: DiskLimit::default(),
    });
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
        for waits in [false, false, true] {
            let again = MachineSpec { shape, memory_image: Some(image.clone()), ..rig.spec(guest, "count") };
            let blank = if waits { vmm.blank(blank_of(&again)).await.unwrap() } else { None };
            let machine = match blank {
                Some(blank) => blank.restore(again.clone(), &state).await.unwrap(),
                None => vmm.restore(again.clone(), &state).await.unwrap(),
            };
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

fn blank_of(spec: &MachineSpec) -> BlankSpec {
    let MachineSpec { name, shape, disks, nics, netns, work_dir, .. } = spec.clone();
    BlankSpec { name, shape, disks: disks.len(), nics, netns, work_dir }
}

/// A VMM that waits for its machine is ended, is gone when it is dropped, and is gone after a restore that failed.
pub async fn what_waits_for_a_machine_leaves_nothing(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    let Some(blank) = vmm.blank(blank_of(&rig.spec(guest, "count"))).await.unwrap() else { return };
    blank.end().await.unwrap();
    rig.assert_empty();
    let spec = rig.spec(guest, "count");
    drop(vmm.blank(blank_of(&spec)).await.unwrap());
    eventually_gone(&spec.work_dir).await;
    let spec = MachineSpec { memory_image: Some(rig.path().join("image")), ..rig.spec(guest, "count") };
    File::create(rig.path().join("image")).unwrap().set_len(spec.shape.memory.get()).unwrap();
    let blank = vmm.blank(blank_of(&spec)).await.unwrap().unwrap();
    let state = rig.path().join("state");
    std::fs::write(&state, b"this is no device state").unwrap();
    blank.restore(spec, &state).await.err().expect("restored from nonsense");
    rig.assert_empty();
}

/// Waits until no machine runs in a directory.
async fn eventually_gone(work_dir: &Path) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    while !crate::find_by_work_dir(work_dir).unwrap().is_empty() {
        assert!(tokio::time::Instant::now() < deadline, "a machine runs in {}", work_dir.display());
        tokio::time::sleep(Duration::from_millis(10)).await;
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
                disks: vec![DiskSpec {
                    path: "/nowhere/disk".into(),
                    read_only: false,
                    flush: Flush::Storage,
                    limit: DiskLimit::default(),
                }],
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

/// A machine that was forgotten can be ended by its record.
pub async fn a_forgotten_machine_is_ended_by_its_record(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    let machine = vmm.boot(rig.spec(guest, "count")).await.unwrap();
    let record = machine.record();
    drop(machine);
    assert_eq!(end_orphan(&record).await.unwrap(), OrphanEnd::Ended);
    assert_eq!(end_orphan(&record).await.unwrap(), OrphanEnd::AlreadyGone);
    rig.assert_empty();
}

/// A machine goes on whether its handle was dropped or disowned, and does for the next owner all that it did for the
/// first; more than once.
pub async fn is_adopted_after_its_handle_is_gone(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    let spec = rig.spec(guest, "count");
    let mut machine = vmm.boot(spec.clone()).await.unwrap();
    if guest.speaks() {
        wait_for(&spec.serial_log, "count 2").await;
    }
    for disown in [false, true] {
        let (record, mut exit) = (machine.record(), machine.exit());
        if disown {
            assert_eq!(machine.disown().await, record);
        } else {
            drop(machine);
        }
        let stood = counted(&spec.serial_log);
        machine = vmm.adopt(&record).await.unwrap();
        assert_eq!((machine.record(), machine.identity()), (record, vmm.identity()));
        assert_eq!(*machine.exit().borrow(), None);
        assert_eq!(machine.run_state().await.unwrap(), RunState::Running);
        if guest.speaks() {
            let silent = tokio::time::timeout(Duration::from_secs(10), exit.wait_for(Option::is_some)).await;
            assert!(silent.expect("the former handle's channel is closed").is_err());
            wait_for_count(&spec.serial_log, stood + 5).await;
        }
    }
    works_like_a_fresh_one(&*machine, &spec.serial_log, vmm, guest, &rig).await;
    rig.assert_empty();
}

/// Vcpus that a former owner stopped, and was then gone, stay stopped, and the next owner is told.
pub async fn is_adopted_with_paused_vcpus(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    let spec = rig.spec(guest, "count");
    let machine = vmm.boot(spec.clone()).await.unwrap();
    if guest.speaks() {
        wait_for(&spec.serial_log, "count 2").await;
    }
    machine.pause_vcpus().await.unwrap();
    machine.save_device_state(&rig.path().join("unfinished")).await.unwrap();
    let record = machine.disown().await;
    let machine = vmm.adopt(&record).await.unwrap();
    assert_eq!(machine.run_state().await.unwrap(), RunState::Paused);
    let before = settled_count(&spec.serial_log).await;
    tokio::time::sleep(Duration::from_millis(500)).await; // five counts of a running guest
    assert_eq!(counted(&spec.serial_log), before);
    works_like_a_fresh_one(&*machine, &spec.serial_log, vmm, guest, &rig).await;
    rig.assert_empty();
}

/// Resumes, pauses, saves, restores from what was saved, and kills.
async fn works_like_a_fresh_one(machine: &dyn Machine, log: &Path, vmm: &dyn Vmm, guest: &TestGuest, rig: &Rig) {
    machine.resume_vcpus().await.unwrap();
    assert_eq!(machine.run_state().await.unwrap(), RunState::Running);
    if guest.speaks() {
        let before = counted(log);
        wait_for_count(log, before + 5).await;
    }
    machine.pause_vcpus().await.unwrap();
    assert_eq!(machine.run_state().await.unwrap(), RunState::Paused);
    let (state, image) = (rig.path().join("adopted-state"), rig.path().join("adopted-image"));
    machine.save_device_state(&state).await.unwrap();
    let memory = machine.guest_memory().await.unwrap();
    let stood = settled_count(log).await;
    let again = MachineSpec { memory_image: Some(image.clone()), ..rig.spec(guest, "count") };
    if guest.speaks() {
        assert_eq!(memory.ranges.iter().map(|range| range.length).sum::<u64>(), again.shape.memory.get());
        copy_memory(&memory, &image, again.shape.memory);
    }
    assert_eq!(machine.kill().await.unwrap(), MachineExit::Killed);
    assert_eq!(*machine.exit().borrow(), Some(MachineExit::Killed));

    let machine = vmm.restore(again.clone(), &state).await.unwrap();
    assert_eq!(machine.run_state().await.unwrap(), RunState::Paused);
    machine.resume_vcpus().await.unwrap();
    if guest.speaks() {
        wait_for(&again.serial_log, &format!("count {}", stood + 3)).await;
    }
    machine.kill().await.unwrap();
}

/// Tells [`server_that_dies`] where to boot, and whether to pause.
const DIES_IN: &str = "AENV_TEST_OWNER_DIES_IN";
const DIES_PAUSED: &str = "AENV_TEST_OWNER_DIES_PAUSED";
/// Where it leaves the machine's record.
const LEFT_RECORD: &str = "record.json";

/// Not a promise: the server that dies, as a process of its own, in the next one. Whoever tries that gives this a test of
/// its own, which does nothing unless it is called upon.
pub async fn server_that_dies(vmm: &dyn Vmm, guest: &TestGuest) {
    let Some(dir) = std::env::var_os(DIES_IN).map(PathBuf::from) else { return };
    let spec =
        MachineSpec { work_dir: dir.clone(), serial_log: dir.join("serial.log"), ..Rig::new().spec(guest, "count") };
    let machine = vmm.boot(spec.clone()).await.unwrap();
    if guest.speaks() {
        wait_for(&spec.serial_log, "count 2").await;
    }
    if std::env::var_os(DIES_PAUSED).is_some() {
        machine.pause_vcpus().await.unwrap();
    }
    std::fs::write(dir.join(LEFT_RECORD), serde_json::to_vec(&machine.record()).unwrap()).unwrap();
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
}

/// A machine outlives a server that is killed, and the next server adopts it. `helper` is the test that calls
/// [`server_that_dies`].
pub async fn is_adopted_after_its_server_was_killed(vmm: &dyn Vmm, guest: &TestGuest, helper: &str) {
    for paused in [false, true] {
        let rig = Rig::new();
        let work_dir = rig.path().join("left");
        std::fs::create_dir(&work_dir).unwrap();
        let mut server = Command::new(std::env::current_exe().unwrap());
        server.args(["--exact", helper]).stdout(Stdio::null()).stderr(Stdio::null());
        server.env(DIES_IN, &work_dir).env("TMPDIR", rig.path()); // what it leaves goes with the rig
        if paused {
            server.env(DIES_PAUSED, "yes");
        }
        let status = tokio::task::spawn_blocking(move || server.status().unwrap()).await.unwrap();
        assert!(!status.success(), "{helper} did not die");

        let record: MachineRecord =
            serde_json::from_slice(&std::fs::read(work_dir.join(LEFT_RECORD)).unwrap()).unwrap();
        let log = work_dir.join("serial.log");
        let stood = counted(&log);
        let machine = vmm.adopt(&record).await.unwrap();
        assert_eq!(machine.record(), record);
        let state = machine.run_state().await.unwrap();
        assert_eq!(state, if paused { RunState::Paused } else { RunState::Running });
        if guest.speaks() && !paused {
            wait_for_count(&log, stood + 5).await;
        }
        works_like_a_fresh_one(&*machine, &log, vmm, guest, &rig).await;
        rig.assert_empty();
    }
}

/// The end of an adopted machine is told, as far as it can be known.
pub async fn an_adopted_machine_tells_its_end(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    let adopted = async |todo: &str| {
        let spec = rig.spec(guest, todo);
        let record = vmm.boot(spec.clone()).await.unwrap().disown().await;
        (vmm.adopt(&record).await.unwrap(), spec)
    };
    let (machine, _) = adopted("count").await;
    let pid = rustix::process::Pid::from_raw(machine.record().pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::SEGV).unwrap();
    let exit = wait_for_exit(&*machine).await;
    assert!(matches!(exit, MachineExit::Crashed(_)), "{exit:?}");
    assert_eq!(machine.kill().await.unwrap(), exit, "a late kill tells what happened");
    assert!(matches!(machine.run_state().await, Err(VmmError::Ended { .. })));
    if guest.speaks() {
        let (machine, _) = adopted("poweroff").await;
        assert_eq!(wait_for_exit(&*machine).await, MachineExit::Shutdown);
        let (machine, _) = adopted("panic").await;
        let exit = wait_for_exit(&*machine).await;
        assert!(matches!(&exit, MachineExit::Crashed(why) if why.contains("Attempted to kill init")), "{exit:?}");
        let (machine, spec) = adopted("count").await;
        wait_for(&spec.serial_log, "count 1").await;
        assert_eq!(machine.shutdown(Duration::from_secs(10)).await.unwrap(), MachineExit::Shutdown);
    }
    rig.assert_empty();
}

/// What has ended, or is another process by now, is not adopted, and each is told from the other.
pub async fn does_not_adopt_what_is_gone_or_not_ours(vmm: &dyn Vmm, guest: &TestGuest) {
    let rig = Rig::new();
    let record = vmm.boot(rig.spec(guest, "count")).await.unwrap().disown().await;
    for other in [
        MachineRecord { start_time: record.start_time + 1, ..record.clone() },
        MachineRecord { name: "other".into(), ..record.clone() },
        MachineRecord { work_dir: rig.path().join("other"), ..record.clone() },
        MachineRecord { pid: std::process::id(), ..record.clone() },
    ] {
        let error = vmm.adopt(&other).await.err().expect("adopted a stranger");
        assert!(matches!(error, AdoptError::NotOurs { .. }), "{other:?}: {error}");
    }
    let machine = vmm.adopt(&record).await.unwrap();
    assert_eq!(machine.run_state().await.unwrap(), RunState::Running, "a refusal does nothing to it");
    machine.kill().await.unwrap();
    let error = vmm.adopt(&record).await.err().expect("adopted the dead");
    assert!(matches!(error, AdoptError::Gone { .. }), "{error}");
    rig.assert_empty();
}

/// A machine that does not answer, because it hangs or has another owner, is told and left alone. `longest_call` is a
/// little more than the driver's deadline for one call.
pub async fn an_adoption_without_answer_meets_its_deadline(vmm: &dyn Vmm, guest: &TestGuest, longest_call: Duration) {
    let rig = Rig::new();
    let refused = async |record: &MachineRecord| {
        let asked = Instant::now();
        let error = vmm.adopt(record).await.err().expect("adopted what does not answer");
        assert!(matches!(error, AdoptError::Unresponsive { .. }), "{error}");
        assert!(asked.elapsed() < longest_call, "{:?}", asked.elapsed());
    };
    let owner = vmm.boot(rig.spec(guest, "count")).await.unwrap();
    let record = owner.record();
    refused(&record).await;
    owner.pause_vcpus().await.unwrap();
    let record = owner.disown().await;
    let heir = vmm.adopt(&record).await.unwrap();
    assert_eq!(heir.run_state().await.unwrap(), RunState::Paused);

    let record = heir.disown().await;
    let pid = rustix::process::Pid::from_raw(record.pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    refused(&record).await;
    refused(&MachineRecord { attachment: None, ..record.clone() }).await;
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    let machine = vmm.adopt(&record).await.unwrap();
    assert_eq!(machine.run_state().await.unwrap(), RunState::Paused);
    machine.kill().await.unwrap();
    rig.assert_empty();
}
