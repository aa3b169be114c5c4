//! Which names an export may have, whatever the exporter.

use crate::exporter::AttachError;

/// Longest name, in bytes: what Linux's file systems agree on.
const LONGEST_NAME: usize = 255;

/// Refuses what cannot be the name of a file in one flat directory, or would garble a listing or a log.
pub(crate) fn check_name(name: &str) -> Result<(), AttachError> {
    let problem = match name {
        "" => "is empty",
        "." | ".." => "names a directory",
        _ if name.len() > LONGEST_NAME => "is longer than 255 bytes",
        _ if name.contains('/') => "contains a slash",
        _ if name.chars().any(char::is_control) => "contains a control character",
        _ => return Ok(()),
    };
    Err(AttachError::Name { name: name.to_owned(), problem })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_pass_and_others_do_not() {
        for good in ["a", "sandbox-018f.disk", "...", ".hidden", "ü", &"x".repeat(255)] {
            check_name(good).unwrap_or_else(|error| panic!("{good}: {error}"));
        }
        for bad in ["", ".", "..", "a/b", "/", "nul\0", "line\n", &"x".repeat(256)] {
            check_name(bad).expect_err(bad);
        }
    }
}
