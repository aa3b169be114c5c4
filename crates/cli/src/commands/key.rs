//! `aenv key`: create, list, revoke.

use aenv_api::{ApiKeyInfo, Client, KeyScope, NewApiKey};
use serde_json::Value;

use crate::args::{KeyCreation, Listing};
use crate::output::{self, time};

/// The key alone is on standard output, for a script to keep: it is told this once.
pub(crate) async fn create(client: &Client, creation: &KeyCreation) -> anyhow::Result<()> {
    let scope = if creation.read { KeyScope::Read } else { KeyScope::Admin };
    let created = client.create_key(&NewApiKey { name: creation.name.clone(), scope }).await?;
    output::object(&created, creation.output, &created.key)
}

pub(crate) async fn list(client: &Client, listing: &Listing) -> anyhow::Result<()> {
    let keys = client.list_keys().await?.iter().map(serde_json::to_value).collect::<Result<Vec<Value>, _>>()?;
    output::list(
        &keys,
        listing.output,
        &["KEY ID", "NAME", "SCOPE", "KEY", "CREATED", "LAST USED"],
        |key: ApiKeyInfo| {
            let mask = &key.mask;
            vec![
                key.id.to_string(),
                key.name,
                if key.scope == KeyScope::Read { "read".to_owned() } else { "admin".to_owned() },
                format!("{}{}…{}", mask.prefix, mask.masked_value_prefix, mask.masked_value_suffix),
                time(key.created_at),
                key.last_used.map_or_else(|| "-".to_owned(), time),
            ]
        },
    )
}

pub(crate) async fn revoke(client: &Client, id: &str) -> anyhow::Result<()> {
    client.revoke_key(id).await?;
    Ok(output::line(format_args!("Revoked key {id}"))?)
}
