//! Which kernel package a distribution offers, and from which suites, best first.
//!
//! The policy (`docs/adr/0003-guest-kernel.md`): Linux 6.12 before 6.1, since it has DAMON's proactive reclaim, virtio-pci
//! and FUSE built in and the longer life ahead, for 0.2 s more of an emulated boot; and trixie with its security suite
//! before backports, which are months behind in fixes. That costs a package index of 10 MB, once. A host whose keyring
//! does not know trixie yet goes on to backports.

use std::path::PathBuf;

use crate::KitError;
use crate::apt_sources::AptSource;

/// A place to ask for a kernel: a few suites that together form one view of the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// Short and unique: names the private apt root, and appears in messages.
    pub(crate) name: String,
    /// The (meta) package that depends on the newest kernel image.
    pub(crate) package: &'static str,
    /// What to put into `sources.list`.
    pub(crate) sources: Vec<AptSource>,
}

/// What `/etc/os-release` says about the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Distribution {
    /// Debian, or a derivative that says only so; by its code name.
    Debian { codename: String },
    /// Ubuntu, or a derivative that names its Ubuntu base; by its code name.
    Ubuntu { codename: String },
}

const DEBIAN_MIRROR: &str = "http://deb.debian.org/debian";
const DEBIAN_SECURITY_MIRROR: &str = "http://deb.debian.org/debian-security";
const DEBIAN_KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const UBUNTU_MIRROR: &str = "http://archive.ubuntu.com/ubuntu";
const UBUNTU_KEYRING: &str = "/usr/share/keyrings/ubuntu-archive-keyring.gpg";

impl Distribution {
    /// Reads the text of `/etc/os-release`.
    ///
    /// Errors: `UnknownDistribution`, naming what the file says.
    pub(crate) fn from_os_release(text: &str) -> Result<Self, KitError> {
        let value = |key: &str| {
            let line = text.lines().find_map(|line| line.trim().strip_prefix(key)?.strip_prefix('='))?;
            Some(line.trim_matches(['"', '\'']).to_owned()).filter(|value| !value.is_empty())
        };
        let codename = value("VERSION_CODENAME");
        match (value("ID").as_deref(), value("UBUNTU_CODENAME"), codename) {
            (Some("ubuntu"), Some(codename), _) | (Some("ubuntu"), None, Some(codename)) | (_, Some(codename), _) => {
                Ok(Self::Ubuntu { codename })
            }
            (Some("debian"), None, Some(codename)) => Ok(Self::Debian { codename }),
            // Debian's testing and unstable have a name in PRETTY_NAME only; the next stable's packages serve them.
            (Some("debian"), None, None) => Ok(Self::Debian { codename: "sid".to_owned() }),
            (id, _, _) => Err(KitError::UnknownDistribution {
                distribution: value("PRETTY_NAME")
                    .or(id.map(str::to_owned))
                    .unwrap_or_else(|| "this system".to_owned()),
            }),
        }
    }

    /// Where to ask, best first, through the mirrors in `host` where they carry the suite's archive.
    pub(crate) fn candidates(&self, host: &[AptSource]) -> Vec<Candidate> {
        match self {
            Self::Debian { codename } => debian(codename, host),
            Self::Ubuntu { codename } => vec![ubuntu(codename, host)],
        }
    }
}

fn debian(codename: &str, host: &[AptSource]) -> Vec<Candidate> {
    let main = archive(host, codename, DEBIAN_MIRROR, DEBIAN_KEYRING);
    let security = archive(host, &format!("{codename}-security"), DEBIAN_SECURITY_MIRROR, DEBIAN_KEYRING);
    let candidate = |name: &str, sources: Vec<AptSource>| Candidate {
        name: name.to_owned(),
        package: "linux-image-cloud-amd64",
        sources,
    };
    let release = |suite: &str| {
        candidate(
            suite,
            vec![
                main.suite(suite),
                main.suite(&format!("{suite}-updates")),
                security.suite(&format!("{suite}-security")),
            ],
        )
    };
    match codename {
        "bookworm" => vec![
            release("trixie"),
            candidate("bookworm-backports", vec![main.suite("bookworm-backports")]),
            release("bookworm"),
        ],
        "trixie" => vec![release("trixie")],
        // A later release has a later kernel of its own; trixie's is the one we know.
        "sid" => vec![candidate("sid", vec![main.suite("sid")]), release("trixie")],
        later => vec![release(later), release("trixie")],
    }
}

