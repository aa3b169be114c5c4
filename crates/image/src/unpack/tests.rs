use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

use aenv_model::Bytes;
use tar::EntryType;

use super::layer::{Tar, sha256};
use super::*;

/// A root to unpack into, with a file beside it that nothing may touch.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    /// `None`, said aloud, where tests can't change owners.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root to give files to their owners");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("root")).unwrap();
        std::fs::write(dir.path().join("outside"), "untouched").unwrap();
        Some(Self { dir })
    }

    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join("root").join(path)
    }

    fn unpack(&self, layers: &[&Tar]) -> Result<(), UnpackError> {
        self.unpack_within(layers, Budget::new(Bytes::mib(64), Bytes::mib(64), 1000), CancellationToken::new())
    }

    fn unpack_within(&self, layers: &[&Tar], budget: Budget, cancel: CancellationToken) -> Result<(), UnpackError> {
        let mut unpacker = Unpacker::new(&self.at(""), true, budget, cancel)?;
        for layer in layers {
            let bytes = layer.finish();
            unpacker.apply(&sha256(&bytes).parse().unwrap(), || Ok(bytes.as_slice()))?;
        }
        unpacker.finish()?;
        assert_eq!(std::fs::read(self.dir.path().join("outside")).unwrap(), b"untouched");
        Ok(())
    }

    fn meta(&self, path: &str) -> std::fs::Metadata {
        std::fs::symlink_metadata(self.at(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    fn read(&self, path: &str) -> String {
        std::fs::read_to_string(self.at(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    fn exists(&self, path: &str) -> bool {
        std::fs::symlink_metadata(self.at(path)).is_ok()
    }
}

fn refusal(result: Result<(), UnpackError>) -> &'static str {
    match result {
        Err(UnpackError::Refused { problem, .. }) => problem,
        other => panic!("{other:?}"),
    }
}

#[test]
fn owners_modes_and_times_are_exact() {
    let Some(place) = Place::new() else { return };
    let mut tar = Tar::default();
    let mut header = Tar::header(EntryType::Directory, "d/", 0o1777);
    header.set_uid(100_000);
    header.set_gid(3_000_000_000);
    header.set_mtime(1_234_567_890);
    tar.append(header, &[]);
    let mut header = Tar::header(EntryType::Regular, "d/setuid", 0o4755);
    header.set_uid(7);
    tar.pax(&[("mtime", b"1500000000.123456789"), ("gid", b"70000")]).append(header, &[]);
    let mut header = Tar::header(EntryType::Symlink, "d/link", 0o777);
    header.as_old_mut().linkname[..4].copy_from_slice(b"gone");
    header.set_uid(8);
    header.set_mtime(99);
    tar.append(header, &[]);
    tar.dir("./");
    place.unpack(&[&tar]).unwrap();
    let dir = place.meta("d");
    assert_eq!((dir.mode() & 0o7777, dir.uid(), dir.gid()), (0o1777, 100_000, 3_000_000_000));
    assert_eq!(dir.mtime(), 1_234_567_890, "files made in it later don't show");
    let file = place.meta("d/setuid");
    assert_eq!((file.mode() & 0o7777, file.uid(), file.gid()), (0o4755, 7, 70_000));
    assert_eq!((file.mtime(), file.mtime_nsec()), (1_500_000_000, 123_456_789));
    let link = place.meta("d/link");
    assert_eq!((link.uid(), link.mtime()), (8, 99));
    assert_eq!(place.meta("").mtime(), 1_600_000_000);
}

#[test]
fn directory_times_survive_later_layers_and_implied_directories_have_none() {
    let Some(place) = Place::new() else { return };
    let (mut lower, mut upper) = (Tar::default(), Tar::default());
    lower.dir("d/").file("d/a", b"").file("implied/x", b"");
    upper.file("d/b", b"").file("d/.wh.a", b"");
    place.unpack(&[&lower, &upper]).unwrap();
    assert_eq!(place.meta("d").mtime(), 1_600_000_000);
    assert_eq!(place.meta("implied").mtime(), 0);
    assert_eq!(place.meta("implied").mode() & 0o7777, 0o755);
}

#[test]
fn a_directory_keeps_its_time_whichever_way_and_whenever_it_is_changed() {
    let Some(place) = Place::new() else { return };
    let (mut lower, mut upper) = (Tar::default(), Tar::default());
    for dir in ["a/", "a/b/", "a/c/", "a/d/", "e/", "e/f/"] {
        lower.dir(dir);
    }
    lower.file("a/b/x", b"").file("a/c/y", b"").symlink("link", "a/b").symlink("turned", "e");
    // Through a link, through one that leads elsewhere later, by a whiteout, an opaque mark, and implied ones.
    upper.file("link/new", b"").file("turned/f/new", b"").symlink("turned", "a").file("a/c/.wh.y", b"");
    upper.file("a/d/.wh..wh..opq", b"").file("e/implied/deep/z", b"").file(".wh.nothing", b"");
    // With one unpacker for both layers, and with one each.
    for each in [false, true] {
        let mut dirs = vec!["", "a", "a/b", "a/c", "a/d", "e", "e/f"];
        if each {
            let budget = || Budget::new(Bytes::mib(1), Bytes::mib(1), 100);
            for (lowest, layer) in [(true, &lower), (false, &upper)] {
                let mut unpacker = Unpacker::new(&place.at(""), lowest, budget(), CancellationToken::new()).unwrap();
                let bytes = layer.finish();
                unpacker.apply(&sha256(&bytes).parse().unwrap(), || Ok(bytes.as_slice())).unwrap();
                unpacker.finish().unwrap();
            }
            dirs.remove(0); // it was there before, and has a time
        } else {
            place.unpack(&[&lower, &upper]).unwrap();
            dirs.remove(0);
        }
        for dir in dirs {
            assert_eq!(place.meta(dir).mtime(), 1_600_000_000, "{dir}");
        }
        assert_eq!((place.meta("e/implied").mtime(), place.meta("e/implied/deep").mtime()), (0, 0));
        for name in ["a", "e", "link", "turned"] {
            let path = place.at(name);
            if path.is_symlink() { std::fs::remove_file(path).unwrap() } else { std::fs::remove_dir_all(path).unwrap() }
        }
    }
}

#[test]
fn attributes_hold_any_byte_and_capabilities_survive_the_change_of_owner() {
    let Some(place) = Place::new() else { return };
    let capability = [1u8, 0, 0, 2, 0, 0x0a, 0, 0, 0, 0, 0, 0, 0x0a, 0, 0, 0, 0, 0, 0, 0];
    let mut tar = Tar::default();
    let mut header = Tar::header(EntryType::Regular, "ping", 0o755);
    header.set_uid(5);
    tar.pax(&[("SCHILY.xattr.security.capability", &capability), ("SCHILY.xattr.trusted.empty", b"")]);
    tar.append(header, &[]);
    tar.pax(&[("SCHILY.xattr.trusted.link", b"=\n=")]).symlink("link", "ping");
    tar.pax(&[("SCHILY.xattr.trusted.dir", b"1")]).dir("d");
    place.unpack(&[&tar]).unwrap();
    let get = |path: &str, name: &str| xattr::get(place.at(path), name).unwrap();
    assert_eq!(get("ping", "security.capability").as_deref(), Some(&capability[..]));
    assert_eq!(get("ping", "trusted.empty").as_deref(), Some(&b""[..]));
    assert_eq!(get("link", "trusted.link").as_deref(), Some(&b"=\n="[..]));
    assert_eq!(get("d", "trusted.dir").as_deref(), Some(&b"1"[..]));
}

#[test]
fn a_directory_of_a_later_layer_has_the_attributes_of_that_layer() {
    let Some(place) = Place::new() else { return };
    let (mut lower, mut upper) = (Tar::default(), Tar::default());
    lower.pax(&[("SCHILY.xattr.trusted.old", b"1")]).dir("d").file("d/kept", b"");
    upper.pax(&[("SCHILY.xattr.trusted.new", b"2")]).append(Tar::header(EntryType::Directory, "d", 0o700), &[]);
    place.unpack(&[&lower, &upper]).unwrap();
    assert_eq!(xattr::get(place.at("d"), "trusted.old").unwrap(), None);
    assert_eq!(xattr::get(place.at("d"), "trusted.new").unwrap().as_deref(), Some(&b"2"[..]));
    assert_eq!(place.meta("d").mode() & 0o7777, 0o700);
    assert!(place.exists("d/kept"));
}

#[test]
fn devices_and_fifos_are_made() {
    let Some(place) = Place::new() else { return };
    let mut tar = Tar::default();
    for (kind, path, major, minor) in [(EntryType::Char, "null", 1, 3), (EntryType::Block, "disk", 259, 70_000)] {
        let mut header = Tar::header(kind, path, 0o666);
        header.set_device_major(major).unwrap();
        header.set_device_minor(minor).unwrap();
        tar.append(header, &[]);
    }
    tar.append(Tar::header(EntryType::Fifo, "pipe", 0o622), &[]);
    place.unpack(&[&tar]).unwrap();
    assert_eq!(place.meta("null").rdev(), rustix::fs::makedev(1, 3));
    assert_eq!(place.meta("null").mode() & 0o7777, 0o666);
    assert!(place.meta("disk").file_type().is_block_device());
    assert_eq!(place.meta("disk").rdev(), rustix::fs::makedev(259, 70_000));
    assert!(place.meta("pipe").file_type().is_fifo());
    assert_eq!(place.meta("pipe").mode() & 0o7777, 0o622);
}

#[test]
fn holes_stay_holes() {
    let Some(place) = Place::new() else { return };
    let mut tar = Tar::default();
    let data = [[1u8; 4096], [2; 4096]].concat();
    let mut header = Tar::header(EntryType::Regular, "GNUSparseFile/holes", 0o644);
    header.set_size(8192);
    tar.pax(&[
        ("GNU.sparse.size", b"1073741824"),
        ("GNU.sparse.map", b"4096,4096,1048576,4096"),
        ("GNU.sparse.name", b"holes"),
    ]);
    tar.append(header, &data);
    place.unpack(&[&tar]).unwrap();
    let meta = place.meta("holes");
    assert_eq!(meta.len(), 1 << 30);
    assert!(meta.blocks() * 512 < 1 << 20, "{} blocks", meta.blocks());
    let file = File::open(place.at("holes")).unwrap();
    let mut byte = [0];
    for (offset, expected) in [(0, 0), (4096, 1), (8191, 1), (8192, 0), (1_048_576, 2), (1_052_672, 0)] {
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut byte, offset).unwrap();
        assert_eq!(byte[0], expected, "at {offset}");
    }
}

#[test]
fn hard_links_reach_into_lower_layers_and_links_themselves() {
    let Some(place) = Place::new() else { return };
    let (mut lower, mut upper) = (Tar::default(), Tar::default());
    lower.dir("usr/").dir("usr/lib/").file("usr/lib/a", b"a").symlink("lib", "usr/lib").symlink("s", "nowhere");
    upper.hard_link("b", "usr/lib/a").hard_link("c", "./lib/a").hard_link("t", "s").hard_link("b", "b");
    place.unpack(&[&lower, &upper]).unwrap();
    assert_eq!(place.meta("usr/lib/a").nlink(), 3);
    assert_eq!(place.read("b"), "a");
    assert_eq!(place.meta("t").ino(), place.meta("s").ino());
}

#[test]
fn links_to_nothing_and_to_directories_are_refused() {
    let Some(place) = Place::new() else { return };
    let link = |target: &str| {
        let mut tar = Tar::default();
        tar.dir("d/").hard_link("l", target);
        refusal(place.unpack(&[&tar]))
    };
    assert!(link("missing").contains("does not have"));
    assert!(link("d/x/y").contains("does not have"));
    assert!(link("d").contains("directory"));
    assert!(link("../outside").contains("parent directory"));
    // A directory gives way to a link to something in it.
    let mut within = Tar::default();
    within.dir("e/").file("e/f", b"kept").hard_link("e", "e/f");
    place.unpack(&[&within]).unwrap();
    assert_eq!((place.read("e").as_str(), place.meta("e").nlink()), ("kept", 1));
}

#[test]
fn a_hard_link_through_a_symbolic_link_stays_inside() {
    let Some(place) = Place::new() else { return };
    let mut tar = Tar::default();
    tar.symlink("up", "..").hard_link("stolen", "up/outside");
    assert!(refusal(place.unpack(&[&tar])).contains("does not have"));
}

#[test]
fn symbolic_links_lead_nowhere_but_inside() {
    let Some(place) = Place::new() else { return };
    let outside = place.dir.path().join("outside-dir");
    std::fs::create_dir(&outside).unwrap();
    let mut tar = Tar::default();
    tar.symlink("abs", outside.to_str().unwrap()).file("abs/a", b"1");
    tar.symlink("up", "../../../../outside-dir").file("up/b", b"2");
    tar.symlink("file", "../outside").file("file", b"3");
    tar.dir("in/").symlink("in/side", "../up").file("in/side/c", b"4");
    place.unpack(&[&tar]).unwrap();
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
    assert_eq!(place.read("file"), "3");
    assert!(place.meta("file").is_file(), "the link gave way");
    let inside = outside.strip_prefix("/").unwrap().to_str().unwrap().to_owned();
    assert_eq!(place.read(&format!("{inside}/a")), "1");
    assert_eq!(place.read("outside-dir/b"), "2");
    assert_eq!(place.read("outside-dir/c"), "4");
}

#[test]
fn loops_and_abysses_are_errors_not_hangs() {
    let Some(place) = Place::new() else { return };
    let mut tar = Tar::default();
    tar.symlink("a", "b").symlink("b", "a").file("a/x", b"");
    assert!(matches!(place.unpack(&[&tar]), Err(UnpackError::Io { .. })));
    let mut tar = Tar::default();
    tar.pax(&[("path", "d/".repeat(400).as_bytes())]).dir("d");
    assert!(matches!(place.unpack(&[&tar]), Err(UnpackError::Io { .. })));
}

#[test]
fn files_and_directories_replace_each_other_within_and_across_layers() {
    let Some(place) = Place::new() else { return };
    let (mut lower, mut upper) = (Tar::default(), Tar::default());
    lower.dir("a/").file("a/x", b"").file("b", b"").file("c", b"").file("c/implied", b"").dir("d/").file("d", b"now");
    upper.file("a", b"file").file("b/y", b"early").dir("b/");
    place.unpack(&[&lower, &upper]).unwrap();
    assert_eq!(place.read("a"), "file");
    assert_eq!(place.read("b/y"), "early");
    assert!(place.exists("c/implied"));
    assert_eq!(place.read("d"), "now");
}

#[test]
fn a_directory_replaces_a_symbolic_link_before_anything_goes_through_it() {
    let Some(place) = Place::new() else { return };
    for late in [false, true] {
        let (mut lower, mut upper) = (Tar::default(), Tar::default());
        lower.dir("usr/").dir("usr/lib/").file("usr/lib/kept", b"").symlink("lib", "usr/lib");
        if !late {
            upper.dir("lib/");
        }
        upper.file("lib/.wh..wh..opq", b"").file("lib/.wh.kept", b"").file("lib/new", b"");
        if late {
            upper.dir("lib/");
        }
        place.unpack(&[&lower, &upper]).unwrap();
        assert!(place.meta("lib").is_dir());
        assert!(place.exists("usr/lib/kept"), "late: {late}");
        assert!(place.exists("lib/new") && !place.exists("usr/lib/new"));
        std::fs::remove_dir_all(place.at("lib")).unwrap();
    }
}

#[test]
fn whiteouts_speak_of_lower_layers_only() {
    let Some(place) = Place::new() else { return };
    let (mut lower, mut upper) = (Tar::default(), Tar::default());
    lower.dir("d/").file("d/old", b"").file("d/sub/old", b"").file("f", b"old").symlink("l", "f");
    upper.file("d/new", b"").file("f", b"new").file(".wh.f", b"").file("d/.wh..wh..opq", b"").file("d/sub/new", b"");
    upper.file(".wh.l", b"").file(".wh.never", b"").file("no/such/.wh.place", b"").file(".wh..wh.aufs", b"");
    place.unpack(&[&lower, &upper]).unwrap();
    assert!(place.exists("d/new") && !place.exists("d/old"));
    assert!(place.exists("d/sub/new") && !place.exists("d/sub/old"));
    assert_eq!(place.read("f"), "new");
    assert!(!place.exists("l") && !place.exists("no"));
}

#[test]
fn a_whiteout_in_the_lowest_layer_takes_nothing() {
    let Some(place) = Place::new() else { return };
    let mut tar = Tar::default();
    tar.file("f", b"").file(".wh.f", b"").file(".wh..wh..opq", b"");
    place.unpack(&[&tar]).unwrap();
    assert!(place.exists("f"));
}

#[test]
fn long_names_are_whole() {
    let Some(place) = Place::new() else { return };
    let long = format!("{}/{}", "d".repeat(200), "f".repeat(255));
    let mut tar = Tar::default();
    tar.pax(&[("path", long.as_bytes()), ("linkpath", "t".repeat(300).as_bytes())]).symlink("x", "y");
    place.unpack(&[&tar]).unwrap();
    assert_eq!(std::fs::read_link(place.at(&long)).unwrap().as_os_str().len(), 300);
}

#[test]
fn bombs_are_noticed_before_the_disk_is_full() {
    if Place::new().is_none() {
        return;
    }
    let mut tar = Tar::default();
    tar.file("a", &[0; 10_000]).file("b", b"");
    let unpack = |budget| Place::new().unwrap().unpack_within(&[&tar], budget, CancellationToken::new());
    let full = unpack(Budget::new(Bytes::mib(1), Bytes(5000), 10));
    assert!(matches!(full, Err(UnpackError::NoSpace { free: Bytes(5000) })), "{full:?}");
    let large = unpack(Budget::new(Bytes(5000), Bytes::mib(1), 10));
    assert!(matches!(large, Err(UnpackError::TooLarge { .. })), "{large:?}");
    let many = unpack(Budget::new(Bytes::mib(1), Bytes::mib(1), 1));
    assert!(matches!(many, Err(UnpackError::TooLarge { .. })), "{many:?}");
}

#[test]
fn content_that_the_configuration_does_not_promise_is_refused() {
    let Some(place) = Place::new() else { return };
    let mut unpacker =
        Unpacker::new(&place.at(""), true, Budget::new(Bytes::mib(1), Bytes::mib(1), 9), CancellationToken::new())
            .unwrap();
    let mut tar = Tar::default();
    tar.file("a", b"");
    // Bytes after the archive's end mark count as well.
    let bytes = [tar.finish(), b"more".to_vec()].concat();
    let result = unpacker.apply(&sha256(&tar.finish()).parse().unwrap(), || Ok(bytes.as_slice()));
    assert!(matches!(result, Err(UnpackError::WrongContent { .. })), "{result:?}");
    unpacker.apply(&sha256(&bytes).parse().unwrap(), || Ok(bytes.as_slice())).unwrap();
}

#[test]
fn a_cancelled_import_stops() {
    let Some(place) = Place::new() else { return };
    let cancel = CancellationToken::new();
    cancel.cancel();
    let result = place.unpack_within(&[&Tar::default()], Budget::new(Bytes(0), Bytes(0), 0), cancel);
    assert!(matches!(result, Err(UnpackError::Cancelled)), "{result:?}");
}
