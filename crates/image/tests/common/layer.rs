//! Layers made by hand, byte by byte. Also part of the crate's own tests.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]

use sha2::Digest as _;
use tar::{EntryType, Header};

pub fn sha256(data: &[u8]) -> String {
    format!("sha256:{}", hex::encode(sha2::Sha256::digest(data)))
}

pub fn gzip(data: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

/// A layer in the making.
#[derive(Default)]
pub struct Tar {
    bytes: Vec<u8>,
}

impl Tar {
    pub fn header(kind: EntryType, path: &str, mode: u32) -> Header {
        let mut header = Header::new_gnu();
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_600_000_000);
        header.set_size(0);
        header
    }

    pub fn append(&mut self, mut header: Header, data: &[u8]) -> &mut Self {
        header.set_cksum();
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(data);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self
    }

    /// Records for the member that follows.
    pub fn pax(&mut self, records: &[(&str, &[u8])]) -> &mut Self {
        let mut data = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let mut length = rest + 1;
            while length != rest + length.to_string().len() {
                length = rest + length.to_string().len();
            }
            data.extend_from_slice(format!("{length} {key}=").as_bytes());
            data.extend_from_slice(value);
            data.push(b'\n');
        }
        let mut header = Self::header(EntryType::XHeader, "pax", 0o644);
        header.set_size(data.len() as u64);
        self.append(header, &data)
    }

    pub fn file(&mut self, path: &str, data: &[u8]) -> &mut Self {
        let mut header = Self::header(EntryType::Regular, path, 0o644);
        header.set_size(data.len() as u64);
        self.append(header, data)
    }

    pub fn dir(&mut self, path: &str) -> &mut Self {
        self.append(Self::header(EntryType::Directory, path, 0o755), &[])
    }

    pub fn link(&mut self, kind: EntryType, path: &str, target: &str) -> &mut Self {
        let mut header = Self::header(kind, path, 0o777);
        header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
        self.append(header, &[])
    }

    pub fn symlink(&mut self, path: &str, target: &str) -> &mut Self {
        self.link(EntryType::Symlink, path, target)
    }

    pub fn hard_link(&mut self, path: &str, target: &str) -> &mut Self {
        self.link(EntryType::Link, path, target)
    }

    pub fn finish(&self) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        bytes.resize(bytes.len() + 1024, 0);
        bytes
    }
}
