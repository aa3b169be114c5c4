//! The crate arrows of `docs/ARCHITECTURE.md`, checked against what `cargo metadata` says.
//!
//! Cargo refuses cycles and nothing more; that a mechanism never knows its neighbour is our rule, so we check it. Only
//! normal dependencies count: tests and build scripts may reach wherever they like.

use anyhow::{Context, Result};
use serde_json::Value;
use std::path::PathBuf;

use crate::sh::Run;

/// From the top down. A crate may use layers below its own, never its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Layer {
    Programs,
    Decisions,
    Mechanisms,
    Bytes,
    Wire,
    Base,
}

const LAYERS: &[(&str, Layer)] = &[
    ("aenv-server", Layer::Programs),
    ("aenv-blockd", Layer::Programs),
    ("aenv-cli", Layer::Programs),
    ("aenv-image-tool", Layer::Programs),
    ("aenv-orchestrator", Layer::Decisions),
    ("aenv-template", Layer::Decisions),
    ("aenv-proxy", Layer::Decisions),
    ("aenv-vmm-driver", Layer::Mechanisms),
    ("aenv-vmm-qemu", Layer::Mechanisms),
    ("aenv-network", Layer::Mechanisms),
    ("aenv-memory", Layer::Mechanisms),
    ("aenv-image", Layer::Mechanisms),
    ("aenv-guest-kit", Layer::Mechanisms),
    ("aenv-snapshot", Layer::Mechanisms),
    ("aenv-repository", Layer::Mechanisms),
    ("aenv-block-device", Layer::Bytes),
    ("aenv-block-overlaybd", Layer::Bytes),
    ("aenv-block-source", Layer::Bytes),
    ("aenv-block-export", Layer::Bytes),
    ("aenv-block-client", Layer::Bytes),
    ("aenv-objects", Layer::Bytes),
    ("aenv-guest-proto", Layer::Wire),
    ("aenv-guest-agent", Layer::Wire),
    ("aenv-api", Layer::Wire),
    ("aenv-model", Layer::Base),
    ("aenv-durable", Layer::Base),
    ("aenv-tasks", Layer::Base),
];

/// Arrows inside a layer, each with its reason.
const SIDEWAYS: &[(&str, &str)] = &[
    ("aenv-image-tool", "aenv-blockd"), // converts on a daemon of its own, a child of itself
    ("aenv-vmm-qemu", "aenv-vmm-driver"), // implements the trait
    ("aenv-snapshot", "aenv-memory"),   // captures hold layers of memory
    ("aenv-snapshot", "aenv-vmm-driver"), // and machines' device state
    ("aenv-memory", "aenv-vmm-driver"), // reads the memory of its processes
    ("aenv-block-overlaybd", "aenv-block-device"), // implements the trait
    ("aenv-block-source", "aenv-block-overlaybd"), // implements its source of bytes
    ("aenv-block-source", "aenv-objects"), // reads layers from object stores
    ("aenv-block-export", "aenv-block-device"), // serves the trait
    ("aenv-block-client", "aenv-block-overlaybd"), // speaks of its layouts
    ("aenv-block-client", "aenv-block-device"), // gives disks from the daemon
    ("aenv-guest-agent", "aenv-guest-proto"), // speaks the protocol
];

/// Crates that may use nothing of ours but these, whatever their layer would allow.
const ONLY: &[(&str, &[&str])] = &[
    ("aenv-cli", &["aenv-api", "aenv-guest-proto", "aenv-model"]), // a client: knows the wire, not the node
    ("aenv-guest-agent", &["aenv-guest-proto", "aenv-model"]),     // lives in the guest
];

/// Around the product: they use anything, and nothing uses them.
const OUTSIDE: &[&str] = &["aenv-e2e", "xtask"];

/// One of our crates.
#[derive(Debug)]
pub(super) struct Crate {
    pub(super) name: String,
    pub(super) manifest: PathBuf,
    /// Entry files of its libraries and programs.
    pub(super) roots: Vec<PathBuf>,
    /// Normal dependencies, ours and others'.
    pub(super) uses: Vec<String>,
}

pub(super) fn read() -> Result<Vec<Crate>> {
    let text = Run::cargo().args(["metadata", "--no-deps", "--offline", "--format-version", "1"]).quiet().read()?;
    parse(&serde_json::from_str(&text).context("parse the output of cargo metadata")?)
}

