//! A node server of our own: started on a free port with a home under the target directory, stopped at the end.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::artifacts::Artifacts;
use crate::paths;
use crate::sh::{Run, is_root, say};

/// The first start boots a probe guest under emulation and may fetch a kernel.
const START_TIMEOUT: Duration = Duration::from_secs(300);
/// A stopping server ends its sandboxes; it allows itself a minute for that.
const STOP_TIMEOUT: Duration = Duration::from_secs(75);
const POLL: Duration = Duration::from_millis(50);
/// What of our environment the server reads; sudo drops the rest.
const SERVER_VARS: &[&str] = &["API_ADDR", "AENV_API_KEY", "RUST_LOG", "http_proxy", "https_proxy", "no_proxy"];

/// A server's home and the configuration file that points at it. Kept between runs: the kernel in it is not fetched
/// twice, and what a killed server left behind is found and ended by the next one.
#[derive(Debug)]
pub(crate) struct Home {
    dir: PathBuf,
}

impl Home {
    /// The home called `name`; made if it is new.
    pub(crate) fn named(name: &str, artifacts: &Artifacts) -> Result<Self> {
        let dir = paths::kept().join("homes").join(name);
        fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        let home = Self { dir };
        // Named by content, so that our homes may share them: the guest kernel is fetched once.
        let guest = toml::Table::from_iter([
            ("agent_path".to_owned(), text(&artifacts.agent)?.into()),
            ("kit_path".to_owned(), text(&home.kits())?.into()),
        ]);
        let config = toml::Table::from_iter([
            // Relative paths start at the file's own folder.
            ("home_path".to_owned(), "home".into()),
            ("runtime_path".to_owned(), runtime_path(name).into()),
            ("cache_path".to_owned(), text(&shared().join("cache"))?.into()),
            ("guest".to_owned(), guest.into()),
            ("network".to_owned(), sealed().into()),
            ("orchestrator".to_owned(), toml::Table::from_iter([("on_stop".to_owned(), "delete".into())]).into()),
        ]);
        let path = home.config();
        fs::write(&path, toml::to_string(&config)?).with_context(|| format!("write {}", path.display()))?;
        Ok(home)
    }

    /// Adds a section to the configuration.
    pub(crate) fn with(self, section: &str, keys: toml::Table) -> Result<Self> {
        let path = self.config();
        let mut config: toml::Table = toml::from_str(&fs::read_to_string(&path)?)?;
        config.insert(section.to_owned(), keys.into());
        fs::write(&path, toml::to_string(&config)?).with_context(|| format!("write {}", path.display()))?;
        Ok(self)
    }

    /// Guest kernels with their initramfs, by content.
    pub(crate) fn kits(&self) -> PathBuf {
        shared().join("guest")
    }

    /// The configuration file.
    pub(crate) fn config(&self) -> PathBuf {
        self.dir.join("aenv.toml")
    }

    /// Everything the server says.
    pub(crate) fn log(&self) -> PathBuf {
        self.dir.join("server.log")
    }
}

/// This machine's network is not changed, and sandboxes reach nothing.
fn sealed() -> toml::Table {
    let egress = toml::Table::from_iter([("enabled".to_owned(), false.into())]);
    toml::Table::from_iter([("egress".to_owned(), egress.into())])
}

/// What costs time and not truth, kept once for all homes.
fn shared() -> PathBuf {
    paths::kept().join("shared")
}

/// Sockets live here, and socket paths have room for 107 bytes: too few below a deep target directory.
fn runtime_path(name: &str) -> String {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};
    let mut hasher = DefaultHasher::new();
    paths::kept().hash(&mut hasher);
    format!("/run/aenv-{name}-{:08x}", hasher.finish() as u32)
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}

/// A running server.
#[derive(Debug)]
pub(crate) struct Node {
    child: Child,
    address: SocketAddr,
    key: String,
    cli: PathBuf,
    log: PathBuf,
    stopped: bool,
}

