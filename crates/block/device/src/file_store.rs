//! Disks as plain files: reflinked from the image where the filesystem can, else a sparse copy.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use aenv_model::Bytes;
use async_trait::async_trait;
use rustix::fs::statvfs;
use tempfile::NamedTempFile;
use tracing::{debug, info};

use crate::copy::{self, Method};
use crate::disk::{CreateDiskError, Disk, DiskRecord, DiskStore};
use crate::grow;

/// Begins the name of a disk in the making. No disk's own name may begin with a dot.
const UNFINISHED: &str = ".unfinished-";

/// A disk's length is a multiple of this, whatever was asked: the page size, which every sector size divides.
const GRAIN: Bytes = Bytes::kib(4);

/// A directory of disks, one raw image file each.
///
/// Nothing is synced: a disk is worth nothing without the sandbox that wrote it, which does not survive the host either.
#[derive(Debug)]
pub struct FileDiskStore {
    dir: PathBuf,
}

impl FileDiskStore {
    /// Opens the directory, making it if need be, and removes what a killed process left unfinished in it. One process at
    /// a time may have it open: see to it with the lock on the node's home.
    pub fn open(dir: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                fs::remove_file(entry.path())?;
                info!(path = %entry.path().display(), "removed an unfinished disk");
            }
        }
        Ok(Self { dir })
    }

    /// Where the disk `name` is kept. The name comes from our own store or code, but it becomes a path.
    fn path(&self, name: &str) -> io::Result<PathBuf> {
        let safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.len() > 200 || name.starts_with('.') || !name.bytes().all(safe) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?} cannot name a disk")));
        }
        Ok(self.dir.join(name))
    }
}

#[async_trait]
impl DiskStore for FileDiskStore {
    /// Cancel safety: if dropped, nothing is left.
    async fn create(&self, name: &str, base: &Path, size: Option<Bytes>) -> Result<Disk, CreateDiskError> {
        let started = Instant::now();
        let failed = |source| CreateDiskError::Io { name: name.to_owned(), source };
        let path = self.path(name).map_err(failed)?;
        if path.exists() {
            return Err(failed(io::ErrorKind::AlreadyExists.into()));
        }

        // The copy comes back as a temporary file, so that one whose asker has gone removes itself.
        let (owned_name, base, dir) = (name.to_owned(), base.to_owned(), self.dir.clone());
        let copied = tokio::task::spawn_blocking(move || copy_of(&owned_name, &base, &dir, size)).await;
        let copied = copied.map_err(|ended| failed(io::Error::other(ended)))??;
        if copied.grown {
            let fill = grow::fill(copied.file.path()).await;
            fill.map_err(|reason| CreateDiskError::CannotGrow { name: name.to_owned(), asked: copied.size, reason })?;
        }
        copied.file.persist_noclobber(&path).map_err(|error| failed(error.error))?;
        let elapsed_ms = started.elapsed().as_millis() as u64;
        debug!(disk = name, size = %copied.size, method = ?copied.method, elapsed_ms, "disk made");
        Ok(Disk { path, size: copied.size, record: DiskRecord { name: name.to_owned() } })
    }

    async fn remove(&self, record: &DiskRecord) -> io::Result<()> {
        // Unlinking a large file can take a while.
        match tokio::fs::remove_file(self.path(&record.name)?).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }
}

struct Copied {
    file: NamedTempFile,
    size: Bytes,
    /// Whether the file is longer than the image it came from.
    grown: bool,
    method: Method,
}

