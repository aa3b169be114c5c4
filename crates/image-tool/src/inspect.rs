//! `inspect`: what a file is.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use aenv_block_device::BlockDevice as _;
use aenv_block_overlaybd::{Coverage, Inspected, Inspection, Layer, Mapping, Mode, SECTOR, Source, inspect};
use aenv_model::Bytes;
use anyhow::{Context as _, Result};
use serde::Serialize;
use uuid::Uuid;

use crate::input::{self, Opened};
use crate::packing::sha256;
use crate::{config, describe, report};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Layers, files of uppers, ZFiles or image configs. An upper's data file is told more of beside its index file.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// List what is mapped where.
    #[arg(long)]
    extents: bool,
    /// Leave out the SHA-256 of each file, for which all of it is read.
    #[arg(long)]
    no_digest: bool,
    /// One JSON object a file, each in a line.
    #[arg(long)]
    json: bool,
}

/// What is told of a file.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Told {
    File(Box<FileTold>),
    Config(Box<ConfigTold>),
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct FileTold {
    #[serde(flatten)]
    pub(crate) inspection: Inspection,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) digest: Option<String>,
    /// What an upper maps, if all of its files are there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) upper: Option<Coverage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) extents: Option<Vec<Extent>>,
}

/// A stretch of the device.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Extent {
    /// First byte of the device.
    pub(crate) offset: u64,
    pub(crate) length: u64,
    /// Where its data is, in bytes of the LSMT file; none for zeros.
    pub(crate) position: Option<u64>,
    /// Which layer has it, in a stack: 0 is the topmost.
    pub(crate) layer: u8,
}

impl From<Mapping> for Extent {
    fn from(entry: Mapping) -> Self {
        Self {
            offset: entry.offset() * SECTOR,
            length: entry.length() * SECTOR,
            position: (!entry.is_zeroed()).then(|| entry.position() * SECTOR),
            layer: entry.tag(),
        }
    }
}

/// What is told of an image config.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ConfigTold {
    pub(crate) file: String,
    pub(crate) size: Bytes,
    pub(crate) content: ConfigContent,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) extents: Option<Vec<Extent>>,
}

#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename = "imageConfig", rename_all = "camelCase")]
pub(crate) struct ConfigContent {
    /// Layers, the upper not counted.
    pub(crate) depth: usize,
    /// The device as a whole, if all of its files are on this machine.
    pub(crate) device: Option<DeviceTold>,
    pub(crate) lowers: Vec<LowerTold>,
    pub(crate) upper: Option<UpperTold>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DeviceTold {
    pub(crate) virtual_size: Bytes,
    #[serde(flatten)]
    pub(crate) coverage: Coverage,
    /// The lowest layer that does not name the one below it as its parent.
    pub(crate) broken_parent: Option<usize>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LowerTold {
    /// None if it is not on this machine.
    pub(crate) file: Option<PathBuf>,
    pub(crate) digest: Option<String>,
    pub(crate) url: Option<String>,
    pub(crate) inspection: Option<Inspection>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct UpperTold {
    pub(crate) mode: Mode,
    pub(crate) data: PathBuf,
    pub(crate) index: Option<PathBuf>,
    pub(crate) uuid: Uuid,
    #[serde(flatten)]
    pub(crate) coverage: Coverage,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for (number, path) in args.files.iter().enumerate() {
        match tell(path, args) {
            Ok(told) if args.json => report::print_json(&told)?,
            Ok(told) => {
                let gap = if number > 0 { "\n" } else { "" };
                report::print(&format!("{gap}{}", describe::text(&told)))?;
            }
            Err(error) => code = report::failure(&error),
        }
    }
    Ok(code)
}

fn tell(path: &Path, args: &Args) -> Result<Told> {
    if config::is_config(path)? {
        return Ok(Told::Config(Box::new(tell_config(path, args)?)));
    }
    let source = input::file(path)?;
    let inspection = inspect(Arc::clone(&source))?;
    let upper = match &inspection.content {
        Inspected::UpperData { mode: Mode::Sparse, .. } => Some(input::upper(path, None)?.to_layer()),
        Inspected::UpperData { header, .. } => match index_of(header.uuid, &args.files) {
            Some(index) => Some(input::upper(path, Some(index))?.to_layer()),
            None => None,
        },
        _ => None,
    };
    let extents = args.extents.then(|| match (&upper, &inspection.content) {
        (Some(layer), _) => Ok(Some(extents(layer.index().entries()))),
        (None, Inspected::Layer { .. }) => Ok(Some(extents(Layer::open(Arc::clone(&source))?.index().entries()))),
        _ => anyhow::Ok(None),
    });
    Ok(Told::File(Box::new(FileTold {
        digest: digest(&*source, args)?,
        upper: upper.map(|layer| Coverage::of(layer.index().entries().iter().copied())),
        extents: extents.transpose()?.flatten(),
        inspection,
    })))
}

fn tell_config(path: &Path, args: &Args) -> Result<ConfigTold> {
    let config = config::load(path)?;
    let mut lowers = Vec::new();
    for lower in config.layers() {
        let file = config::local(lower);
        let inspection = match &file {
            Some(file) => Some(inspect(input::file(file)?).with_context(|| path.display().to_string())?),
            None => None,
        };
        let url = config.blob_url(lower).map(str::to_owned);
        lowers.push(LowerTold { file, digest: lower.digest.clone(), url, inspection });
    }
    let complete = lowers.iter().all(|lower| lower.file.is_some());
    let opened = if complete { Some(config::open(path)?) } else { None };
    let stack = opened.as_ref().map(Opened::stack).transpose()?;
    let upper = match &config.upper {
        None => None,
        Some(of) => {
            let upper = input::upper(&of.data, of.index.as_deref())?;
            Some(UpperTold {
                mode: upper.mode(),
                data: of.data.clone(),
                index: of.index.clone(),
                uuid: upper.identity().uuid,
                coverage: Coverage::of(upper.to_layer().index().entries().iter().copied()),
            })
        }
    };
    let device = stack.as_ref().map(|stack| DeviceTold {
        virtual_size: stack.size(),
        coverage: Coverage::of(stack.index().entries().iter().copied()),
        broken_parent: stack.broken_parent(),
    });
    let source = input::file(path)?;
    Ok(ConfigTold {
        file: path.display().to_string(),
        size: Bytes(source.size()),
        content: ConfigContent { depth: lowers.len(), device, lowers, upper },
        extents: stack.filter(|_| args.extents).map(|stack| extents(stack.index().entries())),
    })
}

/// Among `files`, the index file of the upper with this UUID.
pub(crate) fn index_of(uuid: Uuid, files: &[PathBuf]) -> Option<&Path> {
    let is_it = |path: &&PathBuf| {
        let inspected = input::file(path).ok().and_then(|source| inspect(source).ok());
        matches!(inspected.map(|found| found.content), Some(Inspected::UpperIndex { header, .. }) if header.uuid == uuid)
    };
    files.iter().find(is_it).map(PathBuf::as_path)
}

fn digest(source: &dyn Source, args: &Args) -> Result<Option<String>> {
    if args.no_digest { Ok(None) } else { sha256(source).map(Some) }
}

fn extents(entries: &[Mapping]) -> Vec<Extent> {
    entries.iter().copied().map(Extent::from).collect()
}
