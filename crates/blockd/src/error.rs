//! What an error means to a caller.

use std::error::Error;
use std::fmt::Write as _;
use std::io;

use aenv_block_client::ErrorKind;
use aenv_block_source::{FetchError, FetchProblem, FindBlobError};

/// An error with its chain, and what a caller can do about it.
pub(crate) trait Refusal: Error {
    /// What can be done about it, as far as the operation itself knows.
    fn kind(&self) -> ErrorKind;
}

/// What the causes of `error` say: a full disk or a registry's failure, wherever in the chain.
pub(crate) fn cause(error: &(dyn Error + 'static)) -> Option<ErrorKind> {
    let mut next = Some(error);
    while let Some(error) = next {
        // One failure that several readers share shows its cause alone.
        if error.is::<FetchError>() || error.is::<FetchProblem>() || error.is::<FindBlobError>() {
            return Some(ErrorKind::Remote);
        }
        next = error.source();
        if let Some(error) = error.downcast_ref::<io::Error>() {
            if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
                return Some(ErrorKind::NoSpace);
            }
            // What an I/O error wraps is left out of its chain.
            if let Some(inner) = error.get_ref()
                && let Some(kind) = cause(inner)
            {
                return Some(kind);
            }
        }
    }
    None
}

/// The error and its causes, on one line.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let words = cause.to_string();
        // Transparent variants say it twice.
        if !text.ends_with(&words) {
            let _ = write!(text, ": {words}"); // to a String
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("open it")]
    struct Outer(#[source] io::Error);

    #[test]
    fn a_full_disk_is_found_under_wraps() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        assert_eq!(cause(&Outer(full())), Some(ErrorKind::NoSpace));
        assert_eq!(cause(&Outer(io::Error::other(Outer(full())))), Some(ErrorKind::NoSpace));
        assert_eq!(cause(&Outer(io::Error::other("x"))), None);
        assert_eq!(chain(&Outer(io::Error::other("x"))), "open it: x");
    }
}
