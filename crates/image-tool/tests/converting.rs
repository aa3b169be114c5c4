//! `convert`: a small image of files, through the real thing. Needs root, FUSE and loop devices.

mod support;

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use support::*;

/// Whether images can be converted here; says why if not.
fn able() -> bool {
    let root = fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0);
    let missing = ["/dev/fuse", "/dev/loop-control"].into_iter().find(|path| !Path::new(path).exists());
    match (root, missing) {
        (false, _) => eprintln!("skipped: needs root"),
        (_, Some(missing)) => eprintln!("skipped: needs {missing}"),
        _ => return true,
    }
    false
}

fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (path, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, path, *content).expect("add a file");
    }
    tar.into_inner().expect("end the archive")
}

/// An OCI layout of these layers in `folder`.
fn layout(folder: &Path, layers: &[Vec<u8>]) {
    fs::create_dir_all(folder.join("blobs/sha256")).expect("mkdir");
    let blob = |media_type: &str, bytes: &[u8]| {
        let digest = sha256(bytes);
        fs::write(folder.join("blobs/sha256").join(&digest), bytes).expect("write a blob");
        json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len() })
    };
    let json_blob = |media_type: &str, value: Value| blob(media_type, value.to_string().as_bytes());
    let diff_ids: Vec<_> = layers.iter().map(|layer| format!("sha256:{}", sha256(layer))).collect();
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let config = json_blob(
        "application/vnd.oci.image.config.v1+json",
        json!({ "architecture": architecture, "os": "linux", "rootfs": { "type": "layers", "diff_ids": diff_ids },
            "config": { "Env": ["A=b"], "Cmd": ["/bin/sh"], "ExposedPorts": { "80/tcp": {} } } }),
    );
    let compressed = layers.iter().map(|layer| {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(layer).expect("compress");
        blob("application/vnd.oci.image.layer.v1.tar+gzip", &gzip.finish().expect("compress"))
    });
    let manifest = json!({ "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config, "layers": compressed.collect::<Vec<_>>() });
    let manifest = json_blob("application/vnd.oci.image.manifest.v1+json", manifest);
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    fs::write(folder.join("index.json"), index.to_string()).expect("write the index");
    fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).expect("write the version");
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("read")).expect("json")
}

/// The blob of a descriptor.
fn blob_of(layout: &Path, descriptor: &Value) -> PathBuf {
    layout.join("blobs").join(text(&descriptor["digest"]).replace(':', "/"))
}

/// Large files, of which most is holes.
fn assert_same(one: &Path, other: &Path) {
    let open = |path| BufReader::with_capacity(1 << 20, fs::File::open(path).expect("open"));
    let (mut one, mut other) = (open(one), open(other));
    loop {
        let (a, b) = (one.fill_buf().expect("read"), other.fill_buf().expect("read"));
        assert!(a == b);
        let length = a.len();
        if length == 0 {
            return;
        }
        one.consume(length);
        other.consume(length);
    }
}

