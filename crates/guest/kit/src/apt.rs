//! A private apt: the host's programs, proxies and keys, but lists, cache and sources of our own.
//!
//! Nothing here touches what `apt-get` on the host sees, and nothing needs root: `update` and `download` only write below
//! the private root. What the archive sends is checked by apt against the distribution's keys, and once more by us
//! against the checksum in the signed index before a file gets its final name.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::process::Command;

use crate::apt_sources::AptSource;
use crate::digest::sha256_file;
use crate::{KitError, deb822};

/// Index of a whole suite on a slow line: 10 MB at 50 kB/s.
const UPDATE_TIMEOUT: Duration = Duration::from_secs(300);
/// A kernel package on a slow line: 35 MB at 50 kB/s.
const DOWNLOAD_TIMEOUT: Duration = Duration::from_secs(900);
/// Reading local lists.
const QUERY_TIMEOUT: Duration = Duration::from_secs(60);
/// No chain of kernel packages is longer; Ubuntu's has four links.
const MOST_PACKAGES: usize = 12;

/// apt with a root of its own.
#[derive(Debug)]
pub(crate) struct PrivateApt {
    config: PathBuf,
}

/// A package file as the signed index describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    /// File name in the archive's pool, as `apt-get download` writes it.
    pub(crate) file: String,
    pub(crate) size: u64,
    pub(crate) sha256: String,
}

impl PrivateApt {
    /// Lays out the private root at `root` with exactly these sources. Keeps lists that are already there.
    pub(crate) fn lay_out(root: &Path, sources: &[AptSource]) -> Result<Self, KitError> {
        for dir in ["state/lists/partial", "cache/archives/partial", "etc"] {
            let dir = root.join(dir);
            fs::create_dir_all(&dir).map_err(KitError::io("create directory", &dir))?;
        }
        let write = |name: &str, text: &str| {
            let path = root.join(name);
            aenv_durable::atomic_write(&path, text.as_bytes(), 0o644).map_err(KitError::io("write", &path))
        };
        write("state/status", "")?; // no package is installed here
        write("etc/sources.list", &sources_list(sources))?;
        write("apt.conf", &apt_conf(root))?;
        Ok(Self { config: root.join("apt.conf") })
    }

    /// Fetches and verifies the package lists.
    pub(crate) async fn update(&self) -> Result<(), KitError> {
        self.run("apt-get", &["-q", "update"], None, UPDATE_TIMEOUT).await.map(drop)
    }

    /// The package files that hold the kernel which `package` stands for: the package itself and what it depends on, as
    /// far as they are kernel images and modules of one version.
    pub(crate) async fn kernel_packages(&self, package: &str) -> Result<Vec<Package>, KitError> {
        kernel_chain(package, async |name| {
            self.run("apt-cache", &["show", "--no-all-versions", name], None, QUERY_TIMEOUT).await
        })
        .await
    }

    /// The file of `package` in `store`; downloads it by way of `scratch` (on the same file system) unless it is there with
    /// the right checksum.
    pub(crate) async fn download(&self, package: &Package, store: &Path, scratch: &Path) -> Result<PathBuf, KitError> {
        let path = store.join(&package.file);
        if is_intact(path.clone(), package.sha256.clone()).await? {
            return Ok(path);
        }
        fs::create_dir_all(store).map_err(KitError::io("create directory", store))?;
        let partial = tempfile::Builder::new()
            .prefix(crate::store::TEMPORARY)
            .tempdir_in(scratch)
            .map_err(KitError::io("create a directory in", scratch))?;
        let choice = format!("{}={}", package.name, package.version);
        let arguments = ["-q", "download", &choice];
        self.run("apt-get", &arguments, Some(partial.path()), DOWNLOAD_TIMEOUT).await?;
        let arrived = only_package(partial.path())?;
        let digest = arrived.clone();
        let found = blocking(move || sha256_file(&digest)).await?;
        if found != package.sha256 {
            return Err(KitError::Checksum { path, expected: package.sha256.clone(), found });
        }
        fs::rename(&arrived, &path).map_err(KitError::io("rename downloaded package to", &path))?;
        Ok(path)
    }

