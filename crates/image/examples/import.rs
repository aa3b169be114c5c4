//! Imports an image from the command line: `cargo run -p aenv-image --example import -- REFERENCE TARGET [WORK_DIR]`.

use std::path::Path;
use std::time::Instant;

use aenv_image::{Importer, ImporterConfig, Progress};
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (reference, target, work_dir) = match words.as_slice() {
        [reference, target] => (reference, target, "/var/tmp/aenv-image-example"),
        [reference, target, work_dir] => (reference, target, work_dir.as_str()),
        _ => return Err("usage: import REFERENCE TARGET [WORK_DIR]".into()),
    };
    let importer = Importer::new(ImporterConfig::new(work_dir));
    let begun = Instant::now();
    let tell = |step: Progress| eprintln!("{:>8.3} s  {step:?}", begun.elapsed().as_secs_f64());
    let cancel = CancellationToken::new();
    let imported =
        importer.import(&reference.parse()?, None, Path::new(target), &tell, cancel).await.map_err(|e| e.report())?;
    println!("{:.3} s: {imported:#?}", begun.elapsed().as_secs_f64());
    Ok(())
}
