//! What lists print: a table for people, the server's own words as JSON for programs.

use std::io::{self, IsTerminal as _, Write as _};

use comfy_table::{ContentArrangement, Table, presets};
use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::args::Format;

/// Standard output did not take what we had to say.
#[derive(Debug, thiserror::Error)]
#[error("write to standard output")]
pub(crate) struct OutputError(#[from] io::Error);

/// Prints `text` and a newline.
pub(crate) fn line(text: impl std::fmt::Display) -> Result<(), OutputError> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    Ok(out.flush()?)
}

/// Prints one object for programs, or a sentence about it.
pub(crate) fn object(
    value: &impl serde::Serialize,
    format: Option<Format>,
    sentence: impl std::fmt::Display,
) -> anyhow::Result<()> {
    match format {
        Some(Format::Json) => line(serde_json::to_string_pretty(value)?)?,
        _ => line(sentence)?,
    }
    Ok(())
}

/// Prints a list in the format asked for: by default a table on a terminal, JSON otherwise.
///
/// Errors: an item that is no `T`, for a table; standard output.
pub(crate) fn list<T: DeserializeOwned>(
    items: &[Value],
    format: Option<Format>,
    header: &[&str],
    row: impl Fn(T) -> Vec<String>,
) -> anyhow::Result<()> {
    let default = if io::stdout().is_terminal() { Format::Table } else { Format::Json };
    match format.unwrap_or(default) {
        Format::Json => line(serde_json::to_string_pretty(items)?)?,
        Format::Table => line(table(items, header, row)?)?,
    }
    Ok(())
}

/// A list as columns under a header.
pub(crate) fn table<T: DeserializeOwned>(
    items: &[Value],
    header: &[&str],
    row: impl Fn(T) -> Vec<String>,
) -> Result<String, serde_json::Error> {
    let mut table = Table::new();
    // Cells are never wrapped or cut: ids are made to be copied.
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header);
    for item in items {
        table.add_row(row(serde_json::from_value(item.clone())?));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    Ok(table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n"))
}

/// A cell's text, `-` for nothing.
pub(crate) fn cell(text: Option<&str>) -> String {
    text.filter(|text| !text.is_empty()).unwrap_or("-").to_owned()
}

/// A time to the second, in UTC.
/// A text of somebody else's for a terminal: what controls it is escaped.
pub(crate) fn shown(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut shown, character| {
        if character.is_control() {
            shown.extend(character.escape_default())
        } else {
            shown.push(character)
        }
        shown
    })
}

pub(crate) fn time(time: Timestamp) -> String {
    time.strftime("%Y-%m-%d %H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(item: Value) -> Vec<String> {
        vec![cell(item["id"].as_str()), cell(item["name"].as_str())]
    }

    #[test]
    fn a_table_has_a_header_and_a_dash_for_what_is_missing() {
        let items = [json!({"id": "a-long-identity", "name": "x"}), json!({"id": "b"})];
        let text = table(&items, &["ID", "NAME"], row).unwrap();
        assert_eq!(text, "ID               NAME\na-long-identity  x\nb                -");
    }

    #[test]
    fn an_empty_table_is_its_header() {
        assert_eq!(table(&[], &["ID", "NAME"], row).unwrap(), "ID  NAME");
    }

    #[test]
    fn times_are_given_to_the_second() {
        let time_ = "2026-01-31T12:00:00.123Z".parse().unwrap();
        assert_eq!(time(time_), "2026-01-31 12:00:00Z");
    }
}
