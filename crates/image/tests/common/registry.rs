//! A real registry (Debian's `docker-registry`) for one test, and a front for it that misbehaves on demand.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part, from outside")]

use std::collections::HashMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::common::{Image, sha256};

/// The password of the user `me`, and its bcrypt hash.
pub const PASSWORD: &str = "secret";
const HASH: &str = "$2b$04$.4OUBfwRzuUetqSKI1O4POGPVzGyvJrwLW40hybVZ1szJ0r7/x4hW";

/// A registry process with its own storage. Ended when dropped.
pub struct Registry {
    child: Child,
    /// `127.0.0.1:PORT`.
    pub host: String,
    dir: tempfile::TempDir,
}

impl Registry {
    /// Starts one; `None`, said aloud, where it isn't installed. With `password`, only `me` gets in.
    pub async fn start(password: bool) -> Option<Self> {
        let installed = ["/usr/bin/docker-registry", "/usr/local/bin/docker-registry"];
        let Some(program) = installed.iter().find(|path| Path::new(path).exists()) else {
            eprintln!("skipped: docker-registry is not installed (apt-get install docker-registry)");
            return None;
        };
        let deadline = Instant::now() + Duration::from_secs(30);
        // The port is free when it is looked for; should another take it meanwhile, the next attempt finds another.
        loop {
            let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let host = format!("127.0.0.1:{port}");
            let dir = tempfile::tempdir().unwrap();
            let users = dir.path().join("users");
            std::fs::write(&users, format!("me:{HASH}\n")).unwrap();
            let mut config = format!(
                "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: '{host}'}}\n",
                dir.path().join("data").display()
            );
            if password {
                config += &format!("auth: {{htpasswd: {{realm: test, path: {}}}}}\n", users.display());
            }
            let file = dir.path().join("config.yml");
            std::fs::write(&file, config).unwrap();
            let log = std::fs::File::create(dir.path().join("log")).unwrap();
            let child = Command::new(program)
                .arg("serve")
                .arg(file)
                .stdin(Stdio::null())
                .stdout(log.try_clone().unwrap())
                .stderr(log)
                .spawn()
                .unwrap();
            let mut registry = Self { child, host, dir };
            while registry.child.try_wait().unwrap().is_none() {
                if TcpStream::connect(&registry.host).await.is_ok() {
                    return Some(registry);
                }
                assert!(Instant::now() < deadline, "{}", registry.log());
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            assert!(Instant::now() < deadline, "{}", registry.log());
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub async fn client(&self) -> Client {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::new(ClientConfig { protocol: ClientProtocol::Http, ..ClientConfig::default() });
        let auth = RegistryAuth::Basic("me".into(), PASSWORD.into());
        client.auth(&self.reference("any"), &auth, RegistryOperation::Push).await.unwrap();
        client
    }

    pub fn reference(&self, name: &str) -> Reference {
        format!("{}/{name}", self.host).parse().unwrap()
    }

    /// Pushes an image as `name` and gives the manifest's digest.
    pub async fn push(&self, name: &str, image: &Image) -> String {
        let client = self.client().await;
        let reference = self.reference(name);
        let (blobs, manifest) = image.parts();
        for blob in blobs.into_iter().chain([image.file()]) {
            let digest = sha256(&blob);
            client.push_blob(&reference, blob, &digest).await.unwrap();
        }
        let digest = sha256(&manifest);
        self.push_manifest(&reference, manifest, "application/vnd.oci.image.manifest.v1+json").await;
        digest
    }

    pub async fn push_manifest(&self, reference: &Reference, manifest: Vec<u8>, media_type: &str) {
        let client = self.client().await;
        client.push_manifest_raw(reference, manifest, media_type.parse().unwrap()).await.unwrap();
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A request, as the front's rules see it.
pub struct Request {
    pub method: String,
    /// Path and query.
    pub target: String,
    pub headers: HashMap<String, String>,
    /// The request's body.
    pub body: Vec<u8>,
}

/// What the front does with it.
pub enum Answer {
    /// Ask the registry.
    Pass,
    /// Ask the registry, and cut its body to this many bytes though the header promises all.
    Cut(usize),
    /// Ask the registry, and change a byte of its body.
    Corrupt,
    /// Answer itself: status, headers, body.
    Say(u16, Vec<(&'static str, String)>, String),
    /// Say nothing, and keep the connection open.
    Hang,
}

/// A server between client and registry. Stopped when dropped.
pub struct Front {
    /// `127.0.0.1:PORT`.
    pub host: String,
    /// `METHOD TARGET` of every request.
    pub seen: Arc<Mutex<Vec<String>>>,
    task: JoinHandle<()>,
}

impl Front {
    pub async fn start(upstream: &str, rules: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (upstream, rules, log) = (upstream.to_owned(), Arc::new(rules), Arc::clone(&seen));
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (upstream, rules, log) = (upstream.clone(), Arc::clone(&rules), Arc::clone(&log));
                connections.spawn(async move {
                    // A client that hangs up is no failure of the test.
                    let _ = serve(stream, &upstream, &*rules, &log).await;
                });
            }
        });
        Self { host, seen, task }
    }

    pub fn count(&self, part: &str) -> usize {
        self.seen.lock().unwrap().iter().filter(|request| request.contains(part)).count()
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    mut stream: TcpStream,
    upstream: &str,
    rules: &(dyn Fn(&Request) -> Answer + Send + Sync),
    log: &Mutex<Vec<String>>,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let mut lines = head.lines();
    let mut words = lines.next().unwrap_or_default().split(' ').map(str::to_owned);
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let headers: HashMap<String, String> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(key, value)| (key.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let mut body = vec![0; headers.get("content-length").and_then(|length| length.parse().ok()).unwrap_or(0)];
    stream.read_exact(&mut body).await?;
    let request = Request { method, target, headers, body };
    log.lock().unwrap().push(format!("{} {}", request.method, request.target));
    let answer = rules(&request);
    let corrupt = matches!(answer, Answer::Corrupt);
    let (status, mut headers, mut body, cut) = match answer {
        Answer::Hang => {
            tokio::time::sleep(Duration::from_secs(600)).await;
            return Ok(());
        }
        Answer::Say(status, headers, body) => {
            let headers = headers.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
            (status, headers, body.into_bytes(), None)
        }
        Answer::Pass | Answer::Cut(_) | Answer::Corrupt => {
            let mut ask = reqwest::Client::new().get(format!("http://{upstream}{}", request.target));
            for name in ["accept", "range"] {
                if let Some(value) = request.headers.get(name) {
                    ask = ask.header(name, value);
                }
            }
            let response = ask.send().await.map_err(std::io::Error::other)?;
            let headers: Vec<(String, String)> = response
                .headers()
                .iter()
                .filter(|(key, _)| !matches!(key.as_str(), "content-length" | "transfer-encoding" | "connection"))
                .map(|(key, value)| (key.to_string(), value.to_str().unwrap_or_default().to_owned()))
                .collect();
            let status = response.status().as_u16();
            let body = response.bytes().await.map_err(std::io::Error::other)?.to_vec();
            (status, headers, body, if let Answer::Cut(length) = answer { Some(length) } else { None })
        }
    };
    if corrupt && let Some(byte) = body.last_mut() {
        *byte ^= 0xff;
    }
    headers.push(("content-length".into(), body.len().to_string()));
    headers.push(("connection".into(), "close".into()));
    let mut out = format!("HTTP/1.1 {status} Said\r\n");
    for (key, value) in headers {
        out += &format!("{key}: {value}\r\n");
    }
    stream.write_all(out.as_bytes()).await?;
    stream.write_all(b"\r\n").await?;
    let length = cut.unwrap_or(body.len()).min(body.len());
    stream.write_all(&body[..length]).await?;
    stream.shutdown().await
}
