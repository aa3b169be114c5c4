//! The staged start of a sandbox: directory, slot, disk, machine, guest. Each stage puts what it made into
//! [`Resources`] before the next begins, so a failure at any point is one `release` away from nothing.

use std::future::Future;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::time::Duration;

use aenv_block_device::CreateDiskError;
use aenv_durable::Table;
use aenv_guest_proto::{BootParams, InitRequest};
use aenv_model::{Bytes, SandboxId};
use aenv_vmm_driver::{DiskSpec, Flush, MachineSpec};
use jiff::Timestamp;
use rand::RngCore;
use tokio_util::sync::CancellationToken;

use crate::guest;
use crate::orchestrator::Parts;
use crate::resources::{Resources, SandboxRow};
use crate::sandbox::{CreateError, Keep, NewSandbox};

/// Oldest serial output is dropped beyond this: enough for a boot and a kernel oops.
const SERIAL_LOG_LIMIT: Bytes = Bytes::mib(1);

/// Random bytes given to a guest at init; the kernel's pool is 256 bits wide.
const ENTROPY_BYTES: usize = 64;

/// What a finished start tells the driver.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Started {
    pub(crate) disk_size: Bytes,
}

/// A start about to run.
pub(crate) struct Start<'a> {
    pub(crate) parts: &'a Parts,
    pub(crate) rows: &'a Table<SandboxRow>,
    pub(crate) id: SandboxId,
    pub(crate) sandbox: &'a NewSandbox,
    pub(crate) access_token: Option<&'a str>,
    /// Ends the start between stages and during the wait for the guest.
    pub(crate) cancel: &'a CancellationToken,
}

/// Runs all stages; `keep` is dropped once nothing of the source is needed.
///
/// Cancel safety: not to be dropped half-way; the driver cancels by the token and awaits the end.
pub(crate) async fn start(start: Start<'_>, keep: Keep, resources: &mut Resources) -> Result<Started, CreateError> {
    let Start { parts, rows, id, sandbox, access_token, cancel } = start;
    let stage = Stage { id, cancel, deadline: parts.config.resource_timeout };

    let work_dir = parts.run_dir.join(id.to_string());
    let mut row = SandboxRow {
        work_dir: work_dir.clone(),
        disk: aenv_block_device::DiskRecord { name: id.to_string() },
        machine: None,
    };
    stage.run("write intent", rows.put(id.to_string(), row.clone())).await?;
    resources.work_dir = Some(work_dir.clone());
    std::fs::DirBuilder::new().mode(0o700).create(&work_dir).map_err(stage.failed("create work dir"))?;

    let slot = stage.run("get a network slot", parts.slots.acquire()).await?;
    let (address, nic, netns, dialer) = (slot.address(), slot.nic(), slot.netns(), slot.dialer());
    resources.slot = Some(slot);

    resources.disk = Some(row.disk.clone());
    let disk = parts.disks.create(&row.disk.name, &sandbox.rootfs, sandbox.disk_size);
    let disk = match tokio::time::timeout(stage.deadline, disk).await {
        Ok(Ok(disk)) => disk,
        Ok(Err(source @ CreateDiskError::NoSpace { .. })) => return Err(CreateError::NoSpace { source }),
        Ok(Err(source @ (CreateDiskError::TooSmall { .. } | CreateDiskError::CannotGrow { .. }))) => {
            return Err(CreateError::DiskSize { source });
        }
        Ok(Err(error)) => return Err(stage.failed("create disk")(error)),
        Err(_) => return Err(stage.late("create disk")),
    };
    drop(keep); // the disk has a copy of all it needs
    stage.check()?;

    let boot = BootParams {
        root: "/dev/vda".to_owned(),
        address: address.address,
        prefix: address.prefix,
        gateway: address.gateway,
        dns: None,
        hostname: hostname(id),
    };
    let spec = MachineSpec {
        name: format!("aenv-{id}"),
        shape: sandbox.shape,
        kernel: parts.boot.kernel.clone(),
        initramfs: parts.boot.initramfs.clone(),
        cmdline: format!("{} {boot}", parts.boot.cmdline),
        // The disk does not outlive the sandbox, nor the sandbox its host: a flush has nothing to keep. Syncing a fresh
        // copy of a root file system would cost the guest a tenth of a second at its mount alone.
        disks: vec![DiskSpec { path: disk.path.clone(), read_only: false, flush: Flush::PageCache }],
        nics: nic.into_iter().collect(),
        netns,
        work_dir,
        serial_log: parts.serial_log(id),
        serial_log_limit: SERIAL_LOG_LIMIT,
        memory_image: None,
    };
    // Without a bound of ours: the driver has a deadline on each of its steps and leaves nothing behind on an error.
    let machine = parts.vmm.boot(spec).await.map_err(stage.failed("start machine"))?;
    row.machine = Some(machine.record());
    let mut exit = machine.exit();
    resources.machine = Some(machine);
    stage.run("record machine", rows.put(id.to_string(), row)).await?;

    let request = init_request(id, sandbox, access_token);
    let ready = async {
        while !guest::is_healthy(dialer.as_ref()).await {
            tokio::time::sleep(parts.envd.poll).await;
        }
        guest::init(dialer.as_ref(), &request).await.map_err(stage.failed("initialise the guest agent"))
    };
    // Whatever the guest does, its machine's end and a delete are noticed at once.
    let within = parts.envd.init_timeout;
    tokio::select! {
        result = tokio::time::timeout(within, ready) => {
            result.unwrap_or_else(|_| Err(stage.late_by("wait for the guest agent", within)))?;
        }
        ended = exit.wait_for(Option::is_some) => {
            let how = ended.ok().and_then(|exit| exit.clone());
            return Err(stage.failed("wait for the guest agent")(io::Error::other(format!("machine ended: {how:?}"))));
        }
        () = cancel.cancelled() => return Err(CreateError::Deleted { id }),
    }
    stage.check()?;
    Ok(Started { disk_size: disk.size })
}

