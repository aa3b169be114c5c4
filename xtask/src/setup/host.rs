//! What the machine and its kernel must offer, apart from packages.

use std::path::Path;

use anyhow::{Result, bail};

use crate::sh::{Run, can_sudo, is_root, say};

/// Lines for `setup --dry-run`.
pub(super) fn report() -> Vec<String> {
    let mut lines = vec![match Path::new("/dev/net/tun").exists() {
        true => "tap devices: /dev/net/tun is there".to_owned(),
        false => "missing: /dev/net/tun - every sandbox has a tap device (module `tun`)".to_owned(),
    }];
    lines.push(match Path::new("/dev/kvm").exists() {
        true => "kvm: /dev/kvm is there; the server finds out by booting a guest whether it works".to_owned(),
        false => "kvm: none; sandboxes run under QEMU's emulation, slower and otherwise the same".to_owned(),
    });
    lines.push(match (is_root(), can_sudo()) {
        (true, _) => "rights: root".to_owned(),
        (false, true) => "rights: sudo without a password".to_owned(),
        (false, false) => "missing: root or passwordless sudo - network namespaces and taps need it".to_owned(),
    });
    lines
}

pub(super) fn ensure() -> Result<()> {
    if std::env::consts::ARCH != "x86_64" {
        bail!("this is a {} machine; guests are x86_64 for now", std::env::consts::ARCH);
    }
    if !is_root() && !can_sudo() {
        bail!(
            "starting sandboxes needs root (network namespaces, tap devices), and sudo asks for a password here. \
             Run as root, or `sudo -v` first in this terminal"
        );
    }
    if !Path::new("/dev/net/tun").exists() {
        say("loading the kernel module `tun`: every sandbox has a tap device");
        if !Run::as_root("modprobe").arg("tun").succeeds() || !Path::new("/dev/net/tun").exists() {
            bail!(
                "/dev/net/tun is missing and `modprobe tun` did not bring it: a container needs --device /dev/net/tun"
            );
        }
    }
    Ok(())
}
