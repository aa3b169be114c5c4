//! Pages of a list: newest (or oldest) first, cut after `limit` items, continued from an opaque token.
//!
//! A token names the last item that was given, not a position: items that appear or vanish between two pages neither
//! repeat nor hide others.

use std::cmp::Ordering;
use std::str::FromStr;

use base64::Engine as _;
use base64::alphabet::URL_SAFE;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Written without padding, so that it needs no escaping in a query; read with or without.
const TOKEN: GeneralPurpose = GeneralPurpose::new(
    &URL_SAFE,
    GeneralPurposeConfig::new().with_encode_padding(false).with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Which end of time a list starts with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// Oldest first.
    Asc,
    /// Newest first.
    #[default]
    Desc,
}

/// Where an item stands in a list: its time, and its id among items of the same time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor {
    /// When the item began.
    pub time: Timestamp,
    /// Its id.
    pub id: String,
}

/// A `nextToken` that no page of this list gave out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid nextToken: {0:?} is no token of this list")]
pub struct ParseCursorError(String);

impl Cursor {
    /// The opaque token that continues a list after this item.
    #[must_use]
    pub fn token(&self) -> String {
        TOKEN.encode(format!("{}__{}", self.time, self.id))
    }

    /// How two items follow each other: by time as `order` says, ties by id ascending.
    #[must_use]
    pub fn compare(&self, other: &Self, order: Order) -> Ordering {
        let by_time = match order {
            Order::Asc => self.time.cmp(&other.time),
            Order::Desc => other.time.cmp(&self.time),
        };
        by_time.then_with(|| self.id.cmp(&other.id))
    }
}

impl FromStr for Cursor {
    type Err = ParseCursorError;

    fn from_str(token: &str) -> Result<Self, ParseCursorError> {
        let parse = || {
            let text = String::from_utf8(TOKEN.decode(token).ok()?).ok()?;
            let (time, id) = text.split_once("__")?;
            Some(Self { time: time.parse().ok()?, id: id.to_owned() })
        };
        parse().ok_or_else(|| ParseCursorError(token.to_owned()))
    }
}

/// Sorts `items` by `order` and gives those after `after`, at most `limit`, with the token of the next page if some
/// are left. `key` says where an item stands.
#[must_use]
pub fn paginate<T>(
    mut items: Vec<T>,
    order: Order,
    after: Option<&Cursor>,
    limit: Option<usize>,
    key: impl Fn(&T) -> Cursor,
) -> (Vec<T>, Option<String>) {
    items.sort_by(|a, b| key(a).compare(&key(b), order));
    if let Some(after) = after {
        items.retain(|item| key(item).compare(after, order) == Ordering::Greater);
    }
    let Some(limit) = limit.filter(|limit| *limit < items.len()) else { return (items, None) };
    items.truncate(limit);
    let next = items.last().map(|last| key(last).token());
    (items, next)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(second: i64, id: &str) -> Cursor {
        Cursor { time: Timestamp::new(second, 123_456_789).unwrap(), id: id.to_owned() }
    }

    #[test]
    fn a_token_is_url_safe_and_reads_back_with_or_without_padding() {
        let cursor = at(1_700_000_000, "0190-aa");
        let token = cursor.token();
        assert!(token.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_'), "{token}");
        assert_eq!(token.parse(), Ok(cursor.clone()));
        let padded = format!("{token}{}", "=".repeat((4 - token.len() % 4) % 4));
        assert_eq!(padded.parse(), Ok(cursor));
    }

    #[test]
    fn what_is_no_token_is_refused_by_name() {
        for bad in ["", "!!!", "aGVsbG8", &TOKEN.encode("yesterday__x")] {
            let error = bad.parse::<Cursor>().unwrap_err().to_string();
            assert!(error.contains("nextToken"), "{error}");
        }
    }

    #[test]
    fn newest_comes_first_and_ties_go_by_id() {
        let items = vec![at(1, "b"), at(2, "z"), at(1, "a")];
        let ids = |order| {
            let (items, next) = paginate(items.clone(), order, None, None, Cursor::clone);
            assert_eq!(next, None);
            items.into_iter().map(|c| c.id).collect::<Vec<_>>()
        };
        assert_eq!(ids(Order::Desc), ["z", "a", "b"]);
        assert_eq!(ids(Order::Asc), ["a", "b", "z"]);
    }

    #[test]
    fn the_next_page_starts_after_an_item_that_is_gone_by_then() {
        let items = vec![at(3, "c"), at(2, "b"), at(1, "a")];
        let (page, next) = paginate(items, Order::Desc, None, Some(2), Cursor::clone);
        assert_eq!(page.len(), 2);
        let after: Cursor = next.unwrap().parse().unwrap();
        let (page, next) = paginate(vec![at(3, "c"), at(1, "a")], Order::Desc, Some(&after), Some(2), Cursor::clone);
        assert_eq!((page, next), (vec![at(1, "a")], None));
    }

    proptest! {
        #[test]
        fn pages_put_together_are_the_whole_list(
            seconds in prop::collection::vec(0i64..5, 0..40), limit in 1usize..7, ascending: bool
        ) {
            let order = if ascending { Order::Asc } else { Order::Desc };
            let items: Vec<_> = seconds.iter().enumerate().map(|(n, s)| at(*s, &format!("{n:02}"))).collect();
            let (whole, _) = paginate(items.clone(), order, None, None, Cursor::clone);
            let (mut joined, mut after) = (Vec::new(), None);
            loop {
                let (page, next) = paginate(items.clone(), order, after.as_ref(), Some(limit), Cursor::clone);
                prop_assert!(page.len() <= limit);
                joined.extend(page);
                let Some(next) = next else { break };
                after = Some(next.parse::<Cursor>().unwrap());
            }
            prop_assert_eq!(joined, whole);
        }
    }
}