fn init_request(id: SandboxId, sandbox: &NewSandbox, access_token: Option<&str>) -> InitRequest {
    use base64::Engine as _;
    let mut entropy = [0; ENTROPY_BYTES];
    rand::rng().fill_bytes(&mut entropy);
    InitRequest {
        access_token: access_token.map(str::to_owned),
        env_vars: Some(sandbox.defaults.env.clone()),
        timestamp: Some(Timestamp::now().to_string()),
        default_user: sandbox.defaults.user.clone(),
        default_workdir: sandbox.defaults.workdir.clone(),
        hostname: Some(hostname(id)),
        entropy: Some(base64::engine::general_purpose::STANDARD.encode(entropy)),
        sandbox_id: Some(id.to_string()),
        template_id: Some(sandbox.template.to_string()),
    }
}

/// The last group of the id: random, so distinct, and short enough for a prompt.
fn hostname(id: SandboxId) -> String {
    let text = id.to_string();
    format!("aenv-{}", text.rsplit('-').next().unwrap_or(&text))
}

/// One start's identity, patience and cancellation, for the errors of its stages.
struct Stage<'a> {
    id: SandboxId,
    cancel: &'a CancellationToken,
    deadline: Duration,
}

impl Stage<'_> {
    async fn run<T, E>(&self, step: &'static str, work: impl Future<Output = Result<T, E>>) -> Result<T, CreateError>
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        self.check()?;
        match tokio::time::timeout(self.deadline, work).await {
            Ok(result) => result.map_err(self.failed(step)),
            Err(_) => Err(self.late(step)),
        }
    }

    fn check(&self) -> Result<(), CreateError> {
        if self.cancel.is_cancelled() { Err(CreateError::Deleted { id: self.id }) } else { Ok(()) }
    }

    fn failed<E>(&self, step: &'static str) -> impl FnOnce(E) -> CreateError + use<E>
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        let id = self.id;
        move |source| CreateError::Step { id, step, source: Box::new(source) }
    }

    fn late(&self, step: &'static str) -> CreateError {
        self.late_by(step, self.deadline)
    }

    fn late_by(&self, step: &'static str, deadline: Duration) -> CreateError {
        CreateError::Deadline { id: self.id, step, deadline }
    }
}
