//! `aenv profile`: several servers, each by a name.

use serde::{Deserialize, Serialize};

use crate::args::Listing;
use crate::credentials::Surroundings;
use crate::output::{self, cell};

/// A profile as it is told: never with its key.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    name: String,
    url: Option<String>,
    current: bool,
}

pub(crate) fn list(surroundings: &Surroundings, listing: &Listing) -> anyhow::Result<()> {
    let current = surroundings.profile()?;
    let told = surroundings.profiles()?.into_iter().map(|profile| Told {
        current: profile.name == current,
        url: profile.credentials.ok().map(|credentials| credentials.url),
        name: profile.name,
    });
    let items = told.map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
    output::list(&items, listing.output, &["NAME", "SERVER", "CURRENT"], |told: Told| {
        vec![told.name, cell(told.url.as_deref()), cell(told.current.then_some("*"))]
    })
}

pub(crate) fn choose(surroundings: &Surroundings, name: &str) -> anyhow::Result<()> {
    surroundings.choose(name)?;
    Ok(output::line(format_args!("Using profile {name}"))?)
}

pub(crate) fn delete(surroundings: &Surroundings, name: &str) -> anyhow::Result<()> {
    surroundings.delete(name)?;
    Ok(output::line(format_args!("Deleted profile {name}"))?)
}
