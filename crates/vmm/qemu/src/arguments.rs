//! The command line of a machine.
//!
//! The machine's form is part of what a snapshot depends on: device state loads only into a machine with the same
//! options, devices and slots. Whatever changes here makes old snapshots unusable, and counts [`FORM`] up.

use std::ffi::OsString;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use aenv_model::MachineShape;
use aenv_vmm_driver::{BlankSpec, DiskLimit, DiskSpec, Flush, MachineSpec, NicSpec, VmmError};
use serde_json::{Value, json};

/// Number of the machine's form.
pub(crate) const FORM: u32 = 2;
/// Id of the serial port's character device.
pub(crate) const SERIAL: &str = "serial";
/// Id of the object that is guest memory.
pub(crate) const MEMORY: &str = "memory";
/// The virtio-mmio transports of a microvm with ACPI that work. There are 24, one for each line of the second IOAPIC,
/// but QEMU's emulated IOAPIC takes line 0 for the timer's, as on the first one: interrupts of transport 0 are lost.
const SLOTS: std::ops::RangeInclusive<usize> = 1..=23;
/// The first of them is the entropy device's.
const FOR_DISKS_AND_NICS: usize = *SLOTS.end() - *SLOTS.start();
/// Size of the cache of translated code, MiB. Only what is used becomes resident; QEMU's own bound, 1 GiB, would let
/// one busy guest take as much as several others have for memory. A Python process and its kernel translate to about
/// 40 MiB.
const TB_CACHE_MIB: u32 = 128;

/// How guest code runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accel {
    /// Hardware virtualisation.
    Kvm,
    /// Emulation.
    Tcg {
        /// The host's time-stamp counter, kHz: the guest's runs at the same rate.
        tsc_khz: Option<u64>,
    },
}

/// Numbers of the inherited listening sockets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Listeners {
    pub(crate) qmp: i32,
    pub(crate) serial: i32,
}

/// Builds the command line. `incoming`: the machine waits for device state instead of booting; either way its vCPUs
/// are paused at first.
///
/// Errors: a machine with more devices than slots, a path that is not UTF-8, a disk that is not there.
pub(crate) fn arguments(
    spec: &MachineSpec,
    memory_image: &Path,
    accel: Accel,
    listeners: Listeners,
    incoming: bool,
) -> Result<Vec<OsString>, VmmError> {
    let refused = |detail: String| VmmError::Refused { operation: "machine spec", detail };
    if spec.disks.len() + spec.nics.len() > FOR_DISKS_AND_NICS {
        return Err(refused(format!(
            "{} disks and {} network devices, but a microvm has slots for {FOR_DISKS_AND_NICS} together",
            spec.disks.len(),
            spec.nics.len()
        )));
    }
    let mut args = Arguments::default();
    args.frame(&spec.name, spec.shape, accel, &format!(",memory-backend={MEMORY}"));
    args.json("-object", &memory_backend(spec.shape, memory_image)?);
    args.surroundings(listeners);
    args.option("-kernel", &spec.kernel);
    args.option("-initrd", &spec.initramfs);
    args.option("-append", kernel_command_line(&spec.cmdline, accel));
    for (index, disk) in spec.disks.iter().enumerate() {
        let DiskBackend { image, limits, throttle } = disk_backend(index, disk)?;
        args.json("-blockdev", &image);
        args.json("-object", &limits);
        args.json("-blockdev", &throttle);
        args.disk(index);
    }
    for (index, nic) in spec.nics.iter().enumerate() {
        args.nic(spec.disks.len() + index, index, nic)?;
    }
    args.entropy();
    if incoming {
        args.option("-incoming", "defer");
    }
    Ok(args.0)
}

/// The command line of a machine to be, which waits for its memory, the insides of its disks, and its device state. It has
/// no kernel: what is restored has loaded its own long ago.
pub(crate) fn blank_arguments(spec: &BlankSpec, accel: Accel, listeners: Listeners) -> Result<Vec<OsString>, VmmError> {
    let mut args = Arguments::default();
    args.frame(&spec.name, spec.shape, accel, "");
    args.surroundings(listeners);
    (0..spec.disks).for_each(|index| args.disk(index));
    for (index, nic) in spec.nics.iter().enumerate() {
        args.nic(spec.disks + index, index, nic)?;
    }
    args.entropy();
    args.option("-incoming", "defer");
    args.flag("-preconfig");
    Ok(args.0)
}

