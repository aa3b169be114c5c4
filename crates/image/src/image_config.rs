//! What an image says about running it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// The part of an image's configuration that outlives the import.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    /// `NAME=VALUE`, in order.
    pub env: Vec<String>,
    /// Absolute path inside the image.
    pub working_dir: Option<String>,
    /// `USER[:GROUP]`, each a name or a number.
    pub user: Option<String>,
    /// The command's fixed first words.
    pub entrypoint: Vec<String>,
    /// The rest of the command.
    pub cmd: Vec<String>,
    /// Free-form.
    pub labels: BTreeMap<String, String>,
    /// `PORT[/PROTOCOL]`.
    pub exposed_ports: Vec<String>,
}

/// The configuration blob, as far as we read it. Builders differ in what they leave out or write as null.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ImageFile {
    pub(crate) architecture: Option<String>,
    pub(crate) os: Option<String>,
    config: Option<Run>,
    rootfs: Option<RootFs>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Run {
    env: Option<Vec<String>>,
    working_dir: Option<String>,
    user: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    labels: Option<BTreeMap<String, String>>,
    exposed_ports: Option<BTreeMap<String, serde::de::IgnoredAny>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RootFs {
    diff_ids: Option<Vec<String>>,
}

impl ImageFile {
    /// The digests of the uncompressed layers, lowest first.
    ///
    /// Errors: what is wrong, in words.
    pub(crate) fn diff_ids(&self) -> Result<Vec<Digest>, String> {
        let ids = self.rootfs.as_ref().and_then(|rootfs| rootfs.diff_ids.as_deref()).unwrap_or_default();
        ids.iter().map(|id| id.parse().map_err(|error| format!("its configuration's diff_ids: {error}"))).collect()
    }

    /// What is kept.
    pub(crate) fn into_config(self) -> ImageConfig {
        let run = self.config.unwrap_or_default();
        let said = |text: Option<String>| text.filter(|text| !text.is_empty());
        ImageConfig {
            env: run.env.unwrap_or_default(),
            working_dir: said(run.working_dir),
            user: said(run.user),
            entrypoint: run.entrypoint.unwrap_or_default(),
            cmd: run.cmd.unwrap_or_default(),
            labels: run.labels.unwrap_or_default(),
            exposed_ports: run.exposed_ports.unwrap_or_default().into_keys().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_docker_configuration_is_kept() {
        let file: ImageFile = serde_json::from_str(
            r#"{"architecture":"amd64","os":"linux","created":"yesterday","config":{"Env":["PATH=/bin","A="],
                "Cmd":["sh"],"Entrypoint":null,"WorkingDir":"/srv","User":"","Labels":null,
                "ExposedPorts":{"80/tcp":{},"53/udp":{}},"OnBuild":null},"rootfs":{"type":"layers","diff_ids":[]}}"#,
        )
        .unwrap();
        assert_eq!(file.diff_ids().unwrap(), []);
        let config = file.into_config();
        assert_eq!(config.env, ["PATH=/bin", "A="]);
        assert_eq!(config.cmd, ["sh"]);
        assert_eq!(config.working_dir.as_deref(), Some("/srv"));
        assert_eq!(config.user, None);
        assert_eq!(config.exposed_ports, ["53/udp", "80/tcp"]);
    }

    #[test]
    fn an_empty_configuration_is_one() {
        let file: ImageFile = serde_json::from_str("{}").unwrap();
        assert_eq!(file.into_config(), ImageConfig::default());
    }
}
