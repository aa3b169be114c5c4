//! Identities. Each is a UUIDv7 (sorted by birth), written lower-case and hyphenated on every wire.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A text that is no id of the expected kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {kind} id (expected a lower-case, hyphenated UUID)")]
pub struct ParseIdError {
    kind: &'static str,
    text: String,
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Uuid);

        // No `Default`: a fresh id is an event, not a default.
        #[allow(clippy::new_without_default)]
        impl $name {
            /// Mints a fresh id.
            #[must_use]
            pub fn new() -> Self {
                Self(Uuid::now_v7())
            }

            /// The id as a UUID.
            #[must_use]
            pub fn uuid(self) -> Uuid {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.as_hyphenated().fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;

            /// Accepts the canonical form only, so that one id has one spelling in paths, tokens and logs.
            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                let refuse = || ParseIdError { kind: $kind, text: text.to_owned() };
                let uuid = Uuid::try_parse(text).map_err(|_| refuse())?;
                let id = Self(uuid);
                if id.to_string() == text { Ok(id) } else { Err(refuse()) }
            }
        }
    };
}

id!(
    /// A sandbox. Kept across restarts of the node; never reused.
    SandboxId,
    "sandbox"
);
id!(
    /// A template: a name's identity through all its builds.
    TemplateId,
    "template"
);
id!(
    /// One build of a template.
    BuildId,
    "build"
);

id!(
    /// An API key.
    KeyId,
    "key"
);

id!(
    /// A lease: what keeps a group of sandboxes alive.
    LeaseId,
    "lease"
);
id!(
    /// A capture: what a machine was at one instant.
    CaptureId,
    "capture"
);

impl CaptureId {
    /// When it was minted, in whole milliseconds since the Unix epoch: the instant of its capture, but for a moment.
    #[must_use]
    pub fn minted_at(self) -> Duration {
        let (seconds, nanos) = self.0.get_timestamp().map(|at| at.to_unix()).unwrap_or_default();
        Duration::new(seconds, nanos)
    }
}

impl From<TemplateId> for BuildId {
    /// A template's first build has the template's own id, so that clients that know only one id find both.
    fn from(template: TemplateId) -> Self {
        Self(template.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_reads_back_as_written() {
        let id = SandboxId::new();
        assert_eq!(id.to_string().parse(), Ok(id));
    }

    #[test]
    fn a_capture_knows_when_it_was() {
        let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let before = now().as_millis();
        let minted = CaptureId::new().minted_at().as_millis();
        assert!((before..=now().as_millis()).contains(&minted), "{minted}");
    }

    #[test]
    fn only_the_canonical_spelling_is_an_id() {
        let id = SandboxId::new().to_string();
        for text in [id.to_uppercase(), id.replace('-', ""), format!("{{{id}}}"), "nonexistingsandbox".into()] {
            assert!(text.parse::<SandboxId>().is_err(), "{text}");
        }
    }
}
