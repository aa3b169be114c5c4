//! `verify`: is a file sound?

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use aenv_block_overlaybd::{Inspected, Mode, Source, copy, inspect, unwrap, verify};
use aenv_model::Bytes;
use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use crate::inspect::index_of;
use crate::packing::sha256;
use crate::progress::Progress;
use crate::{config, input, report};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Layers, ZFiles, files of uppers (data and index together), image configs.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// The digest the file must have, as in `sha256:…`. LSMT data has no check sums: only this finds every damage.
    #[arg(long)]
    digest: Option<String>,
    /// One JSON object a file, each in a line.
    #[arg(long)]
    json: bool,
}

/// One file.
#[derive(Debug, Serialize)]
struct Verified {
    file: PathBuf,
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// What was left unchecked, or ignored.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    if args.digest.is_some() && args.files.len() > 1 {
        bail!("--digest is that of one file, and there are {}", args.files.len());
    }
    let mut code = ExitCode::SUCCESS;
    for path in &args.files {
        let mut notes = Vec::new();
        let result = check(path, args, &mut notes);
        if let Err(error) = &result {
            code = report::failure(error);
        }
        if args.json {
            let (file, error) = (path.clone(), result.as_ref().err().map(report::line));
            report::print_json(&Verified { file, ok: result.is_ok(), error, notes })?;
        } else if result.is_ok() {
            report::print(&format!("{}: ok", path.display()))?;
            notes.iter().for_each(|note| eprintln!("note: {}: {note}", path.display()));
        }
    }
    Ok(code)
}

fn check(path: &Path, args: &Args, notes: &mut Vec<String>) -> Result<()> {
    if let Some(wanted) = &args.digest {
        check_digest(path, wanted)?;
    }
    if config::is_config(path)? { check_config(path, notes) } else { check_file(path, &args.files, notes) }
}

fn check_digest(path: &Path, wanted: &str) -> Result<()> {
    let found = sha256(&*input::file(path)?)?;
    if !found.eq_ignore_ascii_case(wanted) {
        bail!("{}: its {} bytes have digest {found}, not {wanted}", path.display(), input::file(path)?.size());
    }
    Ok(())
}

/// `others` are the files in which an upper's index may be.
fn check_file(path: &Path, others: &[PathBuf], notes: &mut Vec<String>) -> Result<()> {
    let source = input::file(path)?;
    let progress = Progress::new(&format!("verifying {}", path.display()), source.size());
    match inspect(Arc::clone(&source))?.content {
        Inspected::Layer { .. } => drop(verify(source, &mut progress.follow())?),
        Inspected::ZFile { .. } => {
            let (content, _) = unwrap(source)?;
            read_all(&*content, &progress)?;
        }
        Inspected::UpperData { mode: Mode::Sparse, header } => {
            let device = Bytes(4096 + header.virtual_size.get());
            if source.size() != device.get() {
                bail!(
                    "{}: a sparse upper of {} bytes ends at byte {}, and the file at byte {}",
                    path.display(),
                    header.virtual_size.get(),
                    device.get(),
                    source.size()
                );
            }
            input::upper(path, None)?;
            read_all(&*source, &progress)?;
        }
        Inspected::UpperData { header, .. } => {
            let Some(index) = index_of(header.uuid, others) else {
                bail!(
                    "{}: no trailer at its end ({} bytes): a layer that was cut short, or the data file of an upper whose \
                     index file (UUID {}) is to be given, too",
                    path.display(),
                    source.size(),
                    header.uuid
                );
            };
            input::upper(path, Some(index))?;
            read_all(&*source, &progress)?;
        }
        Inspected::UpperIndex { torn, .. } => {
            if torn > 0 {
                notes
                    .push(format!("{torn} bytes behind the last entry, at byte {}, are ignored", source.size() - torn));
            }
        }
    }
    Ok(())
}

fn check_config(path: &Path, notes: &mut Vec<String>) -> Result<()> {
    let config = config::load(path)?;
    for (number, lower) in config.layers().iter().enumerate() {
        let Some(file) = config::local(lower) else {
            notes.push(format!("lowers[{number}] is not on this machine and was not checked"));
            continue;
        };
        let named = || format!("{}: lowers[{number}]", path.display());
        check_file(&file, &[], notes).with_context(named)?;
        if let Some(digest) = &lower.digest {
            check_digest(&file, digest).with_context(named)?;
        }
        let (size, uuid) = (input::file(&file)?.size(), input::layer(&file).with_context(named)?.identity().uuid);
        if lower.size.is_some_and(|wanted| wanted != size) {
            bail!("{}: {} has {size} bytes, not {}", named(), file.display(), lower.size.unwrap_or_default());
        }
        if let Some(wanted) = lower.uuid.filter(|wanted| *wanted != uuid) {
            bail!("{}: {} has UUID {uuid}, not {wanted}", named(), file.display());
        }
    }
    if let Some(upper) = &config.upper {
        let files: Vec<PathBuf> = upper.index.iter().cloned().collect();
        let named = || format!("{}: upper", path.display());
        input::upper(&upper.data, upper.index.as_deref()).with_context(named)?;
        check_file(&upper.data, &files, notes).with_context(named)?;
    }
    Ok(())
}

fn read_all(source: &dyn Source, progress: &Progress) -> Result<()> {
    Ok(copy(source, &mut io::sink(), &mut progress.follow())?)
}
