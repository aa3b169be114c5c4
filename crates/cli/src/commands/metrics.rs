//! `aenv metrics`: what a sandbox uses.

use aenv_api::{Client, SandboxMetric};
use anyhow::bail;
use jiff::Timestamp;
use serde_json::Value;

use crate::args::Metrics;
use crate::output::{self, time};

/// The newest sample, or all of a time that is kept.
pub(crate) async fn run(client: &Client, metrics: &Metrics) -> anyhow::Result<()> {
    let since = metrics.since.map(|since| since.timestamp(Timestamp::now())).transpose()?;
    let mut items: Vec<Value> = client.sandbox_metrics(metrics.sandbox_id, since.map(Timestamp::as_second)).await?;
    if since.is_none() {
        items.drain(..items.len().saturating_sub(1));
        if items.is_empty() {
            bail!("there are no metrics of sandbox {} yet", metrics.sandbox_id);
        }
    }
    let header = ["TIME", "CPU %", "CPUS", "MEM USED (MiB)", "MEM (MiB)", "DISK USED (MiB)", "DISK (MiB)"];
    output::list(&items, metrics.listing.output, &header, |metric: SandboxMetric| {
        let mib = |bytes: u64| (bytes >> 20).to_string();
        vec![
            time(metric.timestamp),
            format!("{:.1}", metric.cpu_used_pct),
            metric.cpu_count.to_string(),
            mib(metric.mem_used),
            mib(metric.mem_total),
            mib(metric.disk_used),
            mib(metric.disk_total),
        ]
    })
}
