//! Compiles `podring.proto` in Rust: no protoc is needed.

use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let root = Path::new("proto");
    let files = protox::compile([root.join("podring/podring.proto")], [root])?;
    let mut prost = prost_build::Config::new();
    prost.enable_type_names();
    // Shared, not copied, between the streams of all hosts.
    prost.bytes([".podring.JoinEvent"]);
    tonic_prost_build::configure().compile_fds_with_config(files, prost)?;
    Ok(())
}
