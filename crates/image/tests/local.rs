//! Imports from layout folders and archives, down to the file system.

mod common;

use std::sync::Mutex;

use aenv_image::{ImportErrorKind, Importer, Progress};
use common::{Bench, Ext4, Image, Tar, gzip, root, sha256};
use tar::EntryType;
use tokio_util::sync::CancellationToken;

fn two_layers() -> Image {
    let mut lower = Tar::default();
    lower.dir("./").dir("bin/").file("bin/hello", b"old").file("etc/gone", b"x").dir("srv/").file("srv/a", b"a");
    let mut upper = Tar::default();
    upper.file("bin/hello", b"new").file("etc/.wh.gone", b"").file("srv/b", b"b").file("srv/.wh..wh..opq", b"");
    Image::of([lower.finish(), upper.finish()])
}

#[tokio::test]
async fn a_layout_becomes_a_root_file_system() {
    if !root() {
        return;
    }
    let bench = Bench::new();
    let layout = bench.dir.path().join("layout");
    two_layers().write_layout(&layout, "v1");
    let seen = Mutex::new(Vec::new());
    let tell = |step: Progress| seen.lock().unwrap().push(step);
    let imported =
        bench.import_with(&format!("oci:{}:v1", layout.display()), &tell, CancellationToken::new()).await.unwrap();
    assert_eq!(imported.config.env, ["PATH=/bin"]);
    assert_eq!(imported.config.user.as_deref(), Some("me"));
    assert!(imported.digest.starts_with("sha256:"));
    assert_eq!(std::fs::metadata(bench.target()).unwrap().len(), imported.size.get());
    let ext4 = Ext4(bench.target());
    ext4.assert_clean();
    assert_eq!(ext4.cat("/bin/hello"), b"new");
    assert!(!ext4.exists("/etc/gone"));
    assert!(!ext4.exists("/srv/a"));
    assert_eq!(ext4.cat("/srv/b"), b"b");
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen.first(), Some(&Progress::Resolving));
    assert_eq!(seen.last(), Some(&Progress::Building));
    assert!(seen.iter().any(|step| matches!(step, Progress::Unpacking { index: 1, total: 2, .. })), "{seen:?}");
    assert_eq!(bench.leftovers(), [] as [std::path::PathBuf; 0]);
}
