//! An importer that needs no registry.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aenv_image::{Credentials, ImageConfig, ImageReference, ImportError, Progress};
use aenv_model::{Bytes, MachineShape};
use aenv_template::{BuildRequest, ImportImage, ImportedImage};
use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

/// Far beyond what any of these tests takes: reached only by a hang.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub const SHAPE: MachineShape = MachineShape { vcpus: 1, memory: Bytes::mib(256) };

/// Writes a file per import; fails for images called `bad`, and waits for its cancellation for those called `slow`.
#[derive(Debug, Default)]
pub struct FakeImporter {
    pub cancelled: AtomicBool,
    pub kept: Mutex<BTreeSet<String>>,
}

#[async_trait]
impl ImportImage for FakeImporter {
    async fn import(
        &self,
        reference: &ImageReference,
        _credentials: Option<Credentials>,
        target: &Path,
        owner: &str,
        progress: &(dyn Fn(Progress) + Send + Sync),
        cancel: CancellationToken,
    ) -> Result<ImportedImage, ImportError> {
        progress(Progress::Resolving);
        let name = reference.to_string();
        if name.contains("slow") {
            cancel.cancelled().await;
            self.cancelled.store(true, Ordering::SeqCst);
            return Err(ImportError::Cancelled);
        }
        if name.contains("bad") {
            return Err(ImportError::NotRoot);
        }
        std::fs::write(target, &name).unwrap();
        self.kept.lock().unwrap().insert(owner.to_owned());
        Ok(ImportedImage { digest: "sha256:00".into(), config: ImageConfig::default(), size: Bytes::gib(1) })
    }

    fn release(&self, owner: &str) {
        self.kept.lock().unwrap().remove(owner);
    }

    fn release_all_but(&self, owners: BTreeSet<String>) {
        self.kept.lock().unwrap().retain(|owner| owners.contains(owner));
    }
}

pub fn request(image: &str) -> BuildRequest {
    BuildRequest { image: image.to_owned(), reference: image.parse().unwrap(), credentials: None }
}
