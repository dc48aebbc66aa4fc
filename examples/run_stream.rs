//! Runs a command stream in the simulator over memory given on the command line.
//!
//! `cargo run --release --example run_stream -- --load regcmd.bin@0x40000000 --load a.bin@0x10000000
//! --load weights.bin@0x20000000 --zero 0x30000000:4096 --regcmd 0x40000000 --entries 112
//! --dump 0x30000000:4096=c.bin`
//!
//! Exit code 3 on any access outside the given memory, 1 on any other fault, 2 on bad usage.
#![allow(clippy::print_stderr, reason = "an example reports failures on stderr")]

use clap::Parser;
use ork_sim::{Fault, Memory};
use std::ffi::OsString;
use std::process::ExitCode;

#[derive(Parser)]
struct Cli {
    /// Map a file: FILE@ADDR
    #[arg(long, value_name = "FILE@ADDR")]
    load: Vec<String>,
    /// Map zeros: ADDR:SIZE
    #[arg(long, value_name = "ADDR:SIZE")]
    zero: Vec<String>,
    /// Address of the first program
    #[arg(long, value_parser = number)]
    regcmd: u32,
    /// 64-bit words of the first program
    #[arg(long, value_parser = number)]
    entries: u32,
    /// Linked programs to run
    #[arg(long, default_value_t = 1)]
    tasks: u32,
    /// Write memory to a file afterwards: ADDR:SIZE=FILE
    #[arg(long, value_name = "ADDR:SIZE=FILE")]
    dump: Vec<String>,
    /// SoC whose buffer limits apply
    #[arg(long, default_value = ork_caps::DEFAULT.name)]
    soc: String,
}

/// Decimal, or hexadecimal after 0x.
fn number(text: &str) -> Result<u32, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(&hex.replace('_', ""), 16),
        None => text.parse(),
    };
    parsed.map_err(|e| format!("{text}: {e}"))
}

fn pair<'a>(text: &'a str, separator: char, form: &str) -> Result<(&'a str, &'a str), String> {
    text.rsplit_once(separator)
        .ok_or_else(|| format!("{text}: expected {form}"))
}

enum Failure {
    Usage(String),
    Fault(Fault),
}

impl From<String> for Failure {
    fn from(text: String) -> Self {
        Self::Usage(text)
    }
}

fn main() -> ExitCode {
    ExitCode::from(execute(std::env::args_os()))
}

/// Runs the command line `args`, program name first; returns the exit code.
pub fn execute<T: Into<OsString> + Clone>(args: impl IntoIterator<Item = T>) -> u8 {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(e) => {
            // Help and usage errors alike; a closed stderr changes nothing.
            let _ = e.print();
            return e.exit_code() as u8;
        }
    };
    match run(&cli) {
        Ok(()) => 0,
        Err(Failure::Usage(text)) => {
            eprintln!("run_stream: {text}");
            2
        }
        Err(Failure::Fault(fault)) => {
            eprintln!("run_stream: {fault}");
            match fault {
                Fault::Unmapped { .. } | Fault::ReadOnly { .. } => 3,
                _ => 1,
            }
        }
    }
}

fn run(cli: &Cli) -> Result<(), Failure> {
    let caps = ork_caps::find(&cli.soc).ok_or_else(|| format!("unknown SoC {}", cli.soc))?;
    let mut areas: Vec<(u32, Vec<u8>)> = Vec::new();
    for text in &cli.load {
        let (file, at) = pair(text, '@', "FILE@ADDR")?;
        let bytes = std::fs::read(file).map_err(|e| format!("{file}: {e}"))?;
        areas.push((number(at)?, bytes));
    }
    for text in &cli.zero {
        let (at, size) = pair(text, ':', "ADDR:SIZE")?;
        areas.push((number(at)?, vec![0; number(size)? as usize]));
    }
    check_areas(&mut areas)?;
    let mut memory = Memory::new();
    for (at, bytes) in &mut areas {
        memory.map(*at, bytes, true);
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    ork_sim::run(
        &mut memory,
        cli.regcmd,
        cli.entries,
        cli.tasks,
        caps,
        threads,
    )
    .map_err(Failure::Fault)?;
    for text in &cli.dump {
        let (range, file) = pair(text, '=', "ADDR:SIZE=FILE")?;
        let (at, size) = pair(range, ':', "ADDR:SIZE=FILE")?;
        let bytes = memory
            .read(number(at)?, u64::from(number(size)?))
            .map_err(Failure::Fault)?;
        std::fs::write(file, bytes).map_err(|e| format!("{file}: {e}"))?;
    }
    Ok(())
}

/// Areas must lie below 4 GiB and apart.
fn check_areas(areas: &mut [(u32, Vec<u8>)]) -> Result<(), String> {
    areas.sort_by_key(|(at, _)| *at);
    let mut end = 0u64;
    for (at, bytes) in areas.iter() {
        if u64::from(*at) < end {
            return Err(format!("the area at {at:#x} overlaps the one before it"));
        }
        end = u64::from(*at) + bytes.len() as u64;
        if 1 << 32 < end {
            return Err(format!("the area at {at:#x} passes 4 GiB"));
        }
    }
    Ok(())
}
