//! One daemon, built top to bottom: what exists, in which order it starts, and in which order it stops.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aenv_block_client::BlockdConfig;
use aenv_block_source::{BlockCache, CacheOptions};
use aenv_durable::Row;
use aenv_tasks::TaskScope;
use anyhow::{Context as _, Result, bail};
use axum::Router;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::background::Background;
use crate::context::{Context, Steps};
use crate::devices::Devices;
use crate::exporter::AnyExporter;
use crate::http::{App, metrics_router, router};
use crate::layers::Layers;
use crate::lock::{Lock, LockError};
use crate::origins::Origins;
use crate::row::DeviceRow;
use crate::rows::Rows;

/// Longest orderly stop: every device is flushed. What takes longer is left as a crash would leave it.
const STOP_PATIENCE: Duration = Duration::from_secs(60);

/// Another daemon has a directory or the socket of this one.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct InUse(String);

/// A running daemon. Ends with [`Daemon::stop`].
#[derive(Debug)]
pub struct Daemon {
    devices: Arc<Devices>,
    exporter: Arc<AnyExporter>,
    scope: TaskScope,
    /// Cancelled when somebody asked it to end.
    stop: CancellationToken,
    socket: PathBuf,
    /// Held for the daemon's life: a second one is refused.
    locks: [Lock; 2],
}

impl Daemon {
    /// Starts it. On return the socket answers; devices of a former process come back one after the other.
    ///
    /// Cancel safety: none, this is for `main`.
    pub async fn start(config: BlockdConfig, steps: Steps) -> Result<Self> {
        let socket = config.socket.clone();
        let metrics_addr = config.metrics_addr;
        refuse_second(&socket).await?;
        let scope = TaskScope::new("blockd");
        let open = {
            let scope = scope.clone();
            move || open(config, steps, scope)
        };
        let (devices, exporter, locks) = tokio::task::spawn_blocking(open).await.context("start")??;
        let stop = CancellationToken::new();
        let app = App { devices: Arc::clone(&devices), stop: stop.clone() };
        if let Some(address) = metrics_addr {
            match TcpListener::bind(address).await {
                Ok(listener) => {
                    serve(&scope, "serve metrics", axum::serve(listener, metrics_router(app.clone())), &scope.token());
                }
                // Disks matter more; metrics are at the socket, too.
                Err(error) => error!(%error, %address, "no metrics there"),
            }
        }
        let listener = listen(&socket)?;
        serve_unix(&scope, listener, router(app));
        info!(socket = %socket.display(), devices = devices.count(), export = ?devices.exporter_kind(), "aenv-blockd serves");
        Ok(Self { devices, exporter, scope, stop, socket, locks })
    }

