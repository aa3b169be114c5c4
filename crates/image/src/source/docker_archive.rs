//! What `docker save` writes: a tar with `manifest.json`, which names a configuration and layer files. Newer ones
//! are OCI layouts in a tar at the same time; archives that are only that are read as such.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::layout::resolve_in;
use super::manifest::invalid;
use super::slice::Slice;
use super::{Blob, Content, Files, MAX_METADATA, Resolved, read_config};
use crate::archive::{Kind, Members};
use crate::compression::decompress;
use crate::digest::Digest;
use crate::error::ImportError;

/// More files than any image's archive has.
const MAX_FILES: usize = 100_000;

/// One image of an archive.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    layers: Option<Vec<String>>,
}

/// What is where in an uncompressed archive.
#[derive(Debug)]
struct Contents {
    path: PathBuf,
    files: HashMap<String, (u64, u64)>,
    links: HashMap<String, String>,
}

impl Files for Contents {
    fn slice(&self, name: &str) -> Result<Option<Slice>, ImportError> {
        // Old versions link layers that images share.
        let name = self.links.get(name).map_or(name, String::as_str);
        Ok(self.files.get(name).map(|(offset, length)| Slice::part(&self.path, *offset, *length)))
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

/// Finds the image `tag` of the archive `path`. A compressed archive is uncompressed to `scratch` first. `pass` is
/// asked before each piece. Blocking.
pub(crate) fn resolve(
    path: &Path,
    scratch: &Path,
    image: &str,
    tag: Option<&str>,
    pass: &mut dyn FnMut() -> io::Result<()>,
) -> Result<Resolved, ImportError> {
    let plain = uncompressed(path, scratch, image, pass)?;
    let contents = Contents::read(&plain, pass).map_err(|source| match source.raw_os_error() {
        Some(_) => ImportError::io("read", path, source),
        None => invalid(image, format!("{} is no archive: {source}", path.display())),
    })?;
    let Some(list) = contents.slice("manifest.json")? else {
        return resolve_in(&contents, image, tag);
    };
    let read = |slice: &Slice| slice.read(MAX_METADATA).map_err(|source| ImportError::io("read", path, source));
    let entries: Vec<Entry> = serde_json::from_slice(&read(&list)?)
        .map_err(|error| invalid(image, format!("its manifest.json is malformed: {error}")))?;
    let entry = pick(image, entries, tag)?;
    let missing = |name: &str| invalid(image, format!("{name} is missing in {}", path.display()));
    let file = read(&contents.slice(&entry.config)?.ok_or_else(|| missing(&entry.config))?)?;
    let mut blobs = Vec::new();
    for name in entry.layers.unwrap_or_default() {
        let slice = contents.slice(&name)?.ok_or_else(|| missing(&name))?;
        // A layer file's own name may be its digest; else the configuration's diff_ids vouch for it alone.
        let digest = name.strip_prefix("blobs/").and_then(|name| name.replacen('/', ":", 1).parse().ok());
        blobs.push(Blob::Local { slice, digest });
    }
    let digest = Digest::of(&file);
    let file = read_config(image, &file)?;
    let content = Content::standard(image, &file, blobs)?;
    Ok(Resolved { digest, file, content })
}

fn pick(image: &str, mut entries: Vec<Entry>, tag: Option<&str>) -> Result<Entry, ImportError> {
    let not_found = |words: String| ImportError::NotFound { image: image.to_owned(), words };
    let tags: Vec<String> = entries.iter().filter_map(|entry| entry.repo_tags.clone()).flatten().collect();
    let tags = if tags.is_empty() { "none".to_owned() } else { tags.join(", ") };
    let Some(tag) = tag else {
        return match entries.len() {
            1 => Ok(entries.remove(0)),
            _ => Err(not_found(format!("the archive does not hold exactly one image, so a tag is needed: {tags}"))),
        };
    };
    let fits = |name: &str| {
        let short = name.strip_prefix("docker.io/library/").unwrap_or(name);
        name == tag || short == tag || name.rsplit_once(':').is_some_and(|(_, last)| last == tag)
    };
    let mut found: Vec<Entry> =
        entries.into_iter().filter(|entry| entry.repo_tags.iter().flatten().any(|name| fits(name))).collect();
    match found.len() {
        0 => Err(not_found(format!("the archive's tags are: {tags}"))),
        1 => Ok(found.remove(0)),
        _ => Err(not_found(format!("{tag} fits more than one image of the archive: {tags}"))),
    }
}

/// The archive itself, or its content in `scratch` if it is compressed.
fn uncompressed(
    path: &Path,
    scratch: &Path,
    image: &str,
    pass: &mut dyn FnMut() -> io::Result<()>,
) -> Result<PathBuf, ImportError> {
    let slice = Slice::whole(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            ImportError::NotFound { image: image.to_owned(), words: format!("there is no file {}", path.display()) }
        }
        _ => ImportError::io("open", path, source),
    })?;
    let opened = slice.open().map_err(|source| ImportError::io("open", path, source))?;
    let start = slice.open().and_then(|mut file| Ok(io::BufRead::fill_buf(&mut file)?.to_vec()));
    let start = start.map_err(|source| ImportError::io("read", path, source))?;
    // A tar's magic lies 257 bytes in; without it, it is compressed or nothing we know.
    if start.get(257..262) == Some(b"ustar") {
        return Ok(path.to_owned());
    }
    let broken = |error: io::Error| invalid(image, format!("{} is no archive: {error}", path.display()));
    let mut input = decompress(opened).map_err(broken)?;
    let mut output = File::create(scratch).map_err(|source| ImportError::io("create", scratch, source))?;
    let mut buffer = vec![0; 128 << 10];
    loop {
        pass().map_err(|source| ImportError::io("read", path, source))?;
        let n = io::Read::read(&mut input, &mut buffer).map_err(broken)?;
        if n == 0 {
            return Ok(scratch.to_owned());
        }
        io::Write::write_all(&mut output, &buffer[..n]).map_err(|source| ImportError::io("write", scratch, source))?;
    }
}

impl Contents {
    fn read(path: &Path, pass: &mut dyn FnMut() -> io::Result<()>) -> io::Result<Self> {
        let mut contents = Self { path: path.to_owned(), files: HashMap::new(), links: HashMap::new() };
        let mut members = Members::new(Slice::whole(path)?.open()?);
        while let Some(member) = members.next()? {
            pass()?;
            if contents.files.len() + contents.links.len() > MAX_FILES {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it holds more than 100000 files"));
            }
            let name = resolve_name("", &String::from_utf8_lossy(&member.path));
            match member.kind {
                Kind::File if member.extents.is_none() => {
                    contents.files.insert(name, (member.data_offset, member.size));
                }
                Kind::Symlink { target } => {
                    let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder);
                    let target = resolve_name(folder, &String::from_utf8_lossy(&target));
                    contents.links.insert(name, target);
                }
                Kind::HardLink { target } => {
                    let target = resolve_name("", &String::from_utf8_lossy(&target));
                    contents.links.insert(name, target);
                }
                _ => {}
            }
        }
        Ok(contents)
    }
}

/// A name inside the archive, relative to `folder`, without `.` and `..`. Names are keys here, never paths.
fn resolve_name(folder: &str, name: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in name.split('/').filter(|part| !matches!(*part, "" | ".")) {
        if part == ".." {
            parts.pop();
        } else {
            parts.push(part);
        }
    }
    parts.join("/")
}
