//! When to try again, and when to give up.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use tokio::time::{Instant, timeout_at};

use super::RegistryOptions;
use super::error::FetchProblem;

/// How often what looks like the server's intention is tried.
const DELIBERATE_ATTEMPTS: u32 = 3;

/// The attempts of one read: repeated while there is patience, and not for long if the server means it.
pub(super) struct Retry {
    deadline: Instant,
    builder: ExponentialBuilder,
    pauses: ExponentialBackoff,
    longest_pause: Duration,
    /// How many were begun.
    pub(super) attempts: u32,
    deliberate: u32,
}

impl Retry {
    pub(super) fn new(options: &RegistryOptions) -> Self {
        let builder = ExponentialBuilder::default()
            .with_min_delay(options.pauses.0)
            .with_max_delay(options.pauses.1)
            .with_jitter()
            .without_max_times();
        Self {
            deadline: Instant::now() + options.patience,
            builder,
            pauses: builder.build(),
            longest_pause: options.pauses.1,
            attempts: 0,
            deliberate: 0,
        }
    }

    /// Runs one attempt until the deadline at most.
    pub(super) async fn attempt<T>(
        &mut self,
        work: impl Future<Output = Result<T, FetchProblem>>,
    ) -> Result<T, FetchProblem> {
        self.attempts += 1;
        timeout_at(self.deadline, work).await.unwrap_or(Err(FetchProblem::Slow))
    }

    /// Waits after a failed attempt, or gives its problem back if it was the last. One that `moved_on` makes the
    /// pauses short again.
    pub(super) async fn pause(&mut self, problem: FetchProblem, moved_on: bool) -> Result<(), FetchProblem> {
        if !problem.is_passing() {
            self.deliberate += 1;
        }
        if moved_on {
            self.pauses = self.builder.build();
        }
        let pause = self.pauses.next().unwrap_or(self.longest_pause);
        let pause = pause.max(problem.retry_after().unwrap_or_default());
        if self.deliberate >= DELIBERATE_ATTEMPTS || Instant::now() + pause >= self.deadline {
            return Err(problem);
        }
        tracing::debug!(error = &problem as &dyn std::error::Error, ?pause, "registry read failed, trying again");
        tokio::time::sleep(pause).await;
        Ok(())
    }
}
