//! Images made by hand, and a look into the file systems made of them.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]

mod daemon;
mod layer;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use aenv_block_client::{BlockdClient, DeviceConfig};
use aenv_block_overlaybd::{LocalFile, Stack, export};
use aenv_image::{CacheConfig, ImageCache, ImportError, Imported, Importer, ImporterConfig, LeaseKind, Progress};
use aenv_model::Bytes;
use tokio_util::sync::CancellationToken;

#[allow(unused_imports, reason = "each test program uses its part")]
pub use self::daemon::{Blockd, able, be_a_daemon};
pub use self::layer::{Tar, gzip, sha256};

/// Who imports for in these tests.
pub const OWNER: &str = "build";

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
    pub config: ImporterConfig,
    pub cache: ImageCache,
    /// Ends before its directory.
    pub daemon: Option<Blockd>,
    pub dir: tempfile::TempDir,
}

impl Bench {
    /// One without a daemon, which is enough to look at images.
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = ImporterConfig {
            docker_config: Some(dir.path().join("no-docker-config")),
            virtual_size: Bytes::gib(1),
            patience: std::time::Duration::from_secs(5),
            ..ImporterConfig::default()
        };
        let cache = ImageCache::open(&dir.path().join("cache"), "test", CacheConfig::default()).unwrap();
        Self { config, cache, daemon: None, dir }
    }

    /// One to import with; `None`, said aloud, where that is not possible.
    pub async fn start() -> Option<Self> {
        if !able() {
            return None;
        }
        let mut bench = Self::new();
        bench.daemon = Some(Blockd::start(&bench.dir.path().join("daemon"), "the_daemon_of_a_test").await);
        Some(bench)
    }

    pub fn client(&self) -> BlockdClient {
        match &self.daemon {
            Some(daemon) => daemon.client.clone(),
            None => BlockdClient::new(self.dir.path().join("no-daemon")),
        }
    }

    pub fn importer(&self) -> Importer {
        Importer::new(self.config.clone(), self.cache.clone(), self.client())
    }

    pub fn target(&self) -> PathBuf {
        self.dir.path().join("image.json")
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
        let reference = reference.parse().unwrap();
        self.importer().import(&reference, None, &self.target(), OWNER, progress, cancel).await
    }

    /// What the target says a device is made of.
    pub fn device(&self) -> DeviceConfig {
        DeviceConfig::load(&self.target()).unwrap()
    }

    /// Digests of the target's layers, lowest first.
    pub fn digests(&self) -> Vec<String> {
        self.device().lowers.into_iter().map(|lower| lower.digest.unwrap()).collect()
    }

    /// The layers of the target, as a device has them.
    pub fn stack(&self) -> Stack {
        let open = |lower: &aenv_block_client::Lower| {
            let path = lower.file.as_deref().expect("a file");
            Arc::new(LocalFile::open(path).unwrap()) as Arc<dyn aenv_block_overlaybd::Source>
        };
        Stack::open(self.device().lowers.iter().map(open)).unwrap()
    }

    /// The file system that the target's layers make.
    pub fn ext4(&self) -> Ext4 {
        let path = self.dir.path().join("exported.ext4");
        drop(std::fs::File::create(&path).unwrap());
        export(&self.stack(), &LocalFile::open_writable(&path).unwrap(), &mut |_| true).unwrap();
        Ext4(path)
    }

    /// Forgets what was imported.
    pub fn forget(&self) {
        let _ = std::fs::remove_file(self.target());
        self.cache.release_blocking(LeaseKind::Template, OWNER).unwrap();
    }

    /// What imports have left besides layers: work, locks, leases of operations, devices.
    pub async fn leftovers(&self) -> Vec<String> {
        let mut found = Vec::new();
        for dir in ["staging", "locks", "leases/operation"] {
            let entries = std::fs::read_dir(self.cache.root().join(dir)).unwrap();
            found.extend(entries.map(|entry| entry.unwrap().path().display().to_string()));
        }
        if let Some(daemon) = &self.daemon {
            found.extend(daemon.client.list().await.unwrap().into_iter().map(|device| device.name));
        }
        found
    }

    /// Nothing is left at last: what is cancelled cleans up by itself.
    pub async fn assert_nothing_left(&self) {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        loop {
            let found = self.leftovers().await;
            if found.is_empty() {
                return;
            }
            assert!(std::time::Instant::now() < deadline, "{found:?}");
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }

    /// Whether the import's owner has a lease.
    pub fn is_leased(&self) -> bool {
        self.cache.root().join("leases/template").join(format!("{OWNER}.json")).exists()
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