#[test]
fn an_image_of_files_becomes_layers_and_a_native_image() {
    if !able() {
        return;
    }
    let dir = tempfile::tempdir().expect("temp dir");
    let noise: Vec<u8> = (0..400_000_u64).map(|n| (n.wrapping_mul(n).wrapping_mul(0x9E37_79B9) >> 24) as u8).collect();
    let source = dir.path().join("source");
    layout(
        &source,
        &[tar(&[("etc/one", b"first"), ("data", &noise)]), tar(&[("etc/two", b"second"), (".wh.data", b"")])],
    );
    let (out, native) = (dir.path().join("out"), dir.path().join("native"));
    let reference = format!("oci:{}", shown(&source));
    let converted = tool(args!["convert", &reference, &out, "--native", &native, "--size", "1", "--json"]).json();

    assert_eq!(number(&converted["virtualSize"]), 1 << 30);
    let layers = converted["layers"].as_array().expect("layers");
    assert_eq!(layers.len(), 3, "the empty file system, and two of files");
    let config = out.join("image.json");
    assert_eq!(tool(args!["verify", &config]).ok(), format!("{}: ok\n", shown(&config)));
    let told = tool(args!["inspect", "--json", &config]).json();
    assert_eq!(number(&told["content"]["device"]["virtualSize"]), 1 << 30);
    assert_eq!(told["content"]["device"]["brokenParent"], Value::Null, "each names the one below it");
    for (layer, lower) in layers.iter().zip(told["content"]["lowers"].as_array().expect("lowers")) {
        assert_eq!(layer["digest"], lower["digest"]);
        assert_eq!(layer["file"], lower["file"]);
    }
    assert_eq!(read_json(&out.join("config.json"))["config"]["Env"], json!(["A=b"]));

    // The native image is what registries and lazy readers expect, and holds the same device.
    let index = read_json(&native.join("index.json"));
    assert_eq!(index["manifests"][0]["digest"], converted["native"]["digest"]);
    let manifest = read_json(&blob_of(&native, &index["manifests"][0]));
    let descriptors = manifest["layers"].as_array().expect("layers");
    assert_eq!(descriptors.len(), 3);
    let mut blobs = Vec::new();
    for descriptor in descriptors {
        let blob = blob_of(&native, descriptor);
        assert_eq!(descriptor["mediaType"], "application/vnd.oci.image.layer.v1.tar");
        let size = blob.metadata().expect("look").len();
        let annotations = &descriptor["annotations"];
        let key = |name: &str| format!("containerd.io/snapshot/overlaybd/{name}");
        assert_eq!((number(&descriptor["size"]), text(&annotations[key("blob-size")])), (size, &*size.to_string()));
        assert_eq!(annotations[key("blob-digest")], descriptor["digest"]);
        assert_eq!(annotations[key("blob-fs-type")], "ext4");
        assert_eq!(annotations[key("version")], "0.1.0");
        let told = tool(args!["inspect", "--json", &blob]).json();
        assert_eq!(told["digest"], descriptor["digest"]);
        let packaging = &told["content"]["packaging"];
        assert_eq!((&packaging["zfile"]["algorithm"], &packaging["tar"]["offset"]), (&json!("lz4"), &json!(1536)));
        blobs.push(blob);
    }
    let image_config = read_json(&blob_of(&native, &manifest["config"]));
    let digests: Vec<_> = descriptors.iter().map(|descriptor| descriptor["digest"].clone()).collect();
    assert_eq!(image_config["rootfs"]["diff_ids"], Value::from(digests));
    assert_eq!(image_config["config"], json!({ "Env": ["A=b"], "Cmd": ["/bin/sh"], "ExposedPorts": { "80/tcp": {} } }));
    let (plain, lazy) = (dir.path().join("plain.ext4"), dir.path().join("lazy.ext4"));
    tool(args!["export", "--config", &config, &plain]).ok();
    tool(args!["export", "--lower", &blobs[0], &blobs[1], &blobs[2], &lazy]).ok();
    assert_same(&plain, &lazy);

    // A native image has nothing to convert: its layers are taken as they are. Nothing is replaced, and nothing left behind.
    let again = dir.path().join("again");
    let taken = tool(args!["convert", format!("oci:{}", shown(&native)), &again, "--json"]).json();
    let digests: Vec<_> = taken["layers"].as_array().expect("layers").iter().map(|layer| &layer["digest"]).collect();
    assert_eq!(digests, descriptors.iter().map(|descriptor| &descriptor["digest"]).collect::<Vec<_>>());
    tool(args!["convert", &reference, &out]).refused(&[&shown(&out), "not empty"]);
    let mut names: Vec<_> =
        fs::read_dir(dir.path()).expect("list").map(|entry| entry.expect("entry").file_name()).collect();
    names.sort();
    assert_eq!(names, ["again", "lazy.ext4", "native", "out", "plain.ext4", "source"]);
}

#[test]
fn an_image_that_cannot_be_converted_is_told_in_one_line() {
    if !able() {
        return;
    }
    let dir = tempfile::tempdir().expect("temp dir");
    let (source, out) = (dir.path().join("source"), dir.path().join("out"));
    let reference = format!("oci:{}", shown(&source));
    tool(args!["convert", &reference, &out]).refused(&[&shown(&source)]);
    layout(&source, &[tar(&[("etc/one", b"first")])]);
    let index = read_json(&source.join("index.json"));
    let manifest = read_json(&blob_of(&source, &index["manifests"][0]));
    let blob = blob_of(&source, &manifest["layers"][0]);
    let mut bytes = fs::read(&blob).expect("read");
    bytes[40] ^= 1;
    fs::write(&blob, bytes).expect("write");
    tool(args!["convert", &reference, &out, "--size", "1"]).refused(&[&reference]);
    assert_eq!(fs::read_dir(dir.path()).expect("list").count(), 1, "nothing is left behind");
    assert_eq!(tool(args!["convert", &reference]).code, Some(2), "where to?");
}
