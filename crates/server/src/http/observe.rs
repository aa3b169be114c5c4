//! What sandboxes use, and what they went through. To ask counts as no use of a sandbox.

use std::collections::BTreeMap;

use aenv_api::{LogLevel, SandboxLogEntry, SandboxLogs, SandboxLogsV2, SandboxMetric, SandboxesWithMetrics};
use aenv_orchestrator::{JournalEntry, Level, Sample};
use axum::Json;
use axum::extract::State;
use serde::Deserialize;

use super::App;
use super::body::{PathOf, QueryOf};
use super::error::ApiError;
use super::sandboxes::parse_id;

/// Most sandboxes that one call asks for.
const MOST_SANDBOXES: usize = 100;
/// Most log entries of one answer, and as many without a wish.
const MOST_ENTRIES: usize = 1000;

/// Query of `GET /sandboxes/{id}/metrics`: Unix seconds, both ends included.
#[derive(Debug, Default, Deserialize)]
pub(super) struct MetricsQuery {
    start: Option<String>,
    end: Option<String>,
}

/// `GET /sandboxes/{id}/metrics`: oldest first.
pub(super) async fn metrics(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    QueryOf(query): QueryOf<MetricsQuery>,
) -> Result<Json<Vec<SandboxMetric>>, ApiError> {
    let samples = app.orchestrator.samples(parse_id(&id)?)?;
    let start = number("start", query.start.as_deref(), "Unix seconds")?.unwrap_or(i64::MIN);
    let end = number("end", query.end.as_deref(), "Unix seconds")?.unwrap_or(i64::MAX);
    let metrics = samples.into_iter().map(metric).filter(|metric| (start..=end).contains(&metric.timestamp_unix));
    Ok(Json(metrics.collect()))
}

/// Query of `GET /sandboxes/metrics`.
#[derive(Debug, Default, Deserialize)]
pub(super) struct AllMetricsQuery {
    sandbox_ids: Option<String>,
}

/// `GET /sandboxes/metrics`: the newest of each. A sandbox that is not there, or has none yet, is left out.
pub(super) async fn all_metrics(
    State(app): State<App>,
    QueryOf(query): QueryOf<AllMetricsQuery>,
) -> Result<Json<SandboxesWithMetrics>, ApiError> {
    let text = query.sandbox_ids.unwrap_or_default();
    let ids: Vec<_> = text.split(',').map(str::trim).filter(|id| !id.is_empty()).collect();
    if !(1..=MOST_SANDBOXES).contains(&ids.len()) {
        let message =
            format!("invalid sandbox_ids: {} ids, expected 1 to {MOST_SANDBOXES} separated by commas", ids.len());
        return Err(ApiError::bad_request(message));
    }
    let newest = ids.into_iter().filter_map(|id| {
        let id = id.parse().ok()?;
        Some((id, metric(app.orchestrator.newest_sample(id).ok()??)))
    });
    Ok(Json(SandboxesWithMetrics { sandboxes: newest.collect() }))
}

fn metric(Sample { at, usage }: Sample) -> SandboxMetric {
    SandboxMetric {
        timestamp: at,
        timestamp_unix: at.as_second(),
        cpu_count: usage.cpu_count,
        cpu_used_pct: usage.cpu_used_pct,
        mem_used: usage.mem_used,
        mem_total: usage.mem_total,
        mem_cache: usage.mem_cache,
        disk_used: usage.disk_used,
        disk_total: usage.disk_total,
    }
}

/// Query of `GET /sandboxes/{id}/logs`.
#[derive(Debug, Default, Deserialize)]
pub(super) struct LogsQuery {
    start: Option<String>,
    limit: Option<String>,
}

/// `GET /sandboxes/{id}/logs`: from a millisecond on, oldest first; for a while also after the sandbox's end.
pub(super) async fn logs_v1(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    QueryOf(query): QueryOf<LogsQuery>,
) -> Result<Json<SandboxLogs>, ApiError> {
    let window = Window {
        cursor: number("start", query.start.as_deref(), "Unix milliseconds")?,
        limit: limit(query.limit.as_deref())?,
        ..Window::default()
    };
    let log_entries = window.of(app.orchestrator.journal(parse_id(&id)?).await?);
    Ok(Json(SandboxLogs { logs: log_entries.iter().map(SandboxLogEntry::line).collect(), log_entries }))
}

/// Query of `GET /v2/sandboxes/{id}/logs`.
#[derive(Debug, Default, Deserialize)]
pub(super) struct LogsV2Query {
    cursor: Option<String>,
    limit: Option<String>,
    direction: Option<String>,
    level: Option<String>,
    search: Option<String>,
}

