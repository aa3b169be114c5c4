//! Python virtual environments with pinned packages, made once for each requirements file.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::paths;
use crate::sh::{Run, say};

/// A virtual environment.
#[derive(Debug)]
pub(crate) struct Venv {
    dir: PathBuf,
}

impl Venv {
    /// The environment `name` with what `requirements` pins; remade when that file has changed.
    pub(crate) fn ensure(name: &str, requirements: &Path) -> Result<Self> {
        let venv = Self { dir: paths::kept().join("venvs").join(name) };
        let wanted = fs::read(requirements).with_context(|| format!("read {}", requirements.display()))?;
        // Written last: an environment without it was not finished.
        let stamp = venv.dir.join("requirements.installed");
        if fs::read(&stamp).is_ok_and(|installed| installed == wanted) && venv.program("python").exists() {
            return Ok(venv);
        }
        say(format_args!("making a Python environment with {}", requirements.display()));
        if venv.dir.exists() {
            fs::remove_dir_all(&venv.dir).with_context(|| format!("remove {}", venv.dir.display()))?;
        }
        Run::new("python3").args(["-m", "venv"]).arg(&venv.dir).run()?;
        Run::new(venv.program("python"))
            .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"])
            .arg(requirements)
            .run()?;
        fs::write(&stamp, wanted).context("mark the environment finished")?;
        Ok(venv)
    }

    /// Path of a program in the environment.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.dir.join("bin").join(name)
    }

    /// Folder of its programs, for `PATH`.
    pub(crate) fn programs(&self) -> PathBuf {
        self.dir.join("bin")
    }
}
