//! One build: what is asked for, what it says, and its image.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use aenv_image::{Credentials, ImageReference, Progress};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::record::{BuildRecord, BuildStage};
use crate::seams::{ImportImage, ImportedImage};
use crate::step::Step;

/// Log entries kept of one build: of what steps write beyond, nothing is seen.
const LOG_LIMIT: usize = 10_000;

/// Progress within one layer is logged at most this often.
const PROGRESS_PAUSE: Duration = Duration::from_secs(1);

/// An image to be had.
#[derive(Debug, Clone)]
pub struct ImageRequest {
    /// The image, as the user named it.
    pub image: String,
    /// The same, understood.
    pub reference: ImageReference,
    /// Registry credentials given with the request.
    pub credentials: Option<Credentials>,
}

/// What a build is to be made of.
#[derive(Debug, Clone)]
pub struct BuildRequest {
    /// What it begins with.
    pub base: Base,
    /// What is done on top of that, in order.
    pub steps: Vec<Step>,
    /// What runs in every sandbox from the start; `None`: what the base has.
    pub start: Option<String>,
    /// What succeeds when that is up; `None`: what the base has.
    pub ready: Option<String>,
    /// What a cache has of its steps does not count.
    pub force: bool,
}

impl BuildRequest {
    /// An image and nothing on top.
    #[must_use]
    pub fn of_image(image: ImageRequest) -> Self {
        Self { base: Base::Image(image), steps: Vec::new(), start: None, ready: None, force: false }
    }
}

/// What a build begins with.
#[derive(Debug, Clone)]
pub enum Base {
    /// An image.
    Image(ImageRequest),
    /// A template or snapshot, by id or name.
    Template(String),
}

/// A build as a client sees it.
#[derive(Debug, Clone)]
pub struct BuildView {
    /// The record; its `logs` are those asked for.
    pub build: BuildRecord,
}

/// How much a log entry matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Detail.
    Debug,
    /// Progress.
    Info,
    /// Went on anyway.
    Warn,
    /// The reason of a failure.
    Error,
}

/// A line of a build's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    /// When.
    pub timestamp: Timestamp,
    /// How much it matters.
    pub level: LogLevel,
    /// The text.
    pub message: String,
    /// What it tells of.
    #[serde(default)]
    pub stage: BuildStage,
}

/// The growing log of a build at work.
#[derive(Debug, Default)]
pub(crate) struct BuildLog {
    entries: Mutex<Vec<LogEntry>>,
}

impl BuildLog {
    pub(crate) fn add(&self, stage: BuildStage, level: LogLevel, message: impl Into<String>) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner); // a push leaves no half state
        if entries.len() < LOG_LIMIT {
            entries.push(LogEntry { timestamp: Timestamp::now(), level, message: message.into(), stage });
        }
    }

    /// How it ended, which is said in any case.
    pub(crate) fn end(&self, stage: BuildStage, level: LogLevel, message: String) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.push(LogEntry { timestamp: Timestamp::now(), level, message, stage });
    }

    /// What it told of last.
    pub(crate) fn stage(&self) -> BuildStage {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.last().map(|entry| entry.stage).unwrap_or_default()
    }

    pub(crate) fn entries(&self) -> Vec<LogEntry> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Imports an image to `target` for `owner`.
pub(crate) async fn import(
    importer: &dyn ImportImage,
    request: &ImageRequest,
    (target, owner): (&Path, &str),
    log: &BuildLog,
    cancel: CancellationToken,
) -> Result<ImportedImage, Failure> {
    let begun = Instant::now();
    let tell = |line| log.add(BuildStage::Base, LogLevel::Info, line);
    tell(format!("[base] FROM {}", request.image));
    let teller = ProgressTeller { log, last: Mutex::new(None) };
    let credentials = request.credentials.clone();
    let progress = |progress| teller.tell(&progress);
    let imported = importer.import(&request.reference, credentials, target, owner, &progress, cancel).await;
    let imported = imported.map_err(|error| Failure { stage: BuildStage::Base, message: error.report() })?;
    tell(format!("The image is here, took {:.1}s", begun.elapsed().as_secs_f64()));
    Ok(imported)
}

/// Why a build failed, for its user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) stage: BuildStage,
    pub(crate) message: String,
}

impl Failure {
    /// Of the work in a stage.
    pub(crate) fn of<M: Into<String>>(stage: BuildStage) -> impl Fn(M) -> Self {
        move |message| Self { stage, message: message.into() }
    }
}

/// Turns a stream of progress into a readable log: a line at the begin and end of each stage and layer, and one a second
/// in between.
struct ProgressTeller<'a> {
    log: &'a BuildLog,
    last: Mutex<Option<(String, Instant)>>,
}

impl ProgressTeller<'_> {
    fn tell(&self, progress: &Progress) {
        let (stage, line, done) = describe(progress);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let due = match &*last {
            Some((told, at)) if *told == stage => done || at.elapsed() >= PROGRESS_PAUSE,
            _ => true,
        };
        if due {
            *last = Some((stage, Instant::now()));
            self.log.add(BuildStage::Base, LogLevel::Info, line);
        }
    }
}

/// A stage's identity, its line, and whether it is complete with this.
fn describe(progress: &Progress) -> (String, String, bool) {
    match progress {
        Progress::Resolving => ("resolve".into(), "Resolving the image".into(), false),
        Progress::Layer { index, total, done_bytes, total_bytes } => (
            format!("layer {index}"),
            format!("Layer {}/{total}: {done_bytes} of {total_bytes}", index + 1),
            done_bytes == total_bytes,
        ),
        Progress::Unpacking { index, total, done_bytes, total_bytes } => (
            format!("unpack {index}"),
            format!("Unpacking layer {}/{total}: {done_bytes} of {total_bytes}", index + 1),
            done_bytes == total_bytes,
        ),
        Progress::Cached { index, total } => {
            (format!("cached {index}"), format!("Layer {}/{total}: here already", index + 1), true)
        }
        Progress::Waiting { index, total } => {
            let line = format!("Layer {}/{total}: waiting for another import that makes it", index + 1);
            (format!("wait {index}"), line, false)
        }
        Progress::Committing { index, total } => {
            (format!("commit {index}"), format!("Keeping layer {}/{total}", index + 1), false)
        }
        Progress::Building => ("build".into(), "Making an empty file system".into(), false),
        other => ("other".into(), format!("{other:?}"), false), // a stage newer than this
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_within_a_layer_is_told_at_its_begin_and_end() {
        use aenv_model::Bytes;
        let log = BuildLog::default();
        let teller = ProgressTeller { log: &log, last: Mutex::new(None) };
        for done in 0..=100 {
            let progress = Progress::Layer { index: 0, total: 1, done_bytes: Bytes(done), total_bytes: Bytes(100) };
            teller.tell(&progress);
        }
        let lines: Vec<_> = log.entries().into_iter().map(|entry| entry.message).collect();
        assert_eq!(lines, ["Layer 1/1: 0 B of 100 B", "Layer 1/1: 100 B of 100 B"]);
    }
}
