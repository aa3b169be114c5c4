//! Tokens of a sandbox, derived from one seed so that every node of a cluster agrees on them without asking.

use std::fmt;

use aenv_model::SandboxId;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// The secret that tokens are derived from: its text after trimming is the HMAC key, as it stands.
#[derive(Clone)]
pub struct TokenSeed(String);

impl fmt::Debug for TokenSeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenSeed(…)")
    }
}

impl TokenSeed {
    /// `None` if nothing is left after trimming.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        (!text.is_empty()).then(|| Self(text.to_owned()))
    }

    /// The token that the guest agent's port asks for: lower-case hex HMAC-SHA256 of the sandbox id.
    #[must_use]
    pub fn access_token(&self, sandbox: SandboxId) -> String {
        self.derive(&sandbox.to_string())
    }

    /// The token that every other port of a private sandbox asks for.
    #[must_use]
    pub fn traffic_token(&self, sandbox: SandboxId) -> String {
        self.derive(&format!("sandbox-traffic-{sandbox}"))
    }

    /// What lets anybody who has it send the files `hash` of a template build, until `expires` (seconds since 1970).
    #[must_use]
    pub fn upload_token(&self, hash: &str, expires: i64) -> String {
        self.derive(&format!("template-upload-{hash}-{expires}"))
    }

    fn derive(&self, message: &str) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.0.as_bytes())
            .unwrap_or_else(|_| unreachable!("HMAC takes keys of any length"));
        mac.update(message.as_bytes());
        hex::encode(mac.finalize().into_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_those_of_the_published_vector() {
        let seed = TokenSeed::new(" test-seed\n").unwrap();
        let id = "01936f8e-72f5-7000-8000-000000000001".parse().unwrap();
        assert_eq!(seed.access_token(id), "4f00f2a93a87c37161ae01c59b6d4f84506668113441277e9f6272dd4bfae1a7");
        assert_eq!(seed.traffic_token(id), "586547d7c10facb0f4871297fdbfd9d2b4376f4b02b2e1487646c1c87a293bd8");
    }
}
