//! Imports an image from the command line, with a storage daemon that runs already:
//! `cargo run -p aenv-image --example import -- REFERENCE TARGET CACHE SOCKET`.

use std::path::Path;
use std::time::Instant;

use aenv_block_client::BlockdClient;
use aenv_image::{CacheConfig, ImageCache, Importer, ImporterConfig, Progress};
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [reference, target, cache, socket] = words.as_slice() else {
        return Err("usage: import REFERENCE TARGET CACHE SOCKET".into());
    };
    let cache = ImageCache::open(Path::new(cache), "example", CacheConfig::default())?;
    let importer = Importer::new(ImporterConfig::default(), cache, BlockdClient::new(socket));
    let begun = Instant::now();
    let tell = |step: Progress| eprintln!("{:>8.3} s  {step:?}", begun.elapsed().as_secs_f64());
    let (target, cancel) = (Path::new(target), CancellationToken::new());
    let imported = importer.import(&reference.parse()?, None, target, "example", &tell, cancel).await;
    let imported = imported.map_err(|error| error.report())?;
    println!("{:.3} s: {imported:#?}", begun.elapsed().as_secs_f64());
    Ok(())
}
