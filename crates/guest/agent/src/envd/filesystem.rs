//! `filesystem.Filesystem`: looking at and changing the image's files.
//!
//! Everything runs as root inside the daemon; the user of a request only decides where `~` is and who owns what it
//! creates. The work itself is blocking and done on the blocking pool.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_guest_proto::wire::filesystem as wire;
use connectrpc::{ConnectError, RequestContext, Response, ServiceRequest, ServiceResult, ServiceStream};
use rustix::io::Errno;

use super::users::{Accounts, User};
use super::{Envd, blocking, entry, watch_service};

/// The service; stateless beside the daemon's state.
#[derive(Debug)]
pub(super) struct FilesystemService {
    envd: Arc<Envd>,
}

impl FilesystemService {
    pub(super) fn new(envd: Arc<Envd>) -> Self {
        Self { envd }
    }
}

#[allow(refining_impl_trait, reason = "plain messages say more than what they can be encoded as")]
impl wire::Filesystem for FilesystemService {
    async fn stat(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::StatRequest>,
    ) -> ServiceResult<wire::StatResponse> {
        let (_, path) = self.envd.rpc_path(&ctx, request.path)?;
        let entry = blocking(move || stat(&path)).await??;
        Response::ok(wire::StatResponse { entry: entry.into(), ..Default::default() })
    }

    async fn make_dir(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::MakeDirRequest>,
    ) -> ServiceResult<wire::MakeDirResponse> {
        let (user, path) = self.envd.rpc_path(&ctx, request.path)?;
        let envd = Arc::clone(&self.envd);
        let entry = blocking(move || {
            let entry = make_dir(&path, &user);
            envd.watchers.settle();
            entry
        });
        let entry = entry.await??;
        Response::ok(wire::MakeDirResponse { entry: entry.into(), ..Default::default() })
    }

    async fn r#move(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::MoveRequest>,
    ) -> ServiceResult<wire::MoveResponse> {
        let (_, source) = self.envd.rpc_path(&ctx, request.source)?;
        let (user, destination) = self.envd.rpc_path(&ctx, request.destination)?;
        let envd = Arc::clone(&self.envd);
        let entry = blocking(move || {
            let entry = rename(&source, &destination, &user);
            envd.watchers.settle();
            entry
        });
        let entry = entry.await??;
        Response::ok(wire::MoveResponse { entry: entry.into(), ..Default::default() })
    }

    async fn list_dir(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::ListDirRequest>,
    ) -> ServiceResult<wire::ListDirResponse> {
        let (_, path) = self.envd.rpc_path(&ctx, request.path)?;
        let depth = request.depth.max(1);
        let entries = blocking(move || list_dir(&path, depth)).await??;
        Response::ok(wire::ListDirResponse { entries, ..Default::default() })
    }

    async fn remove(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::RemoveRequest>,
    ) -> ServiceResult<wire::RemoveResponse> {
        let (_, path) = self.envd.rpc_path(&ctx, request.path)?;
        blocking(move || remove(&path)).await??;
        Response::ok(wire::RemoveResponse::default())
    }

    async fn watch_dir(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::WatchDirRequest>,
    ) -> ServiceResult<ServiceStream<wire::WatchDirResponse>> {
        Response::ok(watch_service::watch_dir(&self.envd, &ctx, request.to_owned_message()).await?)
    }

    async fn create_watcher(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::CreateWatcherRequest>,
    ) -> ServiceResult<wire::CreateWatcherResponse> {
        Response::ok(watch_service::create_watcher(&self.envd, &ctx, request.to_owned_message()).await?)
    }

    async fn get_watcher_events(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::GetWatcherEventsRequest>,
    ) -> ServiceResult<wire::GetWatcherEventsResponse> {
        Envd::check_rpc_user(&ctx)?;
        Response::ok(watch_service::get_watcher_events(&self.envd, request.watcher_id).await?)
    }

    async fn remove_watcher(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::RemoveWatcherRequest>,
    ) -> ServiceResult<wire::RemoveWatcherResponse> {
        Envd::check_rpc_user(&ctx)?;
        Response::ok(watch_service::remove_watcher(&self.envd, request.watcher_id)?)
    }
}

