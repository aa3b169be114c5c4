//! Where an image is: in a registry, in a layout folder or in an archive.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use oci_client::Reference;
use serde::{Deserialize, Serialize};

/// An image, as a user names it.
///
/// | text | image |
/// | --- | --- |
/// | `oci:PATH[:TAG]` | an OCI image layout folder |
/// | `docker-archive:FILE[:TAG]` | what `docker save` writes; TAG may be `NAME:TAG` |
/// | anything else | `[HOST[:PORT]/]NAME[:TAG][@DIGEST]` in a registry |
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ImageReference {
    /// In a registry.
    Registry(RegistryImage),
    /// In an OCI image layout folder.
    OciLayout {
        /// The folder.
        path: PathBuf,
        /// The image's name in the folder's index; not needed if there is only one.
        tag: Option<String>,
    },
    /// In an archive made by `docker save` or the like.
    DockerArchive {
        /// The file.
        path: PathBuf,
        /// `TAG` or `NAME:TAG`; not needed if there is only one image.
        tag: Option<String>,
    },
}

/// An image in a registry, which may still have to be found out.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RegistryImage {
    /// Host with port; `None` for a short name, which is looked for in the search registries.
    pub registry: Option<String>,
    /// The name without the host: `library/ubuntu` where the host is `docker.io`, else as written.
    pub repository: String,
    /// `latest` if neither tag nor digest were given.
    pub tag: Option<String>,
    /// `ALGORITHM:HEX`; decides if both are given.
    pub digest: Option<String>,
}

/// A text that names no image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} names no image: {problem}")]
pub struct ParseReferenceError {
    text: String,
    problem: String,
}

impl FromStr for ImageReference {
    type Err = ParseReferenceError;

    fn from_str(text: &str) -> Result<Self, ParseReferenceError> {
        let refuse = |problem: String| ParseReferenceError { text: text.to_owned(), problem };
        if let Some(rest) = text.strip_prefix("oci:") {
            let (path, tag) = split_tag(rest).map_err(|problem| refuse(problem.into()))?;
            return Ok(Self::OciLayout { path, tag });
        }
        if let Some(rest) = text.strip_prefix("docker-archive:") {
            let (path, tag) = split_tag(rest).map_err(|problem| refuse(problem.into()))?;
            return Ok(Self::DockerArchive { path, tag });
        }
        let parsed: Reference = text.parse().map_err(|error: oci_client::ParseError| refuse(error.to_string()))?;
        // The parser lets them pass in a first component, which may have been a host.
        if parsed.repository().bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(refuse("a name must be in lower case".to_owned()));
        }
        let (tag, digest) = (parsed.tag().map(str::to_owned), parsed.digest().map(str::to_owned));
        let (registry, repository) = match has_host(text) {
            true => (Some(parsed.registry().to_owned()), parsed.repository().to_owned()),
            // The parser has made a Docker Hub image of it; what was written is wanted.
            false if text.starts_with("library/") => (None, parsed.repository().to_owned()),
            false => (None, parsed.repository().strip_prefix("library/").unwrap_or(parsed.repository()).to_owned()),
        };
        Ok(Self::Registry(RegistryImage { registry, repository, tag, digest }))
    }
}

/// `PATH[:TAG]`. The path's last component holds no colon.
fn split_tag(text: &str) -> Result<(PathBuf, Option<String>), &'static str> {
    let last = text.rfind('/').map_or(0, |slash| slash + 1);
    let (path, tag) = match text[last..].find(':') {
        Some(colon) => (&text[..last + colon], Some(&text[last + colon + 1..])),
        None => (text, None),
    };
    if path.is_empty() {
        return Err("the path is missing");
    }
    if tag.is_some_and(str::is_empty) {
        return Err("the tag is missing after the colon");
    }
    Ok((path.into(), tag.map(str::to_owned)))
}

/// Whether the first component is a host rather than part of a name: the rule that docker made.
fn has_host(text: &str) -> bool {
    let Some((first, _)) = text.split_once('/') else { return false };
    first == "localhost" || first.contains(['.', ':'])
}

impl fmt::Display for ImageReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, path, tag) = match self {
            Self::Registry(image) => return image.fmt(f),
            Self::OciLayout { path, tag } => ("oci", path, tag),
            Self::DockerArchive { path, tag } => ("docker-archive", path, tag),
        };
        write!(f, "{kind}:{}", path.display())?;
        tag.iter().try_for_each(|tag| write!(f, ":{tag}"))
    }
}

impl fmt::Display for RegistryImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(registry) = &self.registry {
            write!(f, "{registry}/")?;
        }
        f.write_str(&self.repository)?;
        self.tag.iter().try_for_each(|tag| write!(f, ":{tag}"))?;
        self.digest.iter().try_for_each(|digest| write!(f, "@{digest}"))
    }
}

impl TryFrom<String> for ImageReference {
    type Error = ParseReferenceError;

    fn try_from(text: String) -> Result<Self, ParseReferenceError> {
        text.parse()
    }
}

impl From<ImageReference> for String {
    fn from(reference: ImageReference) -> Self {
        reference.to_string()
    }
}

impl RegistryImage {
    /// The full references that this one may stand for, in the order they are tried.
    pub(crate) fn candidates(&self, search: &[RegistryPrefix]) -> Vec<Reference> {
        let complete = |prefix: &str| {
            let mut complete = RegistryImage { registry: Some(prefix.to_owned()), ..self.clone() };
            if complete.digest.is_some() {
                complete.tag = None;
            }
            let text = complete.to_string();
            // The parser knows Docker Hub's `library/`. Parts that were parsed once only fail it by being too long.
            text.parse::<Reference>().ok()
        };
        match &self.registry {
            Some(registry) => complete(registry).into_iter().collect(),
            None => search.iter().filter_map(|prefix| complete(&prefix.0)).collect(),
        }
    }
}

