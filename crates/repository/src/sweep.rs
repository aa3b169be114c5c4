//! Removing garbage: what no record and no lease needs.

use std::collections::BTreeSet;

use aenv_model::TemplateId;
use aenv_objects::{Key, ObjectInfo};
use futures::{StreamExt, TryStreamExt, stream};
use jiff::Timestamp;

use crate::alias::State;
use crate::error::RepositoryError;
use crate::layout;
use crate::lease::{FoundLease, Needs, Turn};
use crate::read::Problem;
use crate::record::Found;
use crate::repository::Repository;

/// What a sweep removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Swept {
    /// Layers.
    pub layers: usize,
    /// Their bytes.
    pub layer_bytes: u64,
    /// Files of records that are gone, or have others now.
    pub artifacts: usize,
    /// Names that led nowhere.
    pub aliases: usize,
    /// What was left of deleted records.
    pub records: usize,
    /// Leases of publications that died.
    pub leases: usize,
    /// What was not understood, and is kept with all that it may need.
    pub problems: Vec<Problem>,
}

/// What must stay.
#[derive(Default)]
struct Needed {
    needs: Needs,
    /// Of records that are not understood: all of their files.
    unknown: BTreeSet<TemplateId>,
    /// Something may need any layer.
    any_layer: bool,
    /// Something may need anything.
    anything: bool,
    /// Being deleted.
    deleted: BTreeSet<TemplateId>,
}

impl Repository {
    /// Removes what no record and no lease needs. Publications that begin meanwhile wait.
    ///
    /// Errors: [`Busy`](RepositoryError::Busy) if another node sweeps; after others, what is left is the next sweep's.
    /// Cancel safety: if dropped, publications may have to wait for [`Options::turn`](crate::Options::turn).
    pub async fn sweep(&self) -> Result<Swept, RepositoryError> {
        let mut turn = self.take_turn().await?.ok_or(RepositoryError::Busy)?;
        let swept = self.sweep_in_turn(&mut turn).await;
        self.end_turn(turn).await;
        swept
    }

    async fn sweep_in_turn(&self, turn: &mut Turn) -> Result<Swept, RepositoryError> {
        let mut swept = Swept::default();
        // First leases, then records: a lease that is gone by now has its record written.
        let (mut needed, over) = self.leased().await?;
        self.recorded(&mut needed, &mut swept).await?;
        if needed.anything {
            return Ok(swept);
        }
        if !needed.any_layer {
            for info in self.folder(layout::LAYERS).await? {
                if layout::layer_of(&info.key).is_some_and(|digest| !needed.needs.layers.contains(&digest)) {
                    self.remove(turn, &info.key).await?;
                    swept.layers += 1;
                    swept.layer_bytes += info.size;
                }
            }
        }
        for info in self.folder(layout::ARTIFACTS).await? {
            let Some(owner) = layout::artifact_of(&info.key) else { continue };
            if !needed.needs.artifacts.contains(&owner) && !needed.unknown.contains(&owner.0) {
                self.remove(turn, &info.key).await?;
                swept.artifacts += 1;
            }
        }
        for info in self.folder(layout::ALIASES).await? {
            let Some(alias) = layout::alias_of(&info.key) else { continue };
            if !needed.needs.aliases.contains(alias) && matches!(self.holder(alias).await?.state, State::Free) {
                self.remove(turn, &info.key).await?;
                swept.aliases += 1;
            }
        }
        // After all that it had: what is left of a record says that it must go.
        for id in needed.deleted {
            self.remove(turn, &layout::record(id)?).await?;
            swept.records += 1;
        }
        for key in over {
            self.remove(turn, &key).await?;
            swept.leases += 1;
        }
        Ok(swept)
    }

    async fn folder(&self, folder: &str) -> Result<Vec<ObjectInfo>, RepositoryError> {
        Ok(self.store().list(Some(&layout::key(folder.to_owned())?)).await?)
    }

    async fn remove(&self, turn: &mut Turn, key: &Key) -> Result<(), RepositoryError> {
        self.hold(turn).await?;
        Ok(self.store().delete(key).await?)
    }

    /// What leases need, and which are over.
    async fn leased(&self) -> Result<(Needed, Vec<Key>), RepositoryError> {
        let found = self.folder(layout::LEASES).await?;
        let looks = found.into_iter().map(|info| {
            let repository = self.clone();
            async move {
                let modified = Timestamp::try_from(info.modified).unwrap_or(Timestamp::MAX);
                let lease = repository.look_at_lease(&info.key, modified).await?;
                Ok::<_, RepositoryError>((info.key, lease))
            }
        });
        let looks = stream::iter(looks).buffer_unordered(self.options().reads_at_once.max(1));
        let (mut needed, mut over) = (Needed::default(), Vec::new());
        for (key, lease) in looks.try_collect::<Vec<_>>().await? {
            match lease {
                None => {}
                Some(FoundLease::Over) => over.push(key),
                Some(FoundLease::Unknown) => needed.anything = true,
                Some(FoundLease::Holds(needs)) => {
                    needed.needs.aliases.extend(needs.aliases);
                    needed.needs.layers.extend(needs.layers);
                    needed.needs.artifacts.extend(needs.artifacts);
                }
            }
        }
        Ok((needed, over))
    }

    /// What records need.
    async fn recorded(&self, needed: &mut Needed, swept: &mut Swept) -> Result<(), RepositoryError> {
        let found = self.folder(layout::RECORDS).await?;
        let looks = found.into_iter().map(|info| {
            let repository = self.clone();
            async move {
                let id = layout::record_of(&info.key);
                let found = match id {
                    Some(id) => repository.look(id).await,
                    None => Ok(None),
                };
                (info.key, id, found)
            }
        });
        let mut looks = stream::iter(looks).buffer_unordered(self.options().reads_at_once.max(1));
        while let Some((key, id, found)) = looks.next().await {
            let Some(id) = id else { continue };
            let problem = match found {
                Ok(None) => continue,
                Ok(Some((Found::Record(record), _))) => {
                    needed.needs.layers.extend(Self::layers(&record));
                    needed.needs.artifacts.extend(record.committed.map(|committed| (id, committed.capture)));
                    needed.needs.aliases.extend(record.alias);
                    continue;
                }
                Ok(Some((Found::Deleted { .. }, _))) => {
                    needed.deleted.insert(id);
                    continue;
                }
                Ok(Some((Found::Unknown(problem), _))) => problem,
                Err(error) => error.report(),
            };
            needed.unknown.insert(id);
            needed.any_layer = true;
            swept.problems.push(Problem { key: key.to_string(), problem });
        }
        Ok(())
    }
}
