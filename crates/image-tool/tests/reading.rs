//! `inspect`, `verify` and `export` over every golden file, sound or damaged.

mod support;

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use support::*;

/// Exports to a file in `dir`, and checks that it is the device that `expect` describes.
#[track_caller]
fn check_export(sources: Vec<OsString>, expect: &Value, dir: &Path) {
    let out = dir.join("out");
    let mut args = args!["export", "--force"];
    args.extend(sources);
    args.push(out.clone().into());
    assert_eq!(tool(args).ok(), "");
    let file = fs::File::open(&out).expect("open");
    let size = file.metadata().expect("metadata").len();
    assert_eq!(size, number(&expect["virtual_size"]));
    if let Some(digest) = expect["device_sha256"].as_str() {
        assert_eq!(sha256(&fs::read(&out).expect("read")), digest);
    }
    for range in expect["ranges"].as_array().into_iter().flatten() {
        let mut bytes = vec![0; number(&range["length"]) as usize];
        file.read_exact_at(&mut bytes, number(&range["offset"])).expect("read");
        assert_eq!(sha256(&bytes), text(&range["sha256"]));
    }
    let data: u64 = expect["extents"].as_array().expect("extents").iter().fold(0, |sum, extent| {
        let data = extent["state"] == "data" && extent["fill"] != "zero";
        sum + if data { number(&extent["length"]).next_multiple_of(4096) + 4096 } else { 0 }
    });
    let occupied = file.metadata().expect("metadata").blocks() * 512;
    assert!(occupied <= data, "{occupied} bytes on disk for at most {data} bytes of data");
}

fn lower_args(lowers: &[PathBuf]) -> Vec<OsString> {
    ["--lower".into()].into_iter().chain(lowers.iter().map(OsString::from)).collect()
}

fn upper_args(files: &[PathBuf]) -> Vec<OsString> {
    ["--upper".into()].into_iter().chain(files.iter().map(OsString::from)).collect()
}

#[test]
fn every_layer_is_told_verified_and_exported() {
    let dir = tempfile::tempdir().expect("temp dir");
    for vector in vectors("layer") {
        let (path, facts, expect) = (path(vector), &vector["lsmt"], &vector["expect"]);
        let told = tool(args!["inspect", "--json", "--extents", &path]).json();
        let content = &told["content"];
        assert_eq!(told["file"], shown(&path));
        assert_eq!(told["size"], vector["files"][0]["size"]);
        assert_eq!(told["digest"], format!("sha256:{}", text(&vector["files"][0]["sha256"])));
        assert_eq!(content["kind"], "layer", "{}", id(vector));
        let header = &content["header"];
        for (key, fact) in [("flags", "trailer_flags"), ("indexOffset", "index_offset"), ("indexCount", "index_count")]
        {
            assert_eq!(header[key], facts[fact], "{}: {key}", id(vector));
        }
        assert_eq!((&header["userTag"], &header["version"]), (&facts["user_tag"], &facts["version"]));
        assert_eq!(header["virtualSize"], expect["virtual_size"]);
        for (key, fact) in [("uuid", "uuid"), ("parentUuid", "parent_uuid")] {
            let wanted = match text(&facts[fact]) {
                "" => "00000000-0000-0000-0000-000000000000".to_owned(),
                uuid => uuid.to_lowercase(),
            };
            assert_eq!(header[key], wanted, "{}: {key}", id(vector));
        }
        let wrapped = facts["payload_size"] != told["size"];
        assert_eq!(!content["packaging"]["zfile"].is_null(), wrapped, "{}", id(vector));
        if let Some(index) = facts["disk_index"].as_array() {
            check_extents(&told, index, id(vector));
        }
        assert_eq!(tool(args!["verify", &path]).ok(), format!("{}: ok\n", shown(&path)));
        check_export(lower_args(&[path]), expect, dir.path());
    }
}

