//! The first image: a small Debian with python3, for a machine that reaches package mirrors and no image registry.
//!
//! `mmdebstrap` makes one tar of a root filesystem; this module wraps it into an OCI layout folder with a single
//! uncompressed layer (it is read from the same disk, once: compressing it would only cost time). The folder's name is
//! the digest of the recipe, so a changed recipe is a new image and an unchanged one is found in no time.

use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::paths;
use crate::sh::{Run, say};

/// A Debian release whose signing keys the supported hosts all have; what is in the image does not depend on the host.
pub(crate) const SUITE: &str = "bookworm";
const MIRROR: &str = "http://deb.debian.org/debian";
const SECURITY_MIRROR: &str = "http://deb.debian.org/debian-security";

/// On top of Debian's required packages and apt.
const PACKAGES: &[&str] = &["ca-certificates", "curl", "procps", "python3", "sudo"];

/// Merges `/usr` before the first package comes, so that `usrmerge`, which would do it afterwards and brings all of perl
/// along, is not wanted.
const MERGED_USR: &str = "--hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr";

/// Kept out of the image: nobody reads documentation in a sandbox. Licences stay.
const TRIM: &[&str] = &[
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/lintian/*",
];

/// Run in turn by a shell on the host with the root filesystem as `$1`.
const HOOKS: &[&str] = &[
    // What E2B templates give their users: `user`, allowed everything, at home in /home/user.
    r#"chroot "$1" useradd --create-home --shell /bin/bash --uid 1000 user"#,
    r#"echo 'user ALL=(ALL:ALL) NOPASSWD: ALL' > "$1/etc/sudoers.d/user" && chmod 0440 "$1/etc/sudoers.d/user""#,
    r#"mkdir -p "$1/code" && chmod 0777 "$1/code" "$1/usr/local""#,
    // mmdebstrap leaves the names of the machine that it ran on.
    r#"rm -f "$1/etc/hostname" "$1/etc/resolv.conf" && printf '127.0.0.1\tlocalhost\n' > "$1/etc/hosts""#,
    r#"rm -rf "$1"/var/log/*.log "$1"/var/log/apt/* "$1"/var/cache/debconf/*-old "$1"/usr/share/locale"#,
];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Build anew even if this image was built before (to take package updates in).
    #[arg(long)]
    refresh: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    crate::setup::machine()?;
    if args.refresh {
        let kept = folder()?;
        if kept.exists() {
            fs::remove_dir_all(&kept).with_context(|| format!("remove {}", kept.display()))?;
        }
    }
    println!("{}", ensure()?.display());
    Ok(())
}

/// Path of the OCI layout folder; built if this recipe never was.
pub(crate) fn ensure() -> Result<PathBuf> {
    let kept = folder()?;
    if kept.join("index.json").is_file() {
        return Ok(kept);
    }
    say(format_args!("building the first image: Debian {SUITE} with {}", PACKAGES.join(", ")));
    let parent = paths::kept().join("images");
    fs::create_dir_all(&parent).with_context(|| format!("create {}", parent.display()))?;
    let staging = tempfile::tempdir_in(&parent).context("make a staging folder")?;
    let tar = staging.path().join("rootfs.tar");
    bootstrap(&tar)?;

    let layout = staging.path().join("layout");
    write_layout(&layout, &tar)?;
    match fs::rename(&layout, &kept) {
        Ok(()) => Ok(kept),
        // Somebody else built the same image meanwhile; theirs is as good.
        Err(_) if kept.join("index.json").is_file() => Ok(kept),
        Err(error) => Err(error).with_context(|| format!("move the finished image to {}", kept.display())),
    }
}

/// Where this recipe's image is kept, by the digest of all that makes it what it is.
fn folder() -> Result<PathBuf> {
    let recipe = format!("{SUITE}\n{PACKAGES:?}\n{TRIM:?}\n{HOOKS:?}\n{MERGED_USR}\n{}\n", config("")).into_bytes();
    let scratch = tempfile::NamedTempFile::new().context("make a temporary file")?;
    fs::write(scratch.path(), recipe).context("write the recipe down")?;
    Ok(paths::kept().join("images").join(format!("debian-{SUITE}-{}", &sha256(scratch.path())?[..16])))
}

fn bootstrap(tar: &Path) -> Result<()> {
    let (mirror, security) = mirrors();
    let mut run = Run::as_root("mmdebstrap")
        .args(["--quiet", "--variant=minbase", "--components=main", "--format=tar", MERGED_USR])
        .arg(format!("--include={}", PACKAGES.join(",")))
        .args(TRIM.iter().map(|rule| format!("--dpkgopt={rule}")));
    run = run.arg("--aptopt=Apt::Install-Recommends \"false\"").arg("--aptopt=Acquire::Retries \"3\"");
    run.args(HOOKS.iter().map(|hook| format!("--customize-hook={hook}")))
        .arg(SUITE)
        .arg(tar)
        .arg(format!("deb {mirror} {SUITE} main"))
        .arg(format!("deb {mirror} {SUITE}-updates main"))
        .arg(format!("deb {security} {SUITE}-security main"))
        .quiet()
        .run_hushed()
}

/// The Debian mirrors that this machine's apt uses, else the public ones: what works for apt works for us.
pub(crate) fn mirrors() -> (String, String) {
    let listed = Run::new("apt-get")
        .args(["indextargets", "--format", "$(LABEL) $(REPO_URI)", "Identifier: Packages"])
        .quiet()
        .read()
        .unwrap_or_default();
    let labelled = |label: &str| {
        listed.lines().find_map(|line| {
            let (found, uri) = line.split_once(' ')?;
            (found == label && uri.starts_with("http")).then(|| uri.trim_end_matches('/').to_owned())
        })
    };
    (
        labelled("Debian").unwrap_or_else(|| MIRROR.to_owned()),
        labelled("Debian-Security").unwrap_or_else(|| SECURITY_MIRROR.to_owned()),
    )
}

/// The image configuration with one layer of that uncompressed digest.
fn config(layer: &str) -> Value {
    json!({
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "User": "user",
            "WorkingDir": "/home/user",
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"],
            "Cmd": ["/bin/bash"],
        },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{layer}")] },
    })
}

/// Lays `tar` (moved) and the JSON around it out as <https://github.com/opencontainers/image-spec> image-layout says.
fn write_layout(layout: &Path, tar: &Path) -> Result<()> {
    check_tar(tar)?;
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).with_context(|| format!("create {}", blobs.display()))?;

    let layer = sha256(tar)?;
    let layer_size = fs::metadata(tar).context("size of the layer")?.len();
    // The tar may belong to root (sudo); the folder is ours, so moving it is not refused.
    fs::rename(tar, blobs.join(&layer)).context("move the layer into the layout")?;

    let config = write_blob(&blobs, "application/vnd.oci.image.config.v1+json", &config(&layer))?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config,
        "layers": [{
            "mediaType": "application/vnd.oci.image.layer.v1.tar",
            "digest": format!("sha256:{layer}"),
            "size": layer_size,
        }],
    });
    let mut manifest = write_blob(&blobs, "application/vnd.oci.image.manifest.v1+json", &manifest)?;
    manifest["platform"] = json!({ "architecture": "amd64", "os": "linux" });
    manifest["annotations"] = json!({ "org.opencontainers.image.ref.name": "latest" });
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [manifest],
    });
    fs::write(layout.join("oci-layout"), json!({ "imageLayoutVersion": "1.0.0" }).to_string())?;
    fs::write(layout.join("index.json"), index.to_string()).context("write index.json")
}

/// Stores `value` as a blob; returns its descriptor.
fn write_blob(blobs: &Path, media_type: &str, value: &Value) -> Result<Value> {
    let text = value.to_string();
    let scratch = blobs.join("scratch");
    fs::write(&scratch, &text).context("write a blob")?;
    let digest = sha256(&scratch)?;
    fs::rename(&scratch, blobs.join(&digest)).context("name a blob")?;
    Ok(json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": text.len() }))
}

/// A tar ends in two zeroed blocks; without them it was cut short, and the importer would only say so much later.
fn check_tar(tar: &Path) -> Result<()> {
    const END: usize = 1024;
    let mut file = fs::File::open(tar).with_context(|| format!("open {}", tar.display()))?;
    let mut end = [1u8; END];
    file.seek(SeekFrom::End(-(END as i64)))
        .and_then(|_| file.read_exact(&mut end))
        .context("read the end of the layer")?;
    if end.iter().any(|byte| *byte != 0) {
        bail!("{} is cut short: is the disk full?", tar.display());
    }
    Ok(())
}

/// Lower-case hex digest of a file, by coreutils: ours, unoptimized, would take a minute for a layer.
fn sha256(path: &Path) -> Result<String> {
    let line = Run::new("sha256sum").arg("--").arg(path).quiet().read()?;
    match line.split_whitespace().next() {
        Some(digest) if digest.len() == 64 => Ok(digest.to_owned()),
        _ => bail!("sha256sum said {line:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_complete_and_names_its_blobs_by_their_digests() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let tar = dir.path().join("rootfs.tar");
        fs::write(&tar, [0u8; 10240])?;
        let layout = dir.path().join("layout");
        write_layout(&layout, &tar)?;

        let read = |path: PathBuf| -> Result<Value> { Ok(serde_json::from_slice(&fs::read(path)?)?) };
        let blob = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap_or_default().trim_start_matches("sha256:").to_owned();
            layout.join("blobs/sha256").join(digest)
        };
        let index = read(layout.join("index.json"))?;
        let manifest = read(blob(&index["manifests"][0]))?;
        let config = read(blob(&manifest["config"]))?;
        assert_eq!(config["config"]["User"], "user");
        assert_eq!(config["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"]);
        assert_eq!(sha256(&blob(&manifest["layers"][0]))?, manifest["layers"][0]["digest"].as_str().unwrap()[7..]);
        assert_eq!(fs::metadata(blob(&manifest["config"]))?.len(), manifest["config"]["size"].as_u64().unwrap());
        Ok(())
    }

    #[test]
    fn a_tar_that_is_cut_short_is_refused() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let tar = dir.path().join("rootfs.tar");
        fs::write(&tar, [7u8; 2048])?;
        assert!(check_tar(&tar).is_err());
        Ok(())
    }
}
