//! Domain errors as HTTP answers, in one place. The user reads what happened to *their* thing and what to do; host
//! paths and causes go to the log.

use aenv_api::ApiErrorBody;
use aenv_durable::StoreError;
use aenv_image::ImportErrorKind;
use aenv_model::Phase;
use aenv_orchestrator::{AskError, CreateError, DeleteError};
use aenv_repository::{RepositoryError, RepositoryErrorKind};
use aenv_snapshot::CaptureError;
use aenv_template::{
    AddSnapshotError, ChangeTemplateError, CreateTemplateError, DeleteTemplateError, ImageProblem, PublishError,
    ResolveError, StartBuildError, UploadError,
};
use axum::Json;
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use tracing::error;

use crate::keys::KeyProblem;

/// An answer that is not a success.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    status: StatusCode,
    message: String,
    error_code: Option<&'static str>,
    /// Seconds after which it may succeed.
    retry_after: Option<u32>,
}

impl ApiError {
    /// An answer with this status and text.
    #[must_use]
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), error_code: None, retry_after: None }
    }

    /// A refusal of the request itself.
    #[must_use]
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A field of the API that this version knows and does not have.
    #[must_use]
    pub(crate) fn unsupported_field(field: &str) -> Self {
        Self::bad_request(format!("field '{field}' is not supported by this version"))
    }

    /// The text.
    #[cfg(test)]
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    pub(crate) fn coded(status: StatusCode, error_code: &'static str, message: impl Into<String>) -> Self {
        Self { error_code: Some(error_code), ..Self::new(status, message) }
    }

    /// Something that this needs cannot be had now.
    pub(crate) fn unavailable(why: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, why)
    }

    /// A failure of ours: logged with its whole chain, told without it.
    fn internal(error: &(dyn std::error::Error + 'static), error_code: &'static str, message: String) -> Self {
        let mut chain = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            chain = format!("{chain}: {cause}");
            source = cause.source();
        }
        error!(error = chain, "request failed");
        Self::coded(StatusCode::INTERNAL_SERVER_ERROR, error_code, message)
    }
}

