//! Made-up kernels and modules for tests.

use std::fs;
use std::path::{Path, PathBuf};

use object::write::{Object, StandardSegment};
use object::{Architecture, BinaryFormat, Endianness, SectionKind};

/// A bzImage with the header fields that matter and this payload.
pub(crate) fn bzimage(release: &str, payload: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 1024]; // boot sector and one setup sector
    image[0x1f1] = 1;
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    image[0x20e..0x210].copy_from_slice(&0x100_u16.to_le_bytes());
    let version = format!("{release} (someone@somewhere) #1 SMP\0");
    image[0x300..0x300 + version.len()].copy_from_slice(version.as_bytes());
    image[0x248..0x24c].copy_from_slice(&64_u32.to_le_bytes());
    image[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    image.extend([0xcc; 64]);
    image.extend(payload);
    image
}

/// A module file with this `.modinfo`.
pub(crate) fn module(release: &str, depends: &str, softdep: &str) -> Vec<u8> {
    let mut object = Object::new(BinaryFormat::Elf, Architecture::X86_64, Endianness::Little);
    let segment = object.segment_name(StandardSegment::Data).to_vec();
    let section = object.add_section(segment, b".modinfo".to_vec(), SectionKind::ReadOnlyData);
    let info = format!(
        "license=GPL\0depends={depends}\0softdep={softdep}\0vermagic={release} SMP preempt mod_unload modversions \0"
    );
    object.append_section_data(section, info.as_bytes(), 1);
    object.write().expect("a small object can be written")
}

/// The smallest file that is a static x86-64 program by its header, told from others by `tag`.
pub(crate) fn static_program(tag: &str) -> Vec<u8> {
    let mut program = vec![0; 64];
    program[..8].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1, 0]); // 64-bit, little-endian, version 1
    program[0x10] = 2; // ET_EXEC
    program[0x12] = 62; // EM_X86_64
    program[0x14] = 1; // version
    program[0x34] = 64; // header size
    program.extend(tag.as_bytes());
    program
}

/// A kernel image and a modules directory with the essential modules, in `dir`: their paths.
pub(crate) fn kernel_files(dir: &Path) -> (PathBuf, PathBuf) {
    let image = dir.join("vmlinuz");
    fs::write(&image, bzimage("6.1.0", b"BZh9 compressed in a way we do not know")).unwrap();
    let modules = dir.join("lib");
    fs::create_dir_all(modules.join("kernel")).unwrap();
    for (name, depends) in
        [("virtio", ""), ("virtio_mmio", "virtio"), ("virtio_blk", "virtio"), ("virtio_net", "virtio")]
    {
        fs::write(modules.join("kernel").join(format!("{name}.ko")), module("6.1.0", depends, "")).unwrap();
    }
    fs::write(modules.join("modules.builtin"), "kernel/fs/ext4/ext4.ko\n").unwrap();
    (image, modules)
}