#[track_caller]
fn check_extents(told: &Value, index: &[Value], id: &str) {
    let zeroed = |entry: &&Value| number(&entry[3]) == 1;
    let bytes = |entries: Vec<&Value>| entries.iter().map(|entry| number(&entry[1]) * 512).sum::<u64>();
    let content = &told["content"];
    assert_eq!(number(&content["entries"]), index.len() as u64, "{id}");
    assert_eq!(number(&content["zeroedEntries"]), index.iter().filter(zeroed).count() as u64, "{id}");
    assert_eq!(number(&content["zeroed"]), bytes(index.iter().filter(zeroed).collect()), "{id}");
    assert_eq!(number(&content["data"]), bytes(index.iter().filter(|entry| !zeroed(entry)).collect()), "{id}");
    let wanted: Vec<_> = index
        .iter()
        .map(|entry| {
            let sectors = |at: usize| number(&entry[at]) * 512;
            let position = if zeroed(&entry) { Value::Null } else { sectors(2).into() };
            json!({ "offset": sectors(0), "length": sectors(1), "position": position, "layer": 0 })
        })
        .collect();
    assert_eq!(told["extents"], Value::from(wanted), "{id}");
}

#[test]
fn every_stack_is_exported() {
    let dir = tempfile::tempdir().expect("temp dir");
    for vector in vectors("stack") {
        check_export(lower_args(&lowers(vector)), &vector["expect"], dir.path());
    }
}

#[test]
fn every_upper_is_told_verified_and_exported() {
    let dir = tempfile::tempdir().expect("temp dir");
    for vector in vectors("upper") {
        let files = upper(vector, dir.path());
        let before: Vec<_> = files.iter().map(|file| fs::read(file).expect("read")).collect();
        let data = tool(["inspect".into(), "--json".into()].into_iter().chain(files.iter().map(OsString::from))).ok();
        let data: Value = serde_json::from_str(data.lines().next().expect("a line")).expect("json");
        assert_eq!(data["content"]["kind"], "upperData", "{}", id(vector));
        let mode = match text(&vector["layout"]) {
            "log" => "logStructured",
            "hybrid" => "hybridLogStructured",
            other => other,
        };
        assert_eq!(data["content"]["mode"], mode);
        let header = &vector["data_header"];
        assert_eq!(data["content"]["header"]["uuid"], header["uuid"]);
        assert_eq!(data["content"]["header"]["virtualSize"], header["virtual_size"]);
        let extents = vector["expect"]["extents"].as_array().expect("extents");
        let bytes = |state| extents.iter().filter(|e| e["state"] == state).map(|e| number(&e["length"])).sum::<u64>();
        assert_eq!(number(&data["upper"]["data"]), bytes("data"), "{}", id(vector));
        assert_eq!(number(&data["upper"]["zeroed"]), bytes("zeroed"), "{}", id(vector));
        if let Some(index) = files.get(1) {
            let index = tool(args!["inspect", "--json", index]).json();
            let log = vector["index_log"].as_array().expect("index log");
            assert_eq!(number(&index["content"]["logEntries"]), log.len() as u64, "{}", id(vector));
            assert_eq!(number(&index["content"]["data"]), bytes("data"), "{}", id(vector));
        }
        let verified = tool(["verify".into()].into_iter().chain(files.iter().map(OsString::from))).ok();
        assert_eq!(verified, files.iter().map(|file| format!("{}: ok\n", shown(file))).collect::<String>());

        if number(&vector["expect"]["virtual_size"]) > 0 {
            check_export(upper_args(&files), &vector["expect"], dir.path());
        }
        let stacked = &vector["stacked"];
        let mut args = lower_args(&lowers(self::vector(text(&stacked["lower_stack"]))));
        args.extend(upper_args(&files));
        check_export(args, stacked, dir.path());
        let after: Vec<_> = files.iter().map(|file| fs::read(file).expect("read")).collect();
        assert!(before == after, "{}: an upper was written to", id(vector));
    }
}

