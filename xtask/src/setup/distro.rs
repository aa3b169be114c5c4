//! Which distribution this is, as far as package names and mirrors differ.

use std::fs;

use anyhow::{Context, Result, bail};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Debian,
    Ubuntu,
}

/// A distribution we know the package names of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Distro {
    pub(crate) family: Family,
    /// What it calls itself, for messages.
    pub(crate) name: String,
}

impl Distro {
    /// Reads `/etc/os-release`; refuses anything that is neither Debian nor Ubuntu nor derived from them.
    pub(crate) fn detect() -> Result<Self> {
        let text = fs::read_to_string("/etc/os-release").context("read /etc/os-release")?;
        Self::parse(&text)
    }

    fn parse(os_release: &str) -> Result<Self> {
        let field = |key: &str| {
            os_release
                .lines()
                .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
                .map(|value| value.trim_matches('"').to_owned())
        };
        let id = field("ID").unwrap_or_default();
        let like = field("ID_LIKE").unwrap_or_default();
        let name = field("PRETTY_NAME").unwrap_or_else(|| id.clone());
        let is = |wanted: &str| id == wanted || like.split(' ').any(|word| word == wanted);
        let family = if is("ubuntu") {
            Family::Ubuntu
        } else if is("debian") {
            Family::Debian
        } else {
            bail!("{name} is neither Debian nor Ubuntu: install the packages that `setup` lists there by hand");
        };
        Ok(Self { family, name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debian_and_ubuntu_and_what_derives_from_them_are_known() {
        let family = |text| Distro::parse(text).map(|distro| distro.family).ok();
        assert_eq!(family("ID=debian\nVERSION_ID=\"12\"\n"), Some(Family::Debian));
        assert_eq!(family("ID=ubuntu\nID_LIKE=debian\n"), Some(Family::Ubuntu));
        assert_eq!(family("ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n"), Some(Family::Ubuntu));
        assert_eq!(family("ID=fedora\n"), None);
    }
}