/// Copies `base` to an unfinished disk in `dir`, at least `size` long.
fn copy_of(name: &str, base: &Path, dir: &Path, size: Option<Bytes>) -> Result<Copied, CreateDiskError> {
    let failed = |source| CreateDiskError::Io { name: name.to_owned(), source };
    let about_base = |error: io::Error| failed(io::Error::new(error.kind(), format!("{}: {error}", base.display())));
    let image = File::open(base).map_err(about_base)?;
    let metadata = image.metadata().map_err(about_base)?;
    if !metadata.is_file() {
        return Err(about_base(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
    }

    let base_size = Bytes(metadata.len());
    let asked = size.unwrap_or(base_size);
    if asked < base_size {
        return Err(CreateDiskError::TooSmall { asked, base: base_size });
    }
    let size = asked.round_up(GRAIN);
    let grown = asked > base_size;
    if grown && !grow::is_ext(&image).map_err(about_base)? {
        let reason = "the image holds no ext4 filesystem, and no other can be grown".to_owned();
        return Err(CreateDiskError::CannotGrow { name: name.to_owned(), asked, reason });
    }

    let needed = copy::occupied(&image).map_err(about_base)?;
    let no_space = || CreateDiskError::NoSpace { name: name.to_owned(), needed, dir: dir.to_owned() };
    let out = |error: io::Error| match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => no_space(),
        _ => failed(error),
    };
    let file = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(dir).map_err(out)?;
    let method = if copy::reflink(&image, file.as_file()).map_err(out)? {
        Method::Reflink
    } else {
        // Asked before, since a full disk hurts everybody on it, not only us.
        let room = statvfs(dir).map_err(|errno| failed(errno.into()))?;
        if Bytes(room.f_bavail.saturating_mul(room.f_frsize)) < needed {
            return Err(no_space());
        }
        copy::sparse(&image, file.as_file()).map_err(out)?;
        Method::Sparse
    };
    file.as_file().set_len(size.get()).map_err(out)?;
    Ok(Copied { file, size, grown, method })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::process::Command;

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .expect("list")
            .map(|e| e.expect("entry").file_name().into_string().expect("utf-8"))
            .collect();
        names.sort();
        names
    }

    fn raw_base(dir: &Path, size: u64) -> PathBuf {
        let base = dir.join("base.raw");
        let file = File::create(&base).expect("create");
        file.set_len(size).expect("size");
        file.write_all_at(b"data", size / 2).expect("write");
        base
    }

    /// An ext4 image, or `None`, said aloud, without the tools. Without checksums, so that a test may edit the superblock.
    fn ext4_base(dir: &Path, size: Bytes) -> Option<PathBuf> {
        let base = dir.join("base.ext4");
        File::create(&base).expect("create").set_len(size.get()).expect("size");
        let made = grow::find("mke2fs").map(|mke2fs| {
            Command::new(mke2fs)
                .args(["-q", "-F", "-t", "ext4", "-O", "^metadata_csum"])
                .arg(&base)
                .status()
                .expect("run")
                .success()
        });
        if made != Some(true) {
            eprintln!("skipped: no e2fsprogs");
            return None;
        }
        Some(base)
    }

    #[tokio::test]
    async fn a_disk_has_the_content_of_its_base_and_is_apart_from_it() {
        let dir = tempfile::tempdir().expect("temp dir");
        let base = raw_base(dir.path(), 1 << 30);
        let store = FileDiskStore::open(dir.path().join("disks")).expect("open");
        let disk = store.create("one", &base, None).await.expect("create");
        assert_eq!(disk.size, Bytes::gib(1));
        let file = File::options().read(true).write(true).open(&disk.path).expect("open");
        assert!(file.metadata().expect("stat").blocks() * 512 < 1 << 20, "holes are kept");
        let mut read = [0; 4];
        file.read_exact_at(&mut read, 1 << 29).expect("read");
        assert_eq!(&read, b"data");
        file.write_all_at(b"mine", 1 << 29).expect("write");
        File::open(&base).expect("open").read_exact_at(&mut read, 1 << 29).expect("read");
        assert_eq!(&read, b"data");

        let again = store.create("one", &base, None).await.expect_err("the name is taken");
        assert!(matches!(&again, CreateDiskError::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists));
        store.remove(&disk.record).await.expect("remove");
        store.remove(&disk.record).await.expect("removing what is gone is success");
        assert_eq!(names(&dir.path().join("disks")), Vec::<String>::new());
    }

    #[tokio::test]
    async fn a_failed_creation_names_the_disk_and_leaves_nothing() {
        let dir = tempfile::tempdir().expect("temp dir");
        let base = raw_base(dir.path(), 1 << 20);
        let store = FileDiskStore::open(dir.path().join("disks")).expect("open");
        let smaller = store.create("a", &base, Some(Bytes::kib(4))).await.expect_err("too small");
        assert!(matches!(smaller, CreateDiskError::TooSmall { .. }));
        let larger = store.create("a", &base, Some(Bytes::mib(2))).await.expect_err("no filesystem");
        assert!(larger.to_string().contains("no ext4"), "{larger}");
        let missing = store.create("a", &dir.path().join("none"), None).await.expect_err("no base");
        assert!(matches!(&missing, CreateDiskError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound));
        for name in ["", ".a", "../a", "a/b", "a\0"] {
            let refused = store.create(name, &base, None).await.expect_err(name);
            assert!(
                matches!(&refused, CreateDiskError::Io { source, .. } if source.kind() == io::ErrorKind::InvalidInput)
            );
        }
        assert_eq!(names(&dir.path().join("disks")), Vec::<String>::new());
    }

    #[tokio::test]
    async fn a_given_up_creation_leaves_nothing() {
        let dir = tempfile::tempdir().expect("temp dir");
        let base = dir.path().join("base.raw");
        fs::write(&base, vec![7; 32 << 20]).expect("write");
        let disks = dir.path().join("disks");
        let store = FileDiskStore::open(disks.clone()).expect("open");
        let given_up = tokio::time::timeout(std::time::Duration::from_millis(1), store.create("a", &base, None)).await;
        if given_up.is_err() {
            let deadline = Instant::now() + std::time::Duration::from_secs(20);
            while !names(&disks).is_empty() {
                assert!(Instant::now() < deadline, "left: {:?}", names(&disks));
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        }
    }

    #[tokio::test]
    async fn opening_the_store_removes_what_a_killed_process_left_unfinished() {
        let dir = tempfile::tempdir().expect("temp dir");
        fs::write(dir.path().join(".unfinished-x1"), "half").expect("write");
        fs::write(dir.path().join("whole"), "disk").expect("write");
        FileDiskStore::open(dir.path().to_owned()).expect("open");
        assert_eq!(names(dir.path()), ["whole"]);
    }

    #[tokio::test]
    async fn a_grown_disk_has_a_filesystem_that_fills_it() {
        let dir = tempfile::tempdir().expect("temp dir");
        let Some(base) = ext4_base(dir.path(), Bytes::mib(16)) else { return };
        let store = FileDiskStore::open(dir.path().join("disks")).expect("open");
        let disk = store.create("big", &base, Some(Bytes::mib(64))).await.expect("create");
        assert_eq!((disk.size, disk.path.metadata().expect("stat").len()), (Bytes::mib(64), Bytes::mib(64).get()));
        assert_eq!(filesystem_size(&disk.path), Bytes::mib(64));
        assert_eq!(filesystem_size(&base), Bytes::mib(16));

        // Mounted and not cleanly unmounted, as the superblock tells it: s_state at 58 of the superblock.
        let dirty = File::options().write(true).open(&base).expect("open");
        dirty.write_all_at(&0_u16.to_le_bytes(), 1024 + 58).expect("write");
        let disk = store.create("checked", &base, Some(Bytes::mib(32))).await.expect("create after a check");
        assert_eq!(filesystem_size(&disk.path), Bytes::mib(32));
    }

    /// `s_blocks_count_lo` (at 4) times the block size (1024 << the word at 24).
    fn filesystem_size(image: &Path) -> Bytes {
        let mut superblock = [0; 1024];
        File::open(image).expect("open").read_exact_at(&mut superblock, 1024).expect("read");
        let word = |at: usize| u32::from_le_bytes(superblock[at..at + 4].try_into().expect("4 bytes"));
        Bytes(u64::from(word(4)) << (10 + word(24)))
    }

    #[tokio::test]
    async fn a_full_filesystem_is_told_with_what_was_needed_and_left_as_it_was() {
        let dir = tempfile::tempdir().expect("temp dir");
        let base = dir.path().join("base.raw");
        fs::write(&base, vec![7; 4 << 20]).expect("write");
        let full = dir.path().join("full");
        fs::create_dir(&full).expect("mkdir");
        let Some(_mount) = SmallTmpfs::mount(&full, "1m") else { return };
        let store = FileDiskStore::open(full.clone()).expect("open");
        let error = store.create("a", &base, None).await.expect_err("4 MiB into 1 MiB");
        assert!(matches!(error, CreateDiskError::NoSpace { needed, .. } if needed >= Bytes::mib(4)), "{error}");
        assert_eq!(names(&full), Vec::<String>::new());
    }

    /// A filesystem of its own, unmounted on drop.
    struct SmallTmpfs(PathBuf);

    impl SmallTmpfs {
        fn mount(at: &Path, size: &str) -> Option<Self> {
            use rustix::mount::{MountFlags, mount};
            let options = std::ffi::CString::new(format!("size={size}")).expect("no NUL");
            match mount("tmpfs", at, "tmpfs", MountFlags::empty(), options.as_c_str()) {
                Ok(()) => Some(Self(at.to_owned())),
                Err(errno) => {
                    eprintln!("skipped: cannot mount a small tmpfs: {errno}");
                    None
                }
            }
        }
    }

    impl Drop for SmallTmpfs {
        fn drop(&mut self) {
            let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH); // nothing better to do in a drop
        }
    }
}
