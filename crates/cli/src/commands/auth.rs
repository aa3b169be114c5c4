//! `aenv auth`: asks for server and key, and keeps them.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};

use aenv_api::Client;
use anyhow::{Context as _, bail};

use crate::credentials::{Credentials, DEFAULT_SERVER, Surroundings};
use crate::output;

/// Asks on the terminal, the key without echo; reads two plain lines where standard input is no terminal. No request is
/// made, so that a server may be named that does not run yet.
pub(crate) fn run(surroundings: &Surroundings) -> anyhow::Result<()> {
    let path = surroundings.credentials_path()?;
    let url = ask(&format!("AENV server URL [{DEFAULT_SERVER}]: "))?;
    let url = if url.is_empty() { DEFAULT_SERVER.to_owned() } else { url };
    let api_key = if io::stdin().is_terminal() {
        rpassword::prompt_password("API key: ").context("read the API key")?.trim().to_owned()
    } else {
        ask("API key: ")?
    };
    if api_key.is_empty() {
        bail!("the API key is empty");
    }
    // Says what is wrong with either before it is kept.
    Client::new(&url, &api_key)?;
    Credentials { url, api_key }.write(&path)?;
    Ok(output::line("Credentials saved.")?)
}

fn ask(prompt: &str) -> anyhow::Result<String> {
    let mut out = io::stdout().lock();
    out.write_all(prompt.as_bytes()).and_then(|()| out.flush()).context("write to standard output")?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer).context("read standard input")?;
    Ok(answer.trim().to_owned())
}
