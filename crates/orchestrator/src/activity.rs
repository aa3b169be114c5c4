//! Whether somebody uses a sandbox, and since when nobody does.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::Instant;

/// How a running sandbox is used.
#[derive(Debug, Clone)]
pub(crate) struct Activity(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    use_: Mutex<Use>,
    ended: Notify,
}

#[derive(Debug)]
struct Use {
    users: usize,
    last: Instant,
}

impl Activity {
    pub(crate) fn new() -> Self {
        let use_ = Mutex::new(Use { users: 0, last: Instant::now() });
        Self(Arc::new(Shared { use_, ended: Notify::new() }))
    }

    // Each section is an assignment or two: valid after any panic.
    fn lock(&self) -> MutexGuard<'_, Use> {
        self.0.use_.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody uses it until the result and all its clones are dropped.
    pub(crate) fn begin(&self) -> InUse {
        self.lock().users += 1;
        InUse { _guard: Arc::new(Guard(self.clone())) }
    }

    /// As if it had been used until now.
    pub(crate) fn touch(&self) {
        self.lock().last = Instant::now();
    }

    /// Since when nobody uses it; `None` while somebody does.
    pub(crate) fn idle_since(&self) -> Option<Instant> {
        let now = self.lock();
        (now.users == 0).then_some(now.last)
    }

    /// Waits for somebody to stop using it.
    ///
    /// Cancel safety: drop it at any time.
    pub(crate) async fn use_ends(&self) {
        self.0.ended.notified().await;
    }
}

/// A use of a sandbox; ends with its last clone.
#[derive(Debug, Clone)]
pub struct InUse {
    _guard: Arc<Guard>,
}

#[derive(Debug)]
struct Guard(Activity);

impl Drop for Guard {
    fn drop(&mut self) {
        {
            let mut now = self.0.lock();
            now.users -= 1;
            now.last = Instant::now();
        }
        self.0.0.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nobody_uses_it_once_the_last_clone_is_gone() {
        let activity = Activity::new();
        let before = activity.idle_since().unwrap();
        let one = activity.begin();
        let two = one.clone();
        drop(one);
        assert_eq!(activity.idle_since(), None);
        drop(two);
        activity.use_ends().await;
        let after = activity.idle_since().unwrap();
        assert!(after > before);
        activity.touch();
        assert!(activity.idle_since().unwrap() > after);
    }
}
