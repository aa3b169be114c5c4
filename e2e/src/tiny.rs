//! A tiny image for tests that need a guest and no distribution: one static busybox with its usual links.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// Where Debian's `busybox-static` puts it.
const BUSYBOX: &str = "/bin/busybox";

/// Applets that tests call by name.
const APPLETS: &[&str] = &[
    "sh", "true", "false", "echo", "cat", "sleep", "id", "ls", "env", "head", "yes", "wc", "dd", "df", "sync", "rm",
    "fstrim", "timeout",
];

/// Makes an OCI layout in `dir`, for `linux/amd64`. `None`, with the reason printed: there is no static busybox here.
#[must_use]
pub fn layout(dir: &Path) -> Option<PathBuf> {
    layout_for(dir, "amd64")
}

/// The same, labelled as of `architecture`.
#[must_use]
pub fn layout_for(dir: &Path, architecture: &str) -> Option<PathBuf> {
    let Ok(busybox) = std::fs::read(BUSYBOX) else {
        println!("skipped: no {BUSYBOX} (Debian package busybox-static)");
        return None;
    };
    let tar = root_tar(&busybox);
    let diff_id = digest(&tar);
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(&tar).expect("compress");
    let layer = blob(dir, &gzip.finish().expect("compress"));
    let config = json!({
        "architecture": architecture,
        "os": "linux",
        "config": {"Env": ["PATH=/bin", "TINY=yes"], "WorkingDir": "/", "Cmd": ["/bin/sh"]},
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
    });
    let config = json_blob(dir, &config);
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
        "layers": [descriptor("application/vnd.oci.image.layer.v1.tar+gzip", &layer)],
    });
    let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", &json_blob(dir, &manifest));
    entry["platform"] = json!({"architecture": architecture, "os": "linux"});
    let index = json!({"schemaVersion": 2, "manifests": [entry]});
    std::fs::write(dir.join("index.json"), index.to_string()).expect("write the index");
    std::fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).expect("write the layout file");
    Some(dir.to_owned())
}

fn root_tar(busybox: &[u8]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for dir in ["bin/", "etc/", "root/", "tmp/"] {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_size(0);
        header.set_mode(if dir == "tmp/" { 0o1777 } else { 0o755 });
        tar.append_data(&mut header, dir, &[][..]).expect("add a directory");
    }
    let mut file = |path: &str, mode: u32, content: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(mode);
        tar.append_data(&mut header, path, content).expect("add a file");
    };
    file("bin/busybox", 0o755, busybox);
    file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n");
    file("etc/group", 0o644, b"root:x:0:\n");
    for applet in APPLETS {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        header.set_mode(0o777);
        tar.append_link(&mut header, format!("bin/{applet}"), "busybox").expect("add a link");
    }
    tar.into_inner().expect("end the archive")
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// Writes a blob; its digest and size.
fn blob(dir: &Path, bytes: &[u8]) -> (String, usize) {
    let digest = digest(bytes);
    let blobs = dir.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).expect("make the blob directory");
    std::fs::write(blobs.join(digest.trim_start_matches("sha256:")), bytes).expect("write a blob");
    (digest, bytes.len())
}

fn json_blob(dir: &Path, value: &Value) -> (String, usize) {
    blob(dir, value.to_string().as_bytes())
}

fn descriptor(media_type: &str, (digest, size): &(String, usize)) -> Value {
    json!({"mediaType": media_type, "digest": digest, "size": size})
}
