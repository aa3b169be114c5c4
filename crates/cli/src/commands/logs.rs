//! `aenv logs`: what a sandbox went through, and what its guest says on its console.

use std::time::Duration;

use aenv_api::{Client, LogsQuery, SandboxLogEntry};
use aenv_model::SandboxId;
use jiff::Timestamp;
use tokio::time::sleep;

use crate::args::Logs;
use crate::output;

/// Entries per request: the most a server gives.
const PAGE: usize = 1000;
/// Time between two looks for more.
const POLL: Duration = Duration::from_secs(1);

/// Prints what is there, the oldest first; with `--follow` also what comes, until the sandbox's end.
pub(crate) async fn run(client: &Client, logs: &Logs) -> anyhow::Result<()> {
    let sandbox = logs.sandbox_id;
    let since = logs.since.map(|since| since.timestamp(Timestamp::now())).transpose()?;
    let level = logs.level.map(Into::into);
    let mut cursor = since.map(Timestamp::as_millisecond);
    if let Some(tail) = logs.tail {
        // Of none, too, the newest says where what comes begins.
        let query = LogsQuery { level, ..LogsQuery::default() };
        let entries = newest(client, sandbox, query, tail.max(1), cursor).await?;
        cursor = entries.last().map(after).or(cursor);
        show(logs, &entries[entries.len() - tail.min(entries.len())..], &mut cursor)?;
        if cursor.is_none() {
            // Nothing so far; all that comes is new.
            cursor = Some(0);
        }
        if !logs.follow {
            return Ok(());
        }
    }
    loop {
        // First whether it has ended, then what it told: nothing comes after its end.
        let ended = logs.follow && client.sandbox(sandbox).await.is_err_and(|error| error.is_not_found());
        loop {
            let query = LogsQuery { cursor, limit: Some(PAGE), backward: false, level };
            let entries = client.sandbox_logs(sandbox, &query).await?.logs;
            show(logs, &entries, &mut cursor)?;
            if entries.len() < PAGE {
                break;
            }
        }
        if ended || !logs.follow {
            return Ok(());
        }
        sleep(POLL).await;
    }
}

/// The newest `count` entries, the oldest of them first, none from before `since`.
async fn newest(
    client: &Client,
    sandbox: SandboxId,
    query: LogsQuery,
    count: usize,
    since: Option<i64>,
) -> anyhow::Result<Vec<SandboxLogEntry>> {
    let mut found = Vec::new();
    let mut query = LogsQuery { backward: true, ..query };
    while found.len() < count {
        let limit = PAGE.min(count - found.len());
        query.limit = Some(limit);
        let page = client.sandbox_logs(sandbox, &query).await?.logs;
        let last = page.len() < limit;
        query.cursor = page.last().map(|entry| entry.timestamp.as_millisecond() - 1);
        found.extend(page);
        if last {
            break;
        }
    }
    found.retain(|entry| since.is_none_or(|since| entry.timestamp.as_millisecond() >= since));
    found.reverse();
    Ok(found)
}

/// Prints entries; `cursor` is where the next ones begin.
fn show(logs: &Logs, entries: &[SandboxLogEntry], cursor: &mut Option<i64>) -> anyhow::Result<()> {
    for entry in entries {
        if logs.json {
            output::line(serde_json::to_string(entry)?)?;
        } else {
            output::line(text(entry))?;
        }
        *cursor = Some(after(entry));
    }
    Ok(())
}

/// Where the next entry may be. No two of a sandbox have the same millisecond.
fn after(entry: &SandboxLogEntry) -> i64 {
    entry.timestamp.as_millisecond() + 1
}

/// An entry in one line: when, how much it matters, who says so, what, and what belongs to it.
fn text(entry: &SandboxLogEntry) -> String {
    let time = entry.timestamp.strftime("%Y-%m-%dT%H:%M:%S.%3fZ");
    let logger = entry.fields.get("logger").map_or("-", String::as_str);
    let mut line = format!("{time} {:<5} {logger}: {}", entry.level.name(), printable(entry.message.trim_end()));
    for (key, value) in entry.fields.iter().filter(|(key, _)| *key != "logger") {
        line.push_str(&format!(" {key}={}", printable(value)));
    }
    line
}

/// Without what would move a terminal's cursor: a guest may say anything.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\t' { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use aenv_api::LogLevel;

    use super::*;

    #[test]
    fn an_entry_is_a_line_whatever_a_guest_says() {
        let fields = [("logger", "guest"), ("cause", "asked")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        let entry = SandboxLogEntry {
            timestamp: "2026-01-31T12:00:00.123Z".parse().unwrap(),
            level: LogLevel::Info,
            message: "a\u{1b}[2Jb\nc\n".into(),
            fields: BTreeMap::from(fields),
        };
        assert_eq!(text(&entry), "2026-01-31T12:00:00.123Z info  guest: a\u{fffd}[2Jb\u{fffd}c cause=asked");
    }
}
