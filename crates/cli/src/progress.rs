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
    last: String,
}

impl StatusLine {
    /// A line that says `text`.
    pub(crate) fn new(text: &str) -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg} {elapsed:>4}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(TICK);
            bar
        });
        let mut line = Self { bar, last: String::new() };
        line.set(text);
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
            None => eprintln!("{text}"),
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
