//! The files of a build: which there are, which of them are meant, and the archives that hold them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::{Context as _, bail};
use flate2::Compression;
use flate2::write::GzEncoder;
use globset::{GlobBuilder, GlobMatcher};
use sha2::{Digest as _, Sha256};

/// A directory, without what `.dockerignore` leaves out.
#[derive(Debug)]
pub(super) struct BuildContext {
    dir: PathBuf,
    ignored: Ignored,
}

/// What an archive holds, by path.
pub(super) type Layout = BTreeMap<String, Entry>;

/// One thing in an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Entry {
    /// File, directory or symlink as it is at this path.
    Local(PathBuf),
    /// A file with this content.
    Text(String),
}

/// An archive to be uploaded. The file is gone when it is dropped.
#[derive(Debug)]
pub(crate) struct Archive {
    /// Tells its content from every other, in hexadecimal.
    pub(crate) hash: String,
    /// At its beginning.
    pub(crate) file: File,
    pub(crate) length: u64,
}

impl BuildContext {
    /// `dockerfile` may have a `.dockerignore` of its own.
    pub(super) fn open(dir: &Path, dockerfile: &Path) -> anyhow::Result<Self> {
        let mut own = dockerfile.as_os_str().to_owned();
        own.push(".dockerignore");
        for path in [PathBuf::from(own), dir.join(".dockerignore")] {
            match fs::read_to_string(&path) {
                Ok(text) => {
                    let ignored = Ignored::parse(&text).with_context(|| format!("read {}", path.display()))?;
                    return Ok(Self { dir: dir.to_owned(), ignored });
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
            }
        }
        Ok(Self { dir: dir.to_owned(), ignored: Ignored::default() })
    }

    /// The paths, relative to the context, that a source of a `COPY` means. Errors: none, or outside.
    pub(super) fn sources(&self, source: &str) -> anyhow::Result<Vec<String>> {
        let mut parts = Vec::new();
        for part in source.split('/') {
            match part {
                "" | "." => {}
                ".." => bail!("{source} leads out of the context"),
                part => parts.push(part),
            }
        }
        let clean = parts.join("/");
        if !clean.contains(['*', '?', '[']) {
            let is_there = fs::symlink_metadata(self.dir.join(&clean)).is_ok();
            if !is_there || (!clean.is_empty() && self.ignored.covers(&clean) && self.below(&clean)?.is_empty()) {
                bail!("there is no {source} in the context, or .dockerignore leaves it out");
            }
            return Ok(vec![clean]);
        }
        let glob = glob(&clean)?;
        let found: Vec<_> = self.below("")?.into_iter().filter(|path| glob.is_match(path)).collect();
        if found.is_empty() {
            bail!("nothing in the context matches {source}, or .dockerignore leaves it out");
        }
        Ok(found)
    }

    /// Puts what is at `path` into a layout: a directory's content into `dir`, anything else under its name.
    pub(super) fn lay(&self, path: &str, dir: &str, layout: &mut Layout) -> anyhow::Result<()> {
        let full = self.dir.join(path);
        // A source that is a link, or lies behind one, stands for what that leads to: it has to be in the context, too, and none
        // of what is left out.
        let is_link = fs::symlink_metadata(&full).is_ok_and(|found| found.file_type().is_symlink());
        let root = self.dir.canonicalize().with_context(|| format!("find {}", self.dir.display()))?;
        let real = full.canonicalize().with_context(|| format!("follow the link {path}"))?;
        let Ok(inside) = real.strip_prefix(&root) else { bail!("the link {path} leads out of the context") };
        if inside != Path::new(path) && inside.to_str().is_none_or(|inside| self.ignored.covers(inside)) {
            bail!("the link {path} leads to what .dockerignore leaves out");
        }
        if !real.is_dir() {
            let name = path.rsplit('/').next().unwrap_or(path);
            layout.insert(format!("{dir}/{name}"), Entry::Local(real));
            return Ok(());
        }
        layout.entry(dir.to_owned()).or_insert(Entry::Local(real.clone()));
        if is_link {
            bail!("{path} is a link to a directory; name the directory itself");
        }
        for below in self.below(path)? {
            let relative = below.strip_prefix(path).unwrap_or(&below).trim_start_matches('/');
            layout.insert(format!("{dir}/{relative}"), Entry::Local(self.dir.join(&below)));
        }
        Ok(())
    }

    /// Everything in a directory of the context, sorted, directories before what is in them.
    fn below(&self, path: &str) -> anyhow::Result<Vec<String>> {
        let mut found = Vec::new();
        let mut dirs = vec![path.to_owned()];
        while let Some(dir) = dirs.pop() {
            let full = self.dir.join(&dir);
            if !fs::symlink_metadata(&full).is_ok_and(|found| found.is_dir()) {
                continue;
            }
            for entry in fs::read_dir(&full).with_context(|| format!("read the directory {}", full.display()))? {
                let entry = entry?;
                let name = entry.file_name();
                let name = name.to_str().with_context(|| format!("the name {name:?} is not UTF-8"))?;
                let path = if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") };
                let covered = self.ignored.covers(&path);
                if entry.file_type()?.is_dir() && (!covered || self.ignored.has_exceptions) {
                    dirs.push(path.clone());
                }
                if !covered {
                    found.push(path);
                }
            }
        }
        found.sort();
        Ok(found)
    }
}

/// The lines of a `.dockerignore`.
#[derive(Debug, Default)]
struct Ignored {
    /// In their order; whether each is an exception.
    rules: Vec<(GlobMatcher, bool)>,
    has_exceptions: bool,
}

impl Ignored {
    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut ignored = Self::default();
        for line in text.trim_start_matches('\u{feff}').lines() {
            let line = line.trim();
            let (exception, pattern) = match line.strip_prefix('!') {
                Some(pattern) => (true, pattern.trim()),
                None => (false, line),
            };
            let pattern: Vec<_> = pattern.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
            if line.starts_with('#') || pattern.is_empty() {
                continue;
            }
            ignored.rules.push((glob(&pattern.join("/"))?, exception));
            ignored.has_exceptions |= exception;
        }
        Ok(ignored)
    }

