//! The first command in an image that is loaded as it is used, against one that is pulled before its sandbox starts: both
//! from a real registry over a wire with 20 ms of round trip and 50 MB/s, on nodes that have never seen them.
//!
//! The image is Debian with Python, and a layer of files that the command does not touch, as most of any image is.

use std::env;
use std::fs;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use aenv_api::NewColdSandbox;
use aenv_e2e::slow_link::{SlowLink, Speed};
use aenv_e2e::{Node, Registry};
use anyhow::{Context as _, Result, bail, ensure};
use rand::{RngCore as _, SeedableRng as _};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::content::MIB;
use crate::measure::{Bench, Plan, Row, median};

/// What the command does not touch.
const UNTOUCHED: usize = 384 * MIB;
const ROUNDS: usize = 3;

/// One first command.
struct First {
    took: Duration,
    /// Bytes that came over the wire.
    fetched: f64,
}

pub(crate) fn first_command(bench: &mut Bench) -> Result<()> {
    if !bench.wants(&["lazy_start", "lazy_bytes"]) {
        return Ok(());
    }
    let runtime = tokio::runtime::Runtime::new().context("start a runtime")?;
    for row in runtime.block_on(measure(bench))? {
        bench.add(row);
    }
    Ok(())
}

async fn measure(bench: &Bench) -> Result<[Row; 2]> {
    let variable = |name: &str| env::var_os(name).map(PathBuf::from).with_context(|| format!("{name} is not set"));
    let (plain, native) = (bench.path("plain"), bench.path("native"));
    let untouched = UNTOUCHED / usize::try_from(bench.scale)?;
    enlarge(&variable("AENV_E2E_IMAGE")?, &plain, untouched).context("make the image")?;
    let converted = Command::new(variable("AENV_E2E_IMAGE_TOOL")?)
        .args(["convert", &format!("oci:{}", plain.display()), "--native"])
        .arg(&native)
        .output()
        .context("start aenv-image")?;
    ensure!(converted.status.success(), "aenv-image convert: {}", String::from_utf8_lossy(&converted.stderr));
    let Some(registry) = Registry::start().await else { bail!("there is no docker-registry (cargo xtask setup)") };
    for (layout, name) in [(&plain, "plain"), (&native, "native")] {
        registry.push(layout, name, "latest").await;
    }
    let address = registry.host().parse().context("the registry's address")?;
    let (mut lazy, mut pulled) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        lazy.push(first(address, "native").await?);
        pulled.push(first(address, "plain").await?);
    }

    let seconds = |firsts: &[First]| firsts.iter().map(|first| first.took).collect::<Vec<_>>();
    let plan = Plan { name: "lazy_start", unit: "s", rounds: ROUNDS, work: 1.0, factor: 1.0 };
    let ratios = lazy.iter().zip(&pulled).map(|(lazy, pulled)| pulled.took.as_secs_f64() / lazy.took.as_secs_f64());
    let peer = median(&seconds(&pulled).iter().map(Duration::as_secs_f64).collect::<Vec<_>>());
    let start = Row { peer: Some(peer), ratio: Some(median(&ratios.collect::<Vec<_>>())), ..plan.row(&seconds(&lazy)) };

    let fetched: Vec<f64> = lazy.iter().map(|first| first.fetched / MIB as f64).collect();
    let whole = layers(&native)?.iter().sum::<u64>() as f64 / MIB as f64;
    let bytes = Row {
        name: "lazy_bytes",
        unit: "MiB",
        n: ROUNDS,
        min: fetched.iter().copied().fold(f64::INFINITY, f64::min),
        p50: median(&fetched),
        p95: fetched.iter().copied().fold(0.0, f64::max),
        peer: Some(whole),
        ratio: Some(median(&fetched) / whole),
    };
    Ok([start, bytes])
}

