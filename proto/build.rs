//! Compiles `proto/baton/v1/*.proto` with protox, so that no `protoc` has to be installed.

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = PathBuf::from("proto");
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(["baton/v1/baton.proto"], [&root])?;
    let descriptor = PathBuf::from(std::env::var("OUT_DIR")?).join("baton.bin");
    std::fs::write(&descriptor, prost::Message::encode_to_vec(&files))?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
