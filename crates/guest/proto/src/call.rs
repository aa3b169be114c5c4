//! What goes with calls of the agent beside their messages.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// Header of `process.Process/Connect`: bytes of earlier output that come first, at most. Ours, not E2B's.
pub const OUTPUT_REPLAY: &str = "output-replay-bytes";

/// Header of `process.Process/Start`: milliseconds after the process's end for which those are heard who still hold its output.
/// Ours, not E2B's.
pub const OUTPUT_GRACE: &str = "output-grace-ms";

/// `Authorization` of a call in the name of a guest's user: basic credentials without a password.
#[must_use]
pub fn credentials(user: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("{user}:")))
}
