//! Waiting for a template's build: `pull` and `template watch` show it alike.

use std::time::Duration;

use aenv_api::{BuildLogEntry, BuildReason, BuildState, BuildStatus, BuildStatusQuery, Client, ClientError, LogLevel};
use aenv_model::{BuildId, TemplateId};
use anyhow::bail;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout_at};

use crate::args::Format;
use crate::output;
use crate::progress::StatusLine;

/// Time between two looks at a build.
const POLL: Duration = Duration::from_secs(1);
/// Looks in a row that may fail before we give up: a restart of the server takes seconds, a build minutes.
const MAX_FAILED_POLLS: u32 = 10;
/// Log entries asked for at once: the most a server gives.
const LOG_PAGE: usize = 100;

/// A build to wait for.
#[derive(Debug, Clone)]
pub(crate) struct Build {
    pub(crate) template: TemplateId,
    pub(crate) build: BuildId,
    /// How the user names the template.
    pub(crate) name: String,
    /// Where each step is from, if that says more than its number.
    pub(crate) origins: Vec<String>,
    /// Whether what it says stays on a terminal, too.
    pub(crate) verbose: bool,
}

impl Build {
    /// A build without steps of the user's.
    pub(crate) fn of(template: TemplateId, build: BuildId, name: String) -> Self {
        Self { template, build, name, origins: Vec::new(), verbose: false }
    }
}

/// Waits until the build has ended and shows it meanwhile, at most `limit`.
///
/// Errors: the build's failure, with its reason; the time is over; the server cannot be asked any more.
/// Cancel safety: the build goes on at the server.
pub(crate) async fn wait(
    client: &Client,
    build: &Build,
    limit: Option<Duration>,
    format: Option<Format>,
) -> anyhow::Result<()> {
    let deadline = limit.map(|limit| Instant::now() + limit);
    let following = follow(client, build);
    let ended = match deadline {
        None => following.await?,
        Some(deadline) => match timeout_at(deadline, following).await {
            Ok(ended) => ended?,
            Err(_) => {
                let seconds = limit.unwrap_or_default().as_secs();
                bail!("not ready after {seconds} s; the build goes on, see `aenv template watch {}`", build.name)
            }
        },
    };
    match ended.status {
        BuildState::Error => bail!(failure(ended.reason, &build.origins)),
        _ => {
            let ended = BuildStatus { logs: Vec::new(), log_entries: Vec::new(), ..ended };
            output::object(&ended, format, format_args!("Build succeeded: template {} is ready.", build.template))
        }
    }
}

/// Prints the build's log, entry by entry; with `follow` until its end.
pub(crate) async fn print_logs(client: &Client, build: &Build, follow: bool) -> anyhow::Result<()> {
    let mut seen = 0;
    loop {
        let query = BuildStatusQuery { logs_offset: Some(seen), limit: Some(LOG_PAGE), level: None };
        let status = client.build_status(build.template, build.build, &query).await?;
        seen += status.log_entries.len();
        for entry in &status.log_entries {
            let time = entry.timestamp.strftime("%Y-%m-%dT%H:%M:%S.%3fZ");
            output::line(format_args!("{time} {:<5} {}", entry.level.name(), entry.message.trim_end()))?;
        }
        if status.log_entries.len() == LOG_PAGE {
            continue;
        }
        if !follow || status.status.is_terminal() {
            return Ok(());
        }
        sleep(POLL).await;
    }
}

/// Shows the build until its last status, which is given back.
async fn follow(client: &Client, build: &Build) -> anyhow::Result<BuildStatus> {
    let mut line = StatusLine::new("Build status: waiting");
    let mut latest: Option<String> = None;
    let (mut seen, mut failed) = (0, 0);
    let mut ticks = interval(POLL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let query = BuildStatusQuery { logs_offset: Some(seen), limit: Some(LOG_PAGE), level: None };
        let status = match client.build_status(build.template, build.build, &query).await {
            Ok(status) => status,
            Err(error) if is_passing(&error) && failed < MAX_FAILED_POLLS => {
                failed += 1;
                line.set("Build status: the server does not answer, asking again");
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        failed = 0;
        if (status.template_id, status.build_id) != (build.template, build.build) {
            bail!("the server answered about build {} when asked about build {}", status.build_id, build.build);
        }
        seen += status.log_entries.len();
        for entry in &status.log_entries {
            if !repeats(entry, status.reason.as_ref()) {
                show(&line, entry, build.verbose);
            }
            latest = entry.message.lines().last().map(str::to_owned);
        }
        let more = status.log_entries.len() == LOG_PAGE;
        if status.status.is_terminal() && !more {
            return Ok(status);
        }
        line.set(&match latest.as_deref().filter(|_| line.is_live()) {
            Some(message) => format!("Build status: {} · {message}", status.status.name()),
            None => format!("Build status: {}", status.status.name()),
        });
        if more {
            ticks.reset_immediately();
        }
    }
}

/// On a terminal, progress lives in the status line and only what is out of the ordinary stays; elsewhere every entry
/// is a line.
fn show(line: &StatusLine, entry: &BuildLogEntry, verbose: bool) {
    let message = entry.message.trim_end();
    match entry.level {
        LogLevel::Debug => {}
        LogLevel::Info if line.is_live() && !verbose => {}
        LogLevel::Info => line.keep(message),
        LogLevel::Warn => line.keep(&format!("warning: {message}")),
        LogLevel::Error => line.keep(&format!("error: {message}")),
    }
}

/// Whether an entry only says what the build's failure will say at the end.
fn repeats(entry: &BuildLogEntry, reason: Option<&BuildReason>) -> bool {
    entry.level == LogLevel::Error && reason.is_some_and(|reason| entry.message.contains(&reason.message))
}

/// Whether the next look may well succeed.
fn is_passing(error: &ClientError) -> bool {
    match error.status() {
        Some(status) => status.is_server_error(),
        None => !matches!(error, ClientError::Answer { .. }),
    }
}

fn failure(reason: Option<BuildReason>, origins: &[String]) -> String {
    // Numbers begin at 1.
    let origin = |step: &str| origins.get(step.parse::<usize>().ok()?.checked_sub(1)?);
    match reason {
        Some(BuildReason { message, step: Some(step), .. }) if origin(&step).is_some() => {
            let origin = origin(&step).map(String::as_str).unwrap_or_default();
            format!("Build failed: {message} (step: {step}, {origin})")
        }
        Some(BuildReason { message, step: Some(step), .. }) => format!("Build failed: {message} (step: {step})"),
        Some(BuildReason { message, .. }) => format!("Build failed: {message}"),
        None => "Build failed, and the server does not say why".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_its_step() {
        let reason = |step: Option<&str>| BuildReason {
            message: "no such image".into(),
            step: step.map(str::to_owned),
            log_entries: Vec::new(),
        };
        let origins = ["line 3: RUN x".to_owned()];
        assert_eq!(failure(Some(reason(Some("base"))), &origins), "Build failed: no such image (step: base)");
        assert_eq!(failure(Some(reason(Some("1"))), &origins), "Build failed: no such image (step: 1, line 3: RUN x)");
        assert_eq!(failure(Some(reason(Some("2"))), &[]), "Build failed: no such image (step: 2)");
        assert_eq!(failure(Some(reason(None)), &origins), "Build failed: no such image");
    }
}
