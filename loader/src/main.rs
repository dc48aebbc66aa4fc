//! `ork`: runs packs.
#![allow(
    clippy::print_stderr,
    reason = "a command line program talks to people on stderr"
)]

mod commands;

use clap::{Parser, Subcommand};
use commands::{chat, inspect, logits, ppl, run, selftest};
use std::process::ExitCode;

#[derive(Parser)]
#[command(version, about = "Runs .orkpack files")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Generate text
    Run(run::RunArgs),
    /// Talk with a model
    Chat(chat::ChatArgs),
    /// Write the logits of every prompt row, all through prefill
    Logits(logits::LogitsArgs),
    /// Perplexity over a text
    Ppl(ppl::PplArgs),
    /// Describe a pack
    Inspect(inspect::InspectArgs),
    /// Check a pack on this machine against the answers it carries
    Selftest(selftest::SelftestArgs),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Logits(args) => logits::run(&args),
        Command::Ppl(args) => ppl::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Selftest(args) => selftest::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ork: error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
