//! What a download's request headers ask for: encoding, range, freshness. Pure functions of headers and file facts.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderValue, header};
use jiff::Timestamp;
use jiff::fmt::rfc2822;

/// How a body is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    Identity,
    Gzip,
}

/// Chooses by the q-values of `Accept-Encoding`; `None` if the client accepts neither. A range or a condition refers to
/// the plain bytes and forces them.
pub(super) fn encoding(headers: &HeaderMap) -> Option<Encoding> {
    let forces_identity = [
        header::RANGE,
        header::IF_RANGE,
        header::IF_MODIFIED_SINCE,
        header::IF_UNMODIFIED_SINCE,
        header::IF_MATCH,
        header::IF_NONE_MATCH,
    ];
    if forces_identity.iter().any(|name| headers.contains_key(name)) {
        return Some(Encoding::Identity);
    }
    let Some(accepted) = headers.get(header::ACCEPT_ENCODING).and_then(|value| value.to_str().ok()) else {
        return Some(Encoding::Identity);
    };
    let (mut gzip, mut identity, mut any) = (None, None, None);
    for item in accepted.split(',') {
        let mut parts = item.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let quality = parts
            .find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")))
            .map_or(1.0, |q| q.parse::<f32>().unwrap_or(0.0));
        match name.to_ascii_lowercase().as_str() {
            "gzip" | "x-gzip" => gzip = Some(quality),
            "identity" => identity = Some(quality),
            "*" => any = Some(quality),
            _ => {}
        }
    }
    let gzip = gzip.or(any).unwrap_or(0.0);
    // Identity is acceptable unless ruled out, but only as the last resort when it is not named.
    let named_identity = identity.or(any.filter(|q| *q == 0.0));
    match named_identity {
        Some(identity) if identity > gzip => Some(Encoding::Identity),
        _ if gzip > 0.0 => Some(Encoding::Gzip),
        Some(0.0) => None,
        _ => Some(Encoding::Identity),
    }
}

/// Bytes `first` to `last`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ByteRange {
    pub(super) first: u64,
    last: u64,
}

impl ByteRange {
    pub(super) fn len(self) -> u64 {
        self.last - self.first + 1
    }

    pub(super) fn content_range(self, size: u64) -> HeaderValue {
        value(&format!("bytes {}-{}/{size}", self.first, self.last))
    }

    pub(super) fn unsatisfied(size: u64) -> HeaderValue {
        value(&format!("bytes */{size}"))
    }
}

fn value(text: &str) -> HeaderValue {
    // Digits and ASCII punctuation only.
    HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static("bytes */*"))
}

/// What a `Range` header comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RangeOutcome {
    Whole,
    Part(ByteRange),
    Unsatisfiable,
}

/// Reads a `Range` of one part. Several parts, or something unreadable, are answered with the whole file, as HTTP
/// allows; so is a range of an older version (`If-Range`).
pub(super) fn range(headers: &HeaderMap, size: u64, modified: Option<SystemTime>) -> RangeOutcome {
    let Some(text) = headers.get(header::RANGE).and_then(|value| value.to_str().ok()) else {
        return RangeOutcome::Whole;
    };
    if let Some(condition) = headers.get(header::IF_RANGE) {
        let same = modified.is_some_and(|modified| condition.to_str().is_ok_and(|date| date == http_date(modified)));
        if !same {
            return RangeOutcome::Whole;
        }
    }
    match parse_range(text, size) {
        None => RangeOutcome::Whole,
        Some(None) => RangeOutcome::Unsatisfiable,
        Some(Some(range)) => RangeOutcome::Part(range),
    }
}

/// Outer `None`: not a single well-formed range. Inner `None`: outside the file.
fn parse_range(text: &str, size: u64) -> Option<Option<ByteRange>> {
    let (first, last) = text.strip_prefix("bytes=")?.trim().split_once('-')?;
    if first.is_empty() {
        let suffix: u64 = last.parse().ok()?;
        let range = (suffix > 0 && size > 0)
            .then(|| ByteRange { first: size.saturating_sub(suffix), last: size.saturating_sub(1) });
        return Some(range);
    }
    let first: u64 = first.parse().ok()?;
    let last = if last.is_empty() { u64::MAX } else { last.parse().ok()? };
    if last < first {
        return None;
    }
    Some((first < size).then(|| ByteRange { first, last: last.min(size - 1) }))
}

/// The file has not changed since the client's copy (whole seconds, which is all the date carries).
pub(super) fn not_modified(headers: &HeaderMap, modified: SystemTime) -> bool {
    let since = headers.get(header::IF_MODIFIED_SINCE).and_then(|value| parse_date(value.to_str().ok()?));
    let seconds = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    since.is_some_and(|since| seconds(modified) <= seconds(since))
}

fn parse_date(text: &str) -> Option<SystemTime> {
    let zoned = rfc2822::DateTimeParser::new().parse_zoned(text.replace("GMT", "+0000")).ok()?;
    Some(zoned.timestamp().into())
}

/// A date as HTTP writes it.
pub(super) fn http_date(time: SystemTime) -> String {
    let timestamp = Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH);
    // Only years beyond 9999 have no such form.
    rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&timestamp).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: header::HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, value.parse().unwrap())])
    }

    #[test]
    fn the_best_acceptable_encoding_is_chosen() {
        use Encoding::{Gzip, Identity};
        let cases = [
            ("gzip, deflate", Some(Gzip)),
            ("identity", Some(Identity)),
            ("zstd, gzip;q=0.5, br", Some(Gzip)),
            ("gzip;q=0.5, identity;q=0.8", Some(Identity)),
            ("gzip;q=0", Some(Identity)),
            ("br", Some(Identity)),
            ("*", Some(Gzip)),
            ("identity;q=0, br", None),
            ("*;q=0", None),
            ("", Some(Identity)),
        ];
        for (accepted, expected) in cases {
            assert_eq!(encoding(&headers(header::ACCEPT_ENCODING, accepted)), expected, "{accepted:?}");
        }
        let mut ranged = headers(header::ACCEPT_ENCODING, "gzip");
        ranged.insert(header::RANGE, "bytes=0-1".parse().unwrap());
        assert_eq!(encoding(&ranged), Some(Identity));
    }

    #[test]
    fn one_range_is_cut_to_the_file() {
        use RangeOutcome::{Part, Unsatisfiable, Whole};
        let part = |first, last| Part(ByteRange { first, last });
        let cases = [
            ("bytes=0-3", part(0, 3)),
            ("bytes=5-", part(5, 9)),
            ("bytes=-3", part(7, 9)),
            ("bytes=-30", part(0, 9)),
            ("bytes=8-100", part(8, 9)),
            ("bytes=10-", Unsatisfiable),
            ("bytes=-0", Unsatisfiable),
            ("bytes=3-1", Whole),
            ("bytes=0-1,3-4", Whole),
            ("lines=1-2", Whole),
        ];
        for (text, expected) in cases {
            assert_eq!(range(&headers(header::RANGE, text), 10, None), expected, "{text}");
        }
    }

    #[test]
    fn dates_survive_the_round_trip() {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        assert_eq!(http_date(time), "Sun, 06 Nov 1994 08:49:37 GMT");
        assert!(not_modified(&headers(header::IF_MODIFIED_SINCE, &http_date(time)), time));
        let later = time + Duration::from_secs(1);
        assert!(!not_modified(&headers(header::IF_MODIFIED_SINCE, &http_date(time)), later));
    }
}
