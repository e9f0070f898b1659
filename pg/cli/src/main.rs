//! Native entry point of the `podring` command.

fn main() {
    std::process::exit(podring_cli::main_with(std::env::args_os()));
}
