//! A bound on bytes per second.

use std::time::{Duration, Instant};

/// How far a job may run ahead of its rate after it was slow; not more, or it would make up for a pause with a burst.
const CREDIT: Duration = Duration::from_millis(100);

/// Tells how long to rest after having taken some bytes.
#[derive(Debug)]
pub(super) struct Pace {
    /// Bytes a second; 0 for no bound.
    rate: u64,
    /// When what was taken so far is paid for.
    paid: Instant,
}

impl Pace {
    pub(super) fn new(rate: u64, now: Instant) -> Self {
        Self { rate, paid: now }
    }

    pub(super) fn take(&mut self, bytes: u64, now: Instant) -> Duration {
        if self.rate == 0 {
            return Duration::ZERO;
        }
        let earliest = now.checked_sub(CREDIT).unwrap_or(now);
        self.paid = self.paid.max(earliest) + Duration::from_secs_f64(bytes as f64 / self.rate as f64);
        self.paid.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_kept_and_a_pause_is_not_made_up_for() {
        let start = Instant::now();
        let seconds = |count| start + Duration::from_secs(count);
        let mut pace = Pace::new(1000, start);
        assert_eq!(pace.take(2000, start), Duration::from_secs(2));
        assert_eq!(pace.take(1000, seconds(2)), Duration::from_secs(1));
        assert_eq!(pace.take(1000, seconds(60)), Duration::from_millis(900));
        assert_eq!(Pace::new(0, start).take(u64::MAX, start), Duration::ZERO);
    }
}
