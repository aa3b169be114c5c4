//! Changes of a template that is there: its tags, and who is told that they may use it.

use std::collections::BTreeSet;

use aenv_durable::StoreError;
use aenv_model::BuildId;
use aenv_repository::RepositoryError;
use jiff::Timestamp;

use crate::record::{DEFAULT_TAG, TemplateRecord};
use crate::templates::{NameProblem, Templates, check_tag, check_tags, split_tag};

/// Why a template is as it was.
#[derive(Debug, thiserror::Error)]
pub enum ChangeTemplateError {
    /// No template or no tag of that name.
    #[error("template '{0}' not found")]
    NotFound(String),
    /// A tag that there cannot be.
    #[error(transparent)]
    Name(#[from] NameProblem),
    /// What sandboxes start from whose creator names no tag is not taken away.
    #[error("the tag '{DEFAULT_TAG}' cannot be removed")]
    Default,
    /// Nodes share no such thing.
    #[error("this cannot be changed for templates in a repository that nodes share")]
    Shared,
    /// What nodes share.
    #[error("look for the template among what nodes share")]
    Repository(#[from] RepositoryError),
    /// The node store.
    #[error("record the change of a template")]
    Store(#[from] StoreError),
}

impl Templates {
    /// Lets `tags` stand for the build that `target`, a name or `name:tag`, stands for. Gives the build.
    ///
    /// Cancel safety: if dropped, it is done all the same.
    pub async fn assign_tags(&self, target: &str, tags: &[String]) -> Result<BuildId, ChangeTemplateError> {
        if let (_, Some(tag)) = split_tag(target) {
            check_tag(tag)?;
        }
        check_tags(tags)?;
        let (wanted, tags) = (target.to_owned(), tags.to_vec());
        self.change(target, move |record| {
            let tag = split_tag(&wanted).1.unwrap_or(DEFAULT_TAG);
            let build = record.tagged(tag).ok_or_else(|| ChangeTemplateError::NotFound(wanted.clone()))?.id;
            record.assign(&tags, build, Timestamp::now());
            Ok(build)
        })
        .await
    }

    /// Takes tags away. A build that has no other goes.
    ///
    /// Cancel safety: if dropped, it is done all the same.
    pub async fn remove_tags(&self, name: &str, tags: &[String]) -> Result<(), ChangeTemplateError> {
        check_tags(tags)?;
        if tags.iter().any(|tag| tag == DEFAULT_TAG) {
            return Err(ChangeTemplateError::Default);
        }
        let (name, tags): (_, BTreeSet<_>) = (name.to_owned(), tags.iter().cloned().collect());
        self.change(&name.clone(), move |record| {
            if let Some(missing) = tags.iter().find(|tag| !record.tags.contains_key(*tag)) {
                return Err(ChangeTemplateError::NotFound(format!("{name}:{missing}")));
            }
            record.tags.retain(|tag, _| !tags.contains(tag));
            Ok(())
        })
        .await
    }

    /// Says whether everybody may use it. Gives its name.
    ///
    /// Cancel safety: if dropped, it is done all the same.
    pub async fn set_public(&self, reference: &str, public: bool) -> Result<String, ChangeTemplateError> {
        self.change(reference, move |record| {
            record.public = public;
            Ok(record.name.clone())
        })
        .await
    }

    /// Changes a template of this node's own, on disk and then for all to see.
    async fn change<T: Send + 'static>(
        &self,
        reference: &str,
        change: impl FnOnce(&mut TemplateRecord) -> Result<T, ChangeTemplateError> + Send + 'static,
    ) -> Result<T, ChangeTemplateError> {
        let missing = || ChangeTemplateError::NotFound(reference.to_owned());
        let name = split_tag(reference).0.to_owned();
        let found = self.find(&name).await?.ok_or_else(missing)?;
        if found.shared {
            return Err(ChangeTemplateError::Shared);
        }
        let (templates, reference) = (self.clone(), reference.to_owned());
        let change = async move {
            let _writer = templates.inner.writer.lock().await;
            let mut record = templates.known(&name).ok_or(ChangeTemplateError::NotFound(reference))?;
            let changed = change(&mut record)?;
            let id = record.id;
            let dropped = record.drop_untagged();
            templates.save(record).await?;
            for build in dropped {
                templates.retire(id, build);
            }
            Ok(changed)
        };
        self.detached(change).await.unwrap_or(Err(StoreError::Closed.into()))
    }
}
