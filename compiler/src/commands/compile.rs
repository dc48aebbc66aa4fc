//! `orkc compile`

use super::{io, print, warn};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ork_compiler::checkpoint::hub;
use ork_compiler::compile::{Options, compile};
use ork_compiler::error::Result;
use ork_compiler::place::{Decode, Experts, Scheme};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

#[derive(Args)]
pub(crate) struct CompileArgs {
    /// Checkpoint directory, or `org/name[@revision]` in the Hub's local cache
    checkpoint: PathBuf,
    /// Pack to write
    #[arg(short, long)]
    output: PathBuf,
    /// Target SoC
    #[arg(long, default_value = ork_caps::DEFAULT.name)]
    soc: String,
    /// Compile for a SoC whose limits nobody has checked on silicon
    #[arg(long)]
    allow_unvalidated: bool,
    /// Rows of a prefill chunk [default: the SoC's]
    #[arg(long)]
    chunk: Option<u32>,
    /// NPU cores [default: all of the SoC]
    #[arg(long)]
    cores: Option<u32>,
    /// Keep the source floats and stay off the NPU
    #[arg(long)]
    lossless: bool,
    /// Form of the matrices for decode
    #[arg(long, value_enum, default_value = "int4", conflicts_with = "lossless")]
    decode: DecodeArg,
    /// What prefill multiplies routed experts with
    #[arg(long, value_enum, default_value = "int8", conflicts_with = "lossless")]
    expert_prefill: ExpertArg,
    /// Refuse a compile that would need more memory, in MiB
    #[arg(long, value_name = "MIB")]
    max_ram: Option<u64>,
    /// Threads; never changes the result [default: one per CPU]
    #[arg(long)]
    jobs: Option<usize>,
    /// Replace an existing pack
    #[arg(long)]
    force: bool,
    /// Print the summary as JSON
    #[arg(long)]
    json: bool,
    /// No progress, no summary
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum DecodeArg {
    /// 4-bit groups of 32, 4.5 bits a weight
    Int4,
    /// int8 rows, better and twice as large
    Int8,
}

#[derive(Clone, Copy, ValueEnum)]
enum ExpertArg {
    /// An int8 copy of every expert
    Int8,
    /// Decode's form alone: a smaller pack, a slower prompt
    Int4,
}

/// A first SIGINT or SIGTERM stops the compile between two tensors and leaves nothing behind; a second
/// one ends the process as usual.
fn stop_on_signals() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_default(signal, Arc::clone(&stop))
            .and_then(|_| flag::register(signal, Arc::clone(&stop)))
            .map_err(io(Path::new("signal handler")))?;
    }
    Ok(stop)
}

pub(crate) fn run(args: CompileArgs) -> Result<()> {
    let report = compile(&Options {
        checkpoint: hub::resolve(&args.checkpoint)?,
        output: args.output,
        soc: args.soc,
        allow_unvalidated: args.allow_unvalidated,
        chunk: args.chunk,
        cores: args.cores,
        scheme: match (args.lossless, args.decode) {
            (true, _) => Scheme::Lossless,
            (false, DecodeArg::Int4) => Scheme::Quantised(Decode::Int4),
            (false, DecodeArg::Int8) => Scheme::Quantised(Decode::Int8),
        },
        experts: match args.expert_prefill {
            ExpertArg::Int8 => Experts::Int8,
            ExpertArg::Int4 => Experts::Decode,
        },
        max_ram: args.max_ram.map(|mib| mib << 20),
        jobs: args.jobs,
        force: args.force,
        progress: progress(args.quiet),
        stop: stop_on_signals()?,
    })?;
    for warning in &report.warnings {
        warn(warning);
    }
    if args.quiet && !args.json {
        return Ok(());
    }
    print(&report, args.json)
}

/// A bar on stderr, only where somebody watches.
fn progress(quiet: bool) -> ProgressBar {
    if quiet || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes} {eta}")
        .expect("the template is constant");
    ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()).with_style(style)
}
