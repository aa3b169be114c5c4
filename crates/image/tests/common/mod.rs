//! Images made by hand, and a look into the file systems made of them.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]

mod layer;

use std::path::{Path, PathBuf};
use std::process::Command;

use aenv_image::{DiskSize, ImportError, Imported, Importer, ImporterConfig, Progress};
use aenv_model::Bytes;
use tokio_util::sync::CancellationToken;

pub use self::layer::{Tar, gzip, sha256};

/// Whether a test that needs root may run; says so if not.
pub fn root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: needs root, as importing does");
    }
    root
}

/// A whole image: uncompressed layers and what the configuration says beside them.
pub struct Image {
    pub layers: Vec<Vec<u8>>,
    pub architecture: String,
    pub config: serde_json::Value,
}

/// Go's name of this machine's architecture.
pub fn host_architecture() -> &'static str {
    if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" }
}

impl Image {
    pub fn of(layers: impl IntoIterator<Item = Vec<u8>>) -> Self {
        Self {
            layers: layers.into_iter().collect(),
            architecture: host_architecture().to_owned(),
            config: serde_json::json!({"Env": ["PATH=/bin"], "Cmd": ["/bin/hello"], "User": "me", "WorkingDir": "/srv"}),
        }
    }

    /// The configuration blob.
    pub fn file(&self) -> Vec<u8> {
        let diff_ids: Vec<_> = self.layers.iter().map(|layer| sha256(layer)).collect();
        serde_json::to_vec(&serde_json::json!({
            "architecture": self.architecture, "os": "linux", "config": self.config,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }))
        .unwrap()
    }

    /// The compressed layers and the manifest.
    pub fn parts(&self) -> (Vec<Vec<u8>>, Vec<u8>) {
        let blobs: Vec<Vec<u8>> = self.layers.iter().map(|layer| gzip(layer)).collect();
        let file = self.file();
        let layers: Vec<_> = blobs
            .iter()
            .map(|blob| {
                serde_json::json!({"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                    "digest": sha256(blob), "size": blob.len()})
            })
            .collect();
        let manifest = serde_json::to_vec(&serde_json::json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": sha256(&file), "size": file.len()},
            "layers": layers,
        }))
        .unwrap();
        (blobs, manifest)
    }

    /// Every file of an OCI layout, by its name in it.
    pub fn layout(&self, tag: &str) -> Vec<(String, Vec<u8>)> {
        let (blobs, manifest) = self.parts();
        let index = serde_json::json!({"schemaVersion": 2, "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": sha256(&manifest), "size": manifest.len(),
            "annotations": {"org.opencontainers.image.ref.name": tag}}]});
        let mut files = vec![
            ("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec()),
            ("index.json".to_owned(), serde_json::to_vec(&index).unwrap()),
        ];
        for blob in blobs.into_iter().chain([manifest, self.file()]) {
            files.push((format!("blobs/{}", sha256(&blob).replace(':', "/")), blob));
        }
        files
    }

    pub fn write_layout(&self, folder: &Path, tag: &str) {
        for (name, data) in self.layout(tag) {
            let path = folder.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, data).unwrap();
        }
    }
}

/// A temporary home for imports.
pub struct Bench {
    pub dir: tempfile::TempDir,
    pub config: ImporterConfig,
}

impl Bench {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = ImporterConfig::new(dir.path().join("work"));
        config.disk = DiskSize { minimum: Bytes::mib(8), slack: Bytes::mib(4) };
        config.docker_config = Some(dir.path().join("no-docker-config"));
        config.patience = std::time::Duration::from_secs(5);
        Self { dir, config }
    }

    pub fn target(&self) -> PathBuf {
        self.dir.path().join("rootfs.ext4")
    }

    pub async fn import(&self, reference: &str) -> Result<Imported, ImportError> {
        self.import_with(reference, &|_| {}, CancellationToken::new()).await
    }

    pub async fn import_with(
        &self,
        reference: &str,
        progress: &(dyn Fn(Progress) + Send + Sync),
        cancel: CancellationToken,
    ) -> Result<Imported, ImportError> {
        let importer = Importer::new(self.config.clone());
        importer.import(&reference.parse().unwrap(), None, &self.target(), progress, cancel).await
    }

    /// What imports have left besides their target.
    pub fn leftovers(&self) -> Vec<PathBuf> {
        std::fs::read_dir(&self.config.work_dir)
            .map(|entries| entries.map(|entry| entry.unwrap().path()).collect())
            .unwrap_or_default()
    }
}

/// A file system image, seen through `debugfs`.
pub struct Ext4(pub PathBuf);

impl Ext4 {
    pub fn ask(&self, request: &str) -> String {
        let output = Command::new("/usr/sbin/debugfs").args(["-R", request]).arg(&self.0).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    pub fn cat(&self, path: &str) -> Vec<u8> {
        Command::new("/usr/sbin/debugfs").args(["-R", &format!("cat {path}")]).arg(&self.0).output().unwrap().stdout
    }

    /// The value that follows `key` in the inode's listing.
    pub fn stat(&self, path: &str, key: &str) -> String {
        let text = self.ask(&format!("stat {path}"));
        let from = text.find(&format!("{key}:")).unwrap_or_else(|| panic!("no {key} in {text:?} of {path}"));
        text[from + key.len() + 1..].split_whitespace().next().unwrap_or_default().to_owned()
    }

    pub fn exists(&self, path: &str) -> bool {
        self.ask(&format!("stat {path}")).contains("Inode:")
    }

    /// Checks the file system's consistency.
    pub fn assert_clean(&self) {
        let output = Command::new("/usr/sbin/e2fsck").arg("-fn").arg(&self.0).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}
