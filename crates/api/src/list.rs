//! The query of a sandbox list.
//!
//! [`ListQuery`] is what stands in the URL, as text, so that a wrong value can be answered by name; [`ListFilter`] is
//! what it means.

use std::collections::BTreeMap;

use jiff::Timestamp;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::{Deserialize, Serialize};

use crate::page::{Cursor, Order, ParseCursorError};
use crate::sandbox::SandboxState;

/// Largest page a client may ask for.
const MAX_LIMIT: usize = 100;

/// The query of `GET /v2/sandboxes`, each value as text after the ordinary query decoding.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ListQuery {
    /// `k=v&k2=v2`, encoded twice more: see [`decode_metadata_filter`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<String>,
    /// `running`, `paused`, or both with a comma.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// `asc` or `desc`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub order: Option<String>,
    /// RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_after: Option<String>,
    /// Template id or alias.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Items per page, 1 to 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// The previous page's `x-next-token`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_token: Option<String>,
}

/// What a [`ListQuery`] asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListFilter {
    /// Entries that a sandbox's metadata must all hold.
    pub metadata: BTreeMap<String, String>,
    /// States to list; absent: all.
    pub states: Option<Vec<SandboxState>>,
    /// Order by start.
    pub order: Order,
    /// Earliest start, inclusive.
    pub started_after: Option<Timestamp>,
    /// Template id or alias.
    pub template: Option<String>,
    /// Items per page; absent: no cut.
    pub limit: Option<usize>,
    /// The last item of the previous page.
    pub cursor: Option<Cursor>,
}

/// The query of a list that only has pages (`GET /v2/templates`), each value as text.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PageQuery {
    /// Items per page, 1 to 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// The previous page's `x-next-token`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_token: Option<String>,
}

/// A list query that means nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseListQueryError {
    /// The metadata filter is no list of `key=value`.
    #[error("invalid metadata filter: {pair:?} is not key=value in percent-encoding")]
    Metadata {
        /// The part that is not.
        pair: String,
    },
    /// A value is not of its kind.
    #[error("invalid {key} {value:?}: expected {expected}")]
    Value {
        /// The query key.
        key: &'static str,
        /// The value given.
        value: String,
        /// What would be understood.
        expected: &'static str,
    },
    /// The page token is foreign.
    #[error(transparent)]
    Cursor(#[from] ParseCursorError),
}

impl ListQuery {
    /// What the query asks for.
    ///
    /// Errors: the first value that is not of its kind, by name.
    pub fn parse(&self) -> Result<ListFilter, ParseListQueryError> {
        let invalid =
            |key, value: &str, expected| ParseListQueryError::Value { key, value: value.to_owned(), expected };
        let metadata = self.metadata.as_deref().map(decode_metadata_filter).transpose()?.unwrap_or_default();
        let states = self.state.as_deref().filter(|text| !text.is_empty()).map(|text| {
            let refuse = || invalid("state", text, "running, paused, or both separated by a comma");
            // Some clients encode the comma once more than a query needs.
            let list = form_decode(text).ok_or_else(refuse)?;
            list.split(',').map(|state| SandboxState::from_name(state.trim()).ok_or_else(refuse)).collect()
        });
        let order = match self.order.as_deref() {
            None => Order::default(),
            Some("asc") => Order::Asc,
            Some("desc") => Order::Desc,
            Some(other) => return Err(invalid("order", other, "asc or desc")),
        };
        let started_after = self.started_after.as_deref().map(|text| {
            text.parse().map_err(|_| invalid("startedAfter", text, "an RFC 3339 time such as 2026-01-31T12:00:00Z"))
        });
        Ok(ListFilter {
            metadata,
            states: states.transpose()?,
            order,
            started_after: started_after.transpose()?,
            template: self.template.clone(),
            limit: self.limit.as_deref().map(parse_limit).transpose()?,
            cursor: self.next_token.as_deref().filter(|token| !token.is_empty()).map(str::parse).transpose()?,
        })
    }
}

impl PageQuery {
    /// Items per page, if there is a cut, and the last item of the previous page.
    ///
    /// Errors: the first value that is not of its kind, by name.
    pub fn parse(&self) -> Result<(Option<usize>, Option<Cursor>), ParseListQueryError> {
        let limit = self.limit.as_deref().map(parse_limit).transpose()?;
        Ok((limit, self.next_token.as_deref().map(str::parse).transpose()?))
    }
}

/// A page's `limit`, 1 to 100. Errors: anything else, by name.
fn parse_limit(text: &str) -> Result<usize, ParseListQueryError> {
    text.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit)).ok_or_else(|| ParseListQueryError::Value {
        key: "limit",
        value: text.to_owned(),
        expected: "a whole number from 1 to 100",
    })
}

