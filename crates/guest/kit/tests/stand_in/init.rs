//! PID 1 for the boot test, in place of the guest agent: loads the modules as it would, says what it sees, and goes.

use std::ffi::c_long;
use std::fs;
use std::os::fd::AsRawFd;

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
    fn mount(source: *const i8, target: *const i8, kind: *const i8, flags: u64, data: *const u8) -> i32;
    fn reboot(command: i32) -> i32;
}

const FINIT_MODULE: c_long = 313; // x86-64
const RB_AUTOBOOT: i32 = 0x0123_4567;

fn main() {
    let mut modules: Vec<_> = fs::read_dir("/modules").unwrap().map(|entry| entry.unwrap().path()).collect();
    modules.sort();
    for path in &modules {
        let file = fs::File::open(path).unwrap();
        // SAFETY: the descriptor is open and the parameter string is a constant with its NUL.
        if unsafe { syscall(FINIT_MODULE, file.as_raw_fd(), c"".as_ptr(), 0) } != 0 {
            println!("stand-in: {} does not load: {}", path.display(), std::io::Error::last_os_error());
        }
    }
    for (kind, target) in [(c"proc", c"/proc"), (c"sysfs", c"/sys"), (c"devtmpfs", c"/dev")] {
        // SAFETY: constant strings; no data.
        unsafe { mount(kind.as_ptr(), target.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) };
    }
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let file_systems = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    println!(
        "stand-in: release={} modules={} disk={} nic={} ext4={} newroot={}",
        release.trim(),
        modules.len(),
        fs::metadata("/dev/vda").is_ok(),
        fs::metadata("/sys/class/net/eth0").is_ok(),
        file_systems.contains("\text4\n"),
        fs::metadata("/newroot").is_ok(),
    );
    // SAFETY: PID 1 has nothing left to do; with -no-reboot the machine ends.
    unsafe { reboot(RB_AUTOBOOT) };
}
