//! `bench storage`: runs the measuring programs and holds their rows against the bounds.

use anyhow::Result;

use super::judge::{self, Bound, Sense, p50, ratio};
use crate::artifacts::Profile;
use crate::sh::{Run, say};
use crate::{paths, setup};

const BOUNDS: &[Bound] = &[
    ratio("seq_read", Sense::AtLeast, 0.85, "pread of the raw file"),
    ratio("rand_read_1", Sense::AtLeast, 0.6, "pread of the raw file"),
    ratio("seq_read_8", Sense::AtLeast, 0.5, "pread of the flattened file"),
    ratio("rand_read_8", Sense::AtLeast, 0.5, "pread of the flattened file"),
    p50("open_8", 8.0, "ms"),
    p50("open_40", 50.0, "ms per 100,000 extents"),
    ratio("rand_write", Sense::AtLeast, 0.6, "pwrite to a file, same flushes"),
    ratio("seq_write", Sense::AtLeast, 0.7, "pwrite to a file"),
    p50("seal_small", 10.0, "ms without flushes"),
    ratio("seal_small", Sense::AtMost, 1.5, "times apart from seal_large"),
    p50("seal_large", 10.0, "ms without flushes"),
    ratio("seal_large", Sense::AtMost, 1.5, "times apart from seal_small"),
    ratio("zstd", Sense::AtLeast, 0.8, "the same crate, all cores"),
    ratio("lz4", Sense::AtLeast, 0.8, "the same crate, all cores"),
    ratio("fuse_seq_read", Sense::AtLeast, 0.5, "direct read of the backing file"),
    ratio("lazy_start", Sense::AtLeast, 3.0, "times sooner than after a full pull"),
    ratio("lazy_bytes", Sense::AtMost, 0.4, "of the image"),
];

pub(crate) fn run(rows: &[String], json: bool) -> Result<()> {
    judge::check_rows(BOUNDS, rows)?;
    let (artifacts, image) = setup::everything(Profile::Release)?;
    say("building aenv-bench-storage and aenv-image");
    Run::cargo()
        .args(["build", "--quiet", "--release", "-p", "aenv-e2e", "--bin", "aenv-bench-storage"])
        .args(["-p", "aenv-image-tool", "--bin", "aenv-image"])
        .run()?;
    // On the disk that is built on: /tmp may be memory.
    let text = Run::new(paths::release_binary("aenv-bench-storage"))
        .arg("--dir")
        .arg(paths::target())
        .args(rows)
        .env("PATH", setup::tool_path()?)
        .env("AENV_E2E_IMAGE", image)
        .env("AENV_E2E_AGENT", &artifacts.agent)
        .env("AENV_E2E_SERVER", &artifacts.server)
        .env("AENV_E2E_CLI", &artifacts.cli)
        .env("AENV_E2E_IMAGE_TOOL", paths::release_binary("aenv-image"))
        .read()?;
    judge::report("storage", BOUNDS, &text, json)
}
