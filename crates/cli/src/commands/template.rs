//! `aenv template`: list, watch, delete.

use aenv_api::{Client, Template};
use aenv_model::TemplateId;
use anyhow::Context as _;
use serde_json::Value;

use crate::args::Listing;
use crate::build::{self, Build};
use crate::output::{self, cell, time};

pub(crate) async fn list(client: &Client, listing: &Listing) -> anyhow::Result<()> {
    let mut items = Vec::new();
    let mut token = None;
    loop {
        let page = client.list_templates::<Value>(token.as_deref()).await?;
        items.extend(page.items);
        token = page.next_token;
        if token.is_none() {
            break;
        }
    }
    let header = ["NAME", "TEMPLATE ID", "STATUS", "CPU", "MEM (MiB)", "DISK (MiB)", "UPDATED"];
    output::list(&items, listing.output, &header, |template: Template| {
        let name = template.names.first().or(template.aliases.first());
        vec![
            cell(name.map(String::as_str)),
            template.template_id.to_string(),
            template.build_status.name().to_owned(),
            template.cpu_count.to_string(),
            template.memory_mb.to_string(),
            template.disk_size_mb.to_string(),
            time(template.updated_at),
        ]
    })
}

/// Waits for the template's newest build, however long it takes; leaving does not end it.
pub(crate) async fn watch(client: &Client, reference: &str) -> anyhow::Result<()> {
    let template = resolve(client, reference).await?;
    let newest = client.template(template).await?.builds.into_iter().next();
    let newest = newest.with_context(|| format!("template {reference} has no build to watch"))?;
    build::wait(client, &Build { template, build: newest.build_id, name: reference.to_owned() }, None).await
}

pub(crate) async fn delete(client: &Client, reference: &str) -> anyhow::Result<()> {
    let template = resolve(client, reference).await?;
    client.delete_template(template).await?;
    Ok(output::line(format_args!("Deleted template {template}"))?)
}

/// The template that an id or a name means.
async fn resolve(client: &Client, reference: &str) -> anyhow::Result<TemplateId> {
    match reference.parse() {
        Ok(id) => Ok(id),
        Err(_) => Ok(client.resolve_alias(reference).await?.template_id),
    }
}
