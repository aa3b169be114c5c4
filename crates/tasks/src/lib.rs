//! Task scopes: async work has a parent that can cancel it, wait for it, and say who is still inside.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A set of tasks with a common end. Cloning shares it.
#[derive(Debug, Clone)]
pub struct TaskScope {
    name: &'static str,
    tracker: TaskTracker,
    token: CancellationToken,
    inside: Arc<Mutex<BTreeMap<u64, String>>>,
}

/// Tasks that were still running when the patience of [`TaskScope::close`] ended.
#[derive(Debug, thiserror::Error)]
#[error("{scope}: still running after {waited:?}: {}", tasks.join(", "))]
pub struct StillRunning {
    /// The scope's name.
    pub scope: &'static str,
    /// How long `close` waited.
    pub waited: Duration,
    /// Names of the tasks.
    pub tasks: Vec<String>,
}

impl TaskScope {
    /// An empty scope. `name` appears in logs and errors.
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        Self { name, tracker: TaskTracker::new(), token: CancellationToken::new(), inside: Arc::default() }
    }

    /// Cancelled when the scope is closed; tasks end soon after.
    #[must_use]
    pub fn token(&self) -> CancellationToken {
        self.token.clone()
    }

    /// Runs `work` in the scope. The handle may be dropped: the scope waits for the task, not its spawner.
    pub fn spawn<F>(&self, name: impl Into<String>, work: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let entry = Entry::new(&self.inside, name.into());
        self.tracker.spawn(async move {
            let _entry = entry;
            work.await
        })
    }

    /// Cancels the token and waits for every task for at most `patience`.
    pub async fn close(&self, patience: Duration) -> Result<(), StillRunning> {
        self.token.cancel();
        self.tracker.close();
        if tokio::time::timeout(patience, self.tracker.wait()).await.is_ok() {
            return Ok(());
        }
        let tasks = lock(&self.inside).values().cloned().collect();
        Err(StillRunning { scope: self.name, waited: patience, tasks })
    }
}

/// A task's name in its scope, removed when the task ends or is dropped.
struct Entry {
    inside: Arc<Mutex<BTreeMap<u64, String>>>,
    key: u64,
}

impl Entry {
    fn new(inside: &Arc<Mutex<BTreeMap<u64, String>>>, name: String) -> Self {
        let mut names = lock(inside);
        let key = names.last_key_value().map_or(0, |(last, _)| last + 1);
        names.insert(key, name);
        Self { inside: Arc::clone(inside), key }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.inside).remove(&self.key);
    }
}

/// The map is valid after any panic: each critical section is one map operation.
fn lock(inside: &Mutex<BTreeMap<u64, String>>) -> MutexGuard<'_, BTreeMap<u64, String>> {
    inside.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn close_waits_for_tasks_that_obey_the_token() {
        let scope = TaskScope::new("test");
        let token = scope.token();
        scope.spawn("obeys", async move { token.cancelled().await });
        scope.close(Duration::from_secs(5)).await.unwrap();
    }

    #[tokio::test]
    async fn close_names_who_is_still_inside() {
        let scope = TaskScope::new("test");
        let stubborn = scope.spawn("stubborn", std::future::pending::<()>());
        let error = scope.close(Duration::from_millis(20)).await.unwrap_err();
        assert_eq!(error.tasks, ["stubborn"]);
        stubborn.abort();
    }
}
