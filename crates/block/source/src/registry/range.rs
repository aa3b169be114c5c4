//! One request for a range of a blob, wherever the registry keeps it.
//!
//! A registry either sends the bytes or names another place, a signed URL of its storage. That place is remembered and
//! asked directly until it refuses, and it never sees what we prove ourselves to the registry with.

use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use reqwest::header::{CONTENT_RANGE, LOCATION, RANGE, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode, Url};

use super::auth::{Auth, Proof};
use super::error::FetchProblem;

/// How long a redirect is believed. Signed URLs live longer; when one doesn't, it refuses and is forgotten.
const PLACE_LIFE: Duration = Duration::from_secs(300);
/// Redirects in a row that are followed.
const MAX_HOPS: usize = 4;
/// How much of an error's body is told.
const MAX_WORDS: usize = 300;

/// Where a blob was last found, when that is not its registry.
#[derive(Default)]
pub(super) struct Place(Mutex<Option<(Url, Instant)>>);

impl Place {
    fn get(&self) -> Option<Url> {
        let place = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        place.as_ref().filter(|(_, since)| since.elapsed() < PLACE_LIFE).map(|(url, _)| url.clone())
    }

    fn set(&self, place: Option<Url>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = place.map(|url| (url, Instant::now()));
    }
}

/// A signed URL lets in whoever has it: it is not shown.
impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Place").field(&self.get().map(|url| url.host_str().map(str::to_owned))).finish()
    }
}

/// An answer that holds what was asked for, as far as its headers say.
pub(super) struct Answer {
    pub(super) response: Response,
    /// Length of the blob, if the server told.
    pub(super) total: Option<u64>,
}

/// Asks for `range`, which is not empty, of the blob at `url`.
pub(super) async fn ask(
    client: &Client,
    url: &Url,
    auth: &Auth,
    place: &Place,
    range: Range<u64>,
) -> Result<Answer, FetchProblem> {
    if let Some(known) = place.get() {
        match follow(client, known, &range).await.and_then(|(response, _)| check(response, &range)) {
            Ok(answer) => return Ok(answer),
            // The registry knows a better place, or why there is none.
            Err(problem) => {
                let error = &problem as &dyn std::error::Error;
                tracing::debug!(%url, error, "a blob's known place failed, asking the registry again");
            }
        }
        place.set(None);
    }
    let mut pass = auth.pass().await;
    let mut response = get(client, url, &range, &pass.proof).await?;
    if is_refusal(response.status()) {
        pass = auth.renew(&pass).await?;
        response = get(client, url, &range, &pass.proof).await?;
        if is_refusal(response.status()) {
            if let Some(why) = pass.lacking {
                return Err(FetchProblem::Credentials(std::io::Error::other(why)));
            }
            let status = response.status();
            return Err(FetchProblem::Unauthorized(format!("HTTP status {status}: {}", words(response).await)));
        }
    }
    if response.status().is_redirection() {
        let (response, found) = follow(client, target(url, &response)?, &range).await?;
        let response = succeed(response).await?;
        let answer = check(response, &range)?;
        place.set(Some(found));
        return Ok(answer);
    }
    check(succeed(response).await?, &range)
}

fn is_refusal(status: StatusCode) -> bool {
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
}

async fn get(client: &Client, url: &Url, range: &Range<u64>, proof: &Proof) -> Result<Response, FetchProblem> {
    let request = client.get(url.clone()).header(RANGE, format!("bytes={}-{}", range.start, range.end - 1));
    Ok(proof.put_on(request).send().await?)
}

/// Follows redirects from `url` on, with no proof of ours. Gives the answer and the first place, which is the one to
/// remember: those behind it may differ for each request.
async fn follow(client: &Client, url: Url, range: &Range<u64>) -> Result<(Response, Url), FetchProblem> {
    let first = url.clone();
    let mut url = url;
    for _ in 0..MAX_HOPS {
        let response = get(client, &url, range, &Proof::Nothing).await?;
        if !response.status().is_redirection() {
            return Ok((response, first));
        }
        url = target(&url, &response)?;
    }
    Err(FetchProblem::Redirect(format!("more than {MAX_HOPS} in a row")))
}

/// Where a redirect leads.
fn target(from: &Url, response: &Response) -> Result<Url, FetchProblem> {
    let refused = |why: &str| FetchProblem::Redirect(why.to_owned());
    let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
    let target = from.join(location.ok_or_else(|| refused("it names no place"))?).map_err(|_| refused("no URL"))?;
    match (from.scheme(), target.scheme()) {
        (_, "https") | ("http", "http") => Ok(target),
        _ => Err(refused("it leaves https")),
    }
}

async fn succeed(response: Response) -> Result<Response, FetchProblem> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let seconds = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    let retry_after = seconds.map(Duration::from_secs);
    Err(FetchProblem::Status { status, words: words(response).await, retry_after })
}

/// The first words of an error's body.
async fn words(mut response: Response) -> String {
    let mut body = Vec::new();
    while body.len() < MAX_WORDS {
        let Ok(Some(piece)) = response.chunk().await else { break };
        body.extend_from_slice(&piece);
    }
    body.truncate(MAX_WORDS);
    String::from_utf8_lossy(&body).trim().to_owned()
}

/// Sees that the answer is the range that was asked for. A whole blob is taken only where all of it was wanted, which
/// the caller knows from `total`.
fn check(response: Response, range: &Range<u64>) -> Result<Answer, FetchProblem> {
    match response.status() {
        StatusCode::PARTIAL_CONTENT => {
            let header = response.headers().get(CONTENT_RANGE).and_then(|value| value.to_str().ok()).unwrap_or("");
            match parse(header) {
                Some((got, total)) if got == *range => Ok(Answer { response, total }),
                _ => Err(FetchProblem::WrongRange { asked: range.clone(), got: header.to_owned() }),
            }
        }
        StatusCode::OK => {
            let total = response.content_length();
            if range.start == 0 && total == Some(range.end) {
                return Ok(Answer { response, total });
            }
            Err(FetchProblem::RangeIgnored)
        }
        status => {
            Err(FetchProblem::Status { status, words: "neither a range nor a blob".to_owned(), retry_after: None })
        }
    }
}

/// Reads `bytes FIRST-LAST/TOTAL`, where the total may be `*`.
fn parse(header: &str) -> Option<(Range<u64>, Option<u64>)> {
    let (range, total) = header.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last) = (first.parse::<u64>().ok()?, last.parse::<u64>().ok()?);
    let total = match total {
        "*" => None,
        total => Some(total.parse().ok()?),
    };
    (first <= last && total.is_none_or(|total| last < total)).then_some((first..last.checked_add(1)?, total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_content_range_is_read_strictly() {
        assert_eq!(parse("bytes 0-0/1"), Some((0..1, Some(1))));
        assert_eq!(parse("bytes 5-9/*"), Some((5..10, None)));
        for bad in ["", "bytes */10", "bytes 5-4/10", "bytes 0-10/10", "items 0-1/2", "bytes 0-18446744073709551615/*"]
        {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
