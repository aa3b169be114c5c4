//! The watching part of `filesystem.Filesystem`.

use std::io::ErrorKind;
use std::sync::Arc;

use aenv_guest_proto::wire::filesystem as wire;
use connectrpc::{ConnectError, RequestContext, ServiceStream};
use tokio::runtime::Handle;
use wire::__buffa::oneof::watch_dir_response::Event as WireEvent;
use wire::EventType;

use super::filesystem::{is_network_mount, resolve_dir};
use super::stream::{Events, Pace, stream};
use super::users::Accounts;
use super::watch::{Change, Event, WatchError, Watcher};
use super::{Envd, blocking, entry};
use crate::console::Chain;

/// What both kinds of watching ask for.
struct Wish {
    path: String,
    recursive: bool,
    include_entry: bool,
    allow_network_mounts: bool,
}

async fn start(envd: &Envd, context: &RequestContext, wish: Wish) -> Result<Arc<Watcher>, ConnectError> {
    let (_, path) = envd.rpc_path(context, &wish.path)?;
    let runtime = Handle::current();
    let started = blocking(move || {
        let _inside = runtime.enter();
        let shown = path.display();
        match path.metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(ConnectError::not_found(format!("path {shown} not found: {error}")));
            }
            Ok(found) if !found.is_dir() => {
                return Err(ConnectError::invalid_argument(format!("path {shown} not a directory")));
            }
            _ => {}
        }
        if !wish.allow_network_mounts && is_network_mount(&path) {
            return Err(ConnectError::invalid_argument(format!("cannot watch path on network filesystem: {shown}")));
        }
        let root = resolve_dir(&path)?;
        let watcher = Watcher::start(root, wish.recursive, wish.include_entry).map_err(|error| failed(&error))?;
        Ok(Arc::new(watcher))
    });
    let watcher = started.await??;
    envd.watchers.started(&watcher);
    Ok(watcher)
}

fn failed(error: &WatchError) -> ConnectError {
    ConnectError::internal(format!("error watching: {}", Chain(error)))
}

/// `WatchDir`.
pub(super) async fn watch_dir(
    envd: &Envd,
    context: &RequestContext,
    request: wire::WatchDirRequest,
) -> Result<ServiceStream<wire::WatchDirResponse>, ConnectError> {
    let wish = Wish {
        path: request.path,
        recursive: request.recursive,
        include_entry: request.include_entry,
        allow_network_mounts: request.allow_network_mounts,
    };
    let watcher = start(envd, context, wish).await?;
    Ok(stream(WatchEvents { watcher }, Pace::of(context)))
}

struct WatchEvents {
    watcher: Arc<Watcher>,
}

impl Events for WatchEvents {
    type Message = wire::WatchDirResponse;

    fn start(&mut self) -> wire::WatchDirResponse {
        response(wire::watch_dir_response::StartEvent::default())
    }

    fn keepalive(&self) -> wire::WatchDirResponse {
        response(wire::watch_dir_response::KeepAlive::default())
    }

    async fn next(&mut self) -> Option<Result<wire::WatchDirResponse, ConnectError>> {
        loop {
            // Collected events wait in the watcher, so nothing is lost if this future is dropped.
            if let Some(event) = self.watcher.pop() {
                return Some(Ok(response(to_wire(&self.watcher, event))));
            }
            if let Err(error) = self.watcher.ready().await {
                return Some(Err(failed(&WatchError::Read(error))));
            }
            if let Err(error) = collect(&self.watcher).await {
                return Some(Err(error));
            }
        }
    }

    async fn expire(&mut self) {}
}

fn response(event: impl Into<WireEvent>) -> wire::WatchDirResponse {
    wire::WatchDirResponse { event: Some(event.into()), ..Default::default() }
}

async fn collect(watcher: &Arc<Watcher>) -> Result<(), ConnectError> {
    let watcher = Arc::clone(watcher);
    blocking(move || watcher.collect()).await?.map_err(|error| failed(&error))
}

/// `CreateWatcher`.
pub(super) async fn create_watcher(
    envd: &Envd,
    context: &RequestContext,
    request: wire::CreateWatcherRequest,
) -> Result<wire::CreateWatcherResponse, ConnectError> {
    let wish = Wish {
        path: request.path,
        recursive: request.recursive,
        include_entry: request.include_entry,
        allow_network_mounts: request.allow_network_mounts,
    };
    let watcher = start(envd, context, wish).await?;
    let (watcher_id, removed) = envd.watchers.insert(Arc::clone(&watcher));
    // Nobody may ask for a long while; new directories need their watches all the same. Ends when the watcher is
    // removed or has failed, which the next question will be told.
    tokio::spawn(async move {
        let keep_up = async { while watcher.ready().await.is_ok() && collect(&watcher).await.is_ok() {} };
        tokio::select! {
            () = keep_up => {}
            () = removed.cancelled() => {}
        }
    });
    Ok(wire::CreateWatcherResponse { watcher_id, ..Default::default() })
}

/// `GetWatcherEvents`.
pub(super) async fn get_watcher_events(envd: &Envd, id: &str) -> Result<wire::GetWatcherEventsResponse, ConnectError> {
    let watcher = envd.watchers.get(id).ok_or_else(|| not_found(id))?;
    collect(&watcher).await?;
    let events = blocking(move || {
        let events = watcher.take();
        events.into_iter().map(|event| to_wire(&watcher, event)).collect()
    });
    Ok(wire::GetWatcherEventsResponse { events: events.await?, ..Default::default() })
}

/// `RemoveWatcher`.
pub(super) fn remove_watcher(envd: &Envd, id: &str) -> Result<wire::RemoveWatcherResponse, ConnectError> {
    match envd.watchers.remove(id) {
        true => Ok(wire::RemoveWatcherResponse::default()),
        false => Err(not_found(id)),
    }
}

fn not_found(id: &str) -> ConnectError {
    ConnectError::not_found(format!("watcher with id {id} not found"))
}

fn to_wire(watcher: &Watcher, event: Event) -> wire::FilesystemEvent {
    let described = matches!(event.change, Change::Create | Change::Write | Change::Chmod);
    let entry = (watcher.include_entry && described).then(|| {
        let accounts = Accounts::load();
        entry::describe(&watcher.root.join(&event.name), &accounts.names()).ok()
    });
    let r#type = match event.change {
        Change::Create => EventType::EVENT_TYPE_CREATE,
        Change::Write => EventType::EVENT_TYPE_WRITE,
        Change::Remove => EventType::EVENT_TYPE_REMOVE,
        Change::Rename => EventType::EVENT_TYPE_RENAME,
        Change::Chmod => EventType::EVENT_TYPE_CHMOD,
    };
    wire::FilesystemEvent {
        name: event.name.to_string_lossy().into_owned(),
        r#type: r#type.into(),
        entry: entry.flatten().into(),
        ..Default::default()
    }
}
