//! Publishing: layers and artifacts, then the name, then the record.

use std::collections::BTreeMap;
use std::path::PathBuf;

use aenv_durable::crash_point;
use aenv_model::{BuildId, CaptureId, SandboxId, TemplateId};
use aenv_objects::{Condition, Key, ObjectErrorKind};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use tempfile::TempPath;
use tracing::{info, warn};

use crate::digest::Digest;
use crate::error::RepositoryError;
use crate::layout;
use crate::lease::{Lease, Needs};
use crate::pack::{Packed, compress, pack};
use crate::record::{BuildStatus, Committed, Context, Record, Resources, Source, StoredFile};
use crate::repository::{ATTEMPTS, Repository, Written};

/// What is to be published.
#[derive(Debug, Clone)]
pub struct Publication {
    /// Machine of sandboxes from it.
    pub resources: Resources,
    /// What processes get that name nothing else.
    pub context: Context,
    /// Which capture it is.
    pub capture: CaptureId,
    /// What it is made of. Files must not change meanwhile.
    pub files: Vec<NewFile>,
}

/// A file to be published.
#[derive(Debug, Clone)]
pub struct NewFile {
    /// Its name: no slash in it, and no dot in front.
    pub name: String,
    /// Its bytes.
    pub content: Content,
    /// What is to be done with it.
    pub kind: FileKind,
}

/// What is to be done with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// No other record has the same.
    Own,
    /// Others may have the same: it is kept once, by its digest.
    Common,
    /// So may they, and it is a layer, which may be compressed.
    Layer,
}

/// Bytes as they are to be written.
#[derive(Debug)]
enum Upload {
    Bytes(Bytes),
    File(PathBuf),
    /// A layer to be compressed, or what it was compressed to.
    Packed(PathBuf, Option<TempPath>),
}

/// Bytes of a file.
#[derive(Debug, Clone)]
pub enum Content {
    /// A file of this host.
    File(PathBuf),
    /// A few.
    Bytes(Bytes),
}

/// What makes it visible.
enum Commit {
    /// A record that was not there.
    New(Box<Record>),
    /// A change of one that was.
    Build { template: TemplateId, build: BuildId },
}

impl Commit {
    fn id(&self) -> TemplateId {
        match self {
            Self::New(record) => record.id,
            Self::Build { template, .. } => *template,
        }
    }

    /// The name that is to be claimed.
    fn alias(&self) -> Option<&str> {
        match self {
            Self::New(record) => record.alias.as_deref(),
            Self::Build { .. } => None,
        }
    }
}

/// A publication that has not come to be.
struct Failure {
    error: RepositoryError,
    /// The record may have been written, or may yet be.
    uncertain: bool,
}

impl From<RepositoryError> for Failure {
    fn from(error: RepositoryError) -> Self {
        Self { error, uncertain: false }
    }
}

impl Repository {
    /// Publishes a snapshot of `sandbox` under a fresh id. On return, every node finds it.
    ///
    /// Hashes and uploads what the store does not have: takes as long as that takes. Errors: after one, nothing of it is to
    /// be seen, unless the store said too little: then it may be there after all.
    /// Cancel safety: if dropped, garbage is left for the sweep, and a name may stay claimed for
    /// [`Options::claim`](crate::Options::claim).
    pub async fn publish_snapshot(
        &self,
        id: TemplateId,
        alias: Option<String>,
        sandbox: SandboxId,
        publication: Publication,
    ) -> Result<Record, RepositoryError> {
        let now = self.now();
        let (resources, source) = (publication.resources, Source::Sandbox { source_sandbox_id: sandbox });
        let record = Record { id, alias, source, resources, created_at: now, updated_at: now, committed: None };
        self.publish(publication, Commit::New(Box::new(record))).await
    }

    /// Publishes what the `build` of a template made: sandboxes start from it from now on. On return, on every node.
    ///
    /// As [`publish_snapshot`](Self::publish_snapshot). Errors: [`Deleted`](RepositoryError::Deleted) if the template was
    /// deleted since the build was [announced](Self::announce).
    pub async fn publish_build(
        &self,
        template: TemplateId,
        build: BuildId,
        publication: Publication,
    ) -> Result<Record, RepositoryError> {
        self.publish(publication, Commit::Build { template, build }).await
    }

