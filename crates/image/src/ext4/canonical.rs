//! The same files in the same places are the same bytes: taking out of an unmounted ext4 file system what the kernel writes
//! down about the making of it.
//!
//! | what | becomes |
//! | --- | --- |
//! | an inode's times of change, access and creation | its time of modification |
//! | an inode's generation and version | 0 |
//! | an inode that is free | zeros, its time of deletion too |
//! | the superblock's times, counts and place of mounts, bytes written | 0 |
//!
//! Only blocks that the upper has are looked at: below, everything is canonical already. That nothing else depends on time
//! or chance is the business of whoever mounts it.
//!
//! Metadata must have no checksums, see [`super::mkfs()`]. Offsets are those of `struct ext4_super_block`, `ext4_group_desc`
//! and `ext4_inode` in the kernel's `fs/ext4/ext4.h`.

use std::collections::HashMap;
use std::io;
use std::ops::Range;

use aenv_block_device::BlockDevice;
use aenv_block_overlaybd::OverlayDevice;

use super::BLOCK;

const SUPERBLOCK: u64 = 1024;
const SUPERBLOCK_SIZE: usize = 1024;
const MAGIC: u16 = 0xef53;
/// Cleanly unmounted, and no error was seen.
const STATE_CLEAN: u16 = 1;
const INCOMPAT_64BIT: u32 = 0x80;
const RO_COMPAT_METADATA_CSUM: u32 = 0x400;
/// A group's inode bitmap is not on the disk yet: all of them are free.
const INODE_UNINIT: u16 = 1;
/// The root's. Lower ones belong to the file system itself, but for this one.
const ROOT_INODE: u64 = 2;
/// The first that is a file's.
const FIRST_INODE: u64 = 11;
/// Bytes of inode tables that are read at once.
const STEP: u64 = 1 << 20;

/// Why a file system could not be made canonical.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CanonicalError {
    #[error("read or write the file system's {what}")]
    Io { what: &'static str, source: io::Error },
    #[error("it is not the file system that it was made as: {0}")]
    Unexpected(String),
    #[error("the kernel saw errors in the file system or on its disk ({errors} of them, state {state})")]
    Damaged { errors: u32, state: u16 },
}

/// Makes the file system on `device` canonical. Nobody may have it mounted.
pub(crate) fn make_canonical(device: &OverlayDevice) -> Result<(), CanonicalError> {
    let ranges = device.upper_ranges();
    let geometry = Geometry::read(device)?;
    geometry.clean_superblock(device)?;
    let mut bitmaps = HashMap::new();
    for range in ranges {
        for (group, part) in geometry.inode_tables_in(&range) {
            let mut from = part.start;
            while from < part.end {
                let to = part.end.min(from + STEP);
                clean_inodes(device, &geometry, group, from..to, &mut bitmaps)?;
                from = to;
            }
        }
    }
    Ok(())
}

/// Where things are.
struct Geometry {
    superblock: Vec<u8>,
    inode_size: u64,
    inodes_per_group: u64,
    /// By where its inode table begins, in bytes: groups.
    tables: Vec<(u64, Group)>,
}

#[derive(Debug, Clone, Copy)]
struct Group {
    number: u64,
    inode_bitmap: u64,
    uninitialised: bool,
}

impl Geometry {
    fn read(device: &OverlayDevice) -> Result<Self, CanonicalError> {
        let io = |what| move |source| CanonicalError::Io { what, source };
        let mut superblock = vec![0; SUPERBLOCK_SIZE];
        device.read_at(SUPERBLOCK, &mut superblock).map_err(io("superblock"))?;
        let field = Fields(&superblock);
        let unexpected = |what: &str| Err(CanonicalError::Unexpected(what.to_owned()));
        if field.u16(0x38) != MAGIC || field.u32(0x18) != 2 || field.u32(0x14) != 0 {
            return unexpected("no ext4 with blocks of 4 KiB");
        }
        if field.u32(0x60) & INCOMPAT_64BIT == 0 || field.u32(0x64) & RO_COMPAT_METADATA_CSUM != 0 {
            return unexpected("other features");
        }
        let (state, errors) = (field.u16(0x3a), field.u32(0x194));
        if state != STATE_CLEAN || errors != 0 {
            return Err(CanonicalError::Damaged { errors, state });
        }
        let blocks = u64::from(field.u32(0x4)) | u64::from(field.u32(0x150)) << 32;
        let (blocks_per_group, inodes_per_group) = (u64::from(field.u32(0x20)), u64::from(field.u32(0x28)));
        let (inode_size, descriptor) = (u64::from(field.u16(0x58)), usize::from(field.u16(0xfe)));
        if blocks_per_group == 0 || inode_size != 256 || descriptor != 64 || inodes_per_group > BLOCK * 8 {
            return unexpected("other sizes");
        }
        if blocks.checked_mul(BLOCK).is_none_or(|size| size > device.size().get()) {
            return unexpected("larger than its disk");
        }
        let groups = blocks.div_ceil(blocks_per_group);
        let mut descriptors = vec![0; usize::try_from(groups).unwrap_or(0) * descriptor];
        device.read_at(BLOCK, &mut descriptors).map_err(io("group descriptors"))?;
        let mut tables: Vec<(u64, Group)> = (0..)
            .zip(descriptors.chunks_exact(descriptor))
            .map(|(number, raw)| {
                let field = Fields(raw);
                let block =
                    |low, high| (u64::from(field.u32(low)) | u64::from(field.u32(high)) << 32).wrapping_mul(BLOCK);
                let uninitialised = field.u16(0x12) & INODE_UNINIT != 0;
                (block(0x8, 0x28), Group { number, inode_bitmap: block(0x4, 0x24), uninitialised })
            })
            .collect();
        tables.sort_by_key(|(start, _)| *start);
        Ok(Self { superblock, inode_size, inodes_per_group, tables })
    }

