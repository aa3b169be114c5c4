//! A real guest agent on the loopback, run as an ordinary process.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use super::eventually;

/// Ended when dropped.
#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) address: String,
    process: Child,
}

impl Agent {
    /// Starts the agent; `None`, with the reason printed, where its binary has not been built.
    pub(crate) async fn start() -> Option<Self> {
        let binary = binary()?;
        // The port is free at this moment; nobody else on the loopback looks for this one.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let mut command = Command::new(binary);
        command.args(["envd", "--listen", &address]).stdin(Stdio::null()).stdout(Stdio::null());
        let process = command.spawn().unwrap();
        let agent = Self { address, process };
        let connect = || std::net::TcpStream::connect(&agent.address).is_ok();
        eventually("the agent listens", connect).await;
        Some(agent)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Where the agent's binary is: `AENV_GUEST_AGENT`, else beside `aenv`.
fn binary() -> Option<PathBuf> {
    let named = std::env::var_os("AENV_GUEST_AGENT").map(PathBuf::from);
    let beside = || PathBuf::from(env!("CARGO_BIN_EXE_aenv")).with_file_name("aenv-guest");
    let binary = named.unwrap_or_else(beside);
    if binary.is_file() {
        return Some(binary);
    }
    println!("skipped: no guest agent at {}; build it with `cargo build -p aenv-guest-agent`", binary.display());
    None
}
