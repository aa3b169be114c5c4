//! Where layers are, as the configuration of a device says it: `s3://BUCKET/FOLDER`.

use std::fmt;
use std::str::FromStr;

use crate::key::Key;

/// A bucket and a folder in it. `oss://` means the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ObjectUrl {
    /// The bucket.
    pub bucket: String,
    /// The folder, or the object.
    pub key: Option<Key>,
}

/// A text that is no [`ObjectUrl`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no place in an object store: it must be s3://BUCKET/KEY")]
pub struct ParseObjectUrlError(String);

impl ObjectUrl {
    /// Whether a text is meant to be one.
    #[must_use]
    pub fn is_meant_by(text: &str) -> bool {
        text.starts_with("s3://") || text.starts_with("oss://")
    }
}

impl FromStr for ObjectUrl {
    type Err = ParseObjectUrlError;

    fn from_str(text: &str) -> Result<Self, ParseObjectUrlError> {
        let refuse = || ParseObjectUrlError(text.to_owned());
        let rest = text.strip_prefix("s3://").or_else(|| text.strip_prefix("oss://")).ok_or_else(refuse)?;
        let (bucket, key) = rest.trim_end_matches('/').split_once('/').unwrap_or((rest.trim_end_matches('/'), ""));
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
        if bucket.is_empty() || !bucket.bytes().all(allowed) {
            return Err(refuse());
        }
        let key = match key {
            "" => None,
            key => Some(key.parse().map_err(|_| refuse())?),
        };
        Ok(Self { bucket: bucket.to_owned(), key })
    }
}

impl fmt::Display for ObjectUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{}", self.bucket)?;
        self.key.iter().try_for_each(|key| write!(f, "/{key}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_bucket_and_a_key() {
        let parse = |text: &str| text.parse::<ObjectUrl>().map(|url| url.to_string());
        assert_eq!(parse("s3://b/managed-layers/").unwrap(), "s3://b/managed-layers");
        assert_eq!(parse("oss://b/x/sha256:00").unwrap(), "s3://b/x/sha256:00");
        assert_eq!(parse("s3://b").unwrap(), "s3://b");
        for bad in ["", "b/k", "s3://", "s3:///k", "https://b/k", "s3://b/../k", "s3://b c/k", "s3://b//k"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
