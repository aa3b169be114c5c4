//! The same against a real registry.

mod support;

use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use aenv_block_source::{
    BlockCache, CacheOptions, CredentialFile, CredentialSource, Credentials, DockerConfig, DownloadOptions, FetchError,
    FetchProblem, Network, Registry, Source, download,
};
use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};
use support::{digest, pattern, quick, read};

const PASSWORD: &str = "secret";
/// Its bcrypt hash.
const HASH: &str = "$2b$04$.4OUBfwRzuUetqSKI1O4POGPVzGyvJrwLW40hybVZ1szJ0r7/x4hW";

/// Debian's `docker-registry` with its own storage, into which only `me` gets. Ended when dropped.
struct DockerRegistry {
    child: Child,
    host: String,
    _dir: tempfile::TempDir,
}

impl DockerRegistry {
    /// `None`, said aloud, where it isn't installed.
    fn start() -> Option<Self> {
        let installed = ["/usr/bin/docker-registry", "/usr/local/bin/docker-registry"];
        let Some(program) = installed.iter().find(|path| Path::new(path).exists()) else {
            eprintln!("skipped: docker-registry is not installed (apt-get install docker-registry)");
            return None;
        };
        let deadline = Instant::now() + Duration::from_secs(30);
        // The port is free when it is looked for; should another take it meanwhile, the next attempt finds another.
        loop {
            let mut registry = Self::try_start(program);
            while registry.child.try_wait().unwrap().is_none() {
                if TcpStream::connect(&registry.host).is_ok() {
                    return Some(registry);
                }
                assert!(Instant::now() < deadline, "the registry does not listen");
                thread::sleep(Duration::from_millis(20));
            }
            assert!(Instant::now() < deadline, "the registry ended");
        }
    }

    fn try_start(program: &str) -> Self {
        let host = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let dir = tempfile::tempdir().unwrap();
        let (users, config, log) = (dir.path().join("users"), dir.path().join("config.yml"), dir.path().join("log"));
        std::fs::write(&users, format!("me:{HASH}\n")).unwrap();
        let text = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
             http: {{addr: '{host}'}}\nauth: {{htpasswd: {{realm: test, path: {}}}}}\n",
            dir.path().join("data").display(),
            users.display()
        );
        std::fs::write(&config, text).unwrap();
        let child = Command::new(program)
            .arg("serve")
            .arg(config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(log).unwrap())
            .spawn()
            .unwrap();
        Self { child, host, _dir: dir }
    }

    fn push(&self, name: &str, blob: Vec<u8>) -> String {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::new(ClientConfig { protocol: ClientProtocol::Http, ..ClientConfig::default() });
        let reference: Reference = format!("{}/{name}", self.host).parse().unwrap();
        let auth = RegistryAuth::Basic("me".into(), PASSWORD.into());
        let digest = digest(&blob);
        runtime.block_on(async {
            client.auth(&reference, &auth, RegistryOperation::Push).await.unwrap();
            client.push_blob(&reference, blob, &digest).await.unwrap();
        });
        digest
    }
}

impl Drop for DockerRegistry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn me(password: &str) -> Arc<Credentials> {
    Arc::new(Credentials::Basic { username: "me".into(), password: password.into() })
}

#[test]
fn a_blob_of_a_real_registry_is_read_lazily_and_then_whole() {
    let Some(docker) = DockerRegistry::start() else { return };
    let bytes = pattern(3_000_001);
    let name = docker.push("team/image", bytes.clone());
    let url = format!("http://{}/v2/team/image/blobs", docker.host);
    let registry = Registry::new(Network::start().unwrap(), &url, me(PASSWORD), quick()).unwrap();
    let origin = registry.find_blob(&name).unwrap();
    assert_eq!(origin.size(), bytes.len() as u64);
    let dir = tempfile::tempdir().unwrap();
    let cache = BlockCache::open(&CacheOptions::new(dir.path(), 8 << 20)).unwrap();
    let blob = Arc::new(cache.blob(&name, Arc::new(origin)));
    assert_eq!(read(&*blob, 1_234_567, 100).unwrap(), bytes[1_234_567..1_234_667]);
    assert_eq!(cache.stats().fetched_bytes, 256 << 10);
    let options = DownloadOptions { delay: Duration::ZERO, delay_extra: Duration::ZERO, ..DownloadOptions::default() };
    assert!(download(Arc::clone(&blob), options).unwrap().wait().unwrap().verified);
    drop(docker);
    assert_eq!(read(&*blob, 0, bytes.len()).unwrap(), bytes);
}

#[test]
fn a_real_registry_refuses_strangers_and_what_it_has_not() {
    let Some(docker) = DockerRegistry::start() else { return };
    let name = docker.push("team/image", pattern(1000));
    let url = format!("http://{}/v2/team/image/blobs", docker.host);
    for (credentials, digest, refused) in [(me("wrong"), name, true), (me(PASSWORD), digest(b"no such blob"), false)] {
        let registry = Registry::new(Network::start().unwrap(), &url, credentials, quick()).unwrap();
        let error = read(&registry.blob(&digest, 1000).unwrap(), 0, 10).unwrap_err();
        let problem = error.downcast::<FetchError>().unwrap().source;
        match problem {
            FetchProblem::Unauthorized(_) => assert!(refused),
            FetchProblem::Status { status, words, .. } => {
                assert!(!refused && status == 404 && words.contains("BLOB_UNKNOWN"), "{status} {words}");
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn what_files_say_opens_a_real_registry_as_soon_as_they_say_it() {
    let Some(docker) = DockerRegistry::start() else { return };
    let bytes = pattern(1000);
    let name = docker.push("team/image", bytes.clone());
    let url = format!("http://{}/v2/team/image/blobs", docker.host);
    let dir = tempfile::tempdir().unwrap();
    let (config, file) = (dir.path().join("config.json"), dir.path().join("cred.json"));
    let sources: [(Arc<dyn CredentialSource>, _, &str); 2] =
        [(Arc::new(DockerConfig::new(&config)), &config, ""), (Arc::new(CredentialFile::new(&file)), &file, "/team")];
    for (source, path, below) in sources {
        let registry = Registry::new(Network::start().unwrap(), &url, source, quick()).unwrap();
        let blob = registry.blob(&name, 1000).unwrap();
        let refused = |blob: &dyn Source| {
            let problem = read(blob, 0, 10).unwrap_err().downcast::<FetchError>().unwrap().source;
            assert!(matches!(problem, FetchProblem::Unauthorized(_)), "{problem}");
        };
        refused(&blob);
        let say = |password: &str| {
            let entry = format!(r#"{{"username":"me","password":"{password}"}}"#);
            std::fs::write(path, format!(r#"{{"auths":{{"{}{below}":{entry}}}}}"#, docker.host)).unwrap();
        };
        say("wrong");
        refused(&blob);
        say(PASSWORD);
        assert_eq!(read(&blob, 10, 20).unwrap(), bytes[10..30]);
    }
}
