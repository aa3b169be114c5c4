//! The envd protocol: what the node, the SDKs and the command line ask of a sandbox from outside.
//!
//! Connect RPC services (`process.Process`, `filesystem.Filesystem`) and a few plain HTTP endpoints on one port. A
//! request passes CORS, then the access-token check, then its handler, which looks the named user up.

mod auth;
mod cors;
mod download;
mod entry;
mod environment;
mod error;
mod filesystem;
mod gunzip;
mod init;
mod metadata;
mod metrics;
mod paths;
mod process_service;
mod server;
mod settings;
mod stream;
mod upload;
mod users;
mod watch;
mod watch_service;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use connectrpc::{CompressionRegistry, ConnectError, ConnectRpcService, Limits, RequestContext};
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::console::say;
use crate::process::{Reaper, Table};
use aenv_guest_proto::wire::filesystem::FilesystemExt as _;
use aenv_guest_proto::wire::process::ProcessExt as _;
use settings::Settings;
pub(crate) use users::User;

/// Largest unary message, which bounds what one request can make us hold. The SDKs send input and paths, never files.
const MAX_MESSAGE: usize = 16 * 1024 * 1024;
/// Threads for blocking calls: file operations and forks. Each may sit in the kernel for as long as a disk takes.
const BLOCKING_THREADS: usize = 32;
/// Stack of such a thread; directory walks are iterative and buffers live on the heap.
const BLOCKING_STACK: usize = 256 * 1024;
/// How long processes get between SIGTERM and SIGKILL when the agent stops.
const STOP_PATIENCE: Duration = Duration::from_secs(3);

/// Where the agent runs, which decides what it may touch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// PID 1 of a sandbox. Requests from `node` come from outside the guest and are the node's.
    Guest { node: IpAddr },
    /// An ordinary process on somebody's machine.
    Process,
}

/// All state of the daemon. Shared by reference.
#[derive(Debug)]
pub(crate) struct Envd {
    pub(crate) place: Place,
    settings: Settings,
    processes: Table,
    watchers: watch::Watchers,
    cpu: metrics::CpuMeter,
}

/// The daemon did not come up or went down by itself.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    #[error("start the runtime")]
    Runtime(#[source] io::Error),
    #[error("start the thread that reaps")]
    Reaper(#[source] io::Error),
    #[error("listen on {address}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("install signal handlers")]
    Signals(#[source] io::Error),
}

/// The runtime both modes use: one thread, and a few small ones for blocking calls that come and go.
pub(crate) fn runtime() -> Result<Runtime, ServeError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_stack_size(BLOCKING_STACK)
        .thread_keep_alive(Duration::from_secs(2))
        .build()
        .map_err(ServeError::Runtime)
}

/// Serves until SIGTERM or SIGINT.
pub(crate) fn run_as_process(address: SocketAddr) -> Result<(), ServeError> {
    crate::sys::keep_heap_small();
    let reaper = Reaper::start().map_err(ServeError::Reaper)?;
    runtime()?.block_on(async {
        let stop = CancellationToken::new();
        let mut terminate = signal(SignalKind::terminate()).map_err(ServeError::Signals)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(ServeError::Signals)?;
        let ready = |address| say!("envd listens on {address}");
        let serve = serve(address, Place::Process, reaper, stop.clone(), ready);
        tokio::pin!(serve);
        tokio::select! {
            result = &mut serve => return result,
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.cancel();
        serve.await
    })
}

/// Serves on `address` until `stop`, then ends every process it started. `ready` is called once, with the bound address,
/// when connections are accepted.
pub(crate) async fn serve(
    address: SocketAddr,
    place: Place,
    reaper: Reaper,
    stop: CancellationToken,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), ServeError> {
    // What requests create gets the permissions the protocol promises (0644, 0755).
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let envd = Arc::new(Envd {
        place,
        settings: Settings::default(),
        processes: Table::new(reaper),
        watchers: watch::Watchers::default(),
        cpu: metrics::CpuMeter::default(),
    });
    let listener = server::bind(address).map_err(|source| ServeError::Listen { address, source })?;
    ready(listener.local_addr().unwrap_or(address));
    server::accept(listener, routes(&envd), stop).await;
    envd.processes.shut_down(STOP_PATIENCE).await;
    Ok(())
}

fn routes(envd: &Arc<Envd>) -> axum::Router {
    use axum::extract::DefaultBodyLimit;
    use axum::middleware::{from_fn, from_fn_with_state};
    use axum::routing::{get, post};

    let services = connectrpc::Router::new();
    let services = Arc::new(process_service::ProcessService::new(Arc::clone(envd))).register(services);
    let services = Arc::new(filesystem::FilesystemService::new(Arc::clone(envd))).register(services);
    // Nothing is compressed: clients never send compressed messages, and a stream's must not be held back.
    let services = ConnectRpcService::new(services)
        .with_compression(CompressionRegistry::new())
        .with_limits(Limits::default().with_max_message_size(MAX_MESSAGE).with_max_request_body_size(MAX_MESSAGE));

    axum::Router::new()
        .route("/files", get(download::download).post(upload::upload))
        // Files are streamed, whatever their size. Other bodies are small.
        .layer(DefaultBodyLimit::disable())
        .route("/files/compose", post(upload::compose))
        .route("/health", get(init::health))
        .route("/init", post(init::init))
        .route("/sync", post(init::sync))
        .route("/metrics", get(metrics::metrics))
        .route("/envs", get(init::envs))
        .with_state(Arc::clone(envd))
        .fallback_service(services)
        .layer(from_fn_with_state(Arc::clone(envd), auth::require_token))
        .layer(from_fn(cors::allow_all))
}

impl Envd {
    /// The user an RPC acts for: the one its basic authentication names, else the default user.
    fn rpc_user(&self, context: &RequestContext) -> Result<User, ConnectError> {
        match auth::basic_user(context.headers()) {
            Some(name) => {
                find_user(&name).ok_or_else(|| ConnectError::unauthenticated(format!("invalid username: '{name}'")))
            }
            None => {
                let name = self.settings.default_user();
                find_user(&name).ok_or_else(|| ConnectError::unauthenticated(format!("invalid default user: '{name}'")))
            }
        }
    }

    /// For calls that act for nobody: a user that is named must exist all the same.
    fn check_rpc_user(context: &RequestContext) -> Result<(), ConnectError> {
        match auth::basic_user(context.headers()) {
            Some(name) if find_user(&name).is_none() => {
                Err(ConnectError::unauthenticated(format!("invalid username: '{name}'")))
            }
            _ => Ok(()),
        }
    }

    /// The user and the path an RPC names.
    fn rpc_path(&self, context: &RequestContext, path: &str) -> Result<(User, PathBuf), ConnectError> {
        let user = self.rpc_user(context)?;
        let path = paths::resolve(path, &user, self.settings.default_workdir().as_deref())
            .map_err(|error| ConnectError::invalid_argument(error.to_string()))?;
        Ok((user, path))
    }
}

fn find_user(name: &str) -> Option<User> {
    users::Accounts::load().find(name)
}

/// Runs a blocking file operation off the runtime's only thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ConnectError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| ConnectError::internal(format!("worker failed: {error}")))
}
