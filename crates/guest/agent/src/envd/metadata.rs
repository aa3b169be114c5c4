//! Metadata that callers attach to files: extended attributes `user.e2b.<key>`.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::path::Path;

use http::HeaderMap;

const ATTRIBUTE: &str = "user.e2b.";
const HEADER: &str = "x-metadata-";
/// An attribute's name has at most 255 bytes, of which the prefix takes nine.
const MAX_KEY: usize = 246;
/// Keys with prefixes and values together; ext4 keeps that much in one block.
const MAX_TOTAL: usize = 4096;

/// Metadata that cannot be stored; the text says what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid metadata: {0}")]
pub(super) struct InvalidMetadata(String);

/// Reads the metadata of what `path` leads to. What cannot be read is not there.
pub(super) fn read(path: &Path) -> BTreeMap<String, String> {
    let Ok(names) = xattr::list_deref(path) else { return BTreeMap::new() };
    let entry = |name: &OsStr| {
        let key = name.to_str()?.strip_prefix(ATTRIBUTE)?.to_owned();
        let value = xattr::get_deref(path, name).ok()??;
        Some((key, String::from_utf8_lossy(&value).into_owned()))
    };
    names.filter_map(|name| entry(&name)).collect()
}

/// Replaces the whole metadata of `path`. Touches nothing when there is nothing to change, so that watchers see no
/// event. A file system without extended attributes is not an error.
pub(super) fn replace(path: &Path, metadata: &BTreeMap<String, String>) -> io::Result<()> {
    let old = read(path);
    let tolerate = |result: io::Result<()>| match result {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
        other => other,
    };
    for key in old.keys().filter(|key| !metadata.contains_key(*key)) {
        tolerate(xattr::remove_deref(path, format!("{ATTRIBUTE}{key}")))?;
    }
    for (key, value) in metadata.iter().filter(|(key, value)| old.get(*key) != Some(value)) {
        tolerate(xattr::set_deref(path, format!("{ATTRIBUTE}{key}"), value.as_bytes()))?;
    }
    Ok(())
}

/// The metadata in a request's `X-Metadata-<key>` headers.
pub(super) fn from_headers(headers: &HeaderMap) -> Result<BTreeMap<String, String>, InvalidMetadata> {
    let invalid = |what: String| Err(InvalidMetadata(what));
    let mut metadata = BTreeMap::new();
    let mut total = 0;
    for name in headers.keys() {
        let Some(key) = name.as_str().strip_prefix(HEADER) else { continue };
        // The first of repeated headers counts.
        let Some(value) = headers.get(name) else { continue };
        if key.is_empty() {
            return invalid("empty key".into());
        }
        if key.len() > MAX_KEY {
            return invalid(format!("key '{key}' is longer than {MAX_KEY} bytes"));
        }
        let printable = |byte: &u8| (0x20..=0x7e).contains(byte);
        let value = match value.to_str() {
            Ok(text) if text.as_bytes().iter().all(printable) => text.to_owned(),
            _ => return invalid(format!("value of '{key}' has characters other than printable ASCII")),
        };
        total += ATTRIBUTE.len() + key.len() + value.len();
        metadata.insert(key.to_owned(), value);
    }
    if total > MAX_TOTAL {
        return invalid(format!("{total} bytes in all, more than {MAX_TOTAL}"));
    }
    Ok(metadata)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_headers_are_read_and_bounded() {
        let mut headers = HeaderMap::new();
        headers.append("X-Metadata-Author", "me".parse().unwrap());
        headers.append("x-metadata-author", "second".parse().unwrap());
        headers.append("x-other", "no".parse().unwrap());
        assert_eq!(from_headers(&headers), Ok(BTreeMap::from([("author".into(), "me".into())])));

        headers.insert("x-metadata-author", http::HeaderValue::from_bytes(b"\xc3\xa9").unwrap());
        assert!(from_headers(&headers).unwrap_err().to_string().starts_with("invalid metadata: "));
        headers.insert("x-metadata-author", "v".repeat(MAX_TOTAL).parse().unwrap());
        assert!(from_headers(&headers).is_err());
    }

    #[test]
    fn replacing_metadata_clears_what_is_not_named() {
        let file = tempfile::NamedTempFile::new_in(".").unwrap();
        let first = BTreeMap::from([("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2".to_owned())]);
        replace(file.path(), &first).unwrap();
        if read(file.path()).is_empty() {
            eprintln!("skipped: this file system has no user extended attributes");
            return;
        }
        let second = BTreeMap::from([("b".to_owned(), "3".to_owned())]);
        replace(file.path(), &second).unwrap();
        assert_eq!(read(file.path()), second);
    }
}
