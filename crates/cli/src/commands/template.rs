//! `aenv template`: list, inspect, logs, watch, delete.

use std::io::{self, IsTerminal as _};

use aenv_api::{Client, Template, TemplateBuild};
use aenv_model::{BuildId, TemplateId};
use anyhow::Context as _;
use serde_json::Value;

use crate::args::{Format, Listing, TemplateInspection, TemplateLogs};
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

/// What the server knows of a template and its builds.
pub(crate) async fn inspect(client: &Client, inspect: &TemplateInspection) -> anyhow::Result<()> {
    let template = client.template(resolve(client, &inspect.template).await?).await?;
    let format = inspect.listing.output;
    if format == Some(Format::Json) || (format.is_none() && !io::stdout().is_terminal()) {
        return Ok(output::line(serde_json::to_string_pretty(&template)?)?);
    }
    let spawned = template.last_spawned_at.map(time);
    for (key, value) in [
        ("Template", template.template_id.to_string()),
        ("Names", cell(Some(&template.names.join(", ")))),
        ("Public", template.public.to_string()),
        ("Created", time(template.created_at)),
        ("Updated", time(template.updated_at)),
        ("Sandboxes", format!("{} so far, the last {}", template.spawn_count, spawned.as_deref().unwrap_or("never"))),
    ] {
        output::line(format_args!("{key:<10} {value}"))?;
    }
    let builds = template.builds.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
    output::line("")?;
    let header = ["BUILD ID", "STATUS", "CPU", "MEM (MiB)", "DISK (MiB)", "CREATED", "FINISHED"];
    output::list(&builds, Some(Format::Table), &header, |build: TemplateBuild| {
        vec![
            build.build_id.to_string(),
            build.status.name().to_owned(),
            build.cpu_count.to_string(),
            build.memory_mb.to_string(),
            cell(build.disk_size_mb.map(|size| size.to_string()).as_deref()),
            time(build.created_at),
            cell(build.finished_at.map(time).as_deref()),
        ]
    })
}

/// What a build has said so far; with `--follow` also what it will say.
pub(crate) async fn logs(client: &Client, logs: &TemplateLogs) -> anyhow::Result<()> {
    let template = resolve(client, &logs.template).await?;
    let build = match logs.build {
        Some(build) => build,
        None => newest(client, template, &logs.template).await?,
    };
    build::print_logs(client, &Build::of(template, build, logs.template.clone()), logs.follow).await
}

/// Waits for the template's newest build, however long it takes; leaving does not end it.
pub(crate) async fn watch(client: &Client, reference: &str) -> anyhow::Result<()> {
    let template = resolve(client, reference).await?;
    let build = newest(client, template, reference).await?;
    build::wait(client, &Build::of(template, build, reference.to_owned()), None, None).await
}

async fn newest(client: &Client, template: TemplateId, reference: &str) -> anyhow::Result<BuildId> {
    let newest = client.template(template).await?.builds.into_iter().next();
    Ok(newest.with_context(|| format!("template {reference} has no build"))?.build_id)
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
