//! The staged start of a sandbox: directory, slot and disk, machine, guest. Each stage puts what it made into
//! [`Resources`] before the next begins, so a failure at any point is one `release` away from nothing.

use std::future::Future;
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aenv_block_device::{CreateDiskError, Disk};
use aenv_durable::{Table, crash_point};
use aenv_guest_proto::{BootParams, InitRequest};
use aenv_model::{Bytes, SandboxId};
use aenv_snapshot::{BootFiles, Capture};
use aenv_vmm_driver::{DiskSpec, Flush, MachineExit, MachineSpec, VmmIdentity};
use jiff::Timestamp;
use rand::RngCore;
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::blanks::{BlankMachine, Blanks};
use crate::guest;
use crate::orchestrator::Parts;
use crate::resources::{Resources, SandboxRow, chain};
use crate::sandbox::{CreateError, Image, SandboxSpec, Source, StartTimes};
use crate::seams::{GuestAddress, GuestDialer};

/// Oldest serial output is dropped beyond this: enough for a boot and a kernel oops.
const SERIAL_LOG_LIMIT: Bytes = Bytes::mib(1);

/// Random bytes given to a guest at init; the kernel's pool is 256 bits wide.
const ENTROPY_BYTES: usize = 64;

/// A start about to run.
pub(crate) struct Start<'a> {
    pub(crate) parts: &'a Parts,
    pub(crate) rows: &'a Table<SandboxRow>,
    pub(crate) id: SandboxId,
    /// The row of its present machine, which runs on: what is made is written down beside it.
    pub(crate) present: Option<&'a SandboxRow>,
    pub(crate) spec: &'a SandboxSpec,
    pub(crate) access_token: Option<&'a str>,
    /// VMMs that wait.
    pub(crate) blanks: &'a Blanks,
    /// Ends the start between stages and during the wait for the guest.
    pub(crate) cancel: &'a CancellationToken,
}

/// What a source comes to on this node.
enum Way {
    /// A machine goes on.
    Restore { capture: Capture, state: PathBuf, boot: BootFiles },
    /// A machine is booted on a disk that was kept.
    BootDisk(Capture),
    /// A machine is booted on an image.
    BootImage(Image),
}

impl Way {
    fn choose(source: Source, vmm: &VmmIdentity) -> Result<Self, CreateError> {
        let unusable = match source.capture {
            None => "there is nothing to start from".to_owned(),
            Some(capture) => match (&capture.manifest().machine, capture.state(), capture.boot()) {
                (Some(machine), Some(state), Some(boot)) if machine.vmm == *vmm => {
                    return Ok(Self::Restore { capture, state, boot });
                }
                (Some(machine), ..) => format!(
                    "it was captured on {:?} {}, and this node has {:?} {}",
                    machine.vmm.kind, machine.vmm.version, vmm.kind, vmm.version
                ),
                (None, ..) => return Ok(Self::BootDisk(capture)),
            },
        };
        source.image.map(Self::BootImage).ok_or(CreateError::Source { why: unusable })
    }
}

/// A start that is over.
pub(crate) struct Started {
    /// What the machine is over.
    pub(crate) base: Option<Capture>,
    pub(crate) times: StartTimes,
}

