//! Unix sockets in a machine's work dir.
//!
//! Work dirs lie deep, and the address of a unix socket has room for 107 bytes: the sockets are reached through an
//! open descriptor of the directory instead of its path.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use tokio::net::UnixStream;

/// Listens on a new socket. The listener is for the VMM to inherit; because it exists before the VMM does, a client
/// can connect at once and need not ask again and again whether the socket is there.
pub(crate) fn listen(directory: &Path, name: &str) -> io::Result<OwnedFd> {
    let (_keep, address) = address(directory, name)?;
    Ok(UnixListener::bind(address)?.into())
}

/// Connects to a socket made by [`listen`].
pub(crate) async fn connect(directory: &Path, name: &str) -> io::Result<UnixStream> {
    let (_keep, address) = address(directory, name)?;
    UnixStream::connect(address).await
}

fn address(directory: &Path, name: &str) -> io::Result<(OwnedFd, PathBuf)> {
    let directory = rustix::fs::open(directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let address = PathBuf::from(format!("/proc/self/fd/{}/{name}", directory.as_raw_fd()));
    Ok((directory, address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_deep_directory_is_no_obstacle() {
        let root = tempfile::tempdir().unwrap();
        let deep = root.path().join("d".repeat(100)).join("e".repeat(100));
        std::fs::create_dir_all(&deep).unwrap();
        let listener = UnixListener::from(listen(&deep, "s.sock").unwrap());
        connect(&deep, "s.sock").await.unwrap();
        listener.accept().unwrap();
        assert!(deep.join("s.sock").exists());
    }
}
