//! The host's own apt sources, read for one purpose: to ask the mirrors that this machine is known to reach.

use std::fs;
use std::path::{Path, PathBuf};

use crate::deb822;

/// One (URI, suite) pair of the host's sources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AptSource {
    /// Where the archive is, without a trailing slash; any scheme apt knows.
    pub(crate) uri: String,
    /// The suite as written: `bookworm`, `noble-updates`.
    pub(crate) suite: String,
    /// The keyring the entry is bound to, if it is a file.
    pub(crate) signed_by: Option<PathBuf>,
}

/// All binary-package sources below `etc_apt` (`/etc/apt`). Unreadable files count as empty: apt itself would complain,
/// and a fallback mirror is known.
pub(crate) fn read(etc_apt: &Path) -> Vec<AptSource> {
    let mut files = vec![etc_apt.join("sources.list")];
    if let Ok(entries) = fs::read_dir(etc_apt.join("sources.list.d")) {
        let mut parts: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        parts.sort();
        files.extend(parts);
    }
    let mut sources = Vec::new();
    for file in files {
        let Ok(text) = fs::read_to_string(&file) else { continue };
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => sources.extend(text.lines().filter_map(one_line)),
            Some("sources") => sources.extend(stanzas(&text)),
            _ => {} // apt ignores other names too: `*.disabled`, `*.save`
        }
    }
    sources
}

/// `deb [signed-by=/key arch=amd64] http://host/debian bookworm main`
fn one_line(line: &str) -> Option<AptSource> {
    let rest = line.split('#').next()?.trim().strip_prefix("deb")?;
    let rest = rest.strip_prefix([' ', '\t'])?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(bracketed) => bracketed.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_ascii_whitespace();
    let (uri, suite) = (words.next()?, words.next()?);
    let signed_by = options.split_ascii_whitespace().find_map(|option| option.strip_prefix("signed-by="));
    Some(source(uri, suite, signed_by))
}

fn stanzas(text: &str) -> Vec<AptSource> {
    let mut sources = Vec::new();
    for stanza in deb822::parse(text) {
        let enabled = !stanza.get("Enabled").is_some_and(|value| ["no", "false", "0", "off"].contains(&value));
        if !enabled || !stanza.words("Types").any(|kind| kind == "deb") {
            continue;
        }
        for uri in stanza.words("URIs") {
            sources.extend(stanza.words("Suites").map(|suite| source(uri, suite, stanza.get("Signed-By"))));
        }
    }
    sources
}

fn source(uri: &str, suite: &str, signed_by: Option<&str>) -> AptSource {
    AptSource {
        uri: uri.trim_end_matches('/').to_owned(),
        suite: suite.trim_end_matches('/').to_owned(),
        // A key may also be written out in place, or named by fingerprint; then the default keyring serves.
        signed_by: signed_by.filter(|key| key.starts_with('/') && !key.contains(['\n', ' ', ','])).map(PathBuf::from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_dir(files: &[(&str, &str)]) -> Vec<AptSource> {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("sources.list.d")).unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        read(dir.path())
    }

    #[test]
    fn one_line_entries_give_uri_suite_and_keyring() {
        let sources = in_dir(&[(
            "sources.list",
            "# a comment\ndeb-src http://a/debian bookworm main\n\
             deb [arch=amd64 signed-by=/k.gpg] http://a/debian/ bookworm main contrib # tail\n\
             deb http://b/security bookworm-security main\n",
        )]);
        assert_eq!(
            sources,
            [
                source("http://a/debian", "bookworm", Some("/k.gpg")),
                source("http://b/security", "bookworm-security", None)
            ]
        );
    }

    #[test]
    fn stanza_entries_multiply_out_and_disabled_ones_are_left() {
        let sources = in_dir(&[
            (
                "sources.list.d/ubuntu.sources",
                "Types: deb deb-src\nURIs: http://archive.ubuntu.com/ubuntu/\nSuites: noble noble-updates\n\
                 Components: main\nSigned-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg\n\n\
                 Enabled: no\nTypes: deb\nURIs: http://x\nSuites: noble\n",
            ),
            ("sources.list.d/old.sources.disabled", "Types: deb\nURIs: http://y\nSuites: noble\n"),
            (
                "sources.list.d/own.sources",
                "Types: deb\nURIs: http://z\nSuites: ./\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQ\n",
            ),
        ]);
        let found: Vec<_> = sources.iter().map(|s| (s.uri.as_str(), s.suite.as_str(), s.signed_by.is_some())).collect();
        assert_eq!(
            found,
            [
                ("http://z", ".", false),
                ("http://archive.ubuntu.com/ubuntu", "noble", true),
                ("http://archive.ubuntu.com/ubuntu", "noble-updates", true),
            ]
        );
    }
}