    async fn publish(&self, publication: Publication, commit: Commit) -> Result<Record, RepositoryError> {
        let begun = std::time::Instant::now();
        let (id, alias, capture) = (commit.id(), commit.alias().map(str::to_owned), publication.capture);
        let (files, uploads): (Vec<_>, Vec<_>) = self.hash(&publication.files).await?.into_iter().unzip();
        let needs = Needs {
            aliases: alias.clone().into_iter().collect(),
            layers: files.iter().filter(|file| file.managed).map(|file| file.digest.clone()).collect(),
            artifacts: [(id, capture)].into(),
        };
        let lease = self.lease(needs).await?;
        crash_point("publish.leased");
        let context = publication.context.clone();
        let work = async {
            let sent = self.upload(id, capture, &files, uploads).await?;
            crash_point("publish.sent");
            self.check(&lease, "the publication")?;
            let build = match &commit {
                Commit::New(_) => None,
                Commit::Build { build, .. } => Some(*build),
            };
            let committed = Committed { context, build, capture, files };
            let record = match commit {
                Commit::New(record) => self.commit_new(*record, committed).await,
                Commit::Build { template, build } => {
                    self.commit_build(template, build, publication.resources, committed).await
                }
            };
            record.map(|record| (record, sent))
        };
        match self.under(&lease, work).await {
            Ok((record, sent)) => {
                crash_point("publish.committed");
                self.release(lease).await;
                info!(template_id = %id, %capture, sent, seconds = begun.elapsed().as_secs_f64(), "published");
                Ok(record)
            }
            Err(Failure { error, uncertain: true }) => {
                // The lease stays until it ends: by then the write that was lost has arrived, or never will.
                warn!(template_id = %id, %capture, "it is not known whether a publication came to be");
                Err(error)
            }
            Err(Failure { error, .. }) => {
                self.undo(id, alias.as_deref(), capture, lease).await;
                Err(error)
            }
        }
    }

    async fn commit_new(&self, mut record: Record, committed: Committed) -> Result<Record, Failure> {
        let before = match &record.alias {
            Some(alias) => Some(self.bind(alias, record.id).await?),
            None => None,
        };
        record.committed = Some(committed);
        crash_point("publish.named");
        let written = self.write_in_time(&record, before).await;
        written.map_err(|error| Failure { uncertain: matches!(error, RepositoryError::Store(_)), error })?;
        Ok(record)
    }

    async fn commit_build(
        &self,
        template: TemplateId,
        build: BuildId,
        resources: Resources,
        committed: Committed,
    ) -> Result<Record, Failure> {
        for _ in 0..ATTEMPTS {
            let (mut record, version) = match self.existing(template).await {
                Err(RepositoryError::NotFound(_)) => return Err(RepositoryError::Deleted(template).into()),
                found => found?,
            };
            record.resources = resources;
            record.updated_at = self.now();
            let replaced = record.committed.replace(committed.clone());
            if let Source::Template { build: newest } = &mut record.source
                && newest.id == build
            {
                newest.status = BuildStatus::Ready;
                newest.finished_at = Some(record.updated_at);
            }
            let written = self.write(&record, Condition::Is(version)).await;
            match written.map_err(|error| Failure { error, uncertain: true })? {
                Written::Conflict => {}
                Written::Done => {
                    if let Some(old) = replaced.filter(|old| old.capture != committed.capture) {
                        self.remove_artifacts_or_say(template, old.capture).await;
                    }
                    return Ok(record);
                }
            }
        }
        Err(RepositoryError::Contended { what: template.to_string() }.into())
    }

    /// Removes what a failed publication has made, but for layers, which others may have come to use.
    async fn undo(&self, id: TemplateId, alias: Option<&str>, capture: CaptureId, lease: Lease) {
        if let Some(alias) = alias
            && let Err(error) = self.unbind(alias, id).await
        {
            warn!(alias, %error, "a name stays claimed for a while");
        }
        self.remove_artifacts_or_say(id, capture).await;
        self.release(lease).await;
    }

    async fn remove_artifacts_or_say(&self, id: TemplateId, capture: CaptureId) {
        if let Err(error) = self.remove_artifacts(id, capture).await {
            warn!(template_id = %id, %capture, %error, "artifacts that nobody needs are left for the sweep");
        }
    }

    /// Removes a record's own files.
    pub(crate) async fn remove_artifacts(&self, id: TemplateId, capture: CaptureId) -> Result<(), RepositoryError> {
        for info in self.store().list(Some(&layout::artifacts(id, capture)?)).await? {
            self.store().delete(&info.key).await?;
        }
        Ok(())
    }

