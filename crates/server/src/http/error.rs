//! Domain errors as HTTP answers, in one place. The user reads what happened to *their* thing and what to do; host
//! paths and causes go to the log.

use aenv_api::ApiErrorBody;
use aenv_orchestrator::{AskError, CreateError, DeleteError};
use aenv_template::{CreateTemplateError, DeleteTemplateError, ResolveError, StartBuildError};
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use tracing::error;

/// An answer that is not a success.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    status: StatusCode,
    message: String,
    error_code: Option<&'static str>,
}

impl ApiError {
    /// An answer with this status and text.
    #[must_use]
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), error_code: None }
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

    fn coded(status: StatusCode, error_code: &'static str, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), error_code: Some(error_code) }
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

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = ApiErrorBody {
            code: self.status.as_u16(),
            message: self.message,
            error_code: self.error_code.map(str::to_owned),
        };
        (self.status, Json(body)).into_response()
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

impl From<AskError> for ApiError {
    fn from(error: AskError) -> Self {
        match error {
            AskError::NotFound { .. } => Self::new(StatusCode::NOT_FOUND, error.to_string()),
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
        }
    }
}

impl From<CreateTemplateError> for ApiError {
    fn from(error: CreateTemplateError) -> Self {
        match &error {
            CreateTemplateError::Name(problem) => Self::bad_request(problem.to_string()),
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
            StartBuildError::Store(_) => {
                Self::internal(&error, "internal_server_error", "the build could not be recorded".to_owned())
            }
        }
    }
}

impl From<DeleteTemplateError> for ApiError {
    fn from(error: DeleteTemplateError) -> Self {
        match &error {
            DeleteTemplateError::NotFound(_) => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            DeleteTemplateError::Store(_) => {
                Self::internal(&error, "internal_server_error", "the template could not be deleted".to_owned())
            }
        }
    }
}
