//! `aenv-guest`: the one program of ours inside a sandbox.
//!
//! As PID 1 it turns a bare kernel into a machine (`boot`) and then serves the envd protocol on port 49983 (`envd`).
//! `aenv-guest envd --listen ADDRESS` serves the same protocol from an ordinary process, for tests and benchmarks: it
//! mounts nothing and leaves the machine's clock, name and random pool alone.
//!
//! The binary is static and needs nothing of the image it runs on: no shell, no libc, no `/etc/passwd`.

#![deny(unsafe_code)]

mod boot;
mod console;
mod envd;
mod process;
mod sys;

use std::net::SocketAddr;
use std::process::ExitCode;

const USAGE: &str = "usage: aenv-guest envd --listen ADDRESS:PORT | aenv-guest --version";

fn main() -> ExitCode {
    // The kernel hands stray command-line words to PID 1 as arguments: there they mean nothing.
    if std::process::id() == 1 {
        boot::run();
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["--version"] => {
            println!("aenv-guest {} (envd {})", env!("CARGO_PKG_VERSION"), aenv_guest_proto::ENVD_VERSION);
            ExitCode::SUCCESS
        }
        ["envd", "--listen", address] => match address.parse() {
            Ok(address) => serve_as_process(address),
            Err(_) => usage(&format!("{address} is not an ADDRESS:PORT")),
        },
        _ => usage("unknown arguments"),
    }
}

fn usage(problem: &str) -> ExitCode {
    eprintln!("aenv-guest: {problem}\n{USAGE}");
    ExitCode::from(2)
}

fn serve_as_process(address: SocketAddr) -> ExitCode {
    match envd::run_as_process(address) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("aenv-guest: {}", console::Chain(&error));
            ExitCode::FAILURE
        }
    }
}