#[test]
fn every_zfile_is_told_and_verified() {
    for vector in vectors("zfile") {
        let (path, facts) = (path(vector), &vector["zfile"]);
        let told = tool(args!["inspect", "--json", &path]).json();
        let content = &told["content"];
        assert_eq!(content["kind"], "zfile", "{}", id(vector));
        assert_eq!(content["zfile"]["originalSize"], vector["expect"]["size"]);
        assert_eq!(content["zfile"]["blockCount"], facts["block_count"]);
        assert_eq!(content["zfile"]["indexOffset"], facts["index_offset"]);
        assert_eq!(content["zfile"]["algorithm"], vector["params"]["algo"]);
        assert_eq!(content["zfile"]["blockSize"], vector["params"]["block_size"]);
        assert_eq!(tool(args!["verify", &path]).ok(), format!("{}: ok\n", shown(&path)));
    }
}

#[test]
fn every_tar_is_told_or_refused() {
    let dir = tempfile::tempdir().expect("temp dir");
    for vector in vectors("tar") {
        let path = path(vector);
        if vector["recognised"] == false {
            tool(args!["inspect", &path]).refused(&[&shown(&path), "byte 0"]);
            tool(args!["verify", &path]).refused(&[&shown(&path), "byte 0"]);
            continue;
        }
        let told = tool(args!["inspect", "--json", &path]).json();
        let member = &told["content"]["packaging"]["tar"];
        assert_eq!((&member["offset"], &member["size"]), (&vector["payload_offset"], &vector["payload_size"]));
        check_export(lower_args(&[path]), &vector["expect"], dir.path());
    }
}

/// Says where in the file it is wrong, or, of one that is too short, how much of it there is.
fn says_where(line: &str) -> bool {
    let words: Vec<_> = line.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
    words.windows(2).any(|pair| match pair {
        ["byte" | "bytes" | "block", number] | [number, "bytes"] => number.parse::<u64>().is_ok(),
        _ => false,
    })
}

#[test]
fn every_damage_is_refused_in_one_line_that_says_where() {
    let dir = tempfile::tempdir().expect("temp dir");
    let mut seen = 0;
    for vector in vectors("corrupt") {
        let path = damaged(vector, dir.path());
        let named = shown(&path);
        if id(vector).starts_with("bad-u-") {
            let other = |key: &str| vector[key].as_str().map(fixture);
            let files = match (other("pair_data"), other("pair_index")) {
                (Some(data), None) => vec![data, path],
                (None, Some(index)) => vec![path, index],
                _ => panic!("{}: no pair", id(vector)),
            };
            let out = dir.path().join("out");
            let ran = tool(["export".into()].into_iter().chain(upper_args(&files)).chain([out.clone().into()]));
            if vector["may_succeed"] == true {
                assert_eq!(ran.code, Some(0), "{ran:?}");
                let ran = tool(["verify".into()].into_iter().chain(files.iter().map(OsString::from)));
                assert_eq!(ran.code, Some(0), "{ran:?}");
                assert!(ran.stderr.contains("byte 4256"), "the torn tail is told: {ran:?}");
                fs::remove_file(out).expect("remove");
            } else {
                assert!(says_where(&ran.refused(&[&named])));
                assert!(!out.exists());
            }
        } else if vector["may_succeed"] == true {
            let ran = tool(args!["verify", &path]);
            assert!(matches!(ran.code, Some(0 | 1)), "{ran:?}");
        } else {
            let line = tool(args!["verify", &path]).refused(&[&named]);
            assert!(says_where(&line), "{line}");
            if vector["stage"] == "open" {
                let ran = tool(args!["inspect", &path]);
                assert_eq!(ran.refused(&[&named]), line, "{}", id(vector));
            }
            let out = dir.path().join("out");
            tool(args!["export", "--lower", &path, &out]).refused(&[&named]);
            assert!(!out.exists());
        }
        // Without check sums, the digest still tells.
        let sound = format!("sha256:{}", sha256(&fs::read(fixture(text(&vector["patch"]["base"]))).expect("base")));
        if id(vector) != "bad-u-sealed-as-rw" {
            let path = dir.path().join(Path::new(text(&vector["files"][0]["path"])).file_name().expect("name"));
            tool(args!["verify", "--digest", &sound, &path]).refused(&[&named, &sound]);
        }
        seen += 1;
    }
    assert_eq!(seen, 36);
}

