//! Who may reach what: pure, and before any connection is made.

use std::borrow::Cow;

use http::{HeaderMap, HeaderName};
use percent_encoding::percent_decode_str;
use subtle::ConstantTimeEq;

use crate::AGENT_PORT;

/// Carries the token of a sandbox whose ports are not public.
pub(crate) const TRAFFIC_TOKEN: HeaderName = HeaderName::from_static("e2b-traffic-access-token");

/// The agent's routes for the node alone. Whoever could call `/init` could set the token that guards all others.
const INTERNAL: [&str; 8] = ["init", "sync", "freeze", "unfreeze", "collapse", "fsfreeze", "fsthaw", "upgrade"];

/// Why a request may not pass. The texts are the SDKs' contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Denied {
    #[error("route not found")]
    Internal,
    #[error("Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing")]
    NoToken,
    #[error(
        "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is invalid"
    )]
    WrongToken,
}

/// Whether a request for `path` of `port` may pass. The agent checks its own token, on every path that it does not hold
/// public; all that is kept from it here are the internal routes.
pub(crate) fn check(port: u16, path: &str, headers: &HeaderMap, traffic_token: Option<&str>) -> Result<(), Denied> {
    if port == AGENT_PORT {
        return if is_internal(path) { Err(Denied::Internal) } else { Ok(()) };
    }
    let Some(token) = traffic_token else { return Ok(()) };
    let mut given = headers.get_all(TRAFFIC_TOKEN).iter();
    match (given.next(), given.next()) {
        (None, _) => Err(Denied::NoToken),
        (Some(given), None) if same(given.as_bytes(), token.as_bytes()) => Ok(()),
        _ => Err(Denied::WrongToken),
    }
}

/// Compares secrets in time that depends on their lengths only.
pub(crate) fn same(given: &[u8], secret: &[u8]) -> bool {
    given.ct_eq(secret).into()
}

/// Whether a path could mean an internal route to any reader of it: one that decodes, folds slashes and dots, or case.
fn is_internal(path: &str) -> bool {
    let path = path.split(['?', '#']).next().unwrap_or_default();
    let decoded = decoded(path);
    let mut segments: Vec<&str> = Vec::new();
    for segment in decoded.split(['/', '\\']) {
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment.split(';').next().unwrap_or_default()),
        }
    }
    matches!(segments[..], [only] if INTERNAL.iter().any(|internal| internal.eq_ignore_ascii_case(only)))
}

/// Decodes percent escapes, and escapes of escapes, since readers behind us might decode again; three times is two more
/// than any does.
fn decoded(path: &str) -> String {
    let mut text = path.to_owned();
    for _ in 0..3 {
        match percent_decode_str(&text).decode_utf8_lossy() {
            Cow::Owned(decoded) => text = decoded,
            Cow::Borrowed(_) => break,
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(tokens: &[&str]) -> HeaderMap {
        tokens.iter().map(|token| (TRAFFIC_TOKEN, token.parse().expect("valid value"))).collect()
    }

    #[test]
    fn internal_routes_are_kept_from_outside_in_every_spelling() {
        for path in [
            "/init",
            "/init?x=1",
            "/init/",
            "//init",
            "/./init",
            "/x/../init",
            "/%69nit",
            "/%2569nit",
            "/INIT",
            "/init;v=1",
            "/freeze",
            "/unfreeze",
            "/collapse",
            "/fsfreeze",
            "/fsthaw",
            "/upgrade",
            "/%2finit",
        ] {
            assert_eq!(check(AGENT_PORT, path, &HeaderMap::new(), None), Err(Denied::Internal), "{path}");
            assert_eq!(check(8080, path, &HeaderMap::new(), None), Ok(()), "a user's service may have {path}");
        }
        for path in ["/", "/health", "/files?path=/init", "/initial", "/process.Process/Start", "/x/init", "/envs"] {
            assert_eq!(check(AGENT_PORT, path, &HeaderMap::new(), None), Ok(()), "{path}");
        }
    }

    #[test]
    fn a_private_sandbox_wants_its_token_on_every_port_but_the_agents() {
        let token = Some("secret");
        assert_eq!(check(8080, "/", &headers(&["secret"]), token), Ok(()));
        assert_eq!(check(8080, "/", &headers(&[]), token), Err(Denied::NoToken));
        for wrong in [&["secre"][..], &["secret2"], &[""], &["Secret"], &["secret", "secret"], &["x", "secret"]] {
            assert_eq!(check(8080, "/", &headers(wrong), token), Err(Denied::WrongToken), "{wrong:?}");
        }
        assert_eq!(check(AGENT_PORT, "/health", &headers(&[]), token), Ok(()));
        assert_eq!(check(8080, "/", &headers(&[]), None), Ok(()));
    }
}
