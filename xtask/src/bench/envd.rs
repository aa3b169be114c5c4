//! `bench envd`: the guest agent as a process of this host, on loopback, through the official Python SDK. What a machine
//! around it costs is measured elsewhere.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::judge::{self, Bound, Sense, p50, ratio};
use crate::sh::Run;
use crate::{artifacts, paths, sdk, setup};

const BOUNDS: &[Bound] = &[
    p50("exec_true", 3.0, "ms"),
    ratio("stdout", Sense::AtLeast, 1.0, "100 MB/s"),
    p50("stdout_rss", 16.0, "MiB of growth"),
    ratio("files_10k", Sense::AtMost, 2.5, "nginx with dav, PUT by the same HTTP client"),
    ratio("watch_10k", Sense::AtLeast, 1.0, "all events, or told that some are missing"),
];

/// Longest wait for a server to listen.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn run(rows: &[String], json: bool) -> Result<()> {
    judge::check_rows(BOUNDS, rows)?;
    setup::machine()?;
    let nginx = setup::program("nginx", "usr/sbin/nginx")?;
    let venv = sdk::python_venv()?;
    let agent = Agent::start(&artifacts::agent()?)?;
    // On the disk that is built on: /tmp may be memory.
    let scratch = tempfile::tempdir_in(paths::target()).context("make a scratch folder")?;
    let peer = Nginx::start(&nginx, scratch.path())?;
    let measured = Run::new(venv.program("python"))
        .arg("bench_envd.py")
        .args(rows)
        .dir(sdk::folder().join("python"))
        .env("BENCH_ENVD", format!("http://{}", agent.address))
        .env("BENCH_ENVD_PID", agent.child.id().to_string())
        .env("BENCH_PEER", format!("http://{}", peer.address))
        .env("BENCH_SCRATCH", scratch.path())
        .read()?;
    judge::report("envd", BOUNDS, &measured, json)
}

/// The agent, until this is dropped.
struct Agent {
    child: Child,
    address: SocketAddr,
}

impl Agent {
    fn start(program: &Path) -> Result<Self> {
        let mut child = Run::new(program)
            .args(["envd", "--listen", "127.0.0.1:0"])
            .into_command()
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        let mut lines = BufReader::new(child.stderr.take().context("its messages")?).lines();
        let said = lines.next().transpose()?.unwrap_or_default();
        let address = said.rsplit(' ').next().and_then(|word| word.parse().ok());
        // What it says later is nobody's, and must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        match address {
            Some(address) => Ok(Self { child, address }),
            None => {
                end(&mut child);
                bail!("the agent does not say where it listens: {said:?}")
            }
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

/// nginx with what takes uploads, until this is dropped.
struct Nginx {
    child: Child,
    address: SocketAddr,
}

impl Nginx {
    fn start(program: &Path, dir: &Path) -> Result<Self> {
        let address = crate::node::free_address()?;
        let at = dir.display();
        // One worker, as the agent is one process. Files are made as the agent makes them: 0644, directories too.
        let config = format!(
            "daemon off; master_process off; worker_processes 1; pid {at}/pid; error_log {at}/error.log;\n\
             events {{ worker_connections 256; }}\n\
             http {{ access_log off; client_body_temp_path {at}/body; proxy_temp_path {at}/p; fastcgi_temp_path {at}/f;\n\
             uwsgi_temp_path {at}/u; scgi_temp_path {at}/s; keepalive_requests 1000000;\n\
             server {{ listen {address}; root {at}; client_max_body_size 0;\n\
             location / {{ dav_methods PUT; create_full_put_path on; }} }} }}\n"
        );
        let file = dir.join("nginx.conf");
        std::fs::write(&file, config).with_context(|| format!("write {}", file.display()))?;
        let child = Run::new(program)
            .arg("-p")
            .arg(dir)
            .arg("-c")
            .arg(&file)
            .into_command()
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        let mut nginx = Self { child, address };
        let deadline = Instant::now() + PATIENCE;
        while std::net::TcpStream::connect(address).is_err() {
            if let Some(status) = nginx.child.try_wait()? {
                bail!("nginx ended with {status}");
            }
            if Instant::now() >= deadline {
                bail!("nginx does not listen on {address}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(nginx)
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

fn end(child: &mut Child) {
    // It may have ended by itself.
    _ = child.kill();
    _ = child.wait();
}
