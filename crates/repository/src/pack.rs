//! Compressing layers on their way into the repository.
//!
//! Raw layers become ZFiles, which are layers as well: whoever opens one need not know. They are compressed here and nowhere
//! else, so no machine waits for it. The same layer gives the same bytes on every node, whatever the number of workers.

use std::fs;
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_block_overlaybd::{Algorithm, LocalFile, Source, ZFileOptions, ZFileWriter, unwrap};
use tempfile::TempPath;

use crate::digest::{Digest, KnownDigests};

/// How layers are compressed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packing {
    /// The compressor.
    pub algorithm: Algorithm,
    /// Threads for each layer.
    pub workers: usize,
    /// Where compressed layers are until they are written to the store. What is left there is nobody's.
    pub dir: PathBuf,
}

/// A layer as it is published.
#[derive(Debug)]
pub(crate) struct Packed {
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    /// Compressed; what is known from before is not made again before it is needed.
    pub(crate) file: Option<TempPath>,
    /// It is not published as it is.
    pub(crate) compressed: bool,
}

/// Compresses the layer at `path`, unless it is known what becomes of it. Blocking.
pub(crate) fn pack(known: &KnownDigests, path: &Path, packing: &Packing) -> io::Result<Packed> {
    let identity = known.identity(path)?;
    if let Some((digest, size, compressed)) = known.packed(&identity, packing.algorithm) {
        return Ok(Packed { digest, size, file: None, compressed });
    }
    let packed = match compress(path, packing)? {
        None => {
            let (digest, size) = known.of_file(path)?;
            Packed { digest, size, file: None, compressed: false }
        }
        Some(file) => {
            let (digest, size) = known.of_file(&file)?;
            Packed { digest, size, file: Some(file), compressed: true }
        }
    };
    known.remember_packed(identity, packing.algorithm, (packed.digest.clone(), packed.size, packed.compressed));
    Ok(packed)
}

/// The layer at `path`, compressed. `None`: it is already, or is wrapped otherwise. Blocking.
pub(crate) fn compress(path: &Path, packing: &Packing) -> io::Result<Option<TempPath>> {
    let source: Arc<dyn Source> = Arc::new(LocalFile::open(path)?);
    match unwrap(Arc::clone(&source)) {
        Ok((_, packaging)) if packaging.tar.is_none() && packaging.zfile.is_none() => {}
        // What cannot be understood is published as it is.
        _ => return Ok(None),
    }
    fs::create_dir_all(&packing.dir)?;
    let file = tempfile::NamedTempFile::new_in(&packing.dir)?;
    let defaults = ZFileOptions::default();
    let options = ZFileOptions { algorithm: packing.algorithm, threads: packing.workers.max(1), ..defaults };
    let mut writer = ZFileWriter::new(BufWriter::with_capacity(1 << 20, file), options)?;
    writer.write_source(&source, &mut |_| true)?;
    let (out, _) = writer.finish_with_header()?;
    let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
    Ok(Some(file.into_temp_path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_compressed_once_and_alike_by_any_number_of_workers() {
        let dir = tempfile::tempdir().unwrap();
        let raw = dir.path().join("raw");
        fs::write(&raw, (0..3_000_000_u32).map(|n| (n / 1000) as u8).collect::<Vec<_>>()).unwrap();
        let packing = |workers, algorithm| Packing { algorithm, workers, dir: dir.path().join("packing") };
        for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
            let known = KnownDigests::default();
            let one = pack(&known, &raw, &packing(1, algorithm)).unwrap();
            let again = pack(&known, &raw, &packing(1, algorithm)).unwrap();
            let four = pack(&KnownDigests::default(), &raw, &packing(4, algorithm)).unwrap();
            assert!(one.compressed && one.size < 1_000_000, "{one:?}");
            assert!(again.file.is_none() && again.compressed);
            for other in [&again, &four] {
                assert_eq!((&other.digest, other.size), (&one.digest, one.size));
            }
            // What is compressed stays as it is.
            let zfile = one.file.unwrap();
            let packed = pack(&known, &zfile, &packing(1, algorithm)).unwrap();
            assert!(!packed.compressed && packed.file.is_none());
            assert_eq!((packed.digest, packed.size), (one.digest, one.size));
            let (payload, _) = unwrap(Arc::new(LocalFile::open(&zfile).unwrap())).unwrap();
            let mut bytes = vec![0; 3_000_000];
            payload.read_at(0, &mut bytes).unwrap();
            assert_eq!(bytes, fs::read(&raw).unwrap());
        }
        assert_eq!(fs::read_dir(dir.path().join("packing")).unwrap().count(), 0);
    }
}
