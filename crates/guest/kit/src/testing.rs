//! Made-up kernels and modules for tests.

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
