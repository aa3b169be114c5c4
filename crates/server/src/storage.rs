//! The storage daemon, as the server sees it: started if nobody has, watched, and ended when nobody needs it.

use std::time::Duration;

use aenv_block_client::{
    BlockdClient, BlockdConfig, CacheSettings, CompactionSettings, Daemon, DaemonConfig, DownloadSettings, ErrorKind,
    PrefetchSettings, RegistrySettings,
};
use anyhow::{Context as _, Result};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::config::Config;

/// Between two looks at the daemon. A dead one stops every guest's disk.
const LOOK: Duration = Duration::from_millis(500);

/// A daemon that answers, at the time it was started.
#[derive(Debug, Clone)]
pub(crate) struct Storage {
    daemon: Daemon,
    client: BlockdClient,
}

impl Storage {
    /// Finds the daemon, or starts it. It outlives this server.
    pub(crate) async fn start(config: &Config) -> Result<Self> {
        let daemon = Daemon::new(daemon_config(config)?);
        let client = daemon.ensure().await.context("start the storage daemon")?;
        let export = client.info().await.context("ask the storage daemon")?.export;
        info!(socket = %client.socket().display(), export, "storage daemon");
        Ok(Self { daemon, client })
    }

    /// A client of it.
    pub(crate) fn client(&self) -> BlockdClient {
        self.client.clone()
    }

    /// Starts the daemon again whenever it has died, until `stop`.
    pub(crate) async fn watch(self, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(LOOK)).await.is_some() {
            let gone = |error| matches!(error, aenv_block_client::BlockdError::Unreachable { .. });
            if !self.client.info().await.is_err_and(gone) || stop.is_cancelled() {
                continue;
            }
            error!("the storage daemon has died; guests whose disks are files see I/O errors");
            match self.daemon.ensure().await {
                Ok(_) => self.tell_what_is_back().await,
                Err(problem) => error!(error = %anyhow::Error::from(problem), "the storage daemon cannot be started"),
            }
        }
    }

    async fn tell_what_is_back(&self) {
        match self.client.list().await {
            Ok(devices) => {
                info!(devices = devices.len(), "the storage daemon is back");
                for device in devices {
                    if let Some(problem) = device.problem {
                        error!(device = device.name, problem, "a device is not back");
                    }
                }
            }
            Err(problem) => warn!(error = %problem, "the storage daemon is back and does not list its devices"),
        }
    }

    /// Ends the daemon, unless it has devices: then others use it.
    pub(crate) async fn stop(&self) {
        match self.daemon.end().await {
            Ok(()) => {}
            Err(refused) if refused.kind() == ErrorKind::Conflict => info!("the storage daemon is left to its devices"),
            Err(problem) => warn!(error = %problem, "the storage daemon could not be ended"),
        }
    }
}

fn daemon_config(config: &Config) -> Result<DaemonConfig> {
    let storage = &config.ublk;
    let binary = match &storage.daemon_binary_path {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("aenv-blockd"),
    };
    let metrics = storage.daemon_metrics_listen_addr.trim();
    let blockd = BlockdConfig {
        socket: storage.daemon_socket_path.clone(),
        state_dir: storage.daemon_state_path.clone(),
        run_dir: config.runtime_path.join("blockd"),
        export: storage.export,
        log: "info".to_owned(),
        metrics_addr: if metrics.is_empty() { None } else { Some(metrics.parse()?) },
        open_threads: 16,
        compaction: CompactionSettings::default(),
        cache: CacheSettings {
            dir: Some(config.image.cache.root_dir.join("remote-blocks")),
            size_mib: config.image.cache.remote_blocks.max_size_gb << 10,
        },
        registry: RegistrySettings {
            plain_http: config.image.resolver.plain_http_registries.clone(),
            ..RegistrySettings::default()
        },
        download: DownloadSettings { enable: storage.overlaybd.download_enable, ..DownloadSettings::default() },
        objects: aenv_block_client::ObjectStoreSettings::default(),
        prefetch: PrefetchSettings::default(),
    };
    Ok(DaemonConfig { binary, config: blockd, log: storage.daemon_log_path.clone() })
}
