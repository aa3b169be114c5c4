//! Kernel packages, opened without dpkg: an `ar` archive whose `data.tar.*` member is the file tree.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Component, Path};

use crate::KitError;

/// Unpacks what a guest kernel is made of, `boot/vmlinuz-*` and `lib/modules/**` (with or without `usr/`), from the
/// package `deb` to the existing directory `to`, `usr/` left out of the names. Nothing else of the package is written.
pub(crate) fn unpack_kernel(deb: &Path, to: &Path) -> Result<(), KitError> {
    let file = File::open(deb).map_err(KitError::io("open", deb))?;
    let broken = |error: io::Error| KitError::Package { path: deb.to_owned(), why: format!("cannot be read: {error}") };
    let mut archive = ar::Archive::new(BufReader::new(file));
    while let Some(member) = archive.next_entry() {
        let member = member.map_err(broken)?;
        let name = String::from_utf8_lossy(member.header().identifier()).trim_end_matches('/').to_owned();
        let Some(compression) = name.strip_prefix("data.tar") else { continue };
        let data: Box<dyn Read + '_> = match compression {
            "" => Box::new(member),
            ".xz" => Box::new(xz2::read::XzDecoder::new(member)),
            ".zst" => Box::new(zstd::Decoder::new(member).map_err(broken)?),
            ".gz" => Box::new(flate2::read::GzDecoder::new(member)),
            other => {
                let why = format!("has a data archive compressed as `{other}`, which is not known");
                return Err(KitError::Package { path: deb.to_owned(), why });
            }
        };
        return unpack_tree(data, to).map_err(broken);
    }
    Err(KitError::Package { path: deb.to_owned(), why: "has no data archive".to_owned() })
}

fn unpack_tree(data: impl Read, to: &Path) -> io::Result<()> {
    let mut tar = tar::Archive::new(data);
    for entry in tar.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        // `./usr/lib/modules/…` and `./lib/modules/…` are the same place since the /usr merge.
        let parts: Vec<_> = path.components().filter(|part| *part != Component::CurDir).collect();
        let parts = parts.strip_prefix(&[Component::Normal("usr".as_ref())]).unwrap_or(&parts);
        let relative: std::path::PathBuf = parts.iter().collect();
        let plain = parts.iter().all(|part| matches!(part, Component::Normal(_)));
        let is_kernel = relative.starts_with("boot")
            && relative.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"));
        if !plain || !entry.header().entry_type().is_file() || !(is_kernel || relative.starts_with("lib/modules")) {
            continue;
        }
        let target = to.join(relative);
        if let Some(parent) = target.parent() {
            std::fs::create_dir_all(parent)?;
        }
        io::copy(&mut entry, &mut File::create(target)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn deb(member: &str, data: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut builder = ar::Builder::new(&mut file);
        for (name, data) in [("debian-binary", &b"2.0\n"[..]), ("control.tar.xz", b""), (member, data)] {
            builder.append(&ar::Header::new(name.into(), data.len() as u64), data).unwrap();
        }
        file
    }

    fn tree() -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        for name in
            ["./boot/vmlinuz-1", "./boot/config-1", "./usr/lib/modules/1/kernel/a.ko", "./lib/modules/1/b", "./etc/x"]
        {
            let mut header = tar::Header::new_gnu();
            header.set_size(2);
            header.set_mode(0o644);
            tar.append_data(&mut header, name, &b"ab"[..]).unwrap();
        }
        tar.into_inner().unwrap()
    }

    #[test]
    fn only_kernel_and_modules_are_unpacked_whatever_the_compression() {
        let gzip = {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(&tree()).unwrap();
            encoder.finish().unwrap()
        };
        let xz = {
            let mut encoder = xz2::write::XzEncoder::new(Vec::new(), 1);
            encoder.write_all(&tree()).unwrap();
            encoder.finish().unwrap()
        };
        let zstd = zstd::encode_all(&tree()[..], 1).unwrap();
        for (member, data) in [("data.tar", tree()), ("data.tar.gz", gzip), ("data.tar.xz", xz), ("data.tar.zst", zstd)]
        {
            let dir = tempfile::tempdir().unwrap();
            unpack_kernel(deb(member, &data).path(), dir.path()).unwrap();
            assert_eq!(std::fs::read(dir.path().join("boot/vmlinuz-1")).unwrap(), b"ab", "{member}");
            assert!(dir.path().join("lib/modules/1/kernel/a.ko").exists(), "{member}");
            assert!(dir.path().join("lib/modules/1/b").exists());
            assert!(!dir.path().join("boot/config-1").exists() && !dir.path().join("etc").exists());
        }
    }

    #[test]
    fn a_package_that_is_none_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let none = deb("something", b"");
        let error = unpack_kernel(none.path(), dir.path()).unwrap_err().to_string();
        assert!(error.contains("has no data archive") && error.contains(&*none.path().to_string_lossy()), "{error}");
        let odd = deb("data.tar.lzma", b"");
        assert!(unpack_kernel(odd.path(), dir.path()).unwrap_err().to_string().contains(".lzma"));
    }
}
