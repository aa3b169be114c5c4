//! The initramfs: an uncompressed `newc` cpio archive that is the same, octet for octet, for the same contents.
//!
//! ```text
//! /init                     the guest agent, PID 1
//! /modules/NNN-name.ko      in load order
//! /dev/console              so that the kernel can give PID 1 a console before devtmpfs is mounted
//! /proc /sys /dev /newroot  mount points
//! ```
//! Uncompressed, since every boot would pay for decompression and the archive is read from the page cache anyway.

use std::io::{self, Write};

use cpio::newc::{self, ModeFileType};

use crate::module::Module;

const DIRECTORIES: &[&str] = &["dev", "modules", "newroot", "proc", "sys"];

/// The archive for these modules, in this order, and this agent.
pub(crate) fn build(agent: &[u8], modules: &[(String, Module)]) -> io::Result<Vec<u8>> {
    let size = agent.len() + modules.iter().map(|(_, module)| module.content.len() + 256).sum::<usize>() + 4096;
    let mut archive = Archive { out: Vec::with_capacity(size), next_inode: 1 };
    for name in DIRECTORIES {
        archive.add(name, ModeFileType::Directory, 0o755, &[])?;
    }
    archive.add_console()?;
    archive.add("init", ModeFileType::Regular, 0o755, agent)?;
    for (index, (name, module)) in modules.iter().enumerate() {
        archive.add(&format!("modules/{index:03}-{name}.ko"), ModeFileType::Regular, 0o644, &module.content)?;
    }
    newc::trailer(archive.out)
}

/// Entries are numbered as they come; owner and time are zero.
struct Archive {
    out: Vec<u8>,
    next_inode: u32,
}

impl Archive {
    fn entry(&mut self, name: &str, kind: ModeFileType, permissions: u32) -> newc::Builder {
        let links = if matches!(kind, ModeFileType::Directory) { 2 } else { 1 };
        let inode = self.next_inode;
        self.next_inode += 1;
        newc::Builder::new(name).ino(inode).nlink(links).mode(permissions).set_mode_file_type(kind)
    }

    fn add(&mut self, name: &str, kind: ModeFileType, permissions: u32, content: &[u8]) -> io::Result<()> {
        let size = u32::try_from(content.len()).map_err(|_| io::Error::other("an initramfs entry exceeds 4 GiB"))?;
        let mut writer = self.entry(name, kind, permissions).write(&mut self.out, size);
        writer.write_all(content)?;
        writer.finish().map(drop)
    }

    fn add_console(&mut self) -> io::Result<()> {
        let console = self.entry("dev/console", ModeFileType::Char, 0o600).rdev_major(5).rdev_minor(1);
        console.write(&mut self.out, 0).finish().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn modules() -> Vec<(String, Module)> {
        let module =
            |content: &[u8]| Module { content: content.to_vec(), depends: vec![], prefers: vec![], release: None };
        vec![("virtio".to_owned(), module(b"one")), ("ext4".to_owned(), module(b"three"))]
    }

    #[test]
    fn the_archive_holds_the_agreed_layout_in_load_order() {
        let archive = build(b"agent", &modules()).unwrap();
        let mut rest = &archive[..];
        let mut entries = Vec::new();
        loop {
            let mut reader = newc::Reader::new(rest).unwrap();
            if reader.entry().is_trailer() {
                break;
            }
            let mut content = Vec::new();
            reader.read_to_end(&mut content).unwrap();
            let entry = reader.entry();
            assert_eq!((entry.mtime(), entry.uid(), entry.gid()), (0, 0, 0));
            entries.push((entry.name().to_owned(), entry.mode(), content));
            if entry.name() == "dev/console" {
                assert_eq!((entry.rdev_major(), entry.rdev_minor()), (5, 1));
            }
            rest = reader.finish().unwrap();
        }
        let listed: Vec<_> = entries.iter().map(|(name, mode, _)| (name.as_str(), *mode)).collect();
        assert_eq!(
            listed,
            [
                ("dev", 0o040_755),
                ("modules", 0o040_755),
                ("newroot", 0o040_755),
                ("proc", 0o040_755),
                ("sys", 0o040_755),
                ("dev/console", 0o020_600),
                ("init", 0o100_755),
                ("modules/000-virtio.ko", 0o100_644),
                ("modules/001-ext4.ko", 0o100_644),
            ]
        );
        assert_eq!(entries[6].2, b"agent");
        assert_eq!(entries[8].2, b"three");
    }

    #[test]
    fn the_same_contents_give_the_same_octets() {
        assert_eq!(build(b"agent", &modules()).unwrap(), build(b"agent", &modules()).unwrap());
        assert_ne!(build(b"agent", &modules()).unwrap(), build(b"Agent", &modules()).unwrap());
    }
}