/// Reads the `metadata` filter after the ordinary query decoding.
///
/// SDKs encode three times in all: the query itself, the joined `k=v&k2=v2`, and each key and value. The second and
/// third are undone here, in that order, so that `&` and `=` may occur within keys and values. An empty text is an empty
/// filter. Errors: a pair without `=`, broken percent-encoding, text that is not UTF-8.
pub fn decode_metadata_filter(text: &str) -> Result<BTreeMap<String, String>, ParseListQueryError> {
    let refuse = |pair: &str| ParseListQueryError::Metadata { pair: pair.to_owned() };
    let joined = form_decode(text).ok_or_else(|| refuse(text))?;
    let pairs = joined.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (key, value) = pair.split_once('=').ok_or_else(|| refuse(pair))?;
        let decode = |part: &str| form_decode(part).ok_or_else(|| refuse(pair));
        Ok((decode(key)?, decode(value)?))
    });
    pairs.collect()
}

/// Writes a `metadata` filter as [`decode_metadata_filter`] reads it, still to be encoded as a query value.
#[must_use]
pub fn encode_metadata_filter<'a>(entries: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let encode = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let pairs: Vec<_> = entries.into_iter().map(|(k, v)| format!("{}={}", encode(k), encode(v))).collect();
    encode(&pairs.join("&"))
}

/// One decoding of a form: `+` is a space, `%XX` a byte. `None` for a broken escape or bytes that are not UTF-8.
fn form_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                let (high, low) = (digit()?, digit()?);
                u8::try_from(high << 4 | low).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn map(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
        entries.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn metadata_is_decoded_three_times_in_all() {
        // On the wire `metadata=a%252520b%3Dc%252526d`, as both SDKs send {"a b": "c&d"}; the server's query decoding
        // has undone the first.
        let wire = form_decode("a%252520b%3Dc%252526d").unwrap();
        assert_eq!(decode_metadata_filter(&wire), Ok(map(&[("a b", "c&d")])));
    }

    #[test]
    fn a_plain_filter_needs_no_extra_encoding() {
        assert_eq!(decode_metadata_filter("user=abc&app=prod"), Ok(map(&[("user", "abc"), ("app", "prod")])));
        assert_eq!(decode_metadata_filter(""), Ok(map(&[])));
        assert_eq!(decode_metadata_filter("k="), Ok(map(&[("k", "")])));
    }

    #[test]
    fn a_malformed_filter_is_refused_with_the_part_that_is() {
        for bad in ["lonely", "a=b&lonely", "a=%25zz", "%", "a=%25ff"] {
            let error = decode_metadata_filter(bad).unwrap_err().to_string();
            assert!(error.contains("metadata"), "{error}");
        }
    }

    #[test]
    fn every_value_of_a_query_is_understood() {
        let query = ListQuery {
            metadata: Some("a=b".into()),
            state: Some("running%2Cpaused".into()),
            order: Some("asc".into()),
            started_after: Some("2026-01-31T12:00:00.5Z".into()),
            template: Some("base".into()),
            limit: Some("7".into()),
            next_token: Some(Cursor { time: Timestamp::UNIX_EPOCH, id: "x".into() }.token()),
        };
        let filter = query.parse().unwrap();
        assert_eq!(filter.metadata, map(&[("a", "b")]));
        assert_eq!(filter.states, Some(vec![SandboxState::Running, SandboxState::Paused]));
        assert_eq!(filter.order, Order::Asc);
        assert_eq!(filter.started_after.unwrap().to_string(), "2026-01-31T12:00:00.5Z");
        assert_eq!(filter.limit, Some(7));
        assert_eq!(filter.cursor.unwrap().id, "x");
        assert_eq!(ListQuery::default().parse(), Ok(ListFilter::default()));
    }

    #[test]
    fn a_wrong_value_is_answered_with_its_key() {
        let refuse = |query: ListQuery, key: &str| {
            let error = query.parse().unwrap_err().to_string();
            assert!(error.contains(key), "{error} should name {key}");
        };
        let some = |text: &str| Some(text.to_owned());
        refuse(ListQuery { state: some("running,gone"), ..Default::default() }, "state");
        refuse(ListQuery { order: some("up"), ..Default::default() }, "order");
        refuse(ListQuery { started_after: some("today"), ..Default::default() }, "startedAfter");
        refuse(ListQuery { limit: some("0"), ..Default::default() }, "limit");
        refuse(ListQuery { limit: some("101"), ..Default::default() }, "limit");
        refuse(ListQuery { next_token: some("zzz"), ..Default::default() }, "nextToken");
        let first = ListQuery { next_token: some(""), ..Default::default() };
        assert_eq!(first.parse(), Ok(ListFilter::default()), "an empty one is none");
    }

    proptest! {
        #[test]
        fn any_metadata_reads_back_as_written(entries in prop::collection::btree_map(".*", ".*", 0..5)) {
            let text = encode_metadata_filter(entries.iter().map(|(k, v)| (k.as_str(), v.as_str())));
            prop_assert_eq!(decode_metadata_filter(&text).unwrap(), entries);
        }
    }
}