/// The object that is guest memory. Private: what the guest writes never reaches the image, so that any number of machines
/// can share it. No balloon device beside this: to give back memory, QEMU punches holes into the image's file, private or
/// not.
pub(crate) fn memory_backend(shape: MachineShape, image: &Path) -> Result<Value, VmmError> {
    Ok(json!({
        "qom-type": "memory-backend-file", "id": MEMORY, "size": shape.memory.get(), "mem-path": utf8(image)?, "share": false,
    }))
}

/// What is behind a disk: an image, limits, and the image within the limits.
pub(crate) struct DiskBackend {
    pub(crate) image: Value,
    pub(crate) limits: Value,
    pub(crate) throttle: Value,
}

/// Writes go to the host's page cache; a flush of the guest syncs the image (`fdatasync`) if the disk's spec wants that. An
/// I/O error, a full host disk included, is the guest's to see: QEMU's own way, to stop the machine when there is no space,
/// would leave a sandbox hanging without a word.
pub(crate) fn disk_backend(index: usize, disk: &DiskSpec) -> Result<DiskBackend, VmmError> {
    let io_error = |source| VmmError::Io { operation: "look at disk", path: disk.path.clone(), source };
    let kind = std::fs::metadata(&disk.path).map_err(io_error)?.file_type();
    let driver = if kind.is_block_device() { "host_device" } else { "file" };
    let (node, group) = (format!("disk{index}"), format!("disk{index}-limits"));
    let cache = json!({"direct": false, "no-flush": disk.flush == Flush::PageCache});
    Ok(DiskBackend {
        image: json!({
            "driver": "raw", "node-name": node, "read-only": disk.read_only, "discard": "unmap",
            "cache": cache,
            "file": {
                "driver": driver, "filename": utf8(&disk.path)?, "aio": "threads", "discard": "unmap",
                "cache": cache,
            },
        }),
        // Always there, with or without limits: they may be others when the machine is restored.
        limits: throttle_group(&group, disk.limit),
        throttle: json!({
            "driver": "throttle", "node-name": throttled(index), "throttle-group": group, "file": node,
            "read-only": disk.read_only, "discard": "unmap", "cache": cache,
        }),
    })
}

/// The node that a disk's device uses.
fn throttled(disk: usize) -> String {
    format!("disk{disk}-throttle")
}

/// Ours first, for of two contradicting words the kernel takes the later one.
fn kernel_command_line(given: &str, accel: Accel) -> String {
    // reboot=t: a triple fault is the one way to reset that needs no device; panic=-1: a panic is an exit, at once.
    // mitigations=off: the guest's user and its kernel are one trust domain, the machine is the boundary.
    let mut line = "console=ttyS0 reboot=t panic=-1 mitigations=off quiet loglevel=3 cryptomgr.notests".to_owned();
    if let Accel::Tcg { tsc_khz } = accel {
        // On a busy host an emulated timer is late: the tests and watchdogs that panic or hang because of that are of
        // no use. The same goes for the calibration of the TSC: it fails now and then, or never ends (6.12).
        line.push_str(" no_timer_check nowatchdog");
        // Translated code is found again by its address. With randomised addresses every process is translated afresh,
        // which makes a fork and exec five times as dear (33 ms against 6). The machine is the boundary, not a guess
        // about addresses.
        line.push_str(" norandmaps");
        // QEMU before 8.0 emulates cmpxchg16b with wrong flags: an interrupt right after it restores garbage (direction
        // flag, trap flag, …) and the guest kernel crashes. Its allocator is the great user of that instruction. Programs
        // still see it in CPUID, since distributions built for x86-64-v2 do not start without.
        line.push_str(" clearcpuid=cx16");
        if let Some(khz) = tsc_khz {
            line.push_str(&format!(" tsc_early_khz={khz} tsc=reliable"));
        }
    }
    if !given.is_empty() {
        line.push(' ');
        line.push_str(given);
    }
    line
}

/// The bus of the device with this number: disks first, then network devices. From the last slot down, for QEMU's ACPI
/// tables list the slots in that order, and Linux names disks in the order of the tables.
fn bus(device: usize) -> String {
    format!("virtio-mmio-bus.{}", SLOTS.end() - device)
}

fn utf8(path: &Path) -> Result<&str, VmmError> {
    path.to_str().ok_or_else(|| VmmError::Refused {
        operation: "machine spec",
        detail: format!("path {} is not UTF-8", path.display()),
    })
}