#[test]
fn damage_behind_wrappings_says_from_where_bytes_are_counted() {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("layer");
    let mut bytes = fs::read(fixture("tar/tar-pax-lsmt.tar")).expect("read");
    bytes[1536 + 34304 + 8] = 0; // the first entry points at the header
    fs::write(&path, &bytes).expect("write");
    tool(args!["verify", &path]).refused(&["counted from byte 1536", "index entry"]);

    let mut bytes = fs::read(fixture("zlsmt/zl-lz4-4k.commit")).expect("read");
    bytes[600] ^= 1;
    fs::write(&path, &bytes).expect("write");
    let out = dir.path().join("out");
    for args in [args!["verify", &path], args!["export", "--lower", &path, &out]] {
        tool(args).refused(&["block 0 of", "file byte 512", "check sum"]);
    }
    assert!(!out.exists(), "half an export is none");
}

#[test]
fn a_file_that_is_none_of_ours_is_named() {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("odd\nname");
    fs::write(&path, "hello").expect("write");
    let parts = [r"odd\nname is not a usable overlaybd layer", "5 bytes"];
    tool(args!["inspect", &path]).refused(&parts);
    tool(args!["verify", &path]).refused(&parts);
    tool(args!["inspect", dir.path()]).refused(&["not a regular file"]);
    tool(args!["inspect", dir.path().join("nothing")]).refused(&["nothing", "No such file"]);
    // Neither would end by itself.
    let pipe = dir.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("make a pipe");
    let out = dir.path().join("out");
    for endless in [pipe.as_path(), Path::new("/dev/zero")] {
        let refused = ["not a regular file"];
        tool(args!["verify", endless]).refused(&refused);
        tool(args!["export", "--lower", endless, &out]).refused(&refused);
        tool(args!["export", "--upper", endless, &out]).refused(&refused);
        tool(args!["export", "--config", endless, &out]).refused(&refused);
    }
}

#[test]
fn one_bad_file_does_not_keep_the_others_from_being_looked_at() {
    let dir = tempfile::tempdir().expect("temp dir");
    let bad = damaged(vector("bad-l-index-order"), dir.path());
    let good = path(vector("lsmt-basic"));
    for verb in ["inspect", "verify"] {
        let ran = tool(args![verb, &bad, &good]);
        assert_eq!(ran.code, Some(1));
        assert!(ran.stdout.contains(&shown(&good)) && !ran.stdout.contains(&shown(&bad)), "{ran:?}");
    }
    let ran = tool(args!["verify", "--json", &bad, &good]);
    let lines: Vec<Value> = ran.stdout.lines().map(|line| serde_json::from_str(line).expect("json")).collect();
    assert_eq!(lines[1], json!({ "file": shown(&good), "ok": true }));
    assert_eq!(lines[0]["ok"], false);
    assert!(text(&lines[0]["error"]).contains("begins at sector 0, before sector"), "{lines:?}");
}

#[test]
fn a_layer_that_lost_its_trailer_is_not_called_sound() {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("cut");
    let mut bytes = fs::read(path_of("lsmt-sealed-log")).expect("read");
    bytes.truncate(bytes.len() - 4096);
    fs::write(&path, bytes).expect("write");
    tool(args!["verify", &path]).refused(&[&shown(&path), "no trailer"]);
    assert_eq!(tool(args!["inspect", "--json", &path]).json()["content"]["kind"], "upperData");

    let mut bytes = fs::read(path_of("lsmt-sealed-sparse")).expect("read");
    bytes.truncate(bytes.len() - 4096);
    fs::write(&path, bytes).expect("write");
    tool(args!["verify", &path]).refused(&[&shown(&path), "ends at byte"]);
}

fn path_of(id: &str) -> PathBuf {
    path(vector(id))
}

