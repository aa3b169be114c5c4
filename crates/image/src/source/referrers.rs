//! Images that somebody made of another one and put beside it: the referrers of its manifest.
//!
//! A registry lists them at `/v2/NAME/referrers/DIGEST`, in pages if there are many. For registries that can't, clients
//! keep the same list under a tag that is made of the digest.

use oci_client::secrets::RegistryAuth;
use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderMap, LINK};
use reqwest::{Response, StatusCode, Url};
use serde::Deserialize;

use super::MAX_METADATA;
use super::manifest::Descriptor;
use crate::digest::Digest;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// What overlaybd images of other images are called, the better one first: overlaybd's own, and Azure's.
const WANTED: [&str; 2] =
    ["application/vnd.containerd.overlaybd.native.v1+json", "application/vnd.azure.artifact.streaming.v1"];
/// Pages of one list.
const MAX_PAGES: usize = 32;
/// How much of an error's body is told.
const MAX_WORDS: usize = 300;

/// The referrer to try: the first of the best kind.
pub(super) fn choose(entries: &[Descriptor]) -> Option<&Descriptor> {
    let of = |wanted: &str| entries.iter().find(|entry| entry.artifact_type.as_deref() == Some(wanted));
    WANTED.iter().find_map(|wanted| of(wanted))
}

/// The tag under which clients keep the list where registries don't.
pub(super) fn tag(digest: &Digest) -> String {
    format!("{}-{}", digest.algorithm_name(), digest.hex())
}

/// Where a list is, and what we prove ourselves with.
pub(super) struct Place<'a> {
    pub(super) client: &'a reqwest::Client,
    /// Scheme and host.
    pub(super) registry: &'a str,
    pub(super) repository: &'a str,
    /// Goes before `auth`.
    pub(super) token: Option<&'a str>,
    pub(super) auth: &'a RegistryAuth,
}

/// Why a list could not be read.
#[derive(Debug)]
pub(super) enum ListError {
    /// No answer.
    Request(reqwest::Error),
    /// A status that is no success, and the answer's first words.
    Status(u16, String),
    /// An answer that makes no sense, in words.
    Malformed(String),
}

#[derive(Deserialize)]
struct Page {
    manifests: Vec<Descriptor>,
}

/// All that refers to the manifest `digest`; `None` if the registry keeps no such lists.
pub(super) async fn list(place: &Place<'_>, digest: &Digest) -> Result<Option<Vec<Descriptor>>, ListError> {
    let first = format!("{}/v2/{}/referrers/{digest}", place.registry, place.repository);
    let mut url = Url::parse(&first).map_err(|error| ListError::Malformed(error.to_string()))?;
    let mut entries = Vec::new();
    for _ in 0..MAX_PAGES {
        let request = place.client.get(url.clone()).header(ACCEPT, INDEX);
        let request = match (place.token, place.auth) {
            (Some(token), _) => request.bearer_auth(token),
            (None, RegistryAuth::Basic(username, password)) => request.basic_auth(username, Some(password)),
            (None, _) => request,
        };
        let response = request.send().await.map_err(ListError::Request)?;
        let status = response.status();
        // Some that have no such interface serve a page for people instead.
        if status == StatusCode::NOT_FOUND || (status.is_success() && !is_index(response.headers())) {
            return Ok(None);
        }
        let next = next(&url, response.headers())?;
        let body = read(response).await?;
        if !status.is_success() {
            let words = String::from_utf8_lossy(&body).chars().take(MAX_WORDS).collect();
            return Err(ListError::Status(status.as_u16(), words));
        }
        let page: Page = serde_json::from_slice(&body).map_err(|error| ListError::Malformed(error.to_string()))?;
        entries.extend(page.manifests);
        match next {
            Some(next) => url = next,
            None => return Ok(Some(entries)),
        }
    }
    Err(ListError::Malformed(format!("they take more than {MAX_PAGES} pages")))
}

fn is_index(headers: &HeaderMap) -> bool {
    let text = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    text.split(';').next().is_some_and(|media_type| media_type.trim() == INDEX)
}

/// The next page, from `Link: <URL>; rel="next"`. It must be at the same registry, which gets our proof.
fn next(url: &Url, headers: &HeaderMap) -> Result<Option<Url>, ListError> {
    let links = headers.get_all(LINK).iter().filter_map(|value| value.to_str().ok());
    let link = links.flat_map(|links| links.split(',')).find_map(|link| {
        let (target, parameters) = link.trim().strip_prefix('<')?.split_once('>')?;
        let is_next = |parameter: &str| matches!(parameter.trim(), r#"rel="next""# | "rel=next");
        parameters.split(';').any(is_next).then_some(target)
    });
    let Some(link) = link else { return Ok(None) };
    let next = url.join(link).map_err(|error| ListError::Malformed(error.to_string()))?;
    if next.origin() != url.origin() {
        return Err(ListError::Malformed("their next page is at another host".to_owned()));
    }
    Ok(Some(next))
}

async fn read(mut response: Response) -> Result<Vec<u8>, ListError> {
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await.map_err(ListError::Request)? {
        if (body.len() + piece.len()) as u64 > MAX_METADATA {
            return Err(ListError::Malformed(format!("a page takes more than {MAX_METADATA} bytes")));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::super::manifest::Manifest;
    use super::*;

    #[test]
    fn the_referrer_to_try_is_chosen_as_others_do() {
        let cases: serde_json::Value =
            serde_json::from_str(include_str!("../../tests/fixtures/oci/referrers.json")).unwrap();
        let cases = cases["cases"].as_array().unwrap();
        assert_eq!(cases.len(), 5);
        for case in cases {
            let index = serde_json::to_vec(&case["index"]).unwrap();
            let Manifest::Index(entries) = Manifest::parse("x", &index).unwrap() else { panic!("no index") };
            let chosen = choose(&entries).map(|entry| entry.digest.as_str());
            assert_eq!(chosen, case["expect"].as_str(), "{}", case["id"]);
        }
    }

    #[test]
    fn the_next_page_is_where_the_link_says_but_at_no_other_host() {
        let url = Url::parse("https://a.io/v2/x/referrers/d").unwrap();
        let next = |link: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(LINK, link.parse().unwrap());
            next(&url, &headers).map(|next| next.map(String::from))
        };
        assert_eq!(
            next(r#"</v2/x/referrers/d?n=2>; rel="next""#).unwrap().unwrap(),
            "https://a.io/v2/x/referrers/d?n=2"
        );
        assert_eq!(next(r#"<a>; rel=prev, <d?n=2>; rel=next"#).unwrap().unwrap(), "https://a.io/v2/x/referrers/d?n=2");
        assert_eq!(next(r#"<x>; rel="prev""#).unwrap(), None);
        assert!(next(r#"<https://b.io/x>; rel="next""#).is_err());
        assert!(next(r#"<http://a.io/x>; rel="next""#).is_err());
    }
}