    /// Whether the last rule for a path, or for a directory that it is in, leaves it out.
    fn covers(&self, path: &str) -> bool {
        let applies = |glob: &GlobMatcher| {
            let mut ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
            ends.any(|end| glob.is_match(&path[..end]))
        };
        self.rules.iter().rev().find(|(glob, _)| applies(glob)).is_some_and(|(_, exception)| !exception)
    }
}

/// A pattern of Go's `filepath.Match`, with `**` for any number of directories.
fn glob(pattern: &str) -> anyhow::Result<GlobMatcher> {
    // Braces are nothing special there.
    let pattern = pattern.replace('{', "[{]").replace('}', "[}]");
    let glob = GlobBuilder::new(&pattern).literal_separator(true).backslash_escape(true).build();
    Ok(glob.with_context(|| format!("{pattern:?} is not a pattern"))?.compile_matcher())
}

/// Writes an archive. Its name says nothing of times and owners, so that the same files are the same archive.
pub(super) fn archive(layout: &Layout) -> anyhow::Result<Archive> {
    let mut hash = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    let file = tempfile::tempfile().context("make a temporary file for the build's files")?;
    let mut tar = tar::Builder::new(GzEncoder::new(file, Compression::fast()));
    for (name, entry) in layout {
        part(name.as_bytes());
        let mut header = tar::Header::new_gnu();
        let path = match entry {
            Entry::Text(text) => {
                part(b"text");
                part(text.as_bytes());
                header.set_mode(0o644);
                header.set_size(text.len() as u64);
                tar.append_data(&mut header, name, text.as_bytes())?;
                continue;
            }
            Entry::Local(path) => path,
        };
        let doing = || format!("read {}", path.display());
        let found = fs::symlink_metadata(path).with_context(doing)?;
        let mode = found.permissions().mode() & 0o7777;
        let modified = found.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        header.set_mtime(modified.map_or(0, |time| time.as_secs()));
        header.set_mode(mode);
        header.set_size(0);
        part(&mode.to_le_bytes());
        if found.is_dir() {
            part(b"directory");
            header.set_entry_type(tar::EntryType::Directory);
            tar.append_data(&mut header, name, io::empty())?;
        } else if found.file_type().is_symlink() {
            let target = fs::read_link(path).with_context(doing)?;
            part(b"link");
            part(target.as_os_str().as_encoded_bytes());
            header.set_entry_type(tar::EntryType::Symlink);
            tar.append_link(&mut header, name, &target)?;
        } else if found.is_file() {
            part(b"file");
            header.set_size(found.len());
            let mut content =
                Hashing { file: File::open(path).with_context(doing)?.take(found.len()), hash: Sha256::new() };
            tar.append_data(&mut header, name, &mut content).with_context(doing)?;
            if content.file.limit() > 0 {
                bail!("{} became shorter meanwhile", path.display());
            }
            part(&content.hash.finalize());
        } else {
            bail!("{} is neither a file nor a directory", path.display());
        }
    }
    let mut file = tar.into_inner()?.finish()?;
    let length = file.stream_position()?;
    file.rewind()?;
    Ok(Archive { hash: hex::encode(hash.finalize()), file, length })
}