    /// Writes the superblock without what mounting left in it. Its backups are never written to.
    fn clean_superblock(&self, device: &OverlayDevice) -> Result<(), CanonicalError> {
        let mut clean = self.superblock.clone();
        // Time of mount and of writing, their high bytes; number and place of mounts; bytes written.
        for range in [0x2c..0x34, 0x274..0x276, 0x34..0x36, 0x88..0xc8, 0x178..0x180] {
            clean[range].fill(0);
        }
        if clean == self.superblock {
            return Ok(());
        }
        device.write_at(SUPERBLOCK, &clean).map_err(|source| CanonicalError::Io { what: "superblock", source })
    }

    /// The parts of `range` that are in inode tables, by whole blocks.
    fn inode_tables_in(&self, range: &Range<u64>) -> Vec<(Group, Range<u64>)> {
        let length = (self.inodes_per_group * self.inode_size).next_multiple_of(BLOCK);
        let range = range.start / BLOCK * BLOCK..range.end.next_multiple_of(BLOCK);
        let first = self.tables.partition_point(|(start, _)| start + length <= range.start);
        let tables = self.tables[first..].iter().take_while(|(start, _)| *start < range.end);
        tables.map(|(start, group)| (*group, range.start.max(*start)..range.end.min(start + length))).collect()
    }
}

/// Cleans the inodes in one stretch of a group's table.
fn clean_inodes(
    device: &OverlayDevice,
    geometry: &Geometry,
    group: Group,
    range: Range<u64>,
    bitmaps: &mut HashMap<u64, Vec<u8>>,
) -> Result<(), CanonicalError> {
    let io = |what| move |source| CanonicalError::Io { what, source };
    let table = geometry.tables.iter().find(|(_, other)| other.number == group.number);
    let Some((start, _)) = table else { return Ok(()) };
    if let std::collections::hash_map::Entry::Vacant(entry) = bitmaps.entry(group.number) {
        let mut bitmap = vec![0; BLOCK as usize];
        if !group.uninitialised {
            device.read_at(group.inode_bitmap, &mut bitmap).map_err(io("inode bitmap"))?;
        }
        entry.insert(bitmap);
    }
    let bitmap = &bitmaps[&group.number];
    let mut inodes = vec![0; (range.end - range.start) as usize];
    device.read_at(range.start, &mut inodes).map_err(io("inodes"))?;
    let first = (range.start - start) / geometry.inode_size;
    let per_block = (BLOCK / geometry.inode_size) as usize;
    for (number, block) in inodes.chunks_exact_mut(BLOCK as usize).enumerate() {
        let mut changed = false;
        for (index, inode) in block.chunks_exact_mut(geometry.inode_size as usize).enumerate() {
            let index = first + (number * per_block + index) as u64;
            if index >= geometry.inodes_per_group {
                break;
            }
            let used = bitmap[(index / 8) as usize] >> (index % 8) & 1 == 1;
            let inode_number = group.number * geometry.inodes_per_group + index + 1;
            if used && inode_number < FIRST_INODE && inode_number != ROOT_INODE {
                continue;
            }
            changed |= clean_inode(inode, used);
        }
        if changed {
            let at = range.start + number as u64 * BLOCK;
            device.write_at(at, block).map_err(io("inodes"))?;
        }
    }
    Ok(())
}

/// Cleans one inode; whether that changed it.
fn clean_inode(inode: &mut [u8], used: bool) -> bool {
    let before = inode.to_vec();
    if !used {
        inode.fill(0);
        return before != inode;
    }
    // Of access, change and creation: seconds, and where nanoseconds and more seconds are.
    for (seconds, extra) in [(0x8, 0x8c), (0xc, 0x84), (0x90, 0x94)] {
        inode.copy_within(0x10..0x14, seconds);
        inode.copy_within(0x88..0x8c, extra);
    }
    // Time of deletion, version, generation, high half of the version.
    for range in [0x14..0x18, 0x24..0x28, 0x64..0x68, 0x98..0x9c] {
        inode[range].fill(0);
    }
    before != inode
}

/// Little-endian numbers at fixed places.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u16(&self, at: usize) -> u16 {
        self.0[at..].first_chunk().map_or(0, |bytes| u16::from_le_bytes(*bytes))
    }

    fn u32(&self, at: usize) -> u32 {
        self.0[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }
}