#[test]
fn an_image_config_is_told_verified_and_exported() {
    let dir = tempfile::tempdir().expect("temp dir");
    let stack = vector("stack-3");
    let uppers = vector("upper-hybrid");
    let files = upper(uppers, dir.path());
    fs::create_dir(dir.path().join("top")).expect("mkdir");
    fs::copy(path_of("st-top"), dir.path().join("top/overlaybd.commit")).expect("copy");
    let lower = |id: &str| json!({ "file": path_of(id), "digest": format!("sha256:{}", text(&vector(id)["files"][0]["sha256"])) });
    let config = dir.path().join("image.json");
    let write = |value: Value| fs::write(&config, value.to_string()).expect("write");

    write(json!({ "lowers": [lower("st-base"), lower("st-mid"), { "dir": "top" }] }));
    let told = tool(args!["inspect", "--json", &config]).json();
    assert_eq!(told["content"]["kind"], "imageConfig");
    assert_eq!(told["content"]["depth"], 3);
    assert_eq!(told["content"]["device"]["virtualSize"], stack["expect"]["virtual_size"]);
    assert_eq!(told["content"]["lowers"][0]["inspection"]["content"]["kind"], "layer");
    assert!(tool(args!["inspect", &config]).ok().contains("lowers[2]"));
    assert_eq!(tool(args!["verify", &config]).ok(), format!("{}: ok\n", shown(&config)));
    check_export(args!["--config", &config], &stack["expect"], dir.path());

    let upper = json!({ "mode": "hybridLogStructured", "data": files[0], "index": files[1] });
    let stacked = &uppers["stacked"];
    write(json!({ "lowers": [lower("st-base"), lower("st-mid")], "upper": upper }));
    check_export(args!["--config", &config], stacked, dir.path());
    assert_eq!(tool(args!["verify", &config]).ok(), format!("{}: ok\n", shown(&config)));
    assert_eq!(
        tool(args!["inspect", "--json", &config]).json()["content"]["upper"]["uuid"],
        uppers["data_header"]["uuid"]
    );

    let digest = format!("sha256:{}", "0".repeat(64));
    write(json!({ "lowers": [{ "file": path_of("st-base"), "digest": digest }] }));
    tool(args!["verify", &config]).refused(&["image.json: lowers[0]", &digest]);
    write(
        json!({ "repoBlobUrl": "https://registry.example/v2/a/blobs", "lowers": [{ "digest": digest, "dir": "none" }] }),
    );
    assert_eq!(tool(args!["inspect", "--json", &config]).json()["content"]["device"], Value::Null);
    let out = dir.path().join("out");
    let wanted = ["image.json: lowers[0] is not on this machine", &digest];
    tool(args!["export", "--force", "--config", &config, &out]).refused(&wanted);
    write(json!({ "lowers": [{}] }));
    tool(args!["inspect", &config]).refused(&["image.json", "lowers[0]"]);
    fs::write(&config, "{ nonsense").expect("write");
    tool(args!["verify", &config]).refused(&["image.json", "line 1 column 3"]);
}

#[test]
fn people_get_one_fact_a_line() {
    let page = tool(args!["inspect", "--extents", path(vector("zl-tar-lz4-4k"))]).ok();
    for part in ["kind          layer, compacted", "tar           member of", "zfile         lz4", "at byte 1536"] {
        assert!(page.contains(part), "{part:?} is not in\n{page}");
    }
    let page = tool(args!["inspect", path(vector("orig-sealed"))]).ok();
    assert!(page.contains("sealed in place from a log upper") && page.contains("parent        none"), "{page}");
}

#[test]
fn an_export_does_not_replace_a_file_unless_forced() {
    let dir = tempfile::tempdir().expect("temp dir");
    let out = dir.path().join("out");
    fs::write(&out, "precious").expect("write");
    let layer = path(vector("lsmt-basic"));
    tool(args!["export", "--lower", &layer, &out]).refused(&[&shown(&out), "--force"]);
    assert_eq!(fs::read(&out).expect("read"), b"precious");
    tool(args!["export", "--force", "--lower", &layer, &out]).ok();
    tool(args!["export", "--force", "--lower", &layer, "/dev/null"]).refused(&["/dev/null", "not a regular file"]);
    assert_eq!(fs::read_dir(dir.path()).expect("list").count(), 1, "no temporary file is left");
}
