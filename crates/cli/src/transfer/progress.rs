//! How far a transfer is, in bytes.

use std::io::{self, IsTerminal as _};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Times that the bar is drawn in a second.
const RATE: u8 = 10;

/// A bar on standard error, where that is a terminal and there is anything to transfer. Cleared when dropped. Cloning
/// shares it.
#[derive(Debug, Clone)]
pub(super) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar for `total` bytes.
    pub(super) fn new(total: u64) -> Self {
        if total == 0 || !io::stderr().is_terminal() {
            return Self { bar: ProgressBar::hidden() };
        }
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(RATE));
        let template = "{bar:20} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} ETA {eta} {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// What is transferred now.
    pub(super) fn item(&self, name: &str) {
        self.bar.set_message(name.to_owned());
    }

    /// Some bytes more.
    pub(super) fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    /// Nothing of it is left on the terminal.
    pub(super) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}