fn describe(path: &Path) -> io::Result<wire::EntryInfo> {
    let accounts = Accounts::load();
    entry::describe(path, &accounts.names())
}

fn stat(path: &Path) -> Result<wire::EntryInfo, ConnectError> {
    describe(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => {
            ConnectError::not_found(format!("file not found: {}: {error}", path.display()))
        }
        _ => ConnectError::internal(format!("error getting file info: {error}")),
    })
}

fn make_dir(path: &Path, user: &User) -> Result<wire::EntryInfo, ConnectError> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => {
            return Err(ConnectError::already_exists(format!("directory already exists: {}", path.display())));
        }
        Ok(_) => {
            return Err(ConnectError::invalid_argument(format!(
                "path already exists but it is not a directory: {}",
                path.display()
            )));
        }
        Err(_) => {}
    }
    create_owned_dirs(path, user)
        .map_err(|error| ConnectError::internal(format!("error creating directory: {error}")))?;
    stat(path)
}

/// Creates `path` and every missing parent, each 0755 and the user's. What exists is left as it is; returns whether
/// anything was missing.
pub(super) fn create_owned_dirs(path: &Path, user: &User) -> io::Result<bool> {
    let missing: Vec<&Path> = path.ancestors().take_while(|p| !p.as_os_str().is_empty() && !p.exists()).collect();
    let created = !missing.is_empty();
    for directory in missing.into_iter().rev() {
        match fs::DirBuilder::new().mode(0o755).create(directory) {
            Ok(()) => chown(directory, user)?,
            // Somebody else was faster, or the path has `..` after a directory just made.
            Err(error) if error.kind() == ErrorKind::AlreadyExists && directory.is_dir() => {}
            Err(error) => return Err(error),
        }
    }
    // Says so if a parent turned out to be a file.
    if path.is_dir() { Ok(created) } else { Err(ErrorKind::NotADirectory.into()) }
}

/// Gives a path to the user. Without privilege (a test run) it stays ours.
pub(super) fn chown(path: &Path, user: &User) -> io::Result<()> {
    match std::os::unix::fs::chown(path, Some(user.uid), Some(user.gid)) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied && !rustix::process::geteuid().is_root() => Ok(()),
        result => result,
    }
}

fn rename(source: &Path, destination: &Path, user: &User) -> Result<wire::EntryInfo, ConnectError> {
    let internal = |error: io::Error| ConnectError::internal(format!("error renaming: {error}"));
    if let Some(parent) = destination.parent() {
        create_owned_dirs(parent, user).map_err(internal)?;
    }
    fs::rename(source, destination).map_err(|error| match error.kind() {
        ErrorKind::NotFound => ConnectError::not_found(format!("source file not found: {}", source.display())),
        _ => internal(error),
    })?;
    stat(destination)
}

fn remove(path: &Path) -> Result<(), ConnectError> {
    let removed = match path.symlink_metadata() {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Err(ConnectError::internal(format!("error removing file or directory: {error}")))
        }
        _ => Ok(()),
    }
}

/// Resolves the root of a listing or watch, which must be a directory.
pub(super) fn resolve_dir(path: &Path) -> Result<PathBuf, ConnectError> {
    let resolved = path.canonicalize().map_err(|error| match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT | Errno::NOTDIR) => {
            ConnectError::not_found(format!("path not found: {}: {error}", path.display()))
        }
        Some(Errno::LOOP) => ConnectError::failed_precondition(format!("cyclic symlink: {}", path.display())),
        _ => ConnectError::internal(format!("error resolving {}: {error}", path.display())),
    })?;
    if resolved.is_dir() {
        Ok(resolved)
    } else {
        Err(ConnectError::invalid_argument(format!("path is not a directory: {}", path.display())))
    }
}

