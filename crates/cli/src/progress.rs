//! One line on standard error that says what a long command is at.
//!
//! On a terminal the line is rewritten in place and gone at the end; elsewhere each new text is a line of its own.

use std::io::{self, IsTerminal as _};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// How often the spinner turns.
const TICK: Duration = Duration::from_millis(100);

/// The line. Cleared when dropped.
#[derive(Debug)]
pub(crate) struct StatusLine {
    bar: Option<ProgressBar>,
    /// Whether texts are lines of their own where there is no terminal.
    plain: bool,
    last: String,
}

impl StatusLine {
    /// A line that says `text`, for work whose course is worth keeping in a log.
    pub(crate) fn new(text: &str) -> Self {
        Self::begin(text, true)
    }

    /// A line that says `text` to somebody who waits at a terminal, and nothing elsewhere.
    pub(crate) fn while_waiting(text: &str) -> Self {
        Self::begin(text, false)
    }

    fn begin(text: &str, plain: bool) -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg} {elapsed:>4}") {
                bar.set_style(style);
            }
            bar
        });
        let mut line = Self { bar, plain, last: String::new() };
        line.set(text);
        if let Some(bar) = &line.bar {
            bar.enable_steady_tick(TICK);
        }
        line
    }

    /// Says `text` from now on; saying the same again is nothing new.
    pub(crate) fn set(&mut self, text: &str) {
        if self.last == text {
            return;
        }
        text.clone_into(&mut self.last);
        match &self.bar {
            Some(bar) => bar.set_message(self.last.clone()),
            None if self.plain => eprintln!("{text}"),
            None => {}
        }
    }

    /// Leaves `text` standing above the line.
    pub(crate) fn keep(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    /// Whether the line is rewritten in place.
    pub(crate) fn is_live(&self) -> bool {
        self.bar.is_some()
    }
}

impl Drop for StatusLine {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
