//! How far a long job is, on a terminal only.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of bytes on standard error; nothing where that is no terminal. Cleared when dropped.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// A bar that says `what` and ends at `total` bytes.
    pub(crate) fn new(what: &str, total: u64) -> Self {
        let bar = ProgressBar::new(total); // on standard error, hidden if that is no terminal
        let template = "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(what.to_owned());
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }

    /// For the storage crates' long functions: they tell how many bytes are done, and go on.
    pub(crate) fn follow(&self) -> impl FnMut(u64) -> bool {
        let bar = self.0.clone();
        move |done| {
            bar.set_position(done);
            true
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
