//! Records: what a template or snapshot is, as JSON that every node reads.

use std::collections::BTreeMap;

use aenv_model::{BuildId, Bytes, CaptureId, MachineShape, SandboxId, TemplateId};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::digest::Digest;

/// Version of the format. Counted up when an older program could misread a newer record.
pub(crate) const VERSION: u32 = 1;

/// A template or snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Its id.
    pub id: TemplateId,
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// Where it comes from.
    pub source: Source,
    /// Machine of sandboxes from it.
    pub resources: Resources,
    /// When it was first written.
    #[serde(rename = "created_at_unix_ms", with = "millis")]
    pub created_at: Timestamp,
    /// When it was last written.
    #[serde(rename = "updated_at_unix_ms", with = "millis")]
    pub updated_at: Timestamp,
    /// What sandboxes start from; none before the first build of a template is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub committed: Option<Committed>,
}

/// Where a record comes from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Source {
    /// A build.
    Template {
        /// The newest one.
        build: Build,
    },
    /// A sandbox that ran.
    Sandbox {
        /// Which.
        source_sandbox_id: SandboxId,
    },
}

/// A build of a template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Build {
    /// Its id.
    pub id: BuildId,
    /// Where it stands.
    pub status: BuildStatus,
    /// Machine of sandboxes from it.
    pub resources: Resources,
    /// When it was asked for.
    #[serde(rename = "created_at_unix_ms", with = "millis")]
    pub created_at: Timestamp,
    /// When a node took it up.
    #[serde(rename = "started_at_unix_ms", default, with = "optional_millis")]
    pub started_at: Option<Timestamp>,
    /// When it ended.
    #[serde(rename = "finished_at_unix_ms", default, with = "optional_millis")]
    pub finished_at: Option<Timestamp>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_reason: Option<ErrorReason>,
}

/// Where a build stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum BuildStatus {
    /// Nobody has taken it up.
    Waiting,
    /// A node is at it.
    Building,
    /// It is what sandboxes start from.
    Ready,
    /// It failed.
    Error,
}

/// Why a build failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorReason {
    /// For the user.
    pub message: String,
    /// At which step.
    pub step: String,
}

/// A machine's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// vCPUs.
    pub cpu_count: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Virtual size of the disk in MiB; 0 before it is known.
    pub disk_size_mib: u64,
}

impl Resources {
    /// A machine of `shape` with a disk of `disk_size`.
    #[must_use]
    pub fn new(shape: MachineShape, disk_size: Bytes) -> Self {
        Self { cpu_count: shape.vcpus, memory_mib: shape.memory.to_mib_ceil(), disk_size_mib: disk_size.to_mib_ceil() }
    }

    /// vCPUs and memory.
    #[must_use]
    pub fn shape(&self) -> MachineShape {
        MachineShape { vcpus: self.cpu_count, memory: Bytes::mib(self.memory_mib) }
    }
}

/// What sandboxes start from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Committed {
    /// What processes get that name nothing else.
    pub context: Context,
    /// Which build made it, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build: Option<BuildId>,
    /// Which capture it is.
    pub capture: CaptureId,
    /// What it is made of.
    pub files: Vec<StoredFile>,
}

/// What processes get that name nothing else.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Context {
    /// `NAME=VALUE`, in order.
    pub env_vars: Vec<String>,
    /// Where they begin.
    pub workdir: Option<String>,
    /// Who they are.
    pub user: Option<String>,
    /// As the image says.
    pub exposed_ports: Vec<String>,
    /// As the image says.
    pub entrypoint: Vec<String>,
    /// As the image says.
    pub cmd: Vec<String>,
    /// As the image says.
    pub labels: BTreeMap<String, String>,
    /// What was done on top of the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipe: Option<Recipe>,
}

/// What templates that are built on this one inherit, beside the rest of the context.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Recipe {
    /// `NAME=VALUE`, for builds and for what is started in sandboxes; not for what users run.
    pub env_vars: Vec<String>,
    /// What runs in every sandbox from the start.
    pub start_cmd: Option<String>,
    /// What succeeds when that is up.
    pub ready_cmd: Option<String>,
}

/// A file of a capture, and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredFile {
    /// Its name in the capture's directory: no slash in it, and no dot in front.
    pub name: String,
    /// Its content.
    pub digest: Digest,
    /// Its length in bytes.
    pub size: u64,
    /// Among the layers that any record may refer to; else it is this record's own.
    pub managed: bool,
}

/// A record as it was found.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Found {
    Record(Box<Record>),
    /// It is being deleted: the decision has been taken.
    Deleted {
        id: TemplateId,
    },
    /// Of a newer version, or no record at all; the text says which.
    Unknown(String),
}

#[derive(Serialize, Deserialize)]
struct Envelope<R> {
    version: u32,
    /// Another with every write: no two writers write the same, nobody writes what was there before.
    revision: Uuid,
    #[serde(flatten)]
    record: R,
}

