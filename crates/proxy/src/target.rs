//! Which sandbox and port a request is for.

use http::header::HOST;
use http::{HeaderMap, HeaderName, Request, Uri};

/// Names of the header that carries the sandbox's id: the SDKs', and our own.
pub(crate) const SANDBOX_HEADERS: [HeaderName; 2] =
    [HeaderName::from_static("e2b-sandbox-id"), HeaderName::from_static("x-agentenv-sandbox-id")];

/// Names of the header that carries the port.
pub(crate) const PORT_HEADERS: [HeaderName; 2] =
    [HeaderName::from_static("e2b-sandbox-port"), HeaderName::from_static("x-agentenv-target-port")];

/// The path under which only the headers decide.
const PREFIX: &str = "/proxy";

/// A UUID's length in its canonical spelling.
const UUID_LENGTH: usize = 36;

/// Longest text taken for a sandbox's id; ours are UUIDs.
const LONGEST_ID: usize = 128;

/// A port of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// What the client calls the sandbox: `a-z A-Z 0-9 _ -`, not yet looked up.
    pub sandbox: String,
    /// The port, not 0.
    pub port: u16,
    /// How the request named it.
    pub via: Via,
}

/// How a request names its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Via {
    /// By its host: `{port}-{sandbox}.{domain}`.
    Host,
    /// By routing headers.
    Headers,
    /// By routing headers, under `/proxy`; the prefix is not the guest's.
    Prefix,
}

/// Why a request that is for a sandbox cannot be routed. The text is for the client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TargetProblem {
    /// One of the headers is missing.
    #[error("routing header {0} is missing")]
    Missing(HeaderName),
    /// A header, or it and its other name, say different things.
    #[error("routing header {0} is given with different values")]
    Ambiguous(HeaderName),
    /// Not a port.
    #[error("{0:?} is not a port (expected 1 to 65535)")]
    Port(String),
    /// Not even the form of an id.
    #[error("{0:?} is not a sandbox id")]
    Sandbox(String),
}

/// Reads targets off requests.
#[derive(Debug, Clone, Default)]
pub struct Targets {
    /// Lower-case, without a trailing dot.
    domains: Vec<String>,
}

impl Targets {
    /// Hosts below `domains` name sandboxes.
    #[must_use]
    pub fn new(domains: Vec<String>) -> Self {
        Self { domains: domains.iter().map(|domain| normal_host(domain)).collect() }
    }

    /// The target of a request; `None` if it is for the control plane.
    ///
    /// A host that names a sandbox wins over headers; headers win over every path, since a service in a sandbox may well
    /// have a `/sandboxes` or `/health` of its own.
    pub fn of<B>(&self, request: &Request<B>) -> Option<Result<Target, TargetProblem>> {
        let host = host_of(request.uri(), request.headers());
        match host.as_deref().and_then(|host| self.place_of(host)) {
            Some(Place::Sandbox { sandbox, port }) => {
                return Some(
                    parse_port(port)
                        .and_then(|port| Ok(Target { sandbox: parse_sandbox(sandbox)?, port, via: Via::Host })),
                );
            }
            Some(Place::Shared) => return Some(from_headers(request.headers(), via_path(request.uri()))),
            None => {}
        }
        let named = |names: &[HeaderName]| names.iter().any(|name| request.headers().contains_key(name));
        let via = via_path(request.uri());
        let routed = via == Via::Prefix || named(&SANDBOX_HEADERS) || named(&PORT_HEADERS);
        routed.then(|| from_headers(request.headers(), via))
    }

    fn place_of<'h>(&self, host: &'h str) -> Option<Place<'h>> {
        let label = self.domains.iter().find_map(|domain| host.strip_suffix(domain.as_str())?.strip_suffix('.'))?;
        if label == "sandbox" {
            return Some(Place::Shared);
        }
        let (port, rest) = label.split_once('-')?;
        if rest.contains('.') || port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
            return None; // some other name below the domain
        }
        // Ours have hyphens in them, so look for one before cutting at the first.
        let uuid = rest.get(..UUID_LENGTH).filter(|uuid| is_uuid(uuid));
        let uuid = uuid.filter(|_| matches!(rest.as_bytes().get(UUID_LENGTH), None | Some(b'-')));
        let sandbox = uuid.unwrap_or_else(|| rest.split_once('-').map_or(rest, |(sandbox, _ignored)| sandbox));
        Some(Place::Sandbox { sandbox, port })
    }
}

/// What a host below one of our domains stands for.
enum Place<'h> {
    /// One sandbox's port.
    Sandbox { sandbox: &'h str, port: &'h str },
    /// All sandboxes: `sandbox.{domain}`.
    Shared,
}