/// Limits as QEMU takes them: a leaky bucket that leaks at the sustained rate and holds the burst on top of a second's worth.
fn throttle_group(id: &str, limit: DiskLimit) -> Value {
    /// `THROTTLE_VALUE_MAX`: QEMU refuses more, and no disk is faster.
    const MOST: u64 = 1_000_000_000_000_000;
    let mut limits = serde_json::Map::new();
    for (name, rate) in [("bps-total", limit.bandwidth), ("iops-total", limit.operations)] {
        if rate.per_second > 0 {
            let sustained = rate.per_second.min(MOST);
            limits.insert(name.to_owned(), sustained.into());
            if rate.burst > 0 {
                limits.insert(format!("{name}-max"), sustained.saturating_add(rate.burst).min(MOST).into());
            }
        }
    }
    json!({"qom-type": "throttle-group", "id": id, "limits": limits})
}

#[derive(Default)]
struct Arguments(Vec<OsString>);

impl Arguments {
    fn flag(&mut self, flag: &str) {
        self.0.push(flag.into());
    }

    fn option(&mut self, name: &str, value: impl Into<OsString>) {
        self.0.extend([name.into(), value.into()]);
    }

    fn json(&mut self, name: &str, value: &Value) {
        self.option(name, value.to_string());
    }

    /// What a machine's form is, but for its devices. `memory` goes on with the machine's options.
    fn frame(&mut self, name: &str, shape: MachineShape, accel: Accel, memory: &str) {
        // A comma would end the name; ours have none, but it must not become an option.
        self.option("-name", format!("guest={},debug-threads=on", name.replace(',', ",,")));
        // With acpi=on the guest finds the devices in ACPI tables and needs no words on its command line; pit and rtc keep
        // older kernels' clock calibration happy; the rest makes saved and loaded machines match. No pic: nobody programs it,
        // and a timer's interrupt that comes before the guest's kernel has masked it arrives as vector 0, a division error.
        self.option("-M", format!("microvm,acpi=on,pit=on,pic=off,rtc=on,isa-serial=on,suppress-vmdesc=on{memory}"));
        self.option("-global", "migration.send-configuration=off");
        match accel {
            Accel::Kvm => {
                self.option("-accel", "kvm");
                self.option("-cpu", "host");
            }
            Accel::Tcg { .. } => {
                self.option("-accel", format!("tcg,thread=multi,tb-size={TB_CACHE_MIB}"));
                // All that the emulator has, as programs of today expect. But a fifth level of page tables only makes every
                // emulated TLB miss dearer, and "enhanced" byte moves, which kernel and libc prefer to eight bytes at a time
                // once they see them, are a loop over single bytes here. Newer QEMUs offer "fast short" ones beside them:
                // alone, they make the memmove of Linux 6.1 an endless loop.
                self.option("-cpu", "max,la57=off,erms=off,fsrm=off");
            }
        }
        let vcpus = shape.vcpus;
        self.option("-smp", format!("{vcpus},sockets=1,cores={vcpus},threads=1"));
        self.option("-m", format!("size={}B", shape.memory.get()));
    }

    /// Whom the process talks to.
    fn surroundings(&mut self, listeners: Listeners) {
        for bare in ["-nodefaults", "-no-user-config", "-no-reboot", "-S"] {
            self.flag(bare);
        }
        self.option("-display", "none");
        self.option("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");
        self.option("-msg", "timestamp=off");
        self.option("-chardev", format!("socket,id=qmp,fd={},server=on,wait=off", listeners.qmp));
        self.option("-mon", "chardev=qmp,mode=control");
        self.option("-chardev", format!("socket,id={SERIAL},fd={},server=on,wait=off", listeners.serial));
        self.option("-serial", format!("chardev:{SERIAL}"));
    }

    /// The device of a disk; its backend comes from elsewhere.
    fn disk(&mut self, index: usize) {
        self.json(
            "-device",
            &json!({
                "driver": "virtio-blk-device", "id": format!("disk{index}-device"), "drive": throttled(index),
                "bus": bus(index), "write-cache": "on", "rerror": "report", "werror": "report",
            }),
        );
    }

    fn entropy(&mut self) {
        self.option("-object", "rng-builtin,id=entropy");
        self.json(
            "-device",
            &json!({"driver": "virtio-rng-device", "id": "rng", "rng": "entropy", "bus": bus(FOR_DISKS_AND_NICS)}),
        );
    }

