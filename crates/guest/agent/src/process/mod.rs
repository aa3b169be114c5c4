//! Processes: starting them exactly, following their output, and collecting how they ended.
//!
//! ```text
//!  Start ──> spawn ──> Running ──pumps──> subscribers (Start's caller, Connect's callers)
//!                         │                   bounded queues: a slow reader holds the process back
//!                      supervisor
//!                         │ exit status from the reaper, end of both pipes, deadline
//!                         v
//!                       Ended (kept 30 s in the table, so that a late Connect learns the outcome)
//! ```

mod output;
mod reaper;
mod running;
mod spawn;
mod table;

pub(crate) use output::{Chunk, Source};
pub(crate) use reaper::{Exit, Reaper};
pub(crate) use running::{Followed, InputError, Limits, Running, Subscription};
pub(crate) use spawn::{Channel, Program, TerminalSize};
pub(crate) use table::{Config, Selector, Table};