/// Path and query as the guest shall see them.
pub(crate) fn guest_path(uri: &Uri, via: Via) -> &str {
    let whole = uri.path_and_query().map_or("/", |path| path.as_str());
    let rest = match via {
        Via::Prefix => whole.strip_prefix(PREFIX).unwrap_or(whole),
        Via::Host | Via::Headers => whole,
    };
    if rest.is_empty() { "/" } else { rest }
}

/// The host a request was sent to, without its port, in lower case.
fn host_of(uri: &Uri, headers: &HeaderMap) -> Option<String> {
    let header = || headers.get(HOST).and_then(|host| host.to_str().ok());
    let authority = uri.authority().map(|authority| authority.as_str()).or_else(header)?;
    // An IPv6 literal has colons in brackets; it is not below any domain anyway.
    let host = authority.rsplit_once(':').map_or(authority, |(host, _port)| host);
    Some(normal_host(host))
}

fn normal_host(host: &str) -> String {
    host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase()
}

fn via_path(uri: &Uri) -> Via {
    match uri.path().strip_prefix(PREFIX) {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => Via::Prefix,
        _ => Via::Headers,
    }
}

fn from_headers(headers: &HeaderMap, via: Via) -> Result<Target, TargetProblem> {
    let sandbox = parse_sandbox(&only(headers, &SANDBOX_HEADERS)?)?;
    let port = parse_port(&only(headers, &PORT_HEADERS)?)?;
    Ok(Target { sandbox, port, via })
}

/// The one value that is given under any of the names.
fn only(headers: &HeaderMap, names: &[HeaderName; 2]) -> Result<String, TargetProblem> {
    let mut values = names.iter().flat_map(|name| headers.get_all(name)).map(|value| value.as_bytes());
    let first = values.next().ok_or_else(|| TargetProblem::Missing(names[0].clone()))?;
    if values.any(|other| other != first) {
        return Err(TargetProblem::Ambiguous(names[0].clone()));
    }
    Ok(String::from_utf8_lossy(first).into_owned())
}

/// Decimal digits only: `u16::from_str` would take a `+`.
fn parse_port(text: &str) -> Result<u16, TargetProblem> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let port = digits.then(|| text.parse().ok()).flatten().filter(|port| *port != 0);
    port.ok_or_else(|| TargetProblem::Port(shortened(text)))
}

fn parse_sandbox(text: &str) -> Result<String, TargetProblem> {
    let valid = (1..=LONGEST_ID).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    if valid { Ok(text.to_owned()) } else { Err(TargetProblem::Sandbox(shortened(text))) }
}

/// As much of a client's text as an answer repeats.
fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}