    /// Digests of all files, which become names of objects.
    async fn hash(&self, files: &[NewFile]) -> Result<Vec<(StoredFile, Upload)>, RepositoryError> {
        let mut names = BTreeMap::new();
        for file in files {
            layout::component(&file.name)?;
            if names.insert(&file.name, ()).is_some() {
                let problem = "there are two of it".to_owned();
                return Err(RepositoryError::Corrupt { what: format!("file {}", file.name), problem });
            }
        }
        let hashed = files.iter().cloned().map(|file| {
            let repository = self.clone();
            async move { repository.prepare(file).await }
        });
        stream::iter(hashed).buffered(self.options().writes_at_once.max(1)).try_collect().await
    }

    async fn prepare(&self, file: NewFile) -> Result<(StoredFile, Upload), RepositoryError> {
        let NewFile { name, content, kind } = file;
        let stored = |digest, size| StoredFile { name, digest, size, managed: kind != FileKind::Own };
        let path = match content {
            Content::Bytes(bytes) => {
                return Ok((stored(Digest::of(&bytes), bytes.len() as u64), Upload::Bytes(bytes)));
            }
            Content::File(path) => path,
        };
        let packing = self.options().packing.clone().filter(|_| kind == FileKind::Layer);
        let (repository, of) = (self.clone(), path.clone());
        let work = move || match packing {
            None => {
                let (digest, size) = repository.inner.digests.of_file(&of)?;
                Ok(Packed { digest, size, file: None, compressed: false })
            }
            Some(packing) => pack(&repository.inner.digests, &of, &packing),
        };
        let packed = tokio::task::spawn_blocking(work).await.map_err(std::io::Error::other).flatten();
        let packed = packed.map_err(RepositoryError::file("read", &path))?;
        let upload = if packed.compressed { Upload::Packed(path, packed.file) } else { Upload::File(path) };
        Ok((stored(packed.digest, packed.size), upload))
    }

    /// Writes what is not there. Gives how many bytes that was.
    async fn upload(
        &self,
        id: TemplateId,
        capture: CaptureId,
        files: &[StoredFile],
        uploads: Vec<Upload>,
    ) -> Result<u64, RepositoryError> {
        // Equal layers of one capture are one.
        let mut wanted = BTreeMap::new();
        for (file, upload) in files.iter().zip(uploads) {
            wanted.insert(layout::file(id, capture, file)?, (file.clone(), upload));
        }
        let sent = wanted.into_iter().map(|(key, (file, upload))| {
            let repository = self.clone();
            async move { repository.send(&key, &file, upload).await }
        });
        let sent = stream::iter(sent).buffer_unordered(self.options().writes_at_once.max(1));
        sent.try_fold(0, async |sum, sent| Ok(sum + sent)).await
    }

    async fn send(&self, key: &Key, file: &StoredFile, upload: Upload) -> Result<u64, RepositoryError> {
        if file.managed {
            match self.store().head(key).await {
                Ok(info) if info.size == file.size => return Ok(0),
                Ok(_) => {} // cut by somebody; the right bytes harm nobody
                Err(error) if error.kind() == ObjectErrorKind::NotFound => {}
                Err(error) => return Err(error.into()),
            }
        }
        match upload {
            Upload::Bytes(bytes) => drop(self.store().put(key, bytes, Condition::None).await?),
            Upload::File(path) => self.store().put_file(key, &path).await?,
            Upload::Packed(_, Some(packed)) => self.store().put_file(key, &packed).await?,
            // Another publication of it has known that it is there; it is not any more.
            Upload::Packed(path, None) => {
                let packed = self.pack_again(path, &file.digest).await?;
                self.store().put_file(key, &packed).await?;
            }
        }
        Ok(file.size)
    }

    async fn pack_again(&self, path: PathBuf, expected: &Digest) -> Result<TempPath, RepositoryError> {
        let (repository, expected, of) = (self.clone(), expected.clone(), path.clone());
        let work = move || {
            let packing = repository.options().packing.as_ref();
            let packed = packing.map(|packing| compress(&of, packing)).transpose()?.flatten();
            let packed = packed.ok_or_else(|| std::io::Error::other("it was a layer before"))?;
            match repository.inner.digests.of_file(&packed)? {
                (digest, _) if digest == expected => Ok(packed),
                (other, _) => Err(std::io::Error::other(format!("it was compressed to {other}, before to {expected}"))),
            }
        };
        let packed = tokio::task::spawn_blocking(work).await.map_err(std::io::Error::other).flatten();
        packed.map_err(RepositoryError::file("compress", path))
    }
}
