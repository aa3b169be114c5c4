//! `bench storage`: runs the measuring programs and holds their rows against the bounds.
//!
//! A row's ratio is our speed to that of a peer which did the same work in the same run, so that it says something on any
//! machine. What is slower than its bound is to be looked into; the bounds are here and nowhere else.

use anyhow::Result;

use super::rows::{Bound, Sense, check_names, p50, ratio, tell};
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
    check_names(rows, BOUNDS)?;
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
    tell("storage", BOUNDS, &text, json)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::bench::rows::{Judged, Measured, Row, judge};

    fn row(name: &str, p50: f64, ratio: Option<f64>) -> Row {
        Row { name: name.to_owned(), unit: "ms".to_owned(), n: 1, min: p50, p50, p95: p50, peer: None, ratio }
    }

    fn judged(row: Row) -> Judged {
        Judged::new(row, BOUNDS)
    }

    #[test]
    fn a_row_passes_if_it_keeps_all_of_its_bounds() {
        assert!(judged(row("seq_read", 1.0, Some(0.85))).pass);
        assert!(!judged(row("seq_read", 1.0, Some(0.84))).pass);
        assert!(!judged(row("seq_read", 1.0, None)).pass, "what was not measured was not kept");
        assert!(judged(row("open_8", 8.0, None)).pass);
        assert!(judged(row("seal_large", 10.0, Some(1.5))).pass);
        assert!(!judged(row("seal_large", 10.1, Some(1.0))).pass);
        assert!(!judged(row("seal_large", 1.0, Some(1.6))).pass);
    }

    #[test]
    fn a_report_says_of_each_row_whether_it_passed() -> Result<()> {
        let rows = vec![row("seq_read", 1.0, Some(0.9)), row("lz4", 1.0, Some(0.1))];
        let report = judge("storage", BOUNDS, Measured { host: Value::Null, rows });
        let json = serde_json::to_value(&report)?;
        assert_eq!((&json["bench"], &json["pass"]), (&"storage".into(), &false.into()));
        assert_eq!((&json["rows"][0]["pass"], &json["rows"][1]["pass"]), (&true.into(), &false.into()));
        assert_eq!(json["rows"][1]["bounds"][0]["sense"], "atLeast");
        let table = report.table();
        assert!(table.lines().nth(1).is_some_and(|line| line.contains("pass  ≥ 0.85 pread")), "{table}");
        Ok(())
    }
}
