//! `commit` and `compact`: what they write is read back.

mod support;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use support::*;

/// Every wrapping, as arguments.
const WRAPPINGS: [&[&str]; 6] = [
    &[],
    &["--tar"],
    &["--zfile", "lz4"],
    &["--zfile", "zstd", "--block-size", "65536"],
    &["--zfile", "lz4", "--tar"],
    &["--zfile", "zstd", "--tar"],
];

/// Exports `layer`, alone or on `lowers`, and gives the digest of the device.
#[track_caller]
fn device(lowers: &[PathBuf], layer: &Path) -> String {
    let out = layer.with_extension("device");
    let mut args = args!["export", "--force", "--lower"];
    args.extend(lowers.iter().map(OsString::from));
    args.extend(args![layer, &out]);
    tool(args).ok();
    sha256(&fs::read(out).expect("read"))
}

#[track_caller]
fn inspected(path: &Path) -> Value {
    assert_eq!(tool(args!["verify", path]).ok(), format!("{}: ok\n", shown(path)));
    tool(args!["inspect", "--json", path]).json()
}

#[test]
fn every_upper_is_committed_in_every_wrapping() {
    let dir = tempfile::tempdir().expect("temp dir");
    let out = dir.path().join("out");
    for vector in vectors("upper") {
        let files = upper(vector, dir.path());
        let lowers = lowers(self::vector(text(&vector["stacked"]["lower_stack"])));
        for wrapping in WRAPPINGS {
            let mut args = args!["commit", "--json", "--force", "--upper"];
            args.extend(files.iter().map(OsString::from));
            args.extend(args!["--lower", &lowers[0], &lowers[1], &out, "--tag", "made here"]);
            args.extend(wrapping.iter().map(OsString::from));
            let written = tool(args).json();
            let told = inspected(&out);
            assert_eq!((&written["file"], &written["size"]), (&told["file"], &told["size"]));
            assert_eq!((&written["digest"], &written["uuid"]), (&told["digest"], &told["content"]["header"]["uuid"]));
            let content = &told["content"];
            assert_eq!(content["packaging"]["tar"].is_null(), !wrapping.contains(&"--tar"), "{wrapping:?}");
            assert_eq!(content["packaging"]["zfile"].is_null(), !wrapping.contains(&"--zfile"), "{wrapping:?}");
            assert_eq!(content["sealedFrom"], Value::Null);
            assert_eq!(content["header"]["userTag"], "made here");
            assert_eq!(
                content["header"]["parentUuid"],
                tool(args!["inspect", "--json", &lowers[1]]).json()["content"]["header"]["uuid"]
            );
            assert_ne!(content["header"]["uuid"], vector["data_header"]["uuid"], "a commit is not the upper");
            assert_eq!(
                device(&lowers, &out),
                text(&vector["stacked"]["device_sha256"]),
                "{}: {wrapping:?}",
                id(vector)
            );
        }
    }
}

#[test]
fn a_commit_with_the_same_uuids_has_the_same_bytes() {
    let dir = tempfile::tempdir().expect("temp dir");
    let (upper, out) = (upper(vector("upper-log"), dir.path()), dir.path().join("out"));
    let (uuid, parent) = ("0bd00777-0000-4000-8000-000000000007", "0bd00777-0000-4000-8000-000000000002");
    let args = args!["commit", "--upper", &upper[0], &upper[1], "--uuid", uuid, "--parent-uuid", parent, &out];
    let line = tool(args.clone()).ok();
    assert!(line.starts_with(&shown(&out)) && line.ends_with(&format!("uuid {uuid}\n")), "{line}");
    let first = fs::read(&out).expect("read");
    tool(args).refused(&[&shown(&out), "--force"]);
    fs::remove_file(&out).expect("remove");
    tool(args!["commit", "--uuid", uuid, "--parent-uuid", parent, "--upper", &upper[0], &upper[1], &out]).ok();
    assert!(fs::read(&out).expect("read") == first, "the same input gives the same bytes");
}

#[test]
fn a_stack_is_compacted_to_a_layer_of_the_same_content() {
    let dir = tempfile::tempdir().expect("temp dir");
    let out = dir.path().join("out");
    for vector in vectors("stack") {
        let lowers = lowers(vector);
        for wrapping in WRAPPINGS {
            let mut args = args!["compact", "--force", "--lower"];
            args.extend(lowers.iter().map(OsString::from));
            args.push(out.clone().into());
            args.extend(wrapping.iter().map(OsString::from));
            tool(args).ok();
            assert_eq!(device(&[], &out), text(&vector["expect"]["device_sha256"]), "{}: {wrapping:?}", id(vector));
            inspected(&out);
        }
    }
}

