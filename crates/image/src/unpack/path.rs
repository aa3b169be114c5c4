//! Paths inside an archive, judged before anything is done with them.

use std::fmt;

use super::UnpackError;

/// Linux's own bound on one path.
const MAX_PATH: usize = 4096;
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

/// A path below the root as its components: none is empty, `.` or `..`.
///
/// A leading slash means the image's root. Layers of Cloud Native Buildpacks are written that way.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct EntryPath(Vec<Vec<u8>>);

/// What a whiteout takes away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Whiteout {
    /// This path.
    Path(EntryPath),
    /// Everything in this directory.
    Inside(EntryPath),
    /// Nothing: bookkeeping of a union file system that has no meaning for others.
    Nothing,
}

impl EntryPath {
    /// The root itself.
    pub(super) fn root() -> Self {
        Self(Vec::new())
    }

    /// Errors: `Refused` for a path that names a parent directory, holds a NUL or is too long for Linux.
    pub(super) fn parse(raw: &[u8]) -> Result<Self, UnpackError> {
        let refuse = |problem| UnpackError::Refused {
            path: String::from_utf8_lossy(&raw[..raw.len().min(MAX_PATH)]).into(),
            problem,
        };
        if raw.len() > MAX_PATH {
            return Err(refuse("the path is longer than 4096 bytes"));
        }
        if raw.contains(&0) {
            return Err(refuse("the path holds a NUL"));
        }
        let parts: Vec<Vec<u8>> = raw
            .split(|byte| *byte == b'/')
            .filter(|part| !part.is_empty() && *part != b".")
            .map(<[u8]>::to_vec)
            .collect();
        if parts.iter().any(|part| part == b"..") {
            return Err(refuse("the path leads through a parent directory"));
        }
        Ok(Self(parts))
    }

    /// The components.
    pub(super) fn parts(&self) -> &[Vec<u8>] {
        &self.0
    }

    /// The directory's components and the last one; `None` for the root.
    pub(super) fn split(&self) -> Option<(&[Vec<u8>], &[u8])> {
        let (name, parents) = self.0.split_last()?;
        Some((parents, name))
    }

    /// What this path takes away, if it is a whiteout.
    pub(super) fn whiteout(&self) -> Result<Option<Whiteout>, UnpackError> {
        let Some((parents, name)) = self.split() else { return Ok(None) };
        let Some(hidden) = name.strip_prefix(WHITEOUT) else { return Ok(None) };
        if name == OPAQUE {
            return Ok(Some(Whiteout::Inside(Self(parents.to_vec()))));
        }
        if hidden.starts_with(WHITEOUT) {
            return Ok(Some(Whiteout::Nothing));
        }
        if matches!(hidden, b"" | b"." | b"..") {
            return Err(UnpackError::Refused { path: self.to_string(), problem: "the whiteout names no file" });
        }
        let mut path = parents.to_vec();
        path.push(hidden.to_vec());
        Ok(Some(Whiteout::Path(Self(path))))
    }

    /// How many components there are.
    pub(super) fn depth(&self) -> usize {
        self.0.len()
    }
}

impl fmt::Display for EntryPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("/");
        }
        self.0.iter().try_for_each(|part| write!(f, "/{}", String::from_utf8_lossy(part)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(path: &str) -> EntryPath {
        EntryPath::parse(path.as_bytes()).unwrap()
    }

    #[test]
    fn paths_are_taken_from_the_root() {
        assert_eq!(parse("./a//b/./c/").to_string(), "/a/b/c");
        assert_eq!(parse("/a").to_string(), "/a");
        assert_eq!(parse("./"), EntryPath::root());
        assert_eq!(parse(".../..a"), parse("/.../..a"));
    }

    #[test]
    fn paths_that_could_lead_out_are_refused() {
        for path in ["..", "a/../b", "../a", "a/..", "/../x", "a\0b"] {
            assert!(EntryPath::parse(path.as_bytes()).is_err(), "{path:?}");
        }
        assert!(EntryPath::parse(&[b'a'; 5000]).is_err());
    }

    #[test]
    fn whiteouts_name_what_they_hide() {
        assert_eq!(parse("a/.wh.b").whiteout().unwrap(), Some(Whiteout::Path(parse("a/b"))));
        assert_eq!(parse("a/.wh..wh..opq").whiteout().unwrap(), Some(Whiteout::Inside(parse("a"))));
        assert_eq!(parse(".wh..wh..opq").whiteout().unwrap(), Some(Whiteout::Inside(EntryPath::root())));
        assert_eq!(parse(".wh..wh.plnk").whiteout().unwrap(), Some(Whiteout::Nothing));
        assert_eq!(parse("a/.wh").whiteout().unwrap(), None);
        for path in ["a/.wh.", "a/.wh..", "a/.wh..."] {
            assert!(parse(path).whiteout().is_err(), "{path}");
        }
    }
}
