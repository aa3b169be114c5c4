//! From a configuration to a kit, doing only what is not done yet.
//!
//! ```text
//! configured kernel ─────────────────────────────┐
//! choice remembered? ─no─▶ ask apt, suite by suite │
//!   │                            │                ▼
//!   └────────────▶ kit with that kernel and agent? ─yes─▶ done
//!                     │ no            │ same kernel, other agent
//!                     ▼               ▼
//!               download, unpack   take it from there ──▶ initramfs ──▶ kit
//! ```

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::apt::blocking;
use crate::choice::{self, Choice};
use crate::digest::sha256;
use crate::kernel::{GuestKernel, Origin, modules_of};
use crate::store::{self, GuestKit};
use crate::{KitError, kernel_image};

/// Where kits are kept and what goes into one.
#[derive(Debug, Clone)]
pub struct KitConfig {
    /// Holds the kits (`$AENV_HOME/guest`).
    pub dir: PathBuf,
    /// A kernel of one's own (bzImage or ELF) instead of the distribution's.
    pub kernel_image: Option<PathBuf>,
    /// That kernel's modules (like `/lib/modules/<release>`). `None`: where the distribution keeps them; if they are not
    /// there either, the kernel is taken to have all drivers built in.
    pub modules_dir: Option<PathBuf>,
    /// The static `aenv-guest` binary.
    pub agent: PathBuf,
    /// Downloaded packages and apt's lists. May be shared by several homes.
    pub cache_dir: PathBuf,
}

/// Told what is going on, for people: one line a step.
pub type Say<'a> = &'a (dyn Fn(&str) + Send + Sync);

/// Another process may be downloading a kernel on a slow line.
const LOCK_PATIENCE: Duration = Duration::from_secs(1200);
const LOCK_POLL: Duration = Duration::from_millis(100);

/// The kit for this configuration: found if it is there, else made.
///
/// The distribution is asked for its newest kernel once; the choice is then kept until [`refresh`], so that a kernel does
/// not change under running work and a second run needs no network. Several processes may call this at once.
///
/// Errors: see [`KitError`]. On an error nothing half-made is left, except after a crash, and then the next call removes it.
/// Cancel safety: if dropped, whole downloads stay for the next call; nothing else is left but what the next call removes.
pub async fn provision(config: &KitConfig, say: Say<'_>) -> Result<GuestKit, KitError> {
    run(config, false, say).await
}

/// As [`provision`], but asks the distribution for its newest kernel again.
pub async fn refresh(config: &KitConfig, say: Say<'_>) -> Result<GuestKit, KitError> {
    run(config, true, say).await
}

async fn run(config: &KitConfig, ask_again: bool, say: Say<'_>) -> Result<GuestKit, KitError> {
    // apt takes relative paths for relative to its own root; VMMs are started in other directories.
    let absolute = |path: &Path| std::path::absolute(path).map_err(KitError::io("make absolute", path));
    let dir = absolute(&config.dir)?;
    let config = &KitConfig { dir: dir.clone(), cache_dir: absolute(&config.cache_dir)?, ..config.clone() };
    let agent = read_agent(&config.agent)?;
    let _lock = lock(&dir, say).await?;
    store::sweep(&dir)?;
    let kernel = match &config.kernel_image {
        Some(image) => configured(image.clone(), config.modules_dir.clone(), say).await?,
        None => match packaged(config, ask_again, &sha256(&agent), say).await? {
            Found::Kit(kit) => return Ok(kit),
            Found::Kernel(kernel) => kernel,
        },
    };
    let kit = blocking(move || store::assemble(&dir, &kernel, &agent)).await?;
    say(&format!("guest kit {}: Linux {}, {} modules", kit.id, kit.kernel_version, kit.modules.len()));
    Ok(kit)
}

fn read_agent(path: &Path) -> Result<Vec<u8>, KitError> {
    let agent = match fs::read(path) {
        Ok(agent) => agent,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(KitError::AgentMissing { path: path.to_owned() });
        }
        Err(source) => return Err(KitError::Io { action: "read guest agent", path: path.to_owned(), source }),
    };
    match kernel_image::check_static(&agent) {
        Ok(()) => Ok(agent),
        Err(why) => Err(KitError::AgentUnusable { path: path.to_owned(), why }),
    }
}

async fn configured(image: PathBuf, modules: Option<PathBuf>, say: Say<'_>) -> Result<GuestKernel, KitError> {
    say(&format!("guest kernel: {} as configured", image.display()));
    let kernel = blocking(move || {
        let modules = modules_of(&image, modules.as_deref())?;
        let origin = Origin::Files { image: image.clone(), modules: modules.clone() };
        GuestKernel::from_files(origin, &image, modules.as_deref())
    })
    .await?;
    if let Origin::Files { modules: None, .. } = kernel.origin {
        say(&format!("no modules directory for kernel {}: its drivers must be built in", kernel.release));
    }
    Ok(kernel)
}

