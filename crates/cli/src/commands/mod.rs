//! One file a command. Each gets what it needs as values and prints its own result.

mod auth;
mod completion;
mod exec;
mod pull;
mod sandboxes;
mod snapshot;
mod start;
mod template;

use std::process::ExitCode;

use aenv_api::Client;

use crate::args::{Command, Snapshot, Template};
use crate::attach;
use crate::credentials::Surroundings;
use crate::transfer;

/// Carries out one command. The exit code is the remote one where a command has one.
pub(crate) async fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Auth => auth::run(&Surroundings::of_process())?,
        Command::Completion { shell } => completion::run(shell)?,
        Command::Pull(pull) => pull::run(&client()?, pull).await?,
        Command::Start(start) => return start::run(&client()?, start).await,
        Command::Exec(exec) => return exec::run(&client()?, exec).await,
        Command::Connect(target) => return attach::connect(&client()?, target.sandbox_id).await,
        Command::Upload(upload) => return transfer::upload(&client()?, &upload).await,
        Command::Download(download) => return transfer::download(&client()?, &download).await,
        Command::Timeout(timeout) => sandboxes::timeout(&client()?, &timeout).await?,
        Command::Pause(pause) => sandboxes::pause(&client()?, &pause).await?,
        Command::Resume(resume) => sandboxes::resume(&client()?, &resume).await?,
        Command::Rollback(rollback) => sandboxes::roll_back(&client()?, &rollback).await?,
        Command::Fork(fork) => sandboxes::fork(&client()?, &fork).await?,
        Command::List(listing) => sandboxes::list(&client()?, &listing).await?,
        Command::Delete(target) => sandboxes::delete(&client()?, target.sandbox_id).await?,
        Command::Template(Template::List(listing)) => template::list(&client()?, &listing).await?,
        Command::Template(Template::Watch(target)) => template::watch(&client()?, &target.template).await?,
        Command::Template(Template::Delete(target)) => template::delete(&client()?, &target.template).await?,
        Command::Snapshot(Snapshot::Create(request)) => snapshot::create(&client()?, &request).await?,
        Command::Snapshot(Snapshot::List(listing)) => snapshot::list(&client()?, &listing).await?,
        Command::Snapshot(Snapshot::Delete(target)) => snapshot::delete(&client()?, &target.snapshot).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// A client of the server that the user has chosen.
fn client() -> anyhow::Result<Client> {
    let credentials = Surroundings::of_process().credentials()?;
    Ok(Client::new(&credentials.url, &credentials.api_key)?)
}
