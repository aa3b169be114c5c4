//! `bench network`: slots and policies, in a network namespace of the measuring program's own.

use anyhow::Result;

use super::judge::{self, Bound, p50};
use crate::paths;
use crate::sh::{Run, say};

const BOUNDS: &[Bound] = &[
    p50("slot_pool", 1.0, "ms, one that waits"),
    p50("slot_new", 15.0, "ms, with its policy"),
    p50("policy_replace", 20.0, "ms, 50 rules, beside 200 slots"),
];

pub(crate) fn run(rows: &[String], json: bool) -> Result<()> {
    judge::check_rows(BOUNDS, rows)?;
    say("building aenv-bench-network");
    Run::cargo().args(["build", "--quiet", "--release", "-p", "aenv-e2e", "--bin", "aenv-bench-network"]).run()?;
    let program = paths::release_binary("aenv-bench-network");
    let text = Run::as_root_keeping(&[], program).args(rows).read()?;
    judge::report("network", BOUNDS, &text, json)
}