/// What the distribution's kernel led to.
enum Found {
    /// A kit with that kernel and our agent.
    Kit(GuestKit),
    /// The kernel, for a kit still to be made.
    Kernel(GuestKernel),
}

async fn packaged(config: &KitConfig, ask_again: bool, agent: &str, say: Say<'_>) -> Result<Found, KitError> {
    let cache = &config.cache_dir;
    let remembered = if ask_again { None } else { Choice::remembered(cache) };
    if let Some(choice) = &remembered
        && let Some(found) = in_kits(&config.dir, &choice.origin(), agent)?
    {
        return Ok(found);
    }
    let _cache = lock(cache, say).await?;
    store::sweep(cache)?;
    if let Some(choice) = remembered {
        match choice::fetch(cache, &choice, say).await {
            Ok(kernel) => return Ok(Found::Kernel(kernel)),
            // The archive may have dropped it for a newer one since.
            Err(error) => tracing::info!(%error, "asking for the guest kernel again"),
        }
    }
    let choice = choice::choose(cache, say).await?;
    let found = match in_kits(&config.dir, &choice.origin(), agent)? {
        Some(found) => found,
        None => Found::Kernel(choice::fetch(cache, &choice, say).await?),
    };
    choice.remember(cache)?;
    Ok(found)
}

/// Looks for a kit with this kernel, best with this agent too.
fn in_kits(dir: &Path, origin: &Origin, agent: &str) -> Result<Option<Found>, KitError> {
    let records: Vec<_> = store::records(dir)?.into_iter().filter(|record| record.origin == *origin).collect();
    let current = crate::cmdline::line();
    for record in records.iter().filter(|record| record.agent_sha256 == agent && record.cmdline == current) {
        if let Ok(kit) = store::open(dir, &record.id) {
            return Ok(Some(Found::Kit(kit)));
        }
    }
    // A sibling that cannot be read is no reason to fail: its packages can be had again.
    let kernel = records.iter().find_map(|record| store::kernel_of(dir, record).ok());
    Ok(kernel.map(Found::Kernel))
}

