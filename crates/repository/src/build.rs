//! Builds of templates: who asked for one, who does it, how it ended.

use aenv_model::{BuildId, TemplateId};
use aenv_objects::{Condition, Version};

use crate::alias::State;
use crate::error::RepositoryError;
use crate::lease::Needs;
use crate::record::{Build, BuildStatus, ErrorReason, Found, Record, Resources, Source};
use crate::repository::{ATTEMPTS, Repository, Written};

impl Repository {
    /// A fresh build for the name `alias`, which waits for a node. The template is made if the name is new; else its newest
    /// build becomes this one, and sandboxes go on starting from what they did.
    ///
    /// Errors: [`Taken`](RepositoryError::Taken) if the name is a snapshot's, or is being claimed at this moment.
    /// Cancel safety: if dropped, it is done or not; a name may stay claimed for [`Options::claim`](crate::Options::claim).
    pub async fn announce(&self, alias: &str, resources: Resources) -> Result<(Record, BuildId), RepositoryError> {
        let taken = || RepositoryError::Taken { alias: alias.to_owned() };
        for _ in 0..ATTEMPTS {
            let now = self.now();
            let build = |id| Build {
                id,
                status: BuildStatus::Waiting,
                resources,
                created_at: now,
                started_at: None,
                finished_at: None,
                error_reason: None,
            };
            match self.holder(alias).await?.state {
                State::Held(mut record, version) => {
                    let Source::Template { build: newest } = &mut record.source else { return Err(taken()) };
                    let id = BuildId::new();
                    *newest = build(id);
                    record.updated_at = now;
                    if self.write(&record, Condition::Is(version)).await? == Written::Done {
                        return Ok((*record, id));
                    }
                }
                State::Claimed(_) | State::Unknown(_) => return Err(taken()),
                State::Free => {
                    let id = TemplateId::new();
                    let record = Record {
                        id,
                        alias: Some(alias.to_owned()),
                        source: Source::Template { build: build(id.into()) },
                        resources,
                        created_at: now,
                        updated_at: now,
                        committed: None,
                    };
                    match self.announce_new(&record, alias).await {
                        Ok(()) => return Ok((record, id.into())),
                        // Somebody else has made the template at this moment: it is a build of that one.
                        Err(RepositoryError::Taken { .. }) => {}
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        Err(RepositoryError::Contended { what: format!("the name '{alias}'") })
    }

    async fn announce_new(&self, record: &Record, alias: &str) -> Result<(), RepositoryError> {
        let needs = Needs { aliases: [alias.to_owned()].into(), ..Needs::default() };
        let lease = self.lease(needs).await?;
        let written = async {
            let before = self.bind(alias, record.id).await?;
            self.write_in_time(record, Some(before)).await
        };
        let written = written.await;
        self.release(lease).await;
        written
    }

    /// Writes the record of a fresh id, unless it is too late for its name.
    pub(crate) async fn write_in_time(
        &self,
        record: &Record,
        before: Option<jiff::Timestamp>,
    ) -> Result<(), RepositoryError> {
        if before.is_some_and(|before| before <= self.now()) {
            return Err(RepositoryError::Late { doing: "claiming a name" });
        }
        match self.write(record, Condition::Absent).await? {
            Written::Done => Ok(()),
            Written::Conflict => Err(RepositoryError::Contended { what: record.id.to_string() }),
        }
    }

    /// Takes up a waiting build. Of several who do so at once, one succeeds.
    ///
    /// Errors: [`NotFound`](RepositoryError::NotFound) if there is no such build, [`Started`](RepositoryError::Started) if
    /// somebody else does it.
    pub async fn claim(&self, template: TemplateId, build: BuildId) -> Result<Record, RepositoryError> {
        let now = self.now();
        self.change_build(template, build, |build| match build.status {
            BuildStatus::Waiting => {
                build.status = BuildStatus::Building;
                build.started_at = Some(now);
                Ok(())
            }
            _ => Err(RepositoryError::Started),
        })
        .await
    }

    /// Records that a build failed. One that is not the newest any more needs no record.
    pub async fn fail(
        &self,
        template: TemplateId,
        build: BuildId,
        reason: ErrorReason,
    ) -> Result<Record, RepositoryError> {
        let now = self.now();
        self.change_build(template, build, |build| {
            build.status = BuildStatus::Error;
            build.finished_at = Some(now);
            build.error_reason = Some(reason.clone());
            Ok(())
        })
        .await
    }

    async fn change_build(
        &self,
        template: TemplateId,
        build: BuildId,
        change: impl Fn(&mut Build) -> Result<(), RepositoryError>,
    ) -> Result<Record, RepositoryError> {
        for _ in 0..ATTEMPTS {
            let (mut record, version) = self.existing(template).await?;
            match &mut record.source {
                Source::Template { build: newest } if newest.id == build => change(newest)?,
                _ => return Err(RepositoryError::NotFound(build.to_string())),
            }
            record.updated_at = self.now();
            if self.write(&record, Condition::Is(version)).await? == Written::Done {
                return Ok(record);
            }
        }
        Err(RepositoryError::Contended { what: template.to_string() })
    }

    /// The record of `id` with its version.
    pub(crate) async fn existing(&self, id: TemplateId) -> Result<(Record, Version), RepositoryError> {
        match self.look(id).await? {
            Some((Found::Record(record), version)) => Ok((*record, version)),
            Some((Found::Unknown(problem), _)) => {
                Err(RepositoryError::Corrupt { what: format!("the record of {id}"), problem })
            }
            Some((Found::Deleted { .. }, _)) | None => Err(RepositoryError::NotFound(id.to_string())),
        }
    }
}
