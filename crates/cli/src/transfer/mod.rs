//! Copies files and trees between here and a sandbox.
//!
//! A tree is looked at whole before anything of it is copied, so that what cannot be copied (links, devices) and what
//! is in the way is told at once. Then directories are made, then files are copied one by one.

mod download;
mod partial;
mod progress;
mod upload;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use aenv_api::{Client, SandboxState};
use aenv_model::SandboxId;
use anyhow::{Context as _, bail};

use crate::args::{Download, Upload};
use crate::guest::Guest;
use crate::output;
use crate::signals::Interruptions;

/// Longest time without a byte.
const IDLE: Duration = Duration::from_secs(60);

pub(crate) async fn upload(client: &Client, upload: &Upload) -> anyhow::Result<ExitCode> {
    let work = async {
        let guest = guest_of(client, upload.sandbox_id, "upload to").await?;
        upload::run(&guest, upload).await
    };
    to_the_end(work).await
}

pub(crate) async fn download(client: &Client, download: &Download) -> anyhow::Result<ExitCode> {
    let work = async {
        let guest = guest_of(client, download.sandbox_id, "download from").await?;
        download::run(&guest, download).await
    };
    to_the_end(work).await
}

/// The agent of the sandbox, which answers. Traffic may wake a paused one, if it was made so.
async fn guest_of(client: &Client, sandbox: SandboxId, doing: &str) -> anyhow::Result<Guest> {
    let (guest, state) = Guest::find(client, sandbox).await?;
    if state == SandboxState::Paused {
        guest.stat("/", None).await.with_context(|| {
            format!("{doing} sandbox {sandbox}: it is paused, `aenv resume {sandbox}` lets it go on")
        })?;
    }
    Ok(guest)
}

/// Says what was done. A signal ends the work in order, so that temporary files go.
async fn to_the_end(work: impl Future<Output = anyhow::Result<String>>) -> anyhow::Result<ExitCode> {
    let mut interruptions = Interruptions::listen()?;
    tokio::select! {
        done = work => {
            output::line(done?)?;
            Ok(ExitCode::SUCCESS)
        }
        code = interruptions.next() => Ok(ExitCode::from(code)),
    }
}

/// The path of a tree in a sandbox, without slashes at its end. Errors: it is not plain enough to copy trees by.
fn tree_path<'p>(path: &'p str, user: Option<&str>) -> anyhow::Result<&'p str> {
    if user.is_some() {
        bail!("--user is for files, not for directories");
    }
    if !path.starts_with('/') {
        bail!("{path:?} is not absolute, as the path of a directory in a sandbox has to be");
    }
    if path.split('/').any(|part| part == "..") {
        bail!("{path:?} has \"..\" in it");
    }
    let path = path.trim_end_matches('/');
    Ok(if path.is_empty() { "/" } else { path })
}

/// `name` in the directory `dir` of a sandbox.
fn joined(dir: &str, name: &str) -> String {
    format!("{}/{name}", dir.trim_end_matches('/'))
}

/// The last part of a path here, also where that is `.` or ends with it.
fn name_of(path: &Path) -> anyhow::Result<String> {
    let found = match path.file_name() {
        Some(name) => Some(name.to_owned()),
        None => {
            let path = path.canonicalize().with_context(|| format!("find the name of {}", path.display()))?;
            path.file_name().map(ToOwned::to_owned)
        }
    };
    let name = found.with_context(|| format!("{} has no name to keep", path.display()))?;
    name.into_string().map_err(|name| anyhow::anyhow!("the name {name:?} is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_have_plain_absolute_paths() {
        assert_eq!(tree_path("/srv/app/", None).unwrap(), "/srv/app");
        assert_eq!(tree_path("/", None).unwrap(), "/");
        assert!(tree_path("app", None).unwrap_err().to_string().contains("not absolute"));
        assert!(tree_path("/srv/../etc", None).unwrap_err().to_string().contains(".."));
        assert!(tree_path("/srv", Some("me")).unwrap_err().to_string().contains("--user"));
        assert_eq!(joined("/", "x"), "/x");
    }
}
