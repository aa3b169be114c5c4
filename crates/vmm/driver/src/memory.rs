//! Guest memory as seen from outside the VMM.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Guest memory in the address space of process `pid`: what `PAGEMAP_SCAN` and `process_vm_readv` need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestMemory {
    /// The VMM process.
    pub pid: u32,
    /// Ranges in guest-physical order.
    pub ranges: Vec<MemoryRange>,
}

/// A contiguous piece of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryRange {
    /// Where it starts in the VMM's address space.
    pub host_address: u64,
    /// Where it starts in the memory image file, in bytes.
    pub image_offset: u64,
    /// Its length in bytes.
    pub length: u64,
}

impl GuestMemory {
    /// Finds the private mappings of the memory image `image` in the address space of `pid`, in the order of the image. What
    /// is written to a shared one goes to the file, and no page of it can be told from those that were not written.
    ///
    /// The file is recognised by its path, and by device and inode where it was reached by another one (overlay and
    /// btrfs show other device numbers in the mappings than `stat` does). Blocking.
    /// Errors: the process is gone, or `image` is; `NotFound` when nothing of it is mapped.
    pub fn of_image(pid: u32, image: &Path) -> io::Result<Self> {
        let stat = std::fs::metadata(image)?;
        let image = Image {
            path: image.canonicalize()?,
            device: (rustix::fs::major(stat.dev()).into(), rustix::fs::minor(stat.dev()).into()),
            inode: stat.ino(),
        };
        let maps = std::fs::read(format!("/proc/{pid}/maps"))?;
        let maps = String::from_utf8_lossy(&maps);
        let mut ranges: Vec<MemoryRange> = maps.lines().filter_map(|line| mapping(line, &image)).collect();
        ranges.sort_by_key(|range| range.image_offset);
        if ranges.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the process maps no part of the memory image"));
        }
        Ok(Self { pid, ranges: merge(ranges) })
    }
}

struct Image {
    path: PathBuf,
    device: (u64, u64),
    inode: u64,
}

/// A line of `/proc/PID/maps`, if it maps the image: `from-to perms offset major:minor inode      path`.
fn mapping(line: &str, image: &Image) -> Option<MemoryRange> {
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let mut fields = line.splitn(6, ' ');
    let (from, to) = fields.next()?.split_once('-')?;
    let private = fields.next()?.ends_with('p');
    let image_offset = hex(fields.next()?)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let inode = fields.next()?;
    let path = fields.next().unwrap_or_default().trim_start();
    let same_file = (hex(major)?, hex(minor)?) == image.device && inode.parse() == Ok(image.inode);
    if !private || !same_file && image.path.as_os_str() != path {
        return None;
    }
    let host_address = hex(from)?;
    Some(MemoryRange { host_address, image_offset, length: hex(to)?.checked_sub(host_address)? })
}

/// The kernel splits a mapping where its flags differ (an `madvise` of a part, say); for us it is one.
fn merge(ranges: Vec<MemoryRange>) -> Vec<MemoryRange> {
    let mut merged: Vec<MemoryRange> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(last)
                if last.host_address + last.length == range.host_address
                    && last.image_offset + last.length == range.image_offset =>
            {
                last.length += range.length;
            }
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_mapping_is_told_by_path_or_by_device_and_inode() {
        let line = "7f332bfff000-7f333bfff000 rw-p 00001000 fe:10 10027022                   /tmp/a b/mem";
        let found = Some(MemoryRange { host_address: 0x7f33_2bff_f000, image_offset: 0x1000, length: 256 << 20 });
        let image = |path: &str, device, inode| Image { path: path.into(), device, inode };
        assert_eq!(mapping(line, &image("/elsewhere", (0xfe, 0x10), 10_027_022)), found);
        assert_eq!(mapping(line, &image("/tmp/a b/mem", (0, 0x20), 7)), found);
        assert_eq!(mapping(line, &image("/elsewhere", (0xfe, 0x11), 10_027_022)), None);
        assert_eq!(mapping("7ffd0000-7ffd1000 r-xp 00000000 00:00 0 ", &image("/m", (1, 2), 3)), None);
        assert_eq!(mapping(&line.replace("rw-p", "rw-s"), &image("/tmp/a b/mem", (0xfe, 0x10), 10_027_022)), None);
    }

    #[test]
    fn split_mappings_are_one_range_and_gaps_are_not() {
        let range = |host_address, image_offset, length| MemoryRange { host_address, image_offset, length };
        let merged =
            merge(vec![range(0x1000, 0, 0x1000), range(0x2000, 0x1000, 0x1000), range(0x9000, 0x2000, 0x1000)]);
        assert_eq!(merged, [range(0x1000, 0, 0x2000), range(0x9000, 0x2000, 0x1000)]);
    }

    #[test]
    fn an_image_that_nobody_maps_is_not_found() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let error = GuestMemory::of_image(std::process::id(), image.path()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
