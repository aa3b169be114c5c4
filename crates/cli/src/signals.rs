//! The signals that ask us to end.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGINT, SIGTERM, SIGHUP and SIGQUIT, which from now on no longer end the process by themselves.
#[derive(Debug)]
pub(crate) struct Interruptions(Vec<(Signal, u8)>);

impl Interruptions {
    /// Takes the signals over. Errors: the runtime has no place for signals.
    pub(crate) fn listen() -> io::Result<Self> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup(), SignalKind::quit()];
        let listen = |kind: SignalKind| {
            // Signal numbers are below 64; the exit code is what a shell makes of the signal.
            let code = 128u8.saturating_add(u8::try_from(kind.as_raw_value()).unwrap_or(0));
            Ok((signal(kind)?, code))
        };
        kinds.into_iter().map(listen).collect::<io::Result<_>>().map(Self)
    }

    /// Waits for the next one; gives the exit code of a process that it ended. Cancel safety: nothing is lost.
    pub(crate) async fn next(&mut self) -> u8 {
        poll_fn(|context| {
            let ready =
                self.0.iter_mut().find_map(|(signal, code)| signal.poll_recv(context).is_ready().then_some(*code));
            ready.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}
