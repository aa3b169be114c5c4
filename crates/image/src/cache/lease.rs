//! Leases: who needs which layers, whatever else refers to them.
//!
//! A lease is a file with digests. To take one is to write it and see that the layers are there, both under a share of the
//! lock that a collection takes whole before it removes something: either the collection finds the lease, or the lease
//! finds that the layer is gone.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use aenv_block_client::DeviceConfig;
use serde::{Deserialize, Serialize};

use super::lock::{self, Held};
use super::{CacheError, ImageCache, TEMPORARY};
use crate::digest::Digest;

/// Longest name of an owner.
const MAX_OWNER: usize = 200;
const SCHEMA: u32 = 1;

/// What layers are needed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LeaseKind {
    /// Work that is under way. Void once its process is gone.
    Operation,
    /// A running sandbox.
    Runtime,
    /// A template.
    Template,
    /// A paused sandbox.
    Paused,
}

impl LeaseKind {
    pub(super) const ALL: [Self; 4] = [Self::Operation, Self::Runtime, Self::Template, Self::Paused];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Operation => "operation",
            Self::Runtime => "runtime",
            Self::Template => "template",
            Self::Paused => "paused",
        }
    }
}

/// A lease's file.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    schema: u32,
    /// The node that took it: the cache may be several nodes'.
    node: String,
    digests: BTreeSet<Digest>,
}

/// What a device needs of the cache.
#[derive(Debug, Default)]
struct Needs {
    /// Must be there.
    required: BTreeSet<Digest>,
    /// May as well come from a registry.
    optional: BTreeSet<Digest>,
}

impl ImageCache {
    /// Keeps layers for `owner`, in place of those it had under this kind. Durable on return. Blocking.
    ///
    /// Errors: [`CacheError::Gone`] if one of them is not there; then nothing has changed.
    pub fn lease_blocking(
        &self,
        kind: LeaseKind,
        owner: &str,
        digests: impl IntoIterator<Item = Digest>,
    ) -> Result<(), CacheError> {
        self.take(kind, owner, Needs { required: digests.into_iter().collect(), ..Needs::default() })
    }

    /// Keeps what a device needs of this cache for `owner`, in place of what it had under this kind. Blocking.
    ///
    /// A layer given as a file in the cache must be there; one that may as well come from its registry is kept if it is.
    pub fn lease_device_blocking(&self, kind: LeaseKind, owner: &str, config: &DeviceConfig) -> Result<(), CacheError> {
        let mut needs = Needs::default();
        for lower in &config.lowers {
            match (&lower.file, &lower.dir) {
                (Some(file), _) => needs.required.extend(self.layout.digest_of(file)),
                (None, Some(dir)) => needs.optional.extend(self.layout.digest_of(dir)),
                (None, None) => {}
            }
        }
        self.take(kind, owner, needs)
    }

    fn take(&self, kind: LeaseKind, owner: &str, needs: Needs) -> Result<(), CacheError> {
        let path = self.lease_path(kind, owner)?;
        let _shared = self.share()?;
        let gone: Vec<Digest> = needs.required.iter().filter(|digest| !self.is_there(digest)).cloned().collect();
        if !gone.is_empty() {
            return Err(CacheError::Gone { digests: gone });
        }
        let digests = needs.required.into_iter().chain(needs.optional).collect();
        let record = self.record(digests);
        aenv_durable::atomic_write(&path, &record, 0o600).map_err(|source| CacheError::io("write lease", &path, source))
    }

    /// Ends a lease. One that is not there is success. Blocking.
    pub fn release_blocking(&self, kind: LeaseKind, owner: &str) -> Result<(), CacheError> {
        let path = self.lease_path(kind, owner)?;
        aenv_durable::remove_file_if_present(&path).map_err(|source| CacheError::io("remove lease", &path, source))
    }

    /// Ends this node's leases of a kind but for those of `owners`, and gives the owners that no longer have one. To be
    /// called at start: only then is it known that nobody else is about to take one. Blocking.
    pub fn reconcile_blocking(&self, kind: LeaseKind, owners: &BTreeSet<String>) -> Result<Vec<String>, CacheError> {
        let mut ended = Vec::new();
        for (owner, path) in self.lease_files(kind)? {
            if owners.contains(&owner) {
                continue;
            }
            let ours = match read(&path) {
                Ok(Some(record)) => *record.node == *self.node,
                Ok(None) => false, // gone meanwhile
                Err(source) => return Err(CacheError::io("read lease", &path, source)),
            };
            if ours {
                self.release_blocking(kind, &owner)?;
                ended.push(owner);
            }
        }
        Ok(ended)
    }

