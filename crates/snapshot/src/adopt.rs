//! Captures that come from other nodes, and go to them.
//!
//! A capture that is taken over is one like any other: a directory of links, swept when no row names it.

use std::collections::BTreeSet;
use std::io;
use std::path::{Component, Path, PathBuf};

use aenv_block_client::{DeviceConfig, Lower};
use aenv_model::CaptureId;

use crate::capture::{Capture, DISK, INITRAMFS, KERNEL, MANIFEST, STATE, read};
use crate::error::CaptureError;
use crate::files::share;
use crate::manifest::Manifest;
use crate::store::CaptureStore;

/// A file that a capture is made of.
#[derive(Debug, Clone)]
pub struct CaptureFile {
    /// Its name: no slash in it, and no dot in front.
    pub name: String,
    /// Its bytes.
    pub content: CaptureContent,
    /// What it is.
    pub kind: CaptureFileKind,
}

/// What a file of a capture is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CaptureFileKind {
    /// No other capture has the same.
    Own,
    /// Others are likely to have the same.
    Common,
    /// So are they, and it is an overlaybd layer.
    Layer,
}

/// Bytes of a file.
#[derive(Debug, Clone)]
pub enum CaptureContent {
    /// In a file that does not change, and stays as long as the capture's handle.
    File(PathBuf),
    /// A few.
    Text(String),
}

impl Capture {
    /// All that another node needs to go on from it. Layers that lie in a registry stay there.
    ///
    /// Errors: [`CaptureError::Unusable`] if something lies on this host and not in the capture.
    pub async fn files(&self) -> Result<Vec<CaptureFile>, CaptureError> {
        let capture = self.clone();
        let listed = tokio::task::spawn_blocking(move || capture.files_blocking()).await;
        listed.map_err(|error| CaptureError::backing("read a capture", io::Error::other(error)))?
    }

    fn files_blocking(&self) -> Result<Vec<CaptureFile>, CaptureError> {
        let unusable = |problem: String| CaptureError::Unusable { id: self.id(), problem };
        let text =
            std::fs::read_to_string(self.disk()).map_err(|error| CaptureError::io("read", &self.disk(), error))?;
        let mut disk = DeviceConfig::parse(&text).map_err(|error| unusable(error.to_string()))?;
        for lower in &mut disk.lowers {
            // Where it would be cached on this host.
            lower.dir = None;
            match (&lower.file, &lower.digest) {
                // The file is all that counts: it may come back compressed, of another length and digest.
                (Some(_), _) => {
                    let (file, uuid) = (lower.file.take(), lower.uuid);
                    *lower = Lower { file, uuid, ..Lower::default() };
                }
                (None, Some(_)) => {}
                (None, None) => return Err(unusable("a layer of its disk lies elsewhere on this host".to_owned())),
            }
        }
        let names = needed(self.manifest(), &disk).map_err(unusable)?;
        let files = names.into_iter().map(|name| {
            let content = match &*name {
                DISK => CaptureContent::Text(disk.to_json()),
                name => CaptureContent::File(self.file(name)),
            };
            CaptureFile { kind: kind(&name), name, content }
        });
        Ok(files.collect())
    }
}

fn kind(name: &str) -> CaptureFileKind {
    match name {
        MANIFEST | DISK | STATE => CaptureFileKind::Own,
        KERNEL | INITRAMFS => CaptureFileKind::Common,
        _ => CaptureFileKind::Layer,
    }
}

/// Names of all files of a capture.
fn needed(manifest: &Manifest, disk: &DeviceConfig) -> Result<BTreeSet<String>, String> {
    let mut names = BTreeSet::from([MANIFEST.to_owned(), DISK.to_owned()]);
    if let Some(machine) = &manifest.machine {
        names.extend([STATE, KERNEL, INITRAMFS].map(str::to_owned));
        names.extend(machine.memory_layers.iter().map(|layer| layer.file.clone()));
    }
    for file in disk.lowers.iter().filter_map(|lower| lower.file.as_ref()) {
        let name = file.to_str().ok_or("the name of a layer is no text")?;
        names.insert(name.to_owned());
    }
    match names.iter().find(|name| !is_plain(name)) {
        Some(name) => Err(format!("{name:?} is no name of a file of its own")),
        None => Ok(names),
    }
}

