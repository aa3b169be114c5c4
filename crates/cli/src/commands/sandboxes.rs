//! The commands that are one call each: `list`, `delete`, `timeout`.

use aenv_api::{Client, ListQuery, ListedSandbox, TimeoutRequest};
use aenv_model::SandboxId;
use serde_json::Value;

use crate::args::{Listing, Timeout};
use crate::output::{self, cell, time};

/// Items per request: the most a server gives.
const PAGE: &str = "100";

pub(crate) async fn list(client: &Client, listing: &Listing) -> anyhow::Result<()> {
    let mut items = Vec::new();
    let mut query = ListQuery { limit: Some(PAGE.to_owned()), ..Default::default() };
    loop {
        let page = client.list_sandboxes::<Value>(&query).await?;
        items.extend(page.items);
        query.next_token = page.next_token;
        if query.next_token.is_none() {
            break;
        }
    }
    let header = ["SANDBOX ID", "TEMPLATE", "STATE", "CPU", "MEM (MiB)", "DISK (MiB)", "STARTED"];
    output::list(&items, listing.output, &header, |sandbox: ListedSandbox| {
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
    })
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
