//! A driver's inbox: what was asked and has no answer yet.

use std::collections::VecDeque;
use std::future::Future;

use aenv_model::Phase;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::admission::{Verdict, admit};
use crate::message::{DeleteReply, Message, Refusal};
use crate::sandbox::Ended;

/// Asks in the order in which they came.
#[derive(Debug)]
pub(crate) struct Inbox {
    incoming: mpsc::Receiver<Message>,
    /// Came while something was under way, and is admitted again after it.
    waiting: VecDeque<Message>,
    /// Who is told when the sandbox is gone.
    pub(crate) deleters: Vec<DeleteReply>,
}

/// What came while something was under way.
#[derive(Debug, Default)]
pub(crate) struct Meanwhile {
    /// Asks for the same.
    pub(crate) joined: Vec<Message>,
    /// A delete that does not wait.
    pub(crate) deleted: Option<Ended>,
}

impl Inbox {
    pub(crate) fn new(incoming: mpsc::Receiver<Message>) -> Self {
        Self { incoming, waiting: VecDeque::new(), deleters: Vec::new() }
    }

    /// The next ask, or none ever if nobody can ask any more.
    pub(crate) async fn next(&mut self) -> Message {
        match self.waiting.pop_front() {
            Some(message) => message,
            None => match self.incoming.recv().await {
                Some(message) => message,
                None => std::future::pending().await,
            },
        }
    }

    /// Runs `work` to its end in `phase`, and does with what comes meanwhile as the admission table says. A delete that
    /// begins at once cancels `cancel`; the work is awaited all the same.
    pub(crate) async fn during<T>(
        &mut self,
        phase: Phase,
        cancel: &CancellationToken,
        work: impl Future<Output = T>,
    ) -> (T, Meanwhile) {
        let mut meanwhile = Meanwhile::default();
        let mut work = std::pin::pin!(work);
        loop {
            let message = tokio::select! {
                biased;
                done = &mut work => return (done, meanwhile),
                Some(message) = self.incoming.recv() => message,
            };
            match (admit(phase, message.ask()), message) {
                (Verdict::Begin | Verdict::Join, Message::Delete { why, reply }) => {
                    meanwhile.deleted.get_or_insert(why);
                    self.deleters.push(reply);
                    cancel.cancel();
                }
                (Verdict::Join, message) => meanwhile.joined.push(message),
                (Verdict::Begin | Verdict::Wait | Verdict::Done, message) => self.waiting.push_back(message),
                (Verdict::Busy, message) => message.refuse(Refusal::Busy(phase)),
                (Verdict::Gone, message) => message.refuse(Refusal::Gone),
            }
        }
    }

    /// Nobody can ask any more; whoever has asked is told that the sandbox is gone.
    pub(crate) async fn close(mut self) {
        self.incoming.close();
        for message in self.waiting.drain(..) {
            message.refuse(Refusal::Gone);
        }
        while let Some(message) = self.incoming.recv().await {
            message.refuse(Refusal::Gone);
        }
    }
}
