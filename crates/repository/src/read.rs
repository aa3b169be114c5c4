//! Finding records.

use std::collections::BTreeSet;

use aenv_model::TemplateId;
use futures::{StreamExt, stream};

use crate::alias::State;
use crate::error::RepositoryError;
use crate::layout;
use crate::record::{Found, Record};
use crate::repository::Repository;

/// All records.
#[derive(Debug, Default)]
pub struct Listing {
    /// Those that are understood, in the order of their ids.
    pub records: Vec<Record>,
    /// Those that are not, and are kept.
    pub problems: Vec<Problem>,
}

/// A record that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where it is.
    pub key: String,
    /// What is wrong.
    pub problem: String,
}

impl Repository {
    /// The record with this id or, if there is none, this name.
    ///
    /// Errors: [`NotFound`](RepositoryError::NotFound), [`Corrupt`](RepositoryError::Corrupt) for what is not understood.
    pub async fn find(&self, reference: &str) -> Result<Record, RepositoryError> {
        let missing = || RepositoryError::NotFound(reference.to_owned());
        let corrupt = |problem| RepositoryError::Corrupt { what: format!("the record of '{reference}'"), problem };
        if let Ok(id) = reference.parse::<TemplateId>() {
            match self.look(id).await? {
                Some((Found::Record(record), _)) => return Ok(*record),
                Some((Found::Unknown(problem), _)) => return Err(corrupt(problem)),
                Some((Found::Deleted { .. }, _)) | None => {}
            }
        }
        if layout::alias(reference).is_err() {
            return Err(missing()); // nothing can have such a name
        }
        match self.holder(reference).await?.state {
            State::Held(record, _) => Ok(*record),
            State::Unknown(problem) => Err(corrupt(problem)),
            State::Free | State::Claimed(_) => Err(missing()),
        }
    }

    /// All records. One that vanishes meanwhile, or cannot be read, hides no other.
    pub async fn list(&self) -> Result<Listing, RepositoryError> {
        let folder = layout::key(layout::RECORDS.to_owned())?;
        let found = self.store().list(Some(&folder)).await?;
        let reads = found.into_iter().map(|info| {
            let repository = self.clone();
            async move {
                let no_id = || "its name is no id".to_owned();
                let read = match layout::record_of(&info.key) {
                    Some(id) => repository.look(id).await,
                    None => Err(RepositoryError::Corrupt { what: info.key.to_string(), problem: no_id() }),
                };
                (info.key, read)
            }
        });
        let mut reads = stream::iter(reads).buffered(self.options().reads_at_once.max(1));
        let mut listing = Listing::default();
        while let Some((key, read)) = reads.next().await {
            let problem = match read {
                Ok(Some((Found::Record(record), _))) => {
                    listing.records.push(*record);
                    continue;
                }
                Ok(Some((Found::Deleted { .. }, _)) | None) => continue,
                Ok(Some((Found::Unknown(problem), _))) => problem,
                Err(error) => error.report(),
            };
            listing.problems.push(Problem { key: key.to_string(), problem });
        }
        Ok(listing)
    }

    /// Layers that the record names, each once.
    pub(crate) fn layers(record: &Record) -> BTreeSet<crate::Digest> {
        let files = record.committed.iter().flat_map(|committed| &committed.files);
        files.filter(|file| file.managed).map(|file| file.digest.clone()).collect()
    }
}
