//! Kernel images: what release one is, and the ELF file inside a `vmlinuz`.
//!
//! A `vmlinuz` (bzImage) is a small program that decompresses the real kernel, an ELF file, and jumps into it. On an
//! emulated CPU that costs more than half a second of every boot, so we decompress once, here. VMMs start the ELF file
//! directly: Firecracker always does, QEMU does if the file has the PVH entry note (`CONFIG_PVH`, in all distributions'
//! kernels).
//!
//! ```text
//! 0x1f1  u8   setup_sects (0 means 4)         the payload lies at
//! 0x202  "HdrS", u16 protocol version           (setup_sects + 1) * 512 + payload_offset
//! 0x20e  u16  offset of the version string - 0x200
//! 0x248  u32  payload_offset, u32 payload_length          (Linux: Documentation/arch/x86/boot.rst)
//! ```
//! The payload's last four bytes are the uncompressed size; for gzip they belong to the stream, for others they follow.

use std::io::{self, Cursor, Read};

use object::read::elf::{ElfFile64, ProgramHeader};
use object::{Endianness, elf};

/// Where a kernel says its version in its own text.
const BANNER: &[u8] = b"Linux version ";
/// No kernel is bigger; stops a damaged stream from filling memory.
const LARGEST: u64 = 512 << 20;
/// First protocol with `payload_offset`: 2.08, Linux 2.6.26.
const OLDEST_PROTOCOL: u16 = 0x0208;

/// A kernel image, understood.
#[derive(Debug)]
pub(crate) struct KernelImage {
    /// `uname -r` of the kernel.
    pub(crate) release: String,
    /// The uncompressed kernel, if the image is one or we could get it out.
    pub(crate) elf: Option<Vec<u8>>,
    /// Whether the ELF file can be started by the PVH protocol.
    pub(crate) pvh: bool,
}

/// Understands a `vmlinuz` or an ELF `vmlinux`. `Err` says why it is neither, to follow the file's name.
pub(crate) fn understand(image: &[u8]) -> Result<KernelImage, String> {
    if image.starts_with(&elf::ELFMAG) {
        let release = banner_release(image).ok_or("is an ELF file but not of a Linux kernel")?;
        return Ok(KernelImage { release, pvh: has_pvh_note(image), elf: Some(image.to_owned()) });
    }
    if image.get(0x202..0x206) != Some(b"HdrS") || u16_at(image, 0x206) < Some(OLDEST_PROTOCOL) {
        return Err("is neither a vmlinuz (bzImage) nor an ELF vmlinux".to_owned());
    }
    let release = header_release(image).ok_or("does not say its kernel version")?;
    let elf = match payload(image).map(decompress) {
        Some(Ok(content)) if content.starts_with(&elf::ELFMAG) => Some(content),
        Some(Err(error)) => return Err(format!("has a damaged payload: {error}")),
        _ => None, // a compression we do not know: it boots all the same, only slower
    };
    Ok(KernelImage { release, pvh: elf.as_deref().is_some_and(has_pvh_note), elf })
}

fn payload(image: &[u8]) -> Option<&[u8]> {
    let setup_sectors = match *image.get(0x1f1)? {
        0 => 4,
        n => usize::from(n),
    };
    let start = ((setup_sectors + 1) * 512).checked_add(usize::try_from(u32_at(image, 0x248)?).ok()?)?;
    let length = usize::try_from(u32_at(image, 0x24c)?).ok()?;
    image.get(start..start.checked_add(length)?)
}

/// The uncompressed content; empty if the compression is not one we know (bzip2, lzo).
fn decompress(payload: &[u8]) -> io::Result<Vec<u8>> {
    let stream = || &payload[..payload.len().saturating_sub(4)];
    let reader: Box<dyn Read + '_> = match payload {
        [0x1f, 0x8b, ..] => Box::new(flate2::read::GzDecoder::new(payload)),
        [0xfd, b'7', b'z', b'X', b'Z', ..] => Box::new(xz2::read::XzDecoder::new(stream())),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Box::new(zstd::Decoder::with_buffer(stream())?.single_frame()),
        [0x02, 0x21, 0x4c, 0x18, ..] => Box::new(lz4_flex::frame::FrameDecoder::new(stream())),
        [0x5d, 0, 0, ..] => {
            let lzma = xz2::stream::Stream::new_lzma_decoder(u64::MAX)?;
            Box::new(xz2::bufread::XzDecoder::new_stream(Cursor::new(stream()), lzma))
        }
        _ => return Ok(Vec::new()),
    };
    let mut content = Vec::new();
    reader.take(LARGEST).read_to_end(&mut content)?;
    Ok(content)
}

fn header_release(image: &[u8]) -> Option<String> {
    let start = usize::from(u16_at(image, 0x20e)?) + 0x200;
    first_word(image.get(start..)?)
}

