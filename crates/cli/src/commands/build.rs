//! `aenv build`: a template from a Dockerfile.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use aenv_api::{Client, ClientError, TemplateBuildStartV2, TemplateCreateV3};
use aenv_model::TemplateId;
use anyhow::{Context as _, bail};
use tokio_util::io::ReaderStream;

use super::pull::with_absolute_path;
use crate::args::Build as Arguments;
use crate::build::{self, Build};
use crate::dockerfile::{Archive, Plan};
use crate::output;
use crate::progress::StatusLine;

/// Reads the Dockerfile, uploads what it copies, starts the build and, unless detached, follows it.
pub(crate) async fn run(client: &Client, arguments: Arguments) -> anyhow::Result<()> {
    if !arguments.context.is_dir() {
        bail!("{} is no directory to build from", arguments.context.display());
    }
    let dockerfile = arguments.file.clone().unwrap_or_else(|| arguments.context.join("Dockerfile"));
    let text = fs::read_to_string(&dockerfile).with_context(|| format!("read {}", dockerfile.display()))?;
    let build_args: BTreeMap<_, _> = arguments.build_arg.into_iter().collect();
    let plan = Plan::read(&text, &dockerfile, &arguments.context, &build_args)?;
    for warning in &plan.warnings {
        eprintln!("warning: {warning}");
    }
    // An empty command is none.
    let given = |text: Option<String>, planned: Option<String>| text.or(planned).filter(|text| !text.is_empty());
    let start = TemplateBuildStartV2 {
        from_image: Some(with_absolute_path(&plan.image)?),
        force: arguments.no_cache,
        steps: plan.steps,
        start_cmd: given(arguments.start_cmd, plan.start),
        ready_cmd: given(arguments.ready_cmd, plan.ready),
        ..Default::default()
    };
    let request = TemplateCreateV3 {
        name: Some(arguments.name.clone()),
        cpu_count: arguments.size.cpu,
        memory_mb: arguments.size.memory,
        ..Default::default()
    };
    let created = client.create_template(&request).await?;
    let (template, build) = (created.template_id, created.build_id);
    for archive in plan.archives {
        upload(client, template, archive).await?;
    }
    client.start_build(template, build, &start).await?;
    let name = arguments.name;
    if arguments.detach {
        let sentence = format!(
            "Created template {template} (build {build})\nBuild started. Watch it with: aenv template watch {name}"
        );
        return output::object(&created, arguments.output, sentence);
    }
    if arguments.output.is_none() {
        output::line(format_args!("Created template {template} (build {build})"))?;
    }
    let limit = Some(Duration::from_secs(arguments.timeout));
    let followed = Build { template, build, name, origins: plan.origins, verbose: true };
    build::wait(client, &followed, limit, arguments.output).await
}

/// Brings an archive to the server, unless it has it.
async fn upload(client: &Client, template: TemplateId, archive: Archive) -> anyhow::Result<()> {
    let link = client.files_link(template, &archive.hash).await?;
    if link.present {
        return Ok(());
    }
    let url = link.url.context("the server does not say where the build's files are to go")?;
    let _status = StatusLine::while_waiting(&format!("Uploading {} KiB of files", archive.length.div_ceil(1024)));
    let http = aenv_api::http_builder(client.server())?.build().map_err(|source| ClientError::SetUp { source })?;
    let body = reqwest::Body::wrap_stream(ReaderStream::new(tokio::fs::File::from_std(archive.file)));
    // The link is its own leave: the key does not go along.
    let request = http.put(url).header(http::header::CONTENT_LENGTH, archive.length).body(body);
    let answer = request.send().await.map_err(reqwest::Error::without_url).context("upload the build's files")?;
    let status = answer.status();
    if !status.is_success() {
        let text = answer.text().await.unwrap_or_default();
        bail!("the server refuses the build's files ({status}): {}", text.trim());
    }
    Ok(())
}