    /// Runs an apt program on the private root and returns what it printed.
    ///
    /// Cancel safety: the program is killed; its partial files are apt's to resume.
    async fn run(
        &self,
        program: &'static str,
        arguments: &[&str],
        dir: Option<&Path>,
        timeout: Duration,
    ) -> Result<String, KitError> {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("APT_CONFIG", &self.config)
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        if let Some(dir) = dir {
            command.current_dir(dir);
        }
        let said = || format!("{program} {}", arguments.join(" "));
        let output = match tokio::time::timeout(timeout, command.output()).await {
            Ok(Ok(output)) => output,
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => return Err(KitError::NoApt { program }),
            Ok(Err(source)) => return Err(KitError::Io { action: "run", path: program.into(), source }),
            Err(_) => {
                let detail = format!("no end after {} s", timeout.as_secs());
                return Err(KitError::Apt { command: said(), detail });
            }
        };
        let stderr = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            return Err(KitError::Apt { command: said(), detail: gist(&stderr, &output.status.to_string()) });
        }
        for line in stderr.lines().filter(|line| !line.trim().is_empty()) {
            tracing::debug!(program, line, "apt said");
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Follows `package` to the versioned packages of kernel image and modules. `show` gives a package's index entry.
///
/// Debian: `linux-image-cloud-amd64` → `linux-image-<v>-cloud-amd64`, which holds both. Ubuntu: `linux-image-virtual` →
/// `linux-image-<v>-generic` → `linux-modules-<v>-generic`.
async fn kernel_chain(
    package: &str,
    show: impl AsyncFn(&str) -> Result<String, KitError>,
) -> Result<Vec<Package>, KitError> {
    let refused = |name: &str, detail: &str| KitError::Apt {
        command: format!("apt-cache show {name}"),
        detail: detail.to_owned(),
    };
    let mut found: Vec<Package> = Vec::new();
    let mut wanted = vec![package.to_owned()];
    let mut seen = wanted.clone();
    while let Some(name) = wanted.pop() {
        let stanzas = deb822::parse(&show(&name).await?);
        let stanza = stanzas.first().ok_or_else(|| refused(&name, "no such package"))?;
        if is_versioned(&name, "linux-image-") || is_versioned(&name, "linux-modules-") {
            found.push(described(&name, stanza)?);
        }
        let depends = ["Pre-Depends", "Depends"].map(|field| stanza.get(field).unwrap_or_default());
        for dependency in depends.into_iter().flat_map(deb822::dependencies) {
            let follow = dependency.starts_with("linux-image-") || is_versioned(&dependency, "linux-modules-");
            if follow && !seen.contains(&dependency) && seen.len() < MOST_PACKAGES {
                seen.push(dependency.clone());
                wanted.push(dependency);
            }
        }
    }
    if !found.iter().any(|package| package.name.starts_with("linux-image-")) {
        return Err(refused(package, "depends on no kernel image"));
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// What differs from the host's configuration; `apt.conf.d` (proxies, certificates) still holds.
fn apt_conf(root: &Path) -> String {
    let root = root.display();
    format!(
        "Dir::State \"{root}/state\";\n\
         Dir::State::status \"{root}/state/status\";\n\
         Dir::Cache \"{root}/cache\";\n\
         Dir::Etc::sourcelist \"{root}/etc/sources.list\";\n\
         Dir::Etc::sourceparts \"/dev/null\";\n\
         Dir::Etc::preferences \"/dev/null\";\n\
         Dir::Etc::preferencesparts \"/dev/null\";\n\
         APT::Architecture \"amd64\";\n\
         APT::Architectures {{ \"amd64\"; }};\n\
         APT::Default-Release \"\";\n\
         APT::Update::Error-Mode \"any\";\n\
         APT::Get::AllowUnauthenticated \"false\";\n\
         Acquire::Languages \"none\";\n\
         Acquire::Retries \"3\";\n\
         Acquire::http::Timeout \"30\";\n\
         Acquire::https::Timeout \"30\";\n\
         Acquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n\
         Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled \"false\";\n\
         #clear APT::Update::Pre-Invoke;\n\
         #clear APT::Update::Post-Invoke;\n\
         #clear APT::Update::Post-Invoke-Success;\n"
    )
}

fn sources_list(sources: &[AptSource]) -> String {
    let line = |source: &AptSource| {
        let options =
            source.signed_by.as_ref().map(|key| format!("[signed-by={}] ", key.display())).unwrap_or_default();
        format!("deb {options}{} {} main\n", source.uri, source.suite)
    };
    sources.iter().map(line).collect()
}

/// Names like `linux-image-6.8.0-31-generic`: the prefix, then a digit. Meta packages have words there.
fn is_versioned(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

fn described(name: &str, stanza: &deb822::Stanza) -> Result<Package, KitError> {
    let field = |field: &'static str| {
        stanza.get(field).ok_or_else(|| KitError::Apt {
            command: format!("apt-cache show {name}"),
            detail: format!("the index gives no {field}"),
        })
    };
    let file = field("Filename")?.rsplit('/').next().unwrap_or_default().to_owned();
    let size = field("Size")?.parse().unwrap_or_default();
    let sha256 = field("SHA256")?.to_ascii_lowercase();
    Ok(Package { name: name.to_owned(), version: field("Version")?.to_owned(), file, size, sha256 })
}

async fn is_intact(path: PathBuf, sha256: String) -> Result<bool, KitError> {
    blocking(move || match path.try_exists() {
        Ok(true) => Ok(sha256_file(&path)? == sha256),
        Ok(false) => Ok(false),
        Err(source) => Err(KitError::Io { action: "look for", path, source }),
    })
    .await
}

/// The one `.deb` that `apt-get download` left in `dir`.
fn only_package(dir: &Path) -> Result<PathBuf, KitError> {
    let entries = fs::read_dir(dir).map_err(KitError::io("list", dir))?;
    let mut packages =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "deb"));
    packages
        .next()
        .ok_or_else(|| KitError::Package { path: dir.to_owned(), why: "was not left by `apt-get download`".to_owned() })
}

/// The line of apt's stderr that says why first, or `otherwise`. Errors after it mostly repeat it for the next file.
fn gist(stderr: &str, otherwise: &str) -> String {
    let error = stderr.lines().find_map(|line| line.strip_prefix("E: "));
    let last = stderr.trim().lines().last();
    error.or(last).unwrap_or(otherwise).trim().to_owned()
}

/// Runs blocking work off the async threads.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, KitError> + Send + 'static,
) -> Result<T, KitError> {
    tokio::task::spawn_blocking(work).await.map_err(|source| KitError::Interrupted { source })?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_names_with_a_version_are_told_from_meta_packages() {
        assert!(is_versioned("linux-image-6.12.95+deb12-cloud-amd64", "linux-image-"));
        assert!(is_versioned("linux-modules-6.8.0-31-generic", "linux-modules-"));
        assert!(!is_versioned("linux-image-cloud-amd64", "linux-image-"));
        assert!(!is_versioned("linux-modules-extra-6.8.0-31-generic", "linux-modules-"));
    }

    /// An index entry with what matters here.
    fn entry(name: &str, depends: &str) -> String {
        format!(
            "Package: {name}\nVersion: 1-2\nDepends: {depends}\nFilename: pool/main/l/linux/{name}_1-2_amd64.deb\n\
             Size: 7\nSHA256: ABCD\nDescription: kernel\n of many lines\n\n"
        )
    }

    async fn chain(package: &str, index: &[(&str, &str)]) -> Result<Vec<String>, KitError> {
        let found = kernel_chain(package, async |name| {
            let depends = index.iter().find(|(known, _)| *known == name).map(|(_, depends)| *depends);
            depends.map(|depends| entry(name, depends)).ok_or_else(|| KitError::Apt {
                command: format!("apt-cache show {name}"),
                detail: "No packages found".to_owned(),
            })
        })
        .await?;
        assert!(found.iter().all(|package| package.sha256 == "abcd" && package.file.ends_with("_1-2_amd64.deb")));
        Ok(found.into_iter().map(|package| package.name).collect())
    }

    #[tokio::test]
    async fn debians_meta_package_leads_to_one_package_with_image_and_modules() {
        let image = "linux-image-6.12.95+deb12-cloud-amd64";
        let index = [
            ("linux-image-cloud-amd64", "linux-image-6.12.95+deb12-cloud-amd64 (= 6.12.95-1~bpo12+1)"),
            (image, "kmod, linux-base (>= 4.12~), initramfs-tools (>= 0.120+deb8u2) | linux-initramfs-tool"),
        ];
        assert_eq!(chain("linux-image-cloud-amd64", &index).await.unwrap(), [image]);
    }

    #[tokio::test]
    async fn ubuntus_meta_package_leads_to_image_and_modules_but_not_to_extra_ones() {
        let index = [
            ("linux-image-virtual", "linux-image-6.8.0-31-generic"),
            (
                "linux-image-6.8.0-31-generic",
                "kmod, linux-base (>= 4.5ubuntu1~16.04.1), linux-modules-6.8.0-31-generic, linux-modules-extra-x",
            ),
            ("linux-modules-6.8.0-31-generic", "wireless-regdb"),
        ];
        assert_eq!(
            chain("linux-image-virtual", &index).await.unwrap(),
            ["linux-image-6.8.0-31-generic", "linux-modules-6.8.0-31-generic"]
        );
    }

    #[tokio::test]
    async fn a_chain_without_a_kernel_is_refused_by_name() {
        let error = chain("linux-image-odd", &[("linux-image-odd", "base-files")]).await.unwrap_err().to_string();
        assert!(error.contains("linux-image-odd") && error.contains("no kernel image"), "{error}");
        assert!(chain("absent", &[]).await.unwrap_err().to_string().contains("No packages found"));
    }

    #[test]
    fn a_source_line_binds_the_suite_to_its_keyring() {
        let source = |signed_by: Option<&str>| AptSource {
            uri: "http://m/debian".to_owned(),
            suite: "trixie".to_owned(),
            signed_by: signed_by.map(PathBuf::from),
        };
        assert_eq!(
            sources_list(&[source(Some("/k.gpg")), source(None)]),
            "deb [signed-by=/k.gpg] http://m/debian trixie main\ndeb http://m/debian trixie main\n"
        );
    }

    #[test]
    fn the_first_error_line_of_apt_is_what_we_pass_on() {
        let stderr =
            "W: old\nE: The repository 'http://x trixie Release' does not have a Release file.\nN: see apt-secure\n";
        assert_eq!(gist(stderr, "exit 100"), "The repository 'http://x trixie Release' does not have a Release file.");
        assert_eq!(gist("", "exit status: 100"), "exit status: 100");
    }
}