/// Hashes what is read through it.
struct Hashing {
    file: io::Take<File>,
    hash: Sha256,
}

impl Read for Hashing {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(buffer)?;
        self.hash.update(&buffer[..n]);
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covered(rules: &str, path: &str) -> bool {
        Ignored::parse(rules).unwrap().covers(path)
    }

    #[test]
    fn the_last_rule_decides_and_directories_cover_what_is_in_them() {
        let rules = "# comment\n*.log\n/target/\n**/cache\n!important.log\n";
        for path in ["a.log", "target", "target/x/y", "a/b/cache/c", "cache"] {
            assert!(covered(rules, path), "{path}");
        }
        for path in ["important.log", "src/a.log", "src/target/x", "Dockerfile"] {
            assert!(!covered(rules, path), "{path}");
        }
        assert!(covered("*\n!src\n!src/**/*.rs", "README.md") && !covered("*\n!src", "src/lib.rs"));
        assert!(covered("a{b}", "a{b}") && !covered("a{b,c}", "ab"));
    }

    fn context(rules: &str) -> (tempfile::TempDir, BuildContext) {
        let dir = tempfile::tempdir().unwrap();
        for path in ["src/lib", "empty"] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        for path in ["a.txt", "b.txt", "c.md", "src/x.rs", "src/lib/y.rs"] {
            fs::write(dir.path().join(path), path).unwrap();
        }
        std::os::unix::fs::symlink("x.rs", dir.path().join("src/link")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("out")).unwrap();
        fs::write(dir.path().join(".dockerignore"), rules).unwrap();
        let context = BuildContext::open(dir.path(), &dir.path().join("Dockerfile")).unwrap();
        (dir, context)
    }

    #[test]
    fn sources_are_paths_or_patterns_in_the_context() {
        let (_dir, context) = context("*.md\nsrc/lib");
        assert_eq!(context.sources("./src/").unwrap(), ["src"]);
        assert_eq!(context.sources("*.txt").unwrap(), ["a.txt", "b.txt"]);
        assert_eq!(context.sources("s*/?.rs").unwrap(), ["src/x.rs"]);
        for bad in ["c.md", "none", "*.md", "../x", "src/lib", "src/lib/y.rs"] {
            assert!(context.sources(bad).is_err(), "{bad}");
        }
        let mut layout = Layout::new();
        context.lay("src", "d", &mut layout).unwrap();
        context.lay("a.txt", "d", &mut layout).unwrap();
        assert_eq!(layout.keys().collect::<Vec<_>>(), ["d", "d/a.txt", "d/link", "d/x.rs"]);
        assert!(context.lay("out", "d", &mut layout).unwrap_err().to_string().contains("leads out"));
    }

    #[test]
    fn no_link_leads_out_of_the_context_or_to_what_is_left_out() {
        let (dir, context) = context("src/lib");
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("key"), "private").unwrap();
        std::os::unix::fs::symlink(outside.path(), dir.path().join("away")).unwrap();
        std::os::unix::fs::symlink("src", dir.path().join("near")).unwrap();
        let lay = |path: &str| context.lay(path, "d", &mut Layout::new()).map_err(|error| error.to_string());
        assert!(lay("away/key").unwrap_err().contains("leads out"));
        assert!(lay("near/lib/y.rs").unwrap_err().contains(".dockerignore"));
        lay("near/x.rs").unwrap();
        lay("src/x.rs").unwrap();
    }

    #[test]
    fn an_archive_is_named_by_what_it_holds() {
        let (dir, context) = context("");
        let of = || {
            let mut layout = Layout::new();
            context.lay("", "d", &mut layout).unwrap();
            layout.insert("d/text".into(), Entry::Text("said".into()));
            archive(&layout).unwrap()
        };
        let first = of();
        assert_eq!(first.length, first.file.metadata().unwrap().len());
        File::options().append(true).open(dir.path().join("a.txt")).unwrap().set_modified(UNIX_EPOCH).unwrap();
        assert_eq!(of().hash, first.hash, "times do not count");
        let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(first.file));
        let names: Vec<_> =
            tar.entries().unwrap().map(|e| e.unwrap().path().unwrap().to_str().unwrap().to_owned()).collect();
        for name in ["d/src/lib/y.rs", "d/empty", "d/out", "d/text", "d/.dockerignore"] {
            assert!(names.iter().any(|found| found.trim_end_matches('/') == name), "{name}: {names:?}");
        }
        fs::write(dir.path().join("a.txt"), "other").unwrap();
        assert_ne!(of().hash, first.hash);
    }
}
