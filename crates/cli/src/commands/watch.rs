//! `aenv ls --watch`: the list of sandboxes, again and again.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

use aenv_api::{Client, ClientError, ListedSandbox};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::time::{MissedTickBehavior, interval};

use super::sandboxes;
use crate::args::{Format, Listing};
use crate::output::{self, OutputError, cell, time};

/// Time between two looks.
const POLL: Duration = Duration::from_secs(2);
/// Looks in a row that may fail.
const MAX_FAILED_POLLS: u32 = 10;

/// Never returns by itself. On a terminal the list is drawn over; elsewhere each change of a sandbox is a line.
///
/// Errors: the server refuses, or does not answer for long.
pub(crate) async fn run(client: &Client, listing: &Listing) -> anyhow::Result<()> {
    let live = io::stdout().is_terminal();
    let json = match listing.output {
        Some(format) => format == Format::Json,
        None => !live,
    };
    let mut known = BTreeMap::new();
    let mut failed = 0;
    let mut ticks = interval(POLL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    if live && !json {
        draw("\x1b[2J")?;
    }
    loop {
        ticks.tick().await;
        let items = match sandboxes::all(client).await {
            Ok(items) => items,
            Err(error) if is_passing(&error) && failed < MAX_FAILED_POLLS => {
                failed += 1;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        failed = 0;
        if live && !json {
            let table = output::table(&items, &sandboxes::HEADER, sandboxes::row)?;
            let now = time(Timestamp::now());
            // Each line is cleared to its end, and what was below: no flicker.
            let lines = table.replace('\n', "\x1b[K\n");
            draw(&format!("\x1b[H{now} · {}\x1b[K\n{lines}\x1b[K\n\x1b[J", client.server()))?;
            continue;
        }
        for item in changes(&mut known, items) {
            output::line(if json { item.to_string() } else { text(&item)? })?;
        }
    }
}

fn draw(text: &str) -> Result<(), OutputError> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

fn is_passing(error: &ClientError) -> bool {
    error.status().is_none_or(|status| status.is_server_error())
}

/// What is new or different, as the server has it, and what is gone, with that as its state. `known` is brought up to
/// date.
fn changes(known: &mut BTreeMap<String, Value>, items: Vec<Value>) -> Vec<Value> {
    let id = |item: &Value| item["sandboxID"].as_str().unwrap_or_default().to_owned();
    let now: BTreeMap<_, _> = items.iter().map(|item| (id(item), item.clone())).collect();
    let gone = known.keys().filter(|id| !now.contains_key(*id)).map(|id| json!({"sandboxID": id, "state": "gone"}));
    // The list has the newest first; told is what came first.
    let different = items.iter().rev().filter(|item| known.get(&id(item)) != Some(item)).cloned();
    let changes = gone.chain(different).collect();
    *known = now;
    changes
}

fn text(item: &Value) -> Result<String, serde_json::Error> {
    let now = time(Timestamp::now());
    let (id, state) = (cell(item["sandboxID"].as_str()), cell(item["state"].as_str()));
    if state == "gone" {
        return Ok(format!("{now}  {id}  {state}"));
    }
    let sandbox: ListedSandbox = serde_json::from_value(item.clone())?;
    let template = sandbox.alias.unwrap_or_else(|| sandbox.template_id.to_string());
    Ok(format!("{now}  {id}  {state}  {template}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_changed_is_told_and_what_is_gone() {
        let item = |id: &str, state: &str| json!({"sandboxID": id, "state": state});
        let mut known = BTreeMap::new();
        let (a, b) = (item("a", "running"), item("b", "running"));
        assert_eq!(changes(&mut known, vec![b.clone(), a.clone()]), [a.clone(), b.clone()]);
        assert!(changes(&mut known, vec![b.clone(), a.clone()]).is_empty());
        let paused = item("b", "paused");
        assert_eq!(changes(&mut known, vec![paused.clone()]), [item("a", "gone"), paused.clone()]);
        assert_eq!(changes(&mut known, Vec::new()), [item("b", "gone")]);
    }
}
