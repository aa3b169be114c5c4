//! Templates: names for prepared root file systems, and the builds that make them.
//!
//! A template has an id and a name that stay, and builds that come and go; sandboxes start from the build that the template's
//! tag stands for. A build imports an image: its layers into the image cache, where a lease keeps them, and what its device is
//! made of into `<dir>/<template>/<build>/image.json`; or it takes another template. It may do steps on that, in a machine.
//! Then a machine is booted on the result once, and captured: sandboxes go on from that (`make.rs`). Only then is its row
//! marked ready: a crash leaves garbage that the next start sweeps, never half a template.

#![forbid(unsafe_code)]

mod build;
mod context;
mod execute;
mod expand;
mod files;
mod image;
mod make;
mod points;
mod record;
mod seams;
mod shared;
mod snapshots;
mod step;
mod tags;
mod templates;
mod uploads;

pub use build::{Base, BuildRequest, BuildView, ImageRequest, LogEntry, LogLevel};
pub use files::RootfsLease;
pub use image::{ImageProblem, ReadyImage};
pub use record::{
    BuildRecord, BuildStage, BuildState, DEFAULT_TAG, PublicationState, Recipe, SnapshotRecord, Tag, TemplateRecord,
};
pub use seams::{Bench, ImportImage, ImportedImage, Workshop};
pub use shared::{PublishError, Shared};
pub use snapshots::{AddSnapshotError, NewSnapshot};
pub use step::{Step, StepProblem, is_files_hash};
pub use tags::ChangeTemplateError;
pub use templates::{
    CreateTemplateError, DeleteTemplateError, NameProblem, Parts, ReadyImageFiles, ReadyTemplate, ResolveError,
    StartBuildError, StartTemplatesError, TemplateConfig, Templates, captures,
};
pub use uploads::{UploadError, Uploads};
