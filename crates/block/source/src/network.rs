//! The threads that wait for sockets, so that readers can be ordinary threads.

use std::fmt;
use std::future::Future;
use std::io;
use std::sync::{Arc, mpsc};

use tokio::runtime::{Builder, Runtime};

/// Threads of the runtime: they move bytes between sockets and buffers and check nothing but headers.
const WORKERS: usize = 2;

/// A small runtime of its own for all requests of a process. Dropping it fails the reads that are still waiting.
pub struct Network {
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
}

impl Network {
    /// Starts the threads.
    pub fn start() -> io::Result<Arc<Self>> {
        let runtime =
            Builder::new_multi_thread().worker_threads(WORKERS).thread_name("block-source-net").enable_all().build()?;
        Ok(Arc::new(Self { runtime: Some(runtime) }))
    }

    /// Runs `work` there and blocks the calling thread until it is done. The work bounds its own time.
    ///
    /// May be called from any thread that may block: not from a worker of somebody's runtime.
    pub(crate) fn wait<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> io::Result<T> {
        let gone = || io::Error::other("the network threads have ended");
        let (done, result) = mpsc::sync_channel(1);
        self.runtime.as_ref().ok_or_else(gone)?.spawn(async move {
            // Nobody listens only if the waiting thread is gone.
            let _ = done.send(work.await);
        });
        result.recv().map_err(|_| gone())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // An ordinary drop waits for its threads, which is not allowed where async code runs.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network").finish_non_exhaustive()
    }
}
