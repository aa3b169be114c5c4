//! What this machine gives a test: the programs under test, root, and a directory that is kept between runs.

use std::env;
use std::path::PathBuf;

/// The programs under test and where their caches are.
#[derive(Debug, Clone)]
pub struct Machine {
    /// `aenv-server`.
    pub server: PathBuf,
    /// `aenv`.
    pub cli: PathBuf,
    /// `aenv-guest`, static.
    pub agent: PathBuf,
    /// An OCI layout folder with a small Debian.
    pub image: PathBuf,
    /// Kernels and downloads, kept between runs.
    pub kept: PathBuf,
}

impl Machine {
    /// The machine, or `None` with the reason printed as the test tally reads it.
    #[must_use]
    pub fn find() -> Option<Self> {
        let path = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.exists());
        let skip = |why: &str| {
            println!("skipped: {why}");
            None
        };
        if !nix::unistd::geteuid().is_root() {
            return skip("needs root for network namespaces");
        }
        let (server, cli) = (path("AENV_E2E_SERVER"), path("AENV_E2E_CLI"));
        let (agent, image) = (path("AENV_E2E_AGENT"), path("AENV_E2E_IMAGE"));
        match (server, cli, agent, image) {
            (Some(server), Some(cli), Some(agent), Some(image)) => {
                let kept = image.parent().map(|dir| dir.join("e2e-kept"))?;
                Some(Self { server, cli, agent, image, kept })
            }
            _ => skip("AENV_E2E_SERVER, _CLI, _AGENT and _IMAGE name no programs; run `cargo xtask e2e`"),
        }
    }
}
