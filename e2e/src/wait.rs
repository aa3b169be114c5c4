//! Waiting on a condition, with a deadline.

use std::time::Duration;

use tokio::time::Instant;

/// Longest wait for anything in these tests: an emulated boot on a busy host takes tens of seconds.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// What `look` finds before the patience ends.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
