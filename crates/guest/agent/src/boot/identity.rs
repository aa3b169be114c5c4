//! Who this machine is: host name, name server, and the files that programs read these from.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use aenv_guest_proto::BootParams;

use crate::console::say;

const HOSTS: &str = "/etc/hosts";
const RESOLV_CONF: &str = "/etc/resolv.conf";
const RUN_DIRECTORY: &str = "/run/e2b";
/// Marks the line of `/etc/hosts` that is ours to change.
const MARK: &str = "# aenv";
const DEFAULT_HOSTS: &str = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n";

/// Names the machine and its name server at boot. Files that `/init` writes anyway are left to it, unless the image has
/// none. A failure (a read-only root) is said and lived with.
pub(super) fn set_up(params: &BootParams) {
    if let Err(error) = rustix::system::sethostname(params.hostname.as_bytes()) {
        say!("set the host name: {error}");
    }
    if !fs::metadata(HOSTS).is_ok_and(|found| found.len() > 0)
        && let Err(error) = write_hosts(&params.hostname)
    {
        say!("write {HOSTS}: {error}");
    }
    if let Some(dns) = params.dns
        && let Err(error) = replace(Path::new(RESOLV_CONF), &format!("nameserver {dns}\n"))
    {
        say!("write {RESOLV_CONF}: {error}");
    }
}

/// Sets the host name and makes it resolve.
pub(crate) fn set_hostname(name: &str) -> io::Result<()> {
    rustix::system::sethostname(name.as_bytes())?;
    write_hosts(name)?;
    replace(Path::new("/etc/hostname"), &format!("{name}\n"))
}

fn write_hosts(name: &str) -> io::Result<()> {
    let _ = fs::create_dir("/etc");
    let hosts = fs::read_to_string(HOSTS).unwrap_or_default();
    replace(Path::new(HOSTS), &with_name(&hosts, name))
}

/// `hosts` with one line of ours for `name`; without any other line, the usual ones are added.
fn with_name(hosts: &str, name: &str) -> String {
    let mut text: String = hosts.lines().filter(|line| !line.ends_with(MARK)).map(|line| format!("{line}\n")).collect();
    if text.trim().is_empty() {
        text = DEFAULT_HOSTS.to_owned();
    }
    text.push_str(&format!("127.0.1.1 {name} {MARK}\n"));
    text
}

/// Writes a file in place, or over a symbolic link that leads nowhere (such as systemd-resolved's).
fn replace(path: &Path, text: &str) -> io::Result<()> {
    if path.is_symlink() && !path.exists() {
        fs::remove_file(path)?;
    }
    fs::write(path, text)
}

/// Writes the files of `/run/e2b` by which programs find out which sandbox they are in.
pub(crate) fn write_run_files(sandbox_id: Option<&str>, template_id: Option<&str>) -> io::Result<()> {
    fs::create_dir_all(RUN_DIRECTORY)?;
    let files = [(".E2B_SANDBOX", Some("true")), (".E2B_SANDBOX_ID", sandbox_id), (".E2B_TEMPLATE_ID", template_id)];
    for (name, text) in files {
        if let Some(text) = text {
            let path = Path::new(RUN_DIRECTORY).join(name);
            fs::write(&path, text)?;
            fs::set_permissions(&path, Permissions::from_mode(0o444))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_file_keeps_its_lines_and_gets_one_for_the_name() {
        let first = with_name("", "one");
        assert_eq!(first, format!("{DEFAULT_HOSTS}127.0.1.1 one {MARK}\n"));
        let second = with_name(&first, "two");
        assert_eq!(second, format!("{DEFAULT_HOSTS}127.0.1.1 two {MARK}\n"));
        assert_eq!(with_name("10.0.0.1 db\n", "x"), format!("10.0.0.1 db\n127.0.1.1 x {MARK}\n"));
    }
}
