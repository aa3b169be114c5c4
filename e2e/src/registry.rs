//! A real `docker-registry` on a free loopback port.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::wait::eventually;

/// A running registry. Killed and removed when dropped.
#[derive(Debug)]
pub struct Registry {
    child: Child,
    address: SocketAddr,
    _dir: tempfile::TempDir,
}

impl Registry {
    /// `None`, with the reason printed: there is no `docker-registry` here.
    pub async fn start() -> Option<Self> {
        let found =
            Command::new("docker-registry").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if found.is_err() {
            println!("skipped: no docker-registry in PATH (Debian package docker-registry)");
            return None;
        }
        let dir = tempfile::tempdir().expect("make a directory for the registry");
        // The registry takes no port 0: ask the kernel for a free one and give it right back.
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
        let address = free.expect("find a free port");
        let config = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {:?}}}}}\nhttp: {{addr: \"{address}\"}}\n",
            dir.path().join("storage"),
        );
        let path = dir.path().join("config.yml");
        fs::write(&path, config).expect("write the registry's configuration");
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("start the registry");
        let registry = Self { child, address, _dir: dir };
        let (http, url) = (registry.http(), registry.url("/v2/"));
        eventually("the registry answers", async || {
            http.get(&url).send().await.ok().filter(|answer| answer.status().is_success())
        })
        .await;
        Some(registry)
    }

    /// The registry as a reference's host part.
    #[must_use]
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    fn http(&self) -> reqwest::Client {
        let builder = aenv_api::http_builder(&self.url("")).expect("a URL of ours");
        builder.build().expect("an HTTP client")
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Pushes the image of an OCI layout folder as `name:tag`.
    pub async fn push(&self, layout: &Path, name: &str, tag: &str) {
        let read = |digest: &str| {
            fs::read(layout.join("blobs/sha256").join(digest.trim_start_matches("sha256:"))).expect("read a blob")
        };
        let index: Value =
            serde_json::from_slice(&fs::read(layout.join("index.json")).expect("read the index")).expect("an index");
        let manifest = read(index["manifests"][0]["digest"].as_str().expect("a digest"));
        let parsed: Value = serde_json::from_slice(&manifest).expect("a manifest");
        let layers = parsed["layers"].as_array().expect("layers").iter();
        for descriptor in layers.chain([&parsed["config"]]) {
            let digest = descriptor["digest"].as_str().expect("a digest");
            self.put_blob(name, digest, read(digest)).await;
        }
        let answer = self
            .http()
            .put(self.url(&format!("/v2/{name}/manifests/{tag}")))
            .header("content-type", "application/vnd.oci.image.manifest.v1+json")
            .body(manifest)
            .send()
            .await
            .expect("push a manifest");
        assert!(answer.status().is_success(), "push a manifest: {}", answer.status());
    }

    async fn put_blob(&self, name: &str, digest: &str, bytes: Vec<u8>) {
        let client = self.http();
        let begun = client.post(self.url(&format!("/v2/{name}/blobs/uploads/"))).send().await.expect("begin an upload");
        let location = begun.headers()["location"].to_str().expect("a location").to_owned();
        let location = if location.starts_with("http") { location } else { self.url(&location) };
        let separator = if location.contains('?') { '&' } else { '?' };
        let answer = client
            .put(format!("{location}{separator}digest={digest}"))
            .header("content-type", "application/octet-stream")
            .body(bytes)
            .send()
            .await
            .expect("push a blob");
        assert!(answer.status().is_success(), "push a blob: {}", answer.status());
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}
