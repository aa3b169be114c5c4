//! `aenv snapshot`: create, list, delete.

use aenv_api::{Client, NewSnapshot, SnapshotInfo};
use serde_json::Value;

use crate::args::{SnapshotCreation, SnapshotListing};
use crate::output::{self, cell, time};
use crate::progress::StatusLine;

pub(crate) async fn create(client: &Client, creation: &SnapshotCreation) -> anyhow::Result<()> {
    let sandbox = creation.sandbox_id;
    let status = StatusLine::while_waiting(&format!("Taking a snapshot of sandbox {sandbox}"));
    let request = NewSnapshot { name: creation.name.clone(), memory: None, wait: None };
    let snapshot = client.create_snapshot(sandbox, &request).await?;
    drop(status);
    output::object(&snapshot, creation.output, format_args!("Created snapshot {}", snapshot.snapshot_id))
}

pub(crate) async fn list(client: &Client, listing: &SnapshotListing) -> anyhow::Result<()> {
    let sandbox = listing.sandbox_id.map(|id| id.to_string());
    let mut items = Vec::new();
    let mut token = None;
    loop {
        let page = client.list_snapshots::<Value>(sandbox.as_deref(), token.as_deref()).await?;
        items.extend(page.items);
        token = page.next_token;
        if token.is_none() {
            break;
        }
    }
    let header = ["SNAPSHOT ID", "NAMES", "CPU", "MEM (MiB)", "DISK (MiB)", "CREATED"];
    output::list(&items, listing.listing.output, &header, |snapshot: SnapshotInfo| {
        vec![
            snapshot.snapshot_id.to_string(),
            cell(Some(&snapshot.names.join(","))),
            snapshot.cpu_count.to_string(),
            snapshot.memory_mb.to_string(),
            snapshot.disk_size_mb.to_string(),
            time(snapshot.created_at),
        ]
    })
}

/// Deletes a snapshot only, never a template that has this name.
pub(crate) async fn delete(client: &Client, reference: &str) -> anyhow::Result<()> {
    let snapshot = client.snapshot(reference).await?.snapshot_id;
    client.delete_template(snapshot).await?;
    Ok(output::line(format_args!("Deleted snapshot {snapshot}"))?)
}