impl ApiError {
    /// As the body of an answer, or a part of one.
    pub(crate) fn into_body(self) -> ApiErrorBody {
        ApiErrorBody {
            code: self.status.as_u16(),
            message: self.message,
            error_code: self.error_code.map(str::to_owned),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        // What may pass by itself says when to come again: clients that obey it do nothing else.
        let passes = matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
        let retry_after = self.retry_after.or(passes.then_some(1)).map(|secs| [(RETRY_AFTER, secs)]);
        (self.status, retry_after, Json(self.into_body())).into_response()
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        Self::internal(&error, "internal_server_error", "the node's store failed".to_owned())
    }
}

impl From<CreateError> for ApiError {
    fn from(error: CreateError) -> Self {
        match &error {
            CreateError::NoSpace { .. } => {
                error!(error = ?error, "no disk space for a sandbox");
                Self::coded(StatusCode::INSUFFICIENT_STORAGE, "sandbox_create_failed", error.to_string())
            }
            CreateError::DiskSize { source } => Self::bad_request(source.to_string()),
            CreateError::Source { why } => Self::coded(StatusCode::CONFLICT, "sandbox_no_compatible_node", why.clone()),
            CreateError::NoLease(_) => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            CreateError::Full { .. } => Self {
                retry_after: Some(1),
                ..Self::coded(StatusCode::TOO_MANY_REQUESTS, "sandbox_capacity_unavailable", error.to_string())
            },
            CreateError::Deleted { .. } => Self::new(StatusCode::CONFLICT, error.to_string()),
            CreateError::ShuttingDown => Self::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
            CreateError::Step { id, step, .. } => {
                let message = format!("sandbox {id} could not be started: {step} failed");
                Self::internal(&error, "sandbox_create_failed", message)
            }
            CreateError::Deadline { id, step, deadline } => {
                let message = format!("sandbox {id} could not be started: {step} took longer than {deadline:?}");
                Self::internal(&error, "sandbox_create_failed", message)
            }
        }
    }
}

impl ApiError {
    /// No machine could be made to go on, and `therefore` something stays as it was.
    fn not_restored(error: &AskError, source: &CreateError, therefore: &str) -> Self {
        let told = || format!("{error}: {source}; {therefore}");
        match source {
            CreateError::NoSpace { .. } => Self::new(StatusCode::INSUFFICIENT_STORAGE, told()),
            CreateError::Source { .. } => Self::new(StatusCode::CONFLICT, told()),
            CreateError::ShuttingDown => Self::new(StatusCode::SERVICE_UNAVAILABLE, source.to_string()),
            _ => Self::internal(error, "internal_server_error", format!("{error}; {therefore}")),
        }
    }
}

impl From<AskError> for ApiError {
    fn from(error: AskError) -> Self {
        match &error {
            AskError::NotFound { .. } => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            // To a client that keeps a sandbox alive, one that does not run is not there.
            AskError::Busy { phase: Phase::Paused, asked: "set the timeout of" | "extend", .. } => {
                Self::new(StatusCode::NOT_FOUND, error.to_string())
            }
            AskError::Unresponsive { .. } => {
                Self::coded(StatusCode::CONFLICT, "sandbox_snapshot_guest_agent_unresponsive", error.to_string())
            }
            AskError::Busy { .. } => Self::new(StatusCode::CONFLICT, error.to_string()),
            AskError::Capture { source, .. } if matches!(**source, CaptureError::NoSpace { .. }) => {
                error!(error = ?error, "no disk space for a capture");
                Self::new(StatusCode::INSUFFICIENT_STORAGE, format!("{error}: {source}; it runs on"))
            }
            AskError::Capture { .. } => Self::internal(&error, "internal_server_error", format!("{error}; it runs on")),
            AskError::Unrecorded { .. } | AskError::Network { .. } => {
                Self::internal(&error, "internal_server_error", error.to_string())
            }
            AskError::Resume { source, .. } => Self::not_restored(&error, source, "it stays paused"),
            AskError::Rollback { source, .. } => Self::not_restored(&error, source, "it runs on as it was"),
        }
    }
}

impl From<RepositoryError> for ApiError {
    fn from(error: RepositoryError) -> Self {
        Self::of_repository(&error)
    }
}

impl ApiError {
    /// What nodes share.
    fn of_repository(error: &RepositoryError) -> Self {
        let code = "internal_server_error";
        match error.kind() {
            RepositoryErrorKind::NotFound => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            RepositoryErrorKind::Taken => Self::bad_request(error.to_string()),
            RepositoryErrorKind::Unavailable => {
                error!(error = error.report(), "the snapshot repository is unavailable");
                let message = format!("the snapshot repository is unavailable, try again later: {}", error.report());
                Self::coded(StatusCode::SERVICE_UNAVAILABLE, "snapshot_repository_unavailable", message)
            }
            RepositoryErrorKind::NoSpace => {
                error!(error = error.report(), "no disk space for files of the repository");
                let message = "not enough disk space on the node for what it shares with others";
                Self::coded(StatusCode::INSUFFICIENT_STORAGE, code, message)
            }
            RepositoryErrorKind::Unusable => Self::internal(error, code, error.to_string()),
            RepositoryErrorKind::Local => {
                Self::internal(error, code, "the node failed to share it with others".to_owned())
            }
        }
    }
}

impl From<AddSnapshotError> for ApiError {
    fn from(error: AddSnapshotError) -> Self {
        match &error {
            AddSnapshotError::Publish(PublishError::Repository(error)) => Self::of_repository(error),
            AddSnapshotError::Publish(PublishError::Capture(_)) => {
                Self::internal(&error, "internal_server_error", "the snapshot could not be published".to_owned())
            }
            AddSnapshotError::Name(_) | AddSnapshotError::Taken(_) => Self::bad_request(error.to_string()),
            AddSnapshotError::Store(_) => {
                Self::internal(&error, "internal_server_error", "the snapshot could not be recorded".to_owned())
            }
        }
    }
}

impl From<DeleteError> for ApiError {
    fn from(error: DeleteError) -> Self {
        match error {
            DeleteError::Ask(error) => error.into(),
            DeleteError::Unfinished { id, .. } => Self::internal(
                &error,
                "internal_server_error",
                format!("sandbox {id} is being deleted, but could not be taken down yet; the node goes on trying"),
            ),
        }
    }
}

impl From<ResolveError> for ApiError {
    fn from(error: ResolveError) -> Self {
        match error {
            ResolveError::NotFound(_) => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            ResolveError::NotReady(_) => Self::bad_request(error.to_string()),
            ResolveError::Repository(error) => Self::of_repository(&error),
            ResolveError::Adopt(CaptureError::NoSpace { .. }) => {
                error!(error = ?error, "no disk space for a capture of another node");
                let message = "not enough disk space on the node to bring it here";
                Self::coded(StatusCode::INSUFFICIENT_STORAGE, "sandbox_create_failed", message)
            }
            ResolveError::Adopt(_) => {
                let message = "what another node published could not be used on this node".to_owned();
                Self::internal(&error, "sandbox_create_failed", message)
            }
            ResolveError::Forget(error) => error.into(),
        }
    }
}

impl From<ImageProblem> for ApiError {
    fn from(error: ImageProblem) -> Self {
        let code = "sandbox_create_failed";
        match &error {
            ImageProblem::Import(import) if import.kind().is_refusal() => Self::bad_request(import.report()),
            ImageProblem::Import(import) if import.kind() == ImportErrorKind::NoSpace => {
                Self::coded(StatusCode::INSUFFICIENT_STORAGE, code, import.report())
            }
            ImageProblem::Import(import) if import.kind() == ImportErrorKind::Cancelled => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "the node is shutting down")
            }
            ImageProblem::Import(import) if import.kind() == ImportErrorKind::Registry => {
                Self::internal(&error, code, import.report())
            }
            _ => Self::internal(&error, code, "the image could not be made ready".to_owned()),
        }
    }
}