    /// A lease for work of this process that ends with the value. Blocking.
    pub(crate) fn operation(&self, name: &str) -> Result<Operation, CacheError> {
        let path = self.lease_path(LeaseKind::Operation, name)?;
        let _shared = self.share()?;
        let held = self.write_operation(&path, &BTreeSet::new())?;
        Ok(Operation { cache: self.clone(), path, digests: BTreeSet::new(), _held: held })
    }

    /// Every layer that some lease keeps. A lease that can't be read is added to `doubts`; operations without a process are
    /// void, and their files are added to `void`. To be called by whoever has the whole lock.
    pub(super) fn leased(
        &self,
        doubts: &mut Vec<PathBuf>,
        void: &mut Vec<PathBuf>,
    ) -> Result<BTreeSet<Digest>, CacheError> {
        let mut digests = BTreeSet::new();
        for kind in LeaseKind::ALL {
            for (_, path) in self.lease_files(kind)? {
                if kind == LeaseKind::Operation && matches!(lock::abandoned(&path), Ok(Some(_))) {
                    void.push(path);
                    continue;
                }
                match read(&path) {
                    Ok(Some(record)) => digests.extend(record.digests),
                    Ok(None) => {}
                    Err(_) => doubts.push(path),
                }
            }
        }
        Ok(digests)
    }

    fn lease_files(&self, kind: LeaseKind) -> Result<Vec<(String, PathBuf)>, CacheError> {
        let dir = self.layout.leases(kind);
        let mut found = Vec::new();
        for path in super::files(&dir)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if let Some(owner) = name.strip_suffix(".json")
                && !name.starts_with(TEMPORARY)
            {
                found.push((owner.to_owned(), path.clone()));
            }
        }
        Ok(found)
    }

    fn lease_path(&self, kind: LeaseKind, owner: &str) -> Result<PathBuf, CacheError> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        if owner.is_empty() || owner.len() > MAX_OWNER || owner.starts_with('.') || !owner.bytes().all(plain) {
            return Err(CacheError::Owner { owner: owner.to_owned() });
        }
        Ok(self.layout.lease(kind, owner))
    }

    fn record(&self, digests: BTreeSet<Digest>) -> Vec<u8> {
        // Texts and lists of texts always become JSON.
        serde_json::to_vec(&Record { schema: SCHEMA, node: self.node.to_string(), digests }).unwrap_or_default()
    }

    /// Replaces an operation's file by one that is locked before it has the name. Need not outlive the host.
    fn write_operation(&self, path: &Path, digests: &BTreeSet<Digest>) -> Result<Held, CacheError> {
        let dir = self.layout.leases(LeaseKind::Operation);
        let write = || -> io::Result<Held> {
            let permissions = Permissions::from_mode(0o600);
            let mut file = tempfile::Builder::new().prefix(TEMPORARY).permissions(permissions).tempfile_in(&dir)?;
            file.write_all(&self.record(digests.clone()))?;
            let held = Held::of_own(file.as_file().try_clone()?)?;
            file.persist(path).map_err(|error| error.error)?;
            Ok(held)
        };
        write().map_err(|source| CacheError::io("write lease", path, source))
    }
}

/// A lease for work of this process. It ends when this is dropped, and when the process does.
#[derive(Debug)]
pub(crate) struct Operation {
    cache: ImageCache,
    path: PathBuf,
    digests: BTreeSet<Digest>,
    _held: Held,
}

impl Operation {
    /// Keeps this layer too. `false` if it is not there, or not `size` bytes long. Blocking.
    pub(crate) fn keep(&mut self, digest: &Digest, size: aenv_model::Bytes) -> Result<bool, CacheError> {
        let cache = self.cache.clone();
        let _shared = cache.share()?;
        if !cache.has_commit(digest, size) {
            return Ok(false);
        }
        self.extend(digest)?;
        Ok(true)
    }

    /// Keeps a layer that is about to be there. To be called by whoever has a share of the lock.
    pub(super) fn extend(&mut self, digest: &Digest) -> Result<(), CacheError> {
        if self.digests.insert(digest.clone()) {
            self._held = self.cache.write_operation(&self.path, &self.digests)?;
        }
        Ok(())
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path); // without a lock it is void; the next collection removes it
    }
}

/// Reads a lease; `None` if there is none.
fn read(path: &Path) -> io::Result<Option<Record>> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let record: Record = serde_json::from_slice(&text)?;
    if record.schema != SCHEMA {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a lease of schema {}", record.schema)));
    }
    Ok(Some(record))
}
