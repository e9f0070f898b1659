//! The `podring` command line, as a library so that the Python console script and the native binary share it.

use std::ffi::OsString;

use clap::{Parser, Subcommand};

pub mod topo;

/// TPU collectives for PyTorch.
#[derive(Debug, Parser)]
#[command(name = "podring", version, about, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Topo(topo::Topo),
}

/// Runs the command line given in `args` (program name first) and returns the process exit code.
///
/// Usage errors and `--help`/`--version` are printed by clap with its own exit codes (2 and 0).
pub fn main_with<I>(args: I) -> i32
where
    I: IntoIterator<Item = OsString>,
{
    match Cli::try_parse_from(args) {
        Ok(Cli { command: Some(command) }) => match command {
            Command::Topo(topo) => topo.run(),
        },
        Ok(Cli { command: None }) => {
            println!("podring {} (see podring --help)", env!("CARGO_PKG_VERSION"));
            0
        }
        Err(error) => {
            let _ = error.print();
            error.exit_code()
        }
    }
}
