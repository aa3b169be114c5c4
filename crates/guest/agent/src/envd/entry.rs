//! Describes a file or directory as the protocol does.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use aenv_guest_proto::wire::filesystem::{EntryInfo, FileType};
use buffa_types::google::protobuf::Timestamp;

use super::metadata;
use super::users::Names;

/// Describes `path` as it was asked for, without resolving it; a symbolic link has its target's type and mode and its
/// own permissions text.
pub(super) fn describe(path: &Path, names: &Names<'_>) -> io::Result<EntryInfo> {
    let own = path.symlink_metadata()?;
    let is_link = own.file_type().is_symlink();
    let target = if is_link { path.metadata().ok() } else { Some(own.clone()) };
    let name = path.file_name().map_or_else(|| path.as_os_str().to_string_lossy(), |name| name.to_string_lossy());
    let symlink_target = is_link.then(|| {
        let resolved = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        resolved.to_string_lossy().into_owned()
    });
    Ok(EntryInfo {
        name: name.into_owned(),
        r#type: target.as_ref().map_or(FileType::FILE_TYPE_UNSPECIFIED, file_type).into(),
        path: path.to_string_lossy().into_owned(),
        size: i64::try_from(own.size()).unwrap_or(i64::MAX),
        mode: target.as_ref().map_or(0, |target| target.mode() & 0o777),
        permissions: permissions(own.mode()),
        owner: names.user(own.uid()),
        group: names.group(own.gid()),
        modified_time: Timestamp {
            seconds: own.mtime(),
            nanos: i32::try_from(own.mtime_nsec()).unwrap_or_default(),
            ..Default::default()
        }
        .into(),
        symlink_target,
        metadata: metadata::read(path).into_iter().collect(),
        ..Default::default()
    })
}

fn file_type(metadata: &Metadata) -> FileType {
    if metadata.is_file() {
        FileType::FILE_TYPE_FILE
    } else if metadata.is_dir() {
        FileType::FILE_TYPE_DIRECTORY
    } else {
        FileType::FILE_TYPE_UNSPECIFIED
    }
}

/// Type letters and nine permission letters in the notation of Go's `FileMode`, which the reference daemon sends.
fn permissions(mode: u32) -> String {
    const KIND: u32 = 0o170_000;
    let mut text = String::with_capacity(10);
    match mode & KIND {
        0o040_000 => text.push('d'),
        0o120_000 => text.push('L'),
        0o060_000 => text.push('D'),
        0o020_000 => text.push_str("Dc"),
        0o010_000 => text.push('p'),
        0o140_000 => text.push('S'),
        _ => {}
    }
    for (bit, letter) in [(0o4000, 'u'), (0o2000, 'g'), (0o1000, 't')] {
        if mode & bit != 0 {
            text.push(letter);
        }
    }
    if text.is_empty() {
        text.push('-');
    }
    for (place, letter) in "rwxrwxrwx".chars().enumerate() {
        text.push(if mode & (0o400 >> place) != 0 { letter } else { '-' });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::envd::users::Accounts;

    #[test]
    fn permissions_read_as_go_writes_them() {
        assert_eq!(permissions(0o100_644), "-rw-r--r--");
        assert_eq!(permissions(0o040_755), "drwxr-xr-x");
        assert_eq!(permissions(0o120_777), "Lrwxrwxrwx");
        assert_eq!(permissions(0o041_777), "dtrwxrwxrwx");
        assert_eq!(permissions(0o104_755), "urwxr-xr-x");
    }

    #[test]
    fn a_link_has_its_targets_type_and_its_own_permissions() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("d")).unwrap();
        std::os::unix::fs::symlink("d", root.join("good")).unwrap();
        std::os::unix::fs::symlink("gone", root.join("broken")).unwrap();
        let accounts = Accounts::load();
        let describe = |name: &str| describe(&root.join(name), &accounts.names()).unwrap();

        let good = describe("good");
        assert_eq!(good.r#type, FileType::FILE_TYPE_DIRECTORY);
        assert_eq!(good.permissions, "Lrwxrwxrwx");
        assert_eq!(good.symlink_target.as_deref(), root.join("d").to_str());
        let broken = describe("broken");
        assert_eq!(broken.r#type, FileType::FILE_TYPE_UNSPECIFIED);
        assert_eq!(broken.mode, 0);
        assert_eq!(broken.symlink_target.as_deref(), root.join("broken").to_str());
    }
}