/// Runs all stages. What counts for a restart is in `row`, whose `stage` stays as it is.
///
/// Cancel safety: not to be dropped half-way; the driver cancels by the token and awaits the end.
pub(crate) async fn start(
    start: &Start<'_>,
    source: Source,
    row: &mut SandboxRow,
    resources: &mut Resources,
) -> Result<Started, CreateError> {
    let begun = Instant::now();
    let &Start { parts, rows, id, spec, .. } = start;
    let stage = start.stage();
    let way = Way::choose(source, parts.vmm.identity())?;

    row.base = way.capture().map(Capture::id);
    let restores = matches!(way, Way::Restore { .. });
    let waited =
        restores.then(|| start.blanks.take(spec.shape)).flatten().map(|BlankMachine { id, vmm, slot, work_dir }| {
            row.work_dir = work_dir;
            (resources.blank, resources.slot) = (Some(vmm), Some(slot));
            id
        });
    let written = start.present.map_or_else(|| row.clone(), |present| present.beside(row));
    stage.run("write intent", rows.put(id.to_string(), written)).await?;
    crash_point("start.intent");
    resources.work_dir = Some(row.work_dir.clone());
    match waited {
        Some(id) => stage.run("take over a VMM", rows.remove(id.to_string())).await?,
        None => make_work_dir(&row.work_dir).map_err(stage.failed("create work dir"))?,
    }

    // None of these waits for another, and each puts what it has made where a release finds it.
    resources.disk = Some(row.disk.clone());
    let slot = async {
        let slot = match resources.slot.take() {
            Some(slot) => slot,
            None => stage.run("get a network slot", parts.slots.acquire()).await?,
        };
        let slot = resources.slot.insert(slot);
        stage.run("set what it may reach", slot.set_policy(&spec.egress)).await?;
        Ok::<_, CreateError>(())
    };
    let disk = make_disk(parts, &stage, &row.disk.name, &way);
    let memory = async {
        match &way {
            Way::Restore { capture, .. } => stage.run("show the memory", capture.memory()).await.map(Some),
            Way::BootDisk(_) | Way::BootImage(_) => Ok(None),
        }
    };
    let (slot, disk, memory) = tokio::join!(slot, disk, memory);
    let (disk, memory_image) = (disk?, memory?);
    slot?;
    stage.check()?;
    let Some(slot) = &resources.slot else {
        return Err(stage.failed("get a network slot")(io::Error::from(io::ErrorKind::NotFound)));
    };
    let (address, nic, netns, dialer) = (slot.address(), slot.nic(), slot.netns(), slot.dialer());
    row.slot = slot.record();
    row.disk_size = disk.size;

    let prepared = begun.elapsed();
    crash_point("start.prepared");
    let boot = match &way {
        Way::Restore { boot, .. } => boot.clone(),
        Way::BootDisk(_) | Way::BootImage(_) => BootFiles {
            kernel: parts.boot.kernel.clone(),
            initramfs: parts.boot.initramfs.clone(),
            cmdline: format!("{} {}", parts.boot.cmdline, boot_params(id, address, parts.boot.resolver)),
        },
    };
    row.boot = Some(boot.clone());
    let spec_of_machine = MachineSpec {
        name: format!("aenv-{}", row.disk.name),
        shape: spec.shape,
        kernel: boot.kernel,
        initramfs: boot.initramfs,
        cmdline: boot.cmdline,
        disks: vec![DiskSpec { path: disk.path, read_only: false, flush: Flush::Storage, limit: parts.disk_limit }],
        nics: nic.into_iter().collect(),
        netns,
        work_dir: row.work_dir.clone(),
        serial_log: parts.serial_log(id),
        serial_log_limit: SERIAL_LOG_LIMIT,
        memory_image,
    };
    // Without a bound of ours: the driver has a deadline on each of its steps and leaves nothing behind on an error.
    let machine = match (&way, resources.blank.take()) {
        (Way::Restore { state, .. }, Some(blank)) => match blank.restore(spec_of_machine.clone(), state).await {
            Err(error) => {
                warn!(sandbox_id = %id, error = chain(&error), "a VMM that waited could not restore a machine");
                let dir = &row.work_dir;
                let emptied = aenv_durable::remove_dir_if_present(dir).and_then(|()| make_work_dir(dir));
                emptied.map_err(stage.failed("create work dir"))?;
                parts.vmm.restore(spec_of_machine, state).await
            }
            restored => restored,
        },
        (Way::Restore { state, .. }, None) => parts.vmm.restore(spec_of_machine, state).await,
        (Way::BootDisk(_) | Way::BootImage(_), _) => parts.vmm.boot(spec_of_machine).await,
    };
    let machine = machine.map_err(stage.failed("start machine"))?;
    crash_point("start.machine");
    // Written down with the next write of the row: until then, it is found by its work dir.
    row.machine = Some(machine.record());
    let exit = machine.exit();
    let machine = resources.machine.insert(machine);
    if restores {
        stage.run("let the machine go on", machine.resume_vcpus()).await?;
    }
    let goes = begun.elapsed();
    start.await_guest(dialer.as_ref(), exit, restores).await?;
    crash_point("start.ready");
    let times = StartTimes { prepare: prepared, machine: goes - prepared, guest: begun.elapsed() - goes };
    Ok(Started { base: way.capture().cloned(), times })
}

/// Lets a machine go on that stands ready.
pub(crate) async fn awaken(start: &Start<'_>, resources: &Resources) -> Result<StartTimes, CreateError> {
    let begun = Instant::now();
    let stage = start.stage();
    let gone = || stage.failed("let the machine go on")(io::Error::from(io::ErrorKind::NotFound));
    let (machine, slot) = (resources.machine.as_ref().ok_or_else(gone)?, resources.slot.as_ref().ok_or_else(gone)?);
    stage.run("set what it may reach", slot.set_policy(&start.spec.egress)).await?;
    stage.run("let the machine go on", machine.resume_vcpus()).await?;
    let goes = begun.elapsed();
    start.await_guest(slot.dialer().as_ref(), machine.exit(), true).await?;
    Ok(StartTimes { prepare: Duration::ZERO, machine: goes, guest: begun.elapsed() - goes })
}