fn banner_release(elf: &[u8]) -> Option<String> {
    let start = elf.windows(BANNER.len()).position(|window| window == BANNER)? + BANNER.len();
    first_word(elf.get(start..)?)
}

fn first_word(bytes: &[u8]) -> Option<String> {
    let end = bytes.iter().take(256).position(|byte| byte.is_ascii_whitespace() || *byte == 0)?;
    let word = std::str::from_utf8(&bytes[..end]).ok()?;
    // A release becomes a directory name below /lib/modules.
    let sound = word.starts_with(|c: char| c.is_ascii_digit()) && !word.contains('/');
    sound.then(|| word.to_owned())
}

/// Whether the kernel has `XEN_ELFNOTE_PHYS32_ENTRY`, the entry that a VMM may jump to in 32-bit mode.
fn has_pvh_note(kernel: &[u8]) -> bool {
    const PHYS32_ENTRY: elf::NoteType = elf::NoteType(18);
    let Ok(file) = ElfFile64::<Endianness>::parse(kernel) else { return false };
    let endian = file.endian();
    file.elf_program_headers().iter().any(|header| {
        let Ok(Some(mut notes)) = header.notes(endian, kernel) else { return false };
        std::iter::from_fn(|| notes.next().ok().flatten())
            .any(|note| note.name() == b"Xen" && note.n_type(endian) == PHYS32_ENTRY)
    })
}

/// Whether an executable can run where there is no dynamic loader; `Err` says what it is otherwise.
pub(crate) fn check_static(program: &[u8]) -> Result<(), String> {
    let file = ElfFile64::<Endianness>::parse(program).map_err(|_| "is not a 64-bit ELF program".to_owned())?;
    let endian = file.endian();
    if file.elf_header().e_machine.get(endian) != elf::EM_X86_64 {
        return Err("is not an x86-64 program".to_owned());
    }
    if ![elf::ET_EXEC, elf::ET_DYN].contains(&file.elf_header().e_type.get(endian)) {
        return Err("is an object file, not a program".to_owned());
    }
    match file.elf_program_headers().iter().any(|header| header.p_type(endian) == elf::PT_INTERP) {
        true => Err("asks for a dynamic loader, which no guest has".to_owned()),
        false => Ok(()),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::testing::bzimage;

    fn elf() -> Vec<u8> {
        [&elf::ELFMAG[..], &[7; 3000]].concat()
    }

    #[test]
    fn the_elf_comes_out_of_every_compression_the_kernel_offers() {
        let gzip = {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(&elf()).unwrap();
            encoder.finish().unwrap()
        };
        let sized = |mut stream: Vec<u8>| {
            stream.extend(3004_u32.to_le_bytes());
            stream
        };
        let xz = {
            let mut encoder = xz2::write::XzEncoder::new(Vec::new(), 1);
            encoder.write_all(&elf()).unwrap();
            encoder.finish().unwrap()
        };
        let lz4 = {
            let block = lz4_flex::block::compress(&elf());
            [&[0x02, 0x21, 0x4c, 0x18][..], &(block.len() as u32).to_le_bytes(), &block].concat()
        };
        let zstd = zstd::encode_all(&elf()[..], 1).unwrap();
        for (name, payload) in [("gzip", gzip), ("xz", sized(xz)), ("lz4", sized(lz4)), ("zstd", sized(zstd))] {
            let image = understand(&bzimage("6.12.1-test", &payload)).unwrap();
            assert_eq!(image.release, "6.12.1-test", "{name}");
            assert_eq!(image.elf, Some(elf()), "{name}");
            assert!(!image.pvh);
        }
    }

    #[test]
    fn an_unknown_compression_leaves_the_image_as_it_is_and_a_damaged_one_is_refused() {
        let image = understand(&bzimage("6.1.0", b"BZh9 something")).unwrap();
        assert!(image.elf.is_none() && image.release == "6.1.0");
        let mut damaged = zstd::encode_all(&elf()[..], 1).unwrap();
        damaged.truncate(12);
        assert!(understand(&bzimage("6.1.0", &damaged)).unwrap_err().contains("damaged"));
    }

    #[test]
    fn files_that_are_no_kernels_are_told_so() {
        for bytes in [&b""[..], b"hello", &[0; 4096], &elf()] {
            assert!(understand(bytes).is_err());
        }
    }

    #[test]
    fn a_dynamic_program_cannot_be_pid_1() {
        let own = std::fs::read("/proc/self/exe").unwrap();
        assert!(check_static(&own).unwrap_err().contains("dynamic loader"));
        assert!(check_static(b"#!/bin/sh\n").unwrap_err().contains("ELF"));
        assert!(check_static(&crate::testing::module("6.1.0", "", "")).unwrap_err().contains("object file"));
        assert_eq!(check_static(&crate::testing::static_program("x")), Ok(()));
    }
}
