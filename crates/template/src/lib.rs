//! Templates: names for prepared root file systems, and the builds that make them.
//!
//! A template has an id and a name that stay, and builds that come and go; sandboxes start from the newest ready build.
//! A build imports an image into `<dir>/<template>/<build>/rootfs.ext4`, written under a temporary name and renamed when
//! whole, and only then is its row marked ready: a crash leaves garbage that the next start sweeps, never half a template.

#![forbid(unsafe_code)]

mod build;
mod record;
mod seams;
mod templates;

pub use build::{BuildRequest, BuildView, LogEntry, LogLevel};
pub use record::{BuildRecord, BuildState, FailedAt, TemplateRecord};
pub use seams::{ImportImage, ImportedImage};
pub use templates::{
    CreateTemplateError, DeleteTemplateError, NameProblem, Parts, ReadyTemplate, ResolveError, RootfsLease,
    StartBuildError, TemplateConfig, Templates,
};