/// From the request for a sandbox to the end of its first command, on a fresh node.
async fn first(registry: SocketAddr, name: &str) -> Result<First> {
    let link = SlowLink::start(registry, Speed::REGION).await.context("make the wire")?;
    let Some(node) = Node::start().await else { bail!("this machine starts no node") };
    let wanted = NewColdSandbox { image: format!("{}/{name}:latest", link.address()), ..NewColdSandbox::default() };
    let begun = Instant::now();
    let sandbox = node.client().create_sandbox_cold(&wanted).await.context("create a sandbox")?;
    let id = sandbox.sandbox_id.to_string();
    _ = node.aenv_ok(&["exec", &id, "python3", "-c", "pass"]);
    let took = begun.elapsed();
    let fetched = link.passed().received as f64;
    node.client().delete_sandbox(&id).await.context("delete the sandbox")?;
    node.finish().await;
    Ok(First { took, fetched })
}

/// Copies an OCI layout of one image, with a layer of `size` bytes on top that do not compress.
fn enlarge(from: &Path, to: &Path, size: usize) -> Result<()> {
    fs::create_dir_all(to.join("blobs/sha256"))?;
    fs::write(to.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let blob = |digest: &Value| -> Result<Vec<u8>> { Ok(fs::read(from.join(blob_path(digest)?))?) };
    let put = |bytes: &[u8]| -> Result<Value> {
        let digest = format!("sha256:{}", hex::encode(Sha256::digest(bytes)));
        fs::write(to.join(blob_path(&json!(digest))?), bytes)?;
        Ok(json!({"digest": digest, "size": bytes.len()}))
    };
    let mut index: Value = serde_json::from_slice(&fs::read(from.join("index.json"))?)?;
    let mut manifest: Value = serde_json::from_slice(&blob(&index["manifests"][0]["digest"])?)?;
    let mut config: Value = serde_json::from_slice(&blob(&manifest["config"]["digest"])?)?;
    for layer in manifest["layers"].as_array().context("an image has layers")? {
        put(&blob(&layer["digest"])?)?;
    }

    let layer = untouched(size)?;
    let mut descriptor = put(&layer)?;
    descriptor["mediaType"] = "application/vnd.oci.image.layer.v1.tar".into();
    config["rootfs"]["diff_ids"].as_array_mut().context("a config has diff ids")?.push(descriptor["digest"].clone());
    manifest["layers"].as_array_mut().context("an image has layers")?.push(descriptor);
    merge(&mut manifest["config"], put(&serde_json::to_vec(&config)?)?);
    merge(&mut index["manifests"][0], put(&serde_json::to_vec(&manifest)?)?);
    Ok(fs::write(to.join("index.json"), serde_json::to_vec(&index)?)?)
}

/// A tar of files that do not compress.
fn untouched(size: usize) -> Result<Vec<u8>> {
    let mut random = rand::rngs::StdRng::seed_from_u64(1);
    let mut tar = tar::Builder::new(Vec::with_capacity(size + MIB));
    let mut content = vec![0; MIB];
    for number in 0..size / MIB {
        random.fill_bytes(&mut content);
        let mut header = tar::Header::new_ustar();
        header.set_size(MIB as u64);
        header.set_mode(0o644);
        header.set_mtime(0);
        tar.append_data(&mut header, format!("opt/untouched/{number}"), content.as_slice())?;
    }
    let mut bytes = tar.into_inner()?;
    bytes.flush()?;
    Ok(bytes)
}

fn merge(descriptor: &mut Value, of: Value) {
    for key in ["digest", "size"] {
        descriptor[key] = of[key].clone();
    }
}

fn blob_path(digest: &Value) -> Result<String> {
    let hex = digest.as_str().and_then(|digest| digest.strip_prefix("sha256:")).context("a SHA-256 digest")?;
    Ok(format!("blobs/sha256/{hex}"))
}

/// Sizes of the layers of an OCI layout's image.
fn layers(layout: &Path) -> Result<Vec<u64>> {
    let index: Value = serde_json::from_slice(&fs::read(layout.join("index.json"))?)?;
    let path = layout.join(blob_path(&index["manifests"][0]["digest"])?);
    let manifest: Value = serde_json::from_slice(&fs::read(path)?)?;
    let layers = manifest["layers"].as_array().context("an image has layers")?;
    Ok(layers.iter().filter_map(|layer| layer["size"].as_u64()).collect())
}
