//! What is typed goes to the shell, over one long request that is opened again when it breaks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aenv_guest_proto::wire::process::StreamInputRequest;
use futures::StreamExt as _;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_stream::wrappers::ReceiverStream;

use crate::guest::Guest;
use crate::guest::input::{self, KEEPALIVE};
use crate::stdin::Keys;

/// Pause before a broken request is opened again.
const RETRY: Duration = Duration::from_millis(500);
/// How often the end of our input is said again. A terminal forgets one that comes before its program reads it.
const END_REPEAT: Duration = Duration::from_secs(1);
/// Ctrl-D: the end of input, as a terminal says it.
const END_OF_INPUT: u8 = 4;

/// Where the next chunk comes from.
#[derive(Debug)]
struct Source {
    keys: Keys,
    /// Set by every key that is typed.
    activity: Arc<AtomicBool>,
    /// Whether a line is begun and not ended, so that Ctrl-D alone would not end the input.
    open_line: bool,
    ended: bool,
}

/// Forwards keys until it is dropped. After the end of the keys, says Ctrl-D to whatever reads the terminal.
///
/// A chunk that was on its way when a request broke may be lost; none is sent twice.
pub(super) async fn forward(guest: Guest, pid: u32, keys: Keys, activity: Arc<AtomicBool>) {
    let mut source = Source { keys, activity, open_line: false, ended: false };
    let mut pending = None;
    loop {
        let (sender, requests) = mpsc::channel(1);
        let first = futures::stream::iter([input::to(pid)]);
        let call = guest.stream_input(first.chain(ReceiverStream::new(requests)));
        tokio::select! {
            _ = call => {}
            () = feed(&sender, &mut source, &mut pending) => {}
        }
        sleep(RETRY).await;
    }
}

/// Puts chunks into one request until that takes no more.
async fn feed(sender: &mpsc::Sender<StreamInputRequest>, source: &mut Source, pending: &mut Option<Vec<u8>>) {
    let mut keepalive = interval(KEEPALIVE);
    keepalive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let Ok(place) = sender.reserve().await else { return };
        if let Some(chunk) = pending.take() {
            keepalive.reset();
            place.send(input::typed(chunk));
            continue;
        }
        tokio::select! {
            chunk = source.next() => *pending = Some(chunk),
            _ = keepalive.tick() => place.send(input::alive()),
        }
    }
}

impl Source {
    /// The next chunk. Cancel safety: nothing is lost.
    async fn next(&mut self) -> Vec<u8> {
        if !self.ended {
            if let Some(chunk) = self.keys.recv().await {
                self.activity.store(true, Ordering::Relaxed);
                self.open_line = !matches!(chunk.last(), None | Some(b'\n' | b'\r'));
                return chunk;
            }
            self.ended = true;
        } else {
            sleep(END_REPEAT).await;
        }
        if std::mem::take(&mut self.open_line) { vec![b'\n', END_OF_INPUT] } else { vec![END_OF_INPUT] }
    }
}

#[cfg(test)]
mod tests {
    use aenv_guest_proto::wire::process::stream_input_request::Event;

    use super::*;

    fn source(keys: Keys) -> Source {
        Source { keys, activity: Arc::default(), open_line: false, ended: false }
    }

    #[tokio::test]
    async fn the_end_of_input_ends_an_open_line_first() {
        let (sender, keys) = mpsc::channel(4);
        sender.send(b"exit 3".to_vec()).await.unwrap();
        drop(sender);
        let mut source = source(keys);
        assert_eq!(source.next().await, b"exit 3");
        assert!(source.activity.load(Ordering::Relaxed));
        assert_eq!(source.next().await, b"\n\x04");
        assert_eq!(source.next().await, b"\x04");
    }

    #[tokio::test]
    async fn a_request_that_takes_no_more_leaves_its_chunk_for_the_next() {
        let (keys_in, keys) = mpsc::channel(4);
        let mut source = source(keys);
        let mut pending = None;
        let (sender, mut requests) = mpsc::channel(1);
        keys_in.send(b"a".to_vec()).await.unwrap();
        {
            let feeding = feed(&sender, &mut source, &mut pending);
            tokio::pin!(feeding);
            // The keepalive's first tick is at once; then the key.
            let data_came = async {
                loop {
                    let request = requests.recv().await.unwrap();
                    if matches!(request.event, Some(Event::Data(_))) {
                        break;
                    }
                }
            };
            tokio::select! {
                () = &mut feeding => panic!("the request was open"),
                () = data_came => {}
            }
            drop(requests);
            keys_in.send(b"b".to_vec()).await.unwrap();
            feeding.await;
        }
        let left = pending.take();
        let unread = source.keys.try_recv().ok();
        assert_eq!(left.or(unread).as_deref(), Some(b"b".as_slice()));
    }
}
