//! `demo`: the main job, done the way a user would do it, with the time of each step.
//!
//! The first image becomes a template through `aenv`; everything after that is the official `e2b` SDK from PyPI in a
//! virtual environment of its own, run by `e2e/sdk/python/demo.py`.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::artifacts::Profile;
use crate::node::{Home, Node};
use crate::sdk::{self, TEMPLATE};
use crate::setup;
use crate::sh::{Run, say};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// A line of the table; `demo.py` prints its own as JSON, one a line.
#[derive(Debug, Deserialize)]
struct Step {
    step: String,
    seconds: f64,
    #[serde(default)]
    result: String,
}

pub(crate) fn run(_: &Args) -> Result<()> {
    let (artifacts, image) = setup::everything(Profile::Release)?;
    let venv = sdk::python_venv()?;
    let mut steps = Vec::new();

    let start = Instant::now();
    let node = Node::start(&artifacts, &Home::named("demo", &artifacts)?)?;
    steps.push(timed("node started", start, "healthy"));

    let start = Instant::now();
    node.pull(&image, TEMPLATE)?;
    steps.push(timed("image imported, template built", start, TEMPLATE));

    say("the E2B SDK at work");
    let script = node
        .client_env()
        .into_iter()
        .fold(Run::new(venv.program("python")), |run, (name, value)| run.env(name, value))
        .env("AENV_TEMPLATE", TEMPLATE)
        .arg(sdk::folder().join("python/demo.py"));
    let line = script.to_string();
    let mut child = script
        .into_command()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("start `{line}`"))?;
    let stdout = child.stdout.take().context("the script's output is not piped")?;
    for line in BufReader::new(stdout).lines() {
        let line = line.context("read what the script says")?;
        let step: Step = serde_json::from_str(&line).with_context(|| format!("the script said {line:?}"))?;
        eprintln!("    {}: {}", step.step, step.result);
        steps.push(step);
    }
    let status = child.wait().with_context(|| format!("wait for `{line}`"))?;

    let start = Instant::now();
    node.stop()?;
    steps.push(timed("node stopped", start, "in good order"));
    print(&steps);
    if !status.success() {
        bail!("`{line}` ended with {status}");
    }
    Ok(())
}

fn timed(step: &str, start: Instant, result: &str) -> Step {
    Step { step: step.to_owned(), seconds: start.elapsed().as_secs_f64(), result: result.to_owned() }
}

fn print(steps: &[Step]) {
    let width = steps.iter().map(|step| step.step.chars().count()).max().unwrap_or(0);
    println!("\n{:<width$}  {:>10}  result", "step", "time");
    println!("{:-<width$}  {:->10}  {:-<24}", "", "", "");
    for Step { step, seconds, result } in steps {
        let time = if *seconds < 1.0 { format!("{:.0} ms", seconds * 1000.0) } else { format!("{seconds:.2} s") };
        println!("{step:<width$}  {time:>10}  {result}");
    }
}