/// Leads nowhere else.
fn is_plain(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!(components.next(), Some(Component::Normal(_))) && components.next().is_none() && !name.contains('/')
}

impl CaptureStore {
    /// Takes over a capture of which all files are on this host, each under the name it has there. They are linked, or copied
    /// from another file system. It gets an id of its own: who takes it over twice has two.
    ///
    /// Errors: [`CaptureError::Unusable`] if something is missing or is not what this program knows.
    /// Cancel safety: if dropped, it is there, for the next sweep, or nothing is.
    pub async fn adopt(&self, files: Vec<(String, PathBuf)>) -> Result<Capture, CaptureError> {
        let store = self.clone();
        let adopted = tokio::task::spawn_blocking(move || store.adopt_blocking(&files)).await;
        let capture =
            adopted.map_err(|error| CaptureError::backing("take over a capture", io::Error::other(error)))??;
        self.settle_later(&capture);
        Ok(capture)
    }

    fn adopt_blocking(&self, files: &[(String, PathBuf)]) -> Result<Capture, CaptureError> {
        let id = CaptureId::new();
        let (staging, place) = self.places(id);
        std::fs::create_dir(&staging).map_err(|error| CaptureError::io("make", &staging, error))?;
        let adopted = fill(id, &staging, files).and_then(|manifest| {
            std::fs::rename(&staging, &place).map_err(|error| CaptureError::io("name", &place, error))?;
            Ok(self.register(manifest))
        });
        if adopted.is_err() {
            // What stays is swept at the next start.
            _ = aenv_durable::remove_dir_if_present(&staging);
        }
        adopted
    }
}

