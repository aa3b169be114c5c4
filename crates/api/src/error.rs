//! The body of every answer that is not a success.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What went wrong, for programs (`code`, `error_code`) and for people (`message`).
///
/// Official clients parse this body on every refusal, 401 included, and break on any other shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ApiErrorBody {
    /// The HTTP status again; clients branch on this one.
    pub code: u16,
    /// What happened to which object, and what to do about it.
    pub message: String,
    /// A finer cause from an open vocabulary (`sandbox_capacity_unavailable`, …).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_code: Option<String>,
}

impl ApiErrorBody {
    /// A body without a finer cause.
    #[must_use]
    pub fn new(code: u16, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), error_code: None }
    }

    /// The same with a finer cause.
    #[must_use]
    pub fn with_error_code(mut self, error_code: impl Into<String>) -> Self {
        self.error_code = Some(error_code.into());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_finer_cause_is_left_out_when_there_is_none() {
        let plain = serde_json::to_string(&ApiErrorBody::new(404, "sandbox x not found")).unwrap();
        assert_eq!(plain, r#"{"code":404,"message":"sandbox x not found"}"#);
        let fine = ApiErrorBody::new(503, "full").with_error_code("sandbox_capacity_unavailable");
        let text = serde_json::to_string(&fine).unwrap();
        assert_eq!(text, r#"{"code":503,"message":"full","error_code":"sandbox_capacity_unavailable"}"#);
        assert_eq!(serde_json::from_str::<ApiErrorBody>(&text).unwrap(), fine);
    }
}
