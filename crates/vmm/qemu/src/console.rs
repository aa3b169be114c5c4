//! The guest's serial console.
//!
//! QEMU offers it on a unix socket; we drain it into a log with an upper bound. While nobody is connected, because
//! our server died or restarts, QEMU drops the output: the guest neither blocks nor fills a disk, at the price of what
//! it said meanwhile. The alternatives are worse. `-serial file:` and `logfile=` grow without end just then; a pipe
//! that nobody reads stalls the guest's console, and with it the guest; a `ringbuf` that we poll loses the last words
//! before a crash, the very ones a log is for.
//!
//! The socket takes input, too: a break and a letter are a magic SysRq of the guest's kernel, which works without any
//! help of the guest's user space.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aenv_model::Bytes;
use aenv_vmm_driver::{BoundedLog, Tail, VmmError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

/// How much of the output is kept in memory to explain an end: a kernel panic with its call trace.
const TAIL: usize = 16 << 10;
/// Most bytes taken from the socket at once.
const CHUNK: usize = 16 << 10;

/// A connected console. The connection is closed when this is dropped.
#[derive(Debug)]
pub(crate) struct Console {
    write: tokio::sync::Mutex<OwnedWriteHalf>,
    tail: Arc<Mutex<Tail>>,
    drain: Mutex<Option<AbortOnDropHandle<()>>>,
    /// Ends the draining between two pieces of output.
    enough: CancellationToken,
}

impl Console {
    /// Drains `stream` into the log at `path`. The draining task ends when QEMU closes the connection.
    pub(crate) async fn open(stream: UnixStream, path: &Path, limit: Bytes) -> Result<Self, VmmError> {
        let io_error = |source| VmmError::Io { operation: "open serial log", path: path.to_owned(), source };
        let log = BoundedLog::open(path, limit).map_err(io_error)?;
        let (read, write) = stream.into_split();
        let tail = Arc::new(Mutex::new(Tail::new(TAIL)));
        let enough = CancellationToken::new();
        let drain = AbortOnDropHandle::new(tokio::spawn(drain(read, log, tail.clone(), enough.clone())));
        Ok(Self { write: write.into(), tail, drain: Some(drain).into(), enough })
    }

    /// Types `input` on the console.
    pub(crate) async fn write(&self, input: &[u8]) -> std::io::Result<()> {
        self.write.lock().await.write_all(input).await
    }

    /// Waits, at most for `limit`, until all output of an ended VMM is in the log and the tail.
    pub(crate) async fn drained(&self, limit: Duration) {
        let drain = self.drain.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(drain) = drain {
            let _ = tokio::time::timeout(limit, drain).await;
        }
    }

    /// Closes the connection, once what was read from it is in the log: another may open that then.
    pub(crate) async fn close(self) {
        self.enough.cancel();
        let drain = self.drain.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(drain) = drain {
            let _ = drain.await; // the draining task has nothing to tell
        }
    }

    /// The newest kernel panic among the newest output.
    pub(crate) fn panic(&self) -> Option<String> {
        last_panic(&self.tail.lock().unwrap_or_else(PoisonError::into_inner).text())
    }
}

async fn drain(mut read: OwnedReadHalf, log: BoundedLog, tail: Arc<Mutex<Tail>>, enough: CancellationToken) {
    let mut log = Some(log);
    let mut chunk = vec![0; CHUNK];
    loop {
        let read = tokio::select! {
            read = read.read(&mut chunk) => read,
            () = enough.cancelled() => return,
        };
        let length = match read {
            Ok(0) | Err(_) => return,
            Ok(length) => length,
        };
        tail.lock().unwrap_or_else(PoisonError::into_inner).push(&chunk[..length]);
        // A log that fails (a full disk) must not stall the guest: go on draining without it.
        let Some(mut open) = log.take() else { continue };
        let append = tokio::task::spawn_blocking(move || {
            let result = open.append(&chunk[..length]);
            (open, chunk, result)
        });
        match append.await {
            Ok((open, buffer, result)) => {
                chunk = buffer;
                match result {
                    Ok(()) => log = Some(open),
                    Err(e) => warn!(error = %e, "serial log failed: console output is dropped from here on"),
                }
            }
            // The runtime shuts down.
            Err(_) => return,
        }
    }
}

/// `Kernel panic - not syncing: WHY`, without the kernel's time stamp.
fn last_panic(output: &str) -> Option<String> {
    let start = output.rfind("Kernel panic - not syncing")?;
    output[start..].lines().next().map(|line| line.trim_end_matches(" ]---").trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_found_with_its_reason() {
        let output = "[ 1.0] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100\r\n[ 1.0] CPU: 0";
        assert_eq!(
            last_panic(output).as_deref(),
            Some("Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100")
        );
        assert_eq!(last_panic("reboot: Restarting system"), None);
    }

    #[tokio::test]
    async fn all_output_is_in_the_log_once_drained_and_the_limit_holds() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serial.log");
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let console = Console::open(ours, &path, Bytes::kib(64)).await.unwrap();
        for n in 0..20_000 {
            theirs.write_all(format!("line {n}\n").as_bytes()).await.unwrap();
        }
        drop(theirs);
        console.drained(Duration::from_secs(10)).await;
        let log = std::fs::read_to_string(&path).unwrap();
        assert!(log.ends_with("line 19999\n") && log.len() <= 64 << 10 && log.len() > 30 << 10, "{}", log.len());
    }
}