/// Puts the files into a directory, and looks whether they are a capture.
fn fill(id: CaptureId, dir: &Path, files: &[(String, PathBuf)]) -> Result<Manifest, CaptureError> {
    let unusable = |problem: String| CaptureError::Unusable { id, problem };
    let mut there = BTreeSet::new();
    for (name, path) in files {
        if !is_plain(name) {
            return Err(unusable(format!("{name:?} is no name of a file of its own")));
        }
        share(path, &dir.join(name)).map_err(|error| CaptureError::io("share", path, error))?;
        there.insert(name.clone());
    }
    let mut manifest = read(dir, id).map_err(|error| match error {
        CaptureError::Gone { .. } => unusable(format!("it has no {MANIFEST}")),
        error => error,
    })?;
    manifest.id = id;
    let text = std::fs::read_to_string(dir.join(DISK)).map_err(|error| unusable(format!("{DISK}: {error}")))?;
    let disk = DeviceConfig::parse(&text).map_err(|error| unusable(error.to_string()))?;
    if disk.upper.is_some() || disk.lowers.iter().any(|lower| lower.dir.is_some()) {
        return Err(unusable("its disk is not made of its own files and registries' alone".to_owned()));
    }
    if let Some(missing) = needed(&manifest, &disk).map_err(unusable)?.difference(&there).next() {
        return Err(unusable(format!("it has no {missing}")));
    }
    // In the place of a link to the other's.
    let written = serde_json::to_vec_pretty(&manifest).map_err(io::Error::other);
    let written = written.and_then(|text| aenv_durable::atomic_write(&dir.join(MANIFEST), &text, 0o600));
    written.map_err(|error| CaptureError::io("write", &dir.join(MANIFEST), error))?;
    Ok(manifest)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use aenv_model::{Bytes, MachineShape};
    use aenv_vmm_driver::{VmmIdentity, VmmKind};
    use jiff::Timestamp;
    use uuid::Uuid;

    use super::*;
    use crate::manifest::{MachineManifest, MemoryFile};
    use crate::test_support::FakeBacking;

    /// A capture's files as they come from elsewhere.
    fn files(dir: &Path) -> Vec<(String, PathBuf)> {
        let manifest = Manifest {
            version: 1,
            id: CaptureId::new(),
            captured_at: Timestamp::now(),
            shape: MachineShape { vcpus: 1, memory: Bytes::mib(128) },
            disk_size: Bytes::gib(1),
            image_layers: 1,
            machine: Some(MachineManifest {
                vmm: VmmIdentity { kind: VmmKind::QemuTcg, version: "1".into() },
                cmdline: String::new(),
                memory_layers: vec![MemoryFile { file: "memory-000.commit".into(), uuid: Uuid::now_v7() }],
            }),
        };
        let disk = r#"{"repoBlobUrl": "https://r/v2/x/blobs", "lowers": [{"digest": "sha256:00", "size": 1},
                       {"file": "disk-001.commit", "digest": "sha256:11", "size": 4}]}"#;
        let text = serde_json::to_string(&manifest).unwrap();
        let files = [
            (MANIFEST, &*text),
            (DISK, disk),
            (STATE, "state"),
            (KERNEL, "kernel"),
            (INITRAMFS, "initramfs"),
            ("memory-000.commit", "memory"),
            ("disk-001.commit", "disk"),
        ];
        let write = |(name, text): &(&str, &str)| {
            let path = dir.join(format!("{name}.there"));
            std::fs::write(&path, text).unwrap();
            ((*name).to_owned(), path)
        };
        files.iter().map(write).collect()
    }

    #[tokio::test]
    async fn a_capture_from_elsewhere_is_one_like_any_other() {
        let dir = tempfile::tempdir().unwrap();
        let store = CaptureStore::open(&dir.path().join("captures"), Arc::new(FakeBacking::new(dir.path()))).unwrap();
        let given = files(dir.path());
        let one = store.adopt(given.clone()).await.unwrap();
        let two = store.adopt(given.clone()).await.unwrap();
        assert_ne!(one.id(), two.id());
        assert_eq!(std::fs::read(one.state().unwrap()).unwrap(), b"state");
        one.memory().await.unwrap();
        // It can be given on, as it came.
        let names: BTreeSet<_> = one.files().await.unwrap().into_iter().map(|file| (file.name, file.kind)).collect();
        let expected = given.iter().map(|(name, _)| (name.clone(), kind(name)));
        assert_eq!(names, expected.collect());
        let disk = one.files().await.unwrap().into_iter().find(|file| file.name == DISK).unwrap();
        let CaptureContent::Text(disk) = disk.content else { panic!("a text") };
        let lowers = DeviceConfig::parse(&disk).unwrap().lowers;
        assert_eq!((lowers[0].size, lowers[1].size, &lowers[1].digest), (Some(1), None, &None));
        one.doom();
        drop(one);
        store.settle().await;
        assert_eq!(std::fs::read_dir(dir.path().join("captures")).unwrap().count(), 1);
        assert_eq!(store.find(two.id()).await.unwrap().manifest(), two.manifest());
    }

    #[tokio::test]
    async fn what_is_no_whole_capture_is_refused_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = CaptureStore::open(&dir.path().join("captures"), Arc::new(FakeBacking::new(dir.path()))).unwrap();
        let given = files(dir.path());
        for missing in 0..given.len() {
            let mut given = given.clone();
            let (name, _) = given.remove(missing);
            let error = store.adopt(given).await.unwrap_err();
            assert!(matches!(&error, CaptureError::Unusable { problem, .. } if problem.contains(&name)), "{error}");
        }
        for (name, content) in [
            ("../out", "x"),
            ("a/b", "x"),
            (DISK, r#"{"lowers": [{"file": "/etc/passwd"}]}"#),
            (DISK, r#"{"lowers": [{"dir": "/etc", "digest": "sha256:00", "repoBlobUrl": "https://r/v2/x/blobs"}]}"#),
            (MANIFEST, r#"{"version": 9}"#),
        ] {
            let mut given: Vec<_> = given.iter().filter(|(given, _)| given != name).cloned().collect();
            let path = dir.path().join("wrong");
            std::fs::write(&path, content).unwrap();
            given.push((name.to_owned(), path));
            assert!(matches!(store.adopt(given).await, Err(CaptureError::Unusable { .. })), "{name}");
        }
        assert_eq!(std::fs::read_dir(dir.path().join("captures")).unwrap().count(), 0);
    }
}
