//! What the agent has to say goes to standard error: in a guest that is the serial console, which the node keeps.
//!
//! The console is slow (an emulated UART traps on every byte), so only lifecycle facts and failures are said.

use std::error::Error;
use std::fmt;

/// Writes one line to the console.
macro_rules! say {
    ($($words:tt)*) => {
        eprintln!("aenv-guest: {}", format_args!($($words)*))
    };
}
pub(crate) use say;

/// An error with all its causes, outermost first, on one line.
pub(crate) struct Chain<'a>(pub(crate) &'a (dyn Error + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(cause) = source {
            write!(f, ": {cause}")?;
            source = cause.source();
        }
        Ok(())
    }
}
