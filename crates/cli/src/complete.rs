//! Candidates that only the server knows: sandboxes and templates, for a shell that completes a command line.
//!
//! Somebody waits with a key held down: there is a second for it, and whatever goes wrong, there are none.

use std::ffi::OsStr;
use std::time::Duration;

use aenv_api::{Client, ListQuery, ListedSandbox, Page, Template};
use aenv_model::SandboxId;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, ValueCompleter};

use crate::credentials::Surroundings;

/// Longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest wait for an answer.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Sandboxes in a state.
#[derive(Debug, Clone, Copy)]
struct Sandboxes(&'static str);

/// Sandboxes that run.
pub(crate) fn running() -> ArgValueCompleter {
    ArgValueCompleter::new(Sandboxes("running"))
}

/// Sandboxes that are paused.
pub(crate) fn paused() -> ArgValueCompleter {
    ArgValueCompleter::new(Sandboxes("paused"))
}

/// Sandboxes of either kind.
pub(crate) fn sandboxes() -> ArgValueCompleter {
    ArgValueCompleter::new(Sandboxes("running,paused"))
}

/// Templates, by name where they have one.
pub(crate) fn templates() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let found = ask(async |client| client.list_templates::<Template>(None).await.ok());
        let candidate = |template: Template| {
            let id = template.template_id.to_string();
            let name = template.names.into_iter().next();
            let status = template.build_status.name();
            CompletionCandidate::new(name.unwrap_or(id)).help(Some(status.into()))
        };
        matching(found.into_iter().map(candidate), current)
    })
}

/// Profiles that are stored here.
pub(crate) fn profiles() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let profiles = Surroundings::of_process(None).profiles().unwrap_or_default();
        matching(profiles.into_iter().map(|profile| CompletionCandidate::new(profile.name)), current)
    })
}

impl ValueCompleter for Sandboxes {
    fn complete(&self, current: &OsStr) -> Vec<CompletionCandidate> {
        // Commands take one sandbox each; behind it is something else, as the words of `exec`.
        let is_another = |word: String| word.as_str() != current && word.parse::<SandboxId>().is_ok();
        if std::env::args().any(is_another) {
            return Vec::new();
        }
        let limit = Some("100".to_owned());
        let query = ListQuery { state: Some(self.0.to_owned()), limit, ..ListQuery::default() };
        let found = ask(async |client| client.list_sandboxes::<ListedSandbox>(&query).await.ok());
        let candidate = |sandbox: ListedSandbox| {
            let template = sandbox.alias.unwrap_or_else(|| sandbox.template_id.to_string());
            let help = format!("{template} ({})", sandbox.state.name());
            CompletionCandidate::new(sandbox.sandbox_id.to_string()).help(Some(help.into()))
        };
        matching(found.into_iter().map(candidate), current)
    }
}

fn matching(candidates: impl Iterator<Item = CompletionCandidate>, current: &OsStr) -> Vec<CompletionCandidate> {
    let begins = |candidate: &CompletionCandidate| {
        candidate.get_value().as_encoded_bytes().starts_with(current.as_encoded_bytes())
    };
    candidates.filter(begins).collect()
}

fn ask<T>(question: impl AsyncFnOnce(Client) -> Option<Page<T>>) -> Vec<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let answer = || -> Option<Page<T>> {
        let credentials = Surroundings::of_process(named_profile(std::env::args())).credentials().ok()?;
        let client = Client::with_patience(&credentials.url, &credentials.api_key, CONNECT_TIMEOUT, TIMEOUT).ok()?;
        runtime.ok()?.block_on(async { tokio::time::timeout(TIMEOUT, question(client)).await.ok()? })
    };
    answer().map(|page| page.items).unwrap_or_default()
}

/// The profile on the line that is completed.
fn named_profile(words: impl Iterator<Item = String>) -> Option<String> {
    let mut words = words.skip_while(|word| word != "--");
    while let Some(word) = words.next() {
        if word == "--profile" {
            return words.next();
        }
        if let Some(name) = word.strip_prefix("--profile=") {
            return Some(name.to_owned());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_on_the_line_counts() {
        let named = |line: &str| named_profile(line.split(' ').map(str::to_owned));
        assert_eq!(named("aenv -- aenv --profile work exec "), Some("work".into()));
        assert_eq!(named("aenv -- aenv exec --profile=work "), Some("work".into()));
        assert_eq!(named("aenv -- aenv exec "), None);
    }

    #[test]
    fn candidates_begin_with_what_is_typed() {
        let candidates = || ["abc", "abd", "b"].into_iter().map(CompletionCandidate::new);
        assert_eq!(matching(candidates(), OsStr::new("ab")).len(), 2);
        assert_eq!(matching(candidates(), OsStr::new("")).len(), 3);
    }
}