/// What is left of a record for as long as its artifacts are being removed.
#[derive(Serialize, Deserialize)]
struct Tombstone {
    id: TemplateId,
    #[serde(rename = "deleted_at_unix_ms", with = "millis")]
    deleted_at: Timestamp,
}

/// What tells how to read the rest.
#[derive(Deserialize)]
struct Head {
    version: u32,
    #[serde(default)]
    deleted_at_unix_ms: Option<i64>,
}

impl Record {
    pub(crate) fn encode(&self) -> bytes::Bytes {
        encode(self)
    }

    /// What takes the record's place when it is deleted.
    pub(crate) fn tombstone(&self, now: Timestamp) -> bytes::Bytes {
        encode(&Tombstone { id: self.id, deleted_at: now })
    }
}

fn encode<R: Serialize>(record: &R) -> bytes::Bytes {
    // Structs of texts, numbers and maps with text for keys always become JSON.
    serde_json::to_vec_pretty(&Envelope { version: VERSION, revision: Uuid::now_v7(), record })
        .unwrap_or_default()
        .into()
}

/// Reads the record that should be that of `id`.
pub(crate) fn decode(bytes: &[u8], id: TemplateId) -> Found {
    let read = || -> Result<Found, serde_json::Error> {
        let head: Head = serde_json::from_slice(bytes)?;
        Ok(match head {
            Head { version, .. } if version != VERSION => {
                Found::Unknown(format!("it has format {version}, this program knows {VERSION}"))
            }
            Head { deleted_at_unix_ms: Some(_), .. } => {
                let tombstone: Envelope<Tombstone> = serde_json::from_slice(bytes)?;
                Found::Deleted { id: tombstone.record.id }
            }
            Head { .. } => {
                let record: Envelope<Record> = serde_json::from_slice(bytes)?;
                Found::Record(Box::new(record.record))
            }
        })
    };
    let found = read().unwrap_or_else(|error| Found::Unknown(format!("unreadable: {error}")));
    let other = match &found {
        Found::Record(record) => record.id != id,
        Found::Deleted { id: deleted } => *deleted != id,
        Found::Unknown(_) => false,
    };
    if other { Found::Unknown("it is another's record".to_owned()) } else { found }
}

/// Instants as milliseconds since 1970.
pub(crate) mod millis {
    use jiff::Timestamp;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(at: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
        at.as_millisecond().serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Timestamp, D::Error> {
        Timestamp::from_millisecond(i64::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

mod optional_millis {
    use jiff::Timestamp;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(at: &Option<Timestamp>, serializer: S) -> Result<S::Ok, S::Error> {
        at.map(Timestamp::as_millisecond).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Timestamp>, D::Error> {
        let at = Option::<i64>::deserialize(deserializer)?;
        at.map(Timestamp::from_millisecond).transpose().map_err(serde::de::Error::custom)
    }
}

/// An instant as it is written.
pub(crate) fn to_millis(at: Timestamp) -> Timestamp {
    Timestamp::from_millisecond(at.as_millisecond()).unwrap_or(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_reads_as_the_format_has_it() {
        let id = TemplateId::new();
        let (build, capture, digest) = (BuildId::from(id), CaptureId::new(), Digest::of(b""));
        let text = format!(
            r#"{{"version": 1, "revision": "{capture}", "id": "{id}", "alias": "base", "future": true,
            "source": {{"Template": {{"build": {{"id": "{build}", "status": "Ready", "created_at_unix_ms": 1000,
                "resources": {{"cpu_count": 2, "memory_mib": 512, "disk_size_mib": 0}},
                "started_at_unix_ms": 1500, "finished_at_unix_ms": null}}}}}},
            "resources": {{"cpu_count": 2, "memory_mib": 512, "disk_size_mib": 65536}},
            "created_at_unix_ms": 1000, "updated_at_unix_ms": 2000,
            "committed": {{"capture": "{capture}", "context": {{"env_vars": ["A=b"], "workdir": "/"}},
                "files": [{{"name": "state", "digest": "{digest}", "size": 0, "managed": false}}]}}}}"#
        );
        let Found::Record(record) = decode(text.as_bytes(), id) else { panic!("{:?}", decode(text.as_bytes(), id)) };
        assert_eq!(record.resources.shape(), MachineShape { vcpus: 2, memory: Bytes::mib(512) });
        assert_eq!(record.updated_at, Timestamp::from_second(2).unwrap());
        assert_eq!(decode(&record.encode(), id), Found::Record(record.clone()));
        assert_eq!(decode(&record.tombstone(Timestamp::now()), id), Found::Deleted { id });
        let told = |text: &str, id| match decode(text.as_bytes(), id) {
            Found::Unknown(problem) => problem,
            known => panic!("{known:?}"),
        };
        assert!(told(&text.replace("\"version\": 1", "\"version\": 2"), id).contains("format 2"));
        assert!(told(&text[..40], id).contains("unreadable"));
        assert!(told("", id).contains("unreadable"));
        assert!(told(&text, TemplateId::new()).contains("another's"));
    }
}