    fn nic(&mut self, device: usize, index: usize, nic: &NicSpec) -> Result<(), VmmError> {
        if nic.tap.contains(|c: char| !c.is_ascii_graphic() || c == ',') {
            return Err(VmmError::Refused { operation: "machine spec", detail: format!("tap name {:?}", nic.tap) });
        }
        let mac = nic.mac.map(|byte| format!("{byte:02x}")).join(":");
        self.option("-netdev", format!("tap,id=net{index},ifname={},script=no,downscript=no,vhost=off", nic.tap));
        self.json(
            "-device",
            &json!({
                "driver": "virtio-net-device", "id": format!("net{index}-device"), "netdev": format!("net{index}"),
                "mac": mac, "bus": bus(device),
            }),
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use aenv_model::{Bytes, MachineShape};
    use aenv_vmm_driver::RateLimit;

    use super::*;

    fn spec() -> MachineSpec {
        let disk = |read_only| DiskSpec {
            path: "/dev/null".into(),
            read_only,
            flush: Flush::Storage,
            limit: DiskLimit::default(),
        };
        MachineSpec {
            name: "box".into(),
            shape: MachineShape { vcpus: 2, memory: Bytes::mib(256) },
            kernel: "/k,1".into(),
            initramfs: "/i".into(),
            cmdline: "aenv.root=/dev/vda".into(),
            disks: vec![disk(true), disk(false)],
            nics: vec![NicSpec { tap: "tap0".into(), mac: [6, 0, 0xa9, 0xfe, 0, 0x15] }],
            netns: None,
            work_dir: "/w".into(),
            serial_log: "/w/serial.log".into(),
            serial_log_limit: Bytes::mib(1),
            memory_image: None,
        }
    }

    fn line(spec: &MachineSpec, accel: Accel, incoming: bool) -> Result<String, VmmError> {
        let listeners = Listeners { qmp: 5, serial: 6 };
        let args = arguments(spec, &PathBuf::from("/w/a, b"), accel, listeners, incoming)?;
        Ok(args.iter().map(|arg| arg.to_str().unwrap()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn devices_sit_in_the_slots_of_their_order() {
        let line = line(&spec(), Accel::Kvm, false).unwrap();
        let position = |text: &str| line.find(text).unwrap_or_else(|| panic!("no {text} in {line}"));
        assert!(
            position(r#""bus":"virtio-mmio-bus.23","drive":"disk0-throttle""#)
                < position(r#""bus":"virtio-mmio-bus.22","drive":"disk1-throttle""#)
        );
        position(r#""bus":"virtio-mmio-bus.21","driver":"virtio-net-device""#);
        position(r#""mac":"06:00:a9:fe:00:15""#);
        position(r#""mem-path":"/w/a, b""#);
        assert!(!line.contains("tsc") && !line.contains("-incoming"), "{line}");
    }

    #[test]
    fn an_emulated_guest_is_told_the_clock_rate_and_the_given_words_come_last() {
        let line = line(&spec(), Accel::Tcg { tsc_khz: Some(2_300_000) }, true).unwrap();
        assert!(line.contains("tsc_early_khz=2300000 tsc=reliable aenv.root=/dev/vda "), "{line}");
        assert!(line.ends_with("-incoming defer"));
    }

    #[test]
    fn limits_of_a_disk_become_a_bucket_with_a_burst_on_top() {
        let rate = |per_second, burst| RateLimit { per_second, burst };
        let limits = |limit| throttle_group("x", limit)["limits"].clone();
        assert_eq!(limits(DiskLimit::default()), json!({}));
        assert_eq!(
            limits(DiskLimit { bandwidth: rate(1000, 500), operations: rate(u64::MAX, 0) }),
            json!({"bps-total": 1000, "bps-total-max": 1500, "iops-total": 1_000_000_000_000_000_u64})
        );
    }

    #[test]
    fn more_devices_than_slots_are_refused() {
        let disk =
            DiskSpec { path: "/dev/null".into(), read_only: true, flush: Flush::Storage, limit: DiskLimit::default() };
        let full = MachineSpec { disks: vec![disk.clone(); FOR_DISKS_AND_NICS - 1], ..spec() };
        assert!(line(&full, Accel::Kvm, false).is_ok());
        let over = MachineSpec { disks: vec![disk; FOR_DISKS_AND_NICS], ..spec() };
        assert!(matches!(line(&over, Accel::Kvm, false), Err(VmmError::Refused { .. })));
    }

    #[test]
    fn a_missing_disk_is_named() {
        let missing = MachineSpec {
            disks: vec![DiskSpec {
                path: "/nowhere/disk".into(),
                read_only: true,
                flush: Flush::Storage,
                limit: DiskLimit::default(),
            }],
            ..spec()
        };
        assert!(
            matches!(line(&missing, Accel::Kvm, false), Err(VmmError::Io { path, .. }) if path == Path::new("/nowhere/disk"))
        );
    }
}
