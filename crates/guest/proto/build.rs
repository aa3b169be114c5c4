//! Compiles the `.proto` files without a `protoc` binary: protox makes the descriptor set, connectrpc-build the code.

use std::error::Error;
use std::path::PathBuf;

use prost::Message as _;

const FILES: [&str; 2] = ["process/process.proto", "filesystem/filesystem.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = PathBuf::from(std::env::var("OUT_DIR")?).join("envd.desc");
    let set = protox::compile(FILES, ["proto"])?;
    std::fs::write(&descriptors, set.encode_to_vec())?;
    connectrpc_build::Config::new()
        .descriptor_set(&descriptors)
        .files(&FILES)
        .includes(&["proto"])
        .include_file("_connectrpc.rs")
        .emit_rerun_directives(false)
        .compile()?;
    Ok(())
}
