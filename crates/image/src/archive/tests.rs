use std::io::Cursor;
use std::process::Command;

use super::*;

/// A header of `kind` for `path`, ready but for the checksum.
fn header(kind: EntryType, path: &str, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

fn append(archive: &mut Vec<u8>, mut header: Header, data: &[u8]) {
    header.set_cksum();
    archive.extend_from_slice(header.as_bytes());
    archive.extend_from_slice(data);
    archive.resize(archive.len().next_multiple_of(512), 0);
}

/// Every member with its stored bytes.
fn read(archive: &[u8]) -> io::Result<Vec<(Member, Vec<u8>)>> {
    let mut members = Members::new(Cursor::new(archive));
    let mut all = Vec::new();
    while let Some(member) = members.next()? {
        let mut data = Vec::new();
        let mut buffer = [0; 100];
        loop {
            match members.read_data(&mut buffer)? {
                0 => break,
                n => data.extend_from_slice(&buffer[..n]),
            }
        }
        all.push((member, data));
    }
    Ok(all)
}

#[test]
fn long_names_come_from_gnu_blocks_and_from_pax_records_and_pax_wins() {
    let mut archive = Vec::new();
    let long = "d/".repeat(80) + "file";
    append(
        &mut archive,
        header(EntryType::GNULongName, "././@LongLink", long.len() as u64 + 1),
        format!("{long}\0").as_bytes(),
    );
    append(&mut archive, header(EntryType::Regular, "short", 2), b"hi");
    let record = "15 path=from-pa\n";
    append(&mut archive, header(EntryType::XHeader, "pax", 16), record.replace("15", "16").as_bytes());
    append(&mut archive, header(EntryType::GNULongName, "././@LongLink", 4), b"gnu\0");
    append(&mut archive, header(EntryType::Regular, "short", 0), b"");
    let members = read(&archive).unwrap();
    assert_eq!(members[0].0.path, long.as_bytes());
    assert_eq!(members[0].1, b"hi");
    assert_eq!(members[1].0.path, b"from-pa");
}

#[test]
fn a_size_in_pax_overrides_the_header() {
    let mut archive = Vec::new();
    append(&mut archive, header(EntryType::XHeader, "pax", 9), b"9 size=3\n");
    append(&mut archive, header(EntryType::Regular, "a", 0), b"abc");
    append(&mut archive, header(EntryType::Regular, "b", 1), b"b");
    let members = read(&archive).unwrap();
    assert_eq!((members[0].0.size, members[0].1.as_slice()), (3, &b"abc"[..]));
    assert_eq!(members[1].0.path, b"b");
}

#[test]
fn numbers_are_octal_or_base_256_or_blank() {
    assert_eq!(number(b"0000644\0", "mode").unwrap(), 0o644);
    assert_eq!(number(b"    644 ", "mode").unwrap(), 0o644);
    assert_eq!(number(&[0; 8], "mode").unwrap(), 0);
    assert_eq!(number(&[0x80, 0, 0, 0, 0, 1, 0, 0], "uid").unwrap(), 65536);
    assert_eq!(number(&[0xff; 12], "mtime").unwrap().cast_signed(), -1);
    assert!(number(b"zzz", "mode").is_err());
}

#[test]
fn damage_is_noticed() {
    let mut archive = Vec::new();
    append(&mut archive, header(EntryType::Regular, "a", 600), &[7; 600]);
    assert_eq!(read(&archive[..700]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert_eq!(read(&archive[..100]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    archive[0] ^= 1;
    assert_eq!(read(&archive).unwrap_err().kind(), io::ErrorKind::InvalidData);
}

#[test]
fn gnu_tar_writes_sparse_files_four_ways_and_each_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("holes");
    let mut content = vec![0u8; 3 << 20];
    // More pieces than fit the header (4) and one continuation block (21), so that every kind of map is chained.
    for piece in 0..40 {
        content[piece * 65536..piece * 65536 + 4096].fill(piece as u8 + 1);
    }
    {
        use std::io::{Seek, SeekFrom, Write};
        let mut file = std::fs::File::create(&path).unwrap();
        for piece in 0..40 {
            file.seek(SeekFrom::Start(piece as u64 * 65536)).unwrap();
            file.write_all(&content[piece * 65536..piece * 65536 + 4096]).unwrap();
        }
        file.set_len(content.len() as u64).unwrap();
    }
    for format in ["--format=gnu", "--sparse-version=0.0", "--sparse-version=0.1", "--sparse-version=1.0"] {
        let mut tar = Command::new("tar");
        tar.arg("-C").arg(dir.path()).args(["-cS", "--hole-detection=raw", format]);
        if format.starts_with("--sparse") {
            tar.arg("--format=posix");
        }
        let archive = tar.args(["-f", "-", "holes"]).output().expect("tar runs").stdout;
        assert!(archive.len() < content.len(), "{format}: stored sparsely");
        let members = read(&archive).unwrap();
        let (member, data) = &members[0];
        assert_eq!(member.path, b"holes", "{format}");
        assert_eq!(member.size, content.len() as u64, "{format}");
        let mut rebuilt = vec![0; content.len()];
        let mut at = 0;
        for extent in member.extents.as_ref().unwrap_or_else(|| panic!("{format}: no map")) {
            let (offset, length) = (extent.offset as usize, extent.length as usize);
            rebuilt[offset..offset + length].copy_from_slice(&data[at..at + length]);
            at += length;
        }
        assert!(rebuilt == content, "{format}: content differs");
    }
}

#[test]
fn no_input_makes_the_reader_panic() {
    use proptest::prelude::*;
    let mut archive = Vec::new();
    append(&mut archive, header(EntryType::XHeader, "pax", 9), b"9 size=3\n");
    append(&mut archive, header(EntryType::Regular, "a", 0), b"abc");
    append(&mut archive, header(EntryType::GNUSparse, "b", 0), b"");
    proptest!(|(flips in prop::collection::vec((0..archive.len(), any::<u8>()), 0..6), repair in any::<bool>())| {
        let mut damaged = archive.clone();
        for (at, byte) in flips {
            damaged[at] = byte;
        }
        if repair {
            for block in damaged.chunks_exact_mut(512) {
                let mut header = Header::new_old();
                header.as_mut_bytes().copy_from_slice(block);
                header.set_cksum();
                block.copy_from_slice(header.as_bytes());
            }
        }
        let _ = read(&damaged);
    });
}
