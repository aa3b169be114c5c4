//! An importer that needs no registry, and machines that are a text: what was done on them.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aenv_image::{Credentials, ImageConfig, ImageReference, ImportError, Progress};
use aenv_model::{Bytes, CaptureId, Command, CommandExit, MachineShape, Output};
use aenv_snapshot::{Capture, CaptureStore};
use aenv_template::{Bench, BuildRequest, ImageRequest, ImportImage, ImportedImage, ReadyTemplate, Workshop};
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
        Ok(ImportedImage { digest: format!("sha256:of-{name}"), config: ImageConfig::default(), size: Bytes::gib(1) })
    }

    fn release(&self, owner: &str) {
        self.kept.lock().unwrap().remove(owner);
    }

    fn release_all_but(&self, owners: BTreeSet<String>) {
        self.kept.lock().unwrap().retain(|owner| owners.contains(owner));
    }
}

pub fn image(image: &str) -> ImageRequest {
    ImageRequest { image: image.to_owned(), reference: image.parse().unwrap(), credentials: None }
}

pub fn request(name: &str) -> BuildRequest {
    BuildRequest::of_image(image(name))
}

/// Machines whose disks are texts: what they began with, and the commands since.
#[derive(Debug, Clone)]
pub struct FakeWorkshop {
    captures: CaptureStore,
    dir: PathBuf,
    /// Those that were not closed.
    pub open: Arc<AtomicUsize>,
    /// Everything that was run, as `user@directory: command`.
    pub ran: Arc<Mutex<Vec<String>>>,
    /// Files that were put there.
    pub put: Arc<Mutex<Vec<String>>>,
}

#[derive(Debug)]
struct FakeBench {
    shop: FakeWorkshop,
    disk: Mutex<String>,
}

impl FakeWorkshop {
    pub fn new(captures: CaptureStore, dir: &Path) -> Self {
        let (open, ran, put) = (Arc::default(), Arc::default(), Arc::default());
        Self { captures, dir: dir.to_owned(), open, ran, put }
    }

    /// A disk with that text.
    pub async fn capture(&self, text: &str) -> Capture {
        let manifest = serde_json::json!({
            "version": 1, "id": CaptureId::new(), "captured_at": jiff::Timestamp::now(), "shape": SHAPE,
            "disk_size": 1 << 30, "image_layers": 1, "machine": null,
        });
        let disk = r#"{"lowers": [{"file": "disk-000.commit"}]}"#;
        let files = [("capture.json", &*manifest.to_string()), ("disk.json", disk), ("disk-000.commit", text)];
        let write = |(name, text): (&str, &str)| {
            let path = self.dir.join(format!("{name}-{}", CaptureId::new()));
            std::fs::write(&path, text).unwrap();
            (name.to_owned(), path)
        };
        self.captures.adopt(files.into_iter().map(write).collect()).await.unwrap()
    }

    /// What was run since the last look.
    pub fn ran(&self) -> Vec<String> {
        std::mem::take(&mut *self.ran.lock().unwrap())
    }
}

/// The text on a capture's disk.
pub fn text_of(capture: &Capture) -> String {
    std::fs::read_to_string(capture.dir().join("disk-000.commit")).unwrap()
}

#[async_trait]
impl Workshop for FakeWorkshop {
    async fn open(&self, template: &ReadyTemplate) -> Result<Box<dyn Bench>, String> {
        let disk = match (&template.capture, &template.image) {
            (Some(capture), _) => text_of(capture),
            (None, Some(image)) => {
                std::fs::read_to_string(&image.rootfs).unwrap().trim_end_matches(":latest").to_owned()
            }
            (None, None) => return Err("nothing to start from".to_owned()),
        };
        self.open.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(FakeBench { shop: self.clone(), disk: Mutex::new(disk) }))
    }
}

#[async_trait]
impl Bench for FakeBench {
    /// A login shell's command is noted and written to the disk; one that has `fail` in it fails, `hang` does not end.
    async fn run(&self, command: &Command, output: &(dyn Fn(Output) + Send + Sync)) -> Result<CommandExit, String> {
        let line = command.arguments.last().unwrap();
        let exit = |success, status: &str| Ok(CommandExit { success, status: status.to_owned() });
        if command.arguments[0] != "-l" {
            let arguments = command.arguments[3..].join(" ");
            self.shop.ran.lock().unwrap().push(format!("script {arguments}").trim_end().to_owned());
            return exit(true, "exit status 0");
        }
        if line == "true" {
            return exit(true, "exit status 0");
        }
        if command.user == "nobody-here" {
            return Err("unauthenticated: invalid username: 'nobody-here'".to_owned());
        }
        let env: Vec<_> = command.env.iter().map(|(name, value)| format!("{name}={value} ")).collect();
        let directory = command.directory.as_deref().unwrap_or("~");
        let done = format!("{}@{directory}: {}{line}", command.user, env.concat());
        self.shop.ran.lock().unwrap().push(done);
        output(Output::Stdout(format!("out of {line}\n").into_bytes()));
        match line {
            line if line.contains("hang") => std::future::pending().await,
            line if line.contains("fail") => exit(false, "exit status 7"),
            line => {
                self.disk.lock().unwrap().push_str(&format!(" + {line}"));
                exit(true, "exit status 0")
            }
        }
    }

    async fn put(&self, path: &str, file: &Path) -> Result<(), String> {
        assert!(file.is_file());
        self.shop.put.lock().unwrap().push(path.to_owned());
        Ok(())
    }

    async fn capture(&self, _memory: bool) -> Result<Capture, String> {
        let text = self.disk.lock().unwrap().clone();
        Ok(self.shop.capture(&text).await)
    }

    async fn close(self: Box<Self>) {
        self.shop.open.fetch_sub(1, Ordering::SeqCst);
    }
}
