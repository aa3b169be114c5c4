//! Provides a guest kit by hand: `cargo run -p aenv-guest-kit --example provision -- AGENT DIR [KERNEL [MODULES]]`.

use std::path::PathBuf;
use std::process::ExitCode;

use aenv_guest_kit::{KitConfig, provision};

#[tokio::main]
async fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(agent), Some(dir)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: provision AGENT DIR [KERNEL [MODULES]]");
        return ExitCode::FAILURE;
    };
    let config = KitConfig {
        dir: dir.join("guest"),
        cache_dir: dir.join("cache"),
        agent,
        kernel_image: arguments.next(),
        modules_dir: arguments.next(),
    };
    match provision(&config, &|line| println!("{line}")).await {
        Ok(kit) => {
            println!("{kit:#?}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            let mut cause = std::error::Error::source(&error);
            while let Some(why) = cause {
                eprintln!("  because: {why}");
                cause = why.source();
            }
            ExitCode::FAILURE
        }
    }
}