    /// Cancelled when somebody asked it over the socket to end.
    #[must_use]
    pub fn asked_to_stop(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Leaves every device to the next process, flushed: its record stays, and where the kernel can wait (ublk), whoever has
    /// it open waits. Else it is taken away, and the mount with it.
    pub async fn stop(self) -> Result<()> {
        let Self { devices, exporter, scope, socket, locks, .. } = self;
        let end = async {
            let mut problems = devices.rest().await;
            let _ = fs::remove_file(&socket); // nobody answers there any more
            if let Err(error) = scope.close(STOP_PATIENCE).await {
                problems.push(error.to_string());
            }
            drop(devices);
            match Arc::into_inner(exporter) {
                Some(exporter) => {
                    let closed = tokio::task::spawn_blocking(move || exporter.close()).await;
                    problems.extend(closed.map_err(io::Error::other).flatten().err().map(|error| error.to_string()));
                }
                None => problems.push("somebody still uses the exporter".to_owned()),
            }
            problems
        };
        let ended = tokio::time::timeout(STOP_PATIENCE + STOP_PATIENCE / 2, end).await;
        drop(locks);
        match ended {
            Ok(problems) if problems.is_empty() => {
                info!("aenv-blockd stopped");
                Ok(())
            }
            Ok(problems) => bail!("stopped, but not in order: {}", problems.join("; ")),
            Err(_) => bail!("did not stop within {} s", STOP_PATIENCE.as_secs() * 3 / 2),
        }
    }
}

type Opened = (Arc<Devices>, Arc<AnyExporter>, [Lock; 2]);

fn open(config: BlockdConfig, steps: Steps, scope: TaskScope) -> Result<Opened> {
    let me = format!("aenv-blockd, process {}", std::process::id());
    let private = |path: &Path, mode: u32| {
        let made = fs::DirBuilder::new().recursive(true).mode(mode).create(path);
        made.with_context(|| format!("make directory {}", path.display()))
    };
    private(&config.state_dir, 0o700)?;
    private(&config.run_dir, 0o755)?;
    let lock = |directory: &Path| match Lock::directory(directory, &me) {
        Err(error @ LockError::Held { .. }) => Err(anyhow::Error::new(InUse(error.to_string()))),
        result => Ok(result?),
    };
    let locks = [lock(&config.state_dir)?, lock(&config.run_dir)?];
    let rows = Rows::open(&config.state_dir.join("devices.redb"))?;
    let origins = Origins::new(&config.registry, &config.objects).context("start the network threads")?;
    let cache = CacheOptions::new(config.cache_dir(), config.cache.size_mib << 20);
    let layers = Layers::new(origins, BlockCache::open_or_pass_through(&cache), config.open_threads);
    let recorded = recorded_ublk_ids(&rows)?;
    let exporter = AnyExporter::start(config.export, &config.mount_point(), &config.state_dir, recorded.as_deref())?;
    let exporter = Arc::new(exporter);
    let background = Background::new(config.download.clone(), config.prefetch.concurrency);
    let context = Context { config, layers, exporter: exporter.clone(), rows, background, steps };
    let devices = Devices::start(context, scope)?;
    Ok((devices, exporter, locks))
}

/// The ublk devices that an earlier process had and wrote down. None if a row cannot be read: it may name any.
fn recorded_ublk_ids(rows: &Rows) -> Result<Option<Vec<u32>>> {
    let id = |row| match row {
        Row::Known(DeviceRow { export, .. }) => Some(export.and_then(|export| export.ublk_id)),
        Row::Unknown(_) => None,
    };
    let ids: Option<Vec<_>> = rows.list()?.into_iter().map(|(_, row)| id(row)).collect();
    Ok(ids.map(|ids| ids.into_iter().flatten().collect()))
}

/// A daemon with another state directory may have that socket.
async fn refuse_second(socket: &Path) -> Result<()> {
    match UnixStream::connect(socket).await {
        Ok(_) => Err(InUse(format!("somebody listens at {} already", socket.display())).into()),
        Err(_) => Ok(()),
    }
}

/// Listens at `socket`, for this user only. One that a dead process left is replaced.
fn listen(socket: &Path) -> Result<UnixListener> {
    let mut new = socket.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    let listen = || {
        let _ = fs::remove_file(&new); // left by a crash
        if let Some(directory) = socket.parent() {
            fs::create_dir_all(directory)?;
        }
        let listener = UnixListener::bind(&new)?;
        fs::set_permissions(&new, fs::Permissions::from_mode(0o600))?;
        fs::rename(&new, socket)?;
        Ok::<_, io::Error>(listener)
    };
    listen().with_context(|| format!("listen at {}", socket.display()))
}

fn serve_unix(scope: &TaskScope, listener: UnixListener, router: Router) {
    serve(scope, "serve the socket", axum::serve(listener, router), &scope.token());
}

/// Serves until the scope ends.
fn serve<L>(
    scope: &TaskScope,
    name: &'static str,
    serve: axum::serve::Serve<L, Router, Router>,
    end: &CancellationToken,
) where
    L: axum::serve::Listener,
    L::Addr: std::fmt::Debug,
{
    let end = end.clone();
    scope.spawn(name, async move {
        if let Err(error) = serve.with_graceful_shutdown(end.cancelled_owned()).await {
            error!(%error, name, "serving ended");
        }
    });
}
