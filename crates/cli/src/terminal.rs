//! This terminal: its size, and raw mode with a way back.

use std::io::{self, IsTerminal as _};
use std::panic;
use std::sync::Arc;

use rustix::stdio::{stderr, stdin, stdout};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use crate::guest::TerminalSize;

/// What a terminal is taken for when there is none.
const DEFAULT_SIZE: TerminalSize = TerminalSize { columns: 80, rows: 24 };

/// The size now; 80 by 24 if no standard stream is a terminal or it does not know.
pub(crate) fn size() -> TerminalSize {
    let sizes = [stdout(), stdin(), stderr()].into_iter().filter_map(|stream| tcgetwinsize(stream).ok());
    let mut known = sizes.filter(|size| size.ws_col > 0 && size.ws_row > 0);
    known.next().map_or(DEFAULT_SIZE, |size| TerminalSize { columns: size.ws_col, rows: size.ws_row })
}

/// Raw mode of standard input's terminal: keys come one by one, unechoed, and make no signals.
///
/// The former mode comes back when this is dropped, and when anything panics, before the panic's message.
#[derive(Debug)]
pub(crate) struct RawMode {
    /// The mode to come back to; `None` if standard input is no terminal.
    former: Option<Arc<Termios>>,
}

impl RawMode {
    /// Enters raw mode; nothing happens if standard input is no terminal. Errors: the terminal refuses.
    pub(crate) fn enter() -> io::Result<Self> {
        if !io::stdin().is_terminal() {
            return Ok(Self { former: None });
        }
        let former = Arc::new(tcgetattr(stdin())?);
        let guard = Self { former: Some(Arc::clone(&former)) };
        let hook = panic::take_hook();
        let in_panic = Arc::clone(&former);
        panic::set_hook(Box::new(move |info| {
            restore(&in_panic);
            hook(info);
        }));
        let mut raw = Termios::clone(&former);
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Now, &raw)?;
        Ok(guard)
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        if let Some(former) = &self.former {
            restore(former);
        }
    }
}

fn restore(mode: &Termios) {
    // A terminal that is gone has no mode to restore.
    let _ = tcsetattr(stdin(), OptionalActions::Now, mode);
}
