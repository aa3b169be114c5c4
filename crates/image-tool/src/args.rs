//! The command line.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::error::ErrorKind;
use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::output::Output;
use crate::{commit, compact, config, convert, export, inspect, verify};

/// Look into overlaybd layers, check them, and make new ones of them.
#[derive(Debug, Parser)]
#[command(name = "aenv-image", version, subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Tell what files are: layers, uppers, ZFiles, image configs.
    Inspect(inspect::Args),
    /// Read all of each file and check everything that can be checked.
    Verify(verify::Args),
    /// Write a whole virtual device as a sparse file.
    #[command(override_usage = "aenv-image export --lower FILE... [--upper DATA [INDEX]] [OPTIONS] OUT\n       \
                                aenv-image export --config IMAGE.JSON [OPTIONS] OUT")]
    Export(export::Args),
    /// Write what an upper holds as a layer.
    #[command(override_usage = "aenv-image commit --upper DATA [INDEX] [--lower FILE...] [OPTIONS] OUT\n       \
                                aenv-image commit --config IMAGE.JSON [OPTIONS] OUT")]
    Commit(commit::Args),
    /// Write a stack of layers as one.
    #[command(override_usage = "aenv-image compact --lower FILE... [--upper DATA [INDEX]] [OPTIONS] OUT\n       \
                                aenv-image compact --config IMAGE.JSON [OPTIONS] OUT")]
    Compact(compact::Args),
    /// Convert an image of files to layers, or to a native image.
    Convert(convert::Args),
    /// Serve the devices of a conversion, to the process that started this one.
    #[command(hide = true)]
    ServeConversion(convert::DaemonArgs),
}

/// What a device is made of, and where to write.
#[derive(Debug, clap::Args)]
pub(crate) struct Layers {
    /// Layers, the bottom one first.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) lower: Vec<PathBuf>,
    /// The upper: its data file and, unless it is sparse, its index file. Nobody may write to it meanwhile.
    #[arg(long, value_names = ["DATA", "INDEX"], num_args = 1..=2)]
    upper: Vec<PathBuf>,
    /// An image config that names the layers, and the upper if there is one.
    #[arg(long, value_name = "IMAGE.JSON", conflicts_with_all = ["lower", "upper"])]
    pub(crate) config: Option<PathBuf>,
    /// The file to write.
    out: Option<PathBuf>,
    /// Replace OUT if it exists.
    #[arg(long)]
    pub(crate) force: bool,
}

impl Layers {
    /// The file to write.
    pub(crate) fn out(&self) -> &Path {
        self.out.as_deref().unwrap_or(Path::new("")) // seen to while parsing
    }

    /// Begins a file that does not hold all that those hold that are read.
    ///
    /// Errors: it is one of them, whatever it is called and also with `--force`.
    pub(crate) fn lesser_output(&self) -> Result<Output> {
        let identity = |path: &Path| path.metadata().ok().map(|file| (file.dev(), file.ino()));
        let named = self.lower.iter().chain(&self.upper).chain(&self.config).map(PathBuf::as_path);
        let config = self.config.as_deref().map(config::load).transpose()?;
        let mut inputs: Vec<_> = named.map(Path::to_owned).collect();
        for config in config.iter() {
            inputs.extend(config.layers().iter().filter_map(config::local));
            inputs.extend(config.upper.iter().flat_map(|upper| upper.index.iter().chain([&upper.data])).cloned());
        }
        if let Some(out) = identity(self.out())
            && let Some(input) = inputs.iter().find(|input| identity(input) == Some(out))
        {
            bail!("{} is read: it cannot be replaced by what is made of it", input.display());
        }
        Output::create(self.out(), self.force)
    }

    /// Data and index file of the upper.
    pub(crate) fn upper(&self) -> Option<(&Path, Option<&Path>)> {
        let (data, index) = self.upper.split_first()?;
        Some((data, index.first().map(PathBuf::as_path)))
    }

    /// `--lower A B OUT` and `--upper DATA OUT` give OUT to the list before it; this takes it back.
    fn take_out(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        if self.out.is_none() {
            let last = |id| matches.indices_of(id).and_then(Iterator::last);
            let list = if last("upper") > last("lower") { &mut self.upper } else { &mut self.lower };
            self.out = list.pop();
        }
        let missing = |what| clap::Error::raw(ErrorKind::MissingRequiredArgument, format!("{what} is missing\n"));
        if self.out.is_none() {
            return Err(missing("OUT"));
        }
        if self.lower.is_empty() && self.upper.is_empty() && self.config.is_none() {
            return Err(missing("--lower, --upper or --config (or OUT after them)"));
        }
        Ok(())
    }
}

impl Arguments {
    /// Parses what this process was given; ends it with code 2 and the usage if that makes no sense.
    pub(crate) fn from_command_line() -> Self {
        Self::parse_args(std::env::args_os()).unwrap_or_else(|error| error.exit())
    }

    fn parse_args(args: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let mut command = Self::command();
        let matches = command.try_get_matches_from_mut(args)?;
        let mut arguments = Self::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
        if let (Some(layers), Some((name, matches))) = (arguments.verb.layers(), matches.subcommand()) {
            let verb = command.find_subcommand_mut(name);
            layers.take_out(matches).map_err(|error| match verb {
                Some(verb) => error.with_cmd(verb),
                None => error,
            })?;
        }
        Ok(arguments)
    }
}

impl Verb {
    fn layers(&mut self) -> Option<&mut Layers> {
        match self {
            Self::Inspect(_) | Self::Verify(_) | Self::Convert(_) | Self::ServeConversion(_) => None,
            Self::Export(args) => Some(&mut args.layers),
            Self::Commit(args) => Some(&mut args.layers),
            Self::Compact(args) => Some(&mut args.layers),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(line: &str) -> Result<(String, String, String), ErrorKind> {
        let args = ["aenv-image"].into_iter().chain(line.split(' ')).map(OsString::from);
        let mut arguments = Arguments::parse_args(args).map_err(|error| error.kind())?;
        let layers = arguments.verb.layers().expect("a verb with layers");
        let text =
            |paths: &[PathBuf]| paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" ");
        Ok((text(&layers.lower), text(&layers.upper), layers.out().display().to_string()))
    }

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn out_is_found_behind_any_list() {
        let is = |line, lower: &str, upper: &str| {
            assert_eq!(layers(line), Ok((lower.to_owned(), upper.to_owned(), "OUT".to_owned())), "{line}");
        };
        is("export --lower a b OUT", "a b", "");
        is("export --lower a --lower b -- OUT", "a b", "");
        is("export OUT --lower a b", "a b", "");
        is("export --lower a b --upper d i OUT", "a b", "d i");
        is("export --upper d i --lower a OUT", "a", "d i");
        is("export --lower a --upper d OUT", "a", "d");
        is("commit --upper d i OUT --zfile lz4", "", "d i");
        is("compact --lower a OUT --force", "a", "");
        is("compact --config c OUT", "", "");
    }

    #[test]
    fn what_is_missing_is_a_mistake_in_usage() {
        for line in ["export", "export OUT", "export --lower OUT", "commit --config c"] {
            assert_eq!(layers(line), Err(ErrorKind::MissingRequiredArgument), "{line}");
        }
        assert_eq!(layers("export --config c --lower a OUT"), Err(ErrorKind::ArgumentConflict));
    }
}
