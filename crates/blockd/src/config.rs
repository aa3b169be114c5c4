//! Reading the configuration file.

use std::path::{Path, PathBuf};

use aenv_block_client::BlockdConfig;

/// A configuration with what should be told about it.
#[derive(Debug)]
pub struct Loaded {
    /// The configuration.
    pub config: BlockdConfig,
    /// Keys that nobody knows.
    pub unknown: Vec<String>,
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum LoadConfigError {
    /// The file cannot be read.
    #[error("read {path}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not TOML.
    #[error("{path} is not valid TOML", path = path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where, and why.
        source: Box<toml::de::Error>,
    },
    /// A value is not what its key takes.
    #[error("{path}: {key}: {problem}", path = path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What is wrong.
        problem: String,
    },
}

/// Reads the TOML file at `path`.
pub fn load(path: &Path) -> Result<Loaded, LoadConfigError> {
    let text =
        std::fs::read_to_string(path).map_err(|source| LoadConfigError::Read { path: path.to_owned(), source })?;
    parse(&text, path)
}

fn parse(text: &str, path: &Path) -> Result<Loaded, LoadConfigError> {
    let table: toml::Table =
        text.parse().map_err(|source| LoadConfigError::Syntax { path: path.to_owned(), source: Box::new(source) })?;
    let refuse =
        |key: &str, problem: String| LoadConfigError::Value { path: path.to_owned(), key: key.to_owned(), problem };
    let mut unknown = Vec::new();
    let mut note = |key: serde_ignored::Path<'_>| unknown.push(key.to_string());
    let deserializer = serde_ignored::Deserializer::new(toml::Value::Table(table), &mut note);
    let config: BlockdConfig = serde_path_to_error::deserialize(deserializer).map_err(|error| {
        // Further lines tell the key once more.
        let problem = error.inner().to_string().lines().next().unwrap_or_default().to_owned();
        refuse(&error.path().to_string(), problem)
    })?;
    match config.problem() {
        Some((key, problem)) => Err(refuse(key, problem.to_owned())),
        None => Ok(Loaded { config, unknown }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: &str = "socket = '/s'\nstate_dir = '/t'\nrun_dir = '/r'\n";

    #[test]
    fn unknown_keys_are_told_and_do_not_matter() {
        let loaded = parse(&format!("{LEAST}colour = 'red'\n[cache]\nsize = 3\n"), Path::new("c.toml")).unwrap();
        assert_eq!(loaded.unknown, ["cache.size", "colour"]);
        assert_eq!(loaded.config, BlockdConfig::new("/s", "/t", "/r"));
    }

    #[test]
    fn errors_name_file_and_key() {
        let said = |text: &str| parse(text, Path::new("c.toml")).unwrap_err().to_string();
        assert_eq!(said("socket = '/s'\n"), "c.toml: .: missing field `state_dir`");
        assert_eq!(said("="), "c.toml is not valid TOML");
        assert_eq!(
            said(&format!("{LEAST}[cache]\nsize_mib = 'big'\n")),
            "c.toml: cache.size_mib: invalid type: string \"big\", expected u64"
        );
        assert_eq!(said(&format!("{LEAST}open_threads = 0\n")), "c.toml: open_threads: must be at least 1");
    }
}
