//! Names of objects.

use std::fmt;
use std::str::FromStr;

/// Length of the longest key that every store takes.
const MAX_LENGTH: usize = 900;
/// Length of the longest component that every file system takes.
const MAX_COMPONENT: usize = 200;

/// Components with slashes between, as in `records/a/b.json`.
///
/// A key is a file name as well, in any folder and on any host: no component is empty or begins with a dot, and there is
/// nothing in it but ASCII letters, digits and `-_.:=@+`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(String);

/// A text that is no [`Key`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no key of an object: {problem}")]
pub struct ParseKeyError {
    text: String,
    problem: &'static str,
}

impl Key {
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The key `name` in the folder that this one names.
    pub fn join(&self, name: &str) -> Result<Self, ParseKeyError> {
        format!("{self}/{name}").parse()
    }
}

impl FromStr for Key {
    type Err = ParseKeyError;

    fn from_str(text: &str) -> Result<Self, ParseKeyError> {
        let refuse = |problem| Err(ParseKeyError { text: text.to_owned(), problem });
        if text.len() > MAX_LENGTH {
            return refuse("it is too long");
        }
        for component in text.split('/') {
            match component.bytes().next() {
                None => return refuse("a component is empty"),
                Some(b'.') => return refuse("a component begins with a dot"),
                Some(_) if component.len() > MAX_COMPONENT => return refuse("a component is too long"),
                Some(_) => {}
            }
        }
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:=@+/".contains(&byte);
        if !text.bytes().all(allowed) {
            return refuse("it holds a character that is not allowed");
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_leads_nowhere_else() {
        for good in ["a", "a/b.json", "sha256:00/x=1", "A_b-c@d+e"] {
            assert_eq!(good.parse::<Key>().unwrap().as_str(), good);
        }
        let long = "x".repeat(201);
        for bad in [
            "", "/", "/a", "a/", "a//b", ".", "..", "a/../b", ".hidden", "a/.b", "a b", "a\\b", "ä", "a%2f", "a\n",
            &long,
        ] {
            assert!(bad.parse::<Key>().is_err(), "{bad:?}");
        }
        assert!("a/".repeat(450).trim_end_matches('/').parse::<Key>().is_ok());
        assert!("a/".repeat(451).trim_end_matches('/').parse::<Key>().is_err());
        let folder: Key = "a/b".parse().unwrap();
        assert_eq!(folder.join("c").unwrap().as_str(), "a/b/c");
        assert!(folder.join("../c").is_err());
    }
}