#[test]
fn a_single_layer_keeps_its_identity_when_it_is_packed_again() {
    let dir = tempfile::tempdir().expect("temp dir");
    let out = dir.path().join("out");
    for vector in vectors("layer").filter(|vector| vector["expect"]["device_sha256"].is_string()) {
        let before = tool(args!["inspect", "--json", path(vector)]).json();
        tool(args!["compact", "--force", "--lower", path(vector), &out, "--zfile", "lz4", "--tar"]).ok();
        let after = inspected(&out);
        for key in ["uuid", "parentUuid", "userTag", "virtualSize"] {
            assert_eq!(after["content"]["header"][key], before["content"]["header"][key], "{}: {key}", id(vector));
        }
        assert_eq!(device(&[], &out), text(&vector["expect"]["device_sha256"]), "{}", id(vector));
    }
}

#[test]
fn a_layer_may_be_replaced_by_what_is_made_of_it() {
    let dir = tempfile::tempdir().expect("temp dir");
    let layer = dir.path().join("layer");
    fs::copy(path(vector("orig-sealed")), &layer).expect("copy");
    tool(args!["compact", "--force", "--lower", &layer, &layer]).ok();
    assert_eq!(device(&[], &layer), text(&vector("orig-sealed")["expect"]["device_sha256"]));
}

#[test]
fn nothing_that_is_read_is_replaced_by_less() {
    let dir = tempfile::tempdir().expect("temp dir");
    let copy = |from: &Path, name: &str| {
        let to = dir.path().join(name);
        fs::copy(from, &to).expect("copy");
        to
    };
    let layer = copy(path(vector("orig-sealed")).as_ref(), "layer");
    let (data, index) = (copy(&fixture("upper/upper-log.data"), "d"), copy(&fixture("upper/upper-log.index"), "i"));
    let link = dir.path().join("link");
    fs::hard_link(&index, &link).expect("link");
    for (args, input) in [
        (args!["export", "--force", "--lower", &layer, &layer], &layer),
        (args!["commit", "--force", "--upper", &data, &index, &index], &index),
        (args!["commit", "--force", "--upper", &data, &index, &link], &index),
        (args!["commit", "--force", "--lower", &layer, "--upper", &data, &index, &layer], &layer),
    ] {
        let before = fs::read(input).expect("read");
        tool(args).refused(&["it cannot be replaced by what is made of it"]);
        assert!(fs::read(input).expect("read") == before);
    }
}

#[test]
fn small_blocks_that_do_not_compress_are_read_again() {
    let dir = tempfile::tempdir().expect("temp dir");
    let (out, again) = (dir.path().join("out"), dir.path().join("again"));
    let layer = path(vector("orig-sealed"));
    for algorithm in ["lz4", "zstd"] {
        tool(args!["compact", "--force", "--lower", &layer, &out, "--zfile", algorithm, "--block-size", "1024"]).ok();
        tool(args!["verify", &out]).ok();
        tool(args!["compact", "--force", "--lower", &out, &again]).ok();
        assert_eq!(device(&[], &again), text(&vector("orig-sealed")["expect"]["device_sha256"]));
    }
}

#[test]
fn bad_input_leaves_nothing_behind() {
    let dir = tempfile::tempdir().expect("temp dir");
    let bytes = fs::read(path(vector("zl-lz4-4k"))).expect("read");
    let layer = dir.path().join("damaged");
    let damaged: Vec<u8> = bytes.iter().enumerate().map(|(at, byte)| if at == 600 { !byte } else { *byte }).collect();
    fs::write(&layer, damaged).expect("write");
    let out = dir.path().join("out");
    for wrapping in WRAPPINGS {
        let mut args = args!["compact", "--lower", &layer, &out];
        args.extend(wrapping.iter().map(OsString::from));
        tool(args).refused(&["damaged", "block 0", "file byte 512"]);
    }
    assert_eq!(fs::read_dir(dir.path()).expect("list").count(), 1);
    let sealed = path(vector("lsmt-sealed-log"));
    let index = fixture("upper/upper-log.index");
    tool(args!["commit", "--upper", &sealed, &index, &out]).refused(&["lsmt-sealed-log", "trailer is at byte"]);
    tool(args!["commit", "--upper", fixture("upper/upper-hybrid.data"), &index, &out])
        .refused(&["upper-log.index", "byte 56"]);
    tool(args!["commit", "--upper", fixture("upper/upper-log.data"), &out])
        .refused(&["upper-log.data", "without an index"]);
    tool(args!["commit", "--lower", &sealed, &out]).refused(&["no upper"]);
}

#[test]
fn wrong_usage_is_told_apart_from_bad_input() {
    for args in [
        args!["export"],
        args!["compact", "--lower", "a", "b", "--zfile", "gzip"],
        args!["compact", "--lower", "a", "b", "--zfile", "lz4", "--block-size", "5000"],
        args!["compact", "--lower", "a", "b", "--zfile", "lz4", "--block-size", "512"],
        args!["compact", "--lower", "a", "b", "--tag", "t".repeat(257)],
        args!["commit", "--upper", "d", "i", "o", "--uuid", "x"],
        args!["frobnicate"],
    ] {
        assert_eq!(tool(args.clone()).code, Some(2), "{args:?}");
    }
    let help = tool(["export", "--help"]).ok();
    assert!(help.contains("aenv-image export --lower FILE... [--upper DATA [INDEX]] [OPTIONS] OUT"), "{help}");
}
