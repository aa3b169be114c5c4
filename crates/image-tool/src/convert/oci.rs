//! The JSON of OCI images, as far as it is written here.

use aenv_image::ImageConfig;
use serde::Serialize;
use serde_json::{Value, json};

pub(super) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(super) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(super) const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// Layers are tars as far as a registry is concerned.
pub(super) const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// A blob in a manifest or index.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Descriptor {
    pub(super) media_type: &'static str,
    pub(super) digest: String,
    pub(super) size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) annotations: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) platform: Option<Value>,
}

/// Go's name of this machine's architecture.
pub(super) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// A configuration that says of an image what `config` does.
pub(super) fn configuration(config: &ImageConfig, diff_ids: Vec<String>) -> Value {
    let ports: serde_json::Map<_, _> = config.exposed_ports.iter().map(|port| (port.clone(), json!({}))).collect();
    let mut run = json!({
        "Env": config.env,
        "WorkingDir": config.working_dir,
        "User": config.user,
        "Entrypoint": config.entrypoint,
        "Cmd": config.cmd,
        "Labels": config.labels,
        "ExposedPorts": ports,
    });
    if let Some(run) = run.as_object_mut() {
        let said = |value: &Value| match value {
            Value::Null => false,
            Value::Array(list) => !list.is_empty(),
            Value::Object(map) => !map.is_empty(),
            _ => true,
        };
        run.retain(|_, value| said(value));
    }
    json!({
        "architecture": architecture(),
        "os": "linux",
        "config": run,
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    })
}