impl From<KeyProblem> for ApiError {
    fn from(problem: KeyProblem) -> Self {
        match problem {
            KeyProblem::Name => Self::bad_request(problem.to_string()),
            KeyProblem::Many => Self::new(StatusCode::CONFLICT, problem.to_string()),
            KeyProblem::NotFound(_) => Self::new(StatusCode::NOT_FOUND, problem.to_string()),
            KeyProblem::Store(error) => error.into(),
        }
    }
}

impl From<CreateTemplateError> for ApiError {
    fn from(error: CreateTemplateError) -> Self {
        match &error {
            CreateTemplateError::Name(_) | CreateTemplateError::Taken(_) => Self::bad_request(error.to_string()),
            CreateTemplateError::Repository(error) => Self::of_repository(error),
            CreateTemplateError::Store(_) => {
                Self::internal(&error, "internal_server_error", "the template could not be recorded".to_owned())
            }
        }
    }
}

impl From<StartBuildError> for ApiError {
    fn from(error: StartBuildError) -> Self {
        match &error {
            StartBuildError::NotFound { .. } => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            StartBuildError::AlreadyStarted(_) => Self::bad_request(error.to_string()),
            StartBuildError::Busy(_) => Self::new(StatusCode::TOO_MANY_REQUESTS, error.to_string()),
            StartBuildError::Repository(error) => Self::of_repository(error),
            StartBuildError::Store(_) => {
                Self::internal(&error, "internal_server_error", "the build could not be recorded".to_owned())
            }
        }
    }
}

impl From<ChangeTemplateError> for ApiError {
    fn from(error: ChangeTemplateError) -> Self {
        match &error {
            ChangeTemplateError::NotFound(_) => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            ChangeTemplateError::Name(_) | ChangeTemplateError::Default | ChangeTemplateError::Shared => {
                Self::bad_request(error.to_string())
            }
            ChangeTemplateError::Repository(error) => Self::of_repository(error),
            ChangeTemplateError::Store(_) => {
                Self::internal(&error, "internal_server_error", "the change could not be recorded".to_owned())
            }
        }
    }
}

impl From<UploadError> for ApiError {
    fn from(error: UploadError) -> Self {
        match &error {
            UploadError::Name | UploadError::Cut => Self::bad_request(error.to_string()),
            UploadError::Large { .. } => Self::new(StatusCode::PAYLOAD_TOO_LARGE, error.to_string()),
            UploadError::Io(source) if source.kind() == std::io::ErrorKind::StorageFull => {
                let message = "not enough disk space on the node for the files of the build";
                Self::new(StatusCode::INSUFFICIENT_STORAGE, message)
            }
            UploadError::Io(_) => {
                Self::internal(&error, "internal_server_error", "the files could not be kept".to_owned())
            }
        }
    }
}

impl From<DeleteTemplateError> for ApiError {
    fn from(error: DeleteTemplateError) -> Self {
        match &error {
            DeleteTemplateError::NotFound(_) => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            DeleteTemplateError::Repository(error) => Self::of_repository(error),
            DeleteTemplateError::Store(_) => {
                Self::internal(&error, "internal_server_error", "the template could not be deleted".to_owned())
            }
        }
    }
}