fn parse(metadata: &Value) -> Result<Vec<Crate>> {
    let text = |value: &Value| value.as_str().map(str::to_owned).context("a field of cargo metadata is not text");
    let list = |value: &Value| value.as_array().cloned().context("a field of cargo metadata is not a list");
    let mut crates = Vec::new();
    for package in list(&metadata["packages"])? {
        let mut uses = Vec::new();
        for dependency in list(&package["dependencies"])? {
            if dependency["kind"].is_null() {
                uses.push(text(&dependency["name"])?);
            }
        }
        let mut roots = Vec::new();
        for target in list(&package["targets"])? {
            let product = |kind: &Value| matches!(kind.as_str(), Some("lib" | "bin" | "proc-macro"));
            if list(&target["kind"])?.iter().any(product) {
                roots.push(text(&target["src_path"])?.into());
            }
        }
        let manifest = text(&package["manifest_path"])?.into();
        crates.push(Crate { name: text(&package["name"])?, manifest, roots, uses });
    }
    Ok(crates)
}

/// One sentence for each arrow that should not be.
pub(super) fn problems(crates: &[Crate]) -> Vec<String> {
    let mut problems = Vec::new();
    let layer = |name: &str| LAYERS.iter().find(|(known, _)| *known == name).map(|(_, layer)| *layer);
    for Crate { name, uses, .. } in crates {
        if OUTSIDE.contains(&name.as_str()) {
            continue;
        }
        let Some(own) = layer(name) else {
            problems.push(format!("{name} has no layer: give it one in xtask/src/check/arrows.rs and ARCHITECTURE.md"));
            continue;
        };
        for used in uses.iter().filter(|used| crates.iter().any(|ours| ours.name == **used)) {
            let Some(below) = layer(used) else {
                problems.push(format!("{name} uses {used}, which is around the product, not part of it"));
                continue;
            };
            let sideways = SIDEWAYS.contains(&(name.as_str(), used.as_str()));
            if below <= own && !sideways {
                problems.push(format!("{name} ({own:?}) uses {used} ({below:?}): arrows point down only"));
            }
            if let Some((_, allowed)) = ONLY.iter().find(|(only, _)| only == name)
                && !allowed.contains(&used.as_str())
            {
                problems.push(format!("{name} uses {used}: of ours it may use only {}", allowed.join(", ")));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(name: &str, uses: &[&str]) -> Vec<String> {
        let bare = |name: &str, uses: &[&str]| Crate {
            name: name.to_owned(),
            manifest: PathBuf::new(),
            roots: Vec::new(),
            uses: uses.iter().map(|used| (*used).to_owned()).collect(),
        };
        let mut crates: Vec<Crate> = LAYERS
            .iter()
            .map(|(other, _)| *other)
            .filter(|other| *other != name)
            .map(|other| bare(other, &[]))
            .collect();
        crates.push(bare("xtask", &[]));
        crates.push(bare(name, uses));
        problems(&crates)
    }

    #[test]
    fn arrows_that_point_down_are_fine() {
        assert_eq!(told("aenv-orchestrator", &["aenv-network", "aenv-model", "tokio"]), Vec::<String>::new());
        assert_eq!(told("aenv-vmm-qemu", &["aenv-vmm-driver"]), Vec::<String>::new());
        assert_eq!(told("aenv-cli", &["aenv-api", "aenv-guest-proto"]), Vec::<String>::new());
    }

    #[test]
    fn arrows_up_and_sideways_are_told() {
        assert_eq!(told("aenv-network", &["aenv-orchestrator"]).len(), 1);
        assert_eq!(told("aenv-network", &["aenv-vmm-driver"]).len(), 1);
        assert_eq!(told("aenv-vmm-driver", &["aenv-vmm-qemu"]).len(), 1);
        assert_eq!(told("aenv-template", &["aenv-orchestrator"]).len(), 1);
    }

    #[test]
    fn the_client_knows_only_the_wire() {
        assert_eq!(told("aenv-cli", &["aenv-network"]).len(), 1);
    }

    #[test]
    fn the_product_does_not_use_what_is_around_it() {
        assert_eq!(told("aenv-server", &["xtask"]).len(), 1);
    }

    #[test]
    fn a_crate_without_a_layer_is_told() {
        assert_eq!(told("aenv-newcomer", &[]).len(), 1);
    }
}