fn list_dir(requested: &Path, depth: u32) -> Result<Vec<wire::EntryInfo>, ConnectError> {
    let root = resolve_dir(requested)?;
    let accounts = Accounts::load();
    let names = accounts.names();
    let unreadable = |error: io::Error| ConnectError::internal(format!("error reading directory: {error}"));
    let mut entries = Vec::new();
    // A stack of what is still to be listed, in reverse, makes the walk pre-order without recursion.
    let mut pending = children(&root, Path::new(""), 1).map_err(unreadable)?;
    while let Some((relative, level)) = pending.pop() {
        let real = root.join(&relative);
        let Ok(mut entry) = entry::describe(&real, &names) else { continue };
        let descend = level < depth && real.symlink_metadata().is_ok_and(|found| found.is_dir());
        if descend {
            match children(&root, &relative, level + 1) {
                Ok(below) => pending.extend(below),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(unreadable(error)),
            }
        }
        // The path as the caller knows it, even if the root was reached through a link.
        entry.path = requested.join(&relative).to_string_lossy().into_owned();
        entries.push(entry);
    }
    Ok(entries)
}

fn children(root: &Path, relative: &Path, level: u32) -> io::Result<Vec<(PathBuf, u32)>> {
    let mut names: Vec<_> =
        fs::read_dir(root.join(relative))?.filter_map(|entry| entry.ok().map(|entry| entry.file_name())).collect();
    names.sort_unstable_by(|a, b| b.cmp(a));
    Ok(names.into_iter().map(|name| (relative.join(name), level)).collect())
}

/// On a file system whose events a watch would miss, because others change it behind the kernel's back.
pub(super) fn is_network_mount(path: &Path) -> bool {
    const NFS: i64 = 0x6969;
    const CIFS: i64 = 0xff53_4d42;
    const SMB: i64 = 0x517b;
    const SMB2: i64 = 0xfe53_4d42;
    const FUSE: i64 = 0x6573_5546;
    rustix::fs::statfs(path).is_ok_and(|found| [NFS, CIFS, SMB, SMB2, FUSE].contains(&{ found.f_type }))
}

/// Two paths lead to the same file.
pub(super) fn same_file(a: &Path, b: &Path) -> bool {
    let id = |path: &Path| path.metadata().map(|found| (found.dev(), found.ino())).ok();
    a == b || id(a).is_some_and(|id_a| Some(id_a) == id(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user() -> User {
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        User { name: "me".into(), uid, gid, groups: vec![], home: "/".into() }
    }

    fn listed(path: &Path, depth: u32) -> Vec<String> {
        let entries = list_dir(path, depth).unwrap();
        let relative = |e: &wire::EntryInfo| Path::new(&e.path).strip_prefix(path).unwrap().display().to_string();
        entries.iter().map(relative).collect()
    }

    #[test]
    fn a_listing_is_pre_order_by_name_and_follows_only_the_root() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        create_owned_dirs(&root.join("b/deep/er"), &user()).unwrap();
        fs::write(root.join("a.txt"), "").unwrap();
        fs::write(root.join("b.txt"), "").unwrap();
        std::os::unix::fs::symlink("b", root.join("c")).unwrap();
        std::os::unix::fs::symlink(".", root.join("self")).unwrap();

        assert_eq!(listed(root, 1), ["a.txt", "b", "b.txt", "c", "self"]);
        assert_eq!(listed(root, 2), ["a.txt", "b", "b/deep", "b.txt", "c", "self"]);
        assert_eq!(listed(&root.join("c"), 2), ["deep", "deep/er"], "through a link, by the name asked for");
    }

    #[test]
    fn making_and_removing_answer_as_the_contract_says() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x/y");
        let made = make_dir(&path, &user()).unwrap();
        assert_eq!(made.mode, 0o755);
        assert_eq!(make_dir(&path, &user()).unwrap_err().code, connectrpc::ErrorCode::AlreadyExists);
        fs::write(path.join("f"), "").unwrap();
        assert_eq!(make_dir(&path.join("f"), &user()).unwrap_err().code, connectrpc::ErrorCode::InvalidArgument);
        assert_eq!(make_dir(&path.join("f/g"), &user()).unwrap_err().code, connectrpc::ErrorCode::Internal);
        assert_eq!(list_dir(&path.join("f"), 1).unwrap_err().code, connectrpc::ErrorCode::InvalidArgument);
        assert_eq!(list_dir(&path.join("gone"), 1).unwrap_err().code, connectrpc::ErrorCode::NotFound);
        remove(&directory.path().join("x")).unwrap();
        remove(&directory.path().join("x")).unwrap();
        assert!(!path.exists());
    }
}