impl Start<'_> {
    /// Waits for its turn among the starts.
    pub(crate) async fn permit<'p>(&self, permits: &'p Semaphore) -> Result<SemaphorePermit<'p>, CreateError> {
        tokio::select! {
            permit = permits.acquire() => permit.map_err(|_| CreateError::ShuttingDown),
            () = self.cancel.cancelled() => Err(CreateError::Deleted { id: self.id }),
        }
    }

    fn stage(&self) -> Stage<'_> {
        Stage { id: self.id, cancel: self.cancel, deadline: self.parts.config.resource_timeout }
    }

    /// Waits until the guest's agent knows what it has to. `is_up`: it is not booting, but goes on.
    async fn await_guest(
        &self,
        dialer: &dyn GuestDialer,
        mut exit: watch::Receiver<Option<MachineExit>>,
        is_up: bool,
    ) -> Result<(), CreateError> {
        let stage = self.stage();
        let envd = &self.parts.envd;
        let request = || init_request(self.id, self.spec, self.access_token);
        let ready = async {
            if is_up {
                // No probe before, and an attempt that was lost on the way is repeated soon.
                guest::init_soon(dialer, request, envd.poll).await;
                return Ok(());
            }
            while !guest::is_healthy(dialer).await {
                tokio::time::sleep(envd.poll).await;
            }
            guest::init(dialer, &request()).await.map_err(stage.failed("initialise the guest agent"))
        };
        // Whatever the guest does, its machine's end and a delete are noticed at once.
        let within = envd.init_timeout;
        tokio::select! {
            result = tokio::time::timeout(within, ready) => {
                result.unwrap_or_else(|_| Err(stage.late_by("wait for the guest agent", within)))?;
            }
            ended = exit.wait_for(Option::is_some) => {
                let how = ended.ok().and_then(|exit| exit.clone());
                let error = io::Error::other(format!("machine ended: {how:?}"));
                return Err(stage.failed("wait for the guest agent")(error));
            }
            () = self.cancel.cancelled() => return Err(CreateError::Deleted { id: self.id }),
        }
        stage.check()
    }
}

impl Way {
    fn capture(&self) -> Option<&Capture> {
        match self {
            Self::Restore { capture, .. } | Self::BootDisk(capture) => Some(capture),
            Self::BootImage(_) => None,
        }
    }
}

/// Makes a private directory.
pub(crate) fn make_work_dir(dir: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().mode(0o700).create(dir)
}

async fn make_disk(parts: &Parts, stage: &Stage<'_>, name: &str, way: &Way) -> Result<Disk, CreateError> {
    let (base, size) = match way {
        Way::Restore { capture, .. } | Way::BootDisk(capture) => (capture.disk(), Some(capture.manifest().disk_size)),
        Way::BootImage(image) => (image.rootfs.clone(), image.disk_size),
    };
    let disk = parts.disks.create(name, &base, size);
    match tokio::time::timeout(stage.deadline, disk).await {
        Ok(Ok(disk)) => Ok(disk),
        Ok(Err(source @ CreateDiskError::NoSpace { .. })) => Err(CreateError::NoSpace { source }),
        Ok(Err(source @ CreateDiskError::TooSmall { .. })) => Err(CreateError::DiskSize { source }),
        Ok(Err(error)) => Err(stage.failed("create disk")(error)),
        Err(_) => Err(stage.late("create disk")),
    }
}

fn boot_params(id: SandboxId, address: GuestAddress, dns: Option<Ipv4Addr>) -> BootParams {
    BootParams {
        root: "/dev/vda".to_owned(),
        address: address.address,
        prefix: address.prefix,
        gateway: address.gateway,
        dns,
        hostname: hostname(id),
    }
}

fn init_request(id: SandboxId, sandbox: &SandboxSpec, access_token: Option<&str>) -> InitRequest {
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
        CreateError::in_step(self.id, step)
    }

    fn late(&self, step: &'static str) -> CreateError {
        self.late_by(step, self.deadline)
    }

    fn late_by(&self, step: &'static str, deadline: Duration) -> CreateError {
        CreateError::Deadline { id: self.id, step, deadline }
    }
}
