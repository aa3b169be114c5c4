//! One file a command. Each gets what it needs as values and prints its own result.

mod auth;
mod build;
mod completion;
mod exec;
mod key;
mod logs;
mod metrics;
mod profile;
mod pull;
mod sandboxes;
mod snapshot;
mod start;
mod template;
mod watch;

use std::process::ExitCode;

use aenv_api::Client;

use crate::args::{Arguments, Command, Key, Profile, Snapshot, Template};
use crate::credentials::Surroundings;
use crate::{attach, forward, transfer};

/// Carries out one command. The exit code is the remote one where a command has one.
pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let surroundings = Surroundings::of_process(arguments.profile);
    // A client of the server that the user has chosen.
    let client = || -> anyhow::Result<Client> {
        let credentials = surroundings.clone().credentials()?;
        Ok(Client::new(&credentials.url, &credentials.api_key)?)
    };
    match arguments.command {
        Command::Auth => auth::run(&surroundings)?,
        Command::Profile(Profile::List(listing)) => profile::list(&surroundings, &listing)?,
        Command::Profile(Profile::Use(target)) => profile::choose(&surroundings, &target.name)?,
        Command::Profile(Profile::Delete(target)) => profile::delete(&surroundings, &target.name)?,
        Command::Completion { shell } => completion::run(shell)?,
        Command::Man { dir } => completion::man(&dir)?,
        Command::Build(arguments) => build::run(&client()?, arguments).await?,
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
        Command::List(listing) if listing.watch => watch::run(&client()?, &listing.listing).await?,
        Command::List(listing) => sandboxes::list(&client()?, &listing.listing).await?,
        Command::Logs(logs) => logs::run(&client()?, &logs).await?,
        Command::Metrics(metrics) => metrics::run(&client()?, &metrics).await?,
        Command::PortForward(forward) => return forward::run(&client()?, &forward).await,
        Command::Delete(target) => sandboxes::delete(&client()?, target.sandbox_id).await?,
        Command::Template(Template::List(listing)) => template::list(&client()?, &listing).await?,
        Command::Template(Template::Inspect(inspect)) => template::inspect(&client()?, &inspect).await?,
        Command::Template(Template::Logs(logs)) => template::logs(&client()?, &logs).await?,
        Command::Template(Template::Watch(target)) => template::watch(&client()?, &target.template).await?,
        Command::Template(Template::Delete(target)) => template::delete(&client()?, &target.template).await?,
        Command::Key(Key::Create(request)) => key::create(&client()?, &request).await?,
        Command::Key(Key::List(listing)) => key::list(&client()?, &listing).await?,
        Command::Key(Key::Revoke { id }) => key::revoke(&client()?, &id).await?,
        Command::Snapshot(Snapshot::Create(request)) => snapshot::create(&client()?, &request).await?,
        Command::Snapshot(Snapshot::List(listing)) => snapshot::list(&client()?, &listing).await?,
        Command::Snapshot(Snapshot::Delete(target)) => snapshot::delete(&client()?, &target.snapshot).await?,
    }
    Ok(ExitCode::SUCCESS)
}
