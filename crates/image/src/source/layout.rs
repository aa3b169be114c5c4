//! OCI image layouts: `index.json` names manifests, `blobs/ALGORITHM/HEX` holds everything. As a folder here; the
//! same structure comes inside of archives.

use std::io;
use std::path::{Path, PathBuf};

use super::manifest::{Descriptor, MAX_NESTING, Manifest, choose, invalid};
use super::slice::Slice;
use super::{Blob, Content, Files, MAX_METADATA, Resolved, read_config};
use crate::digest::Digest;
use crate::error::ImportError;

/// A layout in a folder.
#[derive(Debug)]
pub(crate) struct Folder(pub(crate) PathBuf);

impl Files for Folder {
    fn slice(&self, name: &str) -> Result<Option<Slice>, ImportError> {
        let path = self.0.join(name);
        match Slice::whole(&path) {
            Ok(slice) => Ok(Some(slice)),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
            Err(source) => Err(ImportError::io("open", &path, source)),
        }
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

/// Finds the image `tag` of a layout. Blocking.
pub(crate) fn resolve(folder: &Folder, image: &str, tag: Option<&str>) -> Result<Resolved, ImportError> {
    resolve_in(folder, image, tag)
}

pub(super) fn resolve_in(files: &dyn Files, image: &str, tag: Option<&str>) -> Result<Resolved, ImportError> {
    let not_found = |words: String| ImportError::NotFound { image: image.to_owned(), words };
    let Some(index) = files.slice("index.json")? else {
        return Err(not_found(format!("{} holds no index.json, so it is no OCI layout", files.path().display())));
    };
    let index =
        index.read(MAX_METADATA).map_err(|source| ImportError::io("read index.json of", files.path(), source))?;
    let Manifest::Index(entries) = Manifest::parse(image, &index)? else {
        return Err(invalid(image, "index.json is no index".into()));
    };
    let mut descriptor = pick(image, &entries, tag)?;
    for _ in 0..=MAX_NESTING {
        let digest = descriptor.digest(image)?;
        let data = metadata(files, image, &descriptor)?;
        match Manifest::parse(image, &data)? {
            Manifest::Index(entries) => descriptor = choose(image, &entries)?,
            Manifest::Image(manifest) => {
                let file = read_config(image, &metadata(files, image, &manifest.config)?)?;
                let blob = |layer: &Descriptor| local(files, image, layer);
                let content = Content::of(image, &manifest, &file, &blob, None)?;
                return Ok(Resolved { digest, file, content });
            }
        }
    }
    Err(invalid(image, "its indexes are nested too deeply".into()))
}

/// The entry of the layout's index that is meant.
fn pick(image: &str, entries: &[Descriptor], tag: Option<&str>) -> Result<Descriptor, ImportError> {
    let candidates: Vec<&Descriptor> = match tag {
        // The name may be a full reference; then its tag is what people type.
        Some(tag) => entries
            .iter()
            .filter(|entry| entry.tag().is_some_and(|name| name == tag || name.ends_with(&format!(":{tag}"))))
            .collect(),
        None => entries.iter().collect(),
    };
    let tags = || {
        let tags: Vec<_> = entries.iter().filter_map(Descriptor::tag).collect();
        if tags.is_empty() { "none".to_owned() } else { tags.join(", ") }
    };
    match (candidates.as_slice(), tag) {
        ([], _) => {
            Err(ImportError::NotFound { image: image.to_owned(), words: format!("the layout's tags are: {}", tags()) })
        }
        ([only], _) => Ok((*only).clone()),
        // The same tag for several platforms.
        (several, Some(_)) => choose(image, &several.iter().copied().cloned().collect::<Vec<_>>()),
        (several, None) => match several.iter().find(|entry| entry.tag() == Some("latest")) {
            Some(latest) => Ok((*latest).clone()),
            None if several.iter().any(|entry| entry.tag().is_some()) => Err(ImportError::NotFound {
                image: image.to_owned(),
                words: format!("the layout holds several images, so a tag is needed: {}", tags()),
            }),
            None => choose(image, entries),
        },
    }
}

fn local(files: &dyn Files, image: &str, descriptor: &Descriptor) -> Result<Blob, ImportError> {
    let digest = descriptor.digest(image)?;
    let name = format!("blobs/{}/{}", digest.algorithm_name(), digest.hex());
    let Some(slice) = files.slice(&name)? else {
        return Err(invalid(image, format!("its blob {digest} is missing in {}", files.path().display())));
    };
    if slice.length() != descriptor.size {
        let problem = format!("its blob {digest} is {} bytes long, not {}", slice.length(), descriptor.size);
        return Err(invalid(image, problem));
    }
    Ok(Blob::Local { slice, digest: Some(digest) })
}

/// Reads a manifest or configuration, verified.
fn metadata(files: &dyn Files, image: &str, descriptor: &Descriptor) -> Result<Vec<u8>, ImportError> {
    let Blob::Local { slice, digest: Some(expected) } = local(files, image, descriptor)? else {
        return Err(invalid(image, "its metadata has no digest".into()));
    };
    let data = slice.read(MAX_METADATA).map_err(|source| ImportError::io("read", slice.path(), source))?;
    let mut hasher = crate::digest::Hasher::new(expected.algorithm());
    hasher.update(&data);
    let found: Digest = hasher.finish();
    if found != expected {
        return Err(invalid(image, format!("its blob {expected} has the digest {found}")));
    }
    Ok(data)
}
