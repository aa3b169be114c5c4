//! Habits that a compiler cannot ask of a crate that has not opted in: workspace lints, and `unsafe` in few places.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::arrows::Crate;

/// Crates that need `unsafe`, and for what. They deny it and allow it in single modules; everything else forbids it.
const UNSAFE: &[(&str, &str)] = &[
    ("aenv-block-export", "memory shared with the ublk driver, and entries of its io_uring"),
    ("aenv-guest-agent", "PID 1: ioctls, waitid and exec after fork have no safe wrapper"),
    ("aenv-image", "the ioctls that make a loop device"),
    ("aenv-memory", "the ioctl that finds written pages"),
    ("aenv-network", "the ioctls that make a persistent tap"),
    ("aenv-vmm-driver", "work between fork and exec of a VMM, a pidfd in the reactor, the TSC"),
];

/// One sentence for each crate that lacks a habit.
pub(super) fn problems(crates: &[Crate]) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for Crate { name, manifest, roots, .. } in crates {
        let text = fs::read_to_string(manifest).with_context(|| format!("read {}", manifest.display()))?;
        if !opts_in(&text).with_context(|| format!("parse {}", manifest.display()))? {
            problems.push(format!("{name} does not take the workspace's lints: add `[lints] workspace = true`"));
        }
        let attribute = match UNSAFE.iter().any(|(listed, _)| listed == name) {
            true => "#![deny(unsafe_code)]",
            false => "#![forbid(unsafe_code)]",
        };
        for root in roots {
            if !has_line(root, attribute)? {
                problems.push(format!("{} lacks `{attribute}`", root.display()));
            }
        }
    }
    Ok(problems)
}

fn opts_in(manifest: &str) -> Result<bool> {
    let manifest: toml::Table = manifest.parse()?;
    let lints = manifest.get("lints").and_then(|lints| lints.get("workspace"));
    Ok(lints.and_then(toml::Value::as_bool).unwrap_or(false))
}

fn has_line(root: &Path, wanted: &str) -> Result<bool> {
    let text = fs::read_to_string(root).with_context(|| format!("read {}", root.display()))?;
    Ok(text.lines().any(|line| line.trim() == wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_of_the_lint_table_count() -> Result<()> {
        assert!(opts_in("[lints]\nworkspace = true\n")?);
        assert!(opts_in("lints.workspace = true\n")?);
        assert!(!opts_in("[package]\nname = \"x\"\n")?);
        Ok(())
    }
}