/// The form 8-4-4-4-12 of hex digits.
fn is_uuid(text: &str) -> bool {
    text.len() == UUID_LENGTH
        && text.bytes().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ID: &str = "01936f8e-72f5-7000-8000-000000000001";

    fn request(uri: &str, headers: &[(&str, &str)]) -> Request<()> {
        let mut request = Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).expect("valid request")
    }

    fn targets() -> Targets {
        Targets::new(vec!["Sbx.Example.test.".into(), "localhost".into()])
    }

    fn of(uri: &str, headers: &[(&str, &str)]) -> Option<Result<Target, TargetProblem>> {
        targets().of(&request(uri, headers))
    }

    fn to(port: u16, via: Via) -> Option<Result<Target, TargetProblem>> {
        Some(Ok(Target { sandbox: ID.into(), port, via }))
    }

    #[test]
    fn a_host_below_a_domain_names_port_and_sandbox() {
        for host in [
            format!("8080-{ID}.sbx.example.test"),
            format!("8080-{ID}.SBX.example.test:3000"),
            format!("8080-{ID}.sbx.example.test."),
            format!("8080-{ID}-some-client.sbx.example.test"),
            format!("8080-{}.localhost", ID.to_uppercase()),
        ] {
            assert_eq!(of("/health", &[("host", &host)]), to(8080, Via::Host), "{host}");
        }
        let absolute = format!("http://8080-{ID}.localhost:3000/x");
        assert_eq!(of(&absolute, &[("host", "other")]), to(8080, Via::Host), "an absolute URI wins over Host");
        let other = of("/", &[("host", "80-ixyz123-c.localhost")]).expect("data plane").expect("target");
        assert_eq!(other.sandbox, "ixyz123");
    }

    #[test]
    fn a_host_wins_over_headers() {
        let host = format!("8080-{ID}.localhost");
        let headers = [("host", host.as_str()), ("e2b-sandbox-id", "other"), ("e2b-sandbox-port", "1")];
        assert_eq!(of("/", &headers), to(8080, Via::Host));
        // The guest's own path, whatever it looks like.
        assert_eq!(of("/proxy/x", &headers), to(8080, Via::Host));
    }

    #[test]
    fn other_hosts_are_the_control_plane() {
        let id_host = format!("8080-{ID}.elsewhere.test");
        for host in ["api.localhost", "localhost", "127.0.0.1:3000", "[::1]:3000", "my-api.localhost", &id_host] {
            assert_eq!(of("/sandboxes", &[("host", host)]), None, "{host}");
        }
        assert_eq!(of("/sandboxes", &[]), None);
        assert_eq!(of("/proxying", &[]), None);
        let nested = format!("80-{ID}.deep.localhost");
        assert_eq!(of("/", &[("host", &nested)]), None);
    }

    #[test]
    fn headers_name_a_target_under_either_name_and_any_path() {
        for (id, port) in [("E2b-Sandbox-Id", "E2b-Sandbox-Port"), ("x-agentenv-sandbox-id", "x-agentenv-target-port")]
        {
            let headers = [("host", "localhost"), (id, ID), (port, "49983")];
            assert_eq!(of("/health", &headers), to(49983, Via::Headers));
            assert_eq!(of("/proxy/health", &headers), to(49983, Via::Prefix));
            assert_eq!(of("/proxy", &headers), to(49983, Via::Prefix));
        }
        let shared = [("host", "sandbox.localhost"), ("e2b-sandbox-id", ID), ("e2b-sandbox-port", "1")];
        assert_eq!(of("/", &shared), to(1, Via::Headers));
    }

    #[test]
    fn what_cannot_be_routed_says_what_is_wrong() {
        let problem = |uri: &str, headers: &[(&str, &str)]| match of(uri, headers) {
            Some(Err(problem)) => problem.to_string(),
            other => panic!("{other:?}"),
        };
        assert_eq!(problem("/proxy/", &[]), "routing header e2b-sandbox-id is missing");
        assert_eq!(problem("/", &[("host", "sandbox.localhost")]), "routing header e2b-sandbox-id is missing");
        assert_eq!(problem("/", &[("e2b-sandbox-id", ID)]), "routing header e2b-sandbox-port is missing");
        assert_eq!(problem("/", &[("e2b-sandbox-port", "80")]), "routing header e2b-sandbox-id is missing");
        for port in ["0", "65536", "+80", "-1", "", "http", " 80x"] {
            let text = problem("/", &[("e2b-sandbox-id", ID), ("e2b-sandbox-port", port)]);
            assert!(text.ends_with("is not a port (expected 1 to 65535)"), "{text}");
        }
        assert!(problem("/", &[("host", &format!("70000-{ID}.localhost"))]).starts_with("\"70000\" is not a port"));
        let two = [("e2b-sandbox-id", ID), ("x-agentenv-sandbox-id", "other"), ("e2b-sandbox-port", "80")];
        assert_eq!(problem("/", &two), "routing header e2b-sandbox-id is given with different values");
        let bad = problem("/", &[("e2b-sandbox-id", "a/../b"), ("e2b-sandbox-port", "80")]);
        assert_eq!(bad, "\"a/../b\" is not a sandbox id");
        let same = [("e2b-sandbox-id", ID), ("x-agentenv-sandbox-id", ID), ("e2b-sandbox-port", "80")];
        assert_eq!(of("/", &same), to(80, Via::Headers));
    }

    #[test]
    fn only_the_prefix_is_taken_off_the_path() {
        for (path, guest) in [
            ("/proxy", "/"),
            ("/proxy/", "/"),
            ("/proxy//api", "//api"),
            ("/proxy?a=%2F", "?a=%2F"),
            ("/proxy/a%20b/%E2%82%AC?q=%26;x", "/a%20b/%E2%82%AC?q=%26;x"),
            ("/proxy/proxy/x", "/proxy/x"),
        ] {
            assert_eq!(guest_path(request(path, &[]).uri(), Via::Prefix), guest);
            assert_eq!(guest_path(request(path, &[]).uri(), Via::Headers), path);
        }
    }

    proptest! {
        #[test]
        fn every_port_and_id_in_a_host_comes_back(port in 1_u16.., low in any::<u128>(), tail in "(-[a-z0-9]{1,8})?") {
            let hex = format!("{low:032x}");
            let id = format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
            let host = format!("{port}-{id}{tail}.localhost");
            let target = of("/", &[("host", &host)]).expect("data plane").expect("target");
            prop_assert_eq!((target.port, target.sandbox), (port, id));
        }

        #[test]
        fn no_header_or_host_panics(host in "[ -~]{0,80}", id in "[ -~]{0,40}", port in "[ -~]{0,8}") {
            let mut request = request("/", &[("e2b-sandbox-id", &id), ("e2b-sandbox-port", &port)]);
            if let Ok(host) = host.parse() {
                request.headers_mut().insert(HOST, host);
            }
            let _ = targets().of(&request);
        }
    }
}