/// A registry in which short names are looked for: a host, or a host with the first part of a name, as in
/// `ghcr.io/our-team`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RegistryPrefix(String);

/// A text that is no [`RegistryPrefix`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no registry to search: {problem}")]
pub struct ParsePrefixError {
    text: String,
    problem: &'static str,
}

impl FromStr for RegistryPrefix {
    type Err = ParsePrefixError;

    /// Surrounding blanks and slashes at the end are dropped.
    fn from_str(text: &str) -> Result<Self, ParsePrefixError> {
        let refuse = |problem| ParsePrefixError { text: text.to_owned(), problem };
        let prefix = text.trim().trim_end_matches('/');
        if prefix.contains("://") {
            return Err(refuse("it must have no scheme"));
        }
        if prefix.contains('@') {
            return Err(refuse("it must have no digest"));
        }
        if prefix.split_once('/').is_some_and(|(_, name)| name.contains(':')) {
            return Err(refuse("it must have no tag"));
        }
        let probe = format!("{prefix}/name");
        if !has_host(&probe) {
            return Err(refuse("it must begin with a registry's host"));
        }
        probe.parse::<Reference>().map_err(|_| refuse("it is malformed"))?;
        Ok(Self(prefix.to_owned()))
    }
}

impl fmt::Display for RegistryPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for RegistryPrefix {
    type Error = ParsePrefixError;

    fn try_from(text: String) -> Result<Self, ParsePrefixError> {
        text.parse()
    }
}

impl From<RegistryPrefix> for String {
    fn from(prefix: RegistryPrefix) -> Self {
        prefix.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(text: &str) -> Vec<String> {
        let search = ["docker.io".parse().unwrap(), "ghcr.io/our-team/".parse().unwrap()];
        match text.parse().unwrap() {
            ImageReference::Registry(image) => image.candidates(&search).iter().map(Reference::whole).collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn short_names_are_looked_for_in_every_search_registry() {
        assert_eq!(candidates("ubuntu"), ["docker.io/library/ubuntu:latest", "ghcr.io/our-team/ubuntu:latest"]);
        assert_eq!(candidates("a/b:1"), ["docker.io/a/b:1", "ghcr.io/our-team/a/b:1"]);
        assert_eq!(candidates("library/x"), ["docker.io/library/x:latest", "ghcr.io/our-team/library/x:latest"]);
    }

    #[test]
    fn full_names_are_taken_as_they_are() {
        assert_eq!(candidates("docker.io/ubuntu:24.04"), ["docker.io/library/ubuntu:24.04"]);
        assert_eq!(candidates("index.docker.io/x/y"), ["docker.io/x/y:latest"]);
        assert_eq!(candidates("localhost:5000/x"), ["localhost:5000/x:latest"]);
        let digest = format!("sha256:{}", "0".repeat(64));
        assert_eq!(candidates(&format!("quay.io/x@{digest}")), [format!("quay.io/x@{digest}")]);
    }

    #[test]
    fn a_digest_goes_before_a_tag() {
        let digest = format!("sha256:{}", "0".repeat(64));
        assert_eq!(candidates(&format!("quay.io/x:1@{digest}")), [format!("quay.io/x@{digest}")]);
        let short = [format!("docker.io/library/x@{digest}"), format!("ghcr.io/our-team/x@{digest}")];
        assert_eq!(candidates(&format!("x:1@{digest}")), short);
    }

    #[test]
    fn a_reference_reads_back_as_written() {
        for text in ["ubuntu:24.04", "a/b:1", "quay.io/x/y:z", "oci:/x/y:tag", "oci:rel", "docker-archive:/a.tar:n:t"] {
            assert_eq!(text.parse::<ImageReference>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn local_paths_end_at_the_colon_of_their_last_component() {
        let parse = |text: &str| text.parse::<ImageReference>().unwrap();
        let tag = |tag: &str| Some(tag.to_owned());
        assert_eq!(parse("oci:/a:b/c:1"), ImageReference::OciLayout { path: "/a:b/c".into(), tag: tag("1") });
        assert_eq!(
            parse("docker-archive:x.tar:ubuntu:24.04"),
            ImageReference::DockerArchive { path: "x.tar".into(), tag: tag("ubuntu:24.04") }
        );
    }

    #[test]
    fn what_names_no_image_is_refused() {
        let digest = format!("sha256:{}", "0".repeat(64));
        let doubled = format!("x@{digest}@{digest}");
        for text in [
            "",
            "Ubuntu",
            "A/b",
            "a b",
            "x:",
            "x@",
            "a.io/x:",
            "a.io/x@",
            "a.io/",
            "x:@",
            &doubled,
            &format!("x:@{digest}"),
        ] {
            assert!(text.parse::<ImageReference>().is_err(), "{text}");
        }
        for text in ["oci:", "oci::tag", "oci:/x:", "x@sha256:00", "https://docker.io/x"] {
            assert!(text.parse::<ImageReference>().is_err(), "{text}");
        }
    }

    #[test]
    fn search_registries_are_hosts() {
        for text in ["docker.io", " ghcr.io/ ", "localhost:5000", "ghcr.io/a/b"] {
            assert!(text.parse::<RegistryPrefix>().is_ok(), "{text}");
        }
        assert_eq!(" ghcr.io/a// ".parse::<RegistryPrefix>().unwrap().to_string(), "ghcr.io/a");
        for text in
            ["", "/", "name", "Name", "https://docker.io", "docker.io/a:1", "docker.io/a@sha256:0", "docker.io/A B"]
        {
            assert!(text.parse::<RegistryPrefix>().is_err(), "{text}");
        }
    }
}
