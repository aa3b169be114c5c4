//! Identity tokens: what `docker login` keeps for registries that give one. They are good for one thing, to be traded
//! for an access token at the place that the registry's challenge names.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;

/// What a form's values must not hold as it is.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Why no access token was given for an identity token.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// It could not be asked for.
    #[error("ask for an access token")]
    Request(#[source] reqwest::Error),
    /// The server's words.
    #[error("the token server refuses: {0}")]
    Refused(String),
}

#[derive(Deserialize)]
struct Answer {
    access_token: String,
}

/// Trades an identity token for an access token that may pull `repository`; `None` if the registry, which is given by
/// scheme and host, wants none.
///
/// Cancel safety: asking twice does no harm.
pub async fn exchange_identity(
    client: &reqwest::Client,
    registry: &str,
    repository: &str,
    identity: &str,
) -> Result<Option<String>, ExchangeError> {
    let challenged = client.get(format!("{registry}/v2/")).send().await.map_err(ExchangeError::Request)?;
    let headers = challenged.headers().get_all(reqwest::header::WWW_AUTHENTICATE);
    let Some(challenge) = headers.iter().find_map(|header| Challenge::parse(header.to_str().ok()?)) else {
        return Ok(None);
    };
    let scope = format!("repository:{repository}:pull");
    let fields = [
        ("grant_type", "refresh_token"),
        ("client_id", "aenv"),
        ("service", &challenge.service),
        ("scope", &scope),
        ("refresh_token", identity),
    ];
    let form: Vec<String> =
        fields.iter().map(|(key, value)| format!("{key}={}", utf8_percent_encode(value, RESERVED))).collect();
    let answer = client
        .post(&challenge.realm)
        .header(reqwest::header::CONTENT_TYPE, "application/x-www-form-urlencoded")
        .body(form.join("&"))
        .send()
        .await
        .map_err(ExchangeError::Request)?;
    let status = answer.status();
    let body = answer.text().await.map_err(ExchangeError::Request)?;
    match serde_json::from_str::<Answer>(&body) {
        Ok(answer) if status.is_success() => Ok(Some(answer.access_token)),
        _ if status.is_success() => Err(ExchangeError::Refused("the token server gave no access token".to_owned())),
        _ => Err(ExchangeError::Refused(body)),
    }
}

/// A challenge for a bearer token.
#[derive(Debug, PartialEq, Eq)]
struct Challenge {
    realm: String,
    service: String,
}

impl Challenge {
    /// Reads `Bearer realm="…",service="…"`. `None` for any other scheme.
    fn parse(header: &str) -> Option<Self> {
        let (scheme, mut rest) = header.trim_start().split_once(' ')?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let (mut realm, mut service) = (None, String::new());
        while let Some((key, after)) = rest.split_once('=') {
            let (value, after) = match after.strip_prefix('"') {
                Some(quoted) => quoted.split_once('"')?,
                None => after.split_once(',').unwrap_or((after, "")),
            };
            match key.trim_matches([' ', ',']) {
                "realm" => realm = Some(value.to_owned()),
                "service" => service = value.to_owned(),
                _ => {}
            }
            rest = after;
        }
        Some(Self { realm: realm?, service })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bearer_challenge_names_the_place_and_the_service() {
        let expected = Challenge { realm: "https://a.io/t?x=1,2".into(), service: "a.io".into() };
        for header in [
            r#"Bearer realm="https://a.io/t?x=1,2",service="a.io",scope="repository:x:pull""#,
            r#"bearer service=a.io, realm="https://a.io/t?x=1,2""#,
        ] {
            assert_eq!(Challenge::parse(header).as_ref(), Some(&expected), "{header}");
        }
        for header in ["", "Bearer", r#"Basic realm="x""#, r#"Bearer service="x""#, r#"Bearer realm="x"#] {
            assert_eq!(Challenge::parse(header), None, "{header}");
        }
    }
}