/// Holds the lock of `dir`, which is made if need be, until the file is dropped. Waits for another holder.
async fn lock(dir: &Path, say: Say<'_>) -> Result<File, KitError> {
    fs::create_dir_all(dir).map_err(KitError::io("create directory", dir))?;
    let path = dir.join(".lock");
    let file = File::options().create(true).append(true).open(&path).map_err(KitError::io("open lock", &path))?;
    let patience = Instant::now() + LOCK_PATIENCE;
    let mut waited = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < patience => {
                if !std::mem::replace(&mut waited, true) {
                    say(&format!("waiting for another process to finish its work in {}", dir.display()));
                }
                tokio::time::sleep(LOCK_POLL).await;
            }
            Err(error) => return Err(KitError::Io { action: "lock", path, source: error.into() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::testing::{kernel_files, static_program};

    const QUIET: Say<'static> = &|_| {};

    struct Home {
        dir: tempfile::TempDir,
        config: KitConfig,
    }

    /// A home with a configured kernel and an agent.
    fn home() -> Home {
        let dir = tempfile::tempdir().unwrap();
        let (image, modules) = kernel_files(dir.path());
        let config = KitConfig {
            dir: dir.path().join("guest"),
            kernel_image: Some(image),
            modules_dir: Some(modules),
            agent: dir.path().join("aenv-guest"),
            cache_dir: dir.path().join("cache"),
        };
        fs::write(&config.agent, static_program("one")).unwrap();
        Home { dir, config }
    }

    fn inode(path: &Path) -> u64 {
        fs::metadata(path).unwrap().ino()
    }

    #[tokio::test]
    async fn a_second_run_finds_the_kit_of_the_first() {
        let home = home();
        let first = provision(&home.config, QUIET).await.unwrap();
        let made = inode(&first.initramfs);
        let second = provision(&home.config, QUIET).await.unwrap();
        assert_eq!(first, second);
        assert_eq!(made, inode(&second.initramfs));
        assert_eq!(first.kernel, first.shipped_kernel, "no ELF could be had, so the image is booted as shipped");
        assert_eq!(first.modules, ["virtio", "virtio_mmio", "virtio_blk", "virtio_net"]);
        assert_eq!(store::open(&home.config.dir, &first.id).unwrap(), first);
    }

    #[tokio::test]
    async fn another_agent_makes_another_kit_that_shares_the_kernel_file() {
        let home = home();
        let first = provision(&home.config, QUIET).await.unwrap();
        fs::write(&home.config.agent, static_program("two")).unwrap();
        let second = provision(&home.config, QUIET).await.unwrap();
        assert_ne!(first.id, second.id);
        assert_eq!(inode(&first.kernel), inode(&second.kernel));
        assert_eq!(store::list(&home.config.dir).unwrap().len(), 2);
        store::remove(&home.config.dir, &first.id).unwrap();
        store::remove(&home.config.dir, &first.id).unwrap();
        assert_eq!(store::list(&home.config.dir).unwrap(), [second]);
        assert!(matches!(store::open(&home.config.dir, &first.id), Err(KitError::NotFound { .. })));
    }

    #[tokio::test]
    async fn a_damaged_kit_is_told_and_made_anew() {
        let home = home();
        let kit = provision(&home.config, QUIET).await.unwrap();
        fs::write(&kit.initramfs, b"short").unwrap();
        let error = store::open(&home.config.dir, &kit.id).unwrap_err().to_string();
        assert!(error.contains("initramfs has 5 bytes") && error.contains(&kit.id), "{error}");
        assert_eq!(provision(&home.config, QUIET).await.unwrap(), kit);
        store::open(&home.config.dir, &kit.id).unwrap();
    }

    #[tokio::test]
    async fn what_a_crash_left_is_removed_by_the_next_run() {
        let home = home();
        let left = home.config.dir.join(format!("{}x1", store::TEMPORARY));
        fs::create_dir_all(left.join("modules")).unwrap();
        let kit = provision(&home.config, QUIET).await.unwrap();
        assert!(!left.exists());
        let mut names: Vec<_> =
            fs::read_dir(&home.config.dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, [".lock", kit.id.as_str()]);
    }

    #[tokio::test]
    async fn concurrent_runs_agree_on_one_kit() {
        let home = home();
        let run = || provision(&home.config, QUIET);
        let (a, b, c) = tokio::join!(run(), run(), run());
        let a = a.unwrap();
        assert_eq!((&a, &a), (&b.unwrap(), &c.unwrap()));
        assert_eq!(store::list(&home.config.dir).unwrap(), [a]);
    }

    #[tokio::test]
    async fn a_remembered_choice_needs_no_network_even_for_a_new_agent() {
        let home = home();
        let chosen = r#"{"suite":"nowhere","packages":[
            {"name":"linux-image-6.1.0","version":"6.1.0-1","file":"x.deb","size":1,"sha256":"00"}]}"#;
        fs::create_dir_all(&home.config.cache_dir).unwrap();
        fs::write(home.config.cache_dir.join("kernel.json"), chosen).unwrap();
        let origin = Choice::remembered(&home.config.cache_dir).unwrap().origin();
        let (image, modules) = kernel_files(home.dir.path());
        let kernel = GuestKernel::from_files(origin.clone(), &image, Some(&modules)).unwrap();
        fs::create_dir_all(&home.config.dir).unwrap();
        let made = store::assemble(&home.config.dir, &kernel, &static_program("one")).unwrap();

        let config = KitConfig { kernel_image: None, modules_dir: None, ..home.config.clone() };
        assert_eq!(provision(&config, QUIET).await.unwrap(), made);
        fs::write(&config.agent, static_program("two")).unwrap();
        let other = provision(&config, QUIET).await.unwrap();
        assert_ne!(other.id, made.id);
        assert_eq!((other.origin, other.modules), (origin, made.modules));
    }

    #[tokio::test]
    async fn missing_things_are_named_with_what_brings_them() {
        let home = home();
        let mut config = home.config.clone();
        config.agent = home.dir.path().join("none");
        let error = provision(&config, QUIET).await.unwrap_err().to_string();
        assert!(error.contains("none is missing") && error.contains("cargo xtask setup"), "{error}");

        let mut config = home.config.clone();
        config.kernel_image = Some(home.dir.path().join("no-kernel"));
        let error = provision(&config, QUIET).await.unwrap_err().to_string();
        assert!(error.contains("no-kernel cannot be read"), "{error}");

        let mut config = home.config.clone();
        config.modules_dir = Some(home.dir.path().join("no-modules"));
        let error = provision(&config, QUIET).await.unwrap_err().to_string();
        assert!(error.contains("no-modules") && error.contains("modules.builtin"), "{error}");
    }

    #[test]
    fn an_id_cannot_reach_outside_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        for id in ["", "..", "../../etc/passwd", "0123456789abcdeg", "/abs"] {
            assert!(matches!(store::open(dir.path(), id), Err(KitError::NotFound { .. })), "{id}");
        }
    }
}
