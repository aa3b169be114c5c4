//! Standard input, read by a thread of its own, as reads of a terminal block and must not keep the process.

use std::io;
use std::os::fd::OwnedFd;
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{self as raw, Errno};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::stdio::stdin;
use tokio::sync::mpsc;

/// Chunks of input between the thread and the network. When the network does not take them, reading stops.
const QUEUE: usize = 16;
/// Largest chunk, in bytes.
const CHUNK: usize = 32 << 10;

/// What is typed or piped in, chunk by chunk; closed at the end of standard input.
pub(crate) type Keys = mpsc::Receiver<Vec<u8>>;

/// The thread. Dropping it takes no more input and waits for its end.
#[derive(Debug)]
pub(crate) struct Reader {
    /// Its other end becomes readable when this is closed.
    leave: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// Begins to read. Errors: no pipe or no thread to be had.
pub(crate) fn read() -> io::Result<(Keys, Reader)> {
    let (left, leave) = pipe_with(PipeFlags::CLOEXEC)?;
    let (sender, keys) = mpsc::channel(QUEUE);
    let thread = thread::Builder::new().name("stdin".to_owned()).spawn(move || run(&left, &sender))?;
    Ok((keys, Reader { leave: Some(leave), thread: Some(thread) }))
}

fn run(left: &OwnedFd, sender: &mpsc::Sender<Vec<u8>>) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let stdin = stdin();
        let mut waiting = [PollFd::new(left, PollFlags::IN), PollFd::new(&stdin, PollFlags::IN)];
        match poll(&mut waiting, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(_) => return,
        }
        if !waiting[0].revents().is_empty() {
            return;
        }
        match raw::read(stdin, &mut buffer) {
            Ok(0) => return,
            Ok(n) if sender.blocking_send(buffer[..n].to_vec()).is_err() => return,
            Ok(_) | Err(Errno::INTR | Errno::AGAIN) => {}
            // The terminal has gone.
            Err(_) => return,
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        drop(self.leave.take());
        if let Some(thread) = self.thread.take() {
            // It cannot panic; if it did, there would be nothing left to do about it.
            let _ = thread.join();
        }
    }
}
