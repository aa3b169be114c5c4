//! Where what is kept.
//!
//! ```text
//!   catalog/records/ID.json                a record, or what is left of one while it is being deleted
//!   catalog/aliases/NAME                   whose a name is
//!   catalog/sweep.json                     whose turn it is to remove garbage
//!   managed-layers/sha256:HEX              a layer that any record may refer to
//!   artifacts/ID/CAPTURE/FILE              a file of one record
//!   leases/UUID.json                       what a publication that is under way needs
//! ```

use aenv_model::{CaptureId, TemplateId};
use aenv_objects::Key;
use uuid::Uuid;

use crate::digest::Digest;
use crate::error::RepositoryError;
use crate::record::StoredFile;

pub(crate) const RECORDS: &str = "catalog/records";
pub(crate) const ALIASES: &str = "catalog/aliases";
pub(crate) const SWEEP: &str = "catalog/sweep.json";
pub(crate) const LAYERS: &str = "managed-layers";
pub(crate) const ARTIFACTS: &str = "artifacts";
pub(crate) const LEASES: &str = "leases";

/// A key that is made of what cannot be wrong, or else is refused as what is wrong.
pub(crate) fn key(text: String) -> Result<Key, RepositoryError> {
    text.parse().map_err(|source| RepositoryError::Name { source })
}

pub(crate) fn record(id: TemplateId) -> Result<Key, RepositoryError> {
    key(format!("{RECORDS}/{id}.json"))
}

pub(crate) fn record_of(key: &Key) -> Option<TemplateId> {
    key.as_str().strip_prefix(RECORDS)?.strip_prefix('/')?.strip_suffix(".json")?.parse().ok()
}

pub(crate) fn alias(name: &str) -> Result<Key, RepositoryError> {
    key(format!("{ALIASES}/{}", component(name)?))
}

pub(crate) fn alias_of(key: &Key) -> Option<&str> {
    key.as_str().strip_prefix(ALIASES)?.strip_prefix('/')
}

pub(crate) fn lease(id: Uuid) -> Result<Key, RepositoryError> {
    key(format!("{LEASES}/{id}.json"))
}

pub(crate) fn layer(digest: &Digest) -> Result<Key, RepositoryError> {
    key(format!("{LAYERS}/{digest}"))
}

pub(crate) fn layer_of(key: &Key) -> Option<Digest> {
    key.as_str().strip_prefix(LAYERS)?.strip_prefix('/')?.parse().ok()
}

/// The folder of a record's own files.
pub(crate) fn artifacts(id: TemplateId, capture: CaptureId) -> Result<Key, RepositoryError> {
    key(format!("{ARTIFACTS}/{id}/{capture}"))
}

pub(crate) fn artifact_of(key: &Key) -> Option<(TemplateId, CaptureId)> {
    let mut parts = key.as_str().strip_prefix(ARTIFACTS)?.strip_prefix('/')?.split('/');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

pub(crate) fn file(id: TemplateId, capture: CaptureId, file: &StoredFile) -> Result<Key, RepositoryError> {
    match file.managed {
        true => layer(&file.digest),
        false => key(format!("{}/{}", artifacts(id, capture)?, component(&file.name)?)),
    }
}

/// A name that is one component of a path, on any host.
pub(crate) fn component(name: &str) -> Result<&str, RepositoryError> {
    let parsed: Result<Key, _> = name.parse();
    match parsed {
        Ok(_) if !name.contains('/') => Ok(name),
        Ok(_) => Err(RepositoryError::Corrupt { what: format!("name {name:?}"), problem: "it is a path".to_owned() }),
        Err(source) => Err(RepositoryError::Name { source }),
    }
}
