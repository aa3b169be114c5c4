//! Keys from a command, as AWS's `credential_process` has it:
//!
//! ```json
//! {"Version": 1, "AccessKeyId": "…", "SecretAccessKey": "…", "SessionToken": "…", "Expiration": "2030-01-01T00:00:00Z"}
//! ```

use std::fmt;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use serde::Deserialize;
use tokio::process::Command;
use tokio::sync::Mutex;

/// Longest wait for the command.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Keys that end sooner are asked for again: a request with them may be under way for a while.
const MARGIN: Duration = Duration::from_secs(300);
/// How much of a failed command's words is told.
const MAX_WORDS: usize = 300;

/// Runs a command for keys, and keeps them until shortly before they expire.
pub(super) struct CredentialProcess {
    program: String,
    arguments: Vec<String>,
    kept: Mutex<Option<Kept>>,
}

struct Kept {
    credential: Arc<AwsCredential>,
    /// `None` if they never do.
    expire: Option<SystemTime>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Printed {
    version: u32,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<jiff::Timestamp>,
}

/// Why a command gave no keys.
#[derive(Debug, thiserror::Error)]
enum ProcessError {
    #[error("run {program}")]
    Run { program: String, source: std::io::Error },
    #[error("{program} did not end within {} s", TIMEOUT.as_secs())]
    Slow { program: String },
    #[error("{program}: {status}: {words}")]
    Failed { program: String, status: std::process::ExitStatus, words: String },
    #[error("{program} printed no credentials of version 1")]
    Output { program: String },
}

impl CredentialProcess {
    /// A command, quoted as for a shell, which is not used. `None` if there is none in `command`.
    pub(super) fn new(command: &str) -> Option<Self> {
        let mut words = shlex::split(command)?.into_iter();
        Some(Self { program: words.next()?, arguments: words.collect(), kept: Mutex::new(None) })
    }

    async fn run(&self) -> Result<Kept, ProcessError> {
        let program = self.program.clone();
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let output = match tokio::time::timeout(TIMEOUT, command.output()).await {
            Ok(Ok(output)) => output,
            Ok(Err(source)) => return Err(ProcessError::Run { program, source }),
            Err(_) => return Err(ProcessError::Slow { program }),
        };
        if !output.status.success() {
            let words = String::from_utf8_lossy(&output.stderr).trim().chars().take(MAX_WORDS).collect();
            return Err(ProcessError::Failed { program, status: output.status, words });
        }
        // What is wrong with it is not told: it is a secret.
        match serde_json::from_slice::<Printed>(&output.stdout) {
            Ok(printed) if printed.version == 1 => Ok(Kept {
                credential: Arc::new(AwsCredential {
                    key_id: printed.access_key_id,
                    secret_key: printed.secret_access_key,
                    token: printed.session_token,
                }),
                expire: printed.expiration.map(SystemTime::from),
            }),
            _ => Err(ProcessError::Output { program }),
        }
    }
}

impl Kept {
    fn last(&self) -> bool {
        self.expire.is_none_or(|expire| expire > SystemTime::now() + MARGIN)
    }
}

#[async_trait]
impl CredentialProvider for CredentialProcess {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        // Held while the command runs: all who wait want the same.
        let mut kept = self.kept.lock().await;
        if let Some(good) = kept.as_ref().filter(|kept| kept.last()) {
            return Ok(Arc::clone(&good.credential));
        }
        match self.run().await {
            Ok(fresh) => Ok(Arc::clone(&kept.insert(fresh).credential)),
            Err(source) => Err(object_store::Error::Generic { store: "S3", source: source.into() }),
        }
    }
}

impl fmt::Debug for CredentialProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CredentialProcess").field("program", &self.program).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A command that prints keys which expire at `expiration`, and counts in `dir` how often it ran.
    fn printing(dir: &Path, expiration: &str) -> CredentialProcess {
        let script = dir.join("print keys");
        let text = format!(
            "#!/bin/sh\necho x >> '{}'\necho '{{\"Version\":1,\"AccessKeyId\":\"id\",\"SecretAccessKey\":\"'$1'\"{expiration}}}'\n",
            dir.join("runs").display()
        );
        std::fs::write(&script, text).unwrap();
        CredentialProcess::new(&format!("/bin/sh '{}' 'the $KEY'", script.display())).unwrap()
    }

    fn runs(dir: &Path) -> usize {
        std::fs::read_to_string(dir.join("runs")).unwrap().lines().count()
    }

    #[tokio::test]
    async fn keys_are_kept_until_shortly_before_they_expire() {
        let in_a_minute = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(60);
        let in_an_hour = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(3600);
        for (expiration, expected) in [
            (String::new(), 1),
            (format!(",\"Expiration\":\"{in_an_hour}\",\"SessionToken\":\"t\""), 1),
            (format!(",\"Expiration\":\"{in_a_minute}\""), 3),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let process = printing(dir.path(), &expiration);
            for _ in 0..3 {
                let credential = process.get_credential().await.unwrap();
                assert_eq!((&*credential.key_id, &*credential.secret_key), ("id", "the $KEY"), "no shell has seen it");
                assert_eq!(credential.token.is_some(), expiration.contains("SessionToken"));
            }
            assert_eq!(runs(dir.path()), expected, "{expiration}");
        }
    }

    #[tokio::test]
    async fn a_command_without_keys_is_told_but_what_it_printed_is_not() {
        for (command, why) in [
            ("/bin/sh -c 'echo no >&2; exit 3'", "no"),
            ("/bin/echo secret", "no credentials of version 1"),
            ("/no/such/program", "/no/such/program"),
        ] {
            let error = CredentialProcess::new(command).unwrap().get_credential().await.unwrap_err().to_string();
            assert!(error.contains(why) && !error.contains("secret"), "{error}");
        }
    }
}
