//! One kernel module file: its bytes uncompressed and unsigned, and what its `.modinfo` says.

use std::io::{self, Read};
use std::path::Path;

use object::{Object, ObjectSection};

/// The end of a signed module (Linux: `scripts/sign-file.c`): signature, then 12 bytes that end in its big-endian
/// length, then this.
const SIGNED: &[u8] = b"~Module signature appended~\n";
const SIGNATURE_RECORD: usize = 12;
/// No module is bigger; stops a damaged stream from filling memory.
const LARGEST: u64 = 256 << 20;

/// A module ready for the initramfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Module {
    /// Without signature.
    pub(crate) content: Vec<u8>,
    /// Modules it cannot load without.
    pub(crate) depends: Vec<String>,
    /// Modules it would like to have before it (`softdep: pre`).
    pub(crate) prefers: Vec<String>,
    /// The kernel release it was built for.
    pub(crate) release: Option<String>,
}

impl Module {
    /// Reads a `.ko`, `.ko.xz`, `.ko.zst` or `.ko.gz`. `Err` says what is wrong, to follow the file's name.
    ///
    /// The signature is cut off. It proves to the guest what the host knows already (the archive's signature covered the
    /// package), and checking it takes 20 ms a module on an emulated CPU: a tenth of the boot. The kernel notes the
    /// missing signature in its taint flags, as for any module built on one's own machine.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let file = std::fs::read(path).map_err(|error| format!("cannot be read: {error}"))?;
        let mut content = decompressed(path, file).map_err(|error| format!("cannot be decompressed: {error}"))?;
        content.truncate(unsigned_length(&content));
        let info = modinfo(&content)?;
        let values =
            |key: &'static str| info.iter().filter(move |(name, _)| name == key).map(|(_, value)| value.as_str());
        Ok(Self {
            depends: values("depends")
                .flat_map(|list| list.split(','))
                .filter(|n| !n.is_empty())
                .map(canonical)
                .collect(),
            prefers: values("softdep").flat_map(pre_softdeps).collect(),
            release: values("vermagic").find_map(|magic| magic.split(' ').next()).map(str::to_owned),
            content,
        })
    }
}

/// Modules are named with `-` or `_` alike; the kernel's own form has `_`.
pub(crate) fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

fn decompressed(path: &Path, file: Vec<u8>) -> io::Result<Vec<u8>> {
    let reader: Box<dyn Read> = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => Box::new(xz2::read::XzDecoder::new(io::Cursor::new(file))),
        Some("zst") => Box::new(zstd::Decoder::new(io::Cursor::new(file))?),
        Some("gz") => Box::new(flate2::read::GzDecoder::new(io::Cursor::new(file))),
        _ => return Ok(file),
    };
    let mut content = Vec::new();
    reader.take(LARGEST).read_to_end(&mut content)?;
    Ok(content)
}

/// How much of `content` is the module itself.
fn unsigned_length(content: &[u8]) -> usize {
    let whole = content.len();
    let Some(signed) = content.strip_suffix(SIGNED) else { return whole };
    let Some(length) = signed.last_chunk::<4>() else { return whole };
    let tail = (u32::from_be_bytes(*length) as usize).saturating_add(SIGNATURE_RECORD);
    signed.len().checked_sub(tail).unwrap_or(whole)
}

/// The `key=value` strings of section `.modinfo`.
fn modinfo(content: &[u8]) -> Result<Vec<(String, String)>, String> {
    let file = object::File::parse(content).map_err(|error| format!("is not an ELF file: {error}"))?;
    let section = file.section_by_name(".modinfo").ok_or("has no .modinfo section")?;
    let data = section.data().map_err(|error| format!("has an unreadable .modinfo section: {error}"))?;
    let pairs = data.split(|byte| *byte == 0).filter_map(|entry| {
        let (key, value) = std::str::from_utf8(entry).ok()?.split_once('=')?;
        Some((key.to_owned(), value.to_owned()))
    });
    Ok(pairs.collect())
}

/// `pre: a b post: c` → `a`, `b`.
fn pre_softdeps(softdep: &str) -> Vec<String> {
    let mut before = false;
    let mut found = Vec::new();
    for word in softdep.split_ascii_whitespace() {
        match word {
            "pre:" => before = true,
            "post:" => before = false,
            name if before => found.push(canonical(name)),
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::testing::module;

    #[test]
    fn a_module_reads_the_same_plain_compressed_and_signed() {
        let dir = tempfile::tempdir().unwrap();
        let plain = module("6.12.1", "virtio-ring,virtio", "pre: crc32c post: later");
        let signed = [&plain[..], &[9; 77], &[0; 8], &77_u32.to_be_bytes(), SIGNED].concat();
        let xz = {
            let mut encoder = xz2::write::XzEncoder::new(Vec::new(), 1);
            encoder.write_all(&signed).unwrap();
            encoder.finish().unwrap()
        };
        let gz = {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(&signed).unwrap();
            encoder.finish().unwrap()
        };
        let zst = zstd::encode_all(&signed[..], 1).unwrap();
        for (name, bytes) in
            [("a.ko", plain.clone()), ("b.ko", signed.clone()), ("c.ko.xz", xz), ("d.ko.gz", gz), ("e.ko.zst", zst)]
        {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let module = Module::read(&path).unwrap();
            assert_eq!(module.content, plain, "{name}");
            assert_eq!(module.depends, ["virtio_ring", "virtio"]);
            assert_eq!(module.prefers, ["crc32c"]);
            assert_eq!(module.release.as_deref(), Some("6.12.1"));
        }
    }

    #[test]
    fn what_is_no_module_is_told_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.ko");
        std::fs::write(&path, b"hello").unwrap();
        assert!(Module::read(&path).unwrap_err().contains("not an ELF file"));
        let path = dir.path().join("x.ko.xz");
        std::fs::write(&path, b"hello").unwrap();
        assert!(Module::read(&path).unwrap_err().contains("decompressed"));
    }

    #[test]
    fn a_lying_signature_length_cuts_nothing() {
        let content = [&[1; 20][..], &[0; 8], &u32::MAX.to_be_bytes(), SIGNED].concat();
        assert_eq!(unsigned_length(&content), content.len());
    }
}