fn ubuntu(codename: &str, host: &[AptSource]) -> Candidate {
    let main = archive(host, codename, UBUNTU_MIRROR, UBUNTU_KEYRING);
    let security = host
        .iter()
        .find(|source| source.suite == format!("{codename}-security"))
        .map_or_else(|| main.clone(), |source| Archive::of(source, UBUNTU_KEYRING));
    Candidate {
        name: codename.to_owned(),
        package: "linux-image-virtual",
        sources: vec![
            main.suite(codename),
            main.suite(&format!("{codename}-updates")),
            security.suite(&format!("{codename}-security")),
        ],
    }
}

/// One archive: a URI and the key that signs all its suites.
#[derive(Debug, Clone)]
struct Archive {
    uri: String,
    keyring: Option<PathBuf>,
}

/// The archive that `host` takes `suite` from, else `mirror`.
fn archive(host: &[AptSource], suite: &str, mirror: &str, keyring: &str) -> Archive {
    let known = host.iter().find(|source| source.suite == suite);
    known.map_or_else(
        || Archive { uri: mirror.to_owned(), keyring: existing(keyring) },
        |source| Archive::of(source, keyring),
    )
}

/// The distribution's keyring file, if it is installed; else apt's own trusted keys decide.
fn existing(keyring: &str) -> Option<PathBuf> {
    Some(PathBuf::from(keyring)).filter(|path| path.exists())
}

impl Archive {
    fn of(source: &AptSource, keyring: &str) -> Self {
        // The distribution's full keyring before the entry's own: the latter may hold one release's keys only.
        Self { uri: source.uri.clone(), keyring: existing(keyring).or_else(|| source.signed_by.clone()) }
    }

    fn suite(&self, suite: &str) -> AptSource {
        AptSource { uri: self.uri.clone(), suite: suite.to_owned(), signed_by: self.keyring.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(pairs: &[(&str, &str)]) -> Vec<AptSource> {
        let source = |(uri, suite): &(&str, &str)| AptSource {
            uri: (*uri).to_owned(),
            suite: (*suite).to_owned(),
            signed_by: None,
        };
        pairs.iter().map(source).collect()
    }

    fn asked(candidate: &Candidate) -> Vec<String> {
        candidate.sources.iter().map(|source| format!("{} {}", source.uri, source.suite)).collect()
    }

    #[test]
    fn bookworm_asks_trixie_then_backports_then_its_own_through_the_hosts_mirror() {
        let debian = Distribution::from_os_release("ID=debian\nVERSION_CODENAME=bookworm\n").unwrap();
        let candidates =
            debian.candidates(&host(&[("http://m/debian", "bookworm"), ("http://m/sec", "bookworm-security")]));
        let names: Vec<_> = candidates.iter().map(|candidate| candidate.name.as_str()).collect();
        assert_eq!(names, ["trixie", "bookworm-backports", "bookworm"]);
        assert_eq!(asked(&candidates[1]), ["http://m/debian bookworm-backports"]);
        assert_eq!(
            asked(&candidates[0]),
            ["http://m/debian trixie", "http://m/debian trixie-updates", "http://m/sec trixie-security"]
        );
    }

    #[test]
    fn a_host_without_sources_falls_back_to_the_public_mirror() {
        let trixie = Distribution::from_os_release("ID=debian\nVERSION_CODENAME=trixie").unwrap();
        let candidates = trixie.candidates(&[]);
        assert_eq!(candidates.len(), 1);
        assert_eq!(asked(&candidates[0])[0], "http://deb.debian.org/debian trixie");
    }

    #[test]
    fn ubuntu_and_what_is_built_on_it_ask_for_the_virtual_kernel() {
        for release in
            ["ID=ubuntu\nVERSION_CODENAME=noble", "ID=linuxmint\nVERSION_CODENAME=wilma\nUBUNTU_CODENAME=noble"]
        {
            let ubuntu = Distribution::from_os_release(release).unwrap();
            let candidates =
                ubuntu.candidates(&host(&[("http://m/ubuntu", "noble"), ("http://s/ubuntu", "noble-security")]));
            assert_eq!(candidates[0].package, "linux-image-virtual");
            assert_eq!(
                asked(&candidates[0]),
                ["http://m/ubuntu noble", "http://m/ubuntu noble-updates", "http://s/ubuntu noble-security"]
            );
        }
    }

    #[test]
    fn another_distribution_is_refused_by_name() {
        let error =
            Distribution::from_os_release("ID=fedora\nPRETTY_NAME=\"Fedora Linux 42\"").unwrap_err().to_string();
        assert!(error.contains("Fedora Linux 42") && error.contains("image_path"), "{error}");
    }
}
