//! How paths in requests are read.

use std::path::{Component, Path, PathBuf};

use super::users::User;

/// A path that names another user's home (`~name`), which the protocol does not know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot resolve path '{0}': only your own home directory (~) is supported")]
pub(crate) struct ForeignHome(String);

/// Makes `path` absolute.
///
/// Empty means `workdir`, or the user's home where there is none. `~` is the home. A relative path starts at the home,
/// not at `workdir`, and is cleaned lexically; an absolute one is taken as it is.
pub(crate) fn resolve(path: &str, user: &User, workdir: Option<&str>) -> Result<PathBuf, ForeignHome> {
    if path.is_empty() {
        return Ok(workdir.map_or_else(|| user.home.clone(), PathBuf::from));
    }
    if let Some(rest) = path.strip_prefix('~') {
        return match rest.strip_prefix('/') {
            Some(below) => Ok(clean(&user.home.join(below.trim_start_matches('/')))),
            None if rest.is_empty() => Ok(user.home.clone()),
            None => Err(ForeignHome(path.to_owned())),
        };
    }
    if path.starts_with('/') {
        return Ok(PathBuf::from(path));
    }
    Ok(clean(&user.home.join(path)))
}

/// Removes `.` and resolves `..` by name alone.
fn clean(path: &Path) -> PathBuf {
    let mut cleaned = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                cleaned.pop();
            }
            other => cleaned.push(other),
        }
    }
    cleaned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_path_resolves_as_the_contract_says() {
        let user = User { name: "u".into(), uid: 1, gid: 1, groups: vec![], home: "/home/u".into() };
        let cases = [
            ("", None, Some("/home/u")),
            ("", Some("/code"), Some("/code")),
            ("~", Some("/code"), Some("/home/u")),
            ("~/a/../b", None, Some("/home/u/b")),
            ("~other/x", None, None),
            ("/a/../b", None, Some("/a/../b")),
            ("a/./b/../c", Some("/code"), Some("/home/u/a/c")),
            ("../../../etc", None, Some("/etc")),
        ];
        for (path, workdir, expected) in cases {
            let resolved = resolve(path, &user, workdir).ok();
            assert_eq!(resolved.as_deref(), expected.map(Path::new), "{path:?} with workdir {workdir:?}");
        }
    }
}
