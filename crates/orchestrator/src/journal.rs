//! What a sandbox went through, and what its guest says on its console: the newest of both, for whoever asks.
//!
//! The console is a file that the machine's driver writes and keeps short. It is looked at now and then, and whenever
//! somebody asks; a line has the time at which it was found. No two entries have the same millisecond: a reader that
//! goes on after the last one it has seen misses none.

use std::collections::VecDeque;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;

/// Events that are kept. A life has a few; one that is paused and resumed all day has some hundred.
const EVENTS: usize = 256;
/// Lines of the console that are kept. With the events, no more than one answer of the API holds.
const LINES: usize = 744;
/// Bytes of the console that are looked at in one go: more would not be kept.
const LOOK: u64 = 64 << 10;
/// Longest line that is kept, in characters.
const LINE_LIMIT: usize = 1024;
/// What the guest agent's own words begin with on the console.
const AGENT: &str = "aenv-guest: ";

/// How much an entry matters, least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// For whoever looks into the guest's kernel.
    Debug,
    /// The ordinary course of a life.
    Info,
    /// Something failed, and the sandbox goes on.
    Warn,
    /// Something failed, and the sandbox did not go on.
    Error,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalEntry {
    /// When, in whole milliseconds.
    pub at: Timestamp,
    /// How much it matters.
    pub level: Level,
    /// Who says so: `sandbox` (the node, about the sandbox's life), `guest` (its agent) or `console` (its kernel).
    pub logger: &'static str,
    /// What happened.
    pub message: String,
    /// What belongs to it.
    pub fields: Vec<(&'static str, String)>,
}

/// The journal of one sandbox.
#[derive(Debug)]
pub(crate) struct Journal {
    console: PathBuf,
    kept: Mutex<Kept>,
    /// How far the console has been read. Held while it is read: nobody waits for it but another reader.
    read_to: Mutex<u64>,
}

#[derive(Debug, Default)]
struct Kept {
    last: Timestamp,
    events: VecDeque<JournalEntry>,
    lines: VecDeque<JournalEntry>,
}

impl Journal {
    /// An empty one of a sandbox whose console goes to `console`. What that holds already is read, too.
    pub(crate) fn new(console: PathBuf) -> Self {
        Self { console, kept: Mutex::default(), read_to: Mutex::new(0) }
    }

    /// Notes an event.
    pub(crate) fn note(&self, level: Level, message: impl Into<String>, fields: &[(&'static str, &str)]) {
        let fields = fields.iter().map(|(key, value)| (*key, (*value).to_owned())).collect();
        let entry =
            JournalEntry { at: Timestamp::UNIX_EPOCH, level, logger: "sandbox", message: message.into(), fields };
        self.kept().add(entry, Timestamp::now());
    }

    /// Everything that is kept, oldest first.
    pub(crate) fn entries(&self) -> Vec<JournalEntry> {
        let kept = self.kept();
        let mut entries: Vec<_> = kept.events.iter().chain(&kept.lines).cloned().collect();
        entries.sort_by_key(|entry| entry.at);
        entries
    }

    /// Takes over what the guest has said since the last look. Blocking, for a moment.
    pub(crate) fn look_at_console(&self) {
        let mut read_to = self.read_to.lock().unwrap_or_else(PoisonError::into_inner);
        // There may be none: not yet, or not any more.
        let Some(said) = newly_said(&self.console, &mut read_to) else { return };
        let now = Timestamp::now();
        let mut kept = self.kept();
        for line in String::from_utf8_lossy(&said).lines().filter_map(entry_of) {
            kept.add(line, now);
        }
    }

    // Each section is a step or two on the queues, which are valid after any panic in them.
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn add(&mut self, entry: JournalEntry, now: Timestamp) {
        let now = Timestamp::from_millisecond(now.as_millisecond()).unwrap_or(now);
        let after = Timestamp::from_millisecond(self.last.as_millisecond() + 1).unwrap_or(now);
        self.last = now.max(after);
        let (queue, bound) = match entry.logger {
            "sandbox" => (&mut self.events, EVENTS),
            _ => (&mut self.lines, LINES),
        };
        queue.push_back(JournalEntry { at: self.last, ..entry });
        if queue.len() > bound {
            queue.pop_front();
        }
    }
}

/// Whole lines of the file from `from` on, which is moved. Of a file that was cut, what was not seen is passed over.
fn newly_said(path: &Path, from: &mut u64) -> Option<Vec<u8>> {
    let mut file = std::fs::File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    if length <= *from {
        *from = length;
        return None;
    }
    *from = (*from).max(length.saturating_sub(LOOK));
    file.seek(SeekFrom::Start(*from)).ok()?;
    let mut said = Vec::new();
    file.take(LOOK).read_to_end(&mut said).ok()?;
    let whole = match said.iter().rposition(|&byte| byte == b'\n') {
        Some(newline) => newline + 1,
        None if said.len() > LINE_LIMIT => said.len(), // no line of ours
        None => return None,
    };
    said.truncate(whole);
    *from += whole as u64;
    Some(said)
}

fn entry_of(line: &str) -> Option<JournalEntry> {
    let plain: String = line.chars().filter(|c| !c.is_control()).take(LINE_LIMIT).collect();
    let (logger, message) = match plain.strip_prefix(AGENT) {
        Some(words) => ("guest", words),
        None => ("console", plain.as_str()),
    };
    let level = match logger {
        "guest" => Level::Info,
        _ if message.contains("Kernel panic") => Level::Error,
        _ => Level::Debug,
    };
    let entry = JournalEntry { at: Timestamp::UNIX_EPOCH, level, logger, message: message.to_owned(), fields: vec![] };
    (!message.trim().is_empty()).then_some(entry)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn messages(journal: &Journal) -> Vec<String> {
        journal.entries().into_iter().map(|entry| entry.message).collect()
    }

    #[test]
    fn whoever_goes_on_after_the_last_millisecond_misses_nothing() {
        let journal = Journal::new("/nowhere".into());
        for n in 0..2 * EVENTS {
            journal.note(Level::Info, format!("event {n}"), &[("n", &n.to_string())]);
        }
        let entries = journal.entries();
        assert_eq!(entries.len(), EVENTS, "it is bounded");
        assert!(entries.windows(2).all(|pair| pair[0].at.as_millisecond() < pair[1].at.as_millisecond()));
        assert_eq!(entries.last().unwrap().message, format!("event {}", 2 * EVENTS - 1));
    }

    #[test]
    fn the_console_is_taken_over_line_by_line_and_its_floods_hide_no_event() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console");
        let journal = Journal::new(path.clone());
        journal.look_at_console();
        journal.note(Level::Info, "created", &[]);
        let mut file = std::fs::File::create(&path).unwrap();
        write!(file, "[ 0.1] booting\r\naenv-guest: envd listens\r\nhalf a li").unwrap();
        journal.look_at_console();
        assert_eq!(messages(&journal), ["created", "[ 0.1] booting", "envd listens"]);
        let loggers: Vec<_> = journal.entries().iter().map(|entry| (entry.logger, entry.level)).collect();
        assert_eq!(loggers[1..], [("console", Level::Debug), ("guest", Level::Info)]);
        writeln!(file, "ne").unwrap();
        journal.look_at_console();
        journal.look_at_console();
        assert_eq!(messages(&journal)[3..], ["half a line"]);
        for n in 0..2 * LINES {
            writeln!(file, "flood {n}").unwrap();
        }
        journal.look_at_console();
        let all = messages(&journal);
        assert_eq!((all.len(), &*all[0]), (1 + LINES, "created"));
        // A log that was cut is gone on with at its end.
        file.set_len(10).unwrap();
        journal.look_at_console();
        assert_eq!(messages(&journal), all);
    }
}
