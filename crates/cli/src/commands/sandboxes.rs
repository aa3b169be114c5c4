//! The commands that are one call each: `list`, `delete`, `timeout`, `pause`, `resume`, `rollback`, `fork`.

use aenv_api::{
    Client, ClientError, ConnectRequest, ForkRequest, ForkResult, ListQuery, ListedSandbox, PauseRequest,
    RollbackRequest, TimeoutRequest,
};
use aenv_model::SandboxId;
use anyhow::bail;
use serde_json::Value;

use crate::args::{Fork, Listing, Pause, Resume, Rollback, Timeout};
use crate::output::{self, cell, time};
use crate::progress::StatusLine;

/// Items per request: the most a server gives.
const PAGE: &str = "100";

pub(crate) async fn list(client: &Client, listing: &Listing) -> anyhow::Result<()> {
    output::list(&all(client).await?, listing.output, &HEADER, row)
}

/// All pages, as the server has them.
pub(super) async fn all(client: &Client) -> Result<Vec<Value>, ClientError> {
    let mut items = Vec::new();
    let mut query = ListQuery { limit: Some(PAGE.to_owned()), ..Default::default() };
    loop {
        let page = client.list_sandboxes::<Value>(&query).await?;
        items.extend(page.items);
        query.next_token = page.next_token;
        if query.next_token.is_none() {
            return Ok(items);
        }
    }
}

/// What [`row`] has the cells of.
pub(super) const HEADER: [&str; 7] = ["SANDBOX ID", "TEMPLATE", "STATE", "CPU", "MEM (MiB)", "DISK (MiB)", "STARTED"];

/// A sandbox's cells.
pub(super) fn row(sandbox: ListedSandbox) -> Vec<String> {
    let template = sandbox.alias.unwrap_or_else(|| sandbox.template_id.to_string());
    vec![
        sandbox.sandbox_id.to_string(),
        cell(Some(&template)),
        sandbox.state.name().to_owned(),
        sandbox.cpu_count.to_string(),
        sandbox.memory_mb.to_string(),
        sandbox.disk_size_mb.to_string(),
        time(sandbox.started_at),
    ]
}

pub(crate) async fn delete(client: &Client, sandbox: SandboxId) -> anyhow::Result<()> {
    client.delete_sandbox(sandbox).await?;
    Ok(output::line(format_args!("Deleted sandbox {sandbox}"))?)
}

pub(crate) async fn timeout(client: &Client, request: &Timeout) -> anyhow::Result<()> {
    let (sandbox, seconds) = (request.sandbox_id, request.seconds);
    client.set_timeout(sandbox, &TimeoutRequest { timeout: seconds }).await?;
    Ok(output::line(format_args!("Timeout for {sandbox} set to {seconds}s"))?)
}

pub(crate) async fn pause(client: &Client, pause: &Pause) -> anyhow::Result<()> {
    let sandbox = pause.sandbox_id;
    let status = StatusLine::while_waiting(&format!("Pausing sandbox {sandbox}"));
    let request = PauseRequest { memory: pause.disk_only.then_some(false), ..Default::default() };
    client.pause_sandbox(sandbox, &request).await?;
    drop(status);
    Ok(output::line(format_args!("Paused {sandbox}"))?)
}

/// One that runs is left as it is, and lives as long as asked at least.
pub(crate) async fn resume(client: &Client, resume: &Resume) -> anyhow::Result<()> {
    let sandbox = resume.sandbox_id;
    let status = StatusLine::while_waiting(&format!("Resuming sandbox {sandbox}"));
    let request = ConnectRequest { timeout: Some(resume.timeout), memory: resume.boot.then_some(false) };
    let resumed = client.connect_sandbox(sandbox, &request).await?;
    drop(status);
    output::object(&resumed, resume.output, format_args!("Resumed {sandbox}"))
}

/// What it has done since the snapshot is gone.
pub(crate) async fn roll_back(client: &Client, rollback: &Rollback) -> anyhow::Result<()> {
    let (sandbox, snapshot) = (rollback.sandbox_id, &rollback.snapshot);
    let status = StatusLine::while_waiting(&format!("Rolling back sandbox {sandbox}"));
    let back = client.roll_back_sandbox(sandbox, &RollbackRequest { snapshot_id: snapshot.clone() }).await?;
    drop(status);
    output::object(&back, rollback.output, format_args!("Rolled back {sandbox} to {snapshot}"))
}

/// Prints the children that came to be. Errors: some did not, with the reason of the first.
pub(crate) async fn fork(client: &Client, fork: &Fork) -> anyhow::Result<()> {
    let sandbox = fork.sandbox_id;
    let status = StatusLine::while_waiting(&format!("Forking sandbox {sandbox}"));
    let request = ForkRequest { count: Some(fork.count), timeout: fork.timeout };
    let results = client.fork_sandbox(sandbox, &request).await?;
    drop(status);
    if fork.output.is_some() {
        let items = results.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
        output::list(&items, fork.output, &["SANDBOX ID", "ERROR"], |result: ForkResult| {
            let id = result.sandbox.map(|sandbox| sandbox.sandbox_id.to_string());
            let error = result.error.map(|error| error.message);
            vec![cell(id.as_deref()), cell(error.as_deref())]
        })?;
    } else {
        for child in results.iter().filter_map(|result| result.sandbox.as_ref()) {
            output::line(child.sandbox_id)?;
        }
    }
    let failed = results.iter().filter(|result| result.sandbox.is_none()).count();
    if failed > 0 {
        let why = results.iter().find_map(|result| result.error.as_ref()).map_or("unknown", |error| &error.message);
        bail!("{failed} of {} children of sandbox {sandbox} could not be started: {why}", results.len());
    }
    Ok(())
}
