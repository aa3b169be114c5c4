//! The golden files of the storage crate, and the tool as a process.

#![allow(dead_code)] // each test binary uses its part

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use serde_json::Value;
use sha2::{Digest, Sha256};

pub(crate) static MANIFEST: LazyLock<Value> = LazyLock::new(|| {
    let text = fs::read(fixture("manifest.json")).expect("manifest");
    serde_json::from_slice(&text).expect("json")
});

pub(crate) fn fixture(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../block/overlaybd/tests/fixtures").join(path)
}

pub(crate) fn vectors(kind: &str) -> impl Iterator<Item = &'static Value> {
    let all = MANIFEST["vectors"].as_array().expect("vectors");
    all.iter().filter(move |vector| vector["kind"] == kind)
}

pub(crate) fn vector(id: &str) -> &'static Value {
    let all = MANIFEST["vectors"].as_array().expect("vectors");
    all.iter().find(|vector| vector["id"] == id).unwrap_or_else(|| panic!("no vector {id}"))
}

pub(crate) fn id(vector: &Value) -> &str {
    text(&vector["id"])
}

pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("not a text: {value}"))
}

pub(crate) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("not a number: {value}"))
}

/// The vector's first file.
pub(crate) fn path(vector: &Value) -> PathBuf {
    fixture(text(&vector["files"][0]["path"]))
}

/// The layers of a stack vector.
pub(crate) fn lowers(stack: &Value) -> Vec<PathBuf> {
    stack["lowers_bottom_to_top"].as_array().expect("lowers").iter().map(|id| path(vector(text(id)))).collect()
}

/// The damaged file of a vector, in `dir`.
pub(crate) fn damaged(vector: &Value, dir: &Path) -> PathBuf {
    let patch = &vector["patch"];
    let mut bytes = fs::read(fixture(text(&patch["base"]))).expect("base");
    bytes.resize(number(&patch["length"]) as usize, 0);
    for edit in patch["edits"].as_array().expect("edits") {
        let (at, new) = (number(&edit[0]) as usize, hex::decode(text(&edit[1])).expect("hex"));
        bytes[at..at + new.len()].copy_from_slice(&new);
    }
    assert_eq!(sha256(&bytes), text(&vector["files"][0]["sha256"]), "{}: the patch is wrong", id(vector));
    let path = dir.join(Path::new(text(&vector["files"][0]["path"])).file_name().expect("name"));
    fs::write(&path, bytes).expect("write");
    path
}

/// The files of an upper: where they are, or, of a sparse one, unpacked in `dir`.
pub(crate) fn upper(vector: &Value, dir: &Path) -> Vec<PathBuf> {
    if vector["sparse_file"].is_null() {
        let files = vector["files"].as_array().expect("files");
        return files.iter().map(|file| fixture(text(&file["path"]))).collect();
    }
    let packed = fs::read(path(vector)).expect("packed");
    let unpacked = dir.join(id(vector));
    let file = File::create(&unpacked).expect("create");
    file.set_len(number(&vector["sparse_file"]["size"])).expect("set length");
    let mut rest = &packed[..];
    for segment in vector["sparse_file"]["segments"].as_array().expect("segments") {
        let (now, later) = rest.split_at(number(&segment[1]) as usize);
        file.write_all_at(now, number(&segment[0])).expect("write");
        rest = later;
    }
    vec![unpacked]
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// What the tool did.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs the tool.
pub(crate) fn tool(args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Ran {
    let output = Command::new(env!("CARGO_BIN_EXE_aenv-image")).args(args).output().expect("run");
    let utf8 = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Ran { code: output.status.code(), stdout: utf8(output.stdout), stderr: utf8(output.stderr) }
}

/// Arguments of different kinds in one list.
#[macro_export]
macro_rules! args {
    ($($arg:expr),* $(,)?) => {
        { let args: Vec<std::ffi::OsString> = vec![$($arg.into()),*]; args }
    };
}

impl Ran {
    /// It succeeded, and had nothing to complain of; gives its output.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "{}", self.stdout);
        self.stdout
    }

    /// Its output as JSON.
    #[track_caller]
    pub(crate) fn json(self) -> Value {
        let text = self.ok();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// It ended with code 1, said one line, and that line holds all of `parts`.
    #[track_caller]
    pub(crate) fn refused(self, parts: &[&str]) -> String {
        assert_eq!(self.code, Some(1), "{self:?}");
        assert!(self.stderr.starts_with("error: ") && self.stderr.ends_with('\n'), "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        for part in parts {
            assert!(self.stderr.contains(part), "{part:?} is not in {}", self.stderr);
        }
        self.stderr
    }
}

/// Path as text.
pub(crate) fn shown(path: &Path) -> String {
    path.display().to_string()
}
