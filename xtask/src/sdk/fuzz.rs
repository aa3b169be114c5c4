//! `sdk fuzz`: Schemathesis makes requests up from `/openapi.json`, good ones and bad ones, and looks at the answers: none may
//! be a failure of the server, none may be other than the document says, and none may be missing.
//!
//! On a node of its own: it finds what there is, and deletes it.

use std::path::Path;

use anyhow::Result;

use super::{TEMPLATE, folder};
use crate::artifacts::Artifacts;
use crate::node::{Home, Node};
use crate::paths;
use crate::python::Venv;
use crate::sh::{Run, say};
use crate::test::tally::Tally;

/// The same requests each time.
const SEED: &str = "1";
/// For each call, beyond those that its schema's bounds suggest.
const EXAMPLES: &str = "10";
/// Far above what any answer takes, also of an emulated guest.
const LONGEST_SECS: &str = "60";
const CHECKS: &str = "not_a_server_error,response_schema_conformance,content_type_conformance";

pub(super) fn run(artifacts: &Artifacts, image: &Path) -> Result<Tally> {
    let venv = Venv::ensure("fuzz", &folder().join("fuzz/requirements.txt"))?;
    let node = Node::start(artifacts, &Home::named("fuzz", artifacts)?)?;
    node.pull(image, TEMPLATE)?;
    say("requests made up from the document");
    let run = Run::new(venv.program("schemathesis"))
        .args(["run", &format!("{}/openapi.json", node.url()), "--header", &format!("X-API-KEY: {}", node.key())])
        .args(["--seed", SEED, "--max-examples", EXAMPLES, "--phases", "examples,coverage,fuzzing"])
        .args(["--checks", CHECKS, "--request-timeout", LONGEST_SECS])
        .args(["--continue-on-failure", "--warnings", "off"])
        // What it leaves is not for the source tree.
        .dir(paths::kept())
        // Its line has the key in it.
        .quiet();
    let ok = run.succeeds();
    node.stop()?;
    Ok(Tally::of_step(ok))
}
