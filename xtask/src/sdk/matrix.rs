//! What became of every call of every SDK: a table for people, and the same as JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::paths;

/// What a suite leaves about the calls it made of one set of packages.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
pub(crate) struct Report {
    /// Versions by package.
    pub(crate) packages: BTreeMap<String, String>,
    /// Calls that the suite does not make, and why.
    #[serde(default)]
    pub(crate) excluded: BTreeMap<String, String>,
    /// By call, how many tests that made it ended which way.
    pub(crate) calls: BTreeMap<String, Outcomes>,
    /// Tests that were skipped, and why.
    #[serde(default)]
    pub(crate) skipped: BTreeMap<String, String>,
}

impl Report {
    /// Takes in what another suite says of the same set.
    pub(crate) fn add(&mut self, other: Self) {
        self.packages.extend(other.packages);
        self.excluded.extend(other.excluded);
        self.calls.extend(other.calls);
        self.skipped.extend(other.skipped);
    }
}

#[derive(Debug, Clone, Copy, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct Outcomes {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
}

impl Outcomes {
    fn word(self) -> &'static str {
        match self {
            // A story that fails in one place has made many calls that went well elsewhere.
            Self { passed: 1.., .. } => "pass",
            Self { failed: 1.., .. } => "fail",
            Self { skipped: 1.., .. } => "skip",
            Self { .. } => "not run",
        }
    }
}

/// Reports of one language, the newest packages first.
#[derive(Debug, Serialize)]
pub(crate) struct Matrix {
    pub(crate) language: &'static str,
    pub(crate) reports: Vec<Report>,
}

impl Matrix {
    /// A heading, and one row for each group of calls of one class that went the same way everywhere.
    pub(crate) fn markdown(&self) -> String {
        let mut text = format!("### {}\n\n| calls |", self.language);
        for report in &self.reports {
            let packages: Vec<String> =
                report.packages.iter().map(|(package, version)| format!("`{package}` {version}")).collect();
            let _ = write!(text, " {} |", packages.join("<br>"));
        }
        let _ = writeln!(text, "\n| --- |{}", " --- |".repeat(self.reports.len()));
        for ((class, outcomes), members) in self.rows() {
            let members = members.into_iter().collect::<Vec<_>>().join(", ");
            let name = match class {
                "" => format!("`{members}`"),
                class => format!("`{class}`: {members}"),
            };
            let _ = writeln!(text, "| {name} | {} |", outcomes.join(" | "));
        }
        let newest = self.reports.first();
        for (calls, why) in newest.iter().flat_map(|report| &report.excluded) {
            let _ = writeln!(text, "| `{calls}` |{}", format!(" not tried: {why} |").repeat(self.reports.len()));
        }
        text
    }

    fn rows(&self) -> BTreeMap<(&str, Vec<&'static str>), BTreeSet<&str>> {
        let names: BTreeSet<&str> =
            self.reports.iter().flat_map(|report| report.calls.keys().map(String::as_str)).collect();
        let mut rows = BTreeMap::<_, BTreeSet<_>>::new();
        for name in names {
            let (class, member) = split(name);
            let outcomes =
                self.reports.iter().map(|report| report.calls.get(name).map_or("–", |outcomes| outcomes.word()));
            rows.entry((class, outcomes.collect())).or_default().insert(member);
        }
        rows
    }
}

/// `Sandbox.files` and `read`; `e2b` and `sandbox list`.
fn split(call: &str) -> (&str, &str) {
    match call.strip_prefix("e2b ") {
        Some(command) => ("e2b", command),
        None => call.rsplit_once('.').unwrap_or(("", call)),
    }
}

/// Leaves `sdk-matrix.md` and `sdk-matrix.json` beside what xtask keeps; returns the tables.
pub(crate) fn write(matrices: &[Matrix]) -> Result<String> {
    let tables = matrices.iter().map(Matrix::markdown).collect::<Vec<_>>().join("\n");
    let kept = paths::kept();
    fs::write(kept.join("sdk-matrix.md"), &tables).context("write sdk-matrix.md")?;
    let json = serde_json::to_string_pretty(matrices).context("render sdk-matrix.json")?;
    fs::write(kept.join("sdk-matrix.json"), json).context("write sdk-matrix.json")?;
    Ok(tables)
}

const BEGIN: &str = "<!-- tables: `cargo xtask sdk --all --write` -->\n";
const END: &str = "<!-- end of tables -->\n";

/// Puts the tables where `page` has those of the last time.
pub(crate) fn put_into(page: &Path, tables: &str) -> Result<()> {
    let text = fs::read_to_string(page).with_context(|| format!("read {}", page.display()))?;
    let replaced = replaced(&text, tables).with_context(|| format!("{} has no place for tables", page.display()))?;
    fs::write(page, replaced).with_context(|| format!("write {}", page.display()))
}

fn replaced(page: &str, tables: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n{tables}\n{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(version: &str, calls: &[(&str, Outcomes)]) -> Report {
        Report {
            packages: BTreeMap::from([("e2b".to_owned(), version.to_owned())]),
            calls: calls.iter().map(|(name, outcomes)| ((*name).to_owned(), *outcomes)).collect(),
            ..Report::default()
        }
    }

    #[test]
    fn calls_that_went_alike_share_a_row() {
        let passed = Outcomes { passed: 2, ..Outcomes::default() };
        let failed = Outcomes { failed: 1, ..Outcomes::default() };
        let matrix = Matrix {
            language: "Python",
            reports: vec![
                report("2.1.0", &[("Sandbox.kill", passed), ("Sandbox.new", passed), ("Sandbox.list", passed)]),
                report("2.0.0", &[("Sandbox.kill", passed), ("Sandbox.list", failed)]),
            ],
        };
        let text = matrix.markdown();
        assert!(text.contains("| calls | `e2b` 2.1.0 | `e2b` 2.0.0 |\n| --- | --- | --- |\n"), "{text}");
        assert!(text.contains("| `Sandbox`: kill | pass | pass |"), "{text}");
        assert!(text.contains("| `Sandbox`: list | pass | fail |"), "{text}");
        assert!(text.contains("| `Sandbox`: new | pass | – |"), "{text}");
    }

    #[test]
    fn commands_are_calls_of_the_client() {
        assert_eq!(split("e2b sandbox list"), ("e2b", "sandbox list"));
        assert_eq!(split("Sandbox.files.read"), ("Sandbox.files", "read"));
        assert_eq!(split("get_signature"), ("", "get_signature"));
    }

    #[test]
    fn only_the_tables_of_a_page_are_replaced() {
        let page = format!("before\n{BEGIN}old\n{END}after\n");
        let once = replaced(&page, "new").expect("there are marks");
        assert_eq!(once, format!("before\n{BEGIN}\nnew\n{END}after\n"));
        assert_eq!(replaced(&once, "new").as_deref(), Some(once.as_str()));
        assert_eq!(replaced("no marks", "new"), None);
    }
}