/// `GET /v2/sandboxes/{id}/logs`: from a millisecond on in either direction.
pub(super) async fn logs_v2(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    QueryOf(query): QueryOf<LogsV2Query>,
) -> Result<Json<SandboxLogsV2>, ApiError> {
    let window = Window {
        cursor: number("cursor", query.cursor.as_deref(), "Unix milliseconds")?,
        limit: limit(query.limit.as_deref())?,
        backward: match query.direction.as_deref() {
            None | Some("forward") => false,
            Some("backward") => true,
            Some(other) => return Err(invalid("direction", other, "forward or backward")),
        },
        least: match query.level.as_deref() {
            None => LogLevel::Debug,
            Some(text) => [LogLevel::Debug, LogLevel::Info, LogLevel::Warn, LogLevel::Error]
                .into_iter()
                .find(|level| level.name() == text)
                .ok_or_else(|| invalid("level", text, "debug, info, warn or error"))?,
        },
        search: query.search.unwrap_or_default(),
    };
    Ok(Json(SandboxLogsV2 { logs: window.of(app.orchestrator.journal(parse_id(&id)?).await?) }))
}

/// The part of a log that is asked for.
#[derive(Debug)]
struct Window {
    /// The first millisecond, in its direction.
    cursor: Option<i64>,
    limit: usize,
    backward: bool,
    least: LogLevel,
    /// What a message is to contain.
    search: String,
}

impl Default for Window {
    fn default() -> Self {
        Self { cursor: None, limit: MOST_ENTRIES, backward: false, least: LogLevel::Debug, search: String::new() }
    }
}

impl Window {
    fn of(&self, journal: Vec<JournalEntry>) -> Vec<SandboxLogEntry> {
        let within = |entry: &JournalEntry| match (self.cursor, self.backward) {
            (None, _) => true,
            (Some(cursor), false) => entry.at.as_millisecond() >= cursor,
            (Some(cursor), true) => entry.at.as_millisecond() <= cursor,
        };
        let mut entries: Vec<_> = journal
            .into_iter()
            .filter(within)
            .filter(|entry| level(entry.level) >= self.least && entry.message.contains(&self.search))
            .map(log_entry)
            .collect();
        if self.backward {
            entries.reverse();
        }
        entries.truncate(self.limit);
        entries
    }
}

fn log_entry(entry: JournalEntry) -> SandboxLogEntry {
    let fields = entry.fields.into_iter().chain([("logger", entry.logger.to_owned())]);
    let fields: BTreeMap<String, String> = fields.map(|(key, value)| (key.to_owned(), value)).collect();
    SandboxLogEntry { timestamp: entry.at, level: level(entry.level), message: entry.message, fields }
}

fn level(level: Level) -> LogLevel {
    match level {
        Level::Debug => LogLevel::Debug,
        Level::Info => LogLevel::Info,
        Level::Warn => LogLevel::Warn,
        Level::Error => LogLevel::Error,
    }
}

fn limit(text: Option<&str>) -> Result<usize, ApiError> {
    let Some(text) = text else { return Ok(MOST_ENTRIES) };
    let limit = text.parse().ok().filter(|limit| (1..=MOST_ENTRIES).contains(limit));
    limit.ok_or_else(|| invalid("limit", text, "a whole number from 1 to 1000"))
}

fn number(key: &str, text: Option<&str>, expected: &str) -> Result<Option<i64>, ApiError> {
    let parse = |text: &str| text.parse().map_err(|_| invalid(key, text, expected));
    text.map(parse).transpose()
}

fn invalid(key: &str, value: &str, expected: &str) -> ApiError {
    ApiError::bad_request(format!("invalid {key} {value:?}: expected {expected}"))
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;

    fn journal() -> Vec<JournalEntry> {
        let entry = |n: i64, level, message: &str| JournalEntry {
            at: Timestamp::from_millisecond(n).unwrap(),
            level,
            logger: "sandbox",
            message: message.to_owned(),
            fields: vec![("cause", "asked".to_owned())],
        };
        vec![entry(1, Level::Info, "created"), entry(2, Level::Debug, "quiet"), entry(3, Level::Warn, "paused")]
    }

    fn messages(window: Window) -> Vec<String> {
        window.of(journal()).into_iter().map(|entry| entry.message).collect()
    }

    #[test]
    fn a_window_has_a_cursor_a_direction_and_a_limit() {
        assert_eq!(messages(Window::default()), ["created", "quiet", "paused"]);
        assert_eq!(messages(Window { cursor: Some(2), ..Window::default() }), ["quiet", "paused"]);
        assert_eq!(messages(Window { limit: 2, ..Window::default() }), ["created", "quiet"]);
        assert_eq!(messages(Window { backward: true, limit: 2, ..Window::default() }), ["paused", "quiet"]);
        assert_eq!(messages(Window { backward: true, cursor: Some(1), ..Window::default() }), ["created"]);
        assert_eq!(messages(Window { least: LogLevel::Info, ..Window::default() }), ["created", "paused"]);
        assert_eq!(messages(Window { search: "us".into(), ..Window::default() }), ["paused"]);
    }

    #[test]
    fn fields_say_who_speaks() {
        let entries = Window::default().of(journal());
        assert_eq!((&*entries[0].fields["logger"], &*entries[0].fields["cause"]), ("sandbox", "asked"));
    }

    #[test]
    fn what_is_no_number_is_refused_by_name() {
        assert!(number("start", Some("now"), "x").unwrap_err().message().contains("start"));
        for text in ["0", "1001", "-1", "many"] {
            assert!(limit(Some(text)).unwrap_err().message().contains("limit"), "{text}");
        }
        assert_eq!(limit(None).unwrap(), MOST_ENTRIES);
    }
}
