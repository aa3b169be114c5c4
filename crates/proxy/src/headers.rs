//! What a request and its answer carry from one side to the other.

use http::header::{
    CONNECTION, EXPECT, HOST, HeaderValue, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, Method, Uri};

use crate::access::TRAFFIC_TOKEN;
use crate::target::{PORT_HEADERS, SANDBOX_HEADERS};

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
const FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");

/// Headers that concern one connection only (RFC 9110, 7.6.1). `Trailer` is not among them: it announces trailers, which
/// are passed on.
const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Makes a client's headers the guest's.
///
/// A key of the node's is taken out where it was sent along: it is none of the guest's business. Any other API key is the
/// user's own.
pub(crate) fn for_guest(headers: &mut HeaderMap, method: &Method, uri: &Uri, is_key: &dyn Fn(&[u8]) -> bool) {
    let upgrade = wanted_upgrade(headers);
    let trailers = lists(headers, &TE, "trailers");
    strip_hop_by_hop(headers);
    for name in SANDBOX_HEADERS.iter().chain(&PORT_HEADERS).chain([&TRAFFIC_TOKEN]) {
        headers.remove(name);
    }
    // Answered on this side, by the HTTP library, once the guest is there to take the body.
    headers.remove(EXPECT);
    if headers.contains_key(API_KEY) {
        let others: Vec<HeaderValue> =
            headers.get_all(API_KEY).iter().filter(|value| !is_key(value.as_bytes())).cloned().collect();
        headers.remove(API_KEY);
        for value in others {
            headers.append(API_KEY, value);
        }
    }
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    if let Some(protocol) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol);
    }

    // HTTP/2 names the host in the URI only.
    let authority = uri.authority().and_then(|authority| HeaderValue::from_str(authority.as_str()).ok());
    if let (false, Some(authority)) = (headers.contains_key(HOST), authority) {
        headers.insert(HOST, authority);
    }
    // A gateway or TLS terminator in front knows better than we do what the client used.
    if let (false, Some(host)) = (headers.contains_key(FORWARDED_HOST), headers.get(HOST).cloned()) {
        headers.insert(FORWARDED_HOST, host);
    }
    headers.entry(FORWARDED_PROTO).or_insert(HeaderValue::from_static("http"));
    if let Ok(method) = HeaderValue::from_str(method.as_str()) {
        headers.insert(FORWARDED_METHOD, method);
    }
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    if let Ok(path) = HeaderValue::from_bytes(path.as_bytes()) {
        headers.insert(FORWARDED_URI, path);
    }
}

/// Makes a guest's headers the client's; `upgraded` if the answer is a 101.
pub(crate) fn for_client(headers: &mut HeaderMap, upgraded: bool) {
    let upgrade = wanted_upgrade(headers).filter(|_| upgraded);
    strip_hop_by_hop(headers);
    if let Some(protocol) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol);
    }
}

/// The protocol that a message switches to, or wants to. Not HTTP/2: that is for us to speak or not, an offer that a client
/// may make to every server and that its request does not depend on.
pub(crate) fn wanted_upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    if lists(headers, &CONNECTION, "upgrade") && !lists(headers, &UPGRADE, "h2c") {
        headers.get(UPGRADE).cloned()
    } else {
        None
    }
}

/// Whether a comma-separated header lists `token`.
fn lists(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    tokens(headers, name).any(|listed| listed.eq_ignore_ascii_case(token))
}

fn tokens<'h>(headers: &'h HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'h str> {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(|token| token.split(';').next().unwrap_or_default().trim())
}

fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let listed: Vec<HeaderName> = tokens(headers, &CONNECTION).filter_map(|token| token.parse().ok()).collect();
    for name in listed.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HeaderMap {
        let parse = |(name, value): &(&str, &str)| -> (HeaderName, HeaderValue) {
            (name.parse().expect("name"), value.parse().expect("value"))
        };
        let mut headers = HeaderMap::new();
        for (name, value) in pairs.iter().map(parse) {
            headers.append(name, value);
        }
        headers
    }

    fn sent(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = map(pairs);
        for_guest(&mut headers, &Method::PUT, &"/proxy/a?b".parse().expect("uri"), &|key| key == b"e2b_platform");
        headers
    }

    #[test]
    fn what_is_not_the_guests_is_taken_out() {
        let headers = sent(&[
            ("host", "node:3000"),
            ("connection", "keep-alive, X-Private"),
            ("x-private", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers;q=1, gzip"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("proxy-authorization", "secret"),
            ("expect", "100-continue"),
            ("e2b-sandbox-id", "x"),
            ("e2b-sandbox-port", "80"),
            ("x-agentenv-sandbox-id", "x"),
            ("x-agentenv-target-port", "80"),
            ("e2b-traffic-access-token", "secret"),
            ("x-api-key", "e2b_platform"),
            ("x-access-token", "kept"),
            ("authorization", "kept"),
        ]);
        let expected = map(&[
            ("host", "node:3000"),
            ("te", "trailers"),
            ("x-access-token", "kept"),
            ("authorization", "kept"),
            ("x-forwarded-host", "node:3000"),
            ("x-forwarded-proto", "http"),
            ("x-forwarded-method", "PUT"),
            ("x-forwarded-uri", "/proxy/a?b"),
        ]);
        assert_eq!(headers, expected);
    }

    #[test]
    fn an_api_key_that_is_not_the_platforms_passes() {
        let headers = sent(&[("x-api-key", "e2b_platform"), ("x-api-key", "the user's")]);
        assert_eq!(headers.get_all("x-api-key").iter().collect::<Vec<_>>(), ["the user's"]);
    }

    #[test]
    fn an_upgrade_passes_both_ways_and_only_as_one() {
        let headers = sent(&[("connection", "Upgrade"), ("upgrade", "websocket"), ("sec-websocket-protocol", "chat")]);
        assert_eq!(
            (&headers["connection"], &headers["upgrade"]),
            (&"upgrade".parse().unwrap(), &"websocket".parse().unwrap())
        );
        assert_eq!(headers["sec-websocket-protocol"], "chat");
        let mut answer = map(&[("connection", "upgrade"), ("upgrade", "websocket")]);
        for_client(&mut answer, true);
        assert_eq!(answer["upgrade"], "websocket");
        for_client(&mut answer, false);
        assert!(answer.is_empty());
    }

    #[test]
    fn an_offer_of_http2_stays_here() {
        let offer = [("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c"), ("http2-settings", "AAMAAABk")];
        let headers = sent(&offer);
        for name in ["connection", "upgrade", "http2-settings"] {
            assert!(!headers.contains_key(name), "{name}");
        }
    }

    #[test]
    fn what_a_gateway_said_of_the_client_is_kept() {
        let headers = sent(&[("host", "node"), ("x-forwarded-host", "public.test"), ("x-forwarded-proto", "https")]);
        assert_eq!(
            (&headers["x-forwarded-host"], &headers["x-forwarded-proto"]),
            (&"public.test".parse().unwrap(), &"https".parse().unwrap())
        );
    }
}
