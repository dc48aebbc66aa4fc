//! `orkc`: compiles checkpoints into packs.
#![allow(
    clippy::print_stderr,
    reason = "a command line program fails on stderr"
)]

mod commands;

use clap::{Parser, Subcommand};
use commands::{caps, compile, inspect, reference, verify};
use std::process::ExitCode;

#[derive(Parser)]
#[command(version, about = "Compiles MLX checkpoints into .orkpack files")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compile a checkpoint
    Compile(compile::CompileArgs),
    /// Describe a pack, its programs, or one program
    Inspect(inspect::InspectArgs),
    /// Hash a whole pack, and compare it with its checkpoint
    Verify(verify::VerifyArgs),
    /// The SoCs and their limits
    #[command(subcommand)]
    Caps(caps::CapsCommand),
    /// Write the logits of a plain f32 forward pass
    Reference(reference::ReferenceArgs),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Compile(args) => compile::run(args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Caps(command) => caps::run(&command),
        Command::Reference(args) => reference::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("orkc: error: {e}");
            ExitCode::from(e.exit_code())
        }
    }
}
