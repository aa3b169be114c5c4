//! Templates: names for prepared root file systems, and the builds that make them.
//!
//! A template has an id and a name that stay, and builds that come and go; sandboxes start from the newest ready build.
//! A build imports an image: its layers into the image cache, where a lease keeps them, and what its device is made of into
//! `<dir>/<template>/<build>/image.json`. Then a machine is booted on it once, and captured: sandboxes go on from that. Only then is its row marked ready: a crash leaves garbage that the next start
//! sweeps, never half a template.

#![forbid(unsafe_code)]

mod build;
mod files;
mod image;
mod record;
mod seams;
mod shared;
mod snapshots;
mod templates;

pub use build::{BuildRequest, BuildView, LogEntry, LogLevel};
pub use files::RootfsLease;
pub use image::{ImageProblem, ReadyImage};
pub use record::{BuildRecord, BuildState, FailedAt, SnapshotRecord, TemplateRecord};
pub use seams::{ImportImage, ImportedImage, Warm};
pub use shared::{PublishError, Shared};
pub use snapshots::AddSnapshotError;
pub use templates::{
    CreateTemplateError, DeleteTemplateError, NameProblem, Parts, ReadyImageFiles, ReadyTemplate, ResolveError,
    StartBuildError, TemplateConfig, Templates, captures,
};