impl Node {
    /// Starts a server and waits until it is healthy.
    ///
    /// Errors: it ended by itself or was not healthy in time; the message holds the end of its log.
    pub(crate) fn start(artifacts: &Artifacts, home: &Home) -> Result<Self> {
        let address = free_address()?;
        let key = fresh_key()?;
        say(format_args!("starting a node on http://{address} (log: {})", home.log().display()));
        let log = File::create(home.log()).with_context(|| format!("create {}", home.log().display()))?;
        let child = Run::as_root_keeping(SERVER_VARS, &artifacts.server)
            .arg("--config")
            .arg(home.config())
            .env("API_ADDR", address.to_string())
            .env("AENV_API_KEY", &key)
            .quiet()
            .into_command()
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("share the log")?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("start {}", artifacts.server.display()))?;
        let mut node = Self { child, address, key, cli: artifacts.cli.clone(), log: home.log(), stopped: false };
        node.wait_healthy()?;
        Ok(node)
    }

    /// What the E2B SDKs and our clients read to find this server.
    pub(crate) fn client_env(&self) -> Vec<(&'static str, String)> {
        let url = self.url();
        vec![
            ("E2B_API_URL", url.clone()),
            ("E2B_SANDBOX_URL", url.clone()),
            ("E2B_API_KEY", self.key.clone()),
            ("AENV_SERVER", url),
            ("AENV_API_KEY", self.key.clone()),
        ]
    }

    /// Where it listens.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Its API key.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// `aenv` against this server.
    pub(crate) fn cli(&self) -> Run {
        self.client_env().into_iter().fold(Run::new(&self.cli), |run, (name, value)| run.env(name, value))
    }

    /// Makes the template `name` from an OCI layout folder; one that is there already is made anew.
    pub(crate) fn pull(&self, layout: &Path, name: &str) -> Result<()> {
        self.cli().args(["pull", &format!("oci:{}", text(layout)?), "--name", name]).run()
    }

    /// Asks the server to end and waits for it.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn wait_healthy(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        while !is_healthy(self.address) {
            if let Some(status) = self.child.try_wait().context("look after the server")? {
                self.stopped = true;
                bail!("the server ended with {status} before it was healthy:\n{}", self.log_end());
            }
            if Instant::now() > deadline {
                bail!("the server was not healthy after {} s:\n{}", START_TIMEOUT.as_secs(), self.log_end());
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.stopped, true) {
            return Ok(());
        }
        self.signal("TERM")?;
        let deadline = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().context("look after the server")? {
                if !status.success() {
                    bail!("the server ended with {status}:\n{}", self.log_end());
                }
                return Ok(());
            }
            thread::sleep(POLL);
        }
        self.signal("KILL")?;
        self.child.wait().context("collect the server")?;
        bail!("the server did not stop within {} s and was killed:\n{}", STOP_TIMEOUT.as_secs(), self.log_end());
    }

    /// Through `kill`, as root: under sudo the child is not ours to signal.
    fn signal(&self, name: &str) -> Result<()> {
        let pid = self.child.id().to_string();
        if name == "KILL" && !is_root() {
            // sudo cannot pass this one on, so its child is killed.
            Run::as_root("pkill").args(["-KILL", "--parent", &pid]).quiet().run()?;
        }
        Run::as_root("kill").args([&format!("-{name}"), &pid]).quiet().run()
    }

    fn log_end(&self) -> String {
        const LINES: usize = 20;
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("{error:#}");
        }
    }
}

pub(crate) fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("find a free port")?;
    listener.local_addr().context("find a free port")
}

/// A key in E2B's format.
fn fresh_key() -> Result<String> {
    let mut bytes = [0u8; 32];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).context("read /dev/urandom")?;
    Ok(bytes.iter().fold("e2b_".to_owned(), |key, byte| key + &format!("{byte:02x}")))
}

/// Whether `GET /health` is answered with 204; three lines of HTTP are all that xtask needs to speak.
fn is_healthy(address: SocketAddr) -> bool {
    let ask = || -> std::io::Result<bool> {
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        write!(stream, "GET /health HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
        let mut answer = [0u8; 12];
        stream.read_exact(&mut answer)?;
        Ok(answer.ends_with(b" 204"))
    };
    ask().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_204_is_healthy() -> Result<()> {
        for (answer, healthy) in [("HTTP/1.1 204 No Content\r\n\r\n", true), ("HTTP/1.1 503 Busy\r\n\r\n", false)] {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            let address = listener.local_addr()?;
            let server = thread::spawn(move || -> std::io::Result<()> {
                let (mut stream, _) = listener.accept()?;
                let mut request = [0u8; 512];
                let _ = stream.read(&mut request)?;
                stream.write_all(answer.as_bytes())
            });
            assert_eq!(is_healthy(address), healthy);
            server.join().expect("the thread does not panic")?;
        }
        assert!(!is_healthy(free_address()?));
        Ok(())
    }

    #[test]
    fn keys_have_the_format_that_sdks_check() -> Result<()> {
        let key = fresh_key()?;
        assert!(key.starts_with("e2b_") && key.len() == 68);
        assert_ne!(key, fresh_key()?);
        Ok(())
    }
}
