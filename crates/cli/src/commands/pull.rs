//! `aenv pull`: a template from an OCI image.

use std::path::{Path, absolute};
use std::time::Duration;

use aenv_api::{Client, TemplateBuildStartV2, TemplateCreateV3};
use anyhow::Context as _;

use crate::args::Pull;
use crate::build::{self, Build};
use crate::output;

/// Images that are files of the server's: an OCI layout folder, and what `docker save` writes.
const FILE_IMAGES: [&str; 2] = ["oci:", "docker-archive:"];

/// Announces the template, starts its build and, unless detached, waits for it.
pub(crate) async fn run(client: &Client, pull: Pull) -> anyhow::Result<()> {
    let image = with_absolute_path(&pull.image)?;
    let name = pull.name.unwrap_or_else(|| default_name(&pull.image));
    let ready_cmd = pull.ready_cmd.or_else(|| pull.probe.map(probe_command));
    let request = TemplateCreateV3 {
        name: Some(name.clone()),
        cpu_count: pull.size.cpu,
        memory_mb: pull.size.memory,
        ..Default::default()
    };
    let created = client.create_template(&request).await?;
    let (template, build) = (created.template_id, created.build_id);
    let start =
        TemplateBuildStartV2 { from_image: Some(image), start_cmd: pull.start_cmd, ready_cmd, ..Default::default() };
    client.start_build(template, build, &start).await?;
    output::line(format_args!("Created template {template} (build {build})"))?;
    if pull.detach {
        output::line(format_args!("Build started. Watch it with: aenv template watch {name}"))?;
        return Ok(());
    }
    build::wait(client, &Build::of(template, build, name), pull.timeout.map(Duration::from_secs), None).await
}

/// The same image with its path absolute, as the server has a working directory of its own.
pub(super) fn with_absolute_path(image: &str) -> anyhow::Result<String> {
    let Some((scheme, path, tag)) = file_image(image) else { return Ok(image.to_owned()) };
    let path = absolute(path).with_context(|| format!("make the path in {image:?} absolute"))?;
    let path = path.to_str().with_context(|| format!("the absolute path of {image:?} is not UTF-8"))?;
    Ok(format!("{scheme}{path}{}", tag.map(|tag| format!(":{tag}")).unwrap_or_default()))
}

/// Scheme, path and tag of an image that is a file.
fn file_image(image: &str) -> Option<(&'static str, &str, Option<&str>)> {
    let scheme = FILE_IMAGES.into_iter().find(|scheme| image.starts_with(scheme))?;
    let rest = &image[scheme.len()..];
    match rest.rsplit_once(':') {
        Some((path, tag)) if !path.is_empty() && !tag.contains('/') => Some((scheme, path, Some(tag))),
        _ => Some((scheme, rest, None)),
    }
}

/// The last part of an image's name, without tag, digest and an archive's extension, in a template name's alphabet.
fn default_name(image: &str) -> String {
    let stem = match file_image(image) {
        Some((_, path, _)) => {
            let name = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or("image");
            let cut = [".tar.gz", ".tgz", ".tar"].into_iter().find_map(|extension| name.strip_suffix(extension));
            cut.unwrap_or(name)
        }
        None => {
            let last = image.rsplit('/').next().unwrap_or(image);
            last.split(['@', ':']).next().unwrap_or(last)
        }
    };
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    stem.chars().map(|c| if allowed(c) { c.to_ascii_lowercase() } else { '-' }).collect()
}

fn probe_command(port: u16) -> String {
    format!("bash -c '</dev/tcp/127.0.0.1/{port}'")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_named_after_its_image() {
        let cases = [
            ("debian", "debian"),
            ("docker.io/library/python:3.12-slim", "python"),
            ("localhost:5000/team/agent@sha256:abc", "agent"),
            ("ghcr.io/x/Node.js:v1", "node-js"),
            ("oci:/images/base:latest", "base"),
            ("oci:base", "base"),
            ("docker-archive:./out/my app.tar.gz", "my-app"),
        ];
        for (image, name) in cases {
            assert_eq!(default_name(image), name, "{image}");
        }
    }

    #[test]
    fn paths_are_made_absolute_and_tags_kept() {
        let here = std::env::current_dir().unwrap();
        let here = here.to_str().unwrap();
        assert_eq!(with_absolute_path("oci:img:v1").unwrap(), format!("oci:{here}/img:v1"));
        assert_eq!(with_absolute_path("docker-archive:./a.tar").unwrap(), format!("docker-archive:{here}/a.tar"));
        assert_eq!(with_absolute_path("oci:/abs/img").unwrap(), "oci:/abs/img");
        assert_eq!(with_absolute_path("localhost:5000/x:1").unwrap(), "localhost:5000/x:1");
    }

    #[test]
    fn an_empty_path_is_an_error_not_the_working_directory() {
        assert!(with_absolute_path("oci:").is_err());
    }
}
