//! The `podring` command line, as a library so that the Python console script and the native binary share it.

mod bench;
mod compile;
mod coordinator;
mod doctor;
pub mod pod;
mod python;
mod run;
mod terminal;
mod topo;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// TPU collectives for PyTorch.
#[derive(Debug, Parser)]
#[command(name = "podring", version, about, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Bench(bench::Args),
    Coordinator(coordinator::Args),
    Compile(compile::Args),
    Doctor(doctor::Args),
    Run(run::Args),
    Topo(topo::Topo),
}

/// Runs the command line given in `args` (program name first) and returns the process exit code.
///
/// Usage errors and `--help`/`--version` are printed by clap with its own exit codes (2 and 0); a subcommand that
/// fails prints one error and gives 1.
pub fn main_with<I>(args: I) -> i32
where
    I: IntoIterator<Item = OsString>,
{
    match Cli::try_parse_from(args) {
        Ok(Cli { command: Some(command) }) => match command {
            Command::Bench(args) => exit_code(bench::run(args)),
            Command::Coordinator(args) => exit_code(coordinator::run(args)),
            Command::Compile(args) => exit_code(compile::run(args)),
            Command::Doctor(args) => exit_code(doctor::run(args)),
            Command::Run(args) => exit_code(run::run(args)),
            Command::Topo(topo) => topo.run(),
        },
        Ok(Cli { command: None }) => {
            terminal::out(&format!("podring {} (see podring --help)", env!("CARGO_PKG_VERSION")));
            0
        }
        Err(error) => {
            let _ = error.print();
            error.exit_code()
        }
    }
}

/// As [`main_with`], for a command that is a script of the Python interpreter `python`.
pub fn main_of<I>(python: PathBuf, args: I) -> i32
where
    I: IntoIterator<Item = OsString>,
{
    python::set_own(python);
    main_with(args)
}

fn exit_code<E: std::error::Error>(outcome: Result<i32, E>) -> i32 {
    outcome.unwrap_or_else(|error| {
        terminal::err(&format!("podring: {error}"));
        1
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn usage_errors_give_2_and_help_gives_0() {
        let code = |args: &[&str]| main_with(args.iter().map(OsString::from));
        assert_eq!(code(&["podring", "bench", "--ops", "all_reduec"]), 2);
        assert_eq!(code(&["podring", "bench", "--help"]), 0);
        assert_eq!(code(&["podring", "--version"]), 0);
    }
}
