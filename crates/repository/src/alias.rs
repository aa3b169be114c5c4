//! Whose a name is.
//!
//! A binding is an object that is only ever changed by conditional writes; the sweep alone removes one, in its turn. It leads
//! to an id, and means something only as long as that id's record has the name too.

use aenv_model::TemplateId;
use aenv_objects::Condition;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::error::RepositoryError;
use crate::layout;
use crate::record::{Found, Record, millis};
use crate::repository::{ATTEMPTS, Repository, Written, later};

const VERSION: u32 = 1;

/// What a name's object says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Binding {
    version: u32,
    /// Whose it is; nobody's after it was given up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<TemplateId>,
    #[serde(rename = "bound_at_unix_ms", with = "millis")]
    pub(crate) bound_at: Timestamp,
}

/// A name as it was found.
#[derive(Debug)]
pub(crate) struct Holder {
    /// What a write over it depends on.
    pub(crate) condition: Condition,
    pub(crate) state: State,
}

#[derive(Debug)]
pub(crate) enum State {
    /// Anybody may have it.
    Free,
    /// It is somebody's whose record is on its way.
    Claimed(TemplateId),
    /// It leads to this record.
    Held(Box<Record>, aenv_objects::Version),
    /// It leads to what we do not understand, or is such a thing.
    Unknown(String),
}

impl Repository {
    /// Looks where a name leads.
    pub(crate) async fn holder(&self, alias: &str) -> Result<Holder, RepositoryError> {
        let Some((bytes, version)) = self.read_object(&layout::alias(alias)?).await? else {
            return Ok(Holder { condition: Condition::Absent, state: State::Free });
        };
        let condition = Condition::Is(version);
        let state = match serde_json::from_slice::<Binding>(&bytes) {
            Ok(Binding { version, .. }) if version != VERSION => State::Unknown(format!("it has format {version}")),
            Ok(Binding { id: None, .. }) => State::Free,
            Ok(Binding { id: Some(id), bound_at, .. }) => match self.look(id).await? {
                Some((Found::Record(record), version)) if record.alias.as_deref() == Some(alias) => {
                    State::Held(record, version)
                }
                Some((Found::Unknown(problem), _)) => State::Unknown(problem),
                Some((Found::Deleted { .. }, _)) => State::Free,
                Some((Found::Record(_), _)) | None => {
                    match self.now() < later(bound_at, self.options().claim + self.options().margin) {
                        true => State::Claimed(id),
                        false => State::Free,
                    }
                }
            },
            Err(error) => State::Unknown(format!("unreadable: {error}")),
        };
        Ok(Holder { condition, state })
    }

    /// Makes a name lead to `id`, whose record is about to be written: before the time that is given.
    pub(crate) async fn bind(&self, alias: &str, id: TemplateId) -> Result<Timestamp, RepositoryError> {
        let taken = || RepositoryError::Taken { alias: alias.to_owned() };
        for _ in 0..ATTEMPTS {
            let holder = self.holder(alias).await?;
            match holder.state {
                State::Free => {}
                State::Claimed(holder) if holder == id => {}
                State::Claimed(_) | State::Held(..) | State::Unknown(_) => return Err(taken()),
            }
            let bound_at = self.now();
            let binding = encode(&Binding { version: VERSION, id: Some(id), bound_at });
            match self.write_object(&layout::alias(alias)?, binding, holder.condition).await? {
                Written::Done => return Ok(later(bound_at, self.options().claim)),
                Written::Conflict => {}
            }
        }
        Err(RepositoryError::Contended { what: format!("the name '{alias}'") })
    }

    /// Gives a name up, if it is `id`'s.
    pub(crate) async fn unbind(&self, alias: &str, id: TemplateId) -> Result<(), RepositoryError> {
        let key = layout::alias(alias)?;
        let Some((bytes, version)) = self.read_object(&key).await? else { return Ok(()) };
        match serde_json::from_slice::<Binding>(&bytes) {
            Ok(binding) if binding.version == VERSION && binding.id == Some(id) => {
                let free = encode(&Binding { version: VERSION, id: None, bound_at: self.now() });
                // Whoever was quicker has it.
                self.write_object(&key, free, Condition::Is(version)).await.map(drop)
            }
            _ => Ok(()),
        }
    }
}

fn encode(binding: &Binding) -> bytes::Bytes {
    // A struct of numbers and an id always becomes JSON.
    serde_json::to_vec(binding).unwrap_or_default().into()
}
