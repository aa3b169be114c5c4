//! From a name to an image: which registries are asked, in which order, and what may be used of what they have.

use std::sync::Arc;

use aenv_block_source::DockerConfig;
use oci_client::Reference;

use super::registry::Registry;
use super::{Content, Resolved};
use crate::credentials::{Credentials, from_docker};
use crate::error::{ImportError, ImportErrorKind};
use crate::importer::ImporterConfig;
use crate::reference::RegistryImage;

/// The rules of a node's configuration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resolver<'a> {
    pub(crate) config: &'a ImporterConfig,
    pub(crate) docker_config: Option<&'a Arc<DockerConfig>>,
}

impl Resolver<'_> {
    /// Looks an image up in the registries it may be in. The next one is asked only if the one before does not have
    /// it: an image of the same name elsewhere is no substitute for one that can't be reached just now.
    pub(crate) async fn find(
        &self,
        image: &RegistryImage,
        credentials: Option<Credentials>,
    ) -> Result<(Resolved, Registry), ImportError> {
        let mut candidates = image.candidates(&self.config.search_registries);
        if credentials.is_some() {
            // They are for one registry, and no other shall see them.
            candidates.truncate(1);
        }
        let mut failures = Vec::new();
        for candidate in self.allowed(image, candidates)? {
            match self.look_up(candidate, credentials.clone()).await {
                Ok(found) => return Ok(found),
                // Docker Hub, for one, says of repositories that don't exist that we are not authorized.
                Err(error) => match error.kind() {
                    ImportErrorKind::NotFound | ImportErrorKind::Unauthorized => failures.push(error),
                    _ => return Err(error),
                },
            }
        }
        match failures.pop() {
            Some(only) if failures.is_empty() => Err(only),
            Some(last) => {
                let words: Vec<_> = failures.iter().chain([&last]).map(ToString::to_string).collect();
                Err(ImportError::NotFound { image: image.to_string(), words: words.join("; ") })
            }
            None => Err(not_named(image)),
        }
    }

    /// Whether what was found may be used here.
    pub(crate) fn admit(&self, image: &str, found: &Resolved) -> Result<(), ImportError> {
        match found.content {
            Content::Standard(_) if !self.config.convert_standard_oci => {
                Err(ImportError::NoConversion { image: image.to_owned() })
            }
            Content::Standard(_) | Content::Native(_) => Ok(()),
        }
    }

    /// Those of `candidates` whose registries may be asked, which is an error if there are none.
    fn allowed(&self, image: &RegistryImage, candidates: Vec<Reference>) -> Result<Vec<Reference>, ImportError> {
        let Some(list) = &self.config.allowed_registries else { return Ok(candidates) };
        let may = |host: &str| list.iter().any(|known| named(known) == host);
        let (allowed, refused): (Vec<_>, Vec<_>) =
            candidates.into_iter().partition(|candidate| may(candidate.registry()));
        match (allowed.is_empty(), refused.is_empty()) {
            (false, _) => Ok(allowed),
            (true, true) => Err(not_named(image)),
            (true, false) => {
                let mut hosts: Vec<_> = refused.iter().map(Reference::registry).collect();
                hosts.dedup();
                let allowed = if list.is_empty() { "none".to_owned() } else { list.join(", ") };
                Err(ImportError::NotAllowed { registry: hosts.join(", "), allowed })
            }
        }
    }

    async fn look_up(
        &self,
        reference: Reference,
        credentials: Option<Credentials>,
    ) -> Result<(Resolved, Registry), ImportError> {
        let config = self.config;
        let found = match credentials {
            Some(credentials) => credentials.into(),
            None => from_docker(self.docker_config, reference.registry()).await,
        };
        let name = reference.whole();
        let referrers = config.referrers_prefixes.iter().any(|prefix| name.starts_with(prefix));
        let registry = Registry::new(reference, found, &config.plain_http_hosts, config.patience)?;
        Ok((registry.resolve(referrers).await?, registry))
    }
}

/// A host of a list, by the name that references have for it: Docker Hub goes by two.
fn named(host: &str) -> &str {
    match host {
        "index.docker.io" => "docker.io",
        host => host,
    }
}

fn not_named(image: &RegistryImage) -> ImportError {
    let words = "it names no registry, and no search registries are configured".to_owned();
    ImportError::NotFound { image: image.to_string(), words }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::ImageReference;

    /// The registries that are asked for an image, where `allowed` ones may be.
    fn asked(image: &str, search: &[&str], allowed: Option<&[&str]>) -> Result<Vec<String>, ImportErrorKind> {
        let config = ImporterConfig {
            search_registries: search.iter().map(|prefix| prefix.parse().unwrap()).collect(),
            allowed_registries: allowed.map(|list| list.iter().map(|host| (*host).to_owned()).collect()),
            ..ImporterConfig::default()
        };
        let ImageReference::Registry(image) = image.parse().unwrap() else { panic!("{image} is local") };
        let candidates = image.candidates(&config.search_registries);
        let resolver = Resolver { config: &config, docker_config: None };
        let allowed = resolver.allowed(&image, candidates).map_err(|error| error.kind())?;
        Ok(allowed.iter().map(Reference::whole).collect())
    }

    #[test]
    fn every_candidate_has_to_be_on_the_list() {
        let search = ["docker.io", "ghcr.io"];
        let (hub, ghcr) = ("docker.io/library/x:latest".to_owned(), "ghcr.io/x:latest".to_owned());
        assert_eq!(asked("x", &search, None), Ok(vec![hub.clone(), ghcr.clone()]));
        assert_eq!(asked("x", &search, Some(&["ghcr.io", "quay.io"])), Ok(vec![ghcr]));
        assert_eq!(asked("x", &search, Some(&["quay.io"])), Err(ImportErrorKind::NotAllowed));
        assert_eq!(asked("x", &search, Some(&[])), Err(ImportErrorKind::NotAllowed));
        assert_eq!(asked("x", &search, Some(&["index.docker.io"])), Ok(vec![hub]));
        assert_eq!(asked("a.io/x", &search, Some(&["a.io:443"])), Err(ImportErrorKind::NotAllowed));
        assert_eq!(asked("a.io:443/x", &search, Some(&["a.io:443"])), Ok(vec!["a.io:443/x:latest".to_owned()]));
    }

    #[test]
    fn a_short_name_without_search_registries_is_not_found() {
        assert_eq!(asked("x", &[], Some(&["a.io"])), Err(ImportErrorKind::NotFound));
        assert_eq!(asked("x", &[], None), Ok(vec![]));
    }
}
