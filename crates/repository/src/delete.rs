//! Deleting: the decision, then what goes with it.

use aenv_model::TemplateId;
use aenv_objects::Condition;
use tracing::warn;

use crate::error::RepositoryError;
use crate::layout;
use crate::record::Record;
use crate::repository::{ATTEMPTS, Repository, Written};

impl Repository {
    /// Deletes a template or snapshot. On return, no node finds it. Its layers stay for the sweep.
    ///
    /// Errors: [`NotFound`](RepositoryError::NotFound); after others it may be deleted or not.
    /// Cancel safety: if dropped, it is deleted or not, and all of it; the sweep removes what is left.
    pub async fn delete(&self, id: TemplateId) -> Result<Record, RepositoryError> {
        for _ in 0..ATTEMPTS {
            let (record, version) = self.existing(id).await?;
            let tombstone = record.tombstone(self.now());
            if self.write_object(&layout::record(id)?, tombstone, Condition::Is(version)).await? == Written::Conflict {
                continue;
            }
            // From here on it is deleted, whatever fails.
            if let Err(error) = self.clear_away(&record).await {
                warn!(template_id = %id, %error, "what is left of a deleted record is the sweep's");
            }
            return Ok(record);
        }
        Err(RepositoryError::Contended { what: id.to_string() })
    }

    async fn clear_away(&self, record: &Record) -> Result<(), RepositoryError> {
        if let Some(alias) = &record.alias {
            self.unbind(alias, record.id).await?;
        }
        if let Some(committed) = &record.committed {
            self.remove_artifacts(record.id, committed.capture).await?;
        }
        // Nobody writes over a tombstone, so this is what is removed.
        Ok(self.store().delete(&layout::record(record.id)?).await?)
    }
}
